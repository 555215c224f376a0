"""When a round may be applied and when it settles, given what the neighbours of our history say of it.

Nobody sees a large group whole, so what all must know travels as *levels*, one hop with each Progress. A
peer is at level 1 when something holds for itself, and at k + 1 when all its neighbours say that they are at
k or more: then it holds for everybody within k hops. With `hops` hops to the farthest peer, level `hops` + 1
speaks for all (a wave algorithm: Tel, "Introduction to Distributed Algorithms", chapter 6); in a fully linked
group that is 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarmnet.identifiers import PeerId
from swarmnet.manifest import Rounds
from swarmnet.round_sets import NeighbourView, RoundSet


@dataclass(frozen=True, slots=True)
class Agreement:
    """`allies`: the neighbours whose history is ours. Times in seconds on the caller's clock."""

    rules: Rounds
    allies: Mapping[PeerId, NeighbourView]
    hops: int = 1
    """From here to the farthest peer of the group."""

    def is_half(self, saying: Iterable[bool]) -> bool:
        """Whether those allies who say so are at least half of those in sight, this peer included: one may
        claim what it likes."""
        return 2 * sum(saying) >= 1 + len(self.allies)

    def adopted(self, number: int, state: RoundSet, now: float) -> bool | None:
        """Whether the set equals that of the allies who have settled the round; None: nobody has, or less
        than half of the group names sets that cannot be had."""
        settled = [view for view in self.allies.values() if view.settled >= number]
        if not settled:
            return None
        if any(number in view.sets and view.sets[number].digest == state.digest for view in settled):
            return True
        few = not self.is_half(view.settled >= number for view in self.allies.values())
        return None if few and now >= state.closed_at + self.rules.settle_seconds else False

    def raise_levels(self, number: int, state: RoundSet, parted: bool) -> bool:
        """Of a closed round, the own contribution to which is made and of which nothing is being pulled; a
        level that was reached stays. `parted`: a lost ally may hold what others lack. True: they rose."""
        before = state.gathered, state.sealed
        if state.gathered <= self.hops:
            state.gathered = max(state.gathered, self.gathered(number, state))
        if 0 < state.sealed <= self.hops and not parted:
            state.sealed = max(state.sealed, self.sealed(number, state))
        return before != (state.gathered, state.sealed)

    def gathered(self, number: int, state: RoundSet) -> int:
        """The level of "has closed the round, and what it makes for it is made" around this peer, whose own
        is made and who pulls nothing: at level k + 1 all that was made within k hops is held here."""
        everywhere = level = self.hops + 1
        for peer, view in self.allies.items():
            if not view.in_step or view.settled >= number:
                continue
            entry = view.sets.get(number)
            theirs = entry.gathered if entry is not None else 0
            makes_none = view.round > number and number not in view.contributed
            if not theirs and (makes_none or peer in state.held):
                theirs = 1
            level = min(level, theirs + 1)
        return min(level, everywhere)

    def sealed(self, number: int, state: RoundSet) -> int:
        """The level of "has sealed this very set" around this peer, who has: at level k + 1 everybody within
        k hops had it so when last heard, and nobody there makes more for it."""
        level = self.hops + 1
        for view in self.allies.values():
            if view.in_step:
                entry = view.sets.get(number)
                agrees = entry is not None and entry.digest == state.digest
                level = min(level, entry.sealed + 1 if agrees and entry is not None else 1)
        return level

    def may_apply(self, number: int, state: RoundSet, now: float) -> bool:
        """A closed round: every contribution that is expected is in, or its deadline has passed."""
        adopted = self.adopted(number, state, now)
        if adopted is not None:
            return adopted
        return state.gathered > self.hops or now >= state.closed_at + self.rules.deadline_seconds

    def may_settle(self, number: int, state: RoundSet, now: float) -> bool:
        """An applied round: all have sealed the same set, or were silent for too long. Who is catching up is
        not waited for, unless that is half of the group: it would be left behind for good."""
        adopted = self.adopted(number, state, now)
        if adopted is not None:
            return adopted
        if not state.sealed:
            return False
        if now >= state.sealed_at + self.rules.settle_seconds:
            return True
        if self.is_half(not view.in_step for view in self.allies.values()):
            return False
        return state.sealed > self.hops

    def patience_ends(self, number: int, state: RoundSet, applied: bool) -> float:
        """When time alone will let the round be applied, or settle if it is `applied`; infinite: never, it
        waits for the set that half of the group has settled."""
        patience = state.sealed_at + self.rules.settle_seconds
        if not applied:
            patience = state.closed_at + self.rules.deadline_seconds
        if self.adopted(number, state, float("-inf")) is None:
            return patience
        if self.adopted(number, state, float("inf")) is not None:
            return float("inf")
        return max(patience, state.closed_at + self.rules.settle_seconds)
