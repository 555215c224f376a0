"""What a crowd of keys that nobody invited costs eight honest peers: real workers on a clock that jumps.

Every key has a record in the directory, greets every honest peer, answers when it is dialled, beats as long
as it is linked and tells of another of its kind. None of them works. Real are the workers and the signatures;
stubs are the tensors and the lines, so decisions are measured, not bandwidth. Times in virtual seconds.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.lab.faults.play import small_manifest
from peers.lab.world.gated_clock import GatedLoop
from peers.lab.world.world import Member, World
from protocols.errors import WireError
from protocols.messages.table import Beat, Hello, Known, Lane, Message, PeerRecord
from protocols.ports import Link
from protocols.signed.envelope import run_bytes
from protocols.signed.identity import Identity
from protocols.signed.records import seal_record
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import WIRE_VERSION

HONEST = 8
QUIET_SECONDS = 8.0
"""Until the honest have found one another and train."""
ENTRY_SECONDS = 4.0
"""In which the crowd comes."""
WATCHED_SECONDS = 12.0
NETWORKS = 16
"""Of the crowd where it is spread: /24 networks that somebody rents for a day."""


@dataclass(frozen=True, slots=True)
class Row:
    """One crowd. Figures of honest peers: the largest of all, at the end."""

    keys: int
    networks: int
    commits: int
    """Microbatches of honest peers in WATCHED_SECONDS."""
    rounds: int
    """Settled meanwhile."""
    join_seconds: float
    """Until a newcomer that comes behind the crowd is in step; infinite: not within WATCHED_SECONDS."""
    honest_links: int
    """The fewest links to honest peers that one of them has."""
    known: int
    links: int
    greeted: int
    kept_bytes: int
    """Of what a peer keeps of others: records, greetings, lanes (`sys.getsizeof`, all through)."""
    votes: int
    """Contributions in settled sets that no honest peer made."""
    processor_seconds: float
    """Of the whole play, the crowd's own work in it."""


class Key:
    """One false peer. `Receiver` that answers nothing."""

    def __init__(self, world: World, number: int, network: int, told: Sequence[bytes]) -> None:
        self.world = world
        self.identity = Identity.from_seed(f"false {number}".encode())
        self.told = list(told)
        self.transport = world.network.transport(self.identity.peer_id)
        self.transport.listen(self)
        address = f"/ip4/8.8.{network}.{number % 250 + 1}/tcp/{1024 + number % 60000}"
        record = PeerRecord(self.identity.peer_id, 0, "worker", [address], 0, 0.0, "0")
        now = 1e6 + world.loop.time()
        self.record = seal_record(self.identity, world.signed.run_id, record, now)
        self.links: dict[PeerId, Link] = {}
        self.beats = 0
        self.heard = False
        """Whether somebody has linked to it."""

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        self.heard = True

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None: ...

    def refused(self, peer: PeerId, code: str, reason: str) -> None: ...

    async def call(self, target: PeerId) -> None:
        """Greet it, if no link to it stands; beat."""
        link, self.beats = self.links.get(target), self.beats + 1
        try:
            if link is None or link.closed:
                link = self.links[target] = await self.transport.open(target, "group", 5.0)
                link.post(Hello(WIRE_VERSION, run_bytes(self.world.signed.run_id), self.record, b""))
                link.post(Known(self.told))
            link.post(Beat(self.beats, -1, 0.0, 0, False, 0, 0.0, 0, True, -1))
        except WireError:
            self.links.pop(target, None)


async def _crowd(world: World, keys: int, networks: int, targets: Sequence[PeerId]) -> None:
    """They come one after another, and call again once a second."""
    crowd: list[Key] = []
    began = world.loop.time()
    stage = world.network.records.setdefault((world.signed.run_id, 0), {})
    while True:
        due = min(keys, int(keys * (world.loop.time() - began + 1.0) / ENTRY_SECONDS))
        while len(crowd) < due:
            key = Key(world, len(crowd), len(crowd) % networks, [other.record for other in crowd[-1:]])
            stage[key.identity.peer_id] = key.record
            crowd.append(key)
        for key in crowd:
            for target in targets:
                if key.heard or target not in key.links:  # To who does not answer it has nothing more to say.
                    await key.call(target)
        await asyncio.sleep(1.0)


