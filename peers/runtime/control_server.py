"""Let other processes of this machine send requests to a running peer, over a Unix socket.

A request is one line with a JSON object, and so is its answer.
Only the user of the peer's process can open it (mode 0600). There are limits nevertheless: the length of a
line, the number of connections, the time of silence, and the time of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from peers.config.errors import UserError
from peers.runtime.control_socket import LINE_BYTES, LONGEST_ANSWER_BYTES, SOCKET_NAME, socket_path

MAX_CONNECTIONS = 16
SILENT_SECONDS = 60.0
"""A connection without a request for this many seconds is closed; `top` sends one every second."""
ANSWER_SECONDS = 60.0
"""Timeout of a request. The checkpoint of a large stage is the slowest."""

Request = Mapping[str, Any]
Answer = Callable[[Request], Awaitable[dict[str, Any]]]
"""Executes a request and returns the answer. Raises UserError: what is wrong and what would be right."""


class Control:
    """The requests that a peer answers. Roles add their own to `answers`."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.answers: dict[str, Answer] = {}
        """The handlers by the word in `do`."""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start to listen. Raises UserError if the socket cannot be created."""
        try:
            listening = self._bind()
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(f"{self.state / SOCKET_NAME}: the control socket cannot be made: {why}") from None
        self._server = await asyncio.start_unix_server(self._accept, sock=listening, limit=LINE_BYTES)

    def _bind(self) -> socket.socket:
        """Return a listening socket that only this user can open. Raises OSError."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with socket_path(self.state) as path:
                # A killed peer leaves its socket. This peer has locked the folder, so no other one uses it.
                Path(path).unlink(missing_ok=True)
                os.fchmod(listening.fileno(), 0o600)  # On Linux the file is made with this mode at once.
                listening.bind(path)
                Path(path).chmod(0o600)
            listening.setblocking(False)
        except BaseException:
            listening.close()
            raise
        return listening

    async def close(self) -> None:
        """Stop listening, end the connections, and remove the socket."""
        if self._server is None:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError, UserError), socket_path(self.state) as path:
            Path(path).unlink(missing_ok=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until the client ends it; abort it if MAX_CONNECTIONS are open."""
        task = asyncio.current_task()
        if task is None or len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            pass  # The client has gone, sends nothing, or sent an endless line; or this peer ends.
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the lines of one connection until its end. Raises TimeoutError if the client is silent."""
        while True:
            async with asyncio.timeout(SILENT_SECONDS):
                line = await reader.readline()
            if not line.endswith(b"\n"):
                return
            writer.write(await self._answer(line))
            async with asyncio.timeout(SILENT_SECONDS):
                await writer.drain()

    async def _answer(self, line: bytes) -> bytes:
        """Execute the request in `line`, and return its answer as one line; an error is an answer too."""
        try:
            answer = self._encode(await self._execute(line))
        except UserError as error:
            answer = self._encode({"error": str(error)})
        except TimeoutError:
            answer = self._encode({"error": f"the peer did not finish within {ANSWER_SECONDS:g} s"})
        if len(answer) > LONGEST_ANSWER_BYTES:
            answer = self._encode({"error": f"an answer of {len(answer)} bytes; please report this"})
        return answer

    async def _execute(self, line: bytes) -> dict[str, Any]:
        """Execute the request in a JSON line and return its answer. Raises UserError for an unknown or
        failing request, and TimeoutError."""
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"that is no JSON: {str(error)[:200]}") from None
        return await self.execute(request)

    async def execute(self, request: object) -> dict[str, Any]:
        """Execute a request and return its answer. Raises UserError and TimeoutError."""
        command = request.get("do") if isinstance(request, dict) else None
        handler = self.answers.get(command) if isinstance(command, str) else None
        if handler is None or not isinstance(request, dict):
            known = ", ".join(sorted(self.answers))
            raise UserError(f'expected {{"do": WORD}} with one of: {known}')
        async with asyncio.timeout(ANSWER_SECONDS):
            return await handler(request)

    @staticmethod
    def _encode(answer: dict[str, Any]) -> bytes:
        return json.dumps(answer, separators=(",", ":"), default=str).encode() + b"\n"
