"""The interface of sync methods: what a peer contributes to a round, and how a round's contributions are
applied.

A method is an object per peer and stage. Its own state, such as momentum, is private to the peer. Peers must
agree on `RoundAggregate.step`, which is a pure function of the set of contributions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.agreement.weighed_counts import WeighedVotes
from swarmnet.optimizer.float_demo import FloatMethod
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.local_steps.expert_steps import ExpertShardSteps
from swarmnet.optimizer.local_steps.local_steps import LocalSteps
from swarmnet.optimizer.local_steps.reduced_experts import ReducedExperts
from swarmnet.optimizer.local_steps.reduced_steps import ReducedSteps
from swarmnet.optimizer.low_rank.low_rank import LowRank
from swarmnet.optimizer.mean_gradient import GradientError
from swarmnet.optimizer.reduced_votes import ReducedVotes
from swarmnet.optimizer.secure_sums.masked_votes import MaskedVotes
from swarmnet.optimizer.sign_muon import SignMuon
from swarmnet.optimizer.sign_votes import VoteMethod
from swarmnet.optimizer.step import RoundAggregate, Step
from swarmnet.optimizer.tiling import Tile, all_tiles
from swarmnet.rounds.result_table import Contributor, Draw, Table
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE
from swarmnet.run.sync_methods import PRESETS

__all__ = [
    "METHODS",
    "ContributionError",
    "GradientError",
    "KeepsMomentum",
    "LocalOptimizer",
    "Method",
    "ReducedMethod",
    "RoundAggregate",
    "add_own",
    "method_of",
    "should_flush_partial_step",
]


class LocalOptimizer(Protocol):
    """The additional interface of methods with local steps."""

    tokens: int
    """Number of tokens per local step."""

    def step(self, gradient: Tensor, tokens: int, round: int, factor: int = WHOLE) -> None:
        """Step by a gradient, float32 or bfloat16 [layout.size], summed over `tokens` tokens.

        The learning rate is that of `round` times `factor` thousandths; 0 only updates the moments. Raises
        GradientError without any change.
        """

    def encode_delta(self, round: int, peer: PeerId) -> bytes:
        """Return this round's payload, from the delta so far. `Method.contribute` is a step and then this."""

    def offload_optimizer_state(self) -> None:
        """Keep the moments in host memory between steps, for small GPUs. Called before the first step."""

    def applied(self, round: int) -> None:
        """Record that the group's weights include all rounds up to this one."""

    def add_to(self, weights_CN: Tensor, tile: Tile) -> None:
        """Add this peer's deltas that are not in the group's weights to a tile of them, float32 [C, N]."""


def should_flush_partial_step(gathered: int, stepped: int, tokens: int) -> bool:
    """Return whether a peer takes one more local step before it contributes.

    `gathered` is the number of tokens since its last step, and `stepped` that of its steps in this round.
    Less than half of a step's tokens are kept for the next step, unless the round has no other.
    """
    return gathered > 0 and (not stepped or 2 * gathered >= tokens)


def add_own(own: LocalOptimizer, weights: Tensor, layout: Layout, applied_round: int) -> None:
    """Add a peer's deltas to the group's weights after `applied_round`, float32 [layout.size], in place."""
    own.applied(applied_round)
    for tile in all_tiles(layout, weights.device):
        own.add_to(tile.of(weights), tile)


class ReducedMethod(Protocol):
    """The additional interface of methods with sharded reduction (`rounds/result_table.py`)."""

    @property
    def draw(self) -> Draw:
        """The rule by which reducers are drawn."""

    @property
    def slice_bytes(self) -> Sequence[int]:
        """Bytes of a slice of each shard."""

    @property
    def longest_result(self) -> int:
        """Maximum bytes of a result."""

    def slices(self, payload: bytes) -> list[bytes]:
        """Return the slice of a contribution for each shard."""

    def check_slice(self, shard: int, data: bytes) -> None:
        """Raise ContributionError, with the reason, if no honest peer can have sent `data`."""

    def reduce(self, slices: Mapping[int, Mapping[Contributor, bytes]]) -> bytes:
        """Return the result of checked slices by shard, at least one. It depends on the slices alone."""

    def follows(self, result: bytes, shard: int, slices: Mapping[Contributor, bytes]) -> bool:
        """Return whether `slices` give what the result contains for this shard. False if a slice is invalid.
        Raises ContributionError if the result is invalid."""

    def table(self, result: bytes) -> Table:
        """Return the contributors in a result. Raises ContributionError if no honest peer can send it."""

    def head(self, result: bytes) -> tuple[Table, int]:
        """Return the contributors in a result, and the length of its head. The rest of the result may be
        missing. Raises ContributionError."""


