"""Workers whose microbatches may leave a stage out: who is visited, what a death costs, what is refused."""

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import replace

import pytest
from swarm import TINY_MODEL, Swarm, nothing_is_committed_twice, tiny_manifest
from torch import Tensor

from peers.lab.world.virtual_time import run
from swarmnet.identifiers import MicrobatchId
from swarmnet.model.stage_compute import StageCompute
from swarmnet.routing.next_hop import Passage
from swarmnet.routing.skipping import Skipping
from swarmnet.run.path_rules import PathHeader
from swarmnet.run.schema import Paths

ONE_EACH = {"a": 0, "b": 1, "c": 2, "d": 3}


def play(
    story: Callable[[Swarm], Awaitable[None]],
    paths: Paths,
    peers: dict[str, int] = ONE_EACH,
    seed: int = 0,
    stub: bool = False,
) -> Swarm:
    """Stages of one layer."""
    stages = 1 + max(peers.values())
    manifest = tiny_manifest((1,) * stages, model=replace(TINY_MODEL, num_hidden_layers=stages), paths=paths)
    swarm = Swarm(manifest, seed, stub=stub)

    async def whole() -> None:
        swarm.open()
        for name, stage in peers.items():
            swarm.start(name, stage, in_flight=2)
        await story(swarm)
        await swarm.close()

    run(whole())
    nothing_is_committed_twice(swarm)
    return swarm


def commits(swarm: Swarm, name: str, since: float = 0.0) -> set[tuple[str, int]]:
    """Microbatches that this peer committed: origin and counter."""
    return {
        (note.fields["origin"], note.fields["counter"])
        for note in swarm.notes
        if note.name == name and note.event == "committed" and note.time >= since
    }


def waiting(swarm: Swarm, name: str, since: float = 0.0) -> list[tuple[str, list[int] | None]]:
    return [
        (note.event, note.fields.get("stages"))
        for note in swarm.notes
        if note.name == name and note.event in ("waiting", "waiting_over") and note.time >= since
    ]


def test_every_microbatch_leaves_out_one_of_the_middle_stages_and_both_learn():
    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: swarm.committed(0) >= 150, 120.0)

    swarm = play(story, Paths(0.25))
    first, upper, lower, last = (commits(swarm, name) for name in "abcd")
    assert first <= last
    assert not upper & lower, "a microbatch went through more stages than it had to"
    assert first <= upper | lower
    assert min(len(upper), len(lower)) > len(first) / 5
    losses = swarm.losses(0)
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])
    assert not [note for note in swarm.notes if note.event == "refused"]


def test_a_run_begins_whole_and_skips_afterwards(monkeypatch):
    lengths: dict[MicrobatchId, int] = {}
    scales: dict[Hashable, set[float]] = {}
    arrive, forward = Skipping.arrive, StageCompute.forward

    def noted(ways: Skipping, key: MicrobatchId, header: PathHeader) -> Passage:
        if ways.stage == ways.rules.last:
            lengths[key] = len(header.visited)
        return arrive(ways, key, header)

    def scaled(
        stage: StageCompute, key: Hashable, inputs: Tensor, branch_scale: float, tokens_BT: Tensor | None
    ) -> Tensor:
        scales.setdefault(key, set()).add(branch_scale)
        return forward(stage, key, inputs, branch_scale, tokens_BT)

    monkeypatch.setattr(Skipping, "arrive", noted)
    monkeypatch.setattr(StageCompute, "forward", scaled)

    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: swarm.committed(0) >= 150, 120.0)

    swarm = play(story, Paths(0.25, full_path_warmup_rounds=8))
    in_order = [lengths[key] for key in sorted(lengths)]
    change = in_order.index(3)
    assert set(in_order[:change]) == {4}
    assert set(in_order[change:]) == {3}
    whole = {key for key, length in lengths.items() if length == 4}
    assert {tuple(key) for key in whole} <= commits(swarm, "b") & commits(swarm, "c")
    for key in lengths:
        assert scales[key] == ({1.0, 0.5} if key in whole else {1.0}), "the first stage counts whole"
    rounds = [note for note in swarm.notes if note.name == "a" and note.event == "applied"]
    over = next(note.time for note in rounds if note.fields["round"] == 8)
    assert {tuple(key) for key in whole} <= commits(swarm, "a") - commits(swarm, "a", over + 5.0)
    assert not swarm.of("refused")


