"""The one door for sync methods: what a peer contributes to a round, and how a round's set is applied.

A method is an object per peer and stage. Its own state (momentum) is nobody else's business; what peers
must agree on is `RoundAggregate.step`, a pure function of the set of contributions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.float_demo import FloatMethod
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.local_steps.expert_steps import ExpertShardSteps
from swarmnet.optimizer.local_steps.local_steps import LocalSteps
from swarmnet.optimizer.local_steps.reduced_experts import ReducedExperts
from swarmnet.optimizer.local_steps.reduced_steps import ReducedSteps
from swarmnet.optimizer.low_rank.method import LowRank
from swarmnet.optimizer.mean_gradient import GradientError
from swarmnet.optimizer.sign_votes import VoteMethod
from swarmnet.optimizer.step import Step
from swarmnet.optimizer.tiling import Tile, all_tiles
from swarmnet.optimizer.vote_agreement import VoteAgreement
from swarmnet.rounds.result_table import Contributor, Draw, Table
from swarmnet.run.local_steps import PRESETS
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE

__all__ = [
    "METHODS",
    "ContributionError",
    "GradientError",
    "LocalOptimizer",
    "Method",
    "Reduced",
    "RoundAggregate",
    "add_own",
    "method_of",
    "should_flush_partial_step",
]  # fmt: skip


class RoundAggregate(Protocol):
    """One round's contributions. They come and go in any order; only the set counts."""

    def add(self, peer: PeerId, payload: bytes) -> None:
        """ContributionError if the payload is none; then nothing was changed. ValueError if `peer` is in."""

    def remove(self, peer: PeerId) -> None:
        """KeyError if `peer` is not in."""

    def step(self, factor: int = WHOLE) -> Step:
        """In units of fixed_point.UNIT. Bit-equal for equal sets and factors (run/rates.py)."""

    def rest(self) -> None:
        """The round is applied, so the set will hardly change any more: what is kept only to be fast may
        go."""

    def vote_agreement(self, me: PeerId) -> VoteAgreement | None:
        """What became of this peer's own votes; None: it has none in it, or not remembered any more."""


class LocalOptimizer(Protocol):
    """What a method whose peers step by themselves, between rounds, does besides."""

    tokens: int
    """A peer steps each time it has gathered the gradients of so many."""

    def step(self, gradient: Tensor, tokens: int, round: int, factor: int = WHOLE) -> None:
        """Step by a gradient ([layout.size], float32 or bfloat16, summed over `tokens` tokens) at the
        learning rate of `round` times `factor` thousandths; 0: only the moments take it in. GradientError:
        nothing was changed."""

    def encode_delta(self, round: int, peer: PeerId) -> bytes:
        """This round's payload, of what was moved by now; Method.contribute is a step and this."""

    def offload_optimizer_state(self) -> None:
        """Between steps, where the device is a card with little memory. Before the first step."""

    def applied(self, round: int) -> None:
        """The group's weights hold all rounds up to this one."""

    def add_to(self, weights_CN: Tensor, tile: Tile) -> None:
        """Add to the group's weights after the newest applied round (float32 [C, N], those of a tile) what
        this peer moved by itself and they do not hold."""


def should_flush_partial_step(gathered: int, stepped: int, tokens: int) -> bool:
    """Whether a peer that has gathered so many tokens since its last own step, and stepped by so many in this
    round, steps once more before it tells: what is too little for a step of `tokens` waits, unless it is all
    that there is."""
    return gathered > 0 and (not stepped or 2 * gathered >= tokens)


def add_own(own: LocalOptimizer, weights: Tensor, layout: Layout, applied_round: int) -> None:
    """Add to the group's weights after a round (float32 [layout.size]) what a peer moved by itself."""
    own.applied(applied_round)
    for tile in all_tiles(layout, weights.device):
        own.add_to(tile.of(weights), tile)


