"""Whose contributions count in a group, as one peer sees it, and what waits until that is known.

Keys cost nothing to make, and a contribution is signed by its maker, so one link could bring the votes of any
number of makers. A maker counts that belongs to the group (Membership.is_member) and that the run's owner has
not sent away. What half of those in sight hold counts whoever made it: the group has decided, and a peer that
knew better would only part from it. Part of `GroupRounds`, without IO.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from math import inf

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.membership.machine import Membership
from swarmnet.membership.overlay import FULL_GROUP
from swarmnet.rounds.events import Reference
from swarmnet.run.manifest import Rounds

GROUPS = 2
"""So many times the group's size makers may have in a round: those that are there, and as many that have left
or that this peer has not met yet."""
FEWEST_MAKERS = GROUPS * FULL_GROUP
"""Of whatever size the group seems to be: it may have been larger when the round was made."""
MOST_MAKERS = 700
"""Of a round in any case. A whole set must fit in the header of one announcement, 64 KiB at 89 bytes a maker;
sums of votes are int16, which ends far above it (votes.VoteTally)."""
MOST_WAITING = 1024
"""Contributions that wait for their makers to be known, 8 rounds of a group of 128 ..."""
MOST_OF_ONE = MOST_WAITING // 4
"""... and of what only one neighbour names: it must not take the others' room."""
LOOK_SECONDS = 0.25
"""How often those that wait are looked at again: half of what an announcement takes over three hops."""

MakerCounts = Callable[[PeerId, int], bool]
"""Whether what this peer makes for that round counts."""


def most_makers(peers: int) -> int:
    """Of one round, in a group of so many."""
    return min(MOST_MAKERS, max(FEWEST_MAKERS, GROUPS * peers))


class Makers:
    """`counts` is a `MakerCounts`."""

    def __init__(self, membership: Membership, rules: Rounds) -> None:
        self._membership = membership
        self._rules = rules
        self._barred: dict[PeerId, int] = {}
        self.convicted: Mapping[PeerId, int] = {}
        """Of lies, with proof, and from which round on nothing of them counts (audits.py)."""

    def bar(self, peers: Iterable[PeerId], current: int) -> None:
        """The owner wants none of these, and nobody else is barred any more. `current`: the round that takes
        gradients; -1: none was begun.

        An order reaches peers at different times, and rounds that are open hold what some took before. So it
        acts from the first round of a block of `snapshot_rounds` on that begins more than `window` rounds
        ahead: whoever hears it within the same block bars the same rounds."""
        block = self._rules.snapshot_rounds
        begins = ((current + self._rules.window) // block + 1) * block if current >= 0 else 0
        self._barred = {peer: self._barred.get(peer, begins) for peer in peers}

    def counts(self, maker: PeerId, round: int) -> bool:
        ends = min(self._barred.get(maker, inf), self.convicted.get(maker, inf))
        return round < ends and self._membership.is_member(maker)


class Decided:
    """Contributions to open rounds that half of the group holds: they count whoever made them."""

    def __init__(self) -> None:
        self._makers: dict[int, dict[ContributionId, PeerId]] = {}

    def __contains__(self, reference: Reference) -> bool:
        return reference.id in self._makers.get(reference.round, {})

    def of(self, maker: PeerId, round: int) -> bool:
        """Whether anything of that maker is decided."""
        return maker in self._makers.get(round, {}).values()

    def add(self, reference: Reference) -> None:
        self._makers.setdefault(reference.round, {})[reference.id] = reference.peer

    def withdraw(self, maker: PeerId, round: int) -> None:
        those = self._makers.get(round, {})
        self._makers[round] = {identity: peer for identity, peer in those.items() if peer != maker}

    def forget(self, round: int) -> None:
        self._makers.pop(round, None)


class Waiting:
    """Contributions whose makers do not count here, and which neighbours name each: bounded, since a name
    costs nothing. What finds no room is named again as long as the sets differ."""

    def __init__(self, is_member: Callable[[PeerId], bool] = lambda peer: True) -> None:
        self._is_member = is_member
        self._strangers: OrderedDict[ContributionId, tuple[int, frozenset[PeerId]]] = OrderedDict()
        """Of a result its round, and the contributors that were no members when it came."""
        self._named: dict[ContributionId, tuple[Reference, list[PeerId]]] = {}
        self._alone: Counter[PeerId] = Counter()
        """Of what only this neighbour names, how many."""
        self._look_at = -inf

    def __len__(self) -> int:
        return len(self._named)

    def named(self, peer: PeerId, reference: Reference) -> None:
        _, holders = self._named.get(reference.id, (reference, []))
        if peer in holders:
            return
        if not holders and (len(self._named) >= MOST_WAITING or self._alone[peer] >= MOST_OF_ONE):
            return
        self._count(holders, -1)
        holders.append(peer)
        self._count(holders, 1)
        self._named[reference.id] = (reference, holders)

    def strangers(self, peer: PeerId, reference: Reference, contributors: Iterable[PeerId]) -> None:
        """A result that `peer` sent names contributors that do not belong to the group: keys cost nothing to
        make, and of two results the one with more contributors counts. It enters no set before they are known
        as members, or half of the group holds it."""
        self._strangers[reference.id] = reference.round, frozenset(contributors)
        if len(self._strangers) > MOST_WAITING:
            self._strangers.popitem(last=False)
        self.named(peer, reference)

    def names_strangers(self, identity: ContributionId) -> bool:
        """Whether a result names contributors that do not belong to the group yet."""
        _, contributors = self._strangers.get(identity, (-1, frozenset[PeerId]()))
        return not all(map(self._is_member, contributors))

    def holders(self, identity: ContributionId) -> tuple[PeerId, ...]:
        found = self._named.get(identity)
        return tuple(found[1]) if found is not None else ()

    def due(self, now: float) -> tuple[Reference, ...]:
        """Those that wait, if it is time to look at them again."""
        if not self._named or now < self._look_at:
            return ()
        self._look_at = now + LOOK_SECONDS
        return tuple(reference for reference, _ in self._named.values())

    def end(self, identity: ContributionId) -> tuple[PeerId, ...]:
        """It waits no longer; who holds it."""
        _, holders = self._named.pop(identity, (None, []))
        self._count(holders, -1)
        return tuple(holders)

    def left(self, peer: PeerId) -> None:
        for identity, (_, holders) in list(self._named.items()):
            if peer in holders:
                self._count(holders, -1)
                holders.remove(peer)
                self._count(holders, 1)
                if not holders:
                    del self._named[identity]

    def forget_until(self, round: int) -> None:
        """Rounds up to this one are settled."""
        for identity in [name for name, (of, _) in self._strangers.items() if of <= round]:
            del self._strangers[identity]
        for identity in [name for name, (reference, _) in self._named.items() if reference.round <= round]:
            self.end(identity)

    def _count(self, holders: list[PeerId], by: int) -> None:
        if len(holders) == 1:
            self._alone[holders[0]] += by
            if not self._alone[holders[0]]:
                del self._alone[holders[0]]
