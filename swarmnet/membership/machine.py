"""Who is there, as one peer sees it: records are hints, beats are proof, silence is suspicion.

A peer is *live* while its link to us or ours to it stands and something was heard of it within
SILENT_SECONDS. A lost link or silence ends that at once; the record stays as an address to try again.
Records cost nothing to make: whoever was reached is not displaced by those who were not, and how many records
there are says little about how many peers there are; how many are dialled for them is limited
(dial_budget.py). Times in seconds on the caller's clock.
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
SILENT_SECONDS = 4.0
"""A frozen peer is noticed after this; the network itself needs 39 s or for ever (hivemind 1.1.12)."""
FIRST_REDIAL_SECONDS = 0.5
LONGEST_REDIAL_SECONDS = 8.0
"""libp2p's own dial back-off grows with attempts: after a partition frequent retries take longer."""
FORGET_SECONDS = 600.0
MOST_ADJACENT = 32
"""Peers of each stage next to ours that we link to: enough to choose from, whatever the stage's size."""
GONE_FAILURES = 2
"""Dials that must fail before others take a peer's place among the neighbours: its record outlives it."""
RELEASE_SECONDS = 10.0
"""A link that neither side needs any more is kept so long: until records have settled and what was on its way
over it has arrived."""
SEEK_SECONDS = 4.0
"""Without a peer of the own group that takes part, a peer tries others after so long: those it met may be a
crowd of nobodies around it. A starting group takes part sooner."""
MOST_TELLERS = 4
"""Kept of each peer: one of them that was reached is enough."""
FEWEST_ON_RINGS = RINGS + 1
"""In a group of twelve or more, 95 of 100 peers have as many neighbours (counted): often the same one stands
beside them on several rings."""
MANY = 256
"""Known peers from which on to choose neighbours takes milliseconds: not for every record that comes."""
MOST_PEERS = 4096
"""Keys cost nothing to make: beyond this many, whoever is not linked and was met longest ago is forgotten."""
FORGOTTEN_AT_ONCE = MOST_PEERS // 16
"""To find them takes as long as to find one."""
NO_RANGE = frozenset({""})
"""Of who has no public address."""


@dataclass(slots=True)
class Known:
    """One other peer. `sequence` orders its records; `ready` says that it takes part in its stage."""

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
    """The stage it has announced that it would move to; -1: none."""
    has_seen: int = -1
    """Sequence of the newest of our beats that it has seen."""
    failures: int = 0
    dial_at: float = 0.0
    dialing: bool = False
    wants_us: bool = False
    """It keeps its link to us."""
    unneeded_since: float = float("inf")
    reached: bool = False
    """It was linked, if only once: not only a record, or a key that greets."""
    met: bool = False
    """Its node of the directory has answered ours."""
    tellers: tuple[PeerId, ...] = ()
    """Some of the peers that told of it."""
    outdated: int = -1
    """Sequence of records that it has taken back itself: its clock was ahead when it signed them."""
    invited: bool = False
    """The run is by invite, and the owner's for it was seen."""
    met_at: float = float("-inf")
    """When its first record came."""
    started: int = 0
    """When its process started, by its newest record; 0: unknown."""
    worked: bool = False
    """It is a maker of settled sets of the own group."""

    @property
    def stranger(self) -> bool:
        """Nothing but its record says where it is."""
        return not (self.reached or self.wants_us or self.met)

    @property
    def present(self) -> bool:
        """Not known to be gone."""
        return self.linked or self.failures < GONE_FAILURES


