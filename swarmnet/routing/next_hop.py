"""Choose where a microbatch goes next from one peer, and the implementation for runs that skip no stage.

A microbatch passes the stages of the pipeline from peer to peer. Its header lists the stages that it has
visited. `NextHop` is the interface that decides which peers may be next. `Straight` implements it for runs in
which every microbatch visits all stages, and `Returning` for the last stage of a U-shaped run. `Skipping`
(`skipping.py`) is for runs that skip stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.run.path_rules import IllegalPath, PathHeader, PathRules, check, straight

Live = Callable[[int], Collection[PeerId]]
"""Maps a stage to its peers that take microbatches now."""


@dataclass(frozen=True, slots=True)
class Passage:
    """What the path of a microbatch means for one stage that it passes."""

    path_stages: int
    """Number of stages on the whole path."""
    branch_scale: float = 1.0
    """Weight of this stage's layers on this path (`PathRules.branch_scale`)."""


class NextHop(Protocol):
    """The paths of the microbatches on one peer. Each path is checked when its microbatch arrives and kept
    until `forget`. It leads to peers of the stages that may be next."""

    stage: int

    def start(self, key: MicrobatchId) -> Passage:
        """Begin a microbatch on this peer, which is an origin of the first stage."""

    def check(self, header: PathHeader) -> None:
        """Raise IllegalPath unless a microbatch may come here with this header."""

    def came_by_other_path(self, key: MicrobatchId, header: PathHeader) -> bool:
        """Return whether this microbatch arrived here before by another path. If so, the result computed for
        that path is no answer to this request."""

    def arrive(self, key: MicrobatchId, header: PathHeader) -> Passage:
        """Keep a checked header until `forget`."""

    def candidates(self, key: MicrobatchId | None, tried: Collection[PeerId] = ()) -> Collection[PeerId]:
        """Return live peers that the microbatch may be sent to; `key` None stands for a new microbatch. If it
        was sent to peers that failed (`tried`), other peers are preferred."""

    def header_for(self, key: MicrobatchId, stage: int) -> PathHeader:
        """Return the microbatch's header for a peer of `stage`. Raises IllegalPath if it may not go there."""

    def missing(self) -> tuple[int, ...]:
        """Return stages without a peer that the next microbatch would wait for; empty if there are none."""

    def forget(self, key: MicrobatchId) -> None:
        """Drop the path of a microbatch that is done or was abandoned."""


class Straight:
    """Every microbatch visits all stages in order, so no path has to be kept."""

    def __init__(self, rules: PathRules, stage: int, live: Live) -> None:
        self.rules = rules
        self.stage = stage
        self.live = live
        self._passage = Passage(rules.stages)
        self._here = straight(rules, stage)
        self._next = straight(rules, stage + 1) if stage < rules.last else None

    def start(self, key: MicrobatchId) -> Passage:
        return self._passage

    def check(self, header: PathHeader) -> None:
        if header != self._here:
            check(header, self.stage, self.rules)  # Raises with the reason.

    def came_by_other_path(self, key: MicrobatchId, header: PathHeader) -> bool:
        return False

    def arrive(self, key: MicrobatchId, header: PathHeader) -> Passage:
        return self._passage

    def candidates(self, key: MicrobatchId | None, tried: Collection[PeerId] = ()) -> Collection[PeerId]:
        live = self.live(self.stage + 1)
        if not tried:
            return live
        return [peer for peer in live if peer not in tried] or live

    def header_for(self, key: MicrobatchId, stage: int) -> PathHeader:
        if self._next is None or stage != self.stage + 1:
            raise IllegalPath(f"stage {stage} does not come after stage {self.stage}")
        return self._next

    def missing(self) -> tuple[int, ...]:
        is_served = self._next is None or self.live(self.stage + 1)
        return () if is_served else (self.stage + 1,)

    def forget(self, key: MicrobatchId) -> None:
        pass


class Returning(Straight):
    """The last stage of a U-shaped run: a microbatch goes on to its origin, and to no other owner."""

    def candidates(self, key: MicrobatchId | None, tried: Collection[PeerId] = ()) -> Collection[PeerId]:
        owners = self.live(0)
        return owners if key is None else [key.origin] if key.origin in owners else []

    def header_for(self, key: MicrobatchId, stage: int) -> PathHeader:
        return super().header_for(key, self.rules.last if stage == 0 else stage)

    def missing(self) -> tuple[int, ...]:
        return ()  # An origin that left takes its microbatches with it.
