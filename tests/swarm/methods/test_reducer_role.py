"""Peers of role `reducer` in a swarm of real models: they train on nothing, reduce all shards but one, and
hold the settled weights of the others to the bit. Killed or lying, they cost time only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clocks import on_virtual_clock
from swarm import Swarm, nothing_is_committed_twice, sharded_manifest

from peers.config.errors import UserError
from protocols.signed.records import open_record
from swarmnet.rounds.result_table import WORKERS_SHARD

SHARDS = 6
MANIFEST = sharded_manifest((2, 1), shards=SHARDS, global_batch_tokens=256)
WORKERS = {"a": 0, "b": 0, "c": 1, "d": 1}


def reduced_by(swarm: Swarm, name: str, since: int = 0) -> set[int]:
    """The shards that a peer has reduced from a round on."""
    notes = [note for note in swarm.of("reduced", name) if note.fields["round"] >= since]
    return {shard for note in notes for shard in note.fields["shards"]}


def settled_alike(swarm: Swarm, stage: int) -> int:
    """The number of rounds that peers of a stage have settled; each of them with equal weights."""
    by_round: dict[int, set[str]] = {}
    for name in swarm.members:
        if swarm.members[name].worker.stage == stage:
            for note in swarm.of("settled", name):
                by_round.setdefault(note.fields["round"], set()).add(note.fields["digest"])
    assert all(len(digests) == 1 for digests in by_round.values())
    return len(by_round)


async def begin(swarm: Swarm, helpers: dict[str, int | None]) -> None:
    swarm.open()
    for name, stage in WORKERS.items():
        swarm.start(name, stage, in_flight=2)
    for name, stage in helpers.items():
        swarm.start(name, stage, reduces_only=True)
    count = len(WORKERS) + len(helpers)
    await swarm.until(lambda: len(swarm.of("in_step")) == count, 30.0)


async def rounds_pass(swarm: Swarm, rounds: int) -> int:
    """Wait until all workers have settled so many rounds more; returns the round after those known before."""
    first = max(swarm.rounds()[name][0] for name in swarm.living()) + 1
    names = [name for name in WORKERS if name in swarm.living()]
    await swarm.until(lambda: min(swarm.rounds()[name][1] for name in names) >= first + rounds, 120.0)
    return first


@on_virtual_clock
async def test_a_reducer_trains_on_nothing_reduces_all_shards_but_one_and_says_so():
    swarm = Swarm(MANIFEST)
    await begin(swarm, {"first": 0, "last": 1})
    first = await rounds_pass(swarm, 6)
    for name, others in (("first", ("a", "b")), ("last", ("c", "d"))):
        assert reduced_by(swarm, name, first) == set(range(SHARDS)) - {WORKERS_SHARD}
        assert set().union(*(reduced_by(swarm, other, first) for other in others)) == {WORKERS_SHARD}
        worker = swarm.members[name].worker
        pipeline = worker.services.pipeline_service
        assert not swarm.of("contribution_made", name)
        assert (pipeline.ledger.tokens, pipeline.origin.text) == (0, None)
        record = open_record(worker.services.links.record, swarm.signed.run_id).record
        assert (record.role, record.tokens_per_second, record.tokens) == ("reducer", 0.0, 0)
    assert min(settled_alike(swarm, stage) for stage in (0, 1)) >= 6
    await swarm.close()
    nothing_is_committed_twice(swarm)


@on_virtual_clock
async def test_when_the_reducer_dies_workers_reduce_and_when_it_is_back_they_stop():
    swarm = Swarm(MANIFEST)
    await begin(swarm, {"helper": 0})
    await rounds_pass(swarm, 3)
    await swarm.crash("helper")
    first = await rounds_pass(swarm, 8)
    assert set().union(*(reduced_by(swarm, name, first) for name in "ab")) == set(range(SHARDS))
    swarm.start("again", None, reduces_only=True)
    await swarm.until(lambda: swarm.of("in_step", "again"), 60.0)
    assert swarm.members["again"].worker.stage == 0, "the dead one does not count"
    first = await rounds_pass(swarm, 6)
    assert reduced_by(swarm, "again", first + 1) == set(range(SHARDS)) - {WORKERS_SHARD}
    assert set().union(*(reduced_by(swarm, name, first + 1) for name in "ab")) == {WORKERS_SHARD}
    settled_alike(swarm, 0)
    await swarm.close()
    nothing_is_committed_twice(swarm)


@pytest.mark.soak
@on_virtual_clock
async def test_a_reducer_that_lies_is_excluded_and_workers_reduce_again():
    swarm = Swarm(MANIFEST)
    await begin(swarm, {"liar": 0})
    await rounds_pass(swarm, 2)
    reduced = swarm.members["liar"].worker.services.part.method.reduced
    honest_sums = reduced.sums

    def sums(shard, slices):
        published = honest_sums(shard, slices)
        return published[:-1] + bytes([published[-1] ^ 1])

    reduced.sums = sums
    workers = [swarm.members[name].worker for name in "ab"]
    await swarm.until(lambda: all(worker.services.audits.convicted for worker in workers), 60.0)
    first = await rounds_pass(swarm, 4)
    assert set().union(*(reduced_by(swarm, name, first) for name in "ab")) == set(range(SHARDS))
    assert not reduced_by(swarm, "liar", first)
    await swarm.leave("a", "b", "c", "d")


@on_virtual_clock
async def test_a_reducer_leaves_a_run_without_reducers_with_a_reason():
    everyone = replace(MANIFEST, sync=replace(MANIFEST.sync, topology="all-gather"))
    swarm = Swarm(everyone)
    swarm.open()
    member = swarm.start("helper", 0, reduces_only=True)
    with pytest.raises(UserError, match="no reducers"):
        await member.task