async def _play(keys: int, networks: int, honest_peers: int, folder: Path) -> Row:
    began = time.process_time()
    world = World(small_manifest(1, honest_peers, None, 1), 1, folder)
    for number in range(honest_peers):
        world.start(f"p{number}", 0)
    await asyncio.sleep(QUIET_SECONDS)
    honest = [member.peer for member in world.living()]
    crowd = asyncio.create_task(_crowd(world, keys, networks, honest))
    await asyncio.sleep(ENTRY_SECONDS)
    since = world.loop.time()
    newcomer = world.start("newcomer", 0)
    await asyncio.sleep(WATCHED_SECONDS)
    if crowd.done():
        crowd.result()
    crowd.cancel()
    row = _seen(world, keys, networks, since, newcomer, [*honest, newcomer.peer], began)
    await world.close()
    return row


def _seen(
    world: World, keys: int, networks: int, since: float, newcomer: Member, honest: Sequence[PeerId],
    began: float,
) -> Row:  # fmt: skip
    notes = [note for note in world.notes if note.time >= since]
    joined = [note.time - since for note in notes if note.name == newcomer.name and note.event == "in_step"]
    made = {note.fields["id"] for note in world.notes if note.event == "made"}
    settled = [note for note in notes if note.event == "settled"]
    foreign = {name for note in settled for name in note.fields["ids"]} - made
    members = [member for member in world.living() if member.worker.neighbourhood is not None]
    kept = [_kept(member, honest) for member in members]
    most = [max(each[place] for each in kept) for place in range(5)]
    return Row(
        keys, networks, sum(note.event == "committed" and note.name != newcomer.name for note in notes),
        len({note.fields["round"] for note in settled}), min(joined, default=float("inf")),
        min(each[0] for each in kept), most[1], most[2], most[3], most[4], len(foreign),
        time.process_time() - began,
    )  # fmt: skip


def _kept(member: Member, honest: Iterable[PeerId]) -> tuple[int, int, int, int, int]:
    """Links to honest peers, known peers, links, greetings, bytes."""
    around = member.worker.neighbourhood
    assert around is not None
    known = around.known()
    linked = {peer for peer, of in known.items() if of.linked}
    sizes = _deep_bytes([around.membership.peers, around.greeted, around.membership.budget])
    return len(linked & set(honest)), len(known), len(linked), len(around.greeted), sizes


def _deep_bytes(what: object, seen: set[int] | None = None) -> int:
    """Of an object and all that it holds, each once."""
    seen = set() if seen is None else seen
    if id(what) in seen:
        return 0
    seen.add(id(what))
    held: list[object] = []
    if isinstance(what, dict):
        held = [*what.keys(), *what.values()]
    elif isinstance(what, (list, tuple, set, frozenset)):
        held = list(what)
    else:
        held = [getattr(what, name) for name in getattr(type(what), "__slots__", ()) if hasattr(what, name)]
        held += list(getattr(what, "__dict__", {}).values())
    return sys.getsizeof(what) + sum(_deep_bytes(each, seen) for each in held)


def bench(crowds: Sequence[int], networks: int = 1, honest: int = HONEST) -> list[Row]:
    """Each crowd in a world of its own, from one seed."""
    rows = []
    for keys in crowds:
        with (
            tempfile.TemporaryDirectory(prefix="swarmnet-crowd-") as folder,
            asyncio.Runner(loop_factory=GatedLoop) as runner,
        ):
            rows.append(runner.run(_play(keys, networks, honest, Path(folder))))
    return rows


def render(rows: Sequence[Row]) -> str:
    lines = [
        "| keys | networks | microbatches | rounds | newcomer in step, s | links to honest, fewest | known "
        "| links | greetings | kept, kB | votes | processor, s |",
        "|" + "---:|" * 12,
    ]
    lines += [
        f"| {row.keys} | {row.networks} | {row.commits} | {row.rounds} | {row.join_seconds:.1f} "
        f"| {row.honest_links} | {row.known} | {row.links} | {row.greeted} | {row.kept_bytes / 1000:.0f} "
        f"| {row.votes} | {row.processor_seconds:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)
