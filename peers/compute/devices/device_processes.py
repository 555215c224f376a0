"""Run the processes of a peer's devices: send one order to all of them at a time, and collect the answers.

Every wait has a deadline, and the end of any process is noticed while another is awaited. After the first
lost process all are ended, and no more orders are sent.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec
from torch import Tensor

from peers.compute.devices.channel import PIECE_BYTES, Channel, ChannelClosed
from peers.compute.devices.device_requests import TCP, Answer, Begin, DeviceFailed, Done, InputRefused, Order
from peers.compute.devices.nodes import NodeListener
from peers.config.errors import DevicesLost
from swarmnet.model.stage_compute import StageError
from swarmnet.optimizer.method import GradientError

ANSWER_SECONDS = 300.0
"""Time limit for one order. Devices time out earlier (`rank.py`), so that the error names the one that hangs.
The first order takes longest, as it imports torch: 6 s with two processes on a busy machine of two cores."""
END_SECONDS = 5.0
"""A process whose connection is closed ends itself. After this time it is killed."""
ENVIRONMENT = {
    # Read when torch is imported; the peer file's `threads` are applied later.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    # Layers come and go, and glibc leaves gaps between them. With a stage of 77 million parameters, each of
    # two processes took 14.7 bytes per parameter after one microbatch, and 5.4 without gaps
    # (docs/benchmarks/memory.md).
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
}
LOOPBACK = "lo"
"""The interface if all devices are in one machine. No other machine can reach them."""
LAST_SECONDS = 1.0
"""Maximum time between the end of a process's connection and its exit."""

Received: TypeAlias = tuple[Answer, list[Tensor]]
DoneAnswer: TypeAlias = tuple[Done, list[Tensor]]


