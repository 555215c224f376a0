"""Decide whether a peer's upload is fast enough for its run, from what the run needs and what arrived in
time.

A peer adapts its share of microbatches to its link. It cannot adapt the contributions (compressed updates),
because each peer of a group passes on those of all others. A round does not wait for a slow peer. The module
does no IO. Rates are bytes per second.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from swarmnet.resources.bandwidth_estimate import contributions_per_second, gossip_of
from swarmnet.resources.link_bandwidth import crossings
from swarmnet.run.manifest import Manifest

REMEMBERED = 16
"""Number of own contributions to remember: some minutes of a usual run."""
MIN_DECIDED = 8
"""Minimum number of decided contributions that prove anything; the first after a start are often late."""


def needed_upload(manifest: Manifest, stage: int, tokens_per_second: float, group: int) -> float:
    """Return the bytes per second that a peer of `stage` must send to keep up with its group. This is the
    traffic of contributions, and of one microbatch for each own contribution, the least work that makes one.
    `tokens_per_second` is the rate of the whole group, and `group` its number of peers. A peer alone needs
    nothing: its rounds wait for it."""
    if group <= 1:
        return 0.0
    own_per_second = contributions_per_second(manifest, tokens_per_second, group) / group
    activations = crossings(manifest)[stage].sent * own_per_second
    return gossip_of(manifest, stage, tokens_per_second, group) + activations


@dataclass(frozen=True, slots=True)
class UploadVerdict:
    """A link that is too slow, or contributions that suggest it."""

    line: float
    """Upload rate; `inf` if unknown."""
    need: float
    decided: int = 0
    """Number of newest own contributions of which it is known whether they were in time."""
    late: int = 0
    """Number of these that missed their round."""

    @property
    def is_short(self) -> bool:
        return self.line < self.need

    @property
    def has_proof(self) -> bool:
        return self.decided >= MIN_DECIDED and 2 * self.late > self.decided


def judge_upload(line: float, need: float, decided: int = 0, late: int = 0) -> UploadVerdict | None:
    """Return a verdict if the upload is too slow, else None. If the fate of at least `MIN_DECIDED` own
    contributions is known (`decided`), it is too slow if most were `late`. Otherwise the link's rate `line`
    is compared with `need`."""
    verdict = UploadVerdict(line, need, decided, late)
    if decided >= MIN_DECIDED:
        return verdict if verdict.has_proof else None
    return verdict if verdict.is_short else None


class ContributionFates:
    """Record which of the newest own contributions came in time."""

    def __init__(self) -> None:
        self._rounds: dict[Hashable, int] = {}
        self._late: dict[Hashable, bool] = {}

    def make(self, id: Hashable, round: int) -> None:
        """Record an own contribution for this round. The oldest beyond `REMEMBERED` are forgotten."""
        self._rounds[id] = round
        while len(self._rounds) > REMEMBERED:
            oldest = next(iter(self._rounds))
            del self._rounds[oldest]
            self._late.pop(oldest, None)

    def give_back(self, id: Hashable) -> None:
        """Record that the group left a contribution out. This may become known after the round settled."""
        if id in self._rounds:
            self._late[id] = True

    def settle(self, round: int) -> None:
        """Record that this round and all before it are settled."""
        for id, made_for in self._rounds.items():
            if made_for <= round:
                self._late.setdefault(id, False)

    def lose_open(self) -> None:
        """Count open contributions as late when the state is fetched again. The group did not wait."""
        for id in self._rounds:
            self._late.setdefault(id, True)

    @property
    def decided(self) -> int:
        return len(self._late)

    @property
    def late(self) -> int:
        return sum(self._late.values())
