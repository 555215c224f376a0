"""Peers that each train half of the experts: replicas stay equal, and whoever lost its holder finds one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swarm import expert_manifest, nothing_is_committed_twice, shared_rounds
from watched import Watched, moved

from peers.lab.world.virtual_time import run
from peers.worker.rounds.operations import ExpertChange, experts_line
from peers.worker.served_stage import claims_of
from peers.worker.watch.sampler import BALANCE_SECONDS
from protocols.signed.identity import Identity
from swarmnet.model.flat_layout import trained_layout
from swarmnet.optimizer.method import method_of

EIGHT = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1, "f": 1, "g": 2, "h": 2}


EXCHANGES = [pytest.param("all-gather", marks=pytest.mark.soak), "sharded-reduce"]


@pytest.mark.soak
@pytest.mark.parametrize("exchange", ["all-gather", "sharded-reduce"])
def test_a_swarm_of_holders_learns_and_takes_up_the_experts_of_one_that_crashed(exchange):
    swarm = Watched(
        expert_manifest(exchange, num_experts=4, top_k=2, groups=2, merge_rounds=5, merge_nearest=2)
    )

    gone = set()

    def groups(stage):
        """By their own word, of those that are there."""
        here = [name for name, of in EIGHT.items() if of == stage and name not in gone]
        return {
            name: notes[-1].fields["group"]
            for name in here
            if (notes := swarm.of("experts_reassigned", name))
        }

    async def story():
        swarm.open()
        for name, stage in EIGHT.items():
            swarm.start(name, stage, in_flight=2)
        for stage in range(3):
            await swarm.until(lambda stage=stage: set(groups(stage).values()) == {0, 1}, 60.0)
        held = groups(1)
        alone = next(name for name in held if list(held.values()).count(held[name]) == 1)
        gone.add(alone)
        await swarm.crash(alone)
        left = next(name for name in held if name != alone)
        work = swarm.members[left].worker.services.round_service.work
        await swarm.until(lambda: max(work.method.held.holding.stale_rounds) > 1, 60.0)
        swarm.observers[left].look()
        await swarm.until(lambda: set(groups(1).values()) == {0, 1}, 60.0)
        swarm.start("n", 1)
        await swarm.until(lambda: swarm.of("contribution_made", "n"), 60.0)
        since = swarm.committed(0)
        await swarm.until(lambda: swarm.committed(0) >= since + 60, 120.0)
        await swarm.during(BALANCE_SECONDS)
        await swarm.stop_watching()
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    assert shared_rounds(swarm) > 30
    losses = swarm.losses(0)
    assert sum(losses[:20]) / 20 > 5.2
    assert sum(losses[-20:]) / 20 < 4.6
    for name in ("a", "g"):
        assert "expert_load_imbalance_ratio" in moved(swarm.metrics[name])
    served = swarm.members["e"].worker.served
    said = claims_of(served.services, served.load())
    assert said.experts_group == swarm.of("experts_reassigned", "e")[-1].fields["group"]
    assert max(said.experts_trained) == said.settled
    assert min(said.experts_trained) > said.settled - 8, "both are trained again"
    for name in {name for name, stage in EIGHT.items() if stage == 1} - gone:
        seen = [
            (note.fields["group"], note.fields["holders"]) for note in swarm.of("experts_reassigned", name)
        ]
        alone = [said for said in seen if 0 in said[1]]
        assert alone, "who is left sees that nobody trains a group"
        assert len(set(alone)) == len(alone), "and says so once, and once more if it takes that up"
        assert min(seen[-1][1]) > 0, "as it is in the end"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_newcomer_takes_up_the_group_that_lost_its_only_holder_with_its_first_contribution(exchange):
    manifest = expert_manifest(exchange, num_experts=4, top_k=2, groups=2)
    swarm = Watched(manifest)

    def drawn(name):
        """The group that it would begin with if it knew nothing."""
        held = method_of(manifest, trained_layout(manifest, 2)).held
        held.begins(Identity.from_seed(name.encode()).peer_id)
        return held.group

    def group_of(name):
        return (
            swarm.of("experts_reassigned", name)[-1].fields["group"]
            if swarm.of("experts_reassigned", name)
            else None
        )

    async def story():
        swarm.open()
        for name, stage in {"a": 0, "b": 1, "g": 2, "h": 2}.items():
            swarm.start(name, stage, in_flight=2)
        await swarm.until(lambda: {group_of("g"), group_of("h")} == {0, 1}, 60.0)
        lost = group_of("g")
        await swarm.crash("g")
        held = swarm.members["h"].worker.services.round_service.work.method.held
        await swarm.until(lambda: held.holding.stale_rounds[lost] > 2, 60.0)
        newcomer = next(name for name in "nmopqrs" if drawn(name) != lost)
        swarm.start(newcomer, 2)
        await swarm.until(lambda: swarm.of("experts_reassigned", newcomer), 60.0)
        await swarm.until(lambda: shared_rounds(swarm) > 5, 60.0)
        await swarm.stop_watching()
        await swarm.close()
        return lost, newcomer

    lost, newcomer = run(story())
    assert swarm.of("experts_reassigned", newcomer)[0].fields["group"] == lost


def test_who_trains_which_experts_is_said_in_one_line():
    took_up = ExpertChange(3, range(2, 4), group=1, holders=(0, 2))
    before = "trains experts 2 to 3 of each layer; peers of each group of experts: 0, 2; "
    after = "no peer trains group 0: it stays as it is until one does"
    assert experts_line(took_up) == before + after
    assert experts_line(replace(took_up, experts=range(1), group=0)) == (
        "trains expert 0 of each layer; peers of each group of experts: 0, 2"
    )
