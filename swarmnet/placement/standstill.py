"""Find pipeline stages that are stuck: peers wait there for weights, and no peer of the stage has them.

A new peer fetches the weights from the peers that serve the stage. In a stuck stage no peer can provide them.
A peer that has a checkpoint of such a stage on its disk goes there first. Until one does, the waiting peers
carry no microbatches. No peer waits before the run's first snapshot: all begin from the seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Protocol


class HasStage(Protocol):
    """A peer as its newest record or heartbeat shows it."""

    @property
    def stage(self) -> int: ...

    @property
    def waits(self) -> bool:
        """True if the peer has no weights yet."""

    @property
    def round(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StagePeer:
    """A plain `HasStage`, for peers of which nothing else is known."""

    stage: int
    waits: bool
    round: int


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The newest usable checkpoint of a stage on this peer's disk."""

    stage: int
    round: int


def stuck_stages(peers: Iterable[HasStage], rounds_from_seed: int) -> dict[int, int]:
    """Return the stages in which all peers wait for weights, and how many wait there. It is empty in the
    run's first `rounds_from_seed` rounds: until then a peer without weights begins from the seed."""
    peers = [peer for peer in peers if peer.stage >= 0]
    rounds = [peer.round for peer in peers if not peer.waits]
    if not rounds or median_low(rounds) < rounds_from_seed:
        return {}
    served = {peer.stage for peer in peers if not peer.waits}
    waiting = Counter(peer.stage for peer in peers if peer.stage not in served)
    return dict(sorted(waiting.items()))


def stage_to_restore(
    peers: Iterable[HasStage], on_disk: Sequence[OnDisk], never: Collection[int] = ()
) -> int | None:
    """Return the stage that this peer should restore from a checkpoint on its disk; None if there is none.

    First come stages where peers wait and none has weights, then stages without peers. Stages whose peers
    have older weights than the disk come last. Between equal stages the order of `on_disk` decides, which
    begins with the checkpoint written last. A stage in `never` is not returned."""
    rounds: dict[int, list[int]] = {}  # The rounds of the peers with weights, by stage.
    waiting: Counter[int] = Counter()
    for peer in peers:
        if peer.waits:
            waiting[peer.stage] += 1
        else:
            rounds.setdefault(peer.stage, []).append(peer.round)
    usable = [checkpoint for checkpoint in on_disk if checkpoint.stage not in never]
    without_weights = [checkpoint.stage for checkpoint in usable if checkpoint.stage not in rounds]
    with_older_weights = [
        checkpoint.stage
        for checkpoint in usable
        if checkpoint.stage in rounds and checkpoint.round > median_high(rounds[checkpoint.stage])
    ]
    without_weights.sort(key=lambda stage: waiting[stage] == 0)  # Stages with waiting peers first.
    return next(iter([*without_weights, *with_older_weights]), None)
