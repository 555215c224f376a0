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
from typing import TypeAlias

from torch import Tensor

from peers.compute.devices.channel import PIECE_BYTES, Channel, ChannelClosed
from peers.compute.devices.orders import Answer, Begin, DeviceFailed, Done, InputRefused, Order
from peers.errors import DevicesLost
from swarmnet.model.stage_compute import StageError
from swarmnet.optimizer.method import GradientError

ANSWER_SECONDS = 300.0
"""Time limit for one order. Devices time out earlier (`rank.py`), so that the error names the one that hangs.
The first order takes longest, as it imports torch: 6 s with two processes on a busy machine of two cores."""
END_SECONDS = 5.0
"""A process whose connection is closed ends itself. After this time it is killed."""
ENVIRONMENT = {
    # Read when torch is imported; the peer file's `threads` are applied later.
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
    # Layers come and go, and glibc leaves gaps between them. With a stage of 77 million parameters, each of
    # two processes took 14.7 bytes per parameter after one microbatch, and 5.4 without gaps
    # (docs/benchmarks/memory.md).
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    # Loopback only: all devices are in one machine, and no other machine can reach them.
    "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
}  # fmt: skip
LAST_SECONDS = 1.0
"""Maximum time between the end of a process's connection and its exit."""

Received: TypeAlias = tuple[Answer, list[Tensor]]
Given: TypeAlias = tuple[Done, list[Tensor]]


class Processes:
    """The processes, one for each device. Any thread may use it; it runs one order at a time."""

    def __init__(self, begins: Callable[[str], Sequence[Begin]]) -> None:
        """Start the processes without waiting; `ready` waits. `begins` returns the first order for each
        device, given the file by which they find each other."""
        self._folder = tempfile.TemporaryDirectory(prefix="swarmnet-devices-", ignore_cleanup_errors=True)
        self._lock = threading.Lock()
        self._lost: DevicesLost | None = None
        self._channels: list[Channel[Order, Answer]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output_folder = Path(self._folder.name)
        self._begins = begins(str(self._output_folder / "store"))
        for begin in self._begins:
            self._start(begin.rank)

    def _start(self, rank: int) -> None:
        here, there = socket.socketpair()
        with there, (self._output_folder / f"{rank}.txt").open("wb") as words:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "peers.compute.devices.rank", str(there.fileno())],
                    pass_fds=(there.fileno(),), stdin=subprocess.DEVNULL, stdout=words, stderr=words,
                    env={**os.environ, **ENVIRONMENT}, start_new_session=True,
                )
            )  # fmt: skip
        self._channels.append(Channel(here, Answer, ANSWER_SECONDS))

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def ready(self) -> None:
        """Wait until all have started. Raises DevicesLost, as all methods below."""
        self.ask_each(self._begins)

    def ask(self, order: Order, tensors: Sequence[Tensor] = ()) -> list[Given]:
        """Send the same order to all. Raises StageError or GradientError if all devices refuse it."""
        return self.ask_each([order] * len(self._processes), [tensors] * len(self._processes))

    def ask_each(
        self, of_each: Sequence[Order], tensors: Sequence[Sequence[Tensor]] | None = None
    ) -> list[Given]:
        """Send an order to each device and return the answers by rank."""
        with self._lock:
            self._send(of_each, tensors)
            return self._answers(lambda channel: channel.receive())

    def read(self, order: Order, runs: Iterator[tuple[int, int]]) -> Iterator[bytearray]:
        """Yield the bytes of a vector of which each device has a share, in pieces. `runs` are (device, bytes)
        in order and cover every share. No other order is sent before the last piece is read."""
        with self._lock:
            self._send([order] * len(self._processes), None)
            self._answers(lambda channel: (channel.receive_message(), []))
            for rank, size in runs:
                for start in range(0, size, PIECE_BYTES):
                    piece = bytearray(min(PIECE_BYTES, size - start))
                    try:
                        self._channels[rank].read_into(memoryview(piece))
                    except ChannelClosed as error:
                        raise self._lose(rank, self._end_of(rank, error)) from None
                    yield piece

    def close(self) -> None:
        """End all processes. Takes seconds if one hangs."""
        if self._lost is None:
            self._lost = DevicesLost("the devices were let go")
        self._end(END_SECONDS)

    def _send(self, of_each: Sequence[Order], tensors: Sequence[Sequence[Tensor]] | None) -> None:
        if self._lost is not None:
            raise self._lost
        for rank, (channel, order) in enumerate(zip(self._channels, of_each, strict=True)):
            try:
                channel.send(order, () if tensors is None else tensors[rank])
            except ChannelClosed as error:
                raise self._lose(rank, self._end_of(rank, error)) from None

    def _answers(self, receive: Callable[[Channel[Order, Answer]], Received]) -> list[Given]:
        """Receive all answers as they arrive, so a lost process is noticed at once. Returns them by rank."""
        found: dict[int, Received] = {}
        failed: tuple[int, str] | None = None
        until = time.monotonic() + ANSWER_SECONDS
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel.end, selectors.EVENT_READ, rank)
            while len(found) < len(self._channels):
                events = selector.select(max(0.0, until - time.monotonic()))
                if not events and failed is not None:
                    break
                if not events:
                    late = min(set(range(len(self._channels))) - found.keys())
                    raise self._lose(late, f"has not answered for {ANSWER_SECONDS:g} s")
                for key, _ in events:
                    try:
                        answer = found[key.data] = receive(self._channels[key.data])
                    except ChannelClosed as error:
                        raise self._lose(key.data, self._end_of(key.data, error)) from None
                    selector.unregister(key.fileobj)
                    if isinstance(answer[0], DeviceFailed) and failed is None:
                        # Another process that has ended may be the cause; that one should be named.
                        failed, until = (key.data, answer[0].text), time.monotonic() + END_SECONDS
        if failed is not None:
            raise self._lose(*failed)
        return self._agreed([found[rank] for rank in range(len(self._channels))])

    def _agreed(self, answers: Sequence[Received]) -> list[Given]:
        refusals = [answer for answer, _ in answers if isinstance(answer, InputRefused)]
        if refusals and len(refusals) < len(answers):
            raise self._lose(0, f"the devices are of two minds: {refusals[0].text}")
        if refusals:
            raise (StageError if refusals[0].what == "stage" else GradientError)(refusals[0].text)
        return [(answer, tensors) for answer, tensors in answers if isinstance(answer, Done)]

    def _end_of(self, rank: int, error: ChannelClosed) -> str:
        """Return the reason why a process no longer answers."""
        try:
            code = self._processes[rank].wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            return f"does not answer any more ({error})"
        words = (self._output_folder / f"{rank}.txt").read_text(errors="replace").strip().splitlines()
        if code < 0:
            return f"ended by signal {-code}"
        return f"ended with code {code}{': ' + words[-1][:300] if words else ''}"

    def _lose(self, rank: int, why: str) -> DevicesLost:
        """End all processes and return the error to raise."""
        self._end(0.0)
        self._lost = DevicesLost(f"the process of device {rank} of {len(self._processes)}: {why}")
        return self._lost

    def _end(self, seconds: float) -> None:
        for channel in self._channels:
            channel.end.close()
        until = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_SECONDS)
        self._folder.cleanup()
