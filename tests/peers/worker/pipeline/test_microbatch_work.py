"""What a peer computes of a microbatch, and what it keeps of it afterwards."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace

import pytest
import torch
from clocks import on_virtual_clock
from hypothesis import given
from hypothesis import strategies as st
from swarm import Swarm, tiny_manifest

from peers.worker.pipeline.microbatch_compute import Computed, MicrobatchState, MicrobatchWork
from peers.worker.pipeline.validate_act import unfit_way
from protocols.messages.table import Act
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.membership.membership import Membership
from swarmnet.model import activation_codec
from swarmnet.pipeline.timeouts import FIRST_DEADLINE_SECONDS
from swarmnet.routing.skipping import Skipping
from swarmnet.run.activation_sizes import encoded_bytes
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.manifest_check import MAX_BODY_BYTES, check
from swarmnet.run.path_rules import begin, visit
from swarmnet.run.schema import Data, ModelShape

KEY = MicrobatchId(PeerId("origin"), 1)


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp32", "int4-tiles", "int6-tiles"])
def test_a_gradient_beyond_the_codecs_end_is_sent_as_the_largest_there_is(codec):
    largest = torch.finfo(torch.float32).max
    gradient = torch.tensor([[[1.0, -largest, largest, 0.0]]])
    stage = SimpleNamespace(backward=lambda key, below: gradient, device=torch.device("cpu"))
    work = MicrobatchWork(tiny_manifest(activation_codec=codec), 1, stage, Random(0))
    below = activation_codec.encode(torch.zeros(1, 1, 4), codec)
    done = work.backward(
        KEY, MicrobatchState(text=None, output=b"", shape=(1, 1, 4), gradient=below, tokens=1)
    )
    assert isinstance(done, Computed), "it is added here already"
    sent = activation_codec.decode(done.encoded, (1, 1, 4), codec)
    assert torch.isfinite(sent).all()
    assert sent[0, 0, 2] > 0.99 * activation_codec.LARGEST
    assert sent[0, 0, 1] < -0.99 * activation_codec.LARGEST


def test_a_gradient_rounded_by_chance_is_the_same_when_it_is_computed_again_and_of_another_is_not():
    manifest = tiny_manifest(gradient_codec="int6-tiles", gradient_rounding="stochastic")
    gradient = torch.linspace(-1.0, 1.0, 400).view(2, 10, 20)
    stage = SimpleNamespace(backward=lambda key, below: gradient, device=torch.device("cpu"))
    below = activation_codec.encode(torch.zeros(2, 10, 20), "int6-tiles")

    def answer(key: MicrobatchId, stage_number: int = 1) -> bytes:
        work = MicrobatchWork(manifest, stage_number, stage, Random(0))
        done = work.backward(key, MicrobatchState(output=b"", shape=(2, 10, 20), gradient=below, tokens=1))
        assert isinstance(done, Computed)
        return done.encoded

    assert answer(KEY) == answer(KEY)
    other = MicrobatchId(KEY.origin, 2)
    assert len({answer(KEY), answer(other), answer(KEY, 2)}) == 3, "by microbatch, and by hop"


def test_chance_where_nothing_is_rounded_is_refused():
    check(tiny_manifest(gradient_codec="int8", gradient_rounding="stochastic"))
    assert b"gradient_rounding" not in tiny_manifest().canonical(), "runs that do not say so keep their ids"
    with pytest.raises(ManifestError, match="gradient_rounding: bf16 supports only nearest"):
        check(tiny_manifest(gradient_rounding="stochastic"))


@on_virtual_clock
async def test_of_what_the_last_stage_has_done_only_the_answer_is_kept():
    swarm = Swarm(tiny_manifest())
    swarm.open()
    for name, stage in {"a": 0, "b": 1, "c": 2}.items():
        swarm.start(name, stage, in_flight=2)
    await swarm.until(lambda: swarm.committed(0) >= 10, 30.0)
    data = swarm.members["c"].worker.services.pipeline_service
    done = [data.bodies[key] for key, job in data.pipeline.jobs.items() if job.phase == "done"]
    assert done
    assert all(not kept.output and kept.text is None and kept.answer for kept in done)
    await swarm.close()


@on_virtual_clock
async def test_a_microbatch_that_cannot_be_sent_goes_to_another_peer_at_once():
    swarm = Swarm(tiny_manifest(stages=(1, 2)))
    swarm.open()
    for name, stage in {"a": 0, "b": 1, "c": 1}.items():
        swarm.start(name, stage, in_flight=2)
    await swarm.until(lambda: swarm.committed(0) >= 10, 30.0)
    sender, cut_off = swarm.members["a"].worker.services.links, swarm.members["b"].peer
    posted = sender.post

    def post(peer, lane, message, body=b""):
        return not (peer == cut_off and isinstance(message, Act)) and posted(peer, lane, message, body)

    sender.post = post
    clock = asyncio.get_running_loop().time
    since = clock()
    await swarm.until(lambda: swarm.committed(0) >= 40, 30.0)
    again = [note for note in swarm.of("rerouted") if note.time >= since]
    assert {note.fields["code"] for note in again} == {"busy"}
    assert clock() - since < FIRST_DEADLINE_SECONDS / 2
    await swarm.close()


def test_from_the_first_stage_only_its_origin_sends_a_microbatch():
    manifest = tiny_manifest()
    rules = manifest.path_rules()
    origin, other = PeerId("origin"), PeerId("other")
    membership = Membership(me=PeerId("me"), stage=1, chance=None)
    for name in (origin, other):
        membership.recorded(name, 0, "worker", ("/x",), 1, b"record", 0.0)
    ways, header = Skipping(rules=rules, stage=1, live=lambda stage: []), visit(begin(rules), 1, rules)
    assert unfit_way(membership, ways, origin, origin, header) is None
    assert unfit_way(membership, ways, other, origin, header).code == "illegal_path"


@given(
    st.integers(1, 5), st.integers(1, 70), st.sampled_from([2, 4, 66, 130]),
    st.sampled_from(["bf16", "int8", "fp32"]),
)  # fmt: skip
def test_the_manifest_says_how_long_a_body_is(sequences, tokens, width, codec):
    manifest = Manifest(
        "run",
        PeerId("owner"),
        stages=(1, 1),
        activation_codec=codec,
        model=ModelShape(num_hidden_layers=2, hidden_size=width),
        data=Data(seq_len=tokens, micro_batch_size=sequences),
    )
    labels = 4 * sequences * tokens
    assert manifest.body_bytes == encoded_bytes((sequences, tokens, width), codec) + labels


def test_a_run_whose_microbatches_no_link_could_carry_is_refused():
    model = ModelShape(num_hidden_layers=2, hidden_size=4096, max_position_embeddings=4096)
    data = Data(seq_len=2048, micro_batch_size=4)
    large = Manifest("run", PeerId("owner"), stages=(1, 1), model=model, data=data)
    assert large.body_bytes > MAX_BODY_BYTES
    with pytest.raises(ManifestError, match="from stage to stage"):
        check(large)
