"""Of a mixture of experts each peer trains what all share and the experts of one group: SPES, no server.

Everybody has the whole stage and computes with all its experts; what a round does to an expert is the mean
of what its holders moved (in arXiv:2602.11543 a server copies it from the one holder). A contribution is a
byte, which group, then what local_steps.py says of the shared planes and of the group's. Nobody deals out
groups: the rounds' sets say who holds what, and where one group has two holders more than another, one of
them, drawn from the round, goes over. So a group whose holders left is taken up by others, who have its
weights.

Shapes: H numbers that a peer trains, of the stage's flat vector: the shared planes, then its group's;
C chunks of a plane, N numbers of a chunk.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot

import torch
from torch import Tensor

from swarmnet.identifiers import PeerId, RunId
from swarmnet.model.flat_layout import Layout, Plane, some_planes
from swarmnet.model.state_layout import state_of
from swarmnet.optimizer.delta_codecs.delta_codec import EncodedDelta
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.local_steps.local_steps import LocalSteps, MovesTally
from swarmnet.optimizer.mean_gradient import GradientError
from swarmnet.optimizer.tiling import Tile, all_tiles
from swarmnet.run.manifest import Experts, Manifest
from swarmnet.run.rates import WHOLE

BALANCE_ROUNDS = 4
"""Every so many rounds one peer of a stage may go over: by then the one before is seen in the sets."""
ROUNDS_COUNTED = 2
"""Of who is there: where a round has few tokens not everybody has something to tell in each."""
ROUNDS_REMEMBERED = 8
"""Of who held what."""


@dataclass(frozen=True, slots=True)
class ExpertAssignment:
    """Who trains which experts, as any thread may read it."""

    group: int
    """That this peer trains."""
    holders: tuple[int, ...]
    """Of each group, in the newest two applied rounds."""
    trained: tuple[int, ...]
    """Of each group, the newest settled round in which its experts were trained; -1: in none that this peer
    has seen settle."""
    stale_rounds: tuple[int, ...]
    """Of each group, how many rounds have settled since then, or since this peer was here."""


class ExpertShardSteps:
    """One peer of one stage."""

    lookahead_accuracy = 0.0
    """As LocalSteps."""
    reduced = None

    def __init__(
        self, manifest: Manifest, layout: Layout, device: torch.device,
        name_of: Callable[[PeerId], str] = str,
    ) -> None:  # fmt: skip
        """`name_of`: by which a peer is known in `heard`."""
        self._manifest, self.layout, self.device, self._name_of = manifest, layout, device, name_of
        self._run_id, self.groups = manifest.run_id(), manifest.model.experts.groups
        self.state = state_of(layout, manifest.sync)
        self._places = places_of(layout, manifest.model.experts)
        self.shared = self._part(None)
        self._on_the_host = self._has_begun = False
        self._held_by: dict[int, dict[PeerId, Mapping[str, int]]] = {}
        """Of the newest rounds, of whoever made what is in their sets, who trains which group by that."""
        self._applied_round = -1
        self._trained: dict[int, int] = {}
        """Group -> the newest settled round that has a contribution of its experts."""
        self._seen = range(0)
        """Rounds that this peer has seen settle."""
        self.columns, self.outer, self.tokens, self.width = (
            self.shared.columns, self.shared.outer, self.shared.tokens, self.shared.width
        )  # fmt: skip
        self.hold(0)
        self.payload_bytes = 1 + self.shared.payload_bytes + self.of_group.payload_bytes
        self.votes = self.shared.votes + self.of_group.votes

    def begins(self, peer: PeerId) -> bool:
        """Hold a first group, drawn from the peer's id; whether it had none."""
        if self._has_begun:
            return False
        self._has_begun = True
        self.hold(int.from_bytes(_drawn(self._run_id, -1, peer)[:4], "little") % self.groups)
        return True

    @property
    def knows_holders(self) -> bool:
        """Whether the newest round that is applied says who trains what now: it is no older than that before
        the newest one that anybody is known to have contributed to."""
        heard = max((round for round, held in self._held_by.items() if held), default=None)
        return heard is not None and bool(self._newest(ROUNDS_COUNTED)) and self._applied_round + 1 >= heard

    def joins(self) -> bool:
        """Take up the group with the fewest holders, before anything was told, in place of the drawn one;
        whether it is another. Of several the drawn one, or the first."""
        holders = self.holders()
        if holders[self.group] == min(holders):
            return False
        self.hold(holders.index(min(holders)))
        return True

    def hold(self, group: int) -> None:
        """Train these experts from now on. What was moved of others and not told stays untold."""
        self.group = group
        self.of_group = self._part(group)
        if self._on_the_host:
            self.of_group.offload_optimizer_state()
        self.holding = self._as_it_is()

    @property
    def trained(self) -> Layout:
        """H: where in a gradient lies what this peer trains."""
        return some_planes(self.layout, [*self.numbers_of(None), *self.numbers_of(self.group)])

    @property
    def experts(self) -> range:
        """That this peer trains, by their numbers in each layer."""
        each = self._manifest.model.experts.num_experts // self.groups
        return range(self.group * each, (self.group + 1) * each)

    def of(self, flat: Tensor) -> Tensor:
        """[H] of a vector [layout.size]."""
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
        self._on_the_host = True
        for part in (self.shared, self.of_group):
            part.offload_optimizer_state()

    def step(self, gradient: Tensor, tokens: int, round: int, factor: int = WHOLE) -> None:
        """`gradient`: [H]."""
        size = self.shared.layout.size
        if gradient.shape != (size + self.of_group.layout.size,):
            raise GradientError(
                f"gradient of shape {tuple(gradient.shape)}, not ({size + self.of_group.layout.size},)"
            )
        if not torch.linalg.vector_norm(gradient, dtype=torch.float32).isfinite():
            raise GradientError("the gradient is not finite; drop it and go on")
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
        """Of experts that this peer gave up nothing comes back."""
        group, shared, experts = self.cut(payload)
        self.shared.give_back(shared, round, peer, shards)
        if group == self.group:
            self.of_group.give_back(experts, round, peer, shards)

    def check(self, payload: bytes) -> None:
        _, shared, experts = self.cut(payload)
        self.shared.check(shared)
        self.of_group.check(experts)

    def tally(self, round: int) -> HeldTally:
        return HeldTally(self, round)

    def lookahead(self, round: int, factor: int = WHOLE) -> None:
        """As LocalSteps."""

    def applied(self, round: int) -> None:
        self._applied_round = round
        for part in (self.shared, self.of_group):
            part.applied(round)
        self.holding = self._as_it_is()

    def add_to(self, weights_CN: Tensor, tile: Tile) -> None:
        group, there = self.within(tile)
        if group is None:
            self.shared.add_to(weights_CN, there)
        elif group == self.group:
            self.of_group.add_to(weights_CN, there)

    def record_assignment(self, round: int, contributor: PeerId, held: Mapping[str, int] | None) -> None:
        """Who trains which group, by what somebody made for a round; None: it is taken out again."""
        of_round = self._held_by.setdefault(round, {})
        of_round.pop(contributor, None)
        if held is not None:
            of_round[contributor] = held

    def assignment_in(self, peer: PeerId, payload: bytes) -> Mapping[str, int]:
        """By a contribution, as `heard` takes it."""
        return {self._name_of(peer): payload[0]}

    def settled(self, round: int) -> None:
        """Its set is final."""
        self._seen = range(self._seen.start if self._seen else round, round + 1)
        self._trained |= dict.fromkeys(self._said_in(round).values(), round)
        for old in [old for old in self._held_by if old < round - ROUNDS_REMEMBERED]:
            del self._held_by[old]
        self.holding = self._as_it_is()

    def _as_it_is(self) -> ExpertAssignment:
        trained = tuple(self._trained.get(group, -1) for group in range(self.groups))
        stale = tuple(self._seen.stop - 1 - max(self._seen.start - 1, newest) for newest in trained)
        return ExpertAssignment(self.group, tuple(self.holders()), trained, stale)

    def holders(self) -> list[int]:
        """Of each group, in the newest rounds that are applied."""
        counts = Counter(self._newest(ROUNDS_COUNTED).values())
        return [counts[group] for group in range(self.groups)]

    def goes_over(self, round: int, me: PeerId) -> bool:
        """Take up the group with the fewest holders, if it is this peer's turn; whether it did. Between two
        steps, when nothing is gathered that was not stepped by."""
        # Of two who train one group one may not have told anything just when it is its turn.
        newest, holders = self._newest(BALANCE_ROUNDS), self.holders()
        crowds = Counter(newest.values())
        fullest, emptiest = max(range(self.groups), key=crowds.__getitem__), holders.index(min(holders))
        may = [name for name, group in newest.items() if group == fullest]
        if (
            round % BALANCE_ROUNDS
            or crowds[fullest] - holders[emptiest] < 2
            or self.group != fullest
            or self._name_of(me) != min(may, key=lambda name: _drawn(self._run_id, round, name))
        ):
            return False
        self.hold(emptiest)
        return True

    def _newest(self, rounds: int) -> dict[str, int]:
        """Who trains which group, of those in so many rounds."""
        applied = sorted(
            round for round, held in self._held_by.items() if held and round <= self._applied_round
        )
        return {name: group for round in applied[-rounds:] for name, group in self._said_in(round).items()}

    def _said_in(self, round: int) -> dict[str, int]:
        of_round = sorted(self._held_by.get(round, {}).items())
        return {name: group for _, held in of_round for name, group in held.items()}

    def moves_by_tile(self, payloads: Collection[bytes]) -> Iterator[tuple[Tile, list[EncodedDelta]]]:
        """All speak of what is shared, and of an expert its holders. All groups are of one form, so the own
        one's reads what is said of any."""
        contributions: list[dict[int | None, list[memoryview]]] = [
            {None: self.shared.planes_of(shared), group: self.of_group.planes_of(experts)}
            for group, shared, experts in map(self.cut, payloads)
        ]
        for tile in all_tiles(self.layout, self.device):
            whose, there = self.within(tile)
            reads = self.shared if whose is None else self.of_group
            saying = [said[whose] for said in contributions if whose in said]
            yield tile, [reads.moves_in(there, planes[there.number]) for planes in saying]

    def within(self, tile: Tile) -> tuple[int | None, Tile]:
        """Whose a tile of the stage is, and where it lies there."""
        group, number, plane = self._places[tile.number]
        return group, replace(tile, number=number, plane=plane)

    def cut(self, payload: bytes) -> tuple[int, bytes, bytes]:
        """Its group, and what it says of what is shared and of the group's experts. ContributionError."""
        if len(payload) != self.payload_bytes:
            raise ContributionError(f"payload of {len(payload)} bytes where {self.payload_bytes} belong")
        if payload[0] >= self.groups:
            raise ContributionError(f"experts of group {payload[0]}, of {self.groups}")
        stop = 1 + self.shared.payload_bytes
        return payload[0], payload[1:stop], payload[stop:]

    def numbers_of(self, group: int | None) -> list[int]:
        """Of the group's planes in the stage; None: of those that are shared."""
        return [number for number, place in enumerate(self._places) if place[0] == group]

    def _part(self, group: int | None) -> LocalSteps:
        layout = some_planes(self.layout, self.numbers_of(group))
        return LocalSteps(self._manifest, layout, self.device)