class Membership:
    def __init__(
        self, me: PeerId, stage: int, chance: Random, beside: Collection[int] | None = None,
        by_invite: bool = False,
    ) -> None:  # fmt: skip
        """`beside`: the other stages that this one works with (Manifest.beside); None: those next to it.
        `by_invite`: only whom the run's owner has invited belongs to a group."""
        self.me = me
        self.stage = stage
        self.beside = tuple(beside) if beside is not None else (stage - 1, stage + 1)
        self.chance = chance
        self.by_invite = by_invite
        self.peers: dict[PeerId, Known] = {}
        self.budget = DialBudget()
        """For those that nobody knows to be where their records say."""
        self.guests = Guests()
        self._former: dict[PeerId, float] = {}
        """Members of the group that have left it since, and when they were heard last."""
        self._left: dict[PeerId, int] = {}
        """Sequence of the last record of peers that said Bye: the directory keeps it for a while."""
        self._wanted: frozenset[PeerId] | None = None
        """Kept until something changes who is present."""
        self._lost_since = float("inf")
        """Since when nobody who is linked in the own group takes part."""
        self._seeks = False
        self._chosen: frozenset[PeerId] = frozenset()
        """As `wanted` was last."""
        self._ring: frozenset[PeerId] = frozenset()
        """Of those, the neighbours in the own group."""
        self._reducers: frozenset[PeerId] = frozenset()
        self._is_large = False
        """As when `_wanted` was chosen."""

    # -- what happens ---------------------------------------------------------------------------------

    def recorded(
        self, peer: PeerId, stage: int, role: str, addresses: tuple[str, ...], sequence: int, record: bytes,
        now: float, teller: PeerId | None = None, invited: bool = False,
    ) -> bool:  # fmt: skip
        """A verified record, told by a peer or by the directory; True if it is news. An older sequence never
        replaces a newer one, but where the peer itself says that it is in another stage or back: its clock
        was set back since. `invited`: the owner's invite for it was seen."""
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
            if len(self.peers) >= MOST_PEERS and not self._make_room():
                return False
            known = self.peers[peer] = Known(
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

    def heard(self, peer: PeerId, now: float) -> None:
        known = self.peers.get(peer)
        if known is not None:
            known.heard_at = now

    def beat(
        self, peer: PeerId, stage: int, ready: bool, round: int, service_seconds: float, now: float,
        moving_to: int = -1, has_seen: int = -1,
    ) -> None:  # fmt: skip
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
        """Whether it keeps its link to us. Whom we would not have chosen is a guest until it has worked."""
        known = self.peers.get(peer)
        if known is None:
            return
        known.wants_us = keeps
        if not keeps or known.worked or peer in self._chosen:
            self.guests.left(peer)
        else:
            self.guests.admit(peer, public_ranges(known.addresses))

    def worked(self, peers: Iterable[PeerId]) -> None:
        """These did something that keys alone cannot: a crowd takes neither their places nor their links."""
        for peer in peers:
            known = self.peers.get(peer)
            if known is not None and not known.worked:
                known.worked, self._wanted = True, None
                self.guests.left(peer)

    def dialing(self, peer: PeerId, now: bool) -> None:
        """A dial has begun, or has ended: there is never a second one beside it."""
        if peer in self.peers:
            self.peers[peer].dialing = now
        if not now:
            self.budget.ended(peer)

    def met(self, peers: Iterable[PeerId]) -> None:
        """These answer this machine already, for another reason than a link."""
        for peer in peers:
            known = self.peers.get(peer)
            if known is not None and not known.met:
                known.met, self._wanted = True, None

    def begin_dials(self, now: float) -> list[PeerId]:
        """Whom to dial now: who is no stranger, and of the others as many as the budget allows, those first
        that somebody tells of who was reached. Their dials have begun."""

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
        """A dial failed, a link broke, or it fell silent: try again later, with growing patience."""
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
        """Its link has ended because neither side needs it."""
        known = self.peers[peer]
        known.linked = known.ready = known.wants_us = False
        self.guests.left(peer)

    def left(self, peer: PeerId) -> None:
        """It said Bye: nothing to wait for, until it signs a newer record."""
        self._remember_former(peer)
        known = self.peers.pop(peer, None)
        self.guests.left(peer)
        self._wanted = None
        if known is not None:
            self._left[peer] = max(known.sequence, known.outdated)
            if len(self._left) > MOST_PEERS:
                del self._left[next(iter(self._left))]

    # -- what follows ---------------------------------------------------------------------------------

    def has_left(self, peer: PeerId, sequence: int) -> bool:
        """Whether it has said Bye since it signed that record, which the directory keeps for a while."""
        return self._left.get(peer, -1) >= sequence

    def concerns_us(self, stage: int) -> bool:
        """Our own group and the stages that microbatches come from or go to."""
        return stage >= 0 and (stage == self.stage or stage in self.beside)

    def group_size(self) -> int:
        """Of the own group as far as known, this peer included, without those that seem gone. A group that is
        not linked whole is at most as large as those who were reached speak for; all of it count hops alike,
        within one, or levels (rounds/settlement.py) would not add up."""
        present = self._present(self.stage)
        if len(present) < FULL_GROUP:
            return 1 + len(present)
        reached = [peer for peer in present if self.peers[peer].reached]
        spoken_for = max(FULL_GROUP + 1, 1 + len(reached), size_by_neighbours(self.me, reached))
        return min(1 + len(present), spoken_for)

    def is_member(self, peer: PeerId) -> bool:
        """Whether it belongs to the own group, or did until lately: it was reached in this stage, or has a
        record of it and, in a run by invite, an invite. A record alone costs nothing: where the run is open
        it counts only in a group that cannot be linked whole, which is seen by whom this peer has reached."""
        known = self.peers.get(peer)
        if known is None or known.stage != self.stage:
            return peer in self._former
        if known.reached or self.by_invite:
            return known.reached or known.invited
        self.wanted()
        return self._is_large

    def wanted(self) -> frozenset[PeerId]:
        """Whom this peer keeps links to: its neighbours in the group, and some of the stages next to it.

        Chosen among all, then among those that were reached or met, or that a reached one tells of, then
        among those that were reached, then among those that have worked. Where all records are true, all
        links stand and all work, these are the same."""
        if self._wanted is None:
            self._ring, wanted = frozenset(), self._reducers
            worked = self._has_worked
            for trusted in (lambda _: True, self._vouched, lambda known: known.reached, worked):
                self._ring |= choose_neighbours(self.me, self._those(self.stage, trusted))
                wanted |= self._adjacent(trusted)
            group = self._present(self.stage)
            if not any(self.peers[peer].linked for peer in group):  # Whoever leads into the group will do.
                self._ring |= self._spread(group)
            elif self._seeks:
                untried = [peer for peer in group if not self.peers[peer].reached]
                self._ring |= self._spread(untried)
            if not any(self.peers[peer].worked for peer in group):  # Who takes part leads to who has.
                ready = self._those(self.stage, self._takes_part)
                self._ring |= choose_some(self.me, ready, MOST_ADJACENT)
            self._wanted = self._chosen = wanted | self._ring
            reached = sum(self.peers[peer].reached for peer in group)
            self._is_large = len(group) >= FULL_GROUP and reached >= FEWEST_ON_RINGS
        return self._wanted

    def reduces(self, reducers: Iterable[PeerId]) -> None:
        """To these slices of contributions go, now or soon: they are linked wherever they stand in the
        group."""
        known = {peer for peer in reducers if peer in self.peers or peer == self.me}
        if known != self._reducers:
            self._reducers, self._wanted = frozenset(known), None

    def candidates(self) -> list[PeerId]:
        """Those of the own group, besides this peer, that somebody says to be there."""
        return self._those(self.stage, self._vouched)

    def shares_rounds(self, peer: PeerId) -> bool:
        """Whether a linked peer of the own group is a neighbour in it. In a group that is not linked whole
        some links are for slices alone, and carry no gossip: those of a reducer to everybody who is none."""
        self.wanted()
        if peer in self._ring or not self._is_large:
            return True
        return peer not in self._reducers and self.me not in self._reducers

    def _those(self, stage: int, trusted: Callable[[Known], bool]) -> list[PeerId]:
        return [peer for peer in self._present(stage) if trusted(self.peers[peer])]

    def _spread(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """To try, where nobody is known to be honest."""
        ranges = {peer: public_ranges(self.peers[peer].addresses) for peer in peers}
        return choose_spread(self.me, ranges, MOST_ADJACENT)

    def _adjacent(self, trusted: Callable[[Known], bool]) -> frozenset[PeerId]:
        chosen: frozenset[PeerId] = frozenset()
        for stage in self.beside:
            chosen |= choose_some(self.me, self._those(stage, trusted), MOST_ADJACENT)
        return chosen

    def others_may_be_there(self) -> bool:
        """Whether a record tells of somebody in the own group who is not known to be gone."""
        return bool(self._present(self.stage))

    def needs(self, peer: PeerId) -> bool:
        """Whether this peer or the other one keeps their link, which a guest without a place does not."""
        known = self.peers.get(peer)
        if known is None or peer in self.wanted():
            return known is not None
        return known.wants_us and (known.worked or peer in self.guests)

    def surplus(self, now: float) -> list[PeerId]:
        """Linked peers whose link neither side has needed for RELEASE_SECONDS."""
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
        """Peers of a stage that are linked and take part."""
        return [
            peer
            for peer, known in self.peers.items()
            if known.stage == stage and known.linked and known.ready
        ]

    def to_dial(self, now: float) -> list[PeerId]:
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
        """Linked peers of which nothing was heard for SILENT_SECONDS."""
        return [
            peer
            for peer, known in self.peers.items()
            if known.linked and known.heard_at + SILENT_SECONDS <= now
        ]

    def next_silence(self, now: float) -> float:
        """When the next linked peer would fall silent."""
        heard = [known.heard_at for known in self.peers.values() if known.linked]
        return max(now, min(heard, default=now) + SILENT_SECONDS)

    def forget_old(self, now: float) -> None:
        for peer, known in list(self.peers.items()):
            if not known.linked and max(known.recorded_at, known.heard_at) + FORGET_SECONDS <= now:
                del self.peers[peer]
                self.guests.left(peer)
                self._wanted = None
        for peer in [peer for peer, heard_at in self._former.items() if heard_at + FORGET_SECONDS <= now]:
            del self._former[peer]

    def _remember_former(self, peer: PeerId) -> None:
        """It leaves the group. What it made for open rounds counts on."""
        if peer not in self.peers or not self.is_member(peer):
            return
        known = self.peers[peer]
        if known.stage == self.stage:
            self._former[peer] = max(known.recorded_at, known.heard_at)
            if len(self._former) > MOST_PEERS:
                del self._former[next(iter(self._former))]

    def _told_by(self, known: Known, teller: PeerId) -> None:
        if teller not in known.tellers and len(known.tellers) < MOST_TELLERS:
            known.tellers += (teller,)
            self._wanted = None

    def _takes_part(self, known: Known) -> bool:
        return known.stage == self.stage and known.ready

    def _has_worked(self, known: Known) -> bool:
        return known.worked

    def _vouched(self, known: Known) -> bool:
        """Whether it was reached or met, or somebody who was reached tells of it."""
        return known.reached or known.met or any(
            teller in self.peers and self.peers[teller].reached for teller in known.tellers
        )

    def _make_room(self) -> bool:
        """Of those that were never reached a crowd's are forgotten first: of networks with most of them."""
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
        """Records to tell a newcomer, of peers that were reached: those heard last come first."""
        reached = (known for known in self.peers.values() if known.reached)
        newest = sorted(reached, key=lambda known: -known.heard_at)
        return [known.record for known in newest if known.record][:most]
