"""Decides whose contributions have weight in a group, and keeps those whose contributors are not known yet.

A contribution without weight enters no round's set. Keys are free, and contributors sign their own
contributions. One link could therefore bring the votes of any number of keys (a Sybil attack). A contributor
has weight if it belongs to the group (`Membership.is_member`) and the run's owner has not banned it. A
contribution that half of the peers in sight hold has weight in any case: a peer that rejected it would fork.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import InitVar, dataclass
from math import inf

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.membership.membership import Membership
from swarmnet.membership.overlay import FULL_GROUP
from swarmnet.rounds.contribution_sets import RoundSet
from swarmnet.rounds.events import Reference
from swarmnet.rounds.open_round import CurrentRound
from swarmnet.rounds.settlement import FinalityRules
from swarmnet.run.schema import Rounds

GROUPS = 2
"""A round may have this many times as many contributors as the group has peers. It allows for peers that have
left, and for peers that this one has not met yet."""
FEWEST_MAKERS = GROUPS * FULL_GROUP
"""Least number of contributors allowed in a round: the group may have been larger when the round was made."""
MAX_CONTRIBUTORS = 700
"""Greatest number of contributors in a round. A whole set must fit in the header of one announcement, 64 KiB
at 89 bytes each. Sums of votes are int16, which allows far more (optimizer/sign_votes.py)."""
MAX_WAITING = 1024
"""Contributions that wait until their contributors are known: 8 rounds of a group of 128."""
MAX_OF_ONE = MAX_WAITING // 4
"""Waiting contributions that only one and the same neighbour has named. It must not displace others."""
LOOK_SECONDS = 0.25
"""How often waiting contributions are checked again: half of what an announcement takes over three hops."""

HasWeight = Callable[[PeerId, int], bool]
"""Takes a peer and a round, and returns whether its contributions to that round have weight."""


def max_contributors(peers: int) -> int:
    """Return how many contributors a round may have in a group of `peers`."""
    return min(MAX_CONTRIBUTORS, max(FEWEST_MAKERS, GROUPS * peers))


class ContributorFilter:
    """Decides whether a contributor has weight: by membership, bans and proofs."""

    def __init__(self, membership: Membership, rules: Rounds) -> None:
        self._membership = membership
        self._rules = rules
        self._banned: dict[PeerId, int] = {}
        """Banned peers, and the first round from which the ban applies."""
        self.convicted: Mapping[PeerId, int] = {}
        """Peers that are proven faulty, and the first round from which they have no weight (audits.py)."""

    def bar(
        self,
        peers: Iterable[PeerId],
        current: int,
        rolled_back: Container[PeerId] = frozenset(),
        settled: int = -1,
    ) -> None:
        """Replace the peers that the owner has banned. `current`: the current round; -1 before the first.

        The order reaches peers at different times, so a ban begins more than `window` rounds ahead, at a
        multiple of `snapshot_interval`. Most peers then ban the same rounds. The bans of peers in
        `rolled_back` begin with the rounds that are open now, after round `settled`. An earlier ban is
        kept."""
        interval = self._rules.snapshot_interval
        first = 0
        if current >= 0:
            first = ((current + self._rules.window) // interval + 1) * interval
        first_of = {peer: settled + 1 if peer in rolled_back else first for peer in peers}
        self._banned = {peer: min(self._banned.get(peer, start), start) for peer, start in first_of.items()}

    def counts(self, contributor: PeerId, round: int) -> bool:
        """Return whether contributions of a peer to a round have weight. It must belong to the group, and not
        be banned or proven faulty in that round."""
        first_without = min(self._banned.get(contributor, inf), self.convicted.get(contributor, inf))
        return round < first_without and self._membership.is_member(contributor)


class QuorumAccepted:
    """Contributions to open rounds that half of the peers in sight hold. They have weight in any case."""

    def __init__(self) -> None:
        self._contributors: dict[int, dict[ContributionId, PeerId]] = {}

    def __contains__(self, reference: Reference) -> bool:
        return reference.id in self._contributors.get(reference.round, {})

    def of(self, contributor: PeerId, round: int) -> bool:
        """Return whether any contribution of a peer to a round is recorded here."""
        return contributor in self._contributors.get(round, {}).values()

    def add(self, reference: Reference) -> None:
        self._contributors.setdefault(reference.round, {})[reference.id] = reference.peer

    def withdraw(self, contributor: PeerId, round: int) -> None:
        """Remove the contributions of a peer to a round."""
        accepted = self._contributors.get(round, {})
        self._contributors[round] = {key: peer for key, peer in accepted.items() if peer != contributor}

    def forget(self, round: int) -> None:
        self._contributors.pop(round, None)


class UnknownContributors:
    """Contributions whose contributors have no weight here yet, and the neighbours that named each.

    Their number is bounded, because ids cost nothing. Above the bound, another contribution is not recorded,
    and the oldest unknown contributors of a result are forgotten. Its neighbour names it again as long as the
    neighbour's set differs from this peer's."""

    def __init__(self, is_member: Callable[[PeerId], bool] = lambda peer: True) -> None:
        self._is_member = is_member
        self._unknown_in_result: OrderedDict[ContributionId, tuple[int, frozenset[PeerId]]] = OrderedDict()
        """For a result: its round, and the contributors that were no members when it came."""
        self._named: dict[ContributionId, tuple[Reference, list[PeerId]]] = {}
        self._named_alone: Counter[PeerId] = Counter()
        """Number of contributions that only this neighbour names."""
        self._next_check_at = -inf

    def __len__(self) -> int:
        return len(self._named)

    def named(self, peer: PeerId, reference: Reference) -> None:
        """Record that a neighbour named a contribution. If it is the first to do so, there must be room: at
        most `MAX_WAITING` are kept in all, and `MAX_OF_ONE` that only this neighbour names."""
        _, holders = self._named.get(reference.id, (reference, []))
        if peer in holders:
            return
        if not holders and (len(self._named) >= MAX_WAITING or self._named_alone[peer] >= MAX_OF_ONE):
            return
        self._count_single_holder(holders, -1)  # An earlier holder is then no longer the only one.
        holders.append(peer)
        self._count_single_holder(holders, 1)
        self._named[reference.id] = (reference, holders)

    def record_unknown_in_result(
        self, peer: PeerId, reference: Reference, contributors: Iterable[PeerId]
    ) -> None:
        """Record that `peer` sent a reducer's result that names `contributors`, which do not belong to the
        group.

        If two results overlap, the one with more contributors wins, so a reducer could invent contributors.
        This result therefore enters no set until all its contributors are members of the group, or until half
        of the peers in sight hold the result."""
        self._unknown_in_result[reference.id] = reference.round, frozenset(contributors)
        if len(self._unknown_in_result) > MAX_WAITING:
            self._unknown_in_result.popitem(last=False)
        self.named(peer, reference)

    def names_strangers(self, identity: ContributionId) -> bool:
        """Return whether a reducer's result names contributors that do not belong to the group yet."""
        _, contributors = self._unknown_in_result.get(identity, (-1, frozenset[PeerId]()))
        return not all(map(self._is_member, contributors))

    def holders(self, identity: ContributionId) -> tuple[PeerId, ...]:
        """Return the neighbours that named a waiting contribution."""
        _, holders = self._named.get(identity, (None, []))
        return tuple(holders)

    def due(self, now: float) -> tuple[Reference, ...]:
        """Return all waiting contributions if it is time to check them again; otherwise an empty tuple."""
        if not self._named or now < self._next_check_at:
            return ()
        self._next_check_at = now + LOOK_SECONDS
        return tuple(reference for reference, _ in self._named.values())

    def end(self, identity: ContributionId) -> tuple[PeerId, ...]:
        """Remove a contribution. Returns the neighbours that named it."""
        _, holders = self._named.pop(identity, (None, []))
        self._count_single_holder(holders, -1)
        return tuple(holders)

    def left(self, peer: PeerId) -> None:
        """Remove a neighbour that left, and the contributions that only it named.

        A contribution may then have a single neighbour left that named it. It is removed too if this
        neighbour is the only one for more than `MAX_OF_ONE` contributions."""
        for identity, (_, holders) in list(self._named.items()):
            if peer in holders:
                self._count_single_holder(holders, -1)
                holders.remove(peer)
                self._count_single_holder(holders, 1)
                if not holders or self._named_alone[holders[0]] > MAX_OF_ONE:
                    self.end(identity)

    def forget_until(self, round: int) -> None:
        """Forget the contributions to settled rounds, up to `round`."""
        for identity, (of_round, _) in list(self._unknown_in_result.items()):
            if of_round <= round:
                del self._unknown_in_result[identity]
        for identity, (reference, _) in list(self._named.items()):
            if reference.round <= round:
                self.end(identity)

    def _count_single_holder(self, holders: list[PeerId], by: int) -> None:
        """Add `by` to the count of a neighbour that is the only holder."""
        if len(holders) == 1:
            self._named_alone[holders[0]] += by
            if not self._named_alone[holders[0]]:
                del self._named_alone[holders[0]]


