"""When a round may be applied and when it settles, given what the neighbours of our history say of it."""

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

    def is_half(self, saying: Iterable[bool]) -> bool:
        """Whether those allies who say so are at least half of the group, this peer included: one may claim
        what it likes."""
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

    def may_apply(self, number: int, state: RoundSet, pulling: bool, now: float) -> bool:
        """A closed round: every contribution that is expected is in, or its deadline has passed. `pulling`:
        some of it are on their way."""
        adopted = self.adopted(number, state, now)
        if adopted is not None:
            return adopted
        if now >= state.closed_at + self.rules.deadline_seconds:
            return True
        return not pulling and all(
            peer in state.held or (view.round > number and number not in view.contributed)
            for peer, view in self.allies.items()
            if view.in_step
        )

    def may_settle(self, number: int, state: RoundSet, pulling: bool, now: float) -> bool:
        """An applied round: all allies have sealed the same set, or were silent for too long. Who is catching
        up is not waited for, unless that is half of the group: it would be left behind for good."""
        adopted = self.adopted(number, state, now)
        if adopted is not None:
            return adopted
        if not state.sealed:
            return False
        if now >= state.sealed_at + self.rules.settle_seconds:
            return True
        if self.is_half(not view.in_step for view in self.allies.values()):
            return False
        return not pulling and all(
            number in view.sets and view.sets[number].sealed and view.sets[number].digest == state.digest
            for view in self.allies.values()
            if view.in_step
        )

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
