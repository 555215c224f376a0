"""/metrics, /healthz and /readyz over HTTP, from one small server thread.

/healthz: the process lives and its event loop turns. /readyz: this peer takes part in rounds. Both answer
200 or 503 with one line that says why. On 127.0.0.1 unless the peer file says otherwise; read only.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType

from prometheus_client import CONTENT_TYPE_LATEST

from peers.errors import UserError

REQUEST_SECONDS = 5.0
"""A client that sends no whole request in this time is dropped: scrapers send it at once."""

Probe = Callable[[], str | None]
"""None: all is well; else the reason why not. Called from the server's threads: only reads."""


class Exporter:
    """Serves until closed."""

    def __init__(
        self, address: tuple[str, int], metrics: Callable[[], bytes], healthy: Probe, ready: Probe
    ) -> None:
        """Bind and start. Raises UserError naming the port if it is taken; port 0 takes any free one."""
        host, port = address
        pages: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            "/metrics": lambda: (200, CONTENT_TYPE_LATEST, metrics()),
            "/healthz": lambda: _probed(healthy),
            "/readyz": lambda: _probed(ready),
        }
        try:
            self._server = _Server((host, port), _handler(pages), ":" in host)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(
                f"metrics.listen: cannot listen on {host} port {port}: {reason}; "
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

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], ipv6: bool) -> None:
        if ipv6:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of the host's name, which can hang for want of a DNS server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news; anything else is printed as usual."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def _probed(probe: Probe) -> tuple[int, str, bytes]:
    problem = probe()
    text = "ok" if problem is None else problem
    return 200 if problem is None else 503, "text/plain; charset=utf-8", f"{text}\n".encode()


def _handler(pages: dict[str, Callable[[], tuple[int, str, bytes]]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS
        server_version = "swarmnet"
        sys_version = ""

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            status, kind, body = page() if page else (404, "text/plain", b"/metrics, /healthz, /readyz\n")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are no news."""

    return Handler
