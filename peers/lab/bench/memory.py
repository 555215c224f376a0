"""What a stage takes in memory, measured: one peer's real parts play rounds in this process.

What lies there for good is measured between two rounds; what comes and goes while a microbatch is computed
and while a round is made, applied and settled is the highest that the system saw meanwhile. Linux only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from peers.compute.process_memory import give_back, resident_bytes
from peers.compute.stage_part import StagePart, real_part
from peers.errors import UserError
from swarmnet.identifiers import PeerId
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.pipeline.flow_control import graph_at_work, graph_bytes
from swarmnet.resources.memory_estimate import PROCESS_BYTES, needs_of
from swarmnet.run.manifest import Manifest

PEERS = (PeerId("this peer"), PeerId("another"))
RESET_PEAK = "5"
"""What proc(5) wants in clear_refs for a new VmHWM."""


@dataclass(frozen=True, slots=True)
class Taken:
    """In bytes per parameter."""

    parameters: int
    held: float
    """Between two rounds, when as many are open as the manifest allows."""
    microbatch: float
    """More while one is computed; its graph is not counted, as far as it is foreseen."""
    round: float
    """More while a round is contributed to, applied and settled."""
    said: float
    """By swarmnet/resources/memory_estimate.py, in all."""


def bench(manifest: Manifest, stage: int, computing: Computing = PLAIN) -> Taken:
    """Raises UserError where the system does not tell."""
    _warm_up()
    before = _resident()
    part = real_part(manifest, stage, computing=computing)
    peer = _Peer(manifest, stage, part)
    for _ in range(manifest.rounds.window + 2):  # Afterwards as many rounds are open as ever.
        peer.compute()
        peer.play_round()
    held = _resident() - before
    microbatch = _peak(peer.compute) - graph_bytes(manifest, stage, computing)
    microbatch -= graph_at_work(manifest, stage, computing)
    round = _peak(peer.play_round)
    size = part.layout.size
    said = needs_of(manifest, stage, PROCESS_BYTES, computing).weights
    return Taken(part.layout.parameters, held / size, microbatch / size, round / size, said / size)


def render(taken: Taken) -> str:
    """One row a part."""
    most = taken.held + max(taken.microbatch, taken.round)
    return "\n".join(
        [
            f"{taken.parameters:,} parameters; bytes per parameter",
            f"  {taken.held:6.1f}  between two rounds",
            f"  {taken.microbatch:6.1f}  more while a microbatch is computed, besides its graph",
            f"  {taken.round:6.1f}  more while a round is made, applied and settled",
            f"  {most:6.1f}  at most",
            f"  {taken.said:6.1f}  as peers say before they begin",
        ]
    )


class _Peer:
    """A microbatch and a round, as the compute thread does them."""

    def __init__(self, manifest: Manifest, stage: int, part: StagePart) -> None:
        self._manifest, self._part = manifest, part
        self._span = manifest.span(stage)
        self._replica = part.begin(part.first_units(), -1)
        self._generator = torch.Generator().manual_seed(0)
        self._round = 0
        part.compute.publish(self._replica.live_tiles(ahead=False))

    def compute(self) -> None:
        data, model = self._manifest.data, self._manifest.model
        shape = data.microbatch_sequences, data.sequence_tokens
        tokens_BT = torch.randint(model.vocabulary, shape, generator=self._generator)
        inputs = tokens_BT if self._span.has_embedding else self._hidden()
        if self._span.has_head:
            self._part.compute.finish(0, inputs, tokens_BT)
        else:
            self._part.compute.forward(0, inputs)
            self._part.compute.backward(0, self._hidden())

    def play_round(self) -> None:
        method, replica, round = self._part.method, self._replica, self._round
        payload = self._part.compute.use_gradient(
            lambda gradient: method.contribute(gradient, 1, round, PEERS[0])
        )
        for peer in PEERS:
            replica.add(round, peer, payload)
        replica.apply(round)
        replica.concord(round, PEERS[0])
        if round - self._manifest.rounds.window > replica.settled_round:
            replica.settle(replica.settled_round + 1)
        self._part.compute.publish(replica.live_tiles(ahead=False))
        self._round += 1

    def _hidden(self) -> torch.Tensor:
        return torch.randn(self._manifest.hidden_shape, generator=self._generator)


def _warm_up() -> None:
    """Libraries and buffers that every process of ours has."""
    weights = torch.ones(256, 256, requires_grad=True)
    for _ in range(3):
        torch.autograd.grad((weights @ weights).sum(), [weights])


def _resident() -> int:
    give_back()
    return resident_bytes()


def _peak(work: Callable[[], None]) -> int:
    """Bytes above what is resident before."""
    before = _resident()
    try:
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        work()
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError as error:
        raise UserError(f"measuring needs Linux' /proc: {error}") from None
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return max(0, peak * 1024 - before)
