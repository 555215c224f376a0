"""Find peers of one run on the local network by multicast DNS, without a bootstrap.

Each peer announces a service `<peer id>._swarmnet._tcp.local.` with TXT entries. The entry `run` is a part of
a hash of the run's id, or `any` for a bootstrap of all runs. The entries `a0` to `a3` are multiaddrs. Anyone
on the network can announce anything. A result is only an address to dial, and p2pd verifies the peer's key
there. This uses zeroconf (the extra `lan`) in the peer's own event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import ipaddress
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from peers.config.errors import UserError, how_to_install
from peers.config.peer_file import PeerFile, run_id_of
from peers.config.quantities import bootstrap_multiaddr
from peers.config.run_file import load_signed
from peers.telemetry.log_events import Notify
from protocols.dht.directory import split_multiaddr
from swarmnet.identifiers import PeerId

SERVICE = "_swarmnet._tcp.local."
ANY = "any"
ADDRESSES = 4
"""Maximum number of addresses that are announced and accepted per peer."""
ADDRESS_BYTES = 200
"""Maximum bytes of an address; a TXT entry has at most 255."""
PEERS = 32
"""Maximum number of peers kept; in larger networks the newest."""
ASK_SECONDS = 3.0
STOP_SECONDS = 3.0
"""Timeout for stopping in seconds. zeroconf announces the end three times, 125 ms apart."""


class NoLan(Exception):
    """There is no multicast here, or zeroconf is not installed. The message says which."""


def installed() -> bool:
    """Return True if zeroconf is installed."""
    return importlib.util.find_spec("zeroconf") is not None


def mark(run: str | None) -> str:
    """Return the text that identifies a run on the network. It does not reveal the run's id."""
    return ANY if run is None else hashlib.sha256(b"swarmnet lan 1\0" + run.encode()).hexdigest()[:16]