class Method(Protocol):
    """A sync method of one peer for one stage."""

    @property
    def state(self) -> Layout:
        """Layout of the settled state: the weights, then the group's momentum if it has one."""

    @property
    def own(self) -> LocalOptimizer | None:
        """The local optimizer; None if this peer's weights equal the group's between rounds."""

    @property
    def held(self) -> ExpertShardSteps | None:
        """The assignment of expert groups; None if this peer trains the whole stage. With it, gradients cover
        only what the peer trains."""

    @property
    def reduced(self) -> ReducedMethod | None:
        """The sharded reduction; None if every peer receives every contribution. With it, tallies and `check`
        take results."""

    @property
    def payload_bytes(self) -> int:
        """Exact length of every peer's contribution."""

    @property
    def lookahead_accuracy(self) -> float:
        """Minimum share of a step's weights that `lookahead` predicts exactly.

        It is measured in a swarm of equal peers that send all they have. Rounding by the payload reduces it.
        """

    @property
    def gradient_norm(self) -> float | None:
        """2-norm of the newest mean gradient before clipping; None before the first."""

    @property
    def momentum_norm(self) -> float | None:
        """2-norm of all that was not sent yet (error feedback); None if the method keeps nothing."""

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        """Add a gradient and return this round's payload. What is sent is removed from the momentum, unless
        the method lets it decay there (`sign-muon`).

        `gradient` is float32 [layout.size], summed over `tokens` tokens, zero in the padding. Raises
        GradientError without any change.
        """

    def give_back(self, payload: bytes, round: int, peer: PeerId, shards: tuple[int, ...] = ()) -> None:
        """Restore this peer's contribution, or its part in some shards, to the momentum. Called when the
        group settles without it.

        It is then sent with later contributions. Votes have no size, so they return with that of their
        chunk's largest coefficient. Does nothing if the momentum still contains what was sent.
        """

    def check(self, payload: bytes) -> None:
        """Raise ContributionError, with the reason, if no honest peer can have sent `payload`."""

    def tally(self, round: int) -> RoundAggregate:
        """Return an empty aggregate for the contributions of `round`."""

    def lookahead(self, round: int, factor: int = WHOLE, contributors: int = 1) -> Step | None:
        """Return the expected step of `round`, as if all peers had this peer's momentum. It may include steps
        of later rounds to which this peer has contributed. `contributors` are those of the newest applied
        round.

        Between `contribute(round)` and the application of the round, it includes what was just sent. None if
        `own` includes all that can be predicted.
        """


@runtime_checkable
class KeepsMomentum(Protocol):
    """A method whose momentum still contains what was sent. A restart may therefore continue from an older
    copy. Where what is sent leaves the momentum (DeMo), an older copy would send some of it again."""

    @property
    def momentum(self) -> Tensor:
        """This peer's momentum, float32 [layout.size]. The owner of the peer may change it in place before
        the first contribution."""


METHODS: Mapping[str, Callable[[Manifest, Layout, torch.device], Method]] = {
    "demo-sign": VoteMethod,
    "demo": FloatMethod,
    "low-rank": LowRank,
    "hybrid": LowRank,
    "sign-muon": SignMuon,
    **dict.fromkeys(PRESETS, LocalSteps),
}
"""The class of each sync method. tests/swarmnet/optimizer/test_methods.py runs all of them through the
interface's requirements."""


def method_of(manifest: Manifest, layout: Layout, device: torch.device | str = "cpu") -> Method:
    """Return the manifest's method, with fresh state on `device`."""
    mixed, sharded = manifest.model.experts.groups > 1, manifest.sync.topology == "sharded-reduce"
    if sharded and manifest.sync.local_steps is None:
        weighs = manifest.sync.config.weighs_by_agreement
        return (WeighedVotes if weighs else ReducedVotes)(manifest, layout, torch.device(device))
    if sharded:
        return (ReducedExperts if mixed else ReducedSteps)(manifest, layout, torch.device(device))
    if mixed:
        return ExpertShardSteps(manifest, layout, torch.device(device))
    if manifest.sync.secure_owners:
        return MaskedVotes(manifest, layout, torch.device(device))
    return METHODS[manifest.sync.method](manifest, layout, torch.device(device))
