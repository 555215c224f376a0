"""Fresh dials: check who answers at an address, by dialling it from a new process without connections.

A peer's own p2pd reaches every peer that is already connected, whether it listens or not. For the same reason
hivemind's own check considers every peer reachable (docs/decisions/0010-dial-back.md). Therefore a
short-lived program dials instead (fresh_dial_program.py) and prints a line of JSON for each address.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from protocols.fields import Name, Seconds
from swarmnet.identifiers import PeerId

Outcome = Literal["reached", "refused", "silent", "no_way", "other_peer", "not_libp2p", "not_tried", "failed"]
"""Outcome of a dial.

- reached: the peer's key answered; other_peer: another key answered; not_libp2p: another program answered.
- refused: the host answers, but nothing listens; silent: no answer at all; no_way: no route.
- not_tried: the rules forbid it; failed: the dial itself broke, which says nothing about the address."""
Address = Annotated[str, Meta(max_length=200, pattern=r"^/[!-~]+$")]
ADDRESSES = 8
"""Maximum number of addresses dialled for one request, all at once."""
DIAL_SECONDS = 5.0
"""Timeout of one dial in seconds. A lost SYN is sent again after 1 s and 3 s."""
START_SECONDS = 30.0
"""Timeout for starting. Importing py-libp2p takes 0.7 s on an idle machine and took 4.4 s on a loaded one."""
_PROGRAM = Path(__file__).with_name("fresh_dial_program.py")
_ANSWER_BYTES = 16 * 1024


class DialOutcome(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The outcome at one address."""

    address: Address
    outcome: Outcome
    detail: Annotated[str, Meta(max_length=300)]
    """Text for people; for `other_peer`, its peer id."""
    seconds: Seconds


class _Line(Struct, frozen=True):
    """A line of the program's output."""

    address: Address
    outcome: Outcome
    detail: str
    seconds: Seconds


class Dial(Struct, frozen=True):
    """The input of the program: dial `addresses`, for at most `seconds` each, and expect `peer` there."""

    peer: Name
    addresses: Sequence[str]
    seconds: float


Dials = Callable[[PeerId, Sequence[str]], Awaitable[tuple[DialOutcome, ...]]]
"""`dial` below, or a stand-in. Returns the outcome of each address in the order given."""


def can_dial() -> bool:
    """Return True if py-libp2p is installed (the extra `libp2p`)."""
    return all(importlib.util.find_spec(name) is not None for name in ("libp2p", "trio", "multiaddr"))


async def dial(peer: PeerId, addresses: Sequence[str], program: Path = _PROGRAM) -> tuple[DialOutcome, ...]:
    """Dial every address as an unconnected peer would, and return the outcomes in the given order. Addresses
    must be IP addresses with TCP. Takes at most `START_SECONDS` + `DIAL_SECONDS`. An address that the program
    does not report by then, or before it fails, has the outcome `failed`. Never raises."""
    outcomes: dict[str, DialOutcome] = {}
    failure = "the process that dials could not be started"
    with contextlib.suppress(OSError):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_ANSWER_BYTES,
        )
        try:
            async with asyncio.timeout(START_SECONDS + DIAL_SECONDS):
                failure = await _collect(process, Dial(peer, addresses, DIAL_SECONDS), outcomes)
        except TimeoutError:
            failure = f"no verdict within {START_SECONDS + DIAL_SECONDS:g} s: this machine is busy"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    failed = {address: DialOutcome(address, "failed", failure, 0.0) for address in addresses}
    return tuple(outcomes.get(address, failed[address]) for address in addresses)


async def _collect(process: asyncio.subprocess.Process, task: Dial, outcomes: dict[str, DialOutcome]) -> str:
    """Give the program its task, and put each line of its output into `outcomes` as it comes. If it fails at
    one address, the outcomes before that are thus kept. Returns as text why no further line is read: the
    program ended, or wrote something else."""
    assert process.stdin is not None, "it was started with a pipe"
    assert process.stdout is not None, "it was started with a pipe"
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(msgspec.to_builtins(task)).encode())
        process.stdin.close()
    while line := await process.stdout.readline():
        try:
            got = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError:
            return "the process that dials gave an unexpected answer"
        outcomes[got.address] = DialOutcome(got.address, got.outcome, got.detail[:300], got.seconds)
    return f"the process that dials ended with code {await process.wait()}"
