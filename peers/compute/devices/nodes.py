"""Wait for devices that other machines, the *nodes* of a cluster, lend to this peer (`swarmnet lend`).

Each device has its own connection, which its process uses like the socket pair of a local device
(`channel.py`). Only the handshake protects it, so all of this is for a private network.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import socket
import time
from collections.abc import Callable

import msgspec
import psutil

from peers.compute.devices.channel import Channel, ChannelClosed
from peers.compute.devices.node_handshake import STEP_SECONDS, HandshakeError, accept_lender, read_key
from peers.config.compute_file import NodesFile
from peers.config.errors import DevicesLost, UserError
from peers.telemetry.console import counted
from peers.telemetry.log_events import Notify

WAIT_SECONDS = 120.0
"""Time limit for all devices of other nodes; then the peer starts again. A scheduler starts the nodes of a
job together, and the slowest part is importing torch (6 s on a busy machine, `device_processes.py`)."""
CHECK_SECONDS = 0.5
"""Interval between checks whether the peer stops while it waits."""
KEEPALIVE_SECONDS, KEEPALIVE_PROBES = 15, 4
"""A node without power is noticed after 75 s, earlier than a collective times out (`rank.py`)."""


class Offer(msgspec.Struct):
    """The first message of a lender after the handshake: a device as torch names it."""

    node: str
    device: str


class OfferAnswer(msgspec.Struct):
    """The peer's answer: why it cannot use the device; empty if it does from now on."""

    refused: str = ""


class NodeListener:
    """Listens on one address of this machine for one start of the peer's devices."""

    def __init__(self, file: NodesFile, kind: str, is_stopped: Callable[[], bool]) -> None:
        """Listen from now on. `kind` is the type of all devices, as torch names it. `is_stopped`, which any
        thread may call, says when to stop waiting. Raises UserError if the key or the address is wrong."""
        assert file.key is not None, "NodesFile requires it"
        self._key = read_key(file.key)
        self._kind = kind
        self._is_stopped = is_stopped
        self.devices = file.devices
        """The number of devices to wait for."""
        host, port = file.address
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            host = str(address[0])
            self.interface = interface_of(host)
            self._listener = socket.create_server((host, port), family=family, backlog=64)
            self.store = socket.create_server((host, 0), family=family, backlog=64)
            """Socket of the store by which the devices find each other (`rank.py`)."""
        except OSError as error:
            raise UserError(
                f"compute.nodes.listen: cannot listen on {host}, port {port} ({error.strerror}); name an "
                "address of this machine, as `ip address` prints them, and a free port"
            ) from None
        self.store_address = _address_of(self.store)
        self.invitation = f"swarmnet lend {_address_of(self._listener)} --key {shlex.quote(str(file.key))}"
        """The command for the other nodes."""

    def close(self) -> None:
        self._listener.close()
        self.store.close()

    def accept_devices(self) -> list[tuple[Offer, socket.socket]]:
        """Wait for the devices, and return them ordered by node, each with its connection. Raises DevicesLost
        if some do not come in time, or if the peer stops."""
        lent: list[tuple[Offer, socket.socket]] = []
        refusal = ""
        deadline = time.monotonic() + WAIT_SECONDS
        self._listener.settimeout(CHECK_SECONDS)
        with contextlib.ExitStack() as opened, self._listener:
            while len(lent) < self.devices:
                if self._is_stopped():
                    raise DevicesLost("the peer waits no longer for devices of other nodes")
                if time.monotonic() > deadline:
                    raise DevicesLost(
                        f"{len(lent)} of {counted(self.devices, 'device')} of other nodes came within "
                        f"{WAIT_SECONDS:g} s{refusal}; on each other node: {self.invitation}"
                    )
                try:
                    end = opened.enter_context(self._listener.accept()[0])
                except TimeoutError:
                    continue
                try:
                    lent.append((self._admit(end), end))
                except (HandshakeError, ChannelClosed, OSError, msgspec.MsgspecError) as error:
                    refusal = f" (one did not fit: {error})"
                    end.close()
            opened.pop_all()
        return sorted(lent, key=lambda each: (each[0].node, each[0].device))

    def _admit(self, end: socket.socket) -> Offer:
        """Return what the other side of a new connection lends. Raises HandshakeError if it has another key
        or an unsuitable device; ChannelClosed, OSError or MsgspecError if it does not answer rightly."""
        accept_lender(end, self._key)
        channel: Channel[OfferAnswer, Offer] = Channel(end, Offer, STEP_SECONDS)
        offer = channel.receive_message()
        fits = offer.device.partition(":")[0] == self._kind
        refused = "" if fits else f"the peer needs a device of type {self._kind}: --device {self._kind}"
        channel.send(OfferAnswer(refused))
        if refused:
            raise HandshakeError(refused)
        keep_alive(end)
        return offer


def listen_for_nodes(
    file: NodesFile, *, kind: str, is_stopped: Callable[[], bool], notify: Notify
) -> NodeListener | None:
    """Listen for the devices of other nodes, and notify the user what to start there. Returns None if the
    peer file has none. Raises UserError, see NodeListener."""
    if file.listen == "off":
        return None
    nodes = NodeListener(file, kind, is_stopped)
    notify("devices", f"waits for {counted(file.devices, 'device')} of other nodes: {nodes.invitation}")
    return nodes


def keep_alive(end: socket.socket) -> None:
    """Send small messages at once, and notice a machine that is gone."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IP address, which gloo and NCCL shall use. Raises
    OSError if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (each.address for each in addresses):
            return str(name)
    raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def _address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
