"""Stages that stand still: peers wait there for weights, and no peer of the stage has them.

A peer that has such a stage's checkpoint on its own disk goes there before all else. Until it does, the
peers that wait carry nothing. In a run that has hardly begun no peer waits: all begin from the seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Protocol


class Stands(Protocol):
    """A peer as its newest record or beat shows it."""

    @property
    def stage(self) -> int: ...

    @property
    def waits(self) -> bool:
        """It has no weights yet."""

    @property
    def round(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Standing:
    """`Stands`, where nothing else is known of the peer."""

    stage: int
    waits: bool
    round: int


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The newest usable checkpoint of a stage on the own disk."""

    stage: int
    round: int


def stuck_stages(peers: Iterable[Stands], snapshot_rounds: int) -> dict[int, int]:
    """Return the stages in which all peers wait for weights, and how many wait there. Empty before the run's
    first snapshot: until then a peer without weights begins from the seed."""
    peers = [peer for peer in peers if peer.stage >= 0]
    rounds = [peer.round for peer in peers if not peer.waits]
    if not rounds or median_low(rounds) < snapshot_rounds:
        return {}
    served = {peer.stage for peer in peers if not peer.waits}
    waiting = Counter(peer.stage for peer in peers if peer.stage not in served)
    return dict(sorted(waiting.items()))


def stage_to_restore(
    peers: Iterable[Stands], on_disk: Sequence[OnDisk], never: Collection[int] = ()
) -> int | None:
    """Return the stage whose weights this peer has and the peers there lack; None: there is none. A stage
    without weights comes before one with older weights; one where peers wait comes before an empty one.
    `on_disk`: the checkpoint that was written last comes first; it decides between equal stages."""
    rounds: dict[int, list[int]] = {}
    waiting: Counter[int] = Counter()
    for peer in peers:
        if peer.waits:
            waiting[peer.stage] += 1
        else:
            rounds.setdefault(peer.stage, []).append(peer.round)
    usable = [held for held in on_disk if held.stage not in never]
    lost = [held.stage for held in usable if held.stage not in rounds]
    older = [held.stage for held in usable
             if held.stage in rounds and held.round > median_high(rounds[held.stage])]  # fmt: skip
    return next(iter([*sorted(lost, key=lambda stage: not waiting[stage]), *older]), None)
