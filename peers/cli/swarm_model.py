"""The option --run of export, generate and evaluate: use the live peers of a run instead of a checkpoint.

A client with a throw-away identity contacts the run, whose peers compute the forward pass, each its stage.
Caveats are lines about the answers, such as which round's weights gave them.
"""

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
from typing import Any, TypedDict

import typer

from peers.cli.connecting import NOT_REACHED, notify, remembered_peers
from peers.config.errors import as_user_errors
from peers.data.documents import TextError
from peers.data.tokenizer import Tokenizer, tokenizer_file
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


Message = dict[str, Any]


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
    """Yield a temporary folder with the newest checkpoint of every stage of the run. Raises UserError."""
    cache, invite_data = remembered_peers(run, bootstraps), invite_of(invite)
    with tempfile.TemporaryDirectory(prefix=prefix("export")) as folder:
        with as_user_errors(*EXPECTED):
            asyncio.run(fetch_checkpoints(run, bootstraps, cache, notify, Path(folder), invite_data))
        yield Path(folder)


def generate(
    run: str,
    bootstraps: Sequence[str],
    invite: str | None,
    prompts: Sequence[str],
    tokens: int,
    style: Style,
    tokenizer: Path | None = None,
    talks: Sequence[Sequence[Message]] = (),
) -> None:
    """Continue each prompt by `tokens` tokens, or answer `talks` if there are any, and print the texts,
    caveats and speed. A single text is streamed; of several, each is printed when it is complete. Raises
    UserError."""
    cache, invite_data = remembered_peers(run, bootstraps), invite_of(invite)
    out = Beside(sys.stdout, sys.stderr, shutil.get_terminal_size().columns)
    notify = out.notify

    async def connect_and_generate() -> None:
        """Generate all texts, then print the caveats and the speed."""
        async with visiting(
            run, bootstraps, cache, notify, invite=invite_data, tokenizer=tokenizer
        ) as client:
            began, asked, reads = perf_counter(), [(text, text) for text in prompts], None
            if talks:
                reads, asked = _asked(client, talks)
            if len(asked) == 1:
                conversations = [await _stream_text(client, asked[0], tokens, style, out, reads)]
            else:
                conversations = await _generate_several(client, asked, tokens, style, reads)
            seconds, count = perf_counter() - began, tokens * len(asked)
            lines = [line for conversation in conversations for line in caveats(conversation)]
            for line in dict.fromkeys(lines):  # Each line once.
                notify("told", line)
            # Traffic between this client and the run's peers.
            per_token = (client.links.sent_bytes + client.links.received_bytes) / count
            notify("rate", f"{count / seconds:.1f} tokens/s, {per_token:,.0f} bytes per token on this link")

    with as_user_errors(*EXPECTED):
        asyncio.run(connect_and_generate())


Asked = tuple[str, str]
"""A prompt, and what is printed of it."""


def _asked(client: SwarmClient, talks: Sequence[Sequence[Message]]) -> tuple[Tokenizer, list[Asked]]:
    """Return the tokenizer and the prompts of conversations, of which only the answers are printed. Raises
    TextError."""
    from peers.data.conversations import prompts_of

    data = client.manifest.data
    reads, prompts = prompts_of(tokenizer_file(data, client.tokenizer), talks, data.chat_template_sha256)
    return reads, [(prompt, "") for prompt in prompts]


async def _stream_text(
    client: SwarmClient, asked: Asked, tokens: int, style: Style, out: Beside, reads: Tokenizer | None
) -> Conversation:
    """Print one prompt and stream its continuation. Return which peers and weights answered. `Readable` joins
    pieces of bytes to whole characters."""
    conversation, readable = Conversation(), Readable()
    prompt, shown = asked
    out.write(shown)
    try:
        async for piece in stream(
            client, prompt.encode(), tokens, conversation=conversation, reads=reads, **style
        ):
            out.write(readable.add(piece))
    finally:
        out.write(readable.add(b"", final=True) + "\n")
    return conversation


async def _generate_several(
    client: SwarmClient, prompts: Sequence[Asked], tokens: int, style: Style, reads: Tokenizer | None
) -> list[Conversation]:
    """Continue several prompts at the same time, and print each text when it is complete. Return their
    conversations. If one prompt fails, the others are cancelled."""

    async def continue_prompt(prompt: str, shown: str) -> Conversation:
        conversation, pieces = Conversation(), []
        async for piece in stream(
            client, prompt.encode(), tokens, conversation=conversation, reads=reads, **style
        ):
            pieces.append(piece)
        typer.echo(shown + harmless(b"".join(pieces).decode(errors="replace")) + "\n")
        return conversation

    tasks = [asyncio.create_task(continue_prompt(*asked)) for asked in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def evaluate(
    run: str,
    bootstraps: Sequence[str],
    invite: str | None,
    text: bytes,
    tokenizer: Path | None = None,
    *,
    found: Callable[[bool], None] = lambda _: None,
) -> Score:
    """Return the score of the model that the run's live peers hold. Raises UserError.

    After Ctrl+C or SIGTERM, prints the score so far and exits. `found` is called once, when the manifest has
    arrived; its argument is whether the run trains only on Python's library.
    """
    cache, invite_data = remembered_peers(run, bootstraps), invite_of(invite)
    progress, conversation = ScoreProgress(), Conversation()

    async def connect_and_score() -> Score:
        """Return the score, and report progress meanwhile."""
        async with visiting(
            run, bootstraps, cache, notify, invite=invite_data, tokenizer=tokenizer
        ) as client:
            found(client.manifest.data.is_library_alone)
            reporting = asyncio.create_task(_show_progress(progress))
            try:
                return await score(client, text, conversation=conversation, progress=progress)
            finally:
                reporting.cancel()

    async def score_until_signal() -> Score | None:
        """Return the score; None if a signal came first."""
        scoring, loop = asyncio.create_task(connect_and_score()), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, scoring.cancel)
        await asyncio.wait({scoring})
        return None if scoring.cancelled() else scoring.result()

    with as_user_errors(*EXPECTED):
        scored = asyncio.run(score_until_signal())
    has_answers = bool(conversation.rounds)
    for line in caveats(conversation) if has_answers else ():
        notify("told", line)
    if scored is None:
        typer.echo(f"stopped after {progress.line()}")
        raise typer.Exit(STOPPED)
    return scored


async def _show_progress(progress: ScoreProgress) -> None:
    """Report progress every REPORT_SECONDS, if there is any, until cancelled."""
    last_reported = 0
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        if progress.done != last_reported:
            last_reported = progress.done
            notify("progress", progress.line())
