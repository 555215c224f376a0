"""Small read-only HTTP servers, one thread each, whose pages are made on request.

`Exporter` serves /metrics, /healthz and /readyz of every peer. healthz: the process runs and its event loop
turns. readyz: this peer takes part in rounds. Both return 200, or 503 with one line that says why. The server
listens on 127.0.0.1 unless the peer file says otherwise.

Untrusted clients may reach it. Therefore each request has a time limit, and no client can use up all
connections. Requests with a foreign `Host` are refused against DNS rebinding: otherwise a website could point
its name to this machine. Its visitors' browsers would then read these pages for it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv6Address, ip_address
from socketserver import TCPServer
from types import TracebackType
from typing import NamedTuple
from urllib.parse import parse_qsl

from prometheus_client import CONTENT_TYPE_LATEST

from peers.config.errors import UserError

REQUEST_SECONDS = 5.0
"""Time limit of a connection in seconds. Scrapers send at once, and pages have about 100 kB."""
MAX_REQUESTS = 64
"""Maximum number of simultaneous requests; each takes a thread."""
MAX_PER_CLIENT = 8
"""Maximum connections of one client. A browser opens 6 to a host, a scraper or a probe one."""
LOOPBACK_RESERVE = 16
"""Connections reserved for this machine: its probes, and clients of a local proxy or tunnel."""
LOOPBACK = "loopback"
MAX_FIELDS = 8
"""Maximum number of fields in a query."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of every answer: pages show untrusted text, and nothing may be loaded from elsewhere."""

Probe = Callable[[], str | None]
"""Returns the problem, or None if there is none. Called from the server's threads, so it may only read."""


class HttpResponse(NamedTuple):
    """An HTTP response."""

    status: int
    kind: str
    """The content type."""
    body: bytes


class PageRequest(NamedTuple):
    """What a client asks for."""

    query: Mapping[str, str]
    site: str
    """Scheme and host under which the client knows this server, such as https://swarm.example.org; empty if
    it does not say. A reverse proxy reports the scheme. The client chooses the text after the host's name."""


Page = Callable[[PageRequest], HttpResponse]
"""Returns the response to a request. Called from the server's threads."""