@dataclass(eq=False, kw_only=True)
class SetAdmission:
    """Decides which contributions may enter the sets of the open rounds, and keeps those that may not yet.

    A contribution may enter if it has weight, or if half of the peers in sight hold it. The set also needs
    room for it.

    `rounds`: the sets of the open rounds; `open_round` knows the size of the group."""

    me: PeerId
    has_weight: HasWeight
    is_member: InitVar[Callable[[PeerId], bool]]
    rounds: Mapping[int, RoundSet]
    neighbours: Container[PeerId]
    open_round: CurrentRound

    def __post_init__(self, is_member: Callable[[PeerId], bool]) -> None:
        self.waiting = UnknownContributors(is_member)
        self.convicted: dict[PeerId, int] = {}
        """Peers that are proven faulty, and the first round in which half cannot make theirs count."""
        self.accepted_by_half = QuorumAccepted()

    def may_enter(self, reference: Reference) -> bool:
        """Return whether its set has room for a contribution that has weight, or that half in sight hold."""
        if reference in self.accepted_by_half:
            return self._count_others(reference.round, reference.peer) < MAX_CONTRIBUTORS - 1
        if self.waiting.names_strangers(reference.id):  # A result that sums slices of no members.
            return False
        peer, round = reference.peer, reference.round
        return self.has_weight(peer, round) and self._has_room(round, peer)

    def expects(self, round: int, contributor: PeerId) -> bool:
        """Return whether a contribution of `contributor` could enter that set, before one is verified."""
        counts = self.has_weight(contributor, round) and self._has_room(round, contributor)
        return counts or self.accepted_by_half.of(contributor, round)

    def wait(self, peer: PeerId, reference: Reference, agreement: FinalityRules) -> None:
        """Keep a contribution to an open round that `peer` named and that may not enter yet. It is accepted
        if half of the peers in sight hold it and its contributor is not proven faulty."""
        self.waiting.named(peer, reference)
        if reference.round >= self.convicted.get(reference.peer, reference.round + 1):
            return  # Half of them may not have the proof yet.
        holders = self.waiting.holders(reference.id)
        if agreement.is_half(branch_peer in holders for branch_peer in agreement.same_branch_peers):
            self.accepted_by_half.add(reference)

    def forget_until(self, round: int) -> None:
        """Forget the contributions to settled rounds, up to `round`."""
        self.waiting.forget_until(round)
        self.accepted_by_half.forget(round)

    def _has_room(self, round: int, contributor: PeerId) -> bool:
        """Return whether the set may grow by a contribution of `contributor`. Linked peers find more room."""
        is_linked = contributor in self.neighbours
        most = MAX_CONTRIBUTORS if is_linked else max_contributors(self.open_round.peers)
        return self._count_others(round, contributor) < most - 1

    def _count_others(self, round: int, contributor: PeerId) -> int:
        """Return how many peers have a contribution in the set, without this peer and `contributor`."""
        held = self.rounds[round].held if round in self.rounds else {}
        return len(held) - (contributor in held) - (self.me in held)
