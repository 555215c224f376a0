"""One device's part of the weights of a stage that several devices hold together with FSDP2
(torch.distributed.fsdp).

A *piece* is the matrices, or the vectors, of one block, such as a decoder layer. For FSDP it is one parameter
[rows, chunk]. Each device holds some rows of every piece, together its *share*, and gathers a whole layer
only while it is computed. A microbatch's sequences are divided between the devices. Gradients are summed over
all devices, and each device receives the sum for its own rows. All devices make the same calls in the same
order. The gains of norms are gathered once for all layers and stay in float32.

A *version* is one published set of weights. A graph of autograd that waits for its backward pass (an *open*
graph) needs the version that it was built on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch import distributed as group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from swarmnet.model.computing.choices import Computing
from swarmnet.model.computing.gradient_sum import GradientSum, Used
from swarmnet.model.computing.recomputed import recomputed
from swarmnet.model.computing.shares import Piece, Shares, pieces_of
from swarmnet.model.computing.whole_weights import TORCH_DTYPES, Rows, Tiles
from swarmnet.model.decoder import Rotation, RunLayer, by_layer, forward, one_layer, scaled
from swarmnet.model.experts.load import Routed
from swarmnet.model.flat_layout import Layout
from swarmnet.run.manifest import Span
from swarmnet.run.schema import ModelShape


def total(numbers: Tensor) -> Tensor:
    """Sum over all devices, in place."""
    group.all_reduce(numbers)
    return numbers


class SpreadWeights:
    """The weights of device `rank` of `ranks`, in a process that is part of a torch.distributed group."""

    def __init__(
        self, *, shape: ModelShape, span: Span, layout: Layout, computing: Computing, device: torch.device
    ) -> None:
        """Create the weights. `layout` is of the whole stage."""
        self.device = device
        self._rank = group.get_rank()
        self._ranks = group.get_world_size()
        shares = Shares(layout, self._ranks)
        recompute = recomputed if computing.activation_checkpointing == "layer" else None
        self._stage = _Stage(shape=shape, span=span, layout=layout, recompute=recompute)
        _shard_modules(self._stage, init_device_mesh(device.type, (self._ranks,)), computing)
        self._stage.to_empty(device=device)
        self._gradient = GradientSum(shares.layout(self._rank), device, torch.float32)
        self._placed: list[tuple[int, nn.Parameter]] = []
        """Offset of each parameter's rows in this device's share."""
        self._collect_gradients(shares)
        self._newest: _Version | None = None
        self._loaded: _Version | None = None
        """The version that the parameters contain now."""

    @property
    def routed(self) -> Routed:
        return {}

    def _collect_gradients(self, shares: Shares) -> None:
        """Record in `_placed` where each parameter's rows lie in this device's share (offset, parameter), and
        make autograd sum their gradients there. A parameter without rows here gets empty gradients. These are
        dropped, because FSDP would keep them."""
        parameters = self._stage.by_piece()  # By plane and first row.
        offset = 0
        for piece in shares.pieces:
            rows = piece.rows(self._rank, self._ranks)
            if rows.start < rows.stop:
                parameter = parameters[piece.plane, piece.first]
                self._placed.append((offset, parameter))
                size = (rows.stop - rows.start) * shares.whole.planes[piece.plane].chunk
                self._gradient.watch_rows(offset, offset + size, parameter, _pop_local_gradient)
                offset += size
        for parameter in parameters.values():
            has_rows_here = any(parameter is placed for _, placed in self._placed)
            if not has_rows_here:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]

    @property
    def version(self) -> _Version | None:
        return self._newest

    def publish(self, tiles: Tiles, in_use: Callable[[object], bool]) -> None:
        """Write new weights into this device's parameters as a new version. `tiles` are (offset, values) of
        its share. The loaded version is copied first if `in_use` says that an open graph needs it."""
        if self._loaded is not None and in_use(self._loaded) and self._loaded.copy is None:
            self._loaded.copy = [_local_vector(parameter).clone() for _, parameter in self._placed]
        for start, tile in tiles:
            for offset, parameter in self._placed:
                values = _local_vector(parameter)
                # The overlap of this tile and this parameter.
                first, stop = max(offset, start), min(offset + len(values), start + len(tile))
                if first < stop:
                    values[first - offset : stop - offset] = tile[first - start : stop - start]
        self._newest = _Version()
        self._loaded = self._newest

    def freeze(self, units: Tensor) -> None:
        if len(units):
            raise ValueError("several devices train all of a stage (not_divisible)")

    def train(self, layout: Layout) -> None:
        raise ValueError("several devices train all of a stage (not_divisible)")

    def _load(self, version: object) -> None:
        """Write the values of this version from its copy into the FSDP parameters, unless they are there
        already. The version that the parameters held before is copied first, unless it has a copy."""
        if version is self._loaded:
            return
        assert isinstance(version, _Version)
        assert version.copy is not None, "`publish` copies a version that is in use"
        assert self._loaded is not None
        if self._loaded.copy is None:
            self._loaded.copy = [_local_vector(parameter).clone() for _, parameter in self._placed]
        for values, (_, parameter) in zip(version.copy, self._placed, strict=True):
            _local_vector(parameter).copy_(values)
        self._loaded = version
        if version is self._newest:  # `publish` or a later `_load` copies it again if necessary.
            version.copy = None

    def rows(self, sequences: int) -> Rows:
        """Return the sequences of a microbatch that this device computes. A device without any computes the
        first one, so that it makes the same collective calls, and its result is not counted."""
        per_device, remainder = divmod(sequences, self._ranks)
        start = self._rank * per_device + min(self._rank, remainder)
        stop = start + per_device
        if self._rank < remainder:
            stop += 1
        return Rows(slice(start, stop)) if start < stop else Rows(slice(0, 1), count=False)

    def run(
        self,
        version: object,
        inputs: Tensor,
        tokens_BT: Tensor | None,
        branch_scale: float,
        rows: Rows,
        end: Span | None = None,
    ) -> Tensor:
        assert end is None, "both ends of a model are on one device (peers/worker/role.py)"
        self._load(version)
        output: Tensor = self._stage(inputs, tokens_BT, branch_scale, rows.count)
        return output

    def add_gradient_of(self, version: object, loss: Tensor, inputs: Tensor, scale: float) -> bool:
        self._load(version)
        self._gradient.begin(scale)
        torch.autograd.backward(loss)
        return self._gradient.was_within(total)

    def agreed(self, here: bool) -> bool:
        devices_where_false = torch.tensor(float(not here), device=self.device)
        return not bool(total(devices_where_false))

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used:
        return self._gradient.use(use)


class _Version:
    """One published version of the weights. The parameters hold one version at a time."""

    def __init__(self) -> None:
        self.copy: list[Tensor] | None = None
        """Copy of this device's rows, made when another version overwrites the parameters; else None."""


