"""A stage on several devices, with the interface of a stage on one device.

Each device has its own process and a *share* of the stage: a part of each vector. The peer's own process has
none. It sends each order to all device processes and combines their answers. A microbatch is combined by its
sequences, a contribution and the settled weights by their chunks. Other peers therefore see no difference
from a peer with one device. A *payload* is an encoded contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import hypot

import torch
from torch import Tensor

from peers.compute.devices import device_requests as orders
from peers.compute.devices.channel import bytes_of
from peers.compute.devices.device_processes import DoneAnswer, Processes
from peers.compute.devices.nodes import NodeListener
from peers.compute.stage_part import StagePart
from peers.config.errors import UserError
from swarmnet.identifiers import PeerId
from swarmnet.model.computing.choices import Computing
from swarmnet.model.computing.gradient_sum import Used
from swarmnet.model.computing.shares import Shares
from swarmnet.model.experts.load import Routed
from swarmnet.model.flat_layout import Layout, trained_layout
from swarmnet.model.parameters import has_frozen
from swarmnet.model.stage_compute import LastStageResult, Tiles
from swarmnet.model.state_layout import first_state, ledger_layout
from swarmnet.optimizer.agreement.ledger import AgreementLedger, KeepsLedger
from swarmnet.optimizer.device_groups.payload import Divisible, divided, put_together
from swarmnet.optimizer.method import LocalOptimizer, ReducedMethod, RoundAggregate, method_of
from swarmnet.optimizer.replica import NOT_HASHED, digest_of
from swarmnet.optimizer.step import Step
from swarmnet.optimizer.tiling import Tile
from swarmnet.optimizer.vote_agreement import VoteAgreement
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE
from swarmnet.run.sync_methods import LowRankConfig

UNIT_BYTES = 4


def spread_part(
    manifest: Manifest,
    stage: int,
    devices: Sequence[torch.device],
    computing: Computing,
    threads: int,
    nodes: NodeListener | None = None,
) -> tuple[StagePart, Processes]:
    """Return the stage on these devices and those of other `nodes`, and their processes, which are starting.
    The caller closes the processes. Raises UserError if the stage is too small, or if the run's method needs
    a whole stage."""
    obstacle = not_divisible(manifest)
    if obstacle:
        raise UserError(f"compute.devices: {obstacle}; set it to 1, and leave out compute.nodes")
    layout = trained_layout(manifest, stage)
    count = len(devices) + (nodes.devices if nodes is not None else 0)
    shares = Shares(layout, count)
    # A run is here a range of the vector that is on one device.
    devices_with_share = {run.device for run in shares.runs()}
    if len(devices_with_share) < count:
        raise UserError(f"compute.devices: stage {stage} is too small for {count} devices; use fewer")
    begin = orders.Begin(
        manifest.canonical(),
        stage,
        rank=0,
        device="",
        devices=count,
        store="",
        threads=threads,
        dtype=computing.dtype,
        activation_checkpointing=computing.activation_checkpointing,
        optimizer_state=computing.optimizer_state,
    )
    processes = Processes(begin, [str(device) for device in devices], nodes)
    method = SpreadMethod(manifest=manifest, layout=layout, processes=processes, shares=shares)
    part = StagePart(
        layout,
        SpreadCompute(processes),
        method,
        partial(first_state, manifest, stage),
        computing=computing,
        hold=lambda units, round: SpreadReplica(method, units, round),
        kind=devices[0].type,
    )
    return part, processes


def not_divisible(manifest: Manifest) -> str:
    """Return why this run's contributions cannot be made in shares; empty if they can."""
    sync = manifest.sync
    if manifest.data.adds_noise:
        return "the gradients of documents (data.privacy) are not clipped share by share"
    if manifest.is_u_shaped:
        return "both ends of the model (data.u_shaped_layers) are not held share by share"
    if sync.secure_owners:
        return "masked votes (sync.secure_owners) are not made share by share"
    if sync.weights == "tokens":
        return "contributions with tokens in front (sync.weights: tokens) are not cut into shares"
    if sync.chunking == "tiled":
        return "the run cuts matrices in tiles (sync.chunking), which do not lie on one device"
    if has_frozen(manifest):
        return "what a run does not train (sync.trainable, model.lora) is not held share by share"
    experts = manifest.model.experts
    if experts.groups > 1 or experts.merge_rounds:
        return "a group of experts (model.experts) is not trained, and experts are not merged, share by share"
    if experts.num_experts and isinstance(sync.config, LowRankConfig) and not sync.config.votes_on_matrices:
        return "low-rank votes on routers apart from the matrices that lie beside them; hybrid does not"
    return ""


