"""What a device can do at most: the fastest product of two matrices that it was ever seen to make.

Kept per machine, so that its peers say the same: the highest counts, as other programs only ever make a
measurement too low, and it is measured again only while the machine is quiet.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, thread_time

import torch

from peers.config.atomic_files import write_atomically
from peers.errors import UserError
from swarmnet.model.linear import linear

SIDES = {"cpu": 768, "cuda": 4096}
"""Of the matrices: large enough to fill the device, small enough for a few on one processor core."""
MOST_SECONDS = 0.25
MOST_PRODUCTS = 10
FILE_NAME = "peaks.json"
LOCK_SECONDS = 10.0
"""For others of this machine that measure: longer than each of them takes."""


def measured_peak(device: torch.device) -> float:
    """Floating-point operations per second, in the arithmetic of a stage's layers (swarmnet/model/linear.py)
    and with as many threads. Takes MOST_SECONDS and a product more.

    On a processor by the seconds that this thread had one: with fourteen others wanting two cores a product
    took 14 times as long by the clock (2.6e9 a second, while the peers trained at 1.9e10 a little later)."""
    side = SIDES.get(device.type, SIDES["cpu"])
    seconds = thread_time if device.type == "cpu" else perf_counter
    # By chance, for a GPU multiplies ones faster than what is ever trained.
    matrix = torch.randn(side, side, generator=torch.Generator().manual_seed(0)).to(device)
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        matrix = matrix.bfloat16()  # As peers compute there, unless their owner wants otherwise.
    began, fastest = perf_counter(), float("inf")
    for _ in range(MOST_PRODUCTS):
        at = seconds()
        with torch.no_grad():
            linear(matrix, matrix)[0, 0].item()  # Which waits until the product is there.
        fastest = min(fastest, seconds() - at)
        if perf_counter() - began > MOST_SECONDS:
            break
    return 2.0 * side**3 / fastest


def is_quiet() -> bool:
    """Whether this machine has had a core to spare over the last minute."""
    return os.getloadavg()[0] < (os.cpu_count() or 1)
MAX_FLOPS = 1e30
"""A second; no device is within ten powers of ten of it."""


class MachinePeak:
    """The highest that any peer of this machine has measured, in a file below the folder of all states."""

    def __init__(
        self, folder: Path, device: torch.device, threads: int,
        measure: Callable[[torch.device], float] = measured_peak, quiet: Callable[[], bool] = is_quiet,
    ) -> None:  # fmt: skip
        self._path, self._device = folder / FILE_NAME, device
        self._measure, self._quiet = measure, quiet
        self._threads = threads
        self.highest = 0.0

    def know(self) -> float:
        """Measured if nobody has, or if the machine is quiet; one peer at a time. Blocking, for a second."""
        with _alone(self._path.with_suffix(".lock")):
            if self.look() is None or self._quiet():
                self.highest = max(self.highest, self._measure(self._device))
                self._keep()
        return self.highest

    def seen(self, operations_per_second: float) -> float:
        """What was just done: no device can do less at most. The highest by now. Blocking if that is news."""
        if operations_per_second > self.highest:
            self.highest = operations_per_second
            self._keep()
        return self.highest

    def look(self) -> float | None:
        """What is known by now, from others too; None: nothing."""
        found = self._kept().get(self._key, 0.0)
        self.highest = max(self.highest, found)
        return self.highest or None

    @property
    def _key(self) -> str:
        """A folder may be shared by several machines."""
        on_gpu = self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if on_gpu else f"cpu, threads {self._threads}"
        return f"{platform.node()}: {name}"

    def _kept(self) -> dict[str, float]:
        """What is no number, or not there, is measured anew."""
        try:
            kept = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        found = kept.items() if isinstance(kept, dict) else ()
        return {key: float(value) for key, value in found
                if isinstance(value, (int, float)) and 0 < value < MAX_FLOPS}  # fmt: skip

    def _keep(self) -> None:
        kept = self._kept()
        if self.highest > kept.get(self._key, 0.0):
            with contextlib.suppress(UserError, OSError):  # Then this process alone knows it.
                write_atomically(self._path, json.dumps({**kept, self._key: self.highest}).encode())


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While others of this machine wait, LOCK_SECONDS at most; where no lock can be had, beside them."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = held.enter_context(path.open("w"))
            until = time.monotonic() + LOCK_SECONDS
            while time.monotonic() < until:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
        yield
