"""Start `swarmnet` as a child process that ends with this one."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1


async def start_swarmnet(
    arguments: Sequence[str], *, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Process:
    """Start `swarmnet` with these arguments. Its standard error is a pipe. `prefix`: command that runs it
    elsewhere. `environment`: all its variables; None: those of this process.

    It has a session of its own, so that Ctrl+C reaches only this process, which then lets it leave."""
    return await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        "-m",
        "peers.cli.main",
        *arguments,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        env=dict(os.environ if environment is None else environment),
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )


def _end_with_parent() -> None:
    """Make the child end with its parent, also if that is killed; called in the child before exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
