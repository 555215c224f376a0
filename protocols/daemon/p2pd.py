"""Run one p2pd process with a peer's identity: start, supervise, control and stop it.

The program p2pd is libp2p in Go and ships with hivemind 1.1.12. The class `P2P` of hivemind starts it and
serves hivemind's DHT. The requests of this module (connect, open a stream) each use a new connection to
p2pd's control socket. The client of hivemind would leave its socket open when a call fails, and it would wait
forever for a dead p2pd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from protocols.daemon import temporary
from protocols.daemon.hivemind_imports import (
    P2P,
    Multiaddr,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    p2pd_pb2,
    read_pbmsg_safe,
    write_pbmsg,
)
from protocols.daemon.multiaddr import multiaddr_bytes
from protocols.errors import CannotStart, PeerGone, Unreachable
from protocols.signed.identity import load
from swarmnet.identifiers import PeerId

DAEMON_ERRORS = (OSError, EOFError, RuntimeError, ValueError, P2PDaemonError, P2PHandlerError)
"""Errors that a stream or call to a dead peer or p2pd was seen to raise (RuntimeError: uvloop, dead pipe)."""
OPEN_FILES = 4096
"""Limit of open files. A stream takes two in p2pd and one here; 512 streams and the DHT fit four times."""
STOP_SECONDS = 5.0
"""p2pd ends 20-100 ms after SIGTERM; after this many seconds it is killed."""
IN_OWN_SESSION = (
    sys.executable,
    "-I",
    "-S",
    "-c",
    "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])",
)
"""Command that becomes p2pd in a new session, so that Ctrl+C in the terminal does not end it. A peer still
needs p2pd while it leaves the swarm properly."""
CHECK_SECONDS = 1.0
CHECK_DEADLINE_SECONDS = 2.5
"""Deadline of a check. p2pd's control socket answers within 10 ms; on an overloaded machine in 0.3 s. The
overloaded machine ran four times too many peers."""
CHECKS_MISSED = 2
"""Missed checks before p2pd is killed. One may be missed because our own process was stopped meanwhile."""
_READ_BUFFER = 512 * 1024
NOT_TRIED = "not tried: libp2p waits a while after failures"
_OTHER_PEER = re.compile(r"peer id mismatch: .*?remote key matches (\w+)")
_DIAL = re.compile(r"\* \[[^]]+\] (?:dial \S+ \S+: )?([^*]+)")


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """Network options of p2pd."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddrs to listen on; port 0 selects a free port."""
    announce: tuple[str, ...] = ()
    """Multiaddrs announced to other peers instead, with explicit ports."""
    auto_nat: bool = True
    nat_port_map: bool = True
    """True if p2pd asks the router for a port by UPnP."""
    relay: bool = True
    """True if the peer can dial, and be dialled, through a relay (reachability/circuit_relay.py)."""
    carries: bool = False
    """True if the peer is a relay for others (reachability/relay_service.py)."""
    reachability: str | None = None
    """`public` (for a bootstrap) or `private`; None if libp2p detects it."""
    start_seconds: float = 30.0
    memory_limit: str = "100MiB"
    """GOMEMLIMIT. With GOGC=50, p2pd's peak is 158 MB instead of 333 with equal stream speed (measured)."""
    garbage_percent: str = "50"


LOOPBACK = DaemonOptions(listen=("/ip4/127.0.0.1/tcp/0",), auto_nat=False, nat_port_map=False, relay=False)
"""Options for peers on one machine only: p2pd contacts no routers or relays."""


