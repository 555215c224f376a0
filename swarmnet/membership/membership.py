"""Group membership as one peer sees it: known peers, which of them are alive, and to whom to keep links.

A peer announces itself by a signed *record* in a directory (DHT), which other peers pass on. A record is a
hint, a heartbeat is proof, and silence is suspicion. A peer is *live* while a link to it exists and something
was received from it within `SILENT_SECONDS`. After that its record stays as an address to try again.

Records are free to make. A peer that was *reached* (linked at least once) is therefore not displaced by peers
that were not. A *stranger* is known by its record alone. A *guest* keeps a link to this peer that this peer
did not choose. Stages are *adjacent* if they exchange microbatches. All times are in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from heapq import nsmallest
from random import Random

from swarmnet.backoff import doubled
from swarmnet.identifiers import PeerId
from swarmnet.membership.address_ranges import public_ranges
from swarmnet.membership.dial_budget import DialBudget
from swarmnet.membership.forgers import Forgers
from swarmnet.membership.guests import Guests
from swarmnet.membership.overlay import (
    FULL_GROUP,
    RINGS,
    choose_helpers,
    choose_neighbours,
    choose_some,
    choose_spread,
    size_by_neighbours,
)
from swarmnet.membership.peer_info import GONE_FAILURES, PeerInfo

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


class Membership:
    """All known peers of one run, and the links that this peer wants.

    `wanted` computes these links and keeps the result in `_wanted`, until an event sets that to None. A peer
    is *ready* if it takes part in training, and has *worked* if it has contributed to a settled set here with
    weight (`CurrentRound.with_weight`)."""

    def __init__(
        self,
        *,
        me: PeerId,
        stage: int,
        chance: Random,
        beside: Collection[int] | None = None,
        by_invite: bool = False,
        is_helper: bool = False,
        upload: int = 0,
    ) -> None:
        """`beside`: the other stages that exchange microbatches with this one; None: the adjacent ones.
        `by_invite`: only peers that the run's owner has invited belong to a group. `is_helper`: this peer
        only reduces. `upload`: this peer's, in bytes per second; 0 if unknown."""
        self.me = me
        self.stage = stage
        self.beside = tuple(beside) if beside is not None else (stage - 1, stage + 1)
        self.chance = chance
        self.by_invite = by_invite
        self.is_helper = is_helper
        self.upload = upload
        self.peers: dict[PeerId, PeerInfo] = {}
        self.budget = DialBudget()
        """Limits dials to strangers."""
        self.guests = Guests()
        self._forgers = Forgers()
        self._former: dict[PeerId, float] = {}
        """Former members of the group, and when each was last heard."""
        self._left: dict[PeerId, int] = {}
        """Sequence of the last record of peers that said goodbye. The directory may still return it."""
        self._wanted: frozenset[PeerId] | None = None
        """The result of `wanted`; None when it must be computed again."""
        self._lost_since = float("inf")
        """Since when no linked peer of this group takes part; infinite if one does."""
        self._seeks = False
        """True while other peers of the group are tried, after `SEEK_SECONDS`."""
        self._chosen: frozenset[PeerId] = frozenset()
        """The last result of `wanted`."""
        self._group_neighbours: frozenset[PeerId] = frozenset()
        """Those peers of this group in the last result of `wanted` that are not only reducers."""
        self._reducers: frozenset[PeerId] = frozenset()
        """Reducers of this peer's slices, which are linked in any case."""
        self._helpers: frozenset[PeerId] = frozenset()
        """The helpers of this group when `_wanted` was computed, this peer included if it is one."""
        self._is_large = False
        """True if the group was too large to be fully linked when `_wanted` was computed."""

    # -- events ---------------------------------------------------------------------------------------

    def recorded(
        self,
        peer: PeerId,
        stage: int,
        role: str,
        addresses: tuple[str, ...],
        sequence: int,
        record: bytes,
        now: float,
        teller: PeerId | None = None,
        invited: bool = False,
        upload: int = 0,
        uploads_seen: bytes = b"",
    ) -> bool:
        """Store a verified record that a peer (`teller`) or the directory (None) sent. `invited`: the owner's
        invite for the peer was seen. `upload`: in bytes per second, 0 if unknown. `uploads_seen`: what it has
        measured of others. Returns True if the record is news and was stored.

        A record that is not newer than the known one is stored only if the peer itself sends it, for another
        stage or after a goodbye: its clock was set back. A new peer's record is stored only if there is room
        among `MAX_PEERS`."""
        known = self.peers.get(peer)
        is_first_hand = peer == teller
        if known is not None:
            known.invited |= invited
            if teller is not None:
                self._add_teller(known, teller)
        newest = known.sequence if known is not None else self._left.get(peer, -1)
        if peer == self.me or (known is not None and known.stage == stage and newest >= sequence):
            return False
        # Records up to this sequence are old, or were revoked by the peer.
        outdated = max(newest, known.outdated if known is not None else -1)
        if sequence <= outdated and not is_first_hand:
            return False
        if known is None:
            if self.is_full and not self._make_room():
                return False
            known = PeerInfo(stage, role, addresses, sequence, record, now, invited=invited, met_at=now)
            self.peers[peer] = known
            if teller is not None:
                self._add_teller(known, teller)
        else:
            if stage != known.stage:
                self._remember_former(peer)
            known.stage, known.role, known.addresses = stage, role, addresses
            known.sequence, known.record, known.recorded_at = sequence, record, now
        known.upload, known.uploads_seen = upload, uploads_seen
        known.outdated = outdated if sequence <= outdated else -1
        self._choose_again()
        return True

    def _choose_again(self) -> None:
        """Let links be chosen again: now or, with more than `MANY` peers, when `begin_dials` is called next.
        Choosing takes long then, and attackers could cause it with every message."""
        if len(self.peers) <= MANY:
            self._wanted = None

    def on_heartbeat(self, peer: PeerId, now: float) -> None:
        known = self.peers.get(peer)
        if known is not None:
            known.heard_at = now

    def beat(
        self,
        peer: PeerId,
        stage: int,
        ready: bool,
        round: int,
        service_seconds: float,
        now: float,
        moving_to: int = -1,
        has_seen: int = -1,
    ) -> None:
        """Store the contents of a peer's heartbeat (fields of `PeerInfo`). Unknown peers are ignored."""
        known = self.peers.get(peer)
        if known is not None:
            known.moving_to, known.has_seen = moving_to, has_seen
            if known.stage != stage:
                self._remember_former(peer)
                self._choose_again()
            if known.ready != ready and not known.worked:
                self._choose_again()
            if known.linked:
                known.failures = 0
            known.heard_at, known.stage, known.ready = now, stage, ready
            known.round, known.service_seconds = round, service_seconds

    def keeps_us(self, peer: PeerId, keeps: bool) -> None:
        """Record whether a peer keeps its link to this one. If this peer did not choose it, it is a guest (if
        there is a place) until it contributes."""
        known = self.peers.get(peer)
        if known is None:
            return
        known.wants_us = keeps
        if not keeps or known.worked or peer in self._chosen:
            self.guests.left(peer)
        else:
            self.guests.admit(peer, public_ranges(known.addresses))

    def worked(self, peers: Iterable[PeerId]) -> None:
        """Record that these peers have contributed, with weight, to settled sets. Peers that have not, such
        as Sybils, then displace neither them nor their links."""
        for peer in peers:
            known = self.peers.get(peer)
            if known is not None and not known.worked:
                known.worked = True
                self._wanted = None
                self.guests.left(peer)

    def dialing(self, peer: PeerId, begins: bool) -> None:
        """Record that a dial begins (`begins`) or ends. A peer has at most one dial at a time."""
        if peer in self.peers:
            self.peers[peer].dialing = begins
        if not begins:
            self.budget.ended(peer)

    def met(self, peers: Iterable[PeerId]) -> None:
        """Record that these peers' DHT nodes have answered, without a link."""
        for peer in peers:
            known = self.peers.get(peer)
            if known is not None and not known.met:
                known.met = True
                self._choose_again()

    def begin_dials(self, now: float) -> list[PeerId]:
        """Return the peers to dial now, and mark their dials as begun. Peers that are no strangers come
        first. Strangers follow as far as the budget allows, those that a reached peer knows first."""

        def priority(peer: PeerId) -> tuple[bool, bool, int]:
            known = self.peers[peer]
            return known.stranger, not self._is_vouched(known), known.failures

        begun = []
        self._update_seeking(now)
        if len(self.peers) > MANY:  # Not every record has reset it.
            self._wanted = None
        for peer in sorted(self.to_dial(now), key=priority):
            known = self.peers[peer]
            if known.stranger and not self.budget.take(peer, known.addresses, now):
                if self.budget.spent:
                    break
                continue
            self.dialing(peer, True)
            begun.append(peer)
        return begun

    def _update_seeking(self, now: float) -> None:
        """Update whether this peer tries other peers of its group than its neighbours. It does so after
        `SEEK_SECONDS` without a link to a peer that takes part."""
        has_link = any(known.linked for known in self.peers.values() if self._takes_part(known))
        self._lost_since = float("inf") if has_link else min(self._lost_since, now)
        seeks = now >= self._lost_since + SEEK_SECONDS
        if seeks != self._seeks:
            self._seeks = seeks
            self._wanted = None

    def linked(self, peer: PeerId, now: float) -> None:
        """Record that a link to a known peer was established. Only a heartbeat ends its row of failures: it
        may accept every link and end it at once, because it has no place."""
        known = self.peers[peer]
        self.budget.reached(peer)
        known.linked, known.reached, known.heard_at = True, True, now
        known.unneeded_since = float("inf")
        self._choose_again()

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
        self._choose_again()

    def released(self, peer: PeerId) -> None:
        """Record that a link has ended because neither side needs it."""
        known = self.peers[peer]
        known.linked = known.ready = known.wants_us = False
        self.guests.left(peer)

    def forged(self, peer: PeerId, now: float) -> None:
        """Record that a peer, whose links have ended, sent something forged: it counts as gone, and is
        refused for a while."""
        self._forgers.forged(peer, now)
        known = self.peers.get(peer)
        if known is not None:
            known.failures = max(known.failures, GONE_FAILURES)
            self._choose_again()

    def left(self, peer: PeerId) -> None:
        """Record that a peer said goodbye. It is forgotten until it signs a newer record."""
        self._remember_former(peer)
        known = self.peers.pop(peer, None)
        self.guests.left(peer)
        self._choose_again()
        if known is not None:
            self._left[peer] = max(known.sequence, known.outdated)
            if len(self._left) > MAX_PEERS:
                del self._left[next(iter(self._left))]

    # -- decisions ------------------------------------------------------------------------------------

    def has_left(self, peer: PeerId, sequence: int) -> bool:
        """Return whether a peer has said goodbye since it signed the record with that sequence."""
        return self._left.get(peer, -1) >= sequence

    def refuses(self, peer: PeerId, now: float) -> bool:
        """Return whether the links of a peer are refused, because it sent something forged."""
        return self._forgers.refuses(peer, now)

    def concerns_us(self, stage: int) -> bool:
        """Return whether a stage is this peer's own, or one that microbatches come from or go to."""
        return stage >= 0 and (stage == self.stage or stage in self.beside)

    def group_size(self) -> int:
        """Return the estimated size of this group, this peer included, without peers that seem gone.

        A group of `FULL_GROUP` or more other peers is not fully linked. Its size is then bounded by an
        estimate from the peers that were reached, as records may be false. All members must derive nearly the
        same number of hops across the group from it (rounds/settlement.py)."""
        present = self._present(self.stage)
        if len(present) < FULL_GROUP:
            return 1 + len(present)
        reached = [peer for peer in present if self.peers[peer].reached]
        bound = max(FULL_GROUP + 1, 1 + len(reached), size_by_neighbours(self.me, reached))
        return min(1 + len(present), bound)

    def is_member(self, peer: PeerId) -> bool:
        """Return whether a peer belongs to this group, or did until recently.

        A peer with a record for this stage is a member if it was reached. In a run by invite, its invite is
        enough. In an open run, its record is enough if reached peers show that the group is too large to be
        fully linked."""
        known = self.peers.get(peer)
        if known is None or known.stage != self.stage:
            return peer in self._former
        if known.reached or self.by_invite:
            return known.reached or known.invited
        self.wanted()  # Updates `_is_large`.
        return self._is_large

    def wanted(self) -> frozenset[PeerId]:
        """Return the peers that this one keeps links to: neighbours in its group, some peers of adjacent
        stages, and the reducers of its slices.

        Neighbours are chosen four times, each time from another list: all peers; those that were reached or
        that a reached peer names; those that were reached; those that contributed, reached or not. False
        records can fill the first lists, not all. Further peers are added while no peer of the group is
        linked, while no linked one has taken part for `SEEK_SECONDS`, and while none has contributed."""
        if self._wanted is None:
            self._group_neighbours = frozenset()
            wanted = self._reducers
            group, vouched, reached, worked = self._eligible(self.stage)
            for eligible in (group, vouched, reached, worked):
                self._group_neighbours |= choose_neighbours(self.me, eligible)
            for stage in self.beside:
                for eligible in self._eligible(stage):
                    wanted |= choose_some(self.me, eligible, MAX_ADJACENT)
            if not any(self.peers[peer].linked for peer in group):  # Any link into the group will do.
                self._group_neighbours |= self._choose_across_ranges(group)
            elif self._seeks:
                untried = [peer for peer in group if not self.peers[peer].reached]
                self._group_neighbours |= self._choose_across_ranges(untried)
            if not worked:  # Active peers lead to contributors.
                ready = self._select(self.stage, self._takes_part)
                self._group_neighbours |= choose_some(self.me, ready, MAX_ADJACENT)
            helpers = [peer for peer in vouched if self.peers[peer].is_helper]
            self._helpers = frozenset((*helpers, self.me) if self.is_helper else helpers)
            if self._reducers:
                self._group_neighbours |= choose_helpers(self.me, self._helpers)
            self._wanted = wanted | self._group_neighbours
            self._chosen = self._wanted
            self._is_large = len(group) >= FULL_GROUP and len(reached) >= FEWEST_ON_RINGS
        return self._wanted

    def _eligible(self, stage: int) -> tuple[list[PeerId], ...]:
        """Return the four lists of a stage's peers from which links are chosen (`wanted`)."""
        present = self._present(stage)
        vouched = [peer for peer in present if self._is_vouched(self.peers[peer])]
        reached = [peer for peer in vouched if self.peers[peer].reached]
        worked = [peer for peer in present if self.peers[peer].worked]
        return present, vouched, reached, worked

    def reduces(self, reducers: Iterable[PeerId]) -> None:
        """Set the peers that sum parts of this peer's contributions, now or soon. They are linked in any
        case, if they are known."""
        known = {peer for peer in reducers if peer in self.peers or peer == self.me}
        if known != self._reducers:
            self._reducers = frozenset(known)
            self._wanted = None

    def candidates(self) -> list[PeerId]:
        """Return the other peers of this group that were reached, answered in the DHT, or whose record a
        reached peer has sent."""
        return self._select(self.stage, self._is_vouched)

    def shares_rounds(self, peer: PeerId) -> bool:
        """Return whether this peer exchanges rounds with a linked peer of its group by gossip. In a group
        that is not fully linked, a link may exist only because one of the two is a reducer. It then carries
        parts of contributions only."""
        self.wanted()  # Updates the attributes below.
        if peer in self._group_neighbours or not self._is_large:
            return True
        if self.is_helper and self.me in choose_helpers(peer, self._helpers):
            return True  # That peer has chosen this one.
        return peer not in self._reducers and self.me not in self._reducers

    def _select(self, stage: int, is_eligible: Callable[[PeerInfo], bool]) -> list[PeerId]:
        """Return the peers of a stage that are not known to be gone and fulfil `is_eligible`."""
        return [peer for peer in self._present(stage) if is_eligible(self.peers[peer])]

    def _choose_across_ranges(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Choose at most `MAX_ADJACENT` of `peers`, spread over address ranges: Sybils share few ranges."""
        ranges = {peer: public_ranges(self.peers[peer].addresses) for peer in peers}
        return choose_spread(self.me, ranges, MAX_ADJACENT)

    def others_may_be_there(self) -> bool:
        """Return whether any other peer of this group is not known to be gone."""
        return bool(self._present(self.stage))

    def needs(self, peer: PeerId) -> bool:
        """Return whether the link to a peer is needed: either this peer wants it, or the other one wants it
        and has contributed or is a guest here."""
        known = self.peers.get(peer)
        if known is None:
            return False
        if peer in self.wanted():
            return True
        return known.wants_us and (known.worked or peer in self.guests)

    def finds_no_place(self, peer: PeerId) -> bool:
        """Return whether a peer keeps a link to this one and gets none in return: it is not needed."""
        known = self.peers.get(peer)
        if known is None or known.linked or known.dialing or not known.wants_us:
            return False
        return self.concerns_us(known.stage) and not self.needs(peer)

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
        """Return the known peers of a stage that are not known to be gone; none for the stage -1."""
        if stage < 0:
            return []
        in_stage = [(peer, known) for peer, known in self.peers.items() if known.stage == stage]
        return [peer for peer, known in in_stage if known.failures < GONE_FAILURES or known.linked]

    def active(self, stage: int) -> list[PeerId]:
        """Return the peers of a stage that are linked and take part in its rounds."""
        return [
            peer
            for peer, known in self.peers.items()
            if known.stage == stage and known.linked and known.ready
        ]

    def live(self, stage: int) -> list[PeerId]:
        """Return the peers of a stage that are linked and train: active ones that do not only reduce."""
        return [peer for peer in self.active(stage) if not self.peers[peer].is_helper]

    def to_dial(self, now: float) -> list[PeerId]:
        """Return the peers that may be dialled by now, without regard to the budget. They belong to this
        stage or to an adjacent one and are not linked, nor refused as forgers. Their links are needed, or
        they seemed gone and may have returned."""
        return [
            peer
            for peer, known in self.peers.items()
            if not known.linked
            and not known.dialing
            and known.dial_at <= now
            and (known.failures >= GONE_FAILURES or self.needs(peer))
            and self.concerns_us(known.stage)
            and not self.refuses(peer, now)
        ]

    def silent(self, now: float) -> list[PeerId]:
        """Return the linked peers from which nothing was received for `SILENT_SECONDS`."""
        return [
            peer
            for peer, known in self.peers.items()
            if known.linked and known.heard_at + SILENT_SECONDS <= now
        ]

    def next_silence(self, now: float) -> float:
        """Return when the next linked peer counts as silent if nothing more is received."""
        heard = [known.heard_at for known in self.peers.values() if known.linked]
        return max(now, min(heard, default=now) + SILENT_SECONDS)

    def forget_old(self, now: float) -> None:
        """Forget peers without a link whose last record and heartbeat came `FORGET_SECONDS` ago or before."""
        for peer, known in list(self.peers.items()):
            last_sign_at = max(known.recorded_at, known.heard_at)
            if not known.linked and last_sign_at + FORGET_SECONDS <= now:
                del self.peers[peer]
                self.guests.left(peer)
                self._choose_again()
        for peer in [peer for peer, heard_at in self._former.items() if heard_at + FORGET_SECONDS <= now]:
            del self._former[peer]

    def _remember_former(self, peer: PeerId) -> None:
        """Remember a peer that leaves the group if it is a member: contributions that it made still count."""
        if peer not in self.peers or not self.is_member(peer):
            return
        known = self.peers[peer]
        if known.stage == self.stage:
            self._former[peer] = max(known.recorded_at, known.heard_at)
            if len(self._former) > MAX_PEERS:
                del self._former[next(iter(self._former))]

    def _add_teller(self, known: PeerInfo, teller: PeerId) -> None:
        """Remember that `teller` sent the record of a peer."""
        if teller not in known.tellers and len(known.tellers) < MAX_TELLERS:
            known.tellers += (teller,)
            self._choose_again()

    def _takes_part(self, known: PeerInfo) -> bool:
        return known.stage == self.stage and known.ready

    def _is_vouched(self, known: PeerInfo) -> bool:
        """Return whether a peer was reached, its DHT node has answered, or a reached peer sent its record."""
        if known.reached or known.met or not known.tellers:
            return known.reached or known.met
        return any(teller in self.peers and self.peers[teller].reached for teller in known.tellers)

    @property
    def is_full(self) -> bool:
        """True if a new peer is known only if another one is forgotten."""
        return len(self.peers) >= MAX_PEERS

    def _make_room(self) -> bool:
        """Forget some peers that are neither linked nor being dialled, `FORGOTTEN_AT_ONCE` or half of them at
        most. The first to go are peers that were never reached, from the address ranges with most peers
        (Sybils). Contributors go last. Returns False if there are none to forget."""
        unlinked = {
            peer: known for peer, known in self.peers.items() if not known.linked and not known.dialing
        }
        ranges = {peer: public_ranges(known.addresses) or NO_RANGE for peer, known in unlinked.items()}
        peers_of_range = Counter(each for of_peer in ranges.values() for each in of_peer)
        ranked = []  # The peers to forget first compare as the smallest.
        for peer, known in unlinked.items():
            crowding = max(peers_of_range[each] for each in ranges[peer])
            trust = known.worked, known.reached, -crowding
            ranked.append((*trust, known.heard_at, self._is_vouched(known), known.recorded_at, peer))
        if not ranked:
            return False
        count = min(FORGOTTEN_AT_ONCE, 1 + len(ranked) // 2)
        for *_, forgotten in nsmallest(count, ranked):
            del self.peers[forgotten]
            self.guests.left(forgotten)
        self._choose_again()
        return True

    def records(self, most: int) -> list[bytes]:
        """Return up to `most` records of reached peers to send a newcomer; those heard last come first."""
        reached = (known for known in self.peers.values() if known.reached)
        newest = sorted(reached, key=lambda known: -known.heard_at)
        return [known.record for known in newest if known.record][:most]