def test_a_dead_stage_is_left_out_and_when_too_many_are_dead_they_are_waited_for_by_name():
    moments = {}

    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: swarm.committed(0) >= 40, 60.0)
        await swarm.crash("b")
        moments["one dead"] = swarm.loop.time()
        await swarm.during(20.0)
        assert waiting(swarm, "a", moments["one dead"]) == []
        moments["two dead"] = swarm.loop.time()
        await swarm.crash("c")
        await swarm.until(lambda: waiting(swarm, "a", moments["two dead"]), 15.0)
        before = len(commits(swarm, "a"))
        await swarm.during(10.0)
        assert len(commits(swarm, "a")) == before
        moments["one again"] = swarm.loop.time()
        swarm.start("e", 2, in_flight=2)
        await swarm.until(lambda: len(commits(swarm, "a")) > before + 20, 60.0)

    swarm = play(story, Paths(0.25), stub=True)
    between = commits(swarm, "a", moments["one dead"]) - commits(swarm, "a", moments["two dead"])
    assert len(between) > 20
    assert between - commits(swarm, "b") <= commits(swarm, "c")
    assert waiting(swarm, "a", moments["one dead"]) == [("waiting", [1, 2]), ("waiting_over", None)]
    assert len(commits(swarm, "e")) > 10


@pytest.mark.parametrize(
    "lie",
    [
        lambda header: replace(header, hops_left=header.hops_left + 2),
        lambda header: replace(header, visited=(*header.visited[:-1], 2, header.visited[-1])),
        lambda header: PathHeader((0, header.stage), 0),
    ],
)
def test_an_illegal_header_is_refused_by_whoever_gets_it(lie):
    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: len(commits(swarm, "b")) + len(commits(swarm, "c")) >= 10, 60.0)
        ways = swarm.members["a"].worker.services.pipeline_service.ways
        honest = ways.header_for
        ways.header_for = lambda key, stage: lie(honest(key, stage))
        await swarm.during(5.0)
        ways.header_for = honest

    swarm = play(story, Paths(0.25), stub=True)
    liar = swarm.members["a"].peer
    refused = [note.fields["code"] for note in swarm.notes if note.event == "refused"]
    assert refused
    assert set(refused) == {"illegal_path"}
    assert all(note.fields["peer"] == liar for note in swarm.notes if note.event == "refused")
    assert {note.fields["code"] for note in swarm.notes if note.event == "microbatch_refused"} == {
        "illegal_path"
    }


def test_a_peer_killed_while_it_works_costs_one_other_way_per_microbatch():
    held: list[tuple[str, int]] = []

    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: swarm.committed(0) >= 40, 60.0)
        pipeline = swarm.members["b"].worker.services.pipeline_service.pipeline
        await swarm.until(lambda: any(job.phase == "waiting" for job in pipeline.jobs.values()), 30.0)
        held.extend(key for key, job in pipeline.jobs.items() if job.phase != "done")
        await swarm.crash("b")
        await swarm.during(10.0)
        assert swarm.members["a"].worker.services.pipeline_service.ledger.dropped == {}

    swarm = play(story, Paths(0.25), {"a": 0, "b": 1, "c": 1, "d": 2, "e": 2, "f": 3}, stub=True)
    rerouted = [note.fields["counter"] for note in swarm.of("rerouted")]
    assert held
    assert sorted(set(rerouted)) == sorted(rerouted)
    assert {key.counter for key in held} <= set(rerouted)
    assert {tuple(key) for key in held} <= commits(swarm, "a")
