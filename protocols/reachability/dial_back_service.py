"""Dial the addresses of other peers for them, so that they learn whether they can be dialled (dial_back.py).

The asker is the peer that requests this; the helper is this peer. An address is dialled if the peer to which
it should lead signed it, and if it meets both conditions:
- It is an IP (or a name, resolved here) with a TCP port, and nothing after it.
- Its IP is the one at which the asker was seen, or in the same IPv6 /64. Thus no asker can make this peer
  dial a third party or its own network.

At most four requests a minute are served, two from one IP, one at a time, with eight addresses each. An
attacker that abuses helpers to dial others thus causes fewer dials than the packets that it must send.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_network

from protocols.daemon.hivemind_imports import P2P, StreamInfo
from protocols.daemon.names import LookUp, look_up
from protocols.daemon.p2pd import DAEMON_ERRORS
from protocols.errors import WireError
from protocols.reachability.dial_back import (
    CHALLENGE_BYTES,
    DIAL_BACK_PROTOCOL,
    STEP_SECONDS,
    DialBackRequest,
    DialBackResponse,
    Greeting,
    encode,
    read_part,
    statement,
)
from protocols.reachability.fresh_dial import DialOutcome, Dials, can_dial, dial
from protocols.signed.identity import verify
from swarmnet.identifiers import PeerId
from swarmnet.membership.address_ranges import IP, NAME_KINDS, ip_of

REQUESTS_PER_MINUTE, REQUESTS_PER_IP = 4, 2
STREAMS = 8
"""Maximum open streams. Until its signature is checked, a stream costs only a socket."""
OWN_BITS = 64
"""Prefix length of an IPv6 host: it has several addresses and calls from a temporary one (RFC 8981)."""


@dataclass(frozen=True, slots=True)
class DialBackSlot:
    """Host and port of a TCP address."""

    host: str
    """An IP, or a name."""
    named: bool
    """True if the host is a name."""
    port: int


def place_of(address: str) -> DialBackSlot | None:
    """Return host and port of a multiaddr: an IP or a name with a TCP port and nothing else. Returns None for
    any other, such as a circuit, and for an invalid one."""
    parts = address.split("/")
    if len(parts) != 5 or parts[0] or parts[3] != "tcp" or not parts[4].isdecimal():
        return None
    kind, host, port = parts[1], parts[2], int(parts[4][:6])  # Six digits suffice to see that it is too long.
    if not 0 < port < 65536:
        return None
    if kind in NAME_KINDS:
        return DialBackSlot(host, True, port)
    ip = ip_of(host)
    if ip is None or kind != f"ip{ip.version}":
        return None
    return DialBackSlot(host, False, port)


def observed_ip(address: str) -> IP | None:
    """Return the IP in the remote multiaddr of a connection, or None if the connection is a circuit."""
    parts = address.split("/")
    direct = len(parts) >= 3 and parts[1] in ("ip4", "ip6") and "p2p-circuit" not in parts
    return ip_of(parts[2]) if direct else None


def may_dial(ip: IP, asker: IP | None) -> bool:
    """Return True if `ip` may be dialled for an asker seen at the IP `asker`: both must be the same IP, or in
    the same IPv6 /64."""
    if asker is None or ip.version != asker.version:
        return False
    return ip == asker or (ip.version == 6 and ip in ip_network((asker, OWN_BITS), strict=False))


@dataclass(eq=False, kw_only=True)
class DialBackService:
    """Answers dial-back requests on streams that others open. `peer` is this peer. `dials` dials addresses
    from a new process, and `able` returns True if it can. `names` resolves a name."""

    peer: PeerId
    dials: Dials = dial
    able: Callable[[], bool] = can_dial
    names: LookUp = look_up

    def __post_init__(self) -> None:
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._work: asyncio.Task[tuple[DialOutcome, ...]] | None = None
        """The task that dials for the request being served; None if none is."""
        self._served: deque[tuple[float, IP | None]] = deque()
        """Time and asker's IP of the requests of the last minute."""

    async def serve(self, p2p: P2P) -> None:
        """Register `accept` with p2pd as the handler of dial-back streams."""
        await p2p.add_binary_stream_handler(DIAL_BACK_PROTOCOL, self.accept)

    async def accept(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one stream until it ends. A stream beyond `STREAMS` is cut at once."""
        task = asyncio.current_task()
        if len(self._open) >= STREAMS or task is None:
            writer.transport.abort()
            return
        self._open[task] = writer
        try:
            await self._answer(str(info.addr), reader, writer)
            async with asyncio.timeout(STEP_SECONDS):
                await reader.read(1)  # The asker ends the stream; if this side did, the answer might be lost.
        except (WireError, *DAEMON_ERRORS):
            pass  # The other peer has gone, or does not speak this protocol.
        finally:
            del self._open[task]
            writer.transport.abort()

    async def _answer(
        self, remote_address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send the greeting, read the request, dial its addresses if that is allowed now, and send the
        answer. A request with a wrong signature, or interrupted by `close`, gets no answer."""
        asker_ip = observed_ip(remote_address)
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        writer.write(encode(Greeting(challenge, remote_address if asker_ip is not None else "")))
        request = await read_part(reader, DialBackRequest, STEP_SECONDS)
        peer, addresses = PeerId(request.peer), request.addresses
        if not verify(peer, statement(challenge, self.peer, peer, addresses), request.signature):
            return
        if not self.able():
            answer = DialBackResponse("unable", ())
        elif not self._admit(asker_ip):
            answer = DialBackResponse("busy", ())
        else:
            # A task, so that `close` can cancel the dials alone.
            work = asyncio.create_task(self._dial(peer, addresses, asker_ip), name="dial back")
            self._work = work
            try:
                await asyncio.wait([work])
            finally:
                self._work = None
            if work.cancelled():
                return
            answer = DialBackResponse("done", work.result())
        writer.write(encode(answer))
        async with asyncio.timeout(STEP_SECONDS):
            await writer.drain()

    def _admit(self, asker: IP | None) -> bool:
        """Return True and count a request if an asker at this IP may be served now. Returns False while
        another request is served, or if a limit per minute is reached."""
        now = asyncio.get_running_loop().time()
        while self._served and self._served[0][0] < now - 60.0:  # Forget those older than a minute.
            self._served.popleft()
        from_ip = sum(ip == asker for _, ip in self._served)
        if self._work is not None or len(self._served) >= REQUESTS_PER_MINUTE or from_ip >= REQUESTS_PER_IP:
            return False
        self._served.append((now, asker))
        return True

    async def _dial(
        self, peer: PeerId, addresses: Sequence[str], asker: IP | None
    ) -> tuple[DialOutcome, ...]:
        """Dial the addresses that may be dialled for an asker at this IP, all at once. Returns for each
        address, in the given order, what answered there or why it was not dialled."""
        refusals: dict[str, str] = {}  # Address to the reason why it is not dialled.
        resolved: dict[str, str] = {}  # Address to the same with an IP, which is dialled.
        for address in dict.fromkeys(addresses):
            place = place_of(address)
            if place is None:
                refusals[address] = "only an IP or a name with a TCP port is dialled back"
                continue
            hosts = await self.names(place.host) if place.named else [place.host]
            ips = [ip for ip in map(ip_of, hosts) if ip is not None]
            allowed = [ip for ip in ips if may_dial(ip, asker)]
            if allowed:
                resolved[address] = f"/ip{allowed[0].version}/{allowed[0]}/tcp/{place.port}"
            elif ips:
                refusals[address] = f"{ips[0]} is not the address that this helper saw the asker at"
            else:
                refusals[address] = f"{place.host} is a name without an address"
        targets = tuple(dict.fromkeys(resolved.values()))
        outcomes: dict[str, DialOutcome] = {}
        if targets:
            outcomes = {outcome.address: outcome for outcome in await self.dials(peer, targets)}
        dialled = []
        for address in addresses:
            if address in refusals:
                dialled.append(DialOutcome(address, "not_tried", refusals[address], 0.0))
            else:
                outcome = outcomes[resolved[address]]
                dialled.append(DialOutcome(address, outcome.outcome, outcome.detail, outcome.seconds))
        return tuple(dialled)

    async def close(self) -> None:
        """Cut all streams and abandon running dials."""
        if self._work is not None:
            self._work.cancel()
        for writer in self._open.values():  # Cancelling their tasks makes asyncio 3.11 complain.
            writer.transport.abort()
        await asyncio.gather(*self._open, return_exceptions=True)
