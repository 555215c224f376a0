"""Commands for a trained model: export, generate, evaluate. The model is read from checkpoints on this disk
(`--from`), or served by the live peers of a run (`--run`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peers.cli.run import text_or_file, warn
from peers.config.errors import UserError, as_user_errors, how_to_install

if TYPE_CHECKING:
    from peers.data.tokenizer import Tokenizer
    from peers.tools.model.evaluate import Score
    from swarmnet.run.manifest import Manifest
    from swarmnet.run.schema import ModelShape

Source = Annotated[
    Path | None,
    typer.Option("--from", help="Checkpoint, folder of checkpoints, or exported model. [default: .]"),
]
Run = Annotated[
    str | None, typer.Option("--run", help="Use the live peers of this run (published file or run id).")
]
Bootstraps = Annotated[
    list[str] | None,
    typer.Option("--bootstrap", help="With --run: multiaddr of a peer to find others through. Repeatable."),
]
InviteText = Annotated[
    str | None,
    typer.Option(
        "--invite",
        metavar="TEXT|@FILE",
        callback=text_or_file,
        help="With --run: invite from the run's owner, if required. @FILE reads it from a file.",
    ),
]
Temperature = Annotated[
    float, typer.Option(min=0, help="Sampling temperature. 0: always the most likely token.")
]
TopK = Annotated[int, typer.Option(min=0, help="Sample from this many most likely tokens. 0: from all.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling; the same seed gives the same text.")]
EvalText = Annotated[Path | None, typer.Option(help="Text to score. [default: held-out modules of Python]")]
TokenizerFile = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", metavar="FILE", help="The run's tokenizer.json, if its tokens are not bytes."
    ),
]
ToScore = Annotated[
    bool | None,
    typer.Option(
        "--score/--no-score",
        help="Score on held-out text for the model card. [default: if the run read only python-stdlib]",
    ),
]
DEFAULT_WINDOW = 128
"""Tokens of context if the sequence length of the training is unknown."""
OWN_TEXT = (
    "the held-out modules of Python's library may be in the text that this run was trained on; name a text "
    "that was kept from it: --eval-text TEXT"
)
"""Warning for runs that do not keep the held-out modules out of their text; only the source python-stdlib
does."""


def export(
    hf: Annotated[Path, typer.Option("--hf", metavar="DIR", help="Folder to write.")],
    source: Source = None,
    run: Run = None,
    bootstrap: Bootstraps = None,
    invite: InviteText = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the folder if it exists.")] = False,
    score: ToScore = None,
    eval_text: EvalText = None,
    tokenizer_path: TokenizerFile = None,
) -> None:
    """Write a Hugging Face model with a model card, from a checkpoint, and check it against transformers."""
    is_live = uses_live_peers(source, run, bootstrap, invite)
    _require_valid_export(hf, replace, eval_text, score)
    if not is_live:
        _write_export(source, hf, replace, score, eval_text, tokenizer_path)
        return
    from peers.cli.swarm_model import fetched

    assert run is not None
    with fetched(run, bootstrap or [], invite) as folder:
        _write_export(folder, hf, replace, score, eval_text, tokenizer_path)


def _write_export(
    source: Path | None,
    hf: Path,
    replace: bool,
    score: bool | None,
    eval_text: Path | None,
    tokenizer_path: Path | None,
) -> None:
    """Write the Hugging Face folder `hf` from the newest checkpoints in `source`. If transformers is
    installed, check that it computes the same logits. Prints what was done. Raises UserError."""
    from peers.data.documents import TextError
    from peers.data.tokenizer import open_reader, open_tokenizer, tokenizer_file
    from peers.state import checkpoint_file
    from peers.tools.model import hf_parity
    from peers.tools.model.evaluate import score_weights
    from peers.tools.model.export import MANIFEST_FILE
    from peers.tools.model.export import export as write
    from peers.tools.model.export_folder import ExportError
    from peers.tools.model.model_card import card
    from peers.tools.model.provenance import facts

    with as_user_errors(ExportError, TextError):
        model = checkpoint_file.newest(source)
        manifest, shape = model.manifest, model.manifest.model
        is_scored, text = _text_for_card(manifest, eval_text, score)
        weights = model.whole()
        file = tokenizer_file(manifest.data, tokenizer_path)
        tokenizer = open_tokenizer(file, shape.vocab_size, manifest.data.eos_token)
        eos_id = tokenizer.end.token  # None if the tokenizer has no token that ends a document.
        end = (manifest.data.eos_token, eos_id) if eos_id is not None else None
        provenance = facts(source, manifest)
        scored = None
        if text is not None:
            scored = score_weights(weights, shape, text, tokenizer, window=manifest.data.seq_len)
        elif is_scored:
            reads = open_reader(manifest.data, file, shape.vocab_size)
            scored = _score_answers(weights, shape, reads, eval_text, manifest.data.seq_len)
        unchecked_reason = hf_parity.missing()

        def finish(folder: Path, exported: ModelShape) -> None:
            """Compare the new folder with transformers, and add the manifest and the model card."""
            compared = None if unchecked_reason else hf_parity.compare(folder, weights, shape, tokenizer)
            (folder / MANIFEST_FILE).write_bytes(manifest.canonical())
            page = card(manifest, provenance, scored, compared, hf, eval_text, shape=exported)
            (folder / "README.md").write_text(page, encoding="utf-8")
            if exported.tie_word_embeddings:
                typer.echo("tied   embedding and head are equal: written once, tie_word_embeddings: true")
            elif manifest.init_checkpoint.path:
                typer.echo("untied embedding and head differ: both are written, tie_word_embeddings: false")
            if compared is not None:
                typer.echo(
                    f"check  transformers {compared.version} computes the same for {compared.tokens} tokens: "
                    f"logits differ by {compared.difference:.1e} at most"
                )

        write(hf, shape, model.path(), tokenizer=file, end=end, replace=replace, finish=finish)
    warnings = [f"passed over: {trouble}" for trouble in model.passed_over]
    if tokenizer.warning:
        warnings.append(tokenizer.warning)
    warnings += [f"left out of the model card: {trouble}" for trouble in provenance.troubles]
    if unchecked_reason:
        warnings.append(unchecked_reason)
    for warning in warnings:
        warn(warning)
    if scored is not None:
        text_name = "held-out text" if eval_text is None else eval_text
        typer.echo(f"score  {scored.bits_per_byte:.4f} bits per byte of {text_name}")
    typer.echo(f"wrote  {hf}  (run {manifest.run_id()}, round {model.round})")


def _require_valid_export(hf: Path, replace: bool, eval_text: Path | None, score: bool | None) -> None:
    """Raise UserError if options of `export` exclude each other, or its folder or text cannot be used. These
    checks come first, because reading the model can take minutes."""
    from peers.config.atomic_files import is_there
    from peers.tools.model.export_folder import ExportError, require_replaceable

    if eval_text is not None and score is False:
        raise UserError("--eval-text names a text to score on and --no-score asks for no score: give one")
    with as_user_errors(ExportError):
        require_replaceable(hf, replace)
    if eval_text is not None:
        is_there(eval_text)


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT...", help="Texts to continue; several only with --run."),
    ] = None,
    source: Source = None,
    run: Run = None,
    bootstrap: Bootstraps = None,
    invite: InviteText = None,
    prompt: Annotated[str, typer.Option(help="Text to continue, if no PROMPT is given.")] = "",
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of tokens to generate.")] = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 40,
    seed: Seed = 0,
    tokenizer: TokenizerFile = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer PROMPT, as the model's chat template shows it.")
    ] = False,
    messages: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Answer a conversation: a line of JSON with `messages`."),
    ] = None,
) -> None:
    """Continue a text or answer a message with a trained model, or through the live peers of a run."""
    from peers.data.documents import TextError
    from peers.tools.model.export_folder import ExportError
    from peers.tools.model.generate import Readable
    from peers.tools.model.generate import generate as write
    from peers.tools.model.local_model import held

    texts = prompts or [prompt]
    talks = _talks(texts, chat, messages)
    if uses_live_peers(source, run, bootstrap, invite):
        from peers.cli.swarm_model import Style
        from peers.cli.swarm_model import generate as through_swarm

        assert run is not None
        style = Style(temperature=temperature, top_k=top_k, seed=seed)
        through_swarm(run, bootstrap or [], invite, texts, tokens, style, tokenizer, talks)
        return
    if len(texts) > 1:
        raise UserError(f"{len(texts)} prompts: several need --run; give one")
    with as_user_errors(ExportError, TextError):
        model, readable = held(source, warn, tokenizer), Readable()
        reads, text = model.tokenizer, texts[0]
        if talks:
            from peers.data.conversations import prompts_of

            reads, (text,) = prompts_of(model.tokenizer_file, talks)
        else:
            typer.echo(text, nl=False)
        for piece in write(
            model.weights,
            model.shape,
            text.encode(),
            tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            window=model.window,
            tokenizer=reads,
        ):
            sys.stdout.write(readable.add(piece))
            sys.stdout.flush()
    typer.echo(readable.add(b"", final=True))


def _talks(texts: list[str], chat: bool, messages: Path | None) -> list[list[dict[str, Any]]]:
    """Return the conversations to answer; none: the texts are continued. Raises UserError."""
    if messages is None:
        return [[{"role": "user", "content": text}] for text in texts] if chat else []
    from peers.data.conversations import messages_of

    if texts != [""]:
        raise UserError("--messages FILE and PROMPT: give one of them")
    try:
        return [messages_of(messages.read_bytes())]
    except OSError as error:
        raise UserError(f"--messages {messages}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(
            f'--messages {messages}: {error}; it looks like {{"messages": [{{"role": "user", "content": '
            '"Hello"}]}'
        ) from None


def evaluate(
    source: Source = None,
    run: Run = None,
    bootstrap: Bootstraps = None,
    invite: InviteText = None,
    eval_text: EvalText = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks of lm-evaluation-harness instead of a text, separated by commas."),
    ] = None,
    tasks_folder: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="With --tasks: folder of custom tasks.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tasks: documents per task.")] = None,
    tokenizer: TokenizerFile = None,
    answers: Annotated[
        bool | None,
        typer.Option(
            "--answers/--no-answers",
            help="Score only the answers in conversations. [default: if the run was trained on some]",
        ),
    ] = None,
) -> None:
    """Score a trained model, or a run's live peers, on held-out text: perplexity and bits per byte."""
    from peers.data.documents import TextError, text_at
    from peers.tools.model.evaluate import score_weights
    from peers.tools.model.export_folder import ExportError
    from peers.tools.model.local_model import held

    is_live = uses_live_peers(source, run, bootstrap, invite)
    if tasks is None and (tasks_folder is not None or limit is not None):
        raise UserError("--tasks-folder and --limit need --tasks, which names the tasks to evaluate")
    if tasks is not None:
        if is_live or eval_text is not None:
            raise UserError(
                "--tasks reads a checkpoint (--from) and brings its own texts: leave out --run, "
                "--bootstrap, --invite and --eval-text"
            )
        _evaluate_tasks(source, tasks, tasks_folder, limit, tokenizer)
        return
    if answers and (is_live or eval_text is None):
        raise UserError("--answers scores a model on this disk: add --from FOLDER --eval-text FILE.jsonl")
    with as_user_errors(ExportError, TextError):

        def warn_if_trained_on(is_library_alone: bool) -> None:
            """Warn if the run may have trained on the default text: it read more than Python's library."""
            if eval_text is None and not is_library_alone:
                warn(OWN_TEXT)

        if is_live:
            from peers.cli.swarm_model import evaluate as through_swarm

            assert run is not None
            text = _text_to_score(eval_text)
            score = through_swarm(run, bootstrap or [], invite, text, tokenizer, found=warn_if_trained_on)
        else:
            if eval_text is not None:
                text_at([str(eval_text)])  # Raises TextError before a model is read for nothing.
            model = held(source, warn, tokenizer, answers)
            weights, shape, reads = model.weights, model.shape, model.tokenizer
            window = model.window or DEFAULT_WINDOW
            if reads.parse_line is None:
                warn_if_trained_on(model.is_library_alone)
                score = score_weights(weights, shape, _text_to_score(eval_text), reads, window=window)
            else:
                score = _score_answers(weights, shape, reads, eval_text, window)
    _print_score(score)