class _Pieces(nn.Module):
    """A module with some pieces of a stage as parameters."""

    def __init__(self, pieces: Sequence[Piece], layout: Layout) -> None:
        """Create a parameter [chunks, chunk] for each piece; its memory is allocated after sharding."""
        super().__init__()
        self._pieces = tuple(pieces)
        for number, piece in enumerate(pieces):
            chunk = layout.planes[piece.plane].chunk
            self.register_parameter(
                f"piece_{number}", nn.Parameter(torch.empty(piece.chunks, chunk, device="meta"))
            )

    def parameters_of_pieces(self) -> dict[tuple[int, int], nn.Parameter]:
        """Return the parameters by plane and first chunk."""
        return {
            (piece.plane, piece.first): self.get_parameter(f"piece_{number}")
            for number, piece in enumerate(self._pieces)
        }

    def views(self) -> dict[str, Tensor]:
        """Return a view of each model parameter in these pieces, by name, without the padding at a piece's
        end. The views of a piece come from one torch.split, whose backward pass copies once."""
        views: dict[str, Tensor] = {}
        for number, piece in enumerate(self._pieces):
            flat = self.get_parameter(f"piece_{number}").flatten()
            sizes = [entry.size for entry in piece.entries]
            padding = len(flat) - sum(sizes)
            parts = torch.split(flat, [*sizes, padding])
            for entry, part in zip(piece.entries, parts[:-1], strict=True):
                views[entry.name] = part.view(entry.shape)
        return views


class _Gains(_Pieces):
    """All vectors of the stage."""

    def forward(self) -> dict[str, Tensor]:
        return {name: view.clone() for name, view in self.views().items()}


