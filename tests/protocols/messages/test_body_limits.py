"""The longest body of each kind of message is what honest peers of that run send, and no more."""

from dataclasses import replace

import pytest
import torch
from clocks import on_virtual_clock
from swarm import TINY_MODEL, Swarm, tiny_manifest

from peers.compute.stage_part import build_stage_part
from peers.network.message_router import MessageRouter
from peers.worker.inference.forward_compute import ForwardWork
from peers.worker.served_stage import SERVICES
from protocols.fields import RunSizes
from protocols.messages.table import (
    Act,
    Chunk,
    Contribution,
    Evidence,
    Forwarded,
    ForwardRequest,
    Grad,
    ManifestResponse,
    Slices,
)
from protocols.messages.terms import ANYTHING, Terms
from protocols.signed.envelope import ENVELOPE_BYTES
from protocols.signed.identity import SIGNATURE_BYTES, Identity
from protocols.signed.slices import sign_slices
from swarmnet.identifiers import RunId
from swarmnet.inference.inference_client import MAX_SEQUENCES
from swarmnet.model import activation_codec
from swarmnet.optimizer.method import METHODS
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.canonical_form import MANIFEST_LIMIT
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import Paths, Sync
from swarmnet.snapshots.fetch import chunk_bytes


def bodies(*sizes) -> dict:
    """The largest body of each message that may have one."""
    return {kind: kind.body(RunSizes(*sizes)) for kind in ANYTHING.bodies}


def worker_bodies(*sizes) -> dict:
    """The largest bodies that a worker accepts."""
    return MessageRouter(*SERVICES).bodies(RunSizes(*sizes))


CODECS = ("bf16", "int8", "fp32", "int4-tiles", "int6-tiles")


@pytest.mark.parametrize("codec", CODECS)
def test_activations_and_gradients_of_every_codec_just_fit(codec):
    manifest = tiny_manifest(activation_codec=codec)
    limits = bodies(manifest)
    encoded = activation_codec.encode(torch.randn(manifest.hidden_shape), codec)
    assert limits[Grad] == len(encoded)
    assert limits[Act] == len(encoded) + 4 * manifest.microbatch_tokens == manifest.body_bytes


NARROW = replace(TINY_MODEL, boundary=Boundary("token-anchored", width=30, after=(1, 2)))
"""Hardly narrower: so that a visitor's hidden states and tokens are longer than an open boundary's."""


def test_gradients_may_travel_in_another_codec_than_hidden_states():
    manifest = tiny_manifest(activation_codec="int4-tiles", gradient_codec="int8")
    limits = bodies(manifest)
    assert limits[Grad] == len(activation_codec.encode(torch.randn(manifest.hidden_shape), "int8"))
    assert limits[Act] == manifest.body_bytes < limits[Grad]
    assert b"gradient_codec" not in tiny_manifest().canonical(), "runs that do not say so keep their ids"


def test_through_narrow_boundaries_go_fewer_numbers_and_the_tokens_of_all_stages():
    manifest = tiny_manifest(model=NARROW, activation_codec="fp32")
    sequences, tokens = manifest.data.micro_batch_size, manifest.data.seq_len
    limits = bodies(manifest)
    assert limits[Grad] == sequences * tokens * 4 * 30
    assert limits[Act] == limits[Grad] + sequences * (tokens + 1) == manifest.body_bytes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kept", [16, 128])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_contributions_and_chunks_of_every_stage_just_fit(method, kept, stage):
    manifest = tiny_manifest(sync=Sync(method=method, topk_per_chunk=kept))
    check(manifest)
    part = build_stage_part(manifest, stage)
    size = 4 * part.layout.size
    limits = worker_bodies(manifest, part.method.payload_bytes, size)
    assert limits[Contribution] == ENVELOPE_BYTES + part.method.payload_bytes
    assert limits[Chunk] == min(size, chunk_bytes(size))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("shards", [1, 3, 64])
