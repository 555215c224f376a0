"""All sync methods that a run can have, by name, with their configurations.

`swarmnet/optimizer/method.py` has the class that implements each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2, sqrt
from typing import ClassVar, Literal

from swarmnet.run.local_step_config import LocalStepConfig, OuterStepConfig, TopologyName
from swarmnet.run.loss_law import LossLaw
from swarmnet.run.method_config import CHUNK, FLOAT_BYTES, MUON_RMS, MethodConfig, Problem, StageSizes

SelectionName = Literal["top-k", "group"]
TransformName = Literal["hadamard", "dct", "fine-dct"]
ChunkingName = Literal["flat", "tiled"]
WeightsName = Literal["equal", "agreement", "tokens"]
MAX_RANK = 1024
"""Maximum rank for which a step's exact sums do not overflow (`swarmnet/optimizer/low_rank/exact.py`)."""
CUT_BYTES = FLOAT_BYTES
"""Temporary memory of tiled matrices: the gradient in tile order."""
COUNT_BITS = 4
"""Bits per number of a reducer's count of votes, for 8 to 15 contributors
(`swarmnet/optimizer/reduced_votes.py`)."""
MAX_OWNERS = 255
"""Maximum of `sync.secure_owners`: a count of votes is computed in one byte."""
BOTH_BYTES = 2 * FLOAT_BYTES
"""Temporary memory of methods with both directions and votes: the residual as weights, and what is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientConfig(MethodConfig):
    """The configuration of a method that sends the largest momentum coefficients of each chunk."""

    selection: SelectionName = "group"
    transform: TransformName = "hadamard"
    topk_per_chunk: int = 128
    momentum: float = 0.95
    chunking: ChunkingName = "flat"

    def key_problems(self) -> list[Problem]:
        return [
            (
                not 0 < self.topk_per_chunk <= 4096 or self.topk_per_chunk & (self.topk_per_chunk - 1) != 0,
                f"sync.topk_per_chunk is {self.topk_per_chunk}; it must be a power of two up to 4096",
            ),
            (not 0 <= self.momentum < 1, f"sync.momentum is {self.momentum:g}; it must lie in [0, 1)"),
            (
                self.chunking == "tiled" and self.transform == "hadamard",
                "sync.chunking: tiles have sides of any length, and hadamard needs powers of two; write "
                "sync.transform: dct",
            ),
        ]

    def contribution_bytes(self, sizes: StageSizes) -> float:
        return self.coefficient_bytes(sizes.trained)

    def coefficient_bytes(self, parameters: int) -> float:
        index_bits = {"group": log2(CHUNK / self.topk_per_chunk), "top-k": log2(CHUNK)}[self.selection]
        return parameters / CHUNK * self.topk_per_chunk * (self.value_bits + index_bits) / 8

    def kept_bytes(self, sizes: StageSizes, open_rounds: int, is_small: bool) -> int:
        cut = CUT_BYTES if self.chunking == "tiled" else 0
        return MethodConfig.kept_bytes(self, sizes, open_rounds, is_small) + sizes.all * cut


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankConfig(CoefficientConfig):
    """The configuration of a method that sends each layer matrix's momentum in a few directions."""

    rank: int = 16
    votes_on_matrices: bool
    """Whether votes also cover what the directions leave of the matrices."""

    def key_problems(self) -> list[Problem]:
        return [(not 0 < self.rank <= MAX_RANK, f"sync.rank is {self.rank}; it must lie in 1 to {MAX_RANK}")]

    def contribution_bytes(self, sizes: StageSizes) -> float:
        """Estimate the bytes of the directions, a byte for each of their numbers, and of the votes."""
        directions = sum(min(shape) * min(self.rank, *shape) for shape in sizes.matrices)
        in_matrices = sum(rows * columns for rows, columns in sizes.matrices)
        return directions + self.coefficient_bytes(
            sizes.trained if self.votes_on_matrices else sizes.trained - in_matrices
        )

    def kept_bytes(self, sizes: StageSizes, open_rounds: int, is_small: bool) -> int:
        both = BOTH_BYTES if self.votes_on_matrices else 0
        return CoefficientConfig.kept_bytes(self, sizes, open_rounds, is_small) + sizes.all * both


