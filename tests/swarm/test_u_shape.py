"""Owners of text hold both ends of a model, and other peers its middle: they learn, and refuse the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hostile import BODY_BYTES, Liar
from swarm import Swarm, corpus, nothing_is_committed_twice, shared_rounds, tiny_manifest

from peers.compute.stage_part import build_stage_part
from peers.lab.world.virtual_time import run
from protocols.messages.table import (
    NO_ATTEMPT,
    Act,
    Cancel,
    Check,
    ForwardDeclined,
    ForwardRequest,
    Nack,
    Path,
)
from swarmnet.model import activation_codec
from swarmnet.model.decoder import forward
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import views_of
from swarmnet.model.stage_compute import copied
from swarmnet.run.manifest_check import check
from swarmnet.run.path_rules import PathHeader
from swarmnet.run.schema import Data, TextSource

pytestmark = pytest.mark.swarm
DATA = Data((TextSource("own", "own"),), seq_len=16, micro_batch_size=2, private=True, u_shaped_layers=1)
MANIFEST = tiny_manifest((2, 1), data=DATA)
HELD = {"anna": 0, "ben": 0, "middle": 1, "other": 1}
OWNERS = ("anna", "ben")


def start(swarm, held=HELD):
    swarm.open()
    for name, stage in held.items():
        swarm.start(name, stage, in_flight=4)


def pipeline_of(swarm, name):
    return swarm.members[name].worker.services.pipeline_service


def test_two_owners_and_two_middle_peers_learn_and_stay_equal():
    check(MANIFEST)
    swarm = Swarm(MANIFEST)

    async def story():
        start(swarm)
        await swarm.until(lambda: shared_rounds(swarm) >= 60, 300.0)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    losses = swarm.losses(0)
    assert sum(losses[-40:]) < sum(losses[:40]) - 40 * 0.5, "it learns"
    assert set(swarm.losses(1)) == {None}, "peers of the middle do not even know the loss"
    for name in OWNERS:
        origins = {note.fields["origin"] for note in swarm.of("committed", name)}
        assert origins == {swarm.members[name].peer}, "an owner computes for itself alone"
    origins = {note.fields["origin"] for note in swarm.of("committed", "middle", "other")}
    assert origins == {swarm.members[name].peer for name in OWNERS}


def test_an_owner_goes_on_without_a_peer_of_the_middle_that_died():
    swarm = Swarm(replace(MANIFEST, stages=(2, 1, 1), model=replace(MANIFEST.model, num_hidden_layers=4)))

    async def story():
        start(swarm, HELD | {"late": 2, "later": 2})
        await swarm.until(lambda: shared_rounds(swarm) >= 6, 120.0)
        await swarm.crash("later")
        await swarm.crash("other")
        committed = swarm.committed(0)
        await swarm.until(lambda: swarm.committed(0) > committed + 50, 120.0)
        await swarm.leave(*OWNERS)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    shared_rounds(swarm)


def header(*visited, hops_left=0):
    return Path.of(PathHeader(visited, hops_left))


def test_what_the_form_forbids_is_refused():
    swarm, found = Swarm(MANIFEST), []
    shape = (2, 16, 32)

    async def story():
        start(swarm)
        await swarm.until(lambda: shared_rounds(swarm) >= 4, 120.0)
        liar = Liar(swarm, 1)
        anna, ben = (swarm.members[name].peer for name in OWNERS)
        begun = pipeline_of(swarm, "ben").origin.next_counter
        back, body = header(0, 1, 2), bytes(BODY_BYTES)
        first_layers = header(0, hops_left=2)
        await liar.say(anna, Cancel(anna, 7, NO_ATTEMPT), lane="data")
        await swarm.during(1.0)  # Anna dials back, and hears no heartbeat for long.
        for message, length in (
            (Act(ben, begun, 1, 2, 9.0, shape, back), BODY_BYTES),  # The labels of another owner.
            (Act(anna, 1 << 40, 1, 2, 9.0, shape, back), BODY_BYTES),  # Nothing that this owner has started.
            (Act(anna, 7, 1, 0, 9.0, shape, first_layers), BODY_BYTES),
            (Check(anna, 7, 2, 9.0, shape, back, ""), BODY_BYTES),
            (ForwardRequest(1, 1, 0, -1, 3, 2, 16, False, True, 9.0), 2 * 16 * 4),
        ):
            heard = len(liar.messages)
            await liar.say(anna, message, body[:length], "data")
            await swarm.during(0.3)
            answers = [each for each in liar.messages[heard:] if isinstance(each, Nack | ForwardDeclined)]
            found.append([(type(each).__name__, each.code, each.reason) for each in answers])
        found.append([note.fields["reason"] for note in swarm.of("refused", "anna")])
        await swarm.close()

    run(story())
    other, unknown, first, checked, asked, refused = found
    assert other == [("Nack", "illegal_path", "it belongs to another owner, who alone has its labels")]
    assert unknown == [("Nack", "cancelled", "its owner has finished it, or given it up")]
    assert first == [("Nack", "wrong_stage", "this peer takes microbatches for stage 2 from above")]
    assert checked == []
    assert asked == [
        ("ForwardDeclined", "malformed", "a U-shaped run serves no texts, whose tokens would travel")
    ]
    assert "a comparison, which a U-shaped run does without" in refused
    nothing_is_committed_twice(swarm)


def test_hidden_states_tell_the_text_to_whoever_computes_the_next_stage():
    """What docs/private.md says: the form hides the text from readers of the wire, not from an attack."""
    part = build_stage_part(MANIFEST, 0)
    part.compute.publish(copied(to_floats(part.first_units())))
    tokens_BT = corpus()[:32].long().view(2, 16)
    sent = activation_codec.encode(part.compute.forward("sent", tokens_BT), MANIFEST.activation_codec)
    seen_BTD = activation_codec.decode(sent, (2, 16, 32), MANIFEST.activation_codec)
    weights = views_of(to_floats(part.first_units()), part.layout)  # Any peer can download them.
    guessed_BT = torch.zeros_like(tokens_BT)
    for place in range(16):  # Each token by the hidden state at its place, after those before it.
        for row in range(2):
            tried_VT = guessed_BT[row, : place + 1].repeat(256, 1)
            tried_VT[:, place] = torch.arange(256)
            hidden_VD = forward(weights, MANIFEST.model, MANIFEST.span(0), tried_VT)[:, place]
            guessed_BT[row, place] = (hidden_VD - seen_BTD[row, place]).norm(dim=1).argmin()
    assert torch.equal(guessed_BT, tokens_BT)
