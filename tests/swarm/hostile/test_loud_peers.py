"""A peer whose numbers have the wrong size: what it costs the others, and whether they see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest
import torch
from clocks import on_virtual_clock
from swarm import TINY_MODEL, Swarm, nothing_is_committed_twice, shared_rounds, tiny_manifest
from torch import Tensor

from peers.lab.world.virtual_time import run
from peers.worker.pipeline.microbatch_compute import MicrobatchWork
from swarmnet.routing.load_balancer import FIRST_SHUN_SECONDS
from swarmnet.run.schema import Paths, Sync

HONEST = {"a": 0, "c": 1, "d": 1, "e": 2}
Change = Callable[[Tensor], Tensor]


def in_gradients(work: MicrobatchWork, change: Change) -> None:
    encode = work._encode_gradient
    work._encode_gradient = lambda key, gradient: encode(key, change(gradient))


def in_hidden_states(work: MicrobatchWork, change: Change) -> None:
    encode = work._encode

    def changed(kind: str, tensor: Tensor, chance: torch.Generator | None = None) -> bytes:
        return encode(kind, change(tensor) if kind == "activation" else tensor, chance)

    work._encode = changed


def play(
    bend: Callable[[MicrobatchWork, Change], None], change: Change, seconds: float, stage: int = 1
) -> Swarm:
    """Four honest peers, and once they train one more whose numbers are changed."""
    swarm = Swarm(tiny_manifest())

    async def story() -> None:
        swarm.open()
        for name, at in HONEST.items():
            swarm.start(name, at, in_flight=4)
        await swarm.until(lambda: swarm.committed(0) >= 10, 60.0)
        bad = swarm.start("bad", stage, in_flight=4).worker
        await swarm.until(lambda: bad.services is not None, 60.0)
        bend(bad.services.pipeline_service.work, change)
        await swarm.during(seconds)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    assert shared_rounds(swarm) > 0
    return swarm


def refusers(swarm: Swarm) -> set[tuple[str, str]]:
    """Who has ended its links with the bad peer, and why."""
    bad = swarm.members["bad"].peer
    return {
        (note.name, note.fields["code"])
        for note in swarm.of("refused", *HONEST)
        if note.fields["peer"] == bad
    }


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda gradient: torch.full_like(gradient, 3.3e38), marks=pytest.mark.soak),
        lambda gradient: torch.randn_like(gradient) * 1e25,
    ],
    ids=["the largest number", "noise of 1e25"],
)
def test_gradients_that_cannot_be_summed_cost_no_round_and_no_microbatch(change):
    swarm = play(in_gradients, change, 10.0)
    assert refusers(swarm) == {("a", "outlier")}
    assert not swarm.of("not_finite"), "no round is thrown away"
    assert swarm.members["a"].worker.services.pipeline_service.ledger.dropped == {}


LONG_SECONDS = 30.0
"""So long that it would be seen in the loss."""


@pytest.mark.parametrize("seconds", [10.0, pytest.param(LONG_SECONDS, marks=pytest.mark.soak)])
def test_loud_gradients_of_one_of_three_are_seen_and_do_not_turn_what_is_learnt(seconds):
    swarm = play(in_gradients, lambda gradient: -1e3 * gradient, seconds)
    if seconds == LONG_SECONDS:
        assert median(swarm.losses(0)[-100:]) < 3.8, "untouched 3.5, turned 4.4"
    assert refusers(swarm) == {("a", "outlier")}
    assert not {note.name for note in swarm.of("microbatch_failed")} - {"a"}
    seen = next(note.time for note in swarm.of("refused", "a"))
    assert seen + 2 / 3 * seconds < swarm.notes[-1].time < seen + FIRST_SHUN_SECONDS
    name = swarm.members["a"].peer
    asked = [note.time for note in swarm.of("committed", "bad") if note.fields["origin"] == name]
    assert max(asked, default=0.0) < seen + 1.0, "it is asked no more"


@pytest.mark.parametrize(
    "change",
    [
        lambda hidden: torch.randn_like(hidden) * 8,
        pytest.param(lambda hidden: hidden * 0, marks=pytest.mark.soak),
    ],
    ids=["noise", "zero"],
)
def test_hidden_states_far_from_what_the_others_send_are_not_computed_with(change):
    swarm = play(in_hidden_states, change, 10.0)
    assert refusers(swarm) == {("e", "outlier")}
    bad = swarm.members["bad"].peer
    failed = swarm.of("microbatch_failed", "e")
    assert {(note.fields["code"], note.fields["peer"]) for note in failed} == {("outlier", bad)}
    assert not swarm.of("committed", "bad"), "nobody learns from it"


@pytest.mark.parametrize(("factor", "stages"), [(10.0, 3), (1.0, 4)], ids=["ten times the rate", "skipping"])
@on_virtual_clock
async def test_honest_peers_refuse_nobody_and_hardly_scale_anything(factor, stages):
    skips = stages > 3
    manifest = tiny_manifest(
        (1,) * stages,
        model=replace(TINY_MODEL, num_hidden_layers=stages),
        paths=Paths(0.25, full_path_warmup_rounds=8, full_path_fraction=0.3) if skips else Paths(),
        sync=Sync(warmup_rounds=1, decay_rounds=1000, learning_rate=factor * 8e-3),
    )
    swarm = Swarm(manifest)
    peers = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, **({"f": 3} if skips else {})}
    swarm.open()
    for name, at in peers.items():
        swarm.start(name, at, in_flight=4)
    await swarm.until(lambda: swarm.committed(0) >= 100, 60.0)
    await swarm.close()
    assert not swarm.of("refused")
    scaled = sum(member.worker.services.pipeline_service.work.scaled for member in swarm.members.values())
    assert scaled <= 10 * factor, "of seven hundred that were looked at"
    assert len(swarm.of("microbatch_failed")) <= factor, "of three hundred"
