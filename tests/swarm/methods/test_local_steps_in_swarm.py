"""Six workers whose peers step by themselves: replicas stay equal, newcomers work in the shadow at first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clocks import on_virtual_clock
from swarm import Swarm, nothing_is_committed_twice, shared_rounds, tiny_manifest

from peers.lab.world.virtual_time import run
from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.rounds.result_table import read_head
from swarmnet.run.schema import Sync

SIX = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 2}
STEP_TOKENS = 64
"""Two microbatches: a round of 512 tokens is four steps of each of two peers."""
SHADOW_STEPS = 5


def local_manifest(method="local-steps", rate=1e-2, **keys):
    manifest = tiny_manifest()
    sync = Sync(
        method=method, learning_rate=rate, warmup_rounds=1, decay_rounds=1000,
        inner_batch_tokens=STEP_TOKENS, optimizer_warmup_steps=SHADOW_STEPS, **keys,
    )  # fmt: skip
    return replace(manifest, sync=sync, rounds=replace(manifest.rounds, global_batch_tokens=512))


@on_virtual_clock
async def test_a_swarm_of_own_steps_learns_and_a_newcomer_is_counted_once_it_is_warm():
    swarm = Swarm(local_manifest())
    warm: dict[str, int] = {}

    def look(note):
        if note.name == "g" and note.event == "contribution_made" and not warm:
            warm["left"] = swarm.members["g"].worker.services.round_service.work.source.warmup_steps

    swarm.on_note = look
    swarm.open()
    for name, stage in SIX.items():
        swarm.start(name, stage, in_flight=2)
    await swarm.until(lambda: swarm.committed(0) >= 120, 60.0)
    await swarm.crash("c")
    newcomer = swarm.start("g")
    await swarm.until(lambda: swarm.of("in_step", "g"), 15.0)
    assert newcomer.worker.services.round_service.work.source.warmup_steps == SHADOW_STEPS
    await swarm.until(lambda: swarm.of("contribution_made", "g"), 30.0)
    first = swarm.of("contribution_made", "g")[0].fields["round"]
    settled = swarm.rounds
    await swarm.until(lambda: min(round for _, round in settled().values()) > first + 8, 60.0)
    await swarm.close()
    nothing_is_committed_twice(swarm)
    assert warm == {"left": 0}, "nothing of a newcomer is counted before it is warm"
    assert shared_rounds(swarm) > 30
    taken = {note.fields["id"] for note in swarm.of("contribution_made", "g")}
    counted = {identity for note in swarm.of("settled", "d") for identity in note.fields["ids"]}
    assert taken & counted, "what the newcomer made counts"
    losses = swarm.losses(0)
    assert sum(losses[:20]) / 20 > 5.2
    assert sum(losses[-20:]) / 20 < 4.6


@on_virtual_clock
async def test_a_newcomer_takes_up_the_groups_momentum_with_its_weights():
    """A tenth of the rate: DiLoCo's momentum makes seven of each step."""
    manifest = local_manifest("diloco", rate=1e-3)
    rules = replace(manifest.rounds, global_batch_tokens=256, snapshot_interval=2, window=2)
    swarm = Swarm(replace(manifest, stages=(3,), rounds=rules))
    swarm.open()
    for name in ("a", "b"):
        swarm.start(name, 0)
    enough = kept_rounds(rules) + 2  # So that the first sets are gone.
    await swarm.until(lambda: min([s for _, s in swarm.rounds().values()], default=-1) >= enough, 60.0)
    newcomer = swarm.start("g", 0)
    await swarm.until(lambda: swarm.of("contribution_made", "g"), 30.0)
    first = swarm.of("contribution_made", "g")[0].fields["round"]
    await swarm.until(lambda: min(round for _, round in swarm.rounds().values()) > first + 2, 60.0)
    replica = newcomer.worker.services.round_service.work.replica
    assert replica.settled_units()[replica.size :].any()
    await swarm.close()
    nothing_is_committed_twice(swarm)
    assert swarm.of("fetched", "g"), "it was a snapshot that it began from"
    assert shared_rounds(swarm) >= 8
    losses = swarm.losses(0)
    assert sum(losses[-10:]) / 10 < sum(losses[:10]) / 10 - 0.2


