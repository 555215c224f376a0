"""Group membership as one peer sees it: known peers, which of them are alive, and to whom to keep links.

A signed record is a hint, a heartbeat is proof, and silence is suspicion. A peer is *live* while a link to it
exists and something was received from it within `SILENT_SECONDS`. A lost link or silence ends that at once,
and the record stays as an address to try again. Records are free to make. A peer that was reached is
therefore not displaced by peers that were not. The number of records says little about the size of a group,
and dial_budget.py limits how many of them are dialled. All times are in seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from heapq import nsmallest
from random import Random

from swarmnet.backoff import doubled
from swarmnet.identifiers import PeerId
from swarmnet.membership.address_ranges import public_ranges
from swarmnet.membership.dial_budget import DialBudget
from swarmnet.membership.guests import Guests
from swarmnet.membership.overlay import (
    FULL_GROUP,
    RINGS,
    choose_neighbours,
    choose_some,
    choose_spread,
    size_by_neighbours,
)

BEAT_SECONDS = 1.0
"""Interval of heartbeats."""
SILENT_SECONDS = 4.0
"""A frozen peer is noticed after this time. The network needs 39 s or never does (hivemind 1.1.12)."""
FIRST_REDIAL_SECONDS = 0.5
LONGEST_REDIAL_SECONDS = 8.0
"""Longest pause before a lost peer is dialled again. libp2p's own dial back-off grows with attempts, so
frequent retries take longer after a partition."""
FORGET_SECONDS = 600.0
"""A peer that is not linked is forgotten this long after its last record or heartbeat."""
MAX_ADJACENT = 32
"""Most links to each adjacent stage: enough to choose from for any size of stage."""
GONE_FAILURES = 2
"""Failed dials after which other peers replace a peer among the neighbours. Its record outlives it."""
RELEASE_SECONDS = 10.0
"""A link that neither side needs is kept this long, so that records settle and messages arrive."""
SEEK_SECONDS = 4.0
"""If no active peer of this group is linked for this long, other known peers are dialled: the present
neighbours may be Sybils (eclipse attack). A group that is starting becomes active sooner."""
MAX_TELLERS = 4
"""Sources of a peer's record that are remembered: one of them that was reached is enough."""
FEWEST_ON_RINGS = RINGS + 1
"""A group is large only if this many of its peers were reached. In groups of twelve or more, 95 of 100 peers
have as many ring neighbours (counted). The same peer is often a neighbour on several rings."""
MANY = 256
"""Known peers beyond which choosing neighbours takes milliseconds, and not every record triggers it."""
MAX_PEERS = 4096
"""Most known peers, as keys are free. Beyond it, peers that are not linked are forgotten (`_make_room`)."""
FORGOTTEN_AT_ONCE = MAX_PEERS // 16
"""Peers forgotten at a time, since finding many takes as long as finding one."""
NO_RANGE = frozenset({""})
"""Address ranges of a peer without a public address."""


@dataclass(slots=True)
class PeerInfo:
    """What is known of another peer. `sequence` orders its records; `ready`: it takes part in its stage."""

    stage: int
    role: str
    addresses: tuple[str, ...]
    sequence: int
    record: bytes
    recorded_at: float
    heard_at: float = float("-inf")
    linked: bool = False
    ready: bool = False
    round: int = 0
    service_seconds: float = 0.0
    moving_to: int = -1
    """The stage to which it has announced to move; -1: none."""
    has_seen: int = -1
    """Sequence of the newest of this peer's heartbeats that it has seen."""
    failures: int = 0
    dial_at: float = 0.0
    dialing: bool = False
    wants_us: bool = False
    """True if it keeps its link to this peer."""
    unneeded_since: float = float("inf")
    reached: bool = False
    """True if it was linked at least once. A record alone, or a handshake by a key, is not enough."""
    met: bool = False
    """True if its DHT node has answered this peer's."""
    tellers: tuple[PeerId, ...] = ()
    """Some of the peers that sent its record."""
    outdated: int = -1
    """Sequence up to which it has revoked its records: its clock was ahead when it signed them."""
    invited: bool = False
    """True if the run requires invites and the owner's invite for it was seen."""
    met_at: float = float("-inf")
    """When its first record came."""
    started: int = 0
    """When its process started, by its newest record; 0: unknown."""
    worked: bool = False
    """True if it has contributed to a settled set of this group."""

    @property
    def stranger(self) -> bool:
        """True if only its record says where it is."""
        return not (self.reached or self.wants_us or self.met)

    @property
    def present(self) -> bool:
        """True unless it is known to be gone."""
        return self.linked or self.failures < GONE_FAILURES


