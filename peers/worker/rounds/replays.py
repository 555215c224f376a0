"""What an auditor computes: a window of somebody's work again, a microbatch at a time, from what settled.

In the compute thread, between the peer's own work. It takes what a second peer would: weights, moments and a
gradient of its own, for as long as it lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from peers.compute.stage_part import MakePart
from swarmnet.audits.commitment import Commitment
from swarmnet.audits.replay import Replay, Unknown
from swarmnet.audits.verdict import Evidence, Finding, judging
from swarmnet.audits.work_log import SetNames
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.model.flat_layout import Layout
from swarmnet.model.stage_compute import StageCompute
from swarmnet.optimizer.method import Method
from swarmnet.optimizer.own_steps.local_steps import LocalSteps
from swarmnet.optimizer.step import Step, add_step
from swarmnet.optimizer.tiling import all_tiles
from swarmnet.rounds.history import START
from swarmnet.run.manifest import Manifest

A_PIECE = 64
"""Contributions that are read at once: a round of so many peers, which each of them reads in one go, too.
With 16 to check a proof took a group of sixteen longer than its rounds are kept (docs/log.md)."""


class DrawnText(Protocol):
    """Where anybody finds what a microbatch holds."""

    def microbatch(self, key: MicrobatchId) -> tuple[Tensor, Tensor] | None:
        """inputs_BT and labels_BT; None: not here."""


@dataclass(frozen=True, slots=True)
class Auditor:
    make_part: MakePart | None
    """None: several devices hold its weights together, and it audits nobody."""
    text: Callable[[], DrawnText | None]


NOBODY = Auditor(None, lambda: None)


@dataclass(frozen=True, slots=True)
class PastRound:
    """As it settled."""

    contributions: Mapping[PeerId, tuple[Commitment, memoryview]]
    factor: int
    chain: bytes
    """Its value then."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What a replay begins from."""

    units: Tensor
    """int32 [state.size], after `round`; of this replay alone, which changes it."""
    round: int
    rounds: Mapping[int, PastRound]
    """Those up to it that are kept."""
    text: DrawnText


class KnownPast:
    """`swarmnet.audits.replay.Known`. Weights of an earlier round are those of now without the steps since:
    whole numbers, so that nothing is lost on the way, and no weights need be kept."""

    def __init__(self, settled: Settled, method: Method, layout: Layout) -> None:
        self._method, self._layout = method, layout
        self._units = settled.units[: layout.size]
        self._at = self.last = settled.round
        self._rounds, self._text = settled.rounds, settled.text
        self._names = SetNames()
        self._names.settled(-1, START)
        for round, past in settled.rounds.items():
            self._names.settled(round, past.chain)
            for peer, (commitment, _) in past.contributions.items():
                self._names.name(round, peer, commitment.payload)

    def go_to(self, applied: int) -> Iterator[None]:
        """Yields after about A_PIECE contributions; not at all where a round is missing."""
        if not all(round in self._rounds for round in range(applied + 1, self.last + 1)):
            return
        read = 0
        while self._at != applied:
            towards = self._at if self._at > applied else self._at + 1
            read += len(self._rounds[towards].contributions)
            if self._at > applied:
                self._step_back()
            else:
                self._step_on()
            if read >= A_PIECE:
                read = 0
                yield

    def weights(self, applied: int) -> Tensor | None:
        """See `Known`."""
        if not -1 <= applied <= self.last:
            return None
        for _ in self.go_to(applied):
            pass
        return self._units if self._at == applied else None

    def sets(self, settled: int, applied: int) -> bytes | None:
        """See `Known`."""
        first = settled if settled >= 0 else 0  # Of the one before the open ones the chain is needed.
        known = all(round in self._rounds for round in range(first, applied + 1))
        return self._names.between(settled, applied) if known else None

    def factor(self, round: int) -> int | None:
        """See `Known`."""
        return self._rounds[round].factor if round in self._rounds else None

    def text(self, peer: PeerId, counter: int) -> tuple[Tensor, Tensor]:
        """See `Known`."""
        taken = self._text.microbatch(MicrobatchId(peer, counter))
        if taken is None:
            raise Unknown("its text is not here")
        return taken

    def _step_of(self, round: int) -> Step:
        past, tally = self._rounds[round], self._method.tally(round)
        for peer, (_, payload) in past.contributions.items():
            tally.add(peer, bytes(payload))
        return tally.step(past.factor)

    def _step_back(self) -> None:
        step = self._step_of(self._at)
        for tile in all_tiles(self._layout, self._units.device):
            moved_CN = torch.zeros_like(tile.of(self._units))
            step.add_to(moved_CN, tile)
            tile.of(self._units).sub_(moved_CN)
        self._at -= 1

    def _step_on(self) -> None:
        self._at += 1
        add_step(self._units, self._step_of(self._at), self._layout)


class _FromThePast(Replay):
    def __init__(
        self, peer: PeerId, own: LocalSteps, compute: StageCompute, layout: Layout, known: KnownPast
    ) -> None:
        super().__init__(peer, own, compute, layout, known)
        self._past = known

    def payloads(self, window: Sequence[Commitment]) -> Iterator[bytes | None]:
        """See `Replay`: the way to where it begins is long, too."""
        first = next((stretch.applied for commitment in window for stretch in commitment.stretches), -1)
        if first <= self._past.last:
            yield from self._past.go_to(first)
        yield from super().payloads(window)


def replaying(
    evidence: Evidence, settings: bytes, manifest: Manifest, make_part: MakePart, settled: Settled
) -> Generator[None, None, Finding]:
    """Yields after each piece, of about a microbatch."""
    part = make_part(manifest, 0)
    own, compute = part.method.own, part.compute
    assert isinstance(own, LocalSteps), "only peers that step by themselves commit to work"
    assert isinstance(compute, StageCompute), "devices that hold a stage together audit nobody"
    compute.freeze(settled.units[part.method.state.size :])
    known = KnownPast(settled, part.method, part.layout)
    replay = _FromThePast(evidence.peer, own, compute, part.layout, known)
    evidence = replace(evidence, told={**evidence.told, **_told(evidence, settled.rounds)})
    yield
    return (yield from judging(evidence, manifest.sync.afresh_rounds, settings, replay))


def _told(evidence: Evidence, rounds: Mapping[int, PastRound]) -> dict[bytes, bytes]:
    """What it contributed in the window, by its SHA-256."""
    pasts = (rounds[commitment.round] for commitment in evidence.window if commitment.round in rounds)
    held = (past.contributions[evidence.peer] for past in pasts if evidence.peer in past.contributions)
    return {commitment.payload: bytes(payload) for commitment, payload in held}


def advance(replay: Generator[None, None, Finding]) -> Finding | None:
    """Its next piece; what it has found, at the end."""
    try:
        next(replay)
    except StopIteration as done:
        found: Finding = done.value
        return found
    return None
