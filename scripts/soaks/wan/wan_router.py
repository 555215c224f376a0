"""The user-space router between the hosts of a `wan.Wan`: bandwidth, delay, loss, and who is cut off.

Every host is a network namespace with one TUN device; this process holds the far ends of all of them, and so
is the only road between hosts. Links are virtual-time queues: nothing sleeps per packet. It is controlled by
JSON lines on a socket.
"""

import contextlib
import ctypes
import errno
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import time
from dataclasses import dataclass, field

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x1, 0x1000, 0x40000000
FLOW_SECONDS = 120.0
"""A firewall forgets a flow after such a silence."""
PACKETS_A_TURN = 128
"""Read from one host before the next one's turn."""
TURN_SECONDS = 0.001
"""Between two looks at the hosts while packets flow. A router that wakes for every packet takes the processor
from whoever computes thousands of times a second, which no router elsewhere does to a peer."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One host's access link. Path a -> b has the delays of both."""

    up: float = 0.0
    """Mbit/s; 0: unlimited."""
    down: float = 0.0
    delay: float = 0.0
    """Milliseconds between the host and the internet, one way."""
    loss: float = 0.0
    """Probability per packet, each way."""
    queue: float = 200.0
    """Milliseconds that packets may wait for the link; then they are dropped."""
    firewall: bool = False
    """Nothing comes in but answers: packets of flows (both addresses and ports) that the host began."""
    translated: bool = False
    """With a firewall: not even two hosts that dial each other at once get through, as where a router
    translates addresses (others do not know the port that a dial leaves from)."""


def enter_namespace(descriptor):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def open_tun(namespace):
    """The far end of a new device `wan0` in that namespace."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        enter_namespace(there)
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", b"wan0", IFF_TUN | IFF_NO_PI))
    finally:
        enter_namespace(home)
        os.close(there)
        os.close(home)
    return descriptor


def begins_tcp(packet):
    """Whether it is a SYN that answers nothing."""
    flags = packet[(packet[0] & 15) * 4 + 13]
    return packet[9] == socket.IPPROTO_TCP and flags & 0x12 == 0x02


def flow(packet, answer=False):
    """(protocol, own address, own port, other address, other port) as the sender sees it, or who answers."""
    ports = (packet[0] & 15) * 4
    near, far = (packet[12:16], packet[ports : ports + 2]), (packet[16:20], packet[ports + 2 : ports + 4])
    return (packet[9], *far, *near) if answer else (packet[9], *near, *far)


@dataclass(slots=True, eq=False)
class Link:
    """One host's link, both directions. Bandwidths in seconds per byte, times in seconds."""

    descriptor: int
    address: bytes
    up: float = 0.0
    down: float = 0.0
    delay: float = 0.0
    loss: float = 0.0
    queue: float = 0.2
    up_free: float = 0.0
    down_free: float = 0.0
    firewall: bool = False
    translated: bool = False
    flows: dict = field(default_factory=dict)
    """When this host last sent on a flow."""
    stopped: int = 0
    """Packets that the firewall kept out."""
    blocked: set = field(default_factory=set)
    """Addresses that this host cannot reach."""
    sent_bytes: int = 0
    received_bytes: int = 0
    lost: int = 0
    overflowed: int = 0

    def configure(self, spec):
        self.up = 8e-6 / spec.up if spec.up else 0.0
        self.down = 8e-6 / spec.down if spec.down else 0.0
        self.delay, self.loss, self.queue = spec.delay / 1e3, spec.loss, spec.queue / 1e3
        self.firewall, self.translated = spec.firewall, spec.translated

    def lets_in(self, packet, now):
        """Whether the host behind this link began the flow; IPv4 headers are 20 bytes or more."""
        if self.firewall and self.translated and begins_tcp(packet):
            return False
        sent = self.flows.get(flow(packet, answer=True), -FLOW_SECONDS) if self.firewall else now
        return now - sent < FLOW_SECONDS


