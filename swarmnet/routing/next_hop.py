"""Where a microbatch goes next from one peer: what a data path asks, and the answer of most runs.

Where a run may leave stages out or take them in another order, `Skipping` (skipping.py) answers instead.
Which of the two it is, is decided once, when a peer's parts are put together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.run.path_rules import Header, IllegalPath, Rules, check, straight

Live = Callable[[int], Collection[PeerId]]
"""Stage -> its peers that take microbatches now."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A microbatch's passage through a stage: what its path means there."""

    path_stages: int
    """On its whole path."""
    branch_scale: float = 1.0
    """What the stage's layers count for on it (Rules.branch_scale)."""


class NextHop(Protocol):
    """The paths of the microbatches on one peer. Each is checked when it comes, kept until `forget`, and
    leads to peers of the stages that may be next."""

    stage: int

    def start(self, key: MicrobatchId) -> Passage:
        """One begins here, on the first stage."""

    def check(self, header: Header) -> None:
        """Raise IllegalPath unless a microbatch may come here with this header."""

    def came_otherwise(self, key: MicrobatchId, header: Header) -> bool:
        """Whether it is here already, by another path: what is kept for it is no answer to this one."""

    def arrive(self, key: MicrobatchId, header: Header) -> Passage:
        """Keep a checked header until `forget`."""

    def candidates(self, key: MicrobatchId | None, tried: Collection[PeerId] = ()) -> Collection[PeerId]:
        """Live peers that it may be sent to; None: a microbatch that would be started now. Once it was sent
        to peers that failed, others come first."""

    def header_for(self, key: MicrobatchId, stage: int) -> Header:
        """What to send with it to a peer of `stage`. Raises IllegalPath if it may not go there."""

    def missing(self) -> tuple[int, ...]:
        """Stages that the next microbatch would wait for because nobody holds them; empty: none."""

    def forget(self, key: MicrobatchId) -> None:
        """It is done, or given up."""



class Straight:
    """Every microbatch visits all stages in their order, so nothing of it need be kept."""

    def __init__(self, rules: Rules, stage: int, live: Live) -> None:
        self.rules = rules
        self.stage = stage
        self.live = live
        self._passage = Passage(rules.stages)
        self._here = straight(rules, stage)
        self._next = straight(rules, stage + 1) if stage < rules.last else None

    def start(self, key: MicrobatchId) -> Passage:
        return self._passage

    def check(self, header: Header) -> None:
        if header != self._here:
            check(header, self.stage, self.rules)  # Says what is wrong with it.

    def came_otherwise(self, key: MicrobatchId, header: Header) -> bool:
        return False

    def arrive(self, key: MicrobatchId, header: Header) -> Passage:
        return self._passage

    def candidates(self, key: MicrobatchId | None, tried: Collection[PeerId] = ()) -> Collection[PeerId]:
        live = self.live(self.stage + 1)
        return ([peer for peer in live if peer not in tried] or live) if tried else live

    def header_for(self, key: MicrobatchId, stage: int) -> Header:
        if self._next is None or stage != self.stage + 1:
            raise IllegalPath(f"stage {stage} does not come after stage {self.stage}")
        return self._next

    def missing(self) -> tuple[int, ...]:
        there = self._next is None or self.live(self.stage + 1)
        return () if there else (self.stage + 1,)

    def forget(self, key: MicrobatchId) -> None:
        pass