class HeldTally(MovesTally):
    """One round's contributions, and with them who holds what."""

    def __init__(self, method: ExpertShardSteps, round: int) -> None:
        super().__init__(method, round)
        self._holders = method

    def add(self, peer: PeerId, payload: bytes) -> None:
        super().add(peer, payload)
        self._holders.record_assignment(self._round, peer, self._holders.assignment_in(peer, payload))

    def remove(self, peer: PeerId) -> None:
        super().remove(peer)
        self._holders.record_assignment(self._round, peer, None)


def places_of(layout: Layout, experts: Experts) -> Sequence[tuple[int | None, int, Plane]]:
    """Of each plane its group, which of the group's planes it is, and where it lies in a vector of these."""
    places: list[tuple[int | None, int, Plane]] = []
    ends: Counter[int | None] = Counter()
    numbers: Counter[int | None] = Counter()
    for plane in layout.planes:
        group = None if plane.expert is None else experts.group_of(plane.expert)
        places.append((group, numbers[group], replace(plane, offset=ends[group])))
        numbers[group] += 1
        ends[group] += plane.stop - plane.offset
    return places


def _drawn(run_id: RunId, round: int, name: str) -> bytes:
    return hashlib.sha256(f"{run_id}\nexperts\n{round}\n{name}".encode()).digest()
