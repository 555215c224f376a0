"""Whether a peer's upload is fast enough for its run: what the run needs, and what came in time.

A peer adapts its share of microbatches to its line. It cannot adapt the contributions: each peer of a group
passes on those of all others, and a round does not wait for a slow one. No IO. Rates in bytes per second.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from swarmnet.resources.bandwidth_estimate import contributions_per_second, gossip_of
from swarmnet.resources.lines import crossings
from swarmnet.run.manifest import Manifest

REMEMBERED = 16
"""Own contributions whose fate is remembered: some minutes of a run of usual rounds."""
LEAST_DECIDED = 8
"""So few decided contributions prove nothing: the first ones after a start are often late."""


def needed_upload(manifest: Manifest, stage: int, tokens_per_second: float, group: int) -> float:
    """Return the bytes per second that a peer of `stage` must send to keep up with its group.

    This is the traffic of contributions, and the hidden states of one microbatch for each own contribution.
    `tokens_per_second`: of the whole group; `group`: its peers, this one included. A peer alone
    needs nothing: its rounds wait for it.
    """
    if group <= 1:
        return 0.0
    each = contributions_per_second(manifest, tokens_per_second, group) / group
    return gossip_of(manifest, stage, tokens_per_second, group) + crossings(manifest)[stage].sent * each


@dataclass(frozen=True, slots=True)
class UploadVerdict:
    """A line that is too slow, or contributions that suggest it."""

    line: float
    """`inf`: not known."""
    need: float
    decided: int = 0
    """Newest own contributions of which is known whether they were in time."""
    late: int = 0
    """Of these, those without which the group went on."""

    @property
    def is_short(self) -> bool:
        return self.line < self.need

    @property
    def has_proof(self) -> bool:
        return self.decided >= LEAST_DECIDED and 2 * self.late > self.decided


def judge_upload(line: float, need: float, decided: int = 0, late: int = 0) -> UploadVerdict | None:
    """Return what is wrong with the upload; None: nothing. Contributions in time outweigh an estimate."""
    verdict = UploadVerdict(line, need, decided, late)
    if decided >= LEAST_DECIDED:
        return verdict if verdict.has_proof else None
    return verdict if verdict.is_short else None


class ContributionFates:
    """Which of the newest own contributions came in time."""

    def __init__(self) -> None:
        self._rounds: dict[Hashable, int] = {}
        self._late: dict[Hashable, bool] = {}

    def make(self, id: Hashable, round: int) -> None:
        """An own contribution was made for this round."""
        self._rounds[id] = round
        while len(self._rounds) > REMEMBERED:
            oldest = next(iter(self._rounds))
            del self._rounds[oldest]
            self._late.pop(oldest, None)

    def give_back(self, id: Hashable) -> None:
        """The group went on without it, as may become known after the round settled."""
        if id in self._rounds:
            self._late[id] = True

    def settle(self, round: int) -> None:
        """This round and all before it are settled."""
        for id, made_for in self._rounds.items():
            if made_for <= round:
                self._late.setdefault(id, False)

    def lose_open(self) -> None:
        """The state is fetched anew: the group did not wait for what was open."""
        for id in self._rounds:
            self._late.setdefault(id, True)

    @property
    def decided(self) -> int:
        return len(self._late)

    @property
    def late(self) -> int:
        return sum(self._late.values())