class Membership:
    """All known peers of one run, and the links that this peer wants."""

    def __init__(
        self, me: PeerId, stage: int, chance: Random, beside: Collection[int] | None = None,
        by_invite: bool = False,
    ) -> None:  # fmt: skip
        """`beside`: the other stages that exchange microbatches with this one; None: the adjacent ones.
        `by_invite`: only peers that the run's owner has invited belong to a group."""
        self.me = me
        self.stage = stage
        self.beside = tuple(beside) if beside is not None else (stage - 1, stage + 1)
        self.chance = chance
        self.by_invite = by_invite
        self.peers: dict[PeerId, PeerInfo] = {}
        self.budget = DialBudget()
        """Limits dials to peers whose addresses are not confirmed."""
        self.guests = Guests()
        self._former: dict[PeerId, float] = {}
        """Former members of the group, and when each was last heard."""
        self._left: dict[PeerId, int] = {}
        """Sequence of the last record of peers that said Bye, which the directory keeps for a while."""
        self._wanted: frozenset[PeerId] | None = None
        """The result of `wanted`; None when it must be computed again."""
        self._lost_since = float("inf")
        """Since when no linked peer of this group takes part; infinite if one does."""
        self._seeks = False
        """True while other peers of the group are tried, after `SEEK_SECONDS`."""
        self._chosen: frozenset[PeerId] = frozenset()
        """The last result of `wanted`."""
        self._ring: frozenset[PeerId] = frozenset()
        """The neighbours in this group among them."""
        self._reducers: frozenset[PeerId] = frozenset()
        """Reducers of this peer's slices, which are linked in any case."""
        self._is_large = False
        """True if the group was too large to be fully linked when `_wanted` was computed."""

    # -- events ---------------------------------------------------------------------------------------

    def recorded(
        self, peer: PeerId, stage: int, role: str, addresses: tuple[str, ...], sequence: int, record: bytes,
        now: float, teller: PeerId | None = None, invited: bool = False,
    ) -> bool:  # fmt: skip
        """Store a verified record that a peer (`teller`) or the directory sent. Returns True if it is news.

        A record never replaces one with a newer sequence, unless the peer itself sends it, because its clock
        was set back. `invited`: the owner's invite for the peer was seen."""
        known, first_hand = self.peers.get(peer), peer == teller
        if known is not None:
            known.invited |= invited
            if teller is not None:
                self._told_by(known, teller)
        newest = known.sequence if known is not None else self._left.get(peer, -1)
        if peer == self.me or (known is not None and known.stage == stage and newest >= sequence):
            return False
        outdated = max(newest, known.outdated if known is not None else -1)
        if sequence <= outdated and not first_hand:
            return False
        if known is None:
            if len(self.peers) >= MAX_PEERS and not self._make_room():
                return False
            known = self.peers[peer] = PeerInfo(
                stage, role, addresses, sequence, record, now, invited=invited, met_at=now
            )
            if teller is not None:
                self._told_by(known, teller)
        else:
            if stage != known.stage:
                self._remember_former(peer)
            known.stage, known.role, known.addresses = stage, role, addresses
            known.sequence, known.record, known.recorded_at = sequence, record, now
        known.outdated = outdated if sequence <= outdated else -1
        if newest >= 0 or len(self.peers) <= MANY:
            self._wanted = None
        return True

    def on_heartbeat(self, peer: PeerId, now: float) -> None:
        known = self.peers.get(peer)
        if known is not None:
            known.heard_at = now

    def beat(
        self, peer: PeerId, stage: int, ready: bool, round: int, service_seconds: float, now: float,
        moving_to: int = -1, has_seen: int = -1,
    ) -> None:  # fmt: skip
        """Store the contents of a peer's heartbeat."""
        known = self.peers.get(peer)
        if known is not None:
            known.moving_to, known.has_seen = moving_to, has_seen
            if known.stage != stage:
                self._remember_former(peer)
                self._wanted = None
            if known.ready != ready and not known.worked:
                self._wanted = None
            known.heard_at, known.stage, known.ready = now, stage, ready
            known.round, known.service_seconds = round, service_seconds

    def keeps_us(self, peer: PeerId, keeps: bool) -> None:
        """Record whether a peer keeps its link to this one. One that was not chosen here is a guest until it
        contributes."""
        known = self.peers.get(peer)
        if known is None:
            return
        known.wants_us = keeps
        if not keeps or known.worked or peer in self._chosen:
            self.guests.left(peer)
        else:
            self.guests.admit(peer, public_ranges(known.addresses))

    def worked(self, peers: Iterable[PeerId]) -> None:
        """Record that these peers have contributed. Sybils displace neither them nor their links."""
        for peer in peers:
            known = self.peers.get(peer)
            if known is not None and not known.worked:
                known.worked, self._wanted = True, None
                self.guests.left(peer)

    def dialing(self, peer: PeerId, now: bool) -> None:
        """Record that a dial begins (`now` is true) or ends. A peer has at most one dial at a time."""
        if peer in self.peers:
            self.peers[peer].dialing = now
        if not now:
            self.budget.ended(peer)

    def met(self, peers: Iterable[PeerId]) -> None:
        """Record that these peers' DHT nodes have answered, without a link."""
        for peer in peers:
            known = self.peers.get(peer)
            if known is not None and not known.met:
                known.met, self._wanted = True, None

    def begin_dials(self, now: float) -> list[PeerId]:
        """Return the peers to dial now, and mark their dials as begun. Peers whose addresses are confirmed
        come first, and strangers follow as far as the budget allows, those with a voucher first."""

        def place(peer: PeerId) -> tuple[bool, bool, int]:
            known = self.peers[peer]
            return known.stranger, not self._vouched(known), known.failures

        begun = []
        self._look_around(now)
        if len(self.peers) > MANY:
            self._wanted = None
        for peer in sorted(self.to_dial(now), key=place):
            known = self.peers[peer]
            if known.stranger and not self.budget.take(peer, known.addresses, now):
                if self.budget.spent:
                    break
                continue
            self.dialing(peer, True)
            begun.append(peer)
        return begun

    def _look_around(self, now: float) -> None:
        """Update whether active peers of this group must be searched."""
        found = any(known.linked for known in self.peers.values() if self._takes_part(known))
        self._lost_since = float("inf") if found else min(self._lost_since, now)
        seeks = now >= self._lost_since + SEEK_SECONDS
        if seeks != self._seeks:
            self._seeks, self._wanted = seeks, None

    def linked(self, peer: PeerId, now: float) -> None:
        known = self.peers[peer]
        self.budget.reached(peer)
        known.linked, known.reached, known.failures, known.heard_at = True, True, 0, now
        known.unneeded_since = float("inf")
        self._wanted = None

    def unlinked(self, peer: PeerId, now: float) -> None:
        """Record that a dial failed, or a link broke or fell silent. The pause before the next dial grows."""
        self.budget.failed(peer, now)
        known = self.peers.get(peer)
        if known is None:
            return
        known.linked = known.ready = known.wants_us = False
        self.guests.left(peer)
        pause = doubled(FIRST_REDIAL_SECONDS, known.failures, LONGEST_REDIAL_SECONDS)
        known.dial_at = now + pause * self.chance.uniform(0.8, 1.2)
        known.failures += 1
        self._wanted = None

    def released(self, peer: PeerId) -> None:
        """Record that a link has ended because neither side needs it."""
        known = self.peers[peer]
        known.linked = known.ready = known.wants_us = False
        self.guests.left(peer)

    def left(self, peer: PeerId) -> None:
        """Record that a peer said Bye. It is forgotten until it signs a newer record."""
        self._remember_former(peer)
        known = self.peers.pop(peer, None)
        self.guests.left(peer)
        self._wanted = None
        if known is not None:
            self._left[peer] = max(known.sequence, known.outdated)
            if len(self._left) > MAX_PEERS:
                del self._left[next(iter(self._left))]

    # -- decisions ------------------------------------------------------------------------------------

    def has_left(self, peer: PeerId, sequence: int) -> bool:
        """Return whether a peer has said Bye since it signed the record with that sequence."""
        return self._left.get(peer, -1) >= sequence

    def concerns_us(self, stage: int) -> bool:
        """Return whether a stage is this peer's own, or one that microbatches come from or go to."""
        return stage >= 0 and (stage == self.stage or stage in self.beside)

    def group_size(self) -> int:
        """Return the estimated size of this group, this peer included, without peers that seem gone.

        If the group is not fully linked, its size is bounded by an estimate from the peers that were reached.
        Members must derive the same number of hops from it, within one, for levels (rounds/settlement.py)."""
        present = self._present(self.stage)
        if len(present) < FULL_GROUP:
            return 1 + len(present)
        reached = [peer for peer in present if self.peers[peer].reached]
        spoken_for = max(FULL_GROUP + 1, 1 + len(reached), size_by_neighbours(self.me, reached))
        return min(1 + len(present), spoken_for)

    def is_member(self, peer: PeerId) -> bool:
        """Return whether a peer belongs to this group, or did until recently.

        A member was reached in this stage, or it has a record of it and, in a run by invite, an invite. In an
        open run a record alone is enough only if reached peers show a group too large to be fully linked."""
        known = self.peers.get(peer)
        if known is None or known.stage != self.stage:
            return peer in self._former
        if known.reached or self.by_invite:
            return known.reached or known.invited
        self.wanted()
        return self._is_large

    def wanted(self) -> frozenset[PeerId]:
        """Return the peers that this one keeps links to: neighbours in its group, and some peers of adjacent
        stages.

        Neighbours are chosen four times: among all peers, among those with a voucher (`_vouched`), among
        those that were reached, and among those that contributed. If records are true and links work, the
        choices are equal."""
        if self._wanted is None:
            self._ring, wanted = frozenset(), self._reducers
            worked = self._has_worked
            for trusted in (lambda _: True, self._vouched, lambda known: known.reached, worked):
                self._ring |= choose_neighbours(self.me, self._those(self.stage, trusted))
                wanted |= self._adjacent(trusted)
            group = self._present(self.stage)
            if not any(self.peers[peer].linked for peer in group):  # Any way in will do.
                self._ring |= self._spread(group)
            elif self._seeks:
                untried = [peer for peer in group if not self.peers[peer].reached]
                self._ring |= self._spread(untried)
            if not any(self.peers[peer].worked for peer in group):  # Active peers lead to contributors.
                ready = self._those(self.stage, self._takes_part)
                self._ring |= choose_some(self.me, ready, MAX_ADJACENT)
            self._wanted = self._chosen = wanted | self._ring
            reached = sum(self.peers[peer].reached for peer in group)
            self._is_large = len(group) >= FULL_GROUP and reached >= FEWEST_ON_RINGS
        return self._wanted

    def reduces(self, reducers: Iterable[PeerId]) -> None:
        """Set the peers that reduce this peer's slices, now or soon. They are linked in any case."""
        known = {peer for peer in reducers if peer in self.peers or peer == self.me}
        if known != self._reducers:
            self._reducers, self._wanted = frozenset(known), None

    def candidates(self) -> list[PeerId]:
        """Return the other peers of this group that were reached or that a reached peer vouches for."""
        return self._those(self.stage, self._vouched)

    def shares_rounds(self, peer: PeerId) -> bool:
        """Return whether a linked peer of this group is a neighbour that takes part in gossip. In a group
        that is not fully linked, links between reducers and other peers carry slices only."""
        self.wanted()
        if peer in self._ring or not self._is_large:
            return True
        return peer not in self._reducers and self.me not in self._reducers

    def _those(self, stage: int, trusted: Callable[[PeerInfo], bool]) -> list[PeerId]:
        """Return the peers of a stage that are not known to be gone and fulfil `trusted`."""
        return [peer for peer in self._present(stage) if trusted(self.peers[peer])]

    def _spread(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Choose peers to try, spread over address ranges, while none is known to be honest."""
        ranges = {peer: public_ranges(self.peers[peer].addresses) for peer in peers}
        return choose_spread(self.me, ranges, MAX_ADJACENT)

    def _adjacent(self, trusted: Callable[[PeerInfo], bool]) -> frozenset[PeerId]:
        """Choose peers of adjacent stages."""
        chosen: frozenset[PeerId] = frozenset()
        for stage in self.beside:
            chosen |= choose_some(self.me, self._those(stage, trusted), MAX_ADJACENT)
        return chosen

    def others_may_be_there(self) -> bool:
        """Return whether any other peer of this group is not known to be gone."""
        return bool(self._present(self.stage))

    def needs(self, peer: PeerId) -> bool:
        """Return whether a link is needed: by this peer, or by one that has contributed or is a guest
        here."""
        known = self.peers.get(peer)
        if known is None or peer in self.wanted():
            return known is not None
        return known.wants_us and (known.worked or peer in self.guests)

    def surplus(self, now: float) -> list[PeerId]:
        """Return linked peers whose link neither side has needed for `RELEASE_SECONDS`."""
        surplus = []
        for peer, known in self.peers.items():
            if not known.linked or self.needs(peer):
                known.unneeded_since = float("inf")
                continue
            known.unneeded_since = min(known.unneeded_since, now)
            if now >= known.unneeded_since + RELEASE_SECONDS:
                surplus.append(peer)
        return surplus

    def _present(self, stage: int) -> list[PeerId]:
        return [peer for peer, known in self.peers.items() if known.stage == stage >= 0 and known.present]

    def live(self, stage: int) -> list[PeerId]:
        """Return the peers of a stage that are linked and take part."""
        return [
            peer
            for peer, known in self.peers.items()
            if known.stage == stage and known.linked and known.ready
        ]

    def to_dial(self, now: float) -> list[PeerId]:
        """Return the peers that may be dialled by now, without regard to the budget."""
        return [
            peer
            for peer, known in self.peers.items()
            if not known.linked
            and not known.dialing
            and known.dial_at <= now
            and self.concerns_us(known.stage)
            and (known.failures >= GONE_FAILURES or self.needs(peer))
        ]

    def silent(self, now: float) -> list[PeerId]:
        """Return the linked peers from which nothing was received for `SILENT_SECONDS`."""
        return [
            peer
            for peer, known in self.peers.items()
            if known.linked and known.heard_at + SILENT_SECONDS <= now
        ]

    def next_silence(self, now: float) -> float:
        """Return when the next linked peer would count as silent."""
        heard = [known.heard_at for known in self.peers.values() if known.linked]
        return max(now, min(heard, default=now) + SILENT_SECONDS)

    def forget_old(self, now: float) -> None:
        """Forget peers without a link that were last heard `FORGET_SECONDS` ago."""
        for peer, known in list(self.peers.items()):
            if not known.linked and max(known.recorded_at, known.heard_at) + FORGET_SECONDS <= now:
                del self.peers[peer]
                self.guests.left(peer)
                self._wanted = None
        for peer in [peer for peer, heard_at in self._former.items() if heard_at + FORGET_SECONDS <= now]:
            del self._former[peer]

    def _remember_former(self, peer: PeerId) -> None:
        """Remember a member that leaves the group. Its contributions to open rounds keep their weight."""
        if peer not in self.peers or not self.is_member(peer):
            return
        known = self.peers[peer]
        if known.stage == self.stage:
            self._former[peer] = max(known.recorded_at, known.heard_at)
            if len(self._former) > MAX_PEERS:
                del self._former[next(iter(self._former))]

    def _told_by(self, known: PeerInfo, teller: PeerId) -> None:
        if teller not in known.tellers and len(known.tellers) < MAX_TELLERS:
            known.tellers += (teller,)
            self._wanted = None

    def _takes_part(self, known: PeerInfo) -> bool:
        return known.stage == self.stage and known.ready

    def _has_worked(self, known: PeerInfo) -> bool:
        return known.worked

    def _vouched(self, known: PeerInfo) -> bool:
        """Return whether a peer was reached or met, or a reached peer has sent its record."""
        return (
            known.reached
            or known.met
            or any(teller in self.peers and self.peers[teller].reached for teller in known.tellers)
        )

    def _make_room(self) -> bool:
        """Forget some peers that are neither linked nor being dialled. Contributors and reached peers go
        last, and peers of the most crowded address ranges first (Sybils). Returns False if there are none."""
        away = {peer: known for peer, known in self.peers.items() if not known.linked and not known.dialing}
        ranges = {peer: public_ranges(known.addresses) or NO_RANGE for peer, known in away.items()}
        crowds = Counter(each for of_peer in ranges.values() for each in of_peer)
        unlinked = [(known.worked, known.reached, -max(crowds[each] for each in ranges[peer]),
                     known.heard_at, self._vouched(known), known.recorded_at, peer)
                    for peer, known in away.items()]  # fmt: skip
        if not unlinked:
            return False
        for *_, forgotten in nsmallest(min(FORGOTTEN_AT_ONCE, 1 + len(unlinked) // 2), unlinked):
            del self.peers[forgotten]
            self.guests.left(forgotten)
        self._wanted = None
        return True

    def records(self, most: int) -> list[bytes]:
        """Return up to `most` records of reached peers to send a newcomer; those heard last come first."""
        reached = (known for known in self.peers.values() if known.reached)
        newest = sorted(reached, key=lambda known: -known.heard_at)
        return [known.record for known in newest if known.record][:most]
