"""Configuration of the methods with local steps: how peers exchange their weight deltas.

The keys of `sync` that are `method` or 0 get the value of the method's preset
(`swarmnet/run/sync_methods.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import ClassVar, Literal

from swarmnet.run.loss_law import LossLaw
from swarmnet.run.method_config import CHUNK, FLOAT_BYTES, MethodConfig, Problem, StageSizes

InnerOptimizerName = Literal["muon", "adamw"]
"""Local optimizers (`swarmnet/optimizer/local_steps/inner_optimizer.py`)."""
DeltaCodecName = Literal["sign", "e3m0", "int8", "topk-2bit"]
"""Codecs of the deltas (`swarmnet/optimizer/delta_codecs/`)."""
ResidualName = Literal["local", "error-feedback", "drop"]
"""What happens to the part of a delta that was not sent."""
TopologyName = Literal["all-gather", "sharded-reduce"]
THOUSAND = 1000
MAX_SHARDS = 64
"""Maximum number of slices per contribution: with more, a slice is smaller than its message's overhead."""
BITS: Mapping[DeltaCodecName, int] = {"sign": 1, "e3m0": 4, "int8": 8}
"""Bits per number of codecs that send all numbers of a fragment."""
RESULT_BITS = 4
"""Bits per number in a result (`swarmnet/optimizer/local_steps/reduced_steps.py`)."""
MOVES_BYTES: Mapping[DeltaCodecName, int] = {"sign": 2, "e3m0": 2, "int8": 4, "topk-2bit": 4}
"""Sum of a group's local steps, for each parameter that an open round covers. It takes one byte if few peers
send similar sizes in one bit."""
FEW_BYTES = 1
"""The same sum with few contributors: those that train an expert, or a result of four bits per number."""
RESULT_BYTES = RESULT_BITS / 8
"""Results of a sharded exchange, for each number that an open round covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStepConfig(MethodConfig):
    """The configuration of one method with local steps."""

    inner_optimizer: InnerOptimizerName = "adamw"
    fragments: int = 1
    """Number of fragments of the weights. Each round covers one of them, in turn."""
    delta_codec: DeltaCodecName = "int8"
    residual: ResidualName = "drop"
    is_steady: bool = False
    """Whether fragments have their turns at equal distances; otherwise in an order drawn for each cycle."""
    small_model_rate: float = 4e-3
    """Learning rate for a small model. AdamW as the inner optimizer takes half of Muon's rate; with an outer
    momentum half of that (docs/learning.md: diloco's best)."""
    inner_batch_tokens: int = 0
    optimizer_warmup_steps: int = 8
    error_feedback_decay: float = 0.95
    sparse_topk: int = 64
    topology: TopologyName = "all-gather"
    shards: int = 16
    outer_lr: float = 1.0
    """Factor on the mean delta in the group's step."""
    weights: str = "equal"

    introduction: ClassVar[str] = (
        "The others are local-step methods: a peer runs its own optimizer and sends weight deltas."
    )
    can_shard: ClassVar[bool] = True
    can_weigh_tokens: ClassVar[bool] = True
    loss_law: ClassVar[LossLaw] = LossLaw(scale=1.045, peers_exponent=0.047, bits_exponent=0.029)
    preset_keys: ClassVar[tuple[str, ...]] = (
        "inner_optimizer",
        "fragments",
        "delta_codec",
        "residual",
        "outer_lr",
    )

    @property
    def outer_thousandths(self) -> tuple[int, int]:
        """Factor on the mean delta in the group's step, and Nesterov momentum of the group, settled like the
        weights; 0 if there is none. They are integers, because settled values must be equal everywhere."""
        return round(self.outer_lr * THOUSAND), 0

    @property
    def settles_momentum(self) -> bool:
        """Whether the group settles an outer momentum in addition to the weights."""
        return self.outer_thousandths[1] > 0

    @property
    def weighs_by_tokens(self) -> bool:
        """Whether contributions weigh by their number of tokens (`sync.weights`)."""
        return self.weights == "tokens"

    @property
    def is_sharded(self) -> bool:
        return self.topology == "sharded-reduce"

    def key_problems(self) -> list[Problem]:
        return [
            (
                self.inner_batch_tokens < 0 or self.optimizer_warmup_steps < 0,
                "sync: inner_batch_tokens and optimizer_warmup_steps cannot be negative",
            ),
            (
                not 0 <= self.fragments <= 64 or self.fragments & (self.fragments - 1) != 0,
                f"sync.fragments is {self.fragments}; it must be a power of two up to 64, or 0",
            ),
            (
                not 0 < self.sparse_topk <= 4096 or self.sparse_topk & (self.sparse_topk - 1) != 0,
                f"sync.sparse_topk is {self.sparse_topk}; it must be a power of two up to 4096",
            ),
            (
                not 0 <= self.error_feedback_decay <= 1,
                f"sync.error_feedback_decay is {self.error_feedback_decay:g}; it must lie in [0, 1]",
            ),
            (
                not 0 < self.shards <= MAX_SHARDS,
                f"sync.shards is {self.shards}; it must lie in 1 to {MAX_SHARDS}",
            ),
            (
                not 0.001 <= self.outer_lr <= 2,
                f"sync.outer_lr is {self.outer_lr:g}; it must lie in 0.001 to 2, or be 0",
            ),
        ]

    def problems(self) -> list[Problem]:
        return [
            (
                self.is_sharded and (self.delta_codec == "topk-2bit" or self.weighs_by_tokens),
                "sync.topology: with topk-2bit each peer sends other values, so their mean takes more bytes "
                "than they do, and a reducer's mean of four bits has no weights by tokens; write all-gather, "
                "or set sync.delta_codec or sync.weights",
            ),
        ]

    def contribution_bytes(self, sizes: StageSizes) -> float:
        """Estimate the bytes of one encoded weight delta."""
        if self.delta_codec == "topk-2bit":
            # A value has an index, a sign and a bit for one of two sizes. A chunk has the sizes (8 bytes).
            values_per_chunk = max(1, self.sparse_topk // self.fragments)
            bits_per_value = 4 + log2(CHUNK / self.sparse_topk)
            return sizes.trained / CHUNK * (values_per_chunk * bits_per_value / 8 + 8)
        return sizes.trained / self.fragments * BITS[self.delta_codec] / 8 + sizes.trained / CHUNK

    def result_bytes(self, size: int) -> float:
        return size / self.fragments * RESULT_BITS / 8 + size / CHUNK

    def kept_bytes(self, sizes: StageSizes, open_rounds: int, is_small: bool) -> int:
        """Estimate the bytes of the group's momentum, the error-feedback residual and the open rounds."""
        kept = 0
        if self.settles_momentum:
            kept += sizes.all * FLOAT_BYTES
        if self.residual == "error-feedback":
            kept += sizes.trained * FLOAT_BYTES
        whole_round = self._open_round_bytes(sizes, is_small and self.delta_codec == "sign")
        return kept + ceil(whole_round * open_rounds / self.fragments)  # A round covers one fragment.

    def _open_round_bytes(self, sizes: StageSizes, is_small_sum: bool) -> float:
        """Return the bytes of one open round, if it covered all parameters. With own deltas kept, a peer has
        a float for each parameter that it trains. Otherwise it has the sum of the group's deltas. A sum of
        few contributions takes `FEW_BYTES`: with `is_small_sum` everywhere, else for experts in groups and
        with reducers, whose results are added."""
        results = RESULT_BYTES * sizes.all if self.is_sharded else 0
        if self.residual != "local":  # Own deltas are kept until the round is applied.
            return FLOAT_BYTES * sizes.trained + FEW_BYTES * (sizes.all - sizes.trained) + results
        few = sizes.all if self.is_sharded or is_small_sum else sizes.few
        return FEW_BYTES * few + MOVES_BYTES[self.delta_codec] * (sizes.all - few) + results


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStepConfig(LocalStepConfig):
    """The configuration of a method with local steps whose group has an optimizer for the mean delta."""

    outer_momentum: float = 0.9
    small_model_rate: float = 2e-3

    has_outer_optimizer: ClassVar[bool] = True
    loss_law: ClassVar[LossLaw] = LossLaw(scale=1.18, error=0.07)
    """The mean over the trials of `diloco-h30` and `streaming-diloco-h32`."""

    @property
    def outer_thousandths(self) -> tuple[int, int]:
        return round(self.outer_lr * THOUSAND), round(self.outer_momentum * THOUSAND)

    def key_problems(self) -> list[Problem]:
        return [
            (
                not 0 <= self.outer_momentum <= 0.99,
                f"sync.outer_momentum is {self.outer_momentum:g}; it must lie in [0, 0.99]",
            ),
        ]
