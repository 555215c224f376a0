"""Small HTTP servers with one thread each: pages made on request, read only.

/metrics, /healthz and /readyz of every peer are one of them (`Exporter`): healthz: the process lives and its
event loop turns; readyz: this peer takes part in rounds. Both answer 200 or 503 with one line that says why.
On 127.0.0.1 unless the peer file says otherwise.

Strangers may reach them. Nobody holds a place for longer than a request may take, or keeps others from one;
and who asks by a name that is not ours is refused: a website can let its own name point to this machine, and
the browser of whoever visits it would then read these pages for it.
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

from peers.errors import UserError

REQUEST_SECONDS = 5.0
"""Then the connection ends, wherever its request or its answer is: scrapers send at once, pages have some
100 kB."""
MOST_REQUESTS = 64
"""At a time; each is a thread."""
OF_A_CLIENT = 8
"""A browser has 6 connections to a host at a time, a scraper or a probe one."""
FOR_LOOPBACK = 16
"""Of all places, kept for this machine: its probes, and whoever comes by a proxy or a tunnel on it."""
LOOPBACK = "loopback"
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

    def __init__(
        self, address: tuple[str, int], pages: Mapping[str, Page], key: str, hosts: Sequence[str] = ()
    ) -> None:
        """Bind and start; `hosts`: the names, in small letters, by which it may be asked. Raises UserError
        naming the port and the peer file's `key` if the port is taken; port 0 takes any free one."""
        host, port = address
        asked_by = Answer(
            403, "text/plain; charset=utf-8",
            f"asked by another name than an address, localhost or one of {key.partition('.')[0]}.hosts in "
            "the peer file\n".encode(),
        )  # fmt: skip
        try:
            self._server = _Server(
                (host, port), _handler(pages, {host.lower(), *hosts}, asked_by), ":" in host
            )
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
        self, address: tuple[str, int], metrics: Callable[[], bytes], healthy: Probe, ready: Probe,
        hosts: Sequence[str] = (), others: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """As PageServer. `others`: ports that it tries after its own one."""
        pages: dict[str, Page] = {
            "/metrics": lambda _: Answer(200, CONTENT_TYPE_LATEST, metrics()),
            "/healthz": lambda _: probed(healthy),
            "/readyz": lambda _: probed(ready),
        }
        host, port = address
        refusals = []
        for other in (port, *others):
            try:
                super().__init__((host, other), pages, "metrics.listen", hosts)
                return
            except UserError as error:
                refusals.append(error)
        raise refusals[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Visit:
    connection: socket.socket
    client: str
    until: float


class Places:
    """Who is served. A newcomer that finds no place takes that of whoever has waited longest, of its own
    client or of the one with the most: who is served in a moment is served, whoever else dawdles."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._visits: dict[socket.socket, _Visit] = {}
        """In the order in which they came."""
        self._computing: set[socket.socket] = set()
        """Their pages are being made, which nothing interrupts."""
        self._ending: set[socket.socket] = set()
        """They have lost their place; their threads are about to notice."""

    def come(self, connection: socket.socket, client: str, now: float) -> bool:
        """False: there is no place for it. `client` is that of `client_of`, `now` in seconds."""
        with self._lock:
            if len(self._visits) + len(self._ending) >= 2 * MOST_REQUESTS:
                return False
            counts = Counter(visit.client for visit in self._visits.values())
            if crowd := _crowd(client, counts):
                visits = (visit for visit in self._visits.values() if visit.client in crowd)
                waiting = [visit for visit in visits if visit.connection not in self._computing]
                if not waiting:
                    return False
                longest = max(waiting, key=lambda visit: counts[visit.client])
                del self._visits[longest.connection]
                self._ending.add(longest.connection)
                _cut(longest.connection)
            self._visits[connection] = _Visit(connection, client, now + REQUEST_SECONDS)
            return True

    @contextlib.contextmanager
    def computing(self, connection: socket.socket) -> Iterator[None]:
        """While its page is made. ConnectionAbortedError if it has lost its place."""
        with self._lock:
            if connection not in self._visits:
                raise ConnectionAbortedError
            self._computing.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._computing.discard(connection)

    def leave(self, connection: socket.socket) -> None:
        with self._lock:
            self._visits.pop(connection, None)
            self._ending.discard(connection)

    def end_overdue(self, now: float) -> None:
        """End the connections of those who have had their time."""
        with self._lock:
            for visit in self._visits.values():
                if visit.until <= now:
                    _cut(visit.connection)


def _crowd(client: str, counts: Counter[str]) -> Collection[str]:
    """The clients of which one gives up a place for `client`; none: there is a free one."""
    others = [other for other in counts if other != LOOPBACK]
    if client != LOOPBACK and counts[client] >= OF_A_CLIENT:
        return [client]
    if client != LOOPBACK and sum(counts[other] for other in others) >= MOST_REQUESTS - FOR_LOOPBACK:
        return others
    return [LOOPBACK] if counts.total() >= MOST_REQUESTS else []


def _cut(connection: socket.socket) -> None:
    """Whatever its thread waits for, it notices; and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def client_of(address: str) -> str:
    """Whose places a connection from that address takes: those of the address, of its network where that is
    the 64 bits that one line has in IPv6, or of this machine."""
    ip = ip_address(address)
    if isinstance(ip, IPv6Address):
        if ip.ipv4_mapped is None:
            return LOOPBACK if ip.is_loopback else ip.packed[:8].hex()
        ip = ip.ipv4_mapped
    return LOOPBACK if ip.is_loopback else str(ip)


_Request = socket.socket | tuple[bytes, socket.socket]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MOST_REQUESTS  # socketserver's 5 make a burst of visitors wait for whole seconds.

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], ipv6: bool) -> None:
        if ipv6:
            self.address_family = socket.AF_INET6
        self.places = Places()
        super().__init__(address, handler)

    def process_request(self, request: _Request, client: object) -> None:
        """In a thread of its own, if there is a place."""
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
        """Four times a second, and after each connection."""
        self.places.end_overdue(time.monotonic())

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


def is_named(fields: Sequence[str], version: str, names: Collection[str]) -> bool:
    """Whether the `Host` fields of a request name this server: by an address, localhost, or one of `names`.
    Who speaks HTTP/1.0 may leave it out: no browser does."""
    if len(fields) != 1:
        return not fields and version == "HTTP/1.0"
    host = fields[0].strip()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    with contextlib.suppress(ValueError):
        return bool(ip_address(name))
    return name == "localhost" or name in names


def _handler(
    pages: Mapping[str, Page], names: Collection[str], refused: Answer
) -> type[BaseHTTPRequestHandler]:
    others = Answer(404, "text/plain; charset=utf-8", (", ".join(pages) + "\n").encode())

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS
        server_version = "swarmnet"
        sys_version = ""
        default_request_version = "HTTP/1.0"  # Or errors are told as in HTTP/0.9, without any field.
        server: _Server
        raw_requestline: bytes

        def parse_request(self) -> bool:
            """Without HTTP/0.9, whose answers have no fields that keep a browser in check."""
            if len(self.raw_requestline.split()) > 2:
                return super().parse_request()
            self.command, self.requestline, self.request_version = "", "", "HTTP/1.0"
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            page = pages.get(path)
            if not is_named(self.headers.get_all("Host", []), self.request_version, names):
                answer = refused
            elif page is None:
                answer = others
            else:
                with self.server.places.computing(self.connection):
                    answer = page(_fields(query))
            status, kind, body = answer
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
            """Scrapes are no news."""

    return Handler


def _fields(query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, max_num_fields=MOST_FIELDS))
    except ValueError:  # Too many of them.
        return {}
