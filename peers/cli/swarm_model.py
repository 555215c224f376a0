"""The option --run of export, generate and evaluate: use the live peers of a run."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TypedDict

import typer

from peers.cli.connecting import NOT_REACHED, notify, ways_in
from peers.data.documents import TextError
from peers.errors import as_user_errors
from peers.telemetry.beside import Beside
from peers.tools.model.evaluate import Score
from peers.tools.model.generate import Readable, harmless
from peers.tools.model.run_checkpoints import fetch_checkpoints
from peers.tools.model.swarm_client import Conversation, SwarmClient
from peers.tools.model.swarm_session import ScoreProgress, caveats, score, stream, visiting
from protocols.daemon.temporary import prefix
from protocols.errors import Malformed
from protocols.signed.invites import invite_bytes

REPORT_SECONDS = 5.0
"""Seconds between two reports of progress."""
STOPPED = 130
"""Exit code after a signal, as shells report it for Ctrl+C."""
EXPECTED = (*NOT_REACHED, TextError)
"""Errors that the user can correct."""


class Style(TypedDict):
    """How the next token is sampled (`tools/model/generate.py`)."""

    temperature: float
    top_k: int
    seed: int


def invite_of(text: str | None) -> bytes:
    """Return the bytes of an invite; empty for None. Raises UserError."""
    with as_user_errors(Malformed):
        return invite_bytes(text) if text else b""


@contextmanager
def fetched(run: str, bootstraps: Sequence[str], invite: str | None) -> Iterator[Path]:
    """A temporary folder with the newest checkpoint of every stage of the run. Raises UserError."""
    cache, shown = ways_in(run, bootstraps), invite_of(invite)
    with tempfile.TemporaryDirectory(prefix=prefix("export")) as folder:
        with as_user_errors(*EXPECTED):
            asyncio.run(fetch_checkpoints(run, bootstraps, cache, notify, Path(folder), shown))
        yield Path(folder)


def generate(
    run: str,
    bootstraps: Sequence[str],
    invite: str | None,
    prompts: Sequence[str],
    tokens: int,
    style: Style,
    tokenizer: Path | None = None,
) -> None:
    """Continue the prompts. A single one is streamed; of several, each text is printed when it is complete.
    Raises UserError."""

    cache, shown = ways_in(run, bootstraps), invite_of(invite)
    out = Beside(sys.stdout, sys.stderr, shutil.get_terminal_size().columns)
    notify = out.notify

    async def whole() -> None:
        async with visiting(run, bootstraps, cache, notify, invite=shown, tokenizer=tokenizer) as client:
            began = perf_counter()
            if len(prompts) == 1:
                talks = [await _one(client, prompts[0], tokens, style, out)]
            else:
                talks = await _several(client, prompts, tokens, style)
            seconds, count = perf_counter() - began, tokens * len(prompts)
            for line in dict.fromkeys(line for talk in talks for line in caveats(talk)):
                notify("told", line)
            per_token = (client.sent_bytes + client.received_bytes) / count
            notify("rate", f"{count / seconds:.1f} tokens/s, {per_token:,.0f} bytes per token on this link")

    with as_user_errors(*EXPECTED):
        asyncio.run(whole())


async def _one(client: SwarmClient, prompt: str, tokens: int, style: Style, out: Beside) -> Conversation:
    """Stream the continuation of one prompt."""
    talk, readable = Conversation(), Readable()
    out.write(prompt)
    try:
        async for piece in stream(client, prompt.encode(), tokens, conversation=talk, **style):
            out.write(readable.add(piece))
    finally:
        out.write(readable.add(b"", final=True) + "\n")
    return talk


async def _several(
    client: SwarmClient, prompts: Sequence[str], tokens: int, style: Style
) -> list[Conversation]:
    """Continue several prompts at the same time."""

    async def text(prompt: str) -> Conversation:
        talk, pieces = Conversation(), []
        async for piece in stream(client, prompt.encode(), tokens, conversation=talk, **style):
            pieces.append(piece)
        typer.echo(prompt + harmless(b"".join(pieces).decode(errors="replace")) + "\n")
        return talk

    tasks = [asyncio.create_task(text(prompt)) for prompt in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def evaluate(
    run: str, bootstraps: Sequence[str], invite: str | None, text: bytes, tokenizer: Path | None = None,
    *, found: Callable[[bool], None] = lambda _: None,
) -> Score:  # fmt: skip
    """Return the score of the model that the run's live peers hold. Raises UserError.

    After Ctrl+C or SIGTERM, prints the score so far and exits. `found` is called with whether the run reads
    only Python's library.
    """

    cache, shown = ways_in(run, bootstraps), invite_of(invite)
    progress, talk = ScoreProgress(), Conversation()

    async def whole() -> Score:
        async with visiting(run, bootstraps, cache, notify, invite=shown, tokenizer=tokenizer) as client:
            found(client.manifest.data.is_library_alone)
            reporting = asyncio.create_task(_show_progress(progress))
            try:
                return await score(client, text, conversation=talk, progress=progress)
            finally:
                reporting.cancel()

    async def until_stopped() -> Score | None:
        work, loop = asyncio.create_task(whole()), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, work.cancel)
        await asyncio.wait({work})
        return None if work.cancelled() else work.result()

    with as_user_errors(*EXPECTED):
        scored = asyncio.run(until_stopped())
    for line in caveats(talk) if talk.rounds else ():
        notify("told", line)
    if scored is None:
        typer.echo(f"stopped after {progress.line()}")
        raise typer.Exit(STOPPED)
    return scored


async def _show_progress(progress: ScoreProgress) -> None:
    """Report progress until cancelled."""
    before = 0
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        if progress.done != before:
            before = progress.done
            notify("progress", progress.line())
