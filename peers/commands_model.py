"""Commands about a trained model, and benchmarks: export, generate, evaluate, bench."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.errors import as_user_errors

if TYPE_CHECKING:
    from torch import Tensor

    from swarmnet.manifest import ModelShape

Source = Annotated[
    Path | None,
    typer.Option("--from", help="A checkpoint, a folder of them, or an exported model. [default: .]"),
]  # fmt: skip


Run = Annotated[
    str | None, typer.Option("--run", help="Ask the live peers of this run: its published file, or its id.")
]
Bootstraps = Annotated[
    list[str] | None,
    typer.Option("--bootstrap", help="With --run: multiaddr of a peer to find others through. Repeatable."),
]


def export(
    hf: Annotated[Path, typer.Option("--hf", metavar="DIR", help="Folder to write.")],
    source: Source = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the folder if it is there.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face model that transformers loads."""
    from peers.checkpoint import newest
    from peers.export import ExportError
    from peers.export import export as write

    with as_user_errors(ExportError):
        checkpoint = newest(source)
        manifest = checkpoint.manifest
        write(hf, manifest.model, checkpoint.stages, tokenizer=manifest.data.tokenizer, replace=replace)
    typer.echo(f"wrote  {hf}  (run {manifest.run_id()}, round {checkpoint.round})")


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...", help="Texts to continue, all at once.")
    ] = None,
    source: Source = None,
    run: Run = None,
    bootstrap: Bootstraps = None,
    prompt: Annotated[str, typer.Option(help="Text to continue, where no PROMPT is given.")] = "",
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same text.")] = 0,
) -> None:
    """Continue a text with a trained model, or through the live peers of a run."""
    from peers.errors import UserError
    from peers.export import ExportError
    from peers.generate import generate as write
    from peers.text import TextError, open_tokenizer

    texts = prompts or [prompt]
    if _through_swarm(source, run, bootstrap):
        from peers.commands_visit import generate as through_swarm

        assert run is not None
        through_swarm(run, bootstrap or [], texts, tokens, temperature, seed)
        return
    if len(texts) > 1:
        raise UserError(f"{len(texts)} prompts: several at once are for --run; give one")
    with as_user_errors(ExportError, TextError):
        weights, shape, tokenizer, window = _model(source)
        typer.echo(texts[0], nl=False)
        for piece in write(
            weights, shape, texts[0].encode(), tokens,
            temperature=temperature, seed=seed, window=window,
            tokenizer=open_tokenizer(tokenizer, shape.vocabulary),
        ):  # fmt: skip
            sys.stdout.write(piece.decode(errors="replace"))
            sys.stdout.flush()
    typer.echo()


def evaluate(
    source: Source = None,
    run: Run = None,
    bootstrap: Bootstraps = None,
    eval_text: Annotated[Path | None, typer.Option(help="A text. [default: held-out modules]")] = None,
) -> None:
    """Score a trained model, or a run's live peers, on text they have not seen: perplexity, bits per byte."""
    from peers.evaluate import score_weights
    from peers.export import ExportError
    from peers.text import TextError, held_out_text, open_tokenizer, read_text

    with as_user_errors(ExportError, TextError):
        text = held_out_text() if eval_text is None else read_text(str(eval_text))
        if _through_swarm(source, run, bootstrap):
            from peers.commands_visit import evaluate as through_swarm

            assert run is not None
            score = through_swarm(run, bootstrap or [], text)
        else:
            weights, shape, tokenizer, window = _model(source)
            score = score_weights(
                weights, shape, text, open_tokenizer(tokenizer, shape.vocabulary), window=window or 128
            )
    typer.echo(f"{score.bits_per_byte:.4f} bits per byte over {score.bytes} bytes")
    typer.echo(f"perplexity {score.perplexity:.4f} per token")
    typer.echo(f"text sha256 {score.sha256}, window {score.window} tokens")
    typer.echo("scores compare only where both are equal")


def _through_swarm(source: Path | None, run: str | None, bootstrap: list[str] | None) -> bool:
    """Whether live peers are to be asked. Raises UserError for options that do not fit together."""
    from peers.errors import UserError

    if run is None and bootstrap:
        raise UserError("--bootstrap is for --run, which names the run whose peers are to be asked")
    if run is not None and source is not None:
        raise UserError("--run asks live peers and --from reads a checkpoint: give one of them")
    return run is not None


def _model(source: Path | None) -> tuple[dict[str, Tensor], ModelShape, str, int | None]:
    """Weights, shape, tokenizer and the length of a training sequence (None: not known)."""
    from peers.checkpoint import newest
    from peers.export import load_shape, load_weights

    if source is not None and (source / "config.json").is_file():
        return load_weights(source), load_shape(source), _exported_tokenizer(source), None
    checkpoint = newest(source)
    weights = {name: tensor for stage in checkpoint.stages for name, tensor in stage.items()}
    data = checkpoint.manifest.data
    return weights, checkpoint.manifest.model, data.tokenizer, data.sequence_tokens


def _exported_tokenizer(folder: Path) -> str:
    from peers.export import load_shape

    return "bytes" if load_shape(folder).vocabulary == 256 else str(folder / "tokenizer.json")


def bench_contribution(
    parameters: Annotated[int, typer.Option(min=4096, help="Size of the model, about.")] = 1_000_000,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Repeats per figure.")] = 9,
) -> None:
    """Bytes and time of a contribution, beside a straightforward float DeMo."""
    from peers.bench_contribution import bench, render
    from protocols.envelope import ENVELOPE_BYTES
    from protocols.frames import wire_bytes
    from protocols.messages import Contribution, encode

    overhead = wire_bytes(len(encode(Contribution())), ENVELOPE_BYTES)
    typer.echo(render(bench(parameters, overhead_bytes=overhead, repeats=repeats)))


def bench_transfer(
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Repeats per figure.")] = 5,
) -> None:
    """Speed and latency of activations over p2pd links, beside plain asyncio TCP."""
    from peers.bench_transfer import bench, render

    typer.echo(render(bench(repeats)))


def bench_group(
    peers: Annotated[
        list[int] | None, typer.Option(min=2, max=2048, help="Size of a group; may be repeated.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=15.0, max=600.0, help="On the groups' own clock.")] = 21.0,
    contribution_bytes: Annotated[
        int, typer.Option(min=100, max=10_000_000, help="Size of each contribution.")
    ] = 24_000,
    seed: Annotated[int, typer.Option(min=0, max=255, help="Of delays and times.")] = 1,
) -> None:
    """How fast contributions reach everybody in groups of 8, 64 and 512 peers, and what that costs."""
    from peers.bench_group import bench, render

    typer.echo(render(bench(peers or [8, 64, 512], contribution_bytes, seconds, seed)))
