"""Define the manifest: the keys of one run (`schema.py`), with the values that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

from swarmnet.identifiers import RunId
from swarmnet.run.activation_sizes import LABEL_BYTES, Codec, encoded_bytes, token_bytes
from swarmnet.run.canonical_form import canonical_json, run_id_of
from swarmnet.run.path_rules import PathRules
from swarmnet.run.schema import RunKeys, Sync


class ManifestError(ValueError):
    """The manifest contradicts itself. The message names the key and a value that would fit."""


@dataclass(frozen=True, slots=True)
class Manifest(RunKeys):
    """All keys of one run, and the values that follow from several of them."""

    def canonical(self) -> bytes:
        """Return canonical JSON: all keys except `ADDED` ones at their default, sorted, without spaces."""
        return canonical_json(self)

    def run_id(self) -> RunId:
        """Return the SHA-256 of the canonical form."""
        return run_id_of(self.canonical())

    @property
    def microbatch_tokens(self) -> int:
        return self.data.micro_batch_size * self.data.seq_len

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """Shape of a microbatch's hidden states between stages: [B, T, D], or [B, T, R] at narrow ones."""
        return self.data.micro_batch_size, self.data.seq_len, self.model.crossing

    @property
    def body_bytes(self) -> int:
        """Bytes of a microbatch that is sent to the next stage: encoded hidden states and tokens."""
        return encoded_bytes(self.hidden_shape, self.activation_codec) + self.text_bytes

    @property
    def text_bytes(self) -> int:
        """Bytes of the tokens that are sent to the next stage with a microbatch's hidden states.

        With full boundaries these are int32 labels, which only the last stage reads. With narrow ones, every
        stage needs the tokens of each sequence and the token after it, in `token_bytes` each. None are sent
        in a U-shaped run.
        """
        if self.is_u_shaped:
            return 0
        if not self.model.boundary.is_narrow:
            return LABEL_BYTES * self.microbatch_tokens
        tokens = self.microbatch_tokens + self.data.micro_batch_size
        return tokens * token_bytes(self.model.vocab_size)

    @property
    def effective_gradient_codec(self) -> Codec:
        return self.activation_codec if self.gradient_codec == "same" else self.gradient_codec

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a microbatch's gradient that is sent to the previous stage."""
        return encoded_bytes(self.hidden_shape, self.effective_gradient_codec)

    @property
    def compares_answers(self) -> bool:
        """Whether answers of several peers to one microbatch are compared. Where stages may be skipped, two
        peers rarely send a microbatch to the same next stage. In a U-shaped run it returns to one peer."""
        return self.compared_fraction > 0.0 and not self.path_rules().skips and not self.is_u_shaped

    @property
    def is_u_shaped(self) -> bool:
        """Whether stage 0 has both ends of the model (U-shaped split learning, arXiv:1812.00564), so that
        microbatches return to their origin (docs/decisions/0051-owners-hold-both-ends.md)."""
        return self.data.u_shaped_layers > 0

    def neighbour_stages(self, stage: int) -> tuple[int, ...]:
        """Return the stages whose peers exchange microbatches directly with peers of `stage`. These are the
        two adjacent stages, and farther ones if microbatches may skip stages. In a U-shaped run the first and
        the last stage are adjacent, too."""
        reach = self.path_rules().reach
        near = set(range(max(0, stage - reach), min(len(self.stages), stage + reach + 1)))
        ends = {0, len(self.stages) - 1}
        if self.is_u_shaped and stage in ends:
            near |= ends
        return tuple(sorted(near - {stage}))

    def path_rules(self) -> PathRules:
        """Return the rules for the paths of microbatches. In a U-shaped run a path ends one position after
        the last stage: back in stage 0."""
        paths = self.paths
        return PathRules.of(
            stages=len(self.stages) + self.is_u_shaped,
            skip_ratio=paths.skip_ratio,
            full_path_warmup_rounds=paths.full_path_warmup_rounds,
            full_path_fraction=paths.full_path_fraction,
        )

    def span(self, stage: int) -> Span:
        """Return the slice of the model that `stage` holds. In a U-shaped run stage 0 has a second one, and
        the position after the last stage is that one alone."""
        if not self.is_u_shaped:
            first = sum(self.stages[:stage])
            is_last = stage == len(self.stages) - 1
            return Span(first, stop=first + self.stages[stage], has_embedding=stage == 0, has_head=is_last)
        layers, returned = self.model.num_hidden_layers, self.data.u_shaped_layers
        end = Span(layers - returned, stop=layers, has_embedding=False, has_head=True)
        if stage == len(self.stages):
            return end
        if stage == 0:
            return Span(0, self.stages[0] - returned, has_embedding=True, has_head=False, end=end)
        first = sum(self.stages[:stage]) - returned
        return Span(first, stop=first + self.stages[stage], has_embedding=False, has_head=False)


@dataclass(frozen=True, slots=True)
class Span:
    """The slice of the model that one stage holds: layers [first, stop), and those of `end`."""

    first: int
    stop: int
    has_embedding: bool
    has_head: bool
    end: Span | None = None
    """The model's last layers and head, if the stage has both ends of the model."""

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers of the stage, those of `end` as well."""
        return (*range(self.first, self.stop), *(self.end.layers if self.end is not None else ()))


def learning_rate(sync: Sync, round: int) -> float:
    """Return the learning rate of a round: a linear warm-up, then a cosine to `min_lr_ratio` of the peak.

    This is DeMo's schedule (arXiv:2411.19870, section 4).
    """
    if round < sync.warmup_rounds:
        return sync.learning_rate * (round + 1) / sync.warmup_rounds
    progress = min(1.0, (round - sync.warmup_rounds) / max(1, sync.decay_rounds - sync.warmup_rounds))
    cosine = 0.5 * (1 + cos(pi * progress))  # From 1 to 0.
    return sync.learning_rate * (sync.min_lr_ratio + (1 - sync.min_lr_ratio) * cosine)
