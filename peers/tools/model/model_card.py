"""Write the model card: what a user of the model should know, in Markdown.

Its head is YAML that the Hugging Face hub reads. Text of the run's owner and of strangers is escaped, so it
is never read as Markdown or YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import prod
from pathlib import Path

from peers.telemetry.console import counted
from peers.tools.model.evaluate import Score
from peers.tools.model.export import MANIFEST_FILE
from peers.tools.model.hf_parity import Parity
from peers.tools.model.provenance import ModelProvenance
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import ModelShape

MAX_CONTRIBUTORS = 200
"""Maximum contributors in a card; it gives the number of the others."""


def card(
    manifest: Manifest,
    facts: ModelProvenance,
    score: Score | None,
    parity: Parity | None,
    folder: Path,
    text: Path | None = None,
    *,
    shape: ModelShape,
) -> str:
    """Return README.md of the export in `folder`, whose shape is `shape`. `text`: the scored text; None: the
    held-out modules."""
    return "\n".join(
        [
            *_head(manifest),
            f"# {plain(manifest.name)}",
            "",
            f"A language model of {_count(shape):,} parameters, trained by peers that do not know "
            "each other, each with a part of it, without a server (swarmnet).",
            "",
            *_table(("", ""), _what(manifest, facts, shape)),
            "",
            "## Data",
            "",
            *_table(
                ("source", "licence", "where it came from"),
                [(plain(it.name), plain(it.licence), plain(it.origin)) for it in manifest.data.sources],
            ),
            "",
            "## Contributors",
            "",
            *_contributors(facts),
            "",
            "## Score",
            "",
            *_score(score, text, manifest.data.format == "messages"),
            "",
            "## Check",
            "",
            *_check(parity),
            "",
            "## How to load",
            "",
            *_loading(manifest, folder),
            "",
        ]
    )


def plain(text: str) -> str:
    """Return one line of text with Markdown escaped; `-` for none."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return re.sub(r"([\\`*_{}\[\]()<>#|!~])", r"\\\1", line) or "-"


def _head(manifest: Manifest) -> list[str]:
    """Return the YAML head. JSON strings are valid YAML."""
    return [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [swarmnet, decentralized-training]",
        f"model_name: {json.dumps(manifest.name)}",
        *([f"license: {json.dumps(manifest.license)}"] if manifest.license else []),
        "---",
    ]


FAMILY = {
    (False, False, False): "Llama",
    (False, True, False): "Qwen2",
    (True, False, False): "Qwen3",
    (True, False, True): "Qwen3-MoE",
}
"""Common name of the model family, by (QK-norm, biases, experts)."""


def _what(manifest: Manifest, facts: ModelProvenance, exported: ModelShape) -> list[tuple[str, str]]:
    """Return the card's table of facts about the model, as (heading, text)."""
    shape = manifest.model
    family = FAMILY[shape.qk_norm, shape.attention_bias, shape.experts.num_experts > 0]
    head = [("head", "the embedding (`tie_word_embeddings`)")] if exported.tie_word_embeddings else []
    rounds = ", ".join(f"stage {stage}: {count:,}" for stage, count in sorted(facts.rounds.items()))
    tokens = f"about {facts.tokens:,}, by {facts.logs} event logs" if facts.logs else "not known here"
    if facts.finalized_tokens is not None:
        tokens = f"{facts.finalized_tokens:,} in the settled rounds of the first stage"
    return [
        ("run", f"`{manifest.run_id()}`, the SHA-256 of `{MANIFEST_FILE}`"),
        ("owner", f"`{manifest.owner}`, who signed the run"),
        ("contact", plain(manifest.contact)),
        ("intended use", plain(manifest.intended_use)),
        ("license", plain(manifest.license) or "not stated"),
        (
            "architecture",
            f"{family}: {shape.num_hidden_layers} layers, width {shape.hidden_size}, vocabulary "
            f"{shape.vocab_size}",
        ),
        *head,
        *_experts(shape),
        *_boundaries(manifest),
        *_start(manifest),
        ("trained on", f"sequences of {manifest.data.seq_len} tokens"),
        ("trained in", f"{len(manifest.stages)} stages, by {manifest.sync.method}"),
        *_skipping(manifest),
        ("settled rounds", rounds or "not known here"),
        ("tokens", tokens),
        ("weights signed by", counted(len(facts.signers), "peer") if facts.signers else "no known peer"),
    ]


def _experts(shape: ModelShape) -> list[tuple[str, str]]:
    experts = shape.experts
    description = f"{experts.num_experts} in each layer, of which a token takes {experts.top_k}"
    if experts.groups > 1:
        description += f"; each peer trained one of {experts.groups} groups of them"
    if experts.merge_rounds:
        every = f"every {experts.merge_rounds} rounds until round {experts.merge_until:,}"
        description += f"; {every} those that were alike moved towards one another"
    return [("experts", description)] if experts.num_experts else []


def _start(manifest: Manifest) -> list[tuple[str, str]]:
    start, lora = manifest.init_checkpoint, manifest.model.lora
    if not start.path:
        return []
    how = f"; trained were LoRA factors of rank {lora.rank}, here merged" if lora.rank else ""
    description = f"{start.path} ({start.origin or 'origin not stated'}), SHA-256 {start.sha256}{how}"
    return [("started from", plain(description))]


def _boundaries(manifest: Manifest) -> list[tuple[str, str]]:
    boundary = manifest.model.boundary
    if not boundary.is_narrow:
        return []
    places = " and ".join(filter(None, [", ".join(map(str, boundary.after[:-1])), str(boundary.after[-1])]))
    if boundary.kind == "shared-subspace":
        description = (
            f"in training the first {boundary.after[-1]} layers wrote into the same {boundary.width} "
            f"directions, and these went on after layers {places}; here that is multiplied out, and this is "
            "a plain model"
        )
        return [("narrow boundaries", description)]
    description = (
        f"after layers {places} {boundary.width} numbers per token go on, and an anchor of the token is "
        "added; the layers were trained with that and are of no use without it, so this is no plain model of "
        "its architecture, and programs that know only such do not load it"
    )
    return [("narrow boundaries", description)]


def _skipping(manifest: Manifest) -> list[tuple[str, str]]:
    rules = manifest.path_rules()
    scale = rules.branch_scale(1, rules.stages)
    if scale == 1.0:
        return []
    description = (
        f"by each microbatch, {rules.stages - rules.shortest} of the {rules.stages - 2} stages between the "
        f"first and the last; so what their layers add is scaled by {scale:.3g} here (in `o_proj` and "
        "`down_proj`), and the weights are not those of the checkpoints there"
    )
    return [("left out in training", description)]


def _contributors(facts: ModelProvenance) -> list[str]:
    counts, signed, claims = facts.contributions, facts.receipts, facts.claims
    if not counts and not signed and not claims:
        return ["Not known here: no event log or receipt of a peer was next to the checkpoints."]
    known = counts.keys() | signed.keys() | claims.keys()
    ranked = sorted(known, key=lambda peer: (-max(counts[peer], signed[peer]), -claims[peer], peer))
    named = ranked[:MAX_CONTRIBUTORS]
    rows = [(f"`{plain(peer)}`", *(_number(of[peer]) for of in (counts, signed, claims))) for peer in named]
    more = f" And {len(ranked) - len(named):,} more." if len(ranked) > len(named) else ""
    head = ("peer", "contributions in settled rounds", "others signed for", "tokens, by its own report")
    description = (
        f"As far as {facts.logs} event logs, receipts and an archive's list next to the checkpoints show."
    )
    return [*_table(head, rows), "", description + more]


def _number(count: int) -> str:
    return f"{count:,}" if count else "-"


def _score(score: Score | None, text: Path | None, of_answers: bool) -> list[str]:
    if score is None:
        return ["Not scored."]
    description = "held-out text" if text is None else plain(text.absolute().name)
    if of_answers:
        description = f"the answers in {description}"
    lines = [
        f"{score.bits_per_byte:.4f} bits per byte, perplexity {score.perplexity:.4f} per token, on "
        f"{score.bytes:,} bytes of {description} (SHA-256 `{score.sha256}`, windows of {score.window} "
        "tokens). Scores compare only where both are equal."
    ]
    if text is not None:
        lines += ["", "The author of this card chose that text, and claims that none of it was trained on."]
    return lines


def _check(parity: Parity | None) -> list[str]:
    if parity is None:
        return ["Not compared with transformers, which was not installed where this was written."]
    return [
        f"transformers {parity.version} loads it and gives the same logits for {parity.tokens} tokens: they "
        f"differ by {parity.difference:.1e} at most, where the largest is {parity.largest:.3g}."
    ]


def _loading(manifest: Manifest, folder: Path) -> list[str]:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name) or "model"
    return [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        *_registering(manifest),
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        'inputs = tokenizer("def ", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))",
        "```",
        "",
        f"It has seen sequences of {manifest.data.seq_len} tokens: later positions are new to it. Or "
        "`swarmnet generate --from FOLDER`.",
    ]


def _registering(manifest: Manifest) -> list[str]:
    if manifest.model.boundary.kind != "token-anchored":
        return []
    return [
        "from peers.tools.model.narrow_transformers import register  # of swarmnet, with its extra hf",
        "",
        "register()",
    ]


def _count(shape: ModelShape) -> int:
    """Return the number of parameters of the exported model."""
    return sum(prod(size) for size in parameter_shapes(shape, whole(shape)).values())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]