class _Layer(_Pieces):
    """The matrices of a layer, including those of its experts."""

    def __init__(self, *, number: int, pieces: Sequence[Piece], layout: Layout, run_layer: RunLayer) -> None:
        super().__init__(pieces, layout)
        self._number = number
        self._run_layer = run_layer

    def forward(
        self,
        hidden_BTD: Tensor,
        vectors: dict[str, Tensor],
        rotation: Rotation,
        branch_scale: float,
        shape: ModelShape,
    ) -> Tensor:
        """Run the layer and return its hidden states. `vectors` are its gains of norms by member name."""
        members = by_layer(scaled(self.views(), branch_scale))[self._number] | vectors
        return self._run_layer(members, shape, hidden_BTD, rotation)


class _Stage(_Pieces):
    """All layers of this stage. The pieces of this module itself are the tables: the embedding, the head and
    the anchors (learned vectors per token at narrow boundaries, swarmnet/model/boundary.py)."""

    def __init__(
        self,
        *,
        shape: ModelShape,
        span: Span,
        layout: Layout,
        recompute: Callable[[RunLayer], RunLayer] | None,
    ) -> None:
        """Create the modules: one for all vectors, and one for the matrices of each layer. `recompute` wraps
        a layer so that it keeps only its inputs; None if it keeps everything."""
        pieces = list(pieces_of(layout))
        vectors = [piece for piece in pieces if piece.entries[0].is_vector]
        matrices = [piece for piece in pieces if not piece.entries[0].is_vector]
        super().__init__([piece for piece in matrices if _layer_of(piece) is None], layout)
        self._shape = shape
        self._span = span
        self.gains = _Gains(vectors, layout)
        run_layer: RunLayer = one_layer if recompute is None else recompute(one_layer)
        self.layers = nn.ModuleList(
            _Layer(
                number=number,
                pieces=[piece for piece in matrices if _layer_of(piece) == number],
                layout=layout,
                run_layer=run_layer,
            )
            for number in range(span.first, span.stop)
        )

    def by_piece(self) -> dict[tuple[int, int], nn.Parameter]:
        """Return the FSDP parameter of each piece of the stage, by plane and first chunk."""
        parameters: dict[tuple[int, int], nn.Parameter] = {}
        for module in self.modules():
            if isinstance(module, _Pieces):
                parameters |= module.parameters_of_pieces()
        return parameters

    def forward(self, inputs: Tensor, tokens_BT: Tensor | None, branch_scale: float, count: bool) -> Tensor:
        """Run the stage's layers, each through its own FSDP module. Returns hidden states, or the logits on
        the last stage. `count` is False if this device only makes the same calls as the others. The experts'
        balance loss is then disabled, and the caller ignores the output."""
        layers = iter(self.layers)  # They are called in this order.
        shape = self._shape
        # Backward adds the experts' balance loss even if the output is ignored.
        if not count:
            shape = replace(shape, experts=replace(shape.experts, aux_loss_coef=0.0))

        def run_layer(
            members: Mapping[str, Tensor], shape: ModelShape, hidden_BTD: Tensor, rotation: Rotation, /
        ) -> Tensor:
            output_BTD: Tensor = next(layers)(hidden_BTD, dict(members), rotation, branch_scale, shape)
            return output_BTD

        weights = self.gains() | self.views()
        run_layers: dict[int, RunLayer] = dict.fromkeys(range(self._span.first, self._span.stop), run_layer)
        return forward(weights, shape, self._span, inputs, tokens_BT=tokens_BT, run_layers=run_layers)


def _shard_modules(stage: _Stage, mesh: DeviceMesh, computing: Computing) -> None:
    """Apply FSDP to all modules, inner ones first, as FSDP requires. With bf16 or fp16, matrices are gathered
    in 16 bits, and gains of norms stay in float32. Gradients are summed in float32, without a mean."""
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if computing.dtype != "fp32":
        policy = MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPES[computing.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    fully_shard(stage.gains, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for layer in stage.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # Gradients are summed. gloo supports no other reduction.
            module.set_force_sum_reduction_for_comms(True)


def _layer_of(piece: Piece) -> int | None:
    parts = piece.block.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def _local_vector(parameter: nn.Parameter) -> Tensor:
    """Return a view of this device's rows as one vector."""
    return _local(parameter.detach()).view(-1)


def _pop_local_gradient(leaf: Tensor) -> Tensor:
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None, "this is called when it is there"
    return _local(gradient).view(-1)


def _local(rows: Tensor) -> Tensor:
    assert isinstance(rows, DTensor), "of a parameter of FSDP"
    local: Tensor = rows.to_local()
    return local


def _drop_gradient(leaf: Tensor) -> None:
    leaf.grad = None
