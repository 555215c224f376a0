"""Experts whose holders tokens travel to: they learn, replicas stay equal, and who is lost is gone around."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swarm import Swarm, expert_manifest, nothing_is_committed_twice, shared_rounds
from watched import Watched, moved

from peers.lab.world.virtual_time import run
from swarmnet.run.manifest import Sync

TRUNKS = {"a": 0, "b": 0, "d": 1, "e": 1}
HOLDERS = {"p": 2, "q": 2, "r": 3, "s": 4, "t": 4, "u": 5}
"""Groups 0 and 1 of the experts of stage 0, then of stage 1."""


def routed_manifest(**sync):
    manifest = expert_manifest(count=4, active=2, groups=2, form="routed")
    return replace(manifest, stages=(2, 1), sync=replace(manifest.sync, **sync))


def start(swarm, **more):
    swarm.open()
    for name, stage in {**TRUNKS, **HOLDERS}.items():
        swarm.start(name, stage, in_flight=2, **more.get(name, {}))


def given_up(swarm):
    return len(swarm.of("gave_up_experts"))


def bytes_are_as_by_the_formula(swarm):
    """Of a token and layer: rows out twice, a gradient out; what is said and a gradient back."""
    manifest = swarm.signed.manifest
    for stage, layers in enumerate(manifest.stages):
        workers = [swarm.members[name].worker for name, of in TRUNKS.items() if of == stage]
        tokens = sum(worker.data.ledger.tokens for worker in workers)
        each = tokens * layers * manifest.model.experts.active * manifest.model.width * 2
        for counted, parts in (("sent", 3), ("received", 2)):
            told = sum(getattr(worker.neighbourhood.traffic, counted)["experts"] for worker in workers)
            assert told == pytest.approx(parts * each, rel=0.1), "headers and what is under way are the rest"


VOTES = Sync(learning_rate=8e-3, warmup_rounds=1, decay_rounds=1000)


@pytest.mark.parametrize("sync", [{}, {"exchange": "sharded", "shards": 3}, {"method": "demo-votes"}])
def test_a_swarm_without_experts_in_its_stages_learns_by_those_of_others(sync):
    manifest = routed_manifest(**sync)
    if sync.get("method") == "demo-votes":
        manifest = replace(manifest, sync=VOTES)
    swarm = Swarm(manifest)

    async def story():
        start(swarm)
        await swarm.until(lambda: swarm.committed(0) >= 220, 240.0)
        assert given_up(swarm) < 10
        bytes_are_as_by_the_formula(swarm)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    losses = swarm.losses(0)
    assert sum(losses[-40:]) / 40 < sum(losses[:20]) / 20 - 0.6
    for stage in range(manifest.all_stages):
        rounds = [len(of_peer) for of_peer in swarm.digests(stage).values()]
        assert min(rounds) > 5, f"stage {stage} settles rounds"
    assert shared_rounds(swarm) > 30
    for name in HOLDERS:
        ledger = swarm.members[name].worker.data.ledger
        assert ledger.tokens > 0
        assert ledger.committed > 50


def test_whoever_loses_its_only_holder_goes_on_without_and_takes_in_one_that_has_its_checkpoint(tmp_path):
    swarm = Watched(routed_manifest())
    disk, none = tmp_path / "r" / "checkpoints", []

    def told(name):
        """Of experts without a peer, in order."""
        notes = [note for note in swarm.notes if note.name == name]
        said = [note for note in notes if note.event in ("experts_missing", "experts_back")]
        return [(note.event, note.fields.get("stages", none)) for note in said]

    async def story():
        start(swarm, r={"checkpoints": disk, "checkpoint_seconds": 2.0})
        await swarm.until(lambda: swarm.committed(0) >= 150 and [*disk.glob("stage-3-*")], 120.0)
        before = len(told("a"))
        await swarm.crash("r")
        await swarm.until(lambda: len(told("a")) > before, 20.0)
        since = swarm.committed(0)
        await swarm.until(lambda: swarm.committed(0) >= since + 60, 60.0)
        assert told("a")[before:] == [("experts_missing", [3])]
        swarm.observers["a"].look()
        assert "experts_least_holders" not in moved(swarm.metrics["a"]), "one group has nobody"
        assert "experts_least_holders" in moved(swarm.metrics["d"])
        swarm.start("n", 3, in_flight=2, checkpoints=disk)
        await swarm.until(lambda: told("a")[-1] == ("experts_back", []), 60.0)
        await swarm.until(lambda: swarm.of("made", "n"), 60.0)
        since = swarm.committed(0)
        await swarm.until(lambda: swarm.committed(0) >= since + 70, 120.0)
        await swarm.stop_watching()
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    seen = moved(swarm.metrics["a"])
    outcomes = ("wanted", "answered", "given_up")
    assert {f"experts_calls_total {outcome}" for outcome in outcomes} <= seen | moved(swarm.metrics["b"])
    assert {"experts_least_holders", "experts_tokens_total 0", "experts_tokens_total 3"} <= seen
    assert "experts_group" in moved(swarm.metrics["n"]), "group 1"
    assert ("experts_missing", [3]) not in told("d"), "nobody else is concerned"
    assert "restored" in dict(swarm.members["n"].said), "it has the weights of the one that was lost"
    losses = swarm.losses(0)
    assert sum(losses[-40:]) / 40 < sum(losses[:40]) / 40 - 0.3
    shared_rounds(swarm)


def test_a_newcomer_gets_a_groups_experts_from_the_one_that_holds_them_and_shares_the_work():
    swarm = Swarm(routed_manifest())

    async def story():
        start(swarm)
        await swarm.until(lambda: swarm.committed(0) >= 200, 120.0)
        swarm.start("n", 3, in_flight=2)
        await swarm.until(lambda: swarm.of("made", "n"), 60.0)
        await swarm.until(lambda: shared_rounds(swarm) > 30, 60.0)
        before = len(swarm.of("experts_missing", "a"))
        await swarm.leave("r")
        since = swarm.committed(0)
        await swarm.until(lambda: swarm.committed(0) >= since + 60, 60.0)
        assert len(swarm.of("experts_missing", "a")) == before, "who leaves is gone around"
        await swarm.close()

    run(story())
    began = swarm.of("in_step", "n")[0].time
    heard = [note.fields["round"] for note in swarm.of("took", "n") if note.time <= began]
    assert heard == list(range(len(heard))), "it makes their weights of all that was contributed"
    assert len(heard) > 5
    assert swarm.digests(3)["n"].keys() & swarm.digests(3)["r"].keys()
    nothing_is_committed_twice(swarm)
    shared_rounds(swarm)
