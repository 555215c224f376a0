"""Lend the devices of this machine to a peer on another node: one process for each, as the peer starts them.

The process of a device (`rank.py`) has the connection to the peer, and this process watches both. It has no
identity and writes nothing to the disk.
"""

from __future__ import annotations

import select
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from peers.compute.devices.channel import Channel, ChannelClosed
from peers.compute.devices.device_processes import END_SECONDS, start_rank
from peers.compute.devices.node_handshake import STEP_SECONDS, HandshakeError, WrongKey, greet_peer
from peers.compute.devices.nodes import Offer, OfferAnswer, interface_of, keep_alive
from peers.config.errors import UserError

RETRY_SECONDS = 1.0
"""Delay before the next connection; the peer starts lost devices again after as long
(`device_restarts.py`)."""
WATCH_MILLISECONDS = 200
"""Interval between checks whether a device's process has ended."""
HANG_UP = getattr(select, "POLLRDHUP", 0)
"""Event that the peer has closed its side while unread bytes may be left (Linux)."""


class Lender:
    """Lends devices until `stopped` is set."""

    def __init__(self, address: tuple[str, int], key: bytes, notify: Callable[[str], None]) -> None:
        self._address = address
        self._key = key
        self._notify = notify
        self._peer = f"the peer at {address[0]}, port {address[1]}"
        self.stopped = threading.Event()
        """Any thread or signal handler may set it."""

    def run(self, devices: Sequence[torch.device]) -> None:
        """Lend each device until `stopped` is set. Raises UserError if the host name is wrong, or if the peer
        has another key or cannot use the devices."""
        try:
            socket.getaddrinfo(*self._address)
        except OSError as error:
            raise UserError(f"{self._address[0]}: {error.strerror}; name the host of the peer") from None
        with ThreadPoolExecutor(len(devices), "lend") as threads:
            lent = [threads.submit(self._lend, device) for device in devices]
        for each in lent:
            each.result()

    def _lend(self, device: torch.device) -> None:
        """Lend one device again and again. An error ends the others, too."""
        reported = ""
        try:
            while not self.stopped.is_set():
                try:
                    with socket.create_connection(self._address, STEP_SECONDS) as end:
                        self._offer(end, device)
                        self._notify(f"{device}: lent to {self._peer}")
                        reported = self._serve(end)
                        self._notify(f"{device}: {reported}")
                except (OSError, HandshakeError, ChannelClosed, msgspec.MsgspecError) as error:
                    if reported != str(error):
                        reported = str(error)
                        self._notify(f"{device}: waits for {self._peer} ({error})")
                self.stopped.wait(RETRY_SECONDS)
        finally:
            self.stopped.set()

    def _offer(self, end: socket.socket, device: torch.device) -> None:
        """Have the peer accept the device. Raises UserError if the peer has another key or cannot use it, and
        other errors if it does not wait for devices now."""
        try:
            greet_peer(end, self._key)
        except WrongKey:
            raise UserError(f"{self._peer} has another key; copy the file of its compute.nodes.key") from None
        channel: Channel[Offer, OfferAnswer] = Channel(end, OfferAnswer, STEP_SECONDS)
        channel.send(Offer(socket.gethostname(), str(device)))
        refused = channel.receive_message().refused
        if refused:
            raise UserError(refused)
        keep_alive(end)
        end.settimeout(None)

    def _serve(self, end: socket.socket) -> str:
        """Run the process of a device until it ends, the peer closes the connection, or `stopped` is set.
        Returns how it ended."""
        process = start_rank(end, interface_of(end.getsockname()[0]))
        hang_ups = select.poll()
        hang_ups.register(end, HANG_UP)
        try:
            while process.poll() is None and not self.stopped.is_set():
                if hang_ups.poll(WATCH_MILLISECONDS):
                    process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "let go by the peer; its process did not end and was killed"
        finally:
            process.kill()
            code = process.wait(END_SECONDS)
        if self.stopped.is_set():
            return "no longer lent"
        return f"its process ended with code {code}" if code else "let go by the peer"