class Stream(NamedTuple):
    """An open raw stream."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: bytes
    """Binary multiaddr of the remote end of its connection."""


class Daemon:
    """A running p2pd. Create it with `Daemon.start`."""

    def __init__(self, p2p: P2P, peer: PeerId, folder: Path) -> None:
        self.p2p = p2p
        self.peer = peer
        self._folder = folder
        self._control = p2p._daemon_listen_maddr["unix"]
        self._addresses = tuple(str(address) for address in p2p._visible_maddrs)
        self.ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Completes with the reason when p2pd has ended. Do not cancel it; wait with `ended`."""
        self._watchers = [
            asyncio.create_task(self._watch(), name="p2pd supervisor"),
            asyncio.create_task(self._check(), name="p2pd check"),
        ]

    @classmethod
    async def start(cls, identity_path: Path, options: DaemonOptions) -> Daemon:
        """Start p2pd with the key in the file. Raises CannotStart with what the user can do, or IdentityError
        if the file is unusable. A p2pd that was started is ended after an error."""
        expected_peer = load(identity_path).peer_id
        check_ports(options.listen)
        _allow_open_files()
        temporary.remove_stale()
        folder = Path(tempfile.mkdtemp(prefix=temporary.prefix()))
        created: list[P2P] = []
        try:
            with _environment(GOMEMLIMIT=options.memory_limit, GOGC=options.garbage_percent):
                async with asyncio.timeout(options.start_seconds + STOP_SECONDS):
                    p2p = await _p2p_class(folder, created).create(
                        host_maddrs=options.listen,
                        announce_maddrs=options.announce or None,
                        identity_path=str(identity_path),
                        check_if_identity_free=False,
                        auto_nat=options.auto_nat,
                        nat_port_map=options.nat_port_map,
                        use_relay=options.relay,
                        force_reachability=options.reachability,
                        startup_timeout=options.start_seconds,
                    )
        except BaseException as error:
            for p2p in created:
                await _stop(p2p)
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, P2PDaemonError | TimeoutError):
                raise _explain(_reason(error, options.start_seconds), options) from None
            raise
        daemon = cls(p2p, PeerId(p2p.peer_id.to_base58()), folder)
        if daemon.peer != expected_peer:
            await daemon.stop()
            raise CannotStart(f"p2pd runs as {daemon.peer}, but {identity_path} is {expected_peer}")
        return daemon

    @property
    def pid(self) -> int:
        return int(self.p2p._child.pid)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs without the /p2p/ part, as p2pd last reported them."""
        return self._addresses

    @property
    def end_reason(self) -> str | None:
        """The reason why p2pd ended, or None while it runs."""
        return self.ending.result() if self.ending.done() else None

    async def ended(self) -> str:
        """Wait until p2pd has ended, and return the reason."""
        return await asyncio.shield(self.ending)

    async def connect(self, peer: PeerId, addresses: Sequence[str], deadline_seconds: float) -> None:
        """Dial `peer` at `addresses` unless already connected. Raises Unreachable if none answers in time."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT)
        request.connect.peer = PeerID.from_base58(peer).to_bytes()
        try:
            request.connect.addrs.extend(multiaddr_bytes(address) for address in addresses)
            async with asyncio.timeout(deadline_seconds), self._request(request) as (_, _, writer):
                writer.close()
        except DAEMON_ERRORS as error:
            reason = _reason(error, deadline_seconds)
            raise Unreachable(f"{peer} does not answer at {', '.join(addresses)}: {reason}") from None

    async def refresh_addresses(self, deadline_seconds: float) -> tuple[str, ...]:
        """Request and return p2pd's current addresses, which change as it learns from routers, relays and
        other peers. Raises PeerGone if p2pd does not answer."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY)
        try:
            async with asyncio.timeout(deadline_seconds), self._request(request) as (response, _, writer):
                self._addresses = tuple(str(Multiaddr(raw)) for raw in response.identify.addrs)
                writer.close()
        except DAEMON_ERRORS as error:
            raise PeerGone(f"p2pd does not answer: {_reason(error, deadline_seconds)}") from None
        return self._addresses

    async def disconnect(self, peer: PeerId, deadline_seconds: float) -> None:
        """Close all connections to `peer`, with their streams. Raises PeerGone if p2pd does not answer."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT)
        request.disconnect.peer = PeerID.from_base58(peer).to_bytes()
        try:
            async with asyncio.timeout(deadline_seconds), self._request(request) as (_, _, writer):
                writer.close()
        except DAEMON_ERRORS as error:
            raise PeerGone(f"p2pd does not answer: {_reason(error, deadline_seconds)}") from None

    async def connections(self, deadline_seconds: float) -> list[tuple[PeerId, str]]:
        """Return each connected peer with the first address that p2pd reports of it. Raises PeerGone if p2pd
        does not answer in time."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        try:
            async with asyncio.timeout(deadline_seconds), self._request(request) as (answer, _, writer):
                connections = [
                    (PeerId(PeerID(connected.id).to_base58()), str(Multiaddr(raw_address)))
                    for connected in answer.peers
                    for raw_address in connected.addrs[:1]
                ]
                writer.close()
        except DAEMON_ERRORS as error:
            raise PeerGone(f"p2pd does not answer: {_reason(error, deadline_seconds)}") from None
        return connections

    async def open_stream(
        self, peer: PeerId, protocol: str, deadline_seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw stream to `peer`'s handler of `protocol`. Raises PeerGone if there is no answer."""
        stream = await self.stream(peer, protocol, deadline_seconds)
        return stream.reader, stream.writer

    async def stream(self, peer: PeerId, protocol: str, deadline_seconds: float) -> Stream:
        """Open a stream to `peer`'s handler of `protocol`, and return it with its remote address. Raises
        PeerGone if the peer has none or does not answer."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN)
        request.streamOpen.peer = PeerID.from_base58(peer).to_bytes()
        request.streamOpen.proto.append(protocol)
        try:
            async with asyncio.timeout(deadline_seconds), self._request(request) as (answer, reader, writer):
                # p2pd has turned this control connection into the stream.
                return Stream(reader, writer, bytes(answer.streamInfo.addr))
        except DAEMON_ERRORS as error:
            raise PeerGone(f"no stream to {peer}: {_reason(error, deadline_seconds)}") from None

    @contextlib.asynccontextmanager
    async def _request(
        self, request: p2pd_pb2.Request
    ) -> AsyncIterator[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]]:
        """Send a request to p2pd on a new control connection, and yield the response with the connection. If
        the request or the caller's block fails, the connection is cut; otherwise the caller must close it.
        Raises P2PDaemonError if p2pd answers with an error."""
        reader, writer = await asyncio.open_unix_connection(self._control, limit=_READ_BUFFER)
        try:
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise P2PDaemonError(response.error.msg)
            yield response, reader, writer
        except BaseException:
            writer.transport.abort()
            raise

    async def _watch(self) -> None:
        """Wait until the process ends, and set `ending` to how it ended, unless a reason is already set."""
        code = await self.p2p._child.wait()
        if not self.ending.done():
            how = f"by signal {-code}" if code < 0 else f"with code {code}"
            self.ending.set_result(f"p2pd (process {self.pid}) ended {how}")

    async def _check(self) -> None:
        """Send p2pd a request every `CHECK_SECONDS`, and kill it after `CHECKS_MISSED` without an answer in a
        row. Without these checks, only other peers would notice that p2pd hangs, after 39 s (measured)."""
        missed_checks = 0
        while missed_checks < CHECKS_MISSED:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                await self.refresh_addresses(CHECK_DEADLINE_SECONDS)
                missed_checks = 0
            except PeerGone:
                missed_checks += 1
        if not self.ending.done():
            self.ending.set_result(f"p2pd (process {self.pid}) hung, and was killed")
            with contextlib.suppress(ProcessLookupError):
                self.p2p._child.kill()

    async def stop(self) -> None:
        """End p2pd and everything that hivemind started with it. May be called more than once."""
        if not self.ending.done():
            self.ending.set_result("p2pd was stopped by us")
        for watcher in self._watchers:
            watcher.cancel()
        await _stop(self.p2p)
        await asyncio.gather(*self._watchers, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def _p2p_class(folder: Path, created: list[P2P]) -> type[P2P]:
    """Return a subclass of P2P that puts p2pd's sockets into `folder` and appends its instances to `created`.
    Thus the sockets stay out of the shared /tmp, and the caller can clean up after a failed `P2P.create`.
    Its p2pd runs in its own session and without the relay of libp2p."""

    class PlacedP2P(P2P):  # type: ignore[misc]  # hivemind has no types
        _UNIX_SOCKET_PREFIX = f"/unix{folder}/"

        def __init__(self) -> None:
            super().__init__()
            created.append(self)

        @staticmethod
        def _make_process_args(*arguments: object, **options: object) -> list[str]:
            # A peer that finds itself public must not relay 4 GiB per circuit for any peer that asks
            # (reachability/circuit_relay.py).
            return [*IN_OWN_SESSION, *P2P._make_process_args(*arguments, relayService=False, **options)]

    return PlacedP2P


async def _stop(p2p: P2P) -> None:
    """End a p2pd and wait for all tasks that hivemind started with it, even after an incomplete start. A p2pd
    that does not end within `STOP_SECONDS` is killed."""
    tasks = [p2p._listen_task, p2p._reader_task]  # Each is None if the start did not get that far.
    if p2p._client is not None:
        control = p2p._client.control
        handlers = list(control._handler_tasks.values())
        for task in handlers:
            task.cancel()
        tasks += [control._read_task, control._write_task, *handlers]
    p2p._terminate()
    if p2p._child is not None:
        try:
            await asyncio.wait_for(p2p._child.wait(), STOP_SECONDS)
        except TimeoutError:
            p2p._child.kill()
            await p2p._child.wait()
        p2p._child._transport.close()
    await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


def _reason(error: BaseException, deadline_seconds: float) -> str:
    """Return why a call or a start failed, as text for people, from the parts of p2pd's error message."""
    if isinstance(error, TimeoutError):
        return f"no answer within {deadline_seconds:g} s"
    text = " ".join(str(error).split())
    if "dial backoff" in text:
        return NOT_TRIED
    other = _OTHER_PEER.search(text)
    if other is not None:
        return (
            f"another peer answers at that address: its id is {other[1]}; take the address anew from "
            "whoever runs it"
        )
    dial_reasons = _DIAL.findall(text)  # libp2p wraps the reason of each address in three others.
    listed = "; ".join(dict.fromkeys(reason.strip() for reason in dial_reasons))
    return listed or text or type(error).__name__