@dataclass(frozen=True, slots=True)
class LiveWeights:
    """Represents the live weights of all shares. They stay on the devices, and so are never iterated here."""

    ahead: bool

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        raise TypeError("live weights of several devices are nowhere together")


class SpreadCompute:
    """Implements `Computes` of `peers/compute/stage_part.py`."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self.routed: Routed = {}
        self.device = torch.device("cpu")
        """Every process moves its rows to its own device."""

    def publish(self, tiles: Tiles) -> None:
        assert isinstance(tiles, LiveWeights), "of a SpreadReplica"
        self._processes.ask(orders.Publish(tiles.ahead))

    def freeze(self, units: Tensor) -> None:
        if len(units):
            raise ValueError("several devices train all of a stage (not_divisible)")

    def train(self, layout: Layout) -> None:
        raise ValueError("several devices train all of a stage (not_divisible)")

    def warm_up(self, sequences: int, tokens: int) -> None:
        """Wait until the processes are ready. Nothing is compiled."""
        self._processes.ready()

    def forward(
        self, key: Hashable, inputs: Tensor, branch_scale: float = 1.0, tokens_BT: Tensor | None = None
    ) -> Tensor:
        """Return the outputs of the whole microbatch. Each device computes some of its sequences."""
        order = orders.Forward(repr(key), branch_scale)
        answers = self._processes.ask(order, _without_none(inputs, tokens_BT))
        return torch.cat([output for _, outputs in answers for output in outputs])

    def finish(
        self, key: Hashable, inputs: Tensor, labels_BT: Tensor, tokens_BT: Tensor | None = None
    ) -> LastStageResult:
        """Run the last stage, forward and backward. Returns the summed loss, the number of tokens and any
        gradient of the inputs, each of the whole microbatch."""
        tensors = _without_none(inputs, labels_BT, tokens_BT)
        answers = self._processes.ask(orders.Finish(repr(key)), tensors)
        # Each device has computed some sequences; those of the next device follow them.
        gradients = [gradient for _, of_device in answers for gradient in of_device]
        return LastStageResult(
            sum(done.loss_sum for done, _ in answers),
            sum(done.tokens for done, _ in answers),
            torch.cat(gradients) if gradients else None,
        )

    def backward(self, key: Hashable, hidden_gradient: Tensor) -> Tensor | None:
        answers = self._processes.ask(orders.Backward(repr(key)), [hidden_gradient])
        gradients = [gradient for _, of_device in answers for gradient in of_device]
        return torch.cat(gradients) if gradients else None

    def drop(self, key: Hashable) -> None:
        self._processes.ask(orders.Drop(repr(key)))

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used:
        """Call `use` with an empty tensor: the gradient's shares stay on the devices, where SpreadMethod has
        them processed."""
        return use(torch.empty(0))


def _without_none(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


class SpreadMethod:
    """Implements `Method` of `swarmnet/optimizer/method.py` for all shares. Payloads are checked in the
    peer's process, by a method on torch's meta device, which has shapes only."""

    held = None

    def __init__(self, *, manifest: Manifest, layout: Layout, processes: Processes, shares: Shares) -> None:
        self.whole = method_of(manifest, layout, "meta")
        assert isinstance(self.whole, Divisible)
        self.ledger_size = ledger_layout(manifest.sync).size
        self.sections = self.whole.sections
        self.processes = processes
        self.shares = shares
        self.gradient_norm: float | None = None
        self.momentum_norm: float | None = None
        own = self.whole.own
        self._own = None if own is None else SpreadSteps(own.tokens, self)

    @property
    def state(self) -> Layout:
        return self.whole.state

    @property
    def own(self) -> LocalOptimizer | None:
        return self._own

    @property
    def ledger(self) -> AgreementLedger | None:
        """The agreement ledger, a copy of the devices'."""
        return self.whole.ledger if isinstance(self.whole, KeepsLedger) else None

    @property
    def reduced(self) -> ReducedMethod | None:
        """The peer's own process cuts, sums and checks: slices and results are bytes of the whole stage."""
        return self.whole.reduced

    @property
    def payload_bytes(self) -> int:
        return self.whole.payload_bytes

    @property
    def lookahead_accuracy(self) -> float:
        return self.whole.lookahead_accuracy

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        return self.made(orders.Contribute(tokens, round, peer))

    def made(self, order: orders.Contribute | orders.EncodeDelta) -> bytes:
        """Send the order to all devices. Returns the payload combined from those of their shares."""
        answers = [done for done, _ in self.processes.ask(order)]
        self.gradient_norm = answers[0].gradient_norm  # This norm covers all shares.
        self.momentum_norm = hypot(*(done.momentum_norm or 0.0 for done in answers))
        return put_together([done.payload for done in answers], self.sections, self.shares)

    def parts(self, payload: bytes) -> list[bytes]:
        """Return what each device adds to a round of a checked payload. Every device reads whole results."""
        return divided(payload, () if self.reduced is not None else self.sections, self.shares)

    def give_back(self, payload: bytes, round: int, peer: PeerId, shards: tuple[int, ...] = ()) -> None:
        parts = divided(payload, self.sections, self.shares)
        self.processes.ask_each([orders.RestoreOnDevice(round, peer, part, shards) for part in parts])

    def check(self, payload: bytes) -> None:
        self.whole.check(payload)

    def load_ledger(self, numbers: Callable[[], Tensor]) -> None:
        """Copy the agreement ledger to this process, if there is one."""
        if self.ledger is not None:
            self.ledger.load(numbers().numpy())

    def tally(self, round: int) -> RoundAggregate:
        raise TypeError("each device has its tallies")

    def lookahead(self, round: int, factor: int = WHOLE, contributors: int = 1) -> Step | None:
        raise TypeError("each device has its own")


