"""Choose the keys of a run for a text, a model and machines, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from peers.config.errors import UserError
from peers.lab.planner.new_run.machines import Machines
from peers.lab.planner.new_run.text_facts import TextFacts
from peers.lab.planner.shape import laws
from peers.lab.planner.shape.candidates import cuts
from swarmnet.identifiers import PeerId
from swarmnet.model.flops import operations_per_token
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.resources.memory_estimate import needs_of
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, Lora, ModelShape
from swarmnet.run.sync_methods import COMMON_STEP_METHOD

MAX_EPOCHS = 4
"""Times that a text is worth reading: up to four, repeated tokens are almost as good as new ones
(arXiv:2305.16264)."""
TUNING_EPOCHS = 3
TUNING_ROUNDS = 200
"""Rounds of a fine-tuning, as far as its text allows: enough for the schedule, few enough for many peers."""
TUNING_RATES = {True: 8e-3, False: 2e-3}
"""Learning rate of a fine-tuning by sign-muon, with LoRA and of all weights."""
USED = 0.5
"""Share of the machines' speed that a run uses on the mean; the rest waits for others."""
HIDDEN_SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Widths of the proposed models."""
SMALL, MAX_LAYERS = 256, 24
MIN_SEQUENCE, MAX_SEQUENCE, MAX_TUNED_SEQUENCE = 128, 1024, 2048
BYTE_TEXT, VOCABULARIES = 4_000_000, ((100_000_000, 4096), (1_000_000_000, 8192))
"""Bytes of text up to which tokens are bytes, and up to which a vocabulary is as large as said."""
LARGEST_VOCABULARY = 32_768
EVEN = 64


@dataclass(frozen=True, slots=True)
class Proposal:
    """Keys of a run file, and why."""

    keys: dict[str, Any]
    reasons: tuple[str, ...]
    tokens: int
    """Tokens to train."""


def vocabulary_for(text_bytes: int) -> int:
    """Return the size of a vocabulary for a text; 0: its tokens are bytes."""
    if text_bytes < BYTE_TEXT:
        return 0
    return next((size for limit, size in VOCABULARIES if text_bytes < limit), LARGEST_VOCABULARY)


def propose_size(
    text: TextFacts, vocabulary: int, machines: Machines, seconds: float
) -> tuple[ModelShape, int, str]:
    """Return the largest model that the text and the machines can train in `seconds`, its tokens, and the
    reason. A model is worth 20 tokens a parameter."""
    chosen: tuple[ModelShape, int] | None = None
    bound = "a larger one is not proposed"
    for hidden in HIDDEN_SIZES:
        shape = _shape(hidden, vocabulary)
        size = sum(map(prod, parameter_shapes(shape, whole(shape)).values()))
        tokens = laws.TOKENS_PER_PARAMETER * size
        per_token = operations_per_token(
            Manifest("size", PeerId(""), stages=(shape.num_hidden_layers,), model=shape), 0
        )
        speed = sum(each.count * each.tokens_per_second for each in machines.classes(per_token))
        needed = tokens / (USED * speed)
        if tokens > MAX_EPOCHS * text.tokens:
            bound = f"the next larger one would need {tokens:,} tokens, more than {MAX_EPOCHS} epochs"
        elif needed > seconds:
            bound = f"the next larger one would take these machines about {needed / 3600:,.1f} hours"
        else:
            chosen = shape, tokens
            continue
        chosen = chosen or (shape, MAX_EPOCHS * text.tokens)
        break
    assert chosen is not None, "HIDDEN_SIZES is not empty"
    shape, tokens = chosen
    reason = (
        f"{laws.TOKENS_PER_PARAMETER} tokens a parameter are {tokens:,}, "
        f"{tokens / text.tokens:.2g} epochs; {bound}"
    )
    return shape, tokens, reason


def _shape(hidden: int, vocabulary: int) -> ModelShape:
    """Return a model of this width, with the proportions of configs/home-run.yaml."""
    head = 32 if hidden % 64 or hidden < SMALL else 64
    heads = hidden // head
    return ModelShape(
        vocab_size=vocabulary or 256,
        hidden_size=hidden,
        num_hidden_layers=min(MAX_LAYERS, max(4, hidden // 64)),
        num_attention_heads=heads,
        num_key_value_heads=heads if heads % 2 else heads // 2,
        head_dim=head,
        intermediate_size=3 * hidden,
        qk_norm=True,
        initializer_range=0.05 if hidden < SMALL else 0.02,  # docs/lessons.md
        max_position_embeddings=MAX_SEQUENCE,
    )


def sequence_for(text: TextFacts, hidden: int) -> int:
    """Return the length of a sequence of plain text: longer for larger models, and short enough that the text
    has many."""
    longest = min(MAX_SEQUENCE, max(MIN_SEQUENCE, 2 * hidden))
    while longest > 16 and 8 * longest > text.tokens:
        longest //= 2
    return longest


def propose_tuning(text: TextFacts, model: ModelShape, peers: int, memory: int, lora: int) -> Proposal:
    """Return how a model is tuned on a text by so many peers of `memory` bytes each (0: unknown). `lora`: the
    rank of its adapters; 0 trains all weights. Raises UserError if no peer holds a layer."""
    length = min(model.max_position_embeddings, MAX_TUNED_SEQUENCE)
    if text.long_tokens:
        length = min(length, ceil(text.long_tokens / EVEN) * EVEN)
    while length > 16 and 8 * length > text.tokens:
        length //= 2
    tuned = replace(model, lora=Lora(lora, 2.0 * lora)) if lora else model
    tokens = TUNING_EPOCHS * text.tokens
    sequences = next((count for count in (4, 2, 1) if 2 * peers * count * length * 20 <= tokens), 1)
    round_tokens = max(peers * sequences * length, tokens // TUNING_ROUNDS)
    rounds = max(1, tokens // round_tokens)
    manifest = Manifest(
        "tuning",
        PeerId(""),
        stages=(model.num_hidden_layers,),
        model=tuned,
        data=Data(seq_len=length, micro_batch_size=sequences),
    )
    stages = _stages_that_fit(manifest, peers, memory)
    rate = TUNING_RATES[lora > 0]
    reasons = (
        f"seq_len: {length}"
        + (", into which 99 % of the conversations fit" if text.long_tokens <= length else ""),
        f"stages: {len(stages)}, "
        + ("all of the model on each peer" if len(stages) == 1 else "as memory needs"),
        f"global_batch_tokens: {TUNING_EPOCHS} epochs of {text.tokens:,} tokens are {rounds:,} rounds",
        f"learning_rate: {rate:g}, the best of four on a small model ({'LoRA' if lora else 'all weights'}); "
        "search with `swarmnet bench learning`, and lower it with `swarmnet order rate` if the loss rises",
    )
    keys: dict[str, Any] = {
        "stages": list(stages),
        "data": {"seq_len": length, "micro_batch_size": sequences},
        "rounds": {"global_batch_tokens": round_tokens},
        "sync": {
            "method": COMMON_STEP_METHOD,
            "learning_rate": rate,
            "warmup_rounds": max(1, rounds // 20),
            "decay_rounds": rounds,
        },
    }
    if lora:
        keys["model"] = {"lora": {"rank": lora, "alpha": 2.0 * lora}}
    return Proposal(keys, reasons, tokens)


def _stages_that_fit(manifest: Manifest, peers: int, memory: int) -> tuple[int, ...]:
    """Return the layers of the fewest stages whose memory fits. Raises UserError."""
    for count in range(1, min(peers, manifest.model.num_hidden_layers) + 1):
        for stages in sorted(cuts(manifest, count)):
            cut = replace(manifest, stages=stages)
            needed = max(needs_of(cut, stage, 0).least for stage in range(count))
            if not memory or needed <= memory:
                return stages
    raise UserError(
        f"{peers} peers with {memory / 1e9:.3g} GB each cannot hold this model: name more or larger ones "
        "with --peers, such as --peers 8x100tps@100/40:24GB"
    )
