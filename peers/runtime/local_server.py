"""An HTTP server for the user of this computer alone, through which a page controls a peer.

It listens on loopback, where others can reach it nevertheless: programs of other users of this computer, and
every website that the user visits, through the user's browser. So each request needs all of this:

- `Host` is the address of this server, port included. Otherwise a website could point its own name here (DNS
  rebinding) and read the answers.
- `Origin` and `Sec-Fetch-Site`, which browsers add to a request to the peer, do not name another site.
- A request to the peer has the token: a secret that this process draws and gives to its user only. It comes
  in a header of its own. A browser asks this server before it lets another site send such a header (CORS),
  and this server never agrees. A cookie would be sent to every port of this computer, and so to other users.

The page itself contains nothing secret, so it needs no token. It gets the token from the part of its address
after `#`, which browsers do not send.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from peers.config.errors import UserError
from peers.runtime.http_server import REQUEST_SECONDS, HttpResponse, PageHandler, PageServer

TOKEN_HEADER = "X-Swarmnet-Token"
CONTROL_PATH = "/control"
BODY_BYTES = 4096
"""Maximum length of a request; limits and hours have some hundred bytes."""
OWN_SITES = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` of a request by this server's own page, or typed by the user."""
JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"

Execute = Callable[[object], Awaitable[dict[str, Any]]]
"""Executes a request of the control socket, on the event loop. Raises UserError and TimeoutError."""


class LocalServer(PageServer):
    """Serves files, and executes control requests that have the token, until closed."""

    def __init__(
        self,
        *,
        address: tuple[str, int],
        files: Mapping[str, HttpResponse],
        token: str,
        execute: Execute,
        allowed: Collection[str],
    ) -> None:
        """Bind and start, on the event loop on which `execute` runs. If the port is taken, any free one is
        used. `files` are responses by path. `allowed` are the words of `do` that the page may send. Raises
        UserError if this computer lets it have no port."""
        loop = asyncio.get_running_loop()

        def run(request: Mapping[str, Any]) -> HttpResponse:
            if request.get("do") not in allowed:
                return _error(400, f"expected one of: {', '.join(sorted(allowed))}")
            running = asyncio.run_coroutine_threadsafe(_awaited(execute, request), loop)
            try:
                answer = running.result(REQUEST_SECONDS)
            except UserError as error:
                return _error(200, str(error))  # As on the control socket.
            except (TimeoutError, concurrent.futures.CancelledError):
                running.cancel()
                return _error(504, "the peer does not answer in time")
            return HttpResponse(200, JSON, json.dumps(answer, default=str).encode())

        handler = _handler_class(files, token, run, lambda: self.address)
        host, port = address
        try:
            self._start((host, port), handler, "page")
        except UserError:
            self._start((host, 0), handler, "page")


async def _awaited(execute: Execute, request: object) -> dict[str, Any]:
    return await execute(request)


def _error(status: int, text: str) -> HttpResponse:
    return HttpResponse(status, JSON, json.dumps({"error": text}).encode())


def _handler_class(
    files: Mapping[str, HttpResponse],
    token: str,
    run: Callable[[Mapping[str, Any]], HttpResponse],
    address: Callable[[], tuple[str, int]],
) -> type[PageHandler]:
    """Return a handler class that serves `files` and, with the token, passes requests to `run`."""

    class LocalHandler(PageHandler):
        def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
            """Serve a file."""
            found = files.get(self.path.partition("?")[0])
            self.respond(self._wrong_name() or found or HttpResponse(404, TEXT, b"there is no such page\n"))

        def do_POST(self) -> None:  # noqa: N802
            """Execute a control request."""
            self.respond(self._wrong_name() or self._other_site() or self._control())

        def _names(self) -> tuple[str, str]:
            """Return the values that `Host` may have."""
            host, port = address()
            return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), f"localhost:{port}"

        def _wrong_name(self) -> HttpResponse | None:
            """Return the refusal of a request with another `Host`; None for any other request."""
            own, alias = self._names()
            if [name.lower() for name in self.headers.get_all("Host", [])] in ([own], [alias]):
                return None
            return HttpResponse(403, TEXT, f"asked by another name than {own}\n".encode())

        def _other_site(self) -> HttpResponse | None:
            """Return the refusal of a request that another site has caused; None for any other request."""
            own_origins = [f"http://{name}" for name in self._names()]
            is_own = all(origin in own_origins for origin in self.headers.get_all("Origin", []))
            if is_own and all(site in OWN_SITES for site in self.headers.get_all("Sec-Fetch-Site", [])):
                return None
            return HttpResponse(403, TEXT, b"asked by another site\n")

        def _control(self) -> HttpResponse:
            if self.path != CONTROL_PATH:
                return HttpResponse(404, TEXT, b"there is no such page\n")
            sent = self.headers.get(TOKEN_HEADER, "")
            if not hmac.compare_digest(sent.encode("utf-8", "replace"), token.encode()):
                return _error(401, "the token is missing or old; `swarmnet page` shows the present address")
            if self.headers.get_content_type() != "application/json":
                return _error(415, "expected application/json")
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or len(length) > 9 or int(length) > BODY_BYTES:
                return _error(413, f"expected at most {BODY_BYTES} bytes")
            try:
                request = json.loads(self.rfile.read(int(length)))
            except (ValueError, RecursionError):
                request = None
            if not isinstance(request, dict):
                return _error(400, "expected a JSON object")
            with self.server.places.computing(self.connection):
                return run(request)

        def end_headers(self) -> None:
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            super().end_headers()

    return LocalHandler
