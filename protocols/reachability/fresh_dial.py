"""Fresh dials: a short-lived process that has met nobody (fresh_dial_program.py) tells what is at an address.

A peer that asks its own p2pd reaches whoever is connected to it already, wherever that one listens or not. So
says hivemind's own check: it finds everybody reachable (docs/decisions/0010-dial-back.md).
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
"""reached: its key answered. refused: the machine answers, nothing listens. silent: no answer at all. no_way:
no route. other_peer: another key answered. not_libp2p: something else did. not_tried: against the rules.
failed: the dial itself broke, which says nothing about the address."""
Address = Annotated[str, Meta(max_length=200, pattern=r"^/[!-~]+$")]
ADDRESSES = 8
"""Dialled for one request, all at once."""
DIAL_SECONDS = 5.0
"""Of one dial. A SYN that was lost is sent again after 1 s and 3 s."""
START_SECONDS = 30.0
"""py-libp2p is imported in 0.7 s on a free machine, 4.4 s were seen on a loaded one."""
_PROGRAM = Path(__file__).with_name("fresh_dial_program.py")
_ANSWER_BYTES = 16 * 1024


class Dialled(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What was met at one address."""

    address: Address
    outcome: Outcome
    detail: Annotated[str, Meta(max_length=300)]
    """For people; of `other_peer`: its peer id."""
    seconds: Seconds


class _Line(Struct, frozen=True):
    address: Address
    outcome: Outcome
    detail: str
    seconds: Seconds


class Dial(Struct, frozen=True):
    """What the program is told."""

    peer: Name
    addresses: Sequence[str]
    seconds: float


Dials = Callable[[PeerId, Sequence[str]], Awaitable[tuple[Dialled, ...]]]
"""`dial` below, or a stand-in: the outcome of each address, in the order asked."""


def can_dial() -> bool:
    """Whether py-libp2p is installed (the extra `libp2p`)."""
    return all(importlib.util.find_spec(name) is not None for name in ("libp2p", "trio", "multiaddr"))


async def dial(peer: PeerId, addresses: Sequence[str], program: Path = _PROGRAM) -> tuple[Dialled, ...]:
    """Dial every address as a stranger would, and see whether `peer` answers there. IP addresses with TCP.

    Takes at most `START_SECONDS` + `DIAL_SECONDS`; what is not told by then has `failed`. Never raises."""
    found: dict[str, Dialled] = {}
    why = "the process that dials could not be started"
    with contextlib.suppress(OSError):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(program),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            limit=_ANSWER_BYTES,
        )  # fmt: skip
        try:
            async with asyncio.timeout(START_SECONDS + DIAL_SECONDS):
                why = await _listen(process, Dial(peer, addresses, DIAL_SECONDS), found)
        except TimeoutError:
            why = f"no verdict within {START_SECONDS + DIAL_SECONDS:g} s: this machine is busy"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return tuple(found.get(each, Dialled(each, "failed", why, 0.0)) for each in addresses)


async def _listen(process: asyncio.subprocess.Process, task: Dial, found: dict[str, Dialled]) -> str:
    """Take its lines as they come, so that one address at which it falls spoils no other; why it ended."""
    assert process.stdin is not None, "it was made so"
    assert process.stdout is not None, "it was made so"
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(msgspec.to_builtins(task)).encode())
        process.stdin.close()
    while line := await process.stdout.readline():
        try:
            told = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError:
            return "the process that dials said something strange"
        found[told.address] = Dialled(told.address, told.outcome, told.detail[:300], told.seconds)
    return f"the process that dials ended with code {await process.wait()}"
