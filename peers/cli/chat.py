"""The command `swarmnet chat`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from peers.cli.model import (
    Bootstraps,
    InviteText,
    Run,
    Seed,
    Source,
    Temperature,
    TokenizerFile,
    TopK,
    asks_peers,
    warn,
)
from peers.errors import as_user_errors
from peers.telemetry.beside import Beside

if TYPE_CHECKING:
    from peers.tools.model.chat import Chat, Model
    from peers.tools.model.generate import Continuation


def chat(
    source: Source = None,
    run: Run = None,
    bootstrap: Bootstraps = None,
    invite: InviteText = None,
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Longest answer in tokens.")] = 200,
    until: Annotated[str, typer.Option(help="End an answer after this text, such as '\\n'.")] = "",
    temperature: Temperature = 0.8,
    top_k: TopK = 40,
    seed: Seed = 0,
    tokenizer: TokenizerFile = None,
) -> None:
    """Write a text in turns with a trained model, or with the live peers of a run; /quit ends."""
    import asyncio

    from peers.data.documents import TextError
    from peers.tools.model.chat import Here, Lines
    from peers.tools.model.export_folder import ExportError
    from peers.tools.model.generate import Continuation, LocalModel
    from peers.tools.model.local_model import held

    out = Beside(sys.stdout, sys.stderr, shutil.get_terminal_size().columns)
    make, lines = _chat(tokens, until.replace("\\n", "\n").encode(), out), Lines(sys.stdin.fileno())
    if asks_peers(source, run, bootstrap, invite):
        from peers.cli.swarm_model import Style
        from peers.cli.swarm_model import chat as through_swarm

        assert run is not None
        style = Style(temperature=temperature, top_k=top_k, seed=seed)
        through_swarm(run, bootstrap or [], invite, style, make, lines, out, tokenizer)
        return
    with as_user_errors(ExportError, TextError):
        model = held(source, warn, tokenizer)

        def begin(prompt: bytes) -> Continuation:
            return Continuation(
                prompt, model.shape.context, window=model.window, tokenizer=model.tokenizer,
                temperature=temperature, top_k=top_k, seed=seed,
            )  # fmt: skip

        asyncio.run(make(Here(LocalModel(model.weights, model.shape)), begin).run(lines))


def _chat(
    tokens: int, until: bytes, out: Beside
) -> Callable[[Model, Callable[[bytes], Continuation]], Chat]:
    """What makes a chat of a model here. A person is told of trouble and goes on; with a pipe it ends."""
    from peers.tools.model.chat import COMMANDS, Chat, Turns

    person = sys.stdin.isatty()

    def say(text: str) -> None:
        out.say("chat", text)

    def ask() -> None:
        if person:
            typer.echo("> ", nl=False, err=True)

    def make(model: Model, begin: Callable[[bytes], Continuation]) -> Chat:
        if person:
            say(f"The model continues what you type. {COMMANDS}")
        return Chat(model, begin, Turns(tokens, until), out.write, say, ask, _mendable() if person else ())

    return make


def _mendable() -> tuple[type[Exception], ...]:
    from peers.errors import NoAnswer

    return (NoAnswer,)
