"""Sharded training of experts (SPES, arXiv:2602.11543): a peer trains the shared weights and one group of
experts.

Every peer has the whole stage and computes with all experts. A round changes an expert by the mean delta of
the peers that train its group. In the paper a server copies it from a single trainer. A contribution is a
byte with the group, then two encoded deltas (`local_steps.py`): of the shared planes, and of the group's
planes.

No server assigns the groups. The sets of contributions show which peer trains which group. If one group has
two trainers more than another, one of them, drawn from the round, switches. A group that lost its trainers is
taken over in this way, because every peer has its weights.

Shapes: C chunks of a plane, N numbers of a chunk, H numbers that a peer trains. The H numbers are those of
the shared planes, then those of its group, in the order of the stage's flat vector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import hypot

import torch
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Layout, Plane, some_planes
from swarmnet.model.state_layout import state_of
from swarmnet.optimizer.delta_codecs.delta_codec import EncodedDelta
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.local_steps.group_trainers import GroupTrainers
from swarmnet.optimizer.local_steps.local_steps import DeltaTally, LocalSteps
from swarmnet.optimizer.mean_gradient import GradientError
from swarmnet.optimizer.tiling import Tile, all_tiles
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE
from swarmnet.run.schema import Experts


class ExpertShardSteps:
    """The sync method with expert groups, for one peer and one stage."""

    lookahead_accuracy = 0.0
    """Zero, as for `LocalSteps`."""
    reduced = None

    def __init__(
        self,
        manifest: Manifest,
        layout: Layout,
        device: torch.device,
        *,
        name_of: Callable[[PeerId], str] = str,
    ) -> None:
        """`name_of` returns the name of a peer in recorded assignments."""
        self._manifest = manifest
        self.layout = layout
        self.device = device
        self._name_of = name_of
        self.groups = manifest.model.experts.groups
        self.trainers = GroupTrainers(manifest.run_id(), self.groups)
        self.state = state_of(layout, manifest.sync)
        self._places = places_of(layout, manifest.model.experts)
        self.shared = self._part(None)
        self._offloads = False
        self._has_begun = False
        self.columns = self.shared.columns
        self.outer = self.shared.outer
        self.tokens = self.shared.tokens
        self.width = self.shared.width
        self.hold(0)
        self.payload_bytes = 1 + self.shared.payload_bytes + self.of_group.payload_bytes

    def begins(self, peer: PeerId) -> bool:
        """Assign a first group, drawn from the peer's id. Returns True if this peer had none."""
        if self._has_begun:
            return False
        self._has_begun = True
        self.hold(int.from_bytes(self.trainers.drawn(-1, peer)[:4], "little") % self.groups)
        return True

    @property
    def knows_holders(self) -> bool:
        """Whether the newest applied round shows the current assignment. It must be at most one round older
        than the newest round with known contributions."""
        return self.trainers.is_known

    def joins(self) -> bool:
        """Switch to the group with the fewest trainers. Called before this peer's first contribution. Returns
        True if the group changed.

        Among several smallest groups the current one is kept, else the first is taken.
        """
        holders = self.holders()
        if holders[self.group] == min(holders):
            return False
        self.hold(holders.index(min(holders)))
        return True

    def hold(self, group: int) -> None:
        """Train this group from now on. The unsent delta of the group before is discarded."""
        self.group = group
        self.of_group = self._part(group)
        if self._offloads:
            self.of_group.offload_optimizer_state()
        self.holding = self.trainers.assignment(group)

    @property
    def trained(self) -> Layout:
        """Layout, within the stage's gradient, of the H numbers that this peer trains."""
        return some_planes(self.layout, [*self.numbers_of(None), *self.numbers_of(self.group)])

    @property
    def experts(self) -> range:
        """Numbers, within a layer, of the experts that this peer trains."""
        each = self._manifest.model.experts.num_experts // self.groups
        return range(self.group * each, (self.group + 1) * each)

    def of(self, flat: Tensor) -> Tensor:
        """Return the H trained numbers of a vector [layout.size]."""
        numbers = [*self.numbers_of(None), *self.numbers_of(self.group)]
        planes = (self.layout.planes[number] for number in numbers)
        return torch.cat([flat[plane.offset : plane.stop] for plane in planes])

    @property
    def held(self) -> ExpertShardSteps:
        return self

    @property
    def own(self) -> ExpertShardSteps:
        return self

    @property
    def gradient_norm(self) -> float | None:
        norms = self.shared.gradient_norm, self.of_group.gradient_norm
        return None if None in norms else hypot(*(norm for norm in norms if norm is not None))

    @property
    def momentum_norm(self) -> float | None:
        return hypot(self.shared.momentum_norm or 0.0, self.of_group.momentum_norm or 0.0)

    def offload_optimizer_state(self) -> None:
        self._offloads = True
        for part in (self.shared, self.of_group):
            part.offload_optimizer_state()

    def step(self, gradient: Tensor, tokens: int, round: int, factor: int = WHOLE) -> None:
        """Take one optimizer step by a gradient [H], summed over `tokens` tokens. Raises GradientError."""
        size = self.shared.layout.size
        if gradient.shape != (size + self.of_group.layout.size,):
            raise GradientError(
                f"gradient of shape {tuple(gradient.shape)}, not ({size + self.of_group.layout.size},)"
            )
        if not torch.linalg.vector_norm(gradient, dtype=torch.float32).isfinite():
            raise GradientError("the gradient is not finite; drop it and continue")
        self.shared.step(gradient[:size], tokens, round, factor)
        of_experts = int(factor * self._manifest.sync.expert_lr_scale + 0.5)
        self.of_group.step(gradient[size:], tokens, round, of_experts)

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        self.step(gradient, tokens, round)
        return self.encode_delta(round, peer)

    def encode_delta(self, round: int, peer: PeerId) -> bytes:
        return (
            bytes([self.group])
            + self.shared.encode_delta(round, peer)
            + self.of_group.encode_delta(round, peer)
        )

    def give_back(self, payload: bytes, round: int, peer: PeerId, shards: tuple[int, ...] = ()) -> None:
        """Restore an unused contribution to the delta, except for experts that this peer no longer trains."""
        group, shared, experts = self.cut(payload)
        self.shared.give_back(shared, round, peer, shards)
        if group == self.group:
            self.of_group.give_back(experts, round, peer, shards)

    def check(self, payload: bytes) -> None:
        _, shared, experts = self.cut(payload)
        self.shared.check(shared)
        self.of_group.check(experts)

    def tally(self, round: int) -> ExpertDeltaTally:
        return ExpertDeltaTally(self, round)

    def lookahead(self, round: int, factor: int = WHOLE, contributors: int = 1) -> None:
        """Return None: own steps are in the weights already."""

    def applied(self, round: int) -> None:
        self.trainers.applied_round = round
        for part in (self.shared, self.of_group):
            part.applied(round)
        self.holding = self.trainers.assignment(self.group)

    def add_to(self, weights_CN: Tensor, tile: Tile) -> None:
        group, there = self.within(tile)
        if group is None:
            self.shared.add_to(weights_CN, there)
        elif group == self.group:
            self.of_group.add_to(weights_CN, there)

    def assignment_in(self, peer: PeerId, payload: bytes) -> Mapping[str, int]:
        """Return the assignment that a contribution shows, as `GroupTrainers.record` takes it."""
        return {self._name_of(peer): payload[0]}

    def settled(self, round: int) -> None:
        """Update the times of training after `round` settled, and forget old assignments."""
        self.trainers.settled(round)
        self.holding = self.trainers.assignment(self.group)

    def holders(self) -> list[int]:
        """Return the number of trainers of each group in the newest applied rounds."""
        return self.trainers.counts()

    def goes_over(self, round: int, me: PeerId) -> bool:
        """Switch to the group with the fewest trainers if it is this peer's turn. Returns True if it
        switched.

        Called between two local steps, when all gathered gradients are used.
        """
        group = self.trainers.switch(round, self.group, self._name_of(me))
        if group is None:
            return False
        self.hold(group)
        return True

    def weights_of(self, payloads: Collection[bytes]) -> None:
        """Return None: holders of an expert group count alike."""

    def moves_by_tile(self, payloads: Collection[bytes]) -> Iterator[tuple[Tile, list[EncodedDelta]]]:
        """Yield each tile with the deltas of the contributions that cover it.

        All contributions cover shared tiles, and only those of its group cover an expert's. All groups have
        the same layout, so the decoder of the peer's own group reads every group.
        """
        contributions: list[dict[int | None, list[memoryview]]] = [
            {None: self.shared.planes_of(shared), group: self.of_group.planes_of(experts)}
            for group, shared, experts in map(self.cut, payloads)
        ]
        for tile in all_tiles(self.layout, self.device):
            group, there = self.within(tile)
            decoder = self.shared if group is None else self.of_group
            covering = [planes[group] for planes in contributions if group in planes]
            yield tile, [decoder.moves_in(there, planes[there.number]) for planes in covering]

    def within(self, tile: Tile) -> tuple[int | None, Tile]:
        """Return the group of a tile of the stage (None: shared), and its place within the group's vector."""
        group, number, plane = self._places[tile.number]
        return group, replace(tile, number=number, plane=plane)

    def cut(self, payload: bytes) -> tuple[int, bytes, bytes]:
        """Return the group of a payload, and its encoded deltas of the shared planes and of the group. Raises
        ContributionError."""
        if len(payload) != self.payload_bytes:
            raise ContributionError(f"payload of {len(payload)} bytes where {self.payload_bytes} belong")
        if payload[0] >= self.groups:
            raise ContributionError(f"experts of group {payload[0]}, of {self.groups}")
        stop = 1 + self.shared.payload_bytes
        return payload[0], payload[1:stop], payload[stop:]

    def numbers_of(self, group: int | None) -> list[int]:
        """Return the numbers of a group's planes within the stage; None: those of the shared planes."""
        return [number for number, place in enumerate(self._places) if place[0] == group]

    def _part(self, group: int | None) -> LocalSteps:
        layout = some_planes(self.layout, self.numbers_of(group))
        return LocalSteps(self._manifest, layout, self.device)


class ExpertDeltaTally(DeltaTally):
    """The contributions of one round, which also record the assignment of groups."""

    def __init__(self, method: ExpertShardSteps, round: int) -> None:
        super().__init__(method, round)
        self._holders = method

    def add(self, peer: PeerId, payload: bytes) -> None:
        super().add(peer, payload)
        self._holders.trainers.record(self._round, peer, self._holders.assignment_in(peer, payload))

    def remove(self, peer: PeerId) -> None:
        super().remove(peer)
        self._holders.trainers.record(self._round, peer, None)


def places_of(layout: Layout, experts: Experts) -> Sequence[tuple[int | None, int, Plane]]:
    """Return each plane's group, its number in the group, and the plane in a vector of the group alone."""
    places: list[tuple[int | None, int, Plane]] = []
    ends: Counter[int | None] = Counter()
    numbers: Counter[int | None] = Counter()
    for plane in layout.planes:
        group = None if plane.expert is None else experts.group_of(plane.expert)
        places.append((group, numbers[group], replace(plane, offset=ends[group])))
        numbers[group] += 1
        ends[group] += plane.stop - plane.offset
    return places