@dataclass(frozen=True, slots=True, kw_only=True)
class SignMuonConfig(MethodConfig):
    """The configuration of votes on the orthogonalized momentum."""

    fragments: int = 4
    """Number of fragments of the weights. Each round covers one of them, in turn."""
    momentum: float = 0.95
    topology: TopologyName = "all-gather"
    small_model_rate: float = 1.6e-2
    weights: WeightsName = "equal"
    secure_owners: int = 0
    """Owners whose votes are masked at most; 0: votes are sent as they are."""

    can_shard: ClassVar[bool] = True
    can_mask: ClassVar[bool] = True
    orthogonalizes_gradients: ClassVar[bool] = True
    loss_law: ClassVar[LossLaw] = LossLaw(
        scale=1.034, peers_exponent=0.0111, bits_exponent=0.0225, error=0.018, fitted_peers=64
    )
    """Fitted to trials whose rounds are applied one round late."""
    preset_keys: ClassVar[tuple[str, ...]] = ("fragments",)
    can_weigh: ClassVar[bool] = True

    @property
    def relative_step(self) -> float:
        return MUON_RMS * sqrt(self.fragments)

    @property
    def weighs_by_agreement(self) -> bool:
        return self.weights == "agreement"

    @property
    def vote_bits(self) -> int:
        """Bits of a vote in a contribution: 1, or with masks as many as count all owners."""
        return max(1, self.secure_owners.bit_length())

    def key_problems(self) -> list[Problem]:
        return [
            (
                self.secure_owners != 0 and not 3 <= self.secure_owners <= MAX_OWNERS,
                f"sync.secure_owners is {self.secure_owners}; it must lie in 3 to {MAX_OWNERS}, or be 0: "
                "with two, each knows the other's votes from the sum",
            ),
        ]

    def problems(self) -> list[Problem]:
        return [
            (
                self.secure_owners > 0 and (self.weighs_by_agreement or self.topology == "sharded-reduce"),
                "sync.secure_owners: masked votes can be neither compared nor cut among reducers; set "
                "sync.weights: equal and sync.topology: all-gather",
            ),
        ]

    def contribution_bytes(self, sizes: StageSizes) -> float:
        return MethodConfig.contribution_bytes(self, sizes) / self.fragments * self.vote_bits

    def result_bytes(self, size: int) -> float:
        return size / self.fragments * COUNT_BITS / 8

    def kept_bytes(self, sizes: StageSizes, open_rounds: int, is_small: bool) -> int:
        """Estimate the bytes of the open rounds, with own votes and results. Each covers a fragment."""
        results = self.result_bytes(sizes.all) * open_rounds if self.topology == "sharded-reduce" else 0
        signs = MethodConfig.kept_bytes(self, sizes, 2 * open_rounds, is_small)
        return ceil(signs / self.fragments + results)


MethodName = Literal[
    "demo-sign",
    "demo",
    "low-rank",
    "hybrid",
    "sign-muon",
    "local-steps",
    "diloco",
    "streaming-diloco",
    "sparse-loco",
    "sparta",
]
PRESETS: Mapping[MethodName, LocalStepConfig] = {
    "local-steps": LocalStepConfig(
        meaning="one bit per value, a fragment per round.",
        inner_optimizer="muon",
        fragments=4,
        delta_codec="sign",
        residual="local",
        small_model_rate=8e-3,
    ),
    "diloco": OuterStepConfig(
        meaning="eight bits; the group applies the mean with Nesterov momentum.", outer_lr=0.7
    ),
    "streaming-diloco": OuterStepConfig(
        meaning="the same with four bits, a quarter per round.",
        fragments=4,
        delta_codec="e3m0",
        is_steady=True,
        outer_lr=0.4,
    ),
    "sparse-loco": LocalStepConfig(
        meaning="the largest values, with error feedback.", delta_codec="topk-2bit", residual="error-feedback"
    ),
    "sparta": LocalStepConfig(
        meaning="averages a sixteenth of the weights per round in eight bits.", fragments=16, residual="local"
    ),
}
"""Methods with local steps, with the values of their papers. DiLoCo: arXiv:2311.08105 (outer rate 0.7,
momentum 0.9), with eight bits per number, as INTELLECT-1 sent them. Streaming DiLoCo: arXiv:2501.18512 (outer
rate 0.4, four bits). It has fragments of three layers, so their number grows with the model. It names no
momentum, so DiLoCo's is used. SparseLoCo: 2508.15706. Partitioned averaging: SPARTA averages a twentieth at a
time; 16 is a near power of two."""
METHOD_CONFIGS: Mapping[MethodName, MethodConfig] = {
    "demo-sign": CoefficientConfig(
        meaning="one-bit votes on momentum coefficients, bit-identical on all peers."
    ),
    "demo": CoefficientConfig(meaning="values, as in DeMo.", value_bits=32),
    "low-rank": LowRankConfig(
        meaning="each matrix's momentum in `rank` random directions, applied as an orthogonal step, and "
        "votes for other parameters.",
        votes_on_matrices=False,
    ),
    "hybrid": LowRankConfig(meaning="low-rank, plus votes on the remainder.", votes_on_matrices=True),
    "sign-muon": SignMuonConfig(
        meaning="one-bit votes on each matrix's orthogonalized momentum, a fragment per round."
    ),
    **PRESETS,
}
DEFAULT_METHOD: MethodName = "demo-sign"
DEFAULT_LOCAL_METHOD: MethodName = "local-steps"
"""The method with local steps where only these were asked for."""
COMMON_STEP_METHOD: MethodName = "sign-muon"
"""The method of the demo, and the one that the planner proposes where each round is one common step."""
OUTER_METHODS = tuple(name for name, config in METHOD_CONFIGS.items() if config.has_outer_optimizer)


def meaning_of_methods() -> str:
    """Return the documentation of `sync.method`: a sentence for each method."""
    sentences: list[str] = []
    for name, config in METHOD_CONFIGS.items():
        if config.introduction and config.introduction not in sentences:
            sentences.append(config.introduction)
        sentences.append(f"`{name}`: {config.meaning}")
    return " ".join(sentences)