def test_slices_and_results_of_every_stage_just_fit_where_there_are_reducers(stage, shards):
    manifest = tiny_manifest(sync=Sync(method="local-steps", topology="sharded-reduce", shards=shards))
    check(manifest)
    method = build_stage_part(manifest, stage).method
    limits = worker_bodies(manifest, method.reduced.longest_result, 1000, sum(method.reduced.slice_bytes))
    gradient = torch.ones(method.layout.size)
    me = Identity.from_seed(b"me")
    slices = method.slices(method.contribute(gradient, 1, 0, me.peer_id))
    head, _ = sign_slices(me, RunId("ab" * 32), stage, 0, 1, slices)
    whole = SIGNATURE_BYTES + len(head) + sum(map(len, slices))
    assert whole == limits[Slices], "all of them, to one reducer"
    assert limits[Contribution] == ENVELOPE_BYTES + method.longest_result
    assert limits[Evidence] == max(limits[Contribution], limits[Slices]), "a result, or a slice"


def test_where_there_are_no_reducers_nobody_may_send_slices():
    limits = worker_bodies(tiny_manifest(), 100, 1000)
    assert limits[Slices] == limits[Evidence] == 0
    assert limits[Contribution] == ENVELOPE_BYTES + 100


@pytest.mark.parametrize("model", [TINY_MODEL, NARROW], ids=["open", "narrow"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("stages", [(3,), (1, 1, 1)])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("scores", [True, False])
def test_visitors_and_their_answers_fit_at_every_stage(model, codec, stages, exact, scores):
    manifest = tiny_manifest(stages=stages, activation_codec=codec, model=model)
    limits = bodies(manifest)
    sequences, tokens = manifest.data.micro_batch_size, manifest.data.seq_len
    for stage in range(len(stages)):
        work = ForwardWork(
            manifest=manifest, stage=stage, part=build_stage_part(manifest, stage), snapshots=None
        )
        for shape in ((sequences, tokens), (1, sequences * tokens), (sequences * tokens, 1)):
            ask = ForwardRequest(1, 1, stage, -1, len(stages), *shape, exact, scores, 5.0)
            assert work.body_bytes(ask) <= limits[ForwardRequest]
    answer = activation_codec.encode(torch.zeros(manifest.hidden_shape), "fp32" if exact else codec)
    assert len(answer) <= limits[Forwarded]
    assert 4 * MAX_SEQUENCES * manifest.model.vocab_size <= limits[Forwarded]


def test_a_worker_takes_no_answers_to_what_it_does_not_ask():
    limits = worker_bodies(tiny_manifest(), 100, 1000)
    assert not {ManifestResponse, Forwarded} & limits.keys()
    assert bodies(tiny_manifest())[ManifestResponse] == MANIFEST_LIMIT


def test_a_stranger_may_send_no_body_whatever_its_kind():
    terms = Terms(worker_bodies(tiny_manifest(), 100, 1000), {"friend"}.__contains__)
    act = Act("x", 1, 1, 1, 1.0, (1, 1, 1))
    assert terms.limit("friend", act) == tiny_manifest().body_bytes
    assert (terms.limit("stranger", act), terms.limit("friend", ManifestResponse())) == (0, 0)


@pytest.mark.parametrize("paths", [Paths(), Paths(skip_ratio=0.4)])
@on_virtual_clock
async def test_an_honest_swarm_trains_and_takes_newcomers_without_one_refusal(paths):
    stages = (1,) * (5 if paths.skip_ratio else 3)
    model = replace(tiny_manifest().model, num_hidden_layers=len(stages))
    swarm = Swarm(tiny_manifest(stages=stages, paths=paths, model=model))
    swarm.open()
    for stage in range(len(stages)):
        swarm.start(f"p{stage}", stage, in_flight=1)
    await swarm.until(lambda: swarm.rounds().get("p0", (0, -1))[1] >= 5, 120.0)
    swarm.start("newcomer", 0, in_flight=1)
    await swarm.until(lambda: swarm.rounds().get("newcomer", (0, -1))[1] >= 8, 120.0)
    refused = [note for note in swarm.notes if note.event == "refused"]
    assert refused == []
    await swarm.close()