class SpreadSteps:
    """Implements `LocalOptimizer` of `swarmnet/optimizer/method.py` for all shares."""

    def __init__(self, tokens: int, method: SpreadMethod) -> None:
        self.tokens = tokens
        self.method = method

    def step(self, gradient: Tensor, tokens: int, round: int, factor: int = WHOLE) -> None:
        self.method.processes.ask(orders.LocalStep(tokens, round, factor))

    def encode_delta(self, round: int, peer: PeerId) -> bytes:
        return self.method.made(orders.EncodeDelta(round, peer))

    def offload_optimizer_state(self) -> None:
        raise TypeError("each device is told at its beginning")

    def applied(self, round: int) -> None:
        raise TypeError("each device knows")

    def add_to(self, weights_CN: Tensor, tile: Tile) -> None:
        raise TypeError("each device adds what it has")


class SpreadReplica:
    """Implements `HasReplica` of `peers/compute/stage_part.py` for all shares."""

    def __init__(self, method: SpreadMethod, units: Tensor, settled_round: int) -> None:
        self._method = method
        self._processes = method.processes
        self._shares = method.shares
        self._copies = (method.state.size - method.ledger_size) // self._shares.whole.size
        """Number of vectors that follow one another in the state. Each device has its share of each. The
        agreement ledger is behind them: all of it on every device, and read from the first one."""
        self.size = self._shares.whole.size
        self.settled_round = settled_round
        self.applied_round = settled_round
        self.corrections = 0
        self._factors: dict[int, int] = {}
        each: list[list[Tensor]] = [[] for _ in range(self._shares.devices)]
        for device, start, stop in self._device_ranges():
            each[device].append(units[start:stop])
        ledger = units[method.state.size - method.ledger_size :]
        method.load_ledger(lambda: ledger)
        for parts in each:
            parts.append(ledger)
        held = [[torch.cat(parts)] for parts in each]
        self._processes.ask_each([orders.Hold(settled_round)] * len(held), held)

    def _device_ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield the state in order as ranges: (device, start, stop)."""
        for copy in range(self._copies):
            for run in self._shares.runs():
                yield run.device, copy * self.size + run.start, copy * self.size + run.stop

    def add(self, round: int, peer: PeerId, payload: bytes) -> None:
        self._method.check(payload)
        adding = [orders.AddOnDevice(round, peer, part) for part in self._method.parts(payload)]
        self._count_corrections(self._processes.ask_each(adding))

    def remove(self, round: int, peer: PeerId) -> None:
        self._count_corrections(self._processes.ask(orders.RemoveOnDevice(round, peer)))

    def rate(self, round: int, factor: int) -> None:
        self._count_corrections(self._processes.ask(orders.RateOnDevice(round, factor)))
        self._factors[round] = factor

    def _count_corrections(self, answers: Sequence[DoneAnswer]) -> None:
        first_answer, _ = answers[0]
        self.corrections = first_answer.corrections

    def factor(self, round: int) -> int:
        return self._factors.get(round, WHOLE)

    def apply(self, round: int) -> None:
        self._processes.ask(orders.ApplyOnDevice(round))
        self.applied_round = max(self.applied_round, round)

    def vote_agreement(self, round: int, me: PeerId) -> VoteAgreement | None:
        """Return how far this peer's votes in a round agree with those of others, summed over the devices.
        None if no device has counts."""
        answers = self._processes.ask(orders.MeasureAgreement(round, me))
        device_counts = [done.vote_agreement for done, _ in answers]
        counts = [VoteAgreement(*each) for each in device_counts if each is not None]
        if not self._method.sections:
            counts = counts[:1]  # Every device has counted all votes.
        return sum(counts, VoteAgreement(0, 0, 0)) if counts else None

    def settle(self, round: int, hashed: bool = True, chain: bytes = b"") -> bytes:
        """Settle a round on all devices. Returns the digest of the settled state. Without `hashed`, returns
        NOT_HASHED and does not read the state from the devices."""
        self._count_corrections(self._processes.ask(orders.Close(round, chain)))
        self.settled_round = round
        self._method.load_ledger(lambda: self._processes.ask(orders.GetLedger())[0][1][0])
        self._factors.pop(round, None)
        if not hashed:
            return NOT_HASHED
        digest = digest_of(round)
        for piece in self._read_state():
            digest.update(piece)
        return digest.digest()

    def settled_units(self) -> Tensor:
        """Return the whole settled state, int32 [state.size], read from all devices."""
        units = torch.empty(self._method.state.size, dtype=torch.int32)
        view, offset = bytes_of(units), 0
        for piece in self._read_state():
            view[offset : offset + len(piece)] = piece
            offset += len(piece)
        return units

    settled_now = settled_units

    def live_tiles(self, ahead: bool) -> LiveWeights:
        return LiveWeights(ahead)

    def _read_state(self) -> Iterator[bytearray]:
        """Yield the bytes of the settled state in its order, in pieces."""
        ledger = (0, 0, self._method.ledger_size)
        ranges = (*self._device_ranges(), ledger)
        sizes = ((device, UNIT_BYTES * (stop - start)) for device, start, stop in ranges)
        return self._processes.read(orders.GetSettledState(), sizes)
