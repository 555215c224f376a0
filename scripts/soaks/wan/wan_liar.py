"""Newcomers to a stage of four holders of which one lies, in memory, with the real worker.

    scripts/soak wan liar [--joins 100 --seed 0]

The lies, one per join in turn: wrong chunks; another state under a root of its own; the true digest over a
list of other chunks; silence; denial of every chunk. Needs no network and no root.
"""

import asyncio
import hashlib
from collections import Counter
from dataclasses import replace

import msgspec
from model_sizes import model_shape
from swarm import Swarm, shared_rounds, tiny_manifest

from peers.lab.world.virtual_time import run
from peers.state.snapshot_store import Snapshot, Snapshots
from protocols.signed.envelope import EnvelopeKind, seal
from swarmnet.run.schema import Rounds
from swarmnet.snapshots.fetch import chunk_bytes

LIES = ("wrong chunks", "another state", "other chunks", "silence", "denial")
MODEL = model_shape(width=64, layers=4, heads=4, kv_heads=4, inner=192, max_position_embeddings=64)
"""Stage 1 takes 8 chunks."""
WARM_ROUNDS = 20
"""So many settled rounds that a newcomer must fetch a snapshot: the sets of the last 16 are kept."""
JOIN_SECONDS = 60.0
MICROBATCH_SECONDS = 0.1
"""At the origin: what is trained while somebody joins takes most of the computing."""


def false_snapshots(worker, lie):
    """What the liar offers instead of its snapshots."""
    kept = Snapshots(
        identity=worker.context.identity,
        run_id=worker.context.signed.run_id,
        stage=worker.stage,
        rules=worker.context.manifest.rounds,
    )
    for snapshot in reversed(worker.services.snapshots.held):
        weights = snapshot.weights()
        if lie == "another state":
            kept.hold(replace(weights, units=weights.units + 1))
        else:
            kept.held = (other_chunks(worker, snapshot), *kept.held)
    return kept.held


def other_chunks(worker, snapshot):
    """The true digest, over the hashes of chunks that do not make it up."""
    data = bytes([snapshot.data[0] ^ 1]) + snapshot.data[1:]
    size = chunk_bytes(len(data))
    hashes = [hashlib.sha256(data[at : at + size]).digest() for at in range(0, len(data), size)]
    root = msgspec.structs.replace(snapshot.root, chunks=hashes)
    signed = seal(
        worker.context.identity,
        worker.context.signed.run_id,
        EnvelopeKind.SNAPSHOT,
        worker.stage,
        root.round,
        root.round,
        msgspec.msgpack.encode(root),
    )
    return Snapshot(root, signed, data)


def corrupt(worker, lie):
    """Make this worker tell `lie` to whoever fetches the state from it; other than that it is honest."""
    states = worker.services.snapshot_service
    state, chunk, serve = type(states)._make_offer, type(states).chunk, type(states)._send_chunk
    states.chunk, states._send_chunk, states._make_offer = (
        lambda *asked: chunk(states, *asked),
        lambda *asked: serve(states, *asked),
        lambda: state(states),
    )
    if lie == "wrong chunks":

        def wrong(*asked):
            data = chunk(states, *asked)
            return data and memoryview(bytes(data[:-1]) + bytes([data[-1] ^ 1]))

        states.chunk = wrong
    elif lie == "silence":
        states._send_chunk = lambda *_: None
    elif lie == "denial":
        states.chunk = lambda *_: None
    else:
        held = false_snapshots(worker, lie)
        offered = [snapshot.signed for snapshot in held]
        by_digest = {snapshot.root.digest: snapshot for snapshot in held}
        states._make_offer = lambda: msgspec.structs.replace(state(states), roots=offered)
        states.chunk = lambda digest, index: (
            by_digest[digest].chunk(index) if digest in by_digest else chunk(states, digest, index)
        )


async def liar(_folder, arguments):
    """For scripts/soak."""
    found = await asyncio.to_thread(joins, arguments.joins, arguments.seed)
    return {
        "joins": len(found),
        "honest": sum(honest for _, honest, _, _ in found),
        "lies": dict(Counter(lie for lie, *_ in found)),
        "chunks_refused": sum(refused for _, _, refused, _ in found),
        "max_seconds": {
            kind: max((seconds for lie, _, _, seconds in found if lie == kind), default=None) for kind in LIES
        },
    }


def joins(count, seed=0):
    """Play them; [(lie, ended with the honest digest, chunks refused, seconds), ...]."""
    rounds = Rounds(
        global_batch_tokens=256,
        max_seconds=5.0,
        contribution_timeout_seconds=1.0,
        finality_timeout_seconds=3.0,
        snapshot_interval=4,
    )
    swarm = Swarm(tiny_manifest(stages=(1, 3), model=MODEL, rounds=rounds), seed)
    found = []

    async def story():
        swarm.open()
        swarm.start("origin", 0, in_flight=1, compute=lambda _kind: MICROBATCH_SECONDS)
        for name in ("a", "b", "c", "liar"):
            swarm.start(name, 1)
        await swarm.until(lambda: settled(swarm, "a") >= WARM_ROUNDS, 300.0)
        for number in range(count):
            lie, name = LIES[number % len(LIES)], f"newcomer-{number}"
            corrupt(swarm.members["liar"].worker, lie)
            found.append((lie, *await join(swarm, name)))
        await swarm.close()

    run(story())
    assert shared_rounds(swarm) > 0
    return found


def settled(swarm, name):
    return swarm.rounds().get(name, (-1, -1))[1]


async def join(swarm, name):
    began = swarm.loop.time()
    newcomer = swarm.start(name, 1)

    def shared():
        mine, theirs = (
            {note.fields["round"]: note.fields["digest"] for note in swarm.of("settled", one)}
            for one in (name, "a")
        )
        return [mine[round] == theirs[round] for round in mine.keys() & theirs.keys()]

    await swarm.until(shared, JOIN_SECONDS)
    seconds = swarm.loop.time() - began
    honest = all(shared()) and bool(swarm.of("fetched", name))
    refused = newcomer.worker.services.snapshot_service.chunks_refused
    await swarm.leave(name)
    return honest, refused, round(seconds, 2)
