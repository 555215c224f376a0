"""Processes that stand still: not merely asked to, but seen to."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

STOP_SECONDS = 10.0


def stands_still(pid: int) -> bool:
    """Whether all threads of the process are stopped (state T of /proc/PID/task/TID/stat, proc(5))."""
    states = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It ended meanwhile.
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)


def freeze(pid: int) -> None:
    """SIGSTOP, and wait until it works: a thread stops when it is next scheduled, which on a busy machine may
    be long enough for the others to accept a connection and greet."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + STOP_SECONDS
    while not stands_still(pid):
        assert time.monotonic() < until, f"process {pid} still runs {STOP_SECONDS:g} s after SIGSTOP"
        time.sleep(0.001)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The process stands still in here; it may be gone at the end."""
    freeze(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