class Reduced(Protocol):
    """What a method does besides whose contributions go to reducers (rounds/result_table.py)."""

    @property
    def draw(self) -> Draw:
        """Of reducers."""

    @property
    def slice_bytes(self) -> Sequence[int]:
        """Of each shard."""

    @property
    def longest_result(self) -> int:
        """Bytes."""

    def slices(self, payload: bytes) -> list[bytes]:
        """What a contribution says of each shard."""

    def check_slice(self, shard: int, data: bytes) -> None:
        """ContributionError, with the reason, if no honest peer can have sent `data`."""

    def reduce(self, slices: Mapping[int, Mapping[Contributor, bytes]]) -> bytes:
        """The result, by shard, of the slices that came, checked: a function of them alone. At least one."""

    def follows(self, result: bytes, shard: int, slices: Mapping[Contributor, bytes]) -> bool:
        """Whether a result says of this shard, which is in it, what these slices give; not if there is one
        that no honest reducer takes. ContributionError if it is no result."""

    def table(self, result: bytes) -> Table:
        """Who is in it; ContributionError as `Method.check`."""

    def head(self, result: bytes) -> tuple[Table, int]:
        """Who is in it, and how many bytes at its beginning say so and name the rest, which may be missing.
        ContributionError."""


class Method(Protocol):
    """How one peer of one stage takes part in rounds."""

    @property
    def state(self) -> Layout:
        """Where what the group settles lies: the weights, and after them its momentum, if it has one."""

    @property
    def own(self) -> LocalOptimizer | None:
        """None: this peer's weights are the group's, between rounds too."""

    @property
    def held(self) -> ExpertShardSteps | None:
        """None: this peer trains the whole stage. Else gradients are of what it trains alone."""

    @property
    def reduced(self) -> Reduced | None:
        """None: everybody hears what everybody contributes. Else tallies take results, and `check` does."""

    @property
    def payload_bytes(self) -> int:
        """Exact length of what every peer contributes to a round."""

    @property
    def votes(self) -> int:
        """Coefficients that one contribution speaks about."""

    @property
    def lookahead_accuracy(self) -> float:
        """Share of a step's weights that `lookahead` tells exactly, at least, in a swarm of equals that send
        all they have: what a payload rounds away of their sizes is missing from it."""

    @property
    def gradient_norm(self) -> float | None:
        """2-norm of the newest mean gradient, before it is clipped; None: there was none yet."""

    @property
    def momentum_norm(self) -> float | None:
        """2-norm of what was not sent yet (error feedback); None: the method keeps nothing."""

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        """Take in a gradient (float32 [layout.size], summed over `tokens` tokens, zero in the padding) and
        give this round's payload; what is sent leaves the momentum. GradientError: nothing was changed."""

    def give_back(self, payload: bytes, round: int, peer: PeerId, shards: tuple[int, ...] = ()) -> None:
        """Return an own contribution that the group goes on without to the momentum, or what it says of some
        shards: it will be offered again with later ones. Votes carry no size; they return with that of their
        chunk's largest."""

    def check(self, payload: bytes) -> None:
        """ContributionError, with the reason, if no honest peer can have sent `payload`."""

    def tally(self, round: int) -> RoundAggregate:
        """An empty tally, to be filled with the contributions of `round`."""

    def lookahead(self, round: int, factor: int = WHOLE) -> Step | None:
        """The step of `round` if all peers' momentum were this peer's own. Between `contribute(round)` and
        the round's application it includes what was just sent. None: nothing that `own` does not say."""


METHODS: Mapping[str, Callable[[Manifest, Layout, torch.device], Method]] = {
    "demo-sign": VoteMethod,
    "demo": FloatMethod,
    "low-rank": LowRank,
    "hybrid": LowRank,
    **dict.fromkeys(PRESETS, LocalSteps),
}
"""What makes each method that a manifest can name; tests/swarmnet/optimizer/test_methods.py takes every one
of them through all that a method must fulfil."""


def method_of(manifest: Manifest, layout: Layout, device: torch.device | str = "cpu") -> Method:
    """The method that the manifest names, with fresh state on `device`."""
    mixed, sharded = manifest.model.experts.groups > 1, manifest.sync.topology == "sharded-reduce"
    if sharded:
        return (ReducedExperts if mixed else ReducedSteps)(manifest, layout, torch.device(device))
    if mixed:
        return ExpertShardSteps(manifest, layout, torch.device(device))
    return METHODS[manifest.sync.method](manifest, layout, torch.device(device))