class Router:
    def __init__(self, control, seed):
        self.control = control
        self.lines = control.makefile("r")
        self.chance = random.Random(seed).random
        self.names, self.addresses, self.descriptors = {}, {}, {}
        self.due = []
        """(time, tie, arrived at the access link?, link, packet), a heap."""
        self.tie = 0
        self.poll = select.epoll()
        self.poll.register(control.fileno(), select.EPOLLIN)

    def run(self):
        with contextlib.suppress(OSError):  # A router that waits for a busy CPU adds 1.3 s (measured).
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        while True:
            self.deliver()
            wait = max(0.0, self.due[0][0] - time.monotonic()) if self.due else -1
            for descriptor, _ in self.poll.poll(wait):
                link = self.descriptors.get(descriptor)
                if link is not None:
                    self.take(link)
                elif not self.command():
                    return
            time.sleep(TURN_SECONDS)

    def push(self, at, at_destination, link, packet):
        self.tie += 1
        heapq.heappush(self.due, (at, self.tie, at_destination, link, packet))

    def deliver(self):
        """Everything due: into the destination's downlink, and out of it."""
        now = time.monotonic()
        while self.due and self.due[0][0] <= now:
            at, _, at_destination, link, packet = heapq.heappop(self.due)
            if not at_destination and link.down:
                free = max(link.down_free, at)
                if free - at > link.queue:
                    link.overflowed += 1
                    continue
                link.down_free = at = free + len(packet) * link.down
                if at > now:
                    self.push(at, True, link, packet)
                    continue
            link.received_bytes += len(packet)
            try:
                os.write(link.descriptor, packet)
            except OSError as error:  # The host's own buffer is full, or its device is going down.
                if error.errno not in (errno.EAGAIN, errno.EIO, errno.EINVAL, errno.ENOBUFS):
                    raise

    def take(self, source):
        """Packets that a host sends, onto its uplink."""
        for _ in range(PACKETS_A_TURN):
            try:
                packet = os.read(source.descriptor, 65536)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EIO):
                    return
                raise
            target = self.addresses.get(packet[16:20])
            if target is None or packet[0] >> 4 != 4:  # IPv6 chatter, or nobody
                continue
            source.sent_bytes += len(packet)
            if target.address in source.blocked:
                continue
            if source.firewall:
                source.flows[flow(packet)] = time.monotonic()
            if not target.lets_in(packet, time.monotonic()):
                target.stopped += 1
                continue
            if self.chance() < source.loss or self.chance() < target.loss:
                source.lost += 1
                continue
            now = time.monotonic()
            at = max(source.up_free, now)
            if source.up:
                if at - now > source.queue:
                    source.overflowed += 1
                    continue
                source.up_free = at = at + len(packet) * source.up
            self.push(at + source.delay + target.delay, False, target, packet)

    def command(self):
        """Carry out one line from the controller; False when it has gone."""
        line = self.lines.readline()
        if not line:
            return False
        try:
            answer = {"value": self.carry_out(**json.loads(line))}
        except (OSError, KeyError, TypeError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.control.sendall((json.dumps(answer) + "\n").encode())
        return True

    def carry_out(self, operation, name="", namespace="", address="", spec=None, pairs=()):
        match operation:
            case "add":
                link = Link(open_tun(namespace), socket.inet_aton(address))
                link.configure(Spec(**spec))
                self.names[name] = self.addresses[link.address] = self.descriptors[link.descriptor] = link
                self.poll.register(link.descriptor, select.EPOLLIN)
            case "set":
                self.names[name].configure(Spec(**spec))
            case "block":
                for source, target in pairs:
                    self.names[source].blocked.add(self.names[target].address)
            case "heal":
                for link in self.names.values():
                    link.blocked.clear()
            case "stats":
                hosts = {
                    name: {
                        "sent_bytes": link.sent_bytes, "received_bytes": link.received_bytes,
                        "lost": link.lost, "overflowed": link.overflowed, "stopped": link.stopped,
                    }
                    for name, link in self.names.items()
                }  # fmt: skip
                return {"hosts": hosts, "cpu_seconds": time.process_time()}
        return None