class PageServer:
    """Serves pages until closed."""

    def __init__(
        self, *, address: tuple[str, int], pages: Mapping[str, Page], key: str, hosts: Sequence[str] = ()
    ) -> None:
        """Bind and start. `hosts` are accepted host names in lower case; port 0 takes any free port. Raises
        UserError with the port and the peer file's `key` if the port is taken."""
        host, _ = address
        foreign_host = HttpResponse(
            403,
            "text/plain; charset=utf-8",
            f"asked by another name than an address, localhost or one of {key.partition('.')[0]}.hosts in "
            "the peer file\n".encode(),
        )
        self._start(address, _handler_class(pages, {host.lower(), *hosts}, foreign_host), key)

    def _start(self, address: tuple[str, int], handler: type[PageHandler], key: str) -> None:
        """Bind and serve with this handler. Raises UserError with the port and the peer file's `key`."""
        host, port = address
        try:
            self._server = _Server((host, port), handler, ":" in host)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(
                f"{key}: cannot listen on {host} port {port}: {reason}; "
                f"choose another port, any free one with `--set {key}=127.0.0.1:0`, or off"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.25}, name="http", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and the actual port."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Stop and free the port. May be called more than once."""
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
    """Serves a peer's own metrics and health."""

    def __init__(
        self,
        *,
        address: tuple[str, int],
        metrics: Callable[[], bytes],
        healthy: Probe,
        ready: Probe,
        hosts: Sequence[str] = (),
        others: Sequence[int] = (),
    ) -> None:
        """Start like `PageServer`. `others` are ports to try after its own."""
        pages: dict[str, Page] = {
            "/metrics": lambda _: HttpResponse(200, CONTENT_TYPE_LATEST, metrics()),
            "/healthz": lambda _: probed(healthy),
            "/readyz": lambda _: probed(ready),
        }
        host, port = address
        refusals = []
        for other in (port, *others):
            try:
                super().__init__(address=(host, other), pages=pages, key="metrics.listen", hosts=hosts)
                return
            except UserError as error:
                refusals.append(error)
        raise refusals[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    """One open connection."""

    connection: socket.socket
    client: str
    until: float


class ConnectionSlots:
    """The connections that are being served. If no slot is free, a new connection displaces the oldest one of
    the same client, or else of the client with the most. Only slow requests last long enough for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[socket.socket, _Connection] = {}
        """Connections in order of arrival."""
        self._computing: set[socket.socket] = set()
        """Connections whose pages are being made, which cannot be interrupted."""
        self._ending: set[socket.socket] = set()
        """Displaced connections whose threads have not noticed yet."""

    def come(self, connection: socket.socket, client: str, now: float) -> bool:
        """Admit a connection of `client` (from `client_of`) at time `now` in seconds. If no slot is free,
        another connection is displaced (shut down), but none whose page is being made. Returns False if none
        can be displaced, or if too many displaced ones are still open."""
        with self._lock:
            if len(self._served) + len(self._ending) >= 2 * MAX_REQUESTS:
                return False
            counts = Counter(served.client for served in self._served.values())
            clients = _clients_to_displace(client, counts)
            if clients:
                candidates = [
                    served
                    for served in self._served.values()
                    if served.client in clients and served.connection not in self._computing
                ]
                if not candidates:
                    return False
                # The oldest connection of the client with most: `max` returns the first of equal ones.
                displaced = max(candidates, key=lambda served: counts[served.client])
                del self._served[displaced.connection]
                self._ending.add(displaced.connection)
                _shut_down(displaced.connection)
            self._served[connection] = _Connection(connection, client, now + REQUEST_SECONDS)
            return True

    @contextlib.contextmanager
    def computing(self, connection: socket.socket) -> Iterator[None]:
        """Within the context, the connection's page is being made, and no other connection displaces it.
        Raises ConnectionAbortedError if it was displaced before."""
        with self._lock:
            if connection not in self._served:
                raise ConnectionAbortedError
            self._computing.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._computing.discard(connection)

    def leave(self, connection: socket.socket) -> None:
        with self._lock:
            self._served.pop(connection, None)
            self._ending.discard(connection)

    def end_overdue(self, now: float) -> None:
        """Shut down the connections whose time limit is over at `now`."""
        with self._lock:
            for served in self._served.values():
                if served.until <= now:
                    _shut_down(served.connection)


def _clients_to_displace(client: str, counts: Counter[str]) -> Collection[str]:
    """Return the clients of which one must lose a connection, so that `client` gets one. Empty if a slot is
    free. `counts` is the number of connections by client."""
    remote_clients = [other for other in counts if other != LOOPBACK]
    remote_connections = sum(counts[other] for other in remote_clients)
    if client != LOOPBACK and counts[client] >= MAX_PER_CLIENT:
        return [client]
    if client != LOOPBACK and remote_connections >= MAX_REQUESTS - LOOPBACK_RESERVE:
        return remote_clients
    return [LOOPBACK] if counts.total() >= MAX_REQUESTS else []


def _shut_down(connection: socket.socket) -> None:
    """Shut the connection down. Its thread then notices and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def client_of(address: str) -> str:
    """Return the client to which a connection from this address counts. It is the address, the /64 network in
    IPv6 (which one subscriber has), or this machine."""
    ip = ip_address(address)
    if isinstance(ip, IPv6Address):
        if ip.ipv4_mapped is None:
            return LOOPBACK if ip.is_loopback else ip.packed[:8].hex()
        ip = ip.ipv4_mapped
    return LOOPBACK if ip.is_loopback else str(ip)


_Request = socket.socket | tuple[bytes, socket.socket]


class _Server(ThreadingHTTPServer):
    """A threading HTTP server that admits connections through `ConnectionSlots`."""

    daemon_threads = True
    request_queue_size = MAX_REQUESTS  # socketserver's 5 make a burst of visitors wait for whole seconds.

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], ipv6: bool) -> None:
        if ipv6:
            self.address_family = socket.AF_INET6
        self.places = ConnectionSlots()
        super().__init__(address, handler)

    def process_request(self, request: _Request, client: object) -> None:
        """Serve the request in a new thread if a slot is free or becomes free; else close it."""
        assert isinstance(request, socket.socket)
        assert isinstance(client, tuple)
        if self.places.come(request, client_of(client[0]), time.monotonic()):
            super().process_request(request, client)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: _Request, client: object) -> None:
        assert isinstance(request, socket.socket)
        try:
            super().process_request_thread(request, client)
        finally:
            self.places.leave(request)

    def service_actions(self) -> None:
        """End overdue connections. Called four times a second, and after each connection."""
        self.places.end_overdue(time.monotonic())

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of the host name, which can hang without a DNS server."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that went away; print other errors as usual."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def probed(probe: Probe) -> HttpResponse:
    """Return the response of a health probe: 200, or 503 with the problem that `probe` returns."""
    problem = probe()
    text = "ok" if problem is None else problem
    return HttpResponse(200 if problem is None else 503, "text/plain; charset=utf-8", f"{text}\n".encode())