def _score_answers(
    weights: Mapping[str, Any],
    shape: ModelShape,
    tokenizer: Tokenizer,
    eval_text: Path | None,
    window: int,
) -> Score:
    """Return the score of a model on the answers in conversations. `weights` maps global name to tensor.
    Raises TextError, and UserError if no conversations are named."""
    from peers.data.documents import text_at
    from peers.tools.model.evaluate import score_answers

    if eval_text is None:
        raise UserError("the model answers: name conversations that it was not trained on: --eval-text FILE")
    answers = text_at([str(eval_text)], parse_line=tokenizer.parse_line)
    score = score_answers(weights, shape, answers, tokenizer, window=window)
    for warning in answers.reading.warnings():
        warn(warning)
    typer.echo(f"loss {score.loss:.4f} nats per token of the answers")
    return score


def _text_for_card(manifest: Manifest, chosen: Path | None, score: bool | None) -> tuple[bool, bytes | None]:
    """Return whether an export is scored for its model card (README.md), and on which text; None for the
    answers in conversations.

    `score` is the user's choice, or None. An export is then scored if a text was `chosen`, or if the run
    trains only on Python's standard library. Held-out modules of that library are the default text. Warns if
    the run may have trained on the default text. Raises TextError."""
    trained_on_stdlib_only = manifest.data.is_library_alone  # The held-out modules are no part of that text.
    wanted = score if score is not None else chosen is not None or trained_on_stdlib_only
    text = _text_to_score(chosen) if wanted and manifest.data.format == "text" else None
    if chosen is None and score is not False and not trained_on_stdlib_only:
        warn(OWN_TEXT if wanted else f"not scored: {OWN_TEXT}")
    return wanted, text