class Processes:
    """The processes, one for each device. Any thread may use it; it runs one order at a time."""

    def __init__(self, begin: Begin, devices: Sequence[str], nodes: NodeListener | None = None) -> None:
        """Start the processes of this machine's `devices` without waiting; `ready` waits, also for the
        devices of other `nodes`. `begin` is the first order, without what differs between devices."""
        self._folder = tempfile.TemporaryDirectory(prefix="swarmnet-devices-", ignore_cleanup_errors=True)
        self._lock = threading.Lock()
        self._lost: DevicesLost | None = None
        self._channels: list[Channel[Order, Answer]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output_folder = Path(self._folder.name)
        self._nodes = nodes
        self._devices = list(devices)
        self._node_names: list[str] = []
        """The node of each device of other nodes, whose ranks follow those of this machine's devices."""
        self._begin = begin
        begin.store = str(self._output_folder / "store")
        if nodes is not None:
            begin.store, begin.store_descriptor = f"{TCP}{nodes.store_address}", nodes.store.fileno()
        for rank in range(len(devices)):
            self._start(rank)
        if nodes is not None:
            nodes.store.close()  # The first device's process has it.

    def _start(self, rank: int) -> None:
        """Start the process of one device, with one end of a socket pair; its output goes to a file."""
        own_end, process_end = socket.socketpair()
        interface = LOOPBACK if self._nodes is None else self._nodes.interface
        store = () if self._nodes is None or rank else (self._begin.store_descriptor,)
        with process_end, (self._output_folder / f"{rank}.txt").open("wb") as output:
            self._processes.append(start_rank(process_end, interface, output, store))
        self._channels.append(Channel(own_end, received=Answer, seconds=ANSWER_SECONDS))

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def ready(self) -> None:
        """Wait until all processes have started. Raises DevicesLost, as do all methods below."""
        if self._nodes is not None:
            self._add_devices_of(self._nodes)
        self.ask_each(
            [
                msgspec.structs.replace(self._begin, rank=rank, device=device)
                for rank, device in enumerate(self._devices)
            ]
        )

    def _add_devices_of(self, nodes: NodeListener) -> None:
        """Wait for the devices of other nodes, whose processes run there. Raises DevicesLost."""
        try:
            lent = nodes.accept_devices()
        except DevicesLost as error:
            self._end_processes(0.0)
            self._lost = error
            raise
        for offer, end in lent:
            self._channels.append(Channel(end, received=Answer, seconds=ANSWER_SECONDS))
            self._devices.append(offer.device)
            self._node_names.append(offer.node)

    def ask(self, order: Order, tensors: Sequence[Tensor] = ()) -> list[DoneAnswer]:
        """Send the same order to all devices, and return their answers by rank. Raises StageError or
        GradientError if all devices refuse the input."""
        return self.ask_each([order] * len(self._channels), [tensors] * len(self._channels))

    def ask_each(
        self, device_orders: Sequence[Order], tensors: Sequence[Sequence[Tensor]] | None = None
    ) -> list[DoneAnswer]:
        """Send each device its order and tensors, both by rank, and return the answers by rank. Raises
        StageError or GradientError if all devices refuse the input, DevicesLost if a process is lost."""
        with self._lock:
            self._send(device_orders, tensors)
            return self._receive_answers(lambda channel: channel.receive())

    def read(self, order: Order, runs: Iterator[tuple[int, int]]) -> Iterator[bytearray]:
        """Send the same order to all devices, each of which answers with its share of a vector. Yield the
        bytes of the whole vector in pieces. `runs` are (device, bytes): the next bytes of the vector are the
        next ones of that device. No other order is sent before the last piece is read."""
        with self._lock:
            self._send([order] * len(self._channels), None)
            # Only the answers are received here; their tensors' bytes follow in the loop.
            self._receive_answers(lambda channel: (channel.receive_message(), []))
            for rank, size in runs:
                for start in range(0, size, PIECE_BYTES):
                    piece = bytearray(min(PIECE_BYTES, size - start))
                    try:
                        self._channels[rank].read_into(memoryview(piece))
                    except ChannelClosed as error:
                        raise self._end_after_loss(rank, self._explain_end(rank, error)) from None
                    yield piece

    def close(self) -> None:
        """End all processes. Takes seconds if one hangs."""
        if self._lost is None:
            self._lost = DevicesLost("the devices were let go")
        self._end_processes(END_SECONDS)

    def _send(self, device_orders: Sequence[Order], tensors: Sequence[Sequence[Tensor]] | None) -> None:
        """Send each device its order and tensors. Raises DevicesLost if a process was or is lost."""
        if self._lost is not None:
            raise self._lost
        for rank, (channel, order) in enumerate(zip(self._channels, device_orders, strict=True)):
            try:
                channel.send(order, () if tensors is None else tensors[rank])
            except ChannelClosed as error:
                raise self._end_after_loss(rank, self._explain_end(rank, error)) from None

    def _receive_answers(self, receive: Callable[[Channel[Order, Answer]], Received]) -> list[DoneAnswer]:
        """Receive one answer of each device, in the order of arrival, so that a lost process is noticed at
        once. `receive` reads an answer from a connection. Returns the answers by rank. Raises DevicesLost if
        a process fails, ends or is late, StageError or GradientError if all devices refuse the input."""
        answers: dict[int, Received] = {}
        failed: tuple[int, str] | None = None
        deadline = time.monotonic() + ANSWER_SECONDS
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel.end, selectors.EVENT_READ, rank)
            while len(answers) < len(self._channels):
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events and failed is not None:
                    break
                if not events:
                    late = min(set(range(len(self._channels))) - answers.keys())
                    raise self._end_after_loss(late, f"has not answered for {ANSWER_SECONDS:g} s")
                for key, _ in events:
                    rank = key.data
                    try:
                        received = receive(self._channels[rank])
                    except ChannelClosed as error:
                        raise self._end_after_loss(rank, self._explain_end(rank, error)) from None
                    answers[rank] = received
                    selector.unregister(key.fileobj)
                    answer, _ = received
                    if isinstance(answer, DeviceFailed) and failed is None:
                        # Another process that has ended may be the cause. Wait a moment for its end, so that
                        # the error names it.
                        failed = (rank, answer.text)
                        deadline = time.monotonic() + END_SECONDS
        if failed is not None:
            raise self._end_after_loss(*failed)
        return self._check_agreement([answers[rank] for rank in range(len(self._channels))])

    def _check_agreement(self, answers: Sequence[Received]) -> list[DoneAnswer]:
        """Return the answers if all devices have carried out the order. Raises StageError or GradientError if
        all refuse the input, and DevicesLost if only some do."""
        refusals = [answer for answer, _ in answers if isinstance(answer, InputRefused)]
        if refusals and len(refusals) < len(answers):
            # It is unknown which device is wrong; the error names device 0.
            raise self._end_after_loss(0, f"the devices are of two minds: {refusals[0].text}")
        if refusals and refusals[0].what == "stage":
            raise StageError(refusals[0].text)
        if refusals:
            raise GradientError(refusals[0].text)
        return [(answer, tensors) for answer, tensors in answers if isinstance(answer, Done)]

    def _explain_end(self, rank: int, error: ChannelClosed) -> str:
        """Return why a process no longer answers: its exit code with its last line of output, or `error`. A
        process of another node reports its end there."""
        if rank >= len(self._processes):
            node = self._node_names[rank - len(self._processes)]
            return f"does not answer any more from node {node} ({error})"
        try:
            code = self._processes[rank].wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            return f"does not answer any more ({error})"
        output = (self._output_folder / f"{rank}.txt").read_text(errors="replace").strip().splitlines()
        if code < 0:
            return f"ended by signal {-code}"
        last_line = f": {output[-1][:300]}" if output else ""
        return f"ended with code {code}{last_line}"

    def _end_after_loss(self, rank: int, why: str) -> DevicesLost:
        """End all processes, because that of device `rank` is lost, and return the error to raise."""
        self._end_processes(0.0)
        self._lost = DevicesLost(f"the process of device {rank} of {len(self._channels)}: {why}")
        return self._lost

    def _end_processes(self, seconds: float) -> None:
        """Close all connections, so that the processes end, or are killed after `seconds`."""
        for channel in self._channels:
            channel.end.close()
        if self._nodes is not None:
            self._nodes.close()
        deadline = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_SECONDS)
        self._folder.cleanup()


def start_rank(
    end: socket.socket, interface: str, output: BinaryIO | None = None, descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start the process of a device, with its end of the connection and other `descriptors`. It talks to the
    other devices over a network interface. `output` None: the output of this process."""
    interfaces = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return subprocess.Popen(
        [sys.executable, "-m", "peers.compute.devices.rank", str(end.fileno())],
        pass_fds=(end.fileno(), *descriptors),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **ENVIRONMENT, **interfaces},
        start_new_session=True,
    )
