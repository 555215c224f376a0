"""The configuration of a sync method: the keys of `sync` that it reads, their checks, and its estimates.

Each sync method has one object of this class or of a subclass (`swarmnet/run/sync_methods.py`). Code outside
asks this object and never compares names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from swarmnet.run.loss_law import LossLaw

FLOAT_BYTES = 4
MUON_RMS = 0.2
"""Root mean square of an AdamW update. Muon's updates are scaled to it, so that one learning rate serves both
(arXiv:2502.16982, section 2.2)."""
CHUNK = 4096
"""Number of values per chunk (`swarmnet/optimizer/sign_votes.py`)."""
SIGN_BYTES = 1
"""Effect of each applied open round, one sign per parameter."""
Problem = tuple[bool, str]
"""Whether keys are wrong, and the message. A message starts with the key and ends with what to write."""


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Numbers of parameters of one stage, with padding, from which methods estimate bytes."""

    all: int
    trained: int
    """Parameters that this peer trains."""
    few: int
    """Parameters of experts in groups, each of which few peers train."""
    matrices: tuple[tuple[int, ...], ...]
    """Shapes of the layer matrices that this peer trains."""


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """The configuration of one sync method. A field with the name of a key of `sync` has its value."""

    meaning: str
    """What the method sends and applies, as a sentence after its name for the documentation."""
    value_bits: int = 1
    """Bits of each value in a contribution."""
    small_model_rate: float = 0.0
    """Learning rate for a small model. 0: the default of `sync.learning_rate`."""

    introduction: ClassVar[str] = ""
    """Sentence of the documentation before the first method of this class."""
    has_outer_optimizer: ClassVar[bool] = False
    """Whether the method reads `outer_momentum`."""
    can_shard: ClassVar[bool] = False
    """Whether the method works with `sync.topology: sharded-reduce`."""
    can_weigh: ClassVar[bool] = False
    """Whether the method works with `sync.weights: agreement`. A run file without the key then means it."""
    can_weigh_tokens: ClassVar[bool] = False
    """Whether the method works with `sync.weights: tokens`."""
    can_mask: ClassVar[bool] = False
    """Whether the method works with `sync.secure_owners`."""
    orthogonalizes_gradients: ClassVar[bool] = False
    """Whether a contribution takes Newton-Schulz steps on the matrices of layers."""
    loss_law: ClassVar[LossLaw] = LossLaw(scale=1.055)
    """The loss that the planner expects. The mean over the trials of `demo-sign` stands for all methods that
    have no law of their own."""
    preset_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that may be `method` or 0, which stands for the method's own value."""

    @property
    def relative_step(self) -> float:
        """Root mean square by which a round changes weights, in units of `sync.learning_rate`."""
        return 1.0

    @property
    def weighs_by_agreement(self) -> bool:
        """Whether votes weigh by their contributor's agreement with the others (`sync.weights`)."""
        return False

    def read(self, keys: Mapping[str, Any]) -> Self:
        """Return this configuration with the values of the keys of `sync` that it has."""
        given = {key.name: keys[key.name] for key in fields(self) if key.name in keys}
        own = {key for key in self.preset_keys if keys[key] in ("method", 0)}
        return replace(self, **{key: value for key, value in given.items() if key not in own})

    def key_problems(self) -> list[Problem]:
        """Return the checks of single keys. They apply to every run, whichever method it has."""
        return []

    def problems(self) -> list[Problem]:
        """Return the checks that apply only to a run with this method."""
        return []

    def contribution_bytes(self, sizes: StageSizes) -> float:
        return sizes.trained * self.value_bits / 8

    def result_bytes(self, size: int) -> float:
        """Estimate the bytes of all results of one round, with reducers. Together they cover a fragment of
        `size` parameters."""
        raise TypeError("the method does not work with reducers")

    def kept_bytes(self, sizes: StageSizes, open_rounds: int, is_small: bool) -> int:
        """Estimate the bytes of the tensors that only this method has, without optimizer moments. `is_small`
        means that the group has few peers, so that sums of their one-bit updates fit in one byte."""
        return sizes.all * SIGN_BYTES * open_rounds