def _text_to_score(chosen: Path | None) -> bytes:
    """Return the bytes of the `chosen` text, or of the held-out modules of Python's library. Raises TextError
    if there is no text, UserError if it cannot be read."""
    from peers.config.atomic_files import is_there
    from peers.data.documents import TextError, held_out_text, read_text

    if chosen is not None:
        is_there(chosen)
        return read_text(str(chosen), warn)
    try:
        return held_out_text()
    except TextError as error:
        raise TextError(f"{error}: --eval-text FILE") from None


def _print_score(score: Score) -> None:
    typer.echo(f"{score.bits_per_byte:.4f} bits per byte over {score.bytes} bytes")
    typer.echo(f"perplexity {score.perplexity:.4f} per token")
    typer.echo(f"text sha256 {score.sha256}, window {score.window} tokens")
    typer.echo("scores compare only where both are equal")


def _evaluate_tasks(
    source: Path | None, tasks: str, folder: Path | None, limit: int | None, tokenizer: Path | None
) -> None:
    """Score a model on this disk on tasks of lm-evaluation-harness, whose names `tasks` separates by commas.
    Print the metrics. `limit`: documents per task. Raises UserError."""
    from importlib.util import find_spec

    from peers.data.documents import TextError
    from peers.tools.model.export_folder import ExportError
    from peers.tools.model.likelihood import ModelScorer
    from peers.tools.model.local_model import held

    names = [task.strip() for task in tasks.split(",") if task.strip()]
    if not names:
        raise UserError("--tasks names no task; write, for instance, --tasks arc_easy,piqa")
    if find_spec("lm_eval") is None:
        raise UserError(
            f"--tasks needs lm-evaluation-harness, which is not installed: {how_to_install('eval')}"
        )
    from peers.tools.model.lm_eval import run_tasks

    with as_user_errors(ExportError, TextError):
        model = held(source, warn, tokenizer)
        scorer = ModelScorer(
            weights=model.weights,
            shape=model.shape,
            tokenizer=model.tokenizer,
            window=model.window or DEFAULT_WINDOW,
        )
        results = run_tasks(scorer, names, folder, limit)
    for task, metrics in results.items():
        for name, value in metrics.items():
            typer.echo(f"{task}  {name}  {value:.4f}")
    typer.echo(f"window {scorer.window} tokens")


def uses_live_peers(
    source: Path | None, run: str | None, bootstrap: list[str] | None, invite: str | None = None
) -> bool:
    """Return whether the options ask for the live peers of a run, instead of checkpoints on this disk. Raises
    UserError for options that exclude each other."""
    for option, given in (("--bootstrap", bootstrap), ("--invite", invite)):
        if run is None and given:
            raise UserError(f"{option} needs --run, which names the run")
    if run is not None and source is not None:
        raise UserError("--run uses live peers and --from reads a checkpoint: give one of them")
    return run is not None
