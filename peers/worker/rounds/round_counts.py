"""Count what a round service does, for the metrics."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from peers.telemetry.counters import Timings
from swarmnet.optimizer.vote_agreement import VoteAgreement
from swarmnet.rounds.events import ApplyRound
from swarmnet.rounds.group_rounds import GroupRounds

Outcome = Literal["completed", "deadline", "alone", "empty", "replayed"]


class RoundCounts:
    def __init__(self) -> None:
        self.timings = Timings()
        self.ended: Counter[Outcome] = Counter()
        """Rounds applied here, by how they ended."""
        self.contributors = 0
        """Number of contributors to the newest applied round."""
        self.corrections = 0
        """Late contributions that changed an applied round. Counted in the compute thread."""
        self.not_finite = 0
        """Own contributions and local steps lost to gradients not finite, as the compute thread counts."""
        self.votes = VoteAgreement(0, 0, 0)
        """How own sign votes fared in applied rounds. Counted in the compute thread."""
        self.norms: tuple[float | None, float | None] = (None, None)
        """Norms of the newest gradient and of the residual that it left. Measured in the compute thread."""

    def voted(self, vote_agreement: VoteAgreement | None) -> None:
        """Add the result of this peer's votes in an applied round."""
        if vote_agreement is not None:
            self.votes += vote_agreement

    def applied(self, effect: ApplyRound, contributors: int, rounds: GroupRounds, now: float) -> Outcome:
        """Count a round that enters the live weights and return how it ended. `rounds` is the state right
        after that decision; `contributors` is the number of peers that contributed."""
        outcome = _outcome(effect, rounds)
        self.ended[outcome] += 1
        self.contributors = contributors
        before = rounds.rounds.get(effect.round - 1) or rounds.history.get(effect.round - 1)
        if before is not None:  # A round opens when the one before it closes.
            self.timings.append(("round", now - before.closed_at))
        return outcome


def _outcome(effect: ApplyRound, rounds: GroupRounds) -> Outcome:
    neighbours = rounds.neighbours.values()
    has_waited = effect.waited_seconds >= rounds.rules.contribution_timeout_seconds
    if not effect.contributors:
        # A newcomer follows its neighbours through rounds that they left before, and fetches these later.
        follows = not has_waited and any(neighbour.round > effect.round for neighbour in neighbours)
        return "replayed" if follows else "empty"
    if not neighbours:
        return "alone"
    if any(neighbour.settled >= effect.round for neighbour in neighbours):
        return "replayed"
    return "deadline" if has_waited else "completed"
