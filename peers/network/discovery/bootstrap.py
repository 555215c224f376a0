"""Find the run: try bootstraps and remembered peers until one answers, and get the manifest by its id.

A bootstrap is a peer whose address the user configured. The manifest is the run's signed file; the run's id
is its hash. The directory is the DHT."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from peers.config.atomic_files import write_atomically
from peers.config.errors import UnknownRun
from peers.config.peer_file import run_id_of
from peers.config.run_file import (
    OtherVersion,
    RunFileError,
    SignedManifest,
    from_wire,
    load_signed,
    published_text,
)
from peers.network.counted_directory import Joinable
from peers.telemetry.log_events import Notify
from protocols.dht.directory import split_multiaddr
from protocols.errors import Unreachable, WireError
from protocols.ports import Directory
from swarmnet.identifiers import PeerId, RunId

ANSWER_SECONDS = 10.0
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 15.0
"""Maximum pause between attempts. libp2p's own dial back-off grows if it is asked more often after failures.
"""
FIRST_WORD_SECONDS = 5.0
LONGEST_SILENCE_SECONDS = 600.0
"""Maximum seconds between two messages that no peer answers."""
UNKNOWN_SECONDS = 60.0
"""Seconds to look for a manifest. One in the DHT is found within a second; a lab starts within a minute."""
REMEMBERED_PEERS = 64


class PeerCache:
    """Addresses of peers of this run, stored on disk for a restart when every bootstrap is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[str]:
        """Return multiaddrs, newest first. An unreadable file counts as empty."""
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return []
        addresses = content.get("addresses") if isinstance(content, dict) else None
        if not isinstance(addresses, list):
            return []
        return [address for address in addresses if _leads_to_a_peer(address)]

    def write(self, peers: Iterable[tuple[PeerId, Sequence[str]]]) -> None:
        """Store up to two addresses of each peer, before those in the file, at most `REMEMBERED_PEERS` in
        all. Invalid addresses are left out, because peers may announce anything."""
        new = [f"{address}/p2p/{peer}" for peer, addresses in peers for address in addresses[:2]]
        new = [address for address in new if _leads_to_a_peer(address)]
        addresses = list(dict.fromkeys([*new, *self.read()]))[:REMEMBERED_PEERS]
        write_atomically(self.path, json.dumps({"addresses": addresses}, indent=1).encode())


def _leads_to_a_peer(address: object) -> bool:
    try:
        return isinstance(address, str) and bool(split_multiaddr(address))
    except ValueError:
        return False


class _WaitReport:
    """Decides when to report that no peer answers: a new reason at once, elapsed time ever less often."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._reported = ""
        self._next = 0.0

    def line(self, reason: str, now: float) -> str:
        """Return the next message for the user, or an empty string if none is due. `reason` says why the last
        attempt failed; `now` is in seconds. The pauses between messages double up to the maximum."""
        passed = now - self._since
        if reason != self._reported:
            self._reported = reason
            self._next = passed + FIRST_WORD_SECONDS
            return f"{reason}; asks again until one does (Ctrl+C stops)"
        if passed < self._next:
            return ""
        self._next = passed + min(passed, LONGEST_SILENCE_SECONDS)
        return f"still no answer, {passed:.0f} s"


async def join_directory(
    directory: Joinable,
    bootstraps: Sequence[str],
    cache: PeerCache,
    notify: Notify,
    nearby: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Try all known addresses again and again, with growing pauses, and return when one answers. `cache` has
    those of remembered peers. `nearby` returns multiaddrs found meanwhile on the local network. `notify`
    reports failures and the result to the user."""
    pause, wait_report = FIRST_PAUSE_SECONDS, _WaitReport(asyncio.get_running_loop().time())
    while True:
        tried = list(dict.fromkeys([*bootstraps, *nearby(), *cache.read()]))
        try:
            answered = await directory.bootstrap(tried, ANSWER_SECONDS)
        except Unreachable as error:
            if line := wait_report.line(str(error), asyncio.get_running_loop().time()):
                notify("unreachable", line)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)
            continue
        notify("joined", f"joined the swarm: {answered} of {len(tried)} known peers answered")
        return


def manifest_here(run: str, kept: Path) -> SignedManifest | None:
    """Return the run's manifest from this machine. `run` is the path of a published file, or a run id: then
    the file `kept`, from an earlier start, is read. Returns None for an id if `kept` does not exist. Raises
    RunFileError if a file is not what it claims."""
    run_id = run_id_of(run)
    if run_id is None:
        return load_signed(Path(run))
    if not kept.exists():
        return None
    try:
        return load_signed(kept, run_id)
    except RunFileError as error:
        reason = "remove that file, or give this peer another state folder"
        raise RunFileError(f"{error}; {reason}") from None


async def find_manifest(run: str, directory: Directory, kept: Path, notify: Notify) -> SignedManifest:
    """Return the run's manifest from this machine, or else look for it in the directory, at most
    `UNKNOWN_SECONDS`, and store it in the file `kept`. `run` is a run id or the path of a published file.
    Raises OtherVersion if it is of another version of this program, and UnknownRun if it is not found."""
    local = await asyncio.to_thread(manifest_here, run, kept)
    if local is not None:
        return local
    run_id = RunId(run)
    pause, clock = FIRST_PAUSE_SECONDS, asyncio.get_running_loop().time
    deadline = clock() + UNKNOWN_SECONDS
    while True:
        try:
            data = await directory.get_manifest(run_id, ANSWER_SECONDS)
            if data is not None:
                signed = from_wire(data, run_id)
                write_atomically(kept, published_text(signed).encode())
                return signed
            reason = f"no peer knows the run {run_id} yet"
        except OtherVersion:
            raise
        except (WireError, RunFileError) as error:
            reason = str(error)
        left = deadline - clock()
        if left <= 0:
            raise UnknownRun(
                f"{reason}; asked for {UNKNOWN_SECONDS:.0f} s: compare the id with what the run's owner "
                "published, and ask for a bootstrap of that run"
            )
        pause = min(pause, left)
        notify(
            "no_manifest", f"{reason}; asking again in {pause:.0f} s, for {left:.0f} s more (Ctrl+C stops)"
        )
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)
