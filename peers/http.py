"""Small HTTP servers with one thread each: pages made on request, read only.

/metrics, /healthz and /readyz of every peer are one of them (`Exporter`): healthz: the process lives and its
event loop turns; readyz: this peer takes part in rounds. Both answer 200 or 503 with one line that says why.
On 127.0.0.1 unless the peer file says otherwise.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import NamedTuple
from urllib.parse import parse_qsl

from prometheus_client import CONTENT_TYPE_LATEST

from peers.errors import UserError

REQUEST_SECONDS = 5.0
"""A client that sends no whole request in this time is dropped: scrapers send it at once."""
MOST_REQUESTS = 64
"""At a time; each is a thread. Whoever comes then is dropped and may come again."""
MOST_FIELDS = 8
"""Of a query."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""On every answer: pages show what strangers wrote, and nothing may be loaded from elsewhere."""

Probe = Callable[[], str | None]
"""None: all is well; else the reason why not. Called from the server's threads: only reads."""


class Answer(NamedTuple):
    status: int
    kind: str
    """Content type."""
    body: bytes


Page = Callable[[Mapping[str, str]], Answer]
"""The query's fields -> the answer. Called from the server's threads."""


class PageServer:
    """Serves until closed."""

    def __init__(self, address: tuple[str, int], pages: Mapping[str, Page], key: str) -> None:
        """Bind and start. Raises UserError naming the port and the peer file's `key` if the port is taken;
        port 0 takes any free one."""
        host, port = address
        try:
            self._server = _Server((host, port), _handler(pages), ":" in host)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(
                f"{key}: cannot listen on {host} port {port}: {reason}; "
                "choose another port, 0 for any free one, or off"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.25}, name="http", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and the real port."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Stop and free the port. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> PageServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Exporter(PageServer):
    """A peer's own metrics and health."""

    def __init__(
        self, address: tuple[str, int], metrics: Callable[[], bytes], healthy: Probe, ready: Probe
    ) -> None:
        """As PageServer."""
        pages: dict[str, Page] = {
            "/metrics": lambda _: Answer(200, CONTENT_TYPE_LATEST, metrics()),
            "/healthz": lambda _: probed(healthy),
            "/readyz": lambda _: probed(ready),
        }
        super().__init__(address, pages, "metrics.listen")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MOST_REQUESTS  # socketserver's 5 make a burst of visitors wait for whole seconds.

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], ipv6: bool) -> None:
        if ipv6:
            self.address_family = socket.AF_INET6
        self._places = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__(address, handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client: object) -> None:
        """In a thread of its own, if there is a place."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client)
        else:
            self.shutdown_request(request)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client: object
    ) -> None:
        try:
            super().process_request_thread(request, client)
        finally:
            self._places.release()

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of the host's name, which can hang for want of a DNS server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news; anything else is printed as usual."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def probed(probe: Probe) -> Answer:
    problem = probe()
    text = "ok" if problem is None else problem
    return Answer(200 if problem is None else 503, "text/plain; charset=utf-8", f"{text}\n".encode())


def _handler(pages: Mapping[str, Page]) -> type[BaseHTTPRequestHandler]:
    others = Answer(404, "text/plain; charset=utf-8", (", ".join(pages) + "\n").encode())

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS
        server_version = "swarmnet"
        sys_version = ""

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            page = pages.get(path)
            status, kind, body = page(_fields(query)) if page else others
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are no news."""

    return Handler


def _fields(query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, max_num_fields=MOST_FIELDS))
    except ValueError:  # Too many of them.
        return {}
