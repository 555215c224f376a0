"""A conversation with a model in a terminal, or through pipes: a text that person and model write in turns.

The models of runs continue text; they were not taught to answer. So what is typed continues the text, the
model writes on, and what is typed next follows on a new line. All of it stays in the model's window, as far
as that reaches.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from peers.tools.model.generate import Continuation, LocalModel, Readable

Result = TypeVar("Result")

COMMANDS = "/reset forgets the text, /quit ends; an empty line: write on; Ctrl+C stops an answer, or ends"


class Model(Protocol):
    """Who says what comes next."""

    async def logits(self, going: Continuation) -> Tensor:
        """[V]."""

    def forget(self) -> None:
        """The next text has nothing to do with this one."""


class Here:
    """A model in this process. Between two tokens others get their turn (Ctrl+C)."""

    def __init__(self, model: LocalModel) -> None:
        self._model = model

    async def logits(self, going: Continuation) -> Tensor:
        await asyncio.sleep(0)
        return self._model.logits(going)

    def forget(self) -> None:
        pass  # A new text begins with a new cache.


@dataclass(frozen=True, slots=True)
class Turns:
    """How the model takes its turn."""

    tokens: int
    """Longest answer."""
    until: bytes = b""
    """An answer ends after this text; empty: only by its length."""


class Lines:
    """Lines from a file descriptor, read in a thread: the event loop goes on meanwhile, and nothing waits for
    a person when the program ends. For files, pipes and terminals; asyncio's own readers refuse files."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = b""
        self._ended = False

    async def next(self) -> bytes | None:
        """One line without its end; None after the last."""
        while b"\n" not in self._read and not self._ended:
            await self._more()
        if not self._read:
            return None
        line, _, self._read = self._read.partition(b"\n")
        return line.removesuffix(b"\r")

    async def _more(self) -> None:
        loop = asyncio.get_running_loop()
        came: asyncio.Future[bytes] = loop.create_future()

        def tell(data: bytes) -> None:
            if not came.done():
                came.set_result(data)

        def read() -> None:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:  # A terminal that is gone.
                data = b""
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, data)

        threading.Thread(target=read, name="standard input", daemon=True).start()
        data = await came
        self._ended = not data
        self._read += data


class Chat:
    """The turns. `show` prints text of the model, `say` a line beside it; `ask` comes before each line."""

    def __init__(
        self,
        model: Model,
        begin: Callable[[bytes], Continuation],
        turns: Turns,
        show: Callable[[str], None],
        say: Callable[[str], None],
        ask: Callable[[], None],
        mendable: tuple[type[Exception], ...] = (),
    ) -> None:
        """`mendable`: errors of the model that are said, and the conversation goes on."""
        self._model, self._begin, self._turns = model, begin, turns
        self._show, self._say, self._ask = show, say, ask
        self._mendable = mendable
        self._going: Continuation | None = None
        self._line_ended = True
        self._under_way: asyncio.Task[Any] | None = None

    async def run(self, lines: Lines) -> None:
        """Until the lines end, /quit, or Ctrl+C while nothing is being written."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        try:
            while True:
                self._ask()
                line = await self._unless_interrupted(lines.next())
                if line is None or line == b"/quit":
                    return
                await self._take(line)
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def interrupt(self) -> None:
        """Stop what is under way: an answer, or waiting for a line."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def _take(self, line: bytes) -> None:
        if line == b"/reset":
            self._going = None
            self._model.forget()
            self._say("forgotten; what you type next begins a new text")
        elif line.startswith(b"/") and not line.startswith(b"//"):
            word = line.decode(errors="replace").split()[0]
            self._say(f"{word} is no command: {COMMANDS}; //... begins a text with /")
        else:
            text = line[1:] if line.startswith(b"//") else line
            try:
                if await self._unless_interrupted(self._answer(text)) is None:
                    self._say("stopped")
            except self._mendable as error:
                self._say(str(error))

    async def _answer(self, text: bytes) -> bytes:
        if self._going is None:
            self._going = self._begin(text)
        else:
            self._going.add(text if self._line_ended or not text else b"\n" + text)
        readable, said = Readable(), b""
        self._line_ended = False
        try:
            for _ in range(self._turns.tokens):
                piece = self._going.take(await self._model.logits(self._going))
                said += piece
                self._show(readable.add(piece))
                if self._going.ended or (self._turns.until and self._turns.until in said):
                    break
        finally:
            self._line_ended = said.endswith(b"\n")
            rest = readable.add(b"", final=True)
            self._show(rest if self._line_ended else rest + "\n")
        return said

    async def _unless_interrupted(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        task = asyncio.create_task(work)
        self._under_way = task
        try:
            await asyncio.wait({task})
        finally:
            self._under_way = None
            task.cancel()
        return None if task.cancelled() else task.result()
