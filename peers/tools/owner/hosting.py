"""Host a run on one machine: a bootstrap, an observer, an archivist and the first peers that train.

Each is a process of its own, with its own files, as if it had been started by hand. They are started again
when they fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.config.atomic_files import is_there, write_atomically
from peers.config.errors import UserError
from peers.config.peer_file import default_state
from peers.config.run_file import beside
from peers.runtime.child_process import start_swarmnet
from peers.runtime.find_running import HOSTED, PEER_FILE
from peers.runtime.state_lock import make_private
from protocols.signed.identity import load_or_create
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import BYTES

FIRST_WAIT_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 300.0
"""A part that fails starts again after 5 s, then after twice as long each time, at most after 5 minutes."""
STEADY_SECONDS = 600.0
"""A part that ran so long has recovered: its next failure counts as the first."""
LEAVE_SECONDS = 90.0
"""Time limit of leaving. A peer hands over its work within `drain_seconds` of its file, 30 s by default."""
SCORE_SECONDS = 600.0
"""Time between two scores on held-out text. Each sends 64 KiB of text through the peers."""
HELD_OUT = "held-out"
"""Beginning of the name of the held-out text next to the run file: a folder, or a file such as held-out.txt.
"""
ANY_ADDRESS = "/ip4/0.0.0.0"
LOOPBACK = "/ip4/127."
USER_ERROR = 2
"""Exit code of an error that the user must correct; starting again would not help."""

Spawn = Callable[[Sequence[str]], Awaitable[Process]]
"""Starts `swarmnet` with these arguments."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HostedPart:
    """One process of a hosted run."""

    name: str
    arguments: tuple[str, ...]
    """What follows `swarmnet` on its command line."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The places of a hosted run: where its parts keep their files, and where others reach it."""

    folder: Path
    published: Path
    address: str
    """Beginning of the bootstrap's multiaddr, such as /ip4/192.0.2.7."""
    port: int
    """Port of the bootstrap. The observer and the archivist use the next two."""
    page: str
    """Address of the observer's page, as HOST:PORT."""
    peers: int
    """How many peers train on this machine."""
    listen: str
    """Beginning of the multiaddrs at which the parts listen: all addresses of this machine, or `address`."""
    is_announced: bool
    """Whether the parts announce `address`, because the machine does not know it (behind a router)."""

    @property
    def bootstrap_state(self) -> Path:
        return self.folder / "bootstrap"

    def multiaddr(self) -> str:
        """Return the bootstrap's multiaddr. Its key is created if there is none. Raises IdentityError."""
        identity = load_or_create(self.bootstrap_state / "identity.key")
        return f"{self.address}/tcp/{self.port}/p2p/{identity.peer_id}"

    def write(
        self, manifest: Manifest, options: Sequence[str], scoring: Mapping[str, object]
    ) -> list[HostedPart]:
        """Write the peer files that are missing, and return the parts in the order of their starts. `options`
        are those of `swarmnet join` that name text, tokenizer and initial model on this machine. `scoring`
        are the observer's keys of `scoring_keys`. Files of an earlier call stay as they are. Raises
        UserError."""
        peer_id = self.multiaddr().rpartition("/")[2]
        way = "/ip4/127.0.0.1" if self.listen == ANY_ADDRESS else self.listen
        here = f"{way}/tcp/{self.port}/p2p/{peer_id}"
        run = str(self.published.absolute())
        common: dict[str, object] = {"run": run, "nat": False, "log": "line", **self._lan()}
        knows = {**common, "bootstrap": [here]}
        roles: dict[str, dict[str, object]] = {
            "bootstrap": common,
            "observer": {**knows, "observer": {"listen": self.page}, "archive": "archive", **scoring},
            "archivist": {**knows, "archive": "archive"},
        }
        parts = []
        for port, (role, keys) in enumerate(roles.items(), self.port):
            file = self.folder / f"{role}.yaml"
            if not is_there(file):
                values = {"role": role, "state": role, **keys, "listen": [f"{self.listen}/tcp/{port}"]}
                if self.is_announced:
                    values["announce"] = [f"{self.address}/tcp/{port}"]
                lines = [f"{key}: {json.dumps(value)}" for key, value in values.items()]
                write_atomically(file, "".join(f"{line}\n" for line in lines).encode())
            parts.append(HostedPart(role, ("run", str(file))))
        for number in range(1, self.peers + 1):
            name = f"peer-{number}"
            joining = ["join", run, "--bootstrap", here, "--state", str(self.folder / name)]
            if not is_there(self.folder / name / PEER_FILE):  # Later, its owner may have changed these.
                joining += ["--name", name, *self._options_of_place()]
            if number == 1 and not manifest.data.is_library_alone:
                joining += ["--stage", "0"]  # At first only this peer has the text, and others need it.
            parts.append(HostedPart(name, (*joining, "--set", "log=line", *options)))
        return parts

    def _lan(self) -> dict[str, object]:
        """Return the key that keeps a part off the local network, if it listens only on this machine."""
        return {"lan": False} if self.listen.startswith(LOOPBACK) else {}

    def _options_of_place(self) -> list[str]:
        """Return the options of `swarmnet join` with which a peer listens only where the other parts do."""
        if self.listen == ANY_ADDRESS:
            return []
        keys = {"listen": [f"{self.listen}/tcp/0"], "nat": False, **self._lan()}
        return [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def listen_place(place: str) -> str:
    """Return the beginning of the multiaddrs to listen at, for a machine that others reach at `place`: that,
    if it is an IPv4 address of this machine, else all addresses, as a router forwards connections."""
    _, kind, host = place.split("/", 2)
    if kind == "ip4":
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            return place
    return ANY_ADDRESS


def scoring_keys(manifest: Manifest, folder: Path) -> dict[str, object]:
    """Return the keys with which the run's observer scores held-out text: that in the run file's `folder`, or
    the modules of Python that a run on its library leaves out. Empty if there is none, or if the observer
    could not score it: by invite, with private text or conversations, or without the tokenizer."""
    data, found = manifest.data, sorted(folder.absolute().glob(f"{HELD_OUT}*"))
    tokenizer = None if data.tokenizer == BYTES else beside(folder, data.tokenizer)
    is_readable = data.format == "text" and (data.tokenizer == BYTES or tokenizer is not None)
    if not (found or data.is_library_alone) or not is_readable or data.private or manifest.access != "open":
        return {}
    text = {"text": str(found[0])} if found else {}
    keys: dict[str, object] = {"evaluating": {"seconds": SCORE_SECONDS, **text}}
    return keys if tokenizer is None else {**keys, "tokenizer": str(tokenizer)}


@contextlib.contextmanager
def found_by_commands(plan: HostPlan) -> Iterator[None]:
    """Let commands without a state folder find the peers that train here: until the context ends, links in
    the state home lead to their folders."""
    home = default_state(os.environ, sys.platform) / HOSTED
    links = {home / f"{plan.folder.name}-{number}": f"peer-{number}" for number in range(1, plan.peers + 1)}
    with contextlib.suppress(OSError):  # Without links, commands take the folder.
        make_private(home)
        for link, name in links.items():
            link.unlink(missing_ok=True)
            link.symlink_to(plan.folder / name)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            for link in links:
                link.unlink(missing_ok=True)
            home.rmdir()  # Fails while another run is hosted.


async def host_until_stopped(parts: Sequence[HostedPart], tell: Tell) -> None:
    """Run all parts until Ctrl+C or SIGTERM, and then let them leave. A second one ends this process at once,
    and with it all parts."""
    loop, work = asyncio.get_running_loop(), asyncio.create_task(host(parts, tell), name="host")
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
        tell("leaving: all finish what is under way; again: at once")
        work.cancel()

    for number in numbers:
        loop.add_signal_handler(number, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await work
        return
    tell("stopped: all have left; the same command continues")


async def host(parts: Sequence[HostedPart], tell: Tell, spawn: Spawn | None = None) -> None:
    """Run all parts until cancelled, and then let them leave. A part that fails starts again; one that ends
    with code 0 is done. Returns when all are done. Raises UserError if a part ends with an error that only
    the user can correct."""
    start = spawn or start_swarmnet
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(_keep_running(part, tell, start), name=part.name)
    except* UserError as errors:
        raise errors.exceptions[0] from None


async def _keep_running(part: HostedPart, tell: Tell, start: Spawn) -> None:
    loop, wait = asyncio.get_running_loop(), FIRST_WAIT_SECONDS
    while True:
        began = loop.time()
        process = await start(part.arguments)
        try:
            await _repeat_lines(part, process, tell)
            code = await process.wait()
        finally:
            await _leave(part, process, tell)
        if code == 0:
            tell(f"[{part.name}] is done")
            return
        if code == USER_ERROR:
            raise UserError(f"the {part.name} cannot run: its error stands above; correct it and call again")
        if loop.time() - began > STEADY_SECONDS:
            wait = FIRST_WAIT_SECONDS
        tell(f"[{part.name}] ended with code {code}; starts again in {wait:g} s")
        await asyncio.sleep(wait)
        wait = min(LONGEST_WAIT_SECONDS, 2 * wait)


async def _repeat_lines(part: HostedPart, process: Process, tell: Tell) -> None:
    """Tell each line that the process writes to standard error, until it closes it."""
    assert process.stderr is not None, "start_swarmnet asks for a pipe"
    async for line in process.stderr:
        tell(f"[{part.name}] {line.decode(errors='replace').rstrip()}")


async def _leave(part: HostedPart, process: Process, tell: Tell) -> None:
    """Ask the process to leave, tell what it writes, and kill it after LEAVE_SECONDS. Nothing happens if it
    has ended."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            await _repeat_lines(part, process, tell)
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