@on_virtual_clock
async def test_from_the_seed_nobody_works_in_the_shadow():
    swarm = Swarm(local_manifest())
    swarm.open()
    members = [swarm.start(name, stage, in_flight=2) for name, stage in SIX.items()]
    await swarm.until(lambda: len(swarm.of("in_step")) == len(members), 15.0)
    assert [member.worker.services.round_service.work.source.warmup_steps for member in members] == [0] * 6
    await swarm.close()


SHARDED = local_manifest(topology="sharded-reduce", shards=4)


@pytest.mark.soak
def test_a_swarm_with_reducers_learns_though_one_of_them_crashes_and_a_newcomer_comes():
    swarm = Swarm(SHARDED)
    told: dict[str, set[bytes]] = {}
    """Result -> the contributions that its table names."""

    def look(note):
        if note.event in ("contribution_accepted", "reduced"):
            stored = swarm.members[note.name].worker.services.round_service.store.stored[
                bytes.fromhex(note.fields["id"])
            ]
            table, _ = read_head(stored.payload, SHARDED.sync.shards)
            told[note.fields["id"]] = {one.contribution for one in table.contributors}

    swarm.on_note = look

    def reduces(name):
        """Whether that peer has something to add up of the round under way."""
        one = swarm.members[name]
        current, reducing = (
            one.worker.services.round_service.rounds.current,
            one.worker.services.round_service.rounds.reducing,
        )
        return reducing.knows(current) and one.peer in reducing.reducers(current)

    async def story():
        swarm.open()
        for name, stage in SIX.items():
            swarm.start(name, stage, in_flight=2)
        await swarm.until(lambda: swarm.committed(0) >= 200, 60.0)
        await swarm.until(lambda: reduces("c"), 60.0)
        await swarm.crash("c")
        newcomer = swarm.start("g")
        await swarm.until(lambda: swarm.of("in_step", "g"), 15.0)
        assert newcomer.worker.stage == 1
        assert newcomer.worker.services.round_service.work.source.warmup_steps == SHADOW_STEPS
        await swarm.until(lambda: swarm.of("contribution_made", "g"), 30.0)
        first = swarm.of("contribution_made", "g")[0].fields["round"]
        await swarm.until(lambda: min(round for _, round in swarm.rounds().values()) > first + 8, 60.0)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    assert shared_rounds(swarm) > 30
    assert swarm.of("refused") == []
    settled = {identity for note in swarm.of("settled", "d") for identity in note.fields["ids"]}
    counted = {contribution for identity in settled for contribution in told[identity]}
    made = {
        name: {bytes.fromhex(note.fields["id"]) for note in swarm.of("contribution_made", name)}
        for name in ("c", "d", "g")
    }
    assert made["g"] & counted, "what the newcomer made counts"
    back = {bytes.fromhex(note.fields["id"]) for note in swarm.of("contribution_returned")}
    for name in ("c", "d"):
        assert len(made[name] & counted) > 0.8 * len(made[name] - back)
    losses = swarm.losses(0)
    assert sum(losses[:20]) / 20 > 5.2
    assert sum(losses[-20:]) / 20 < 4.6


@pytest.mark.parametrize("shards", [1, pytest.param(64, marks=pytest.mark.soak)])
@on_virtual_clock
async def test_any_number_of_shards_settles(shards):
    swarm = Swarm(local_manifest(topology="sharded-reduce", shards=shards))
    swarm.open()
    for name, stage in SIX.items():
        swarm.start(name, stage, in_flight=2)
    await swarm.until(lambda: min([s for _, s in swarm.rounds().values()], default=-1) >= 3, 60.0)
    await swarm.close()
    nothing_is_committed_twice(swarm)
    assert shared_rounds(swarm) > 9
    assert swarm.of("refused") == []
