"""A swarm whose stages hear a quarter of the numbers: real workers in memory, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from clocks import on_virtual_clock
from holders import named
from swarm import TINY_MODEL, Swarm, nothing_is_committed_twice, shared_rounds, text_of, tiny_manifest

from peers.lab.world.virtual_time import run
from peers.state.snapshot_store import units_of
from peers.tools.model.generate import generate
from peers.tools.model.swarm_client import Conversation, SwarmClient
from protocols.signed.identity import Identity
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.manifest_check import check

SIX = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 2}
ANCHORED = Boundary("token-anchored", width=8, after=(1, 2))


@pytest.mark.parametrize(
    ("boundary", "codec", "back", "rounding"),
    [
        (ANCHORED, "bf16", "same", "nearest"),
        pytest.param(replace(ANCHORED, anchor_rows=32), "int8", "same", "nearest", marks=pytest.mark.soak),
        (replace(ANCHORED, kind="shared-subspace"), "int4-tiles", "int6-tiles", "stochastic"),
    ],
    ids=["bf16", "hashed and int8", "shared, int4 down and int6 up by chance"],
)
@on_virtual_clock
async def test_it_learns_and_agrees_and_a_newcomer_joins(boundary, codec, back, rounding):
    model = replace(TINY_MODEL, boundary=boundary)
    manifest = tiny_manifest(
        model=model, activation_codec=codec, gradient_codec=back, gradient_rounding=rounding
    )
    check(manifest)
    swarm = Swarm(manifest)
    swarm.open()
    for name, stage in SIX.items():
        swarm.start(name, stage, in_flight=2)
    await swarm.until(lambda: swarm.committed(0) >= 200, 60.0)
    swarm.start("g", 1, in_flight=2)
    await swarm.until(lambda: len(swarm.of("committed", "g")) >= 5, 60.0)
    await swarm.close()
    nothing_is_committed_twice(swarm)
    assert shared_rounds(swarm) > 0
    losses = swarm.losses(0)
    assert sum(losses[-20:]) < sum(losses[:20]) - 20 * 0.5, "it learns"
    assert swarm.of("refused") == []
    assert swarm.of("microbatch_failed") == [], "nobody is out of line, not even in the first rounds"


def test_a_visitor_gets_the_text_of_the_local_model_with_the_same_weights():
    manifest = tiny_manifest(model=replace(TINY_MODEL, boundary=ANCHORED))
    swarm = Swarm(manifest)
    units = {}

    def look(note) -> None:
        for member in swarm.members.values():
            if note.event == "settled" and member.worker.services is not None:
                for held in member.worker.services.snapshots.held:
                    units.setdefault((member.worker.stage, held.root.round), units_of(held.data))

    async def story() -> tuple[Conversation, bytes]:
        swarm.open()
        swarm.on_note = look
        for name, stage in SIX.items():
            swarm.start(name, stage, in_flight=2)
        await swarm.until(lambda: len({stage for stage, _ in units}) == 3, 120.0)
        peer = Identity.from_seed(b"visitor").peer_id
        transport, directory = swarm.network.transport(peer), swarm.network.directory(peer)
        talk = Conversation()
        visitor = SwarmClient(
            signed=swarm.signed,
            transport=transport,
            directory=directory,
            chance=Random(0),
            notify=lambda event, text: None,
        )
        async with visitor as client:
            text = await text_of(client, b"def f", 8, talk)
        await swarm.close()
        return talk, text

    talk, text = run(story())
    weights = {}
    for stage, (round,) in talk.rounds.items():
        layout = layout_of(parameter_shapes(manifest.model, manifest.span(stage)))
        weights |= named(layout, units[stage, round])
    local = generate(weights, manifest.model, b"def f", 8, temperature=0.0, window=16)
    assert text == b"".join(local)
