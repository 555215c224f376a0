"""Processes of tests that are born in a warm one: what takes seconds of a core to import is imported once.

What starts `python -m peers.cli.main ...` gets a fork of a process that has our modules and torch, and has
done nothing with them: no thread, no file, no key. It is forked twice, and as the one between ends at once,
the system gives the last to the test: pid, signals, pipes and exit code are the test's, as of any process.
What it does not have is a command line of its own in /proc, and an interpreter that it alone began.

    nursery.py SOCKET      the warm process; the number is of a socket that it has inherited
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from importlib import import_module
from threading import Lock

COMMAND = [sys.executable, "-m", "peers.cli.main"]
WARM = ("torch", "peers.cli.main", "peers.process.process", "peers.process.sessions", "peers.worker.worker")
SUBREAPER, PARENT_DEATH = 36, 1  # Of prctl(2): PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG.
LONGEST_REQUEST = 1 << 20


class Nursery:
    """Stands in for what `subprocess` forks and executes with, once it is installed."""

    def __init__(self) -> None:
        self._lock, self._real = Lock(), subprocess._fork_exec
        self._warm: subprocess.Popen | None = None
        self._asked: socket.socket | None = None

    def fork_exec(self, args, executables, close_fds, keep, folder, environment, *more):
        """As `_posixsubprocess.fork_exec`: the pid."""
        typed = [os.fsdecode(each) for each in args]
        if typed[:3] != COMMAND:
            return self._real(args, executables, close_fds, keep, folder, environment, *more)
        into, out, err, new_session, prepare = more[0], more[3], more[5], more[9], more[-2]
        told = {
            "arguments": typed[3:], "folder": os.fsdecode(folder or os.getcwd()),
            "environment": [os.fsdecode(each) for each in environment] if environment is not None else
            [f"{name}={value}" for name, value in os.environ.items()],
            "new_session": bool(new_session), "ends_with_parent": prepare is not None,
        }  # fmt: skip
        streams = [fd if fd >= 0 else number for number, fd in enumerate((into, out, err))]
        with self._lock:
            if self._asked is None:
                self._begin()
            return self._born(told, streams)

    def _begin(self) -> None:
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._warm = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}, start_new_session=True,
        )  # fmt: skip
        theirs.close()

    def _born(self, told, streams) -> int:
        control(SUBREAPER, 1)  # For no longer: what else loses its parent is not ours.
        try:
            socket.send_fds(self._asked, [json.dumps(told).encode()], streams)
            return int(self._asked.recv(64))
        finally:
            control(SUBREAPER, 0)

    def close(self) -> None:
        if self._asked is not None:
            self._asked.close()
            self._warm.wait(30.0)
            self._asked = None


def control(what: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def serve(asked: socket.socket) -> None:
    """Until the test's process is gone."""
    for name in WARM:
        import_module(name)
    while True:
        request, streams, _, _ = socket.recv_fds(asked, LONGEST_REQUEST, 3)
        if not request:
            return
        if not (between := os.fork()):
            parent = os.getpid()
            if not os.fork():
                live(json.loads(request), streams, asked, parent)
            os._exit(0)
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)


def live(told: dict, streams: list[int], asked: socket.socket, parent: int) -> None:
    """The rest of a born process, as soon as its parent is gone."""
    while os.getppid() == parent:
        os.sched_yield()
    asked.send(str(os.getpid()).encode())
    asked.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if told["new_session"]:
        os.setsid()
    if told["ends_with_parent"]:
        control(PARENT_DEATH, signal.SIGTERM)
    os.environ.clear()
    os.environ.update(each.split("=", 1) for each in told["environment"])
    os.chdir(told["folder"])
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "w" if number else "r") for number in range(3))
    sys.argv = [sys.modules["peers.cli.main"].__file__, *told["arguments"]]
    sys.exit(sys.modules["peers.cli.main"].main())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
