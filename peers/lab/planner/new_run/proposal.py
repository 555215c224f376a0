"""Choose the settings of a run for a text, a model and machines, each with its reason."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod

from peers.config.errors import UserError
from peers.lab.planner.new_run.machines import Machines
from peers.lab.planner.new_run.text_facts import TextFacts
from peers.lab.planner.shape import laws
from peers.lab.planner.shape.candidates import cuts
from swarmnet.model.flops import operations_per_token
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.resources.memory_estimate import needs_of
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import BYTES, Lora, ModelShape, Rounds, Sync
from swarmnet.run.sync_methods import COMMON_STEP_METHOD

MAX_EPOCHS = 4
"""Maximum epochs of a text: up to four, repeated tokens are almost as good as new ones (arXiv:2305.16264)."""
TUNING_EPOCHS, TUNING_ROUNDS = 3, 200
"""Epochs of a fine-tuning, and its rounds as far as its text allows."""
TUNING_RATES, MEASURED_WIDTH = {True: 1.6e-2, False: 8e-3}, 64
"""Best learning rates of a fine-tuning by sign-muon, with LoRA and of all weights, of a model of this width
(docs/learning.md). Wider models get proportionally less (arXiv:2203.03466), which was not measured."""
USED = 0.5
"""Share of the machines' speed that a run uses on the mean; the rest waits for others."""
HIDDEN_SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Widths of the proposed models."""
WIDE, MAX_LAYERS = 256, 24
MIN_SEQUENCE, MAX_SEQUENCE, MAX_TUNED_SEQUENCE = 128, 1024, 2048
BYTE_TEXT, VOCABULARIES = 4_000_000, ((100_000_000, 4096), (1_000_000_000, 8192))
"""Bytes of text up to which tokens are bytes, and up to which a vocabulary is as large as said."""
LARGEST_VOCABULARY = 32_768
EVEN, MIN_WINDOWS = 64, 8


def vocabulary_for(text_bytes: int) -> int:
    """Return the size of a vocabulary for a text; 0: its tokens are bytes."""
    if text_bytes < BYTE_TEXT:
        return 0
    return next((size for limit, size in VOCABULARIES if text_bytes < limit), LARGEST_VOCABULARY)


def propose_size(
    run: Manifest, text: TextFacts, vocabulary: int, machines: Machines, seconds: float
) -> tuple[Manifest, int, tuple[str, ...]]:
    """Return the run with the largest model that the text and the machines can train in `seconds`, its
    tokens, and the reasons. A model is worth 20 tokens a parameter."""
    best: tuple[Manifest, int] | None = None
    bound = "a larger one is not proposed"
    for hidden in HIDDEN_SIZES:
        shape = _shape(hidden, vocabulary)
        length = _sequence(min(MAX_SEQUENCE, max(MIN_SEQUENCE, 2 * hidden)), text)
        data = replace(run.data, seq_len=length)
        candidate = replace(run, stages=(shape.num_hidden_layers,), model=shape, data=data)
        tokens = laws.TOKENS_PER_PARAMETER * sum(map(prod, parameter_shapes(shape, whole(shape)).values()))
        classes = machines.classes(operations_per_token(candidate, 0))
        needed = tokens / (USED * sum(each.count * each.tokens_per_second for each in classes))
        if tokens > MAX_EPOCHS * text.tokens:
            bound = f"the next larger one would need {tokens:,} tokens, more than {MAX_EPOCHS} epochs"
        elif needed > seconds:
            bound = f"the next larger one would take these machines about {needed / 3600:,.1f} hours"
        else:
            best = candidate, tokens
            continue
        best = best or (candidate, min(tokens, MAX_EPOCHS * text.tokens))
        break
    assert best is not None, "HIDDEN_SIZES is not empty"
    found, tokens = best
    bytes_why = ", bytes: the text is small" if run.data.tokenizer == BYTES else ""
    return *best, (
        f"model: {tokens:,} tokens, {tokens / text.tokens:.2g} epochs, are worth about one parameter for "
        f"{laws.TOKENS_PER_PARAMETER}; {bound}",
        f"vocab_size: {vocabulary:,}{bytes_why}",
        f"seq_len: {found.data.seq_len}, for a model of this width",
    )


def _shape(hidden: int, vocabulary: int) -> ModelShape:
    """Return a model of this width, with about the proportions of configs/home-run.yaml."""
    head = 64 if hidden >= WIDE else 32
    heads = hidden // head
    return ModelShape(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=min(MAX_LAYERS, max(4, hidden // 64)),
        num_attention_heads=heads,
        num_key_value_heads=heads if heads % 2 else heads // 2,
        head_dim=head,
        intermediate_size=3 * hidden,
        qk_norm=True,
        initializer_range=0.02 if hidden >= WIDE else 0.05,  # docs/lessons.md
        max_position_embeddings=MAX_SEQUENCE,
    )


def _sequence(longest: int, text: TextFacts) -> int:
    """Return the length of a sequence: at most `longest`, and short enough that the text has several."""
    while longest > 16 and MIN_WINDOWS * longest > text.tokens:
        longest //= 2
    return longest


def propose_tuning(
    run: Manifest, text: TextFacts, machines: Machines, lora: int
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the run that tunes its model on a text, and the reasons. `lora`: the rank of its adapters; 0
    trains all weights. Raises UserError if the machines cannot hold the model."""
    longest = min(run.model.max_position_embeddings, MAX_TUNED_SEQUENCE)
    if text.long_tokens:
        longest = min(longest, ceil(text.long_tokens / EVEN) * EVEN)
    length, tokens, peers = _sequence(longest, text), TUNING_EPOCHS * text.tokens, machines.count
    sequences = next((count for count in (4, 2) if 2 * peers * count * length * 20 <= tokens), 1)
    round_tokens = max(peers * sequences * length, tokens // TUNING_ROUNDS)
    rounds = max(1, tokens // round_tokens)
    rate = float(f"{TUNING_RATES[lora > 0] * min(1.0, MEASURED_WIDTH / run.model.hidden_size):.2g}")
    tuned = replace(
        run,
        stages=(run.model.num_hidden_layers,),
        model=replace(run.model, lora=Lora(lora, 2.0 * lora) if lora else Lora()),
        data=replace(run.data, seq_len=length, micro_batch_size=sequences),
        rounds=Rounds(global_batch_tokens=round_tokens),
        sync=Sync(
            method=COMMON_STEP_METHOD,
            learning_rate=rate,
            warmup_rounds=max(1, rounds // 20),
            decay_rounds=rounds,
        ),
    )
    tuned = _cut_to_fit(tuned, peers, machines.memory)
    is_whole = len(tuned.stages) == 1
    fits = ", into which 99 % of the conversations fit" if 0 < text.long_tokens <= length else ""
    return tuned, (
        f"seq_len: {length}{fits}",
        f"stages: {len(tuned.stages)}, {'all of the model on each peer' if is_whole else 'as memory needs'}",
        f"global_batch_tokens: {TUNING_EPOCHS} epochs of {text.tokens:,} tokens are {rounds:,} rounds",
        f"learning_rate: {rate:g}, the best at width {MEASURED_WIDTH}, less for wider ones: a guess; search "
        "with `swarmnet bench learning RUN.yaml`",
    )


def _cut_to_fit(run: Manifest, peers: int, memory: int) -> Manifest:
    """Return the run with the fewest stages whose memory fits; 0 bytes fit all. Raises UserError."""
    for count in range(1, min(peers, run.model.num_hidden_layers) + 1):
        is_tied = run.model.tie_word_embeddings and count == 1
        for stages in sorted(cuts(run, count)):
            cut = replace(run, stages=stages, model=replace(run.model, tie_word_embeddings=is_tied))
            if not memory or max(needs_of(cut, stage, 0).least for stage in range(count)) <= memory:
                return cut
    raise UserError(
        f"{peers} peers with {memory / 1e9:.3g} GB each cannot hold this model: name more or larger ones "
        "with --peers, such as --peers 8x100tps@100/40:24GB"
    )