def is_named(fields: Sequence[str], version: str, names: Collection[str]) -> bool:
    """Return True if the request's `Host` header fields name this server: by any IP address, localhost, or
    one of `names`. HTTP/1.0 clients may leave the field out; no browser does."""
    if not fields:
        return version == "HTTP/1.0"
    if len(fields) > 1:
        return False
    host = fields[0].strip()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    with contextlib.suppress(ValueError):  # DNS rebinding needs a name, so any address is accepted.
        ip_address(name)
        return True
    return name == "localhost" or name in names


class PageHandler(BaseHTTPRequestHandler):
    """A connection to a page server: headers that restrict browsers, and time limits."""

    timeout = REQUEST_SECONDS
    server_version = "swarmnet"
    sys_version = ""
    default_request_version = "HTTP/1.0"  # Otherwise errors are sent as in HTTP/0.9, without any field.
    server: _Server
    raw_requestline: bytes

    def parse_request(self) -> bool:
        """Refuse HTTP/0.9, whose responses lack the headers that restrict a browser."""
        if len(self.raw_requestline.split()) > 2:
            return super().parse_request()
        self.command = ""
        self.requestline = ""
        self.request_version = "HTTP/1.0"
        self.send_error(HTTPStatus.BAD_REQUEST)
        return False

    def respond(self, response: HttpResponse) -> None:
        status, kind, body = response
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: scrapes are not worth a line."""


def _handler_class(
    pages: Mapping[str, Page], names: Collection[str], refused: HttpResponse
) -> type[PageHandler]:
    """Return a handler class that serves these pages by path. A request whose `Host` is not one of `names`
    gets the response `refused`."""
    not_found = HttpResponse(404, "text/plain; charset=utf-8", (", ".join(pages) + "\n").encode())

    class Handler(PageHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            page = pages.get(path)
            if not is_named(self.headers.get_all("Host", []), self.request_version, names):
                answer = refused
            elif page is None:
                answer = not_found
            else:
                with self.server.places.computing(self.connection):
                    answer = page(PageRequest(_query_fields(query), self._site()))
            self.respond(answer)

        def _site(self) -> str:
            """Return the value of `PageRequest.site`."""
            host = self.headers.get("Host", "").strip()
            is_encrypted = self.headers.get("X-Forwarded-Proto", "").strip().lower() == "https"
            return f"{'https' if is_encrypted else 'http'}://{host}" if host else ""

    return Handler


def _query_fields(query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, max_num_fields=MAX_FIELDS))
    except ValueError:  # Too many of them.
        return {}