def check_ports(listen: Sequence[str]) -> None:
    """Raise CannotStart if p2pd cannot listen at one of these multiaddrs: its port is taken, invalid or not
    permitted. Without this check, a second p2pd on the same port starts without an error, because go-libp2p
    sets `SO_REUSEPORT`. It then takes half of the first one's connections."""
    for address in listen:
        parts = address.split("/")
        if len(parts) < 5 or parts[1] not in ("ip4", "ip6") or parts[3] not in ("tcp", "udp"):
            continue  # Not an IP address with a port, so there is nothing to check.
        family = socket.AF_INET if parts[1] == "ip4" else socket.AF_INET6
        kind = socket.SOCK_STREAM if parts[3] == "tcp" else socket.SOCK_DGRAM
        if not parts[4].isdigit() or int(parts[4]) > 65535:
            raise CannotStart(f"{address} has no valid port (0 to 65535)")
        try:
            with socket.socket(family, kind) as probe:
                if kind == socket.SOCK_STREAM:  # Lets a port in TIME_WAIT, but not a used one, count as free.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((parts[2], int(parts[4])))
        except PermissionError:
            raise CannotStart(f"{address}: ports below 1024 need root; choose another port") from None
        except OSError as error:
            raise _explain(f"{error.strerror}: {address}", DaemonOptions(listen=(address,))) from None


def _explain(message: str, options: DaemonOptions) -> CannotStart:
    """Return the error for a p2pd that did not start, with what the user can do if `message` is known."""
    where = ", ".join(options.listen)
    lower = message.lower()
    if "address already in use" in lower:
        return CannotStart(f"the port of {where} is taken; end what uses it, or choose another (0: any free)")
    if "address family not supported" in lower:  # by the kernel, which always has IPv4
        return CannotStart(f"this machine has no IPv6: take {where} out of listen")
    if "cannot assign requested address" in lower:
        return CannotStart(f"{where} is no address of this machine; /ip4/0.0.0.0/tcp/PORT means all")
    return CannotStart(f"p2pd does not start at {where}: {message.removeprefix('Daemon failed to start: ')}")


def _allow_open_files() -> None:
    """Raise this process's limit of open files to `OPEN_FILES` if it is lower; p2pd inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _environment(**wanted: str) -> Iterator[None]:
    """Set environment variables for a p2pd started in the context; those that the user has set stay."""
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