def local_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the multiaddrs at which peers of the local network could reach this peer, at most `ADDRESSES`.
    Relayed, loopback and overlong ones are left out."""
    local = []
    for address in addresses:
        parts = address.split("/")
        if len(parts) < 5 or "p2p-circuit" in parts or len(address) > ADDRESS_BYTES:
            continue
        if parts[1] in ("ip4", "ip6") and ipaddress.ip_address(parts[2]).is_loopback:
            continue
        local.append(address)
    return tuple(local[:ADDRESSES])


def peer_in_announcement(
    name: str, entries: Mapping[bytes, bytes | None], run: str | None
) -> tuple[PeerId, list[str]] | None:
    """Parse the announcement of the service `name` with the TXT `entries`. Returns the peer and its
    multiaddrs with /p2p/. Returns None without a valid one, or for another run than `run` (None: any)."""
    peer = name.removesuffix(f".{SERVICE}")
    announced_run = (entries.get(b"run") or b"")[:16].decode(errors="replace")
    if run is not None and announced_run not in (mark(run), ANY):
        return None
    multiaddrs = []
    for number in range(ADDRESSES):
        text = (entries.get(b"a%d" % number) or b"")[:ADDRESS_BYTES].decode(errors="replace")
        multiaddr = f"{text}/p2p/{peer}"
        try:
            bootstrap_multiaddr(multiaddr)
            split_multiaddr(multiaddr)
        except ValueError:
            continue
        multiaddrs.append(multiaddr)
    return (PeerId(peer), multiaddrs) if multiaddrs else None


@asynccontextmanager
async def neighbours(
    config: PeerFile, peer: PeerId, addresses: Sequence[str], notify: Notify
) -> AsyncIterator[Lan | None]:
    """Announce this peer at `addresses`, and find others on the local network, while the context is active.
    Yields the finder, or None if the peer file switches it off or it cannot run here. Raises UserError
    instead if the peer file requires it (`lan: true`)."""
    lan = None
    if config.lan is True or (config.lan == "auto" and installed()):
        run = None
        if config.run is not None:
            run = run_id_of(config.run) or load_signed(Path(config.run)).run_id
        try:
            lan = Lan.start(peer, addresses, run)
        except NoLan as error:
            if config.lan is True:
                how = f"install zeroconf: {how_to_install('lan')}" if not installed() else "set lan: auto"
                raise UserError(f"lan is true, but {error}; {how}") from None
    if lan is not None:
        notify("lan", "looks for peers of this run on the local network too")
    try:
        yield lan
    finally:
        if lan is not None:
            await lan.close()


class Lan:
    """Announces one peer and finds others until closed. Create it with `start`."""

    def __init__(self, peer: PeerId, run: str | None) -> None:
        self._peer = peer
        self._run = run
        self._zeroconf: Any = None
        self._browser: Any = None
        self._service: Any = None
        self._peers: OrderedDict[PeerId, list[str]] = OrderedDict()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._announcing: asyncio.Task[Any] | None = None
        """Takes a second, because zeroconf checks whether the name is free."""
        self._peer_found = asyncio.Event()

    @classmethod
    def start(cls, peer: PeerId, addresses: Sequence[str], run: str | None) -> Lan:
        """Start to announce this peer and to find others. `addresses` are this peer's multiaddrs; `run` is
        its run id, or None for any run. Raises NoLan without a network, multicast or zeroconf."""
        if not installed():
            raise NoLan("zeroconf is not installed")
        local = local_addresses(addresses)
        if not local:
            raise NoLan("this peer listens to its own machine only")
        lan = cls(peer, run)
        lan._start_zeroconf(local)
        return lan

    def _start_zeroconf(self, addresses: Sequence[str]) -> None:
        """Start zeroconf, browse for services and announce this peer. Raises NoLan."""
        from zeroconf import Error, InterfaceChoice, IPVersion
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

        entries = {"run": mark(self._run), **{f"a{n}": address for n, address in enumerate(addresses)}}
        parts = addresses[0].split("/")
        host = [parts[2]] if parts[1].startswith("ip") else []
        self._service = AsyncServiceInfo(
            SERVICE,
            f"{self._peer}.{SERVICE}",
            port=int(parts[4]),
            properties=entries,
            server=f"{self._peer[-12:].lower()}.local.",
            parsed_addresses=host,
        )
        try:
            self._zeroconf = AsyncZeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.V4Only)
        except (OSError, RuntimeError, Error) as error:
            raise NoLan(f"no multicast here: {error or type(error).__name__}") from None
        self._browser = AsyncServiceBrowser(
            self._zeroconf.zeroconf, SERVICE, handlers=[self._on_service_change]
        )
        announcing = self._zeroconf.async_register_service(self._service, allow_name_change=False)
        self._announcing = asyncio.create_task(announcing, name="lan announcing")

    def _on_service_change(self, zeroconf: object, service_type: str, name: str, state_change: Enum) -> None:
        """Handle a service that appeared or changed: request its entries. Forget the peer of a service that
        ended. Called by zeroconf in the event loop. This peer's own service is ignored, and every service
        while `PEERS` requests are under way."""
        if name == f"{self._peer}.{SERVICE}" or name in self._requests or len(self._requests) >= PEERS:
            return
        if state_change.name == "Removed":
            self._peers.pop(PeerId(name.removesuffix(f".{SERVICE}")), None)
            return
        task = asyncio.create_task(self._request_entries(name), name="lan")
        self._requests[name] = task
        task.add_done_callback(lambda _: self._requests.pop(name, None))

    async def _request_entries(self, name: str) -> None:
        """Request the TXT entries of a service and remember its peer, if it is of this run. Beyond `PEERS`
        peers, the oldest is forgotten."""
        from zeroconf import Error
        from zeroconf.asyncio import AsyncServiceInfo

        service = AsyncServiceInfo(SERVICE, name)
        try:
            if not await service.async_request(self._zeroconf.zeroconf, 1000 * ASK_SECONDS):
                return
        except (OSError, Error):  # The service's name is invalid, or the network went away.
            return
        announcement = peer_in_announcement(name, service.properties, self._run)
        if announcement is None:
            return
        peer, addresses = announcement
        self._peers[peer] = addresses
        self._peers.move_to_end(peer)
        while len(self._peers) > PEERS:
            self._peers.popitem(last=False)
        self._peer_found.set()

    async def anybody(self, deadline_seconds: float) -> bool:
        """Wait until another peer was found. Returns False at the deadline."""
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._peer_found.wait()
        except TimeoutError:
            return False
        return True

    def found(self) -> list[str]:
        """Return multiaddrs with /p2p/ of the peers found on this network, newest first."""
        return [address for addresses in reversed(self._peers.values()) for address in addresses]

    async def close(self) -> None:
        """Withdraw the announcement and stop zeroconf, within `STOP_SECONDS`."""
        tasks: list[asyncio.Task[Any]] = list(self._requests.values())
        if self._announcing is not None:
            tasks.append(self._announcing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._zeroconf is None:
            return
        try:
            async with asyncio.timeout(STOP_SECONDS):
                if self._browser is not None:
                    await self._browser.async_cancel()
                await self._zeroconf.async_unregister_all_services()
                await self._zeroconf.async_close()
        except (OSError, TimeoutError):
            pass  # The network went away first.
