"""Answers about what a reducer added up, and windows of work, bent: none makes a liar of an honest one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import torch
from fuzz_inputs import ALICE, BOB, Decoder, bent
from fuzz_wire import run_id
from swarm import tiny_manifest

from peers.worker.rounds.audit_path import outcome_of
from protocols.errors import WireError
from protocols.signed.commitments import cut, joined, open_commitment
from protocols.signed.envelope import ENVELOPE_BYTES, Kind, open_envelope, seal
from protocols.signed.slices import sign_slices
from swarmnet.audits.commitment import NOT_YET, Accused, Commitment, CommitmentError, settings_of
from swarmnet.audits.work_log import WorkLog
from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes
from swarmnet.optimizer.method import Method, method_of
from swarmnet.rounds.audits import Question
from swarmnet.rounds.result_table import Contributor
from swarmnet.run.manifest import Sync


@cache
def audited() -> tuple[Method, Question]:
    """A result of Alice's and all slices of its second shard: they give its sums."""
    manifest = tiny_manifest(sync=Sync(method="local-steps", exchange="sharded", shards=3))
    layout = layout_of(parameter_shapes(manifest.model, manifest.span(1)))
    given: dict[Contributor, bytes] = {}
    bodies: dict[Contributor, bytes] = {}
    for number, who in enumerate((ALICE, BOB)):
        method = method_of(manifest, layout)
        assert method.reduced is not None
        gradient = torch.randn(layout.size, generator=torch.Generator().manual_seed(number))
        cut = method.reduced.slices(method.contribute(gradient, 256, 0, PeerId(who.peer_id)))
        head, name = sign_slices(who, run_id(), 1, 0, 256, cut)
        contributor = Contributor.of(PeerId(who.peer_id), name, 256)
        given[contributor], bodies[contributor] = cut[1], head + cut[1]
    assert method.reduced is not None
    result = method.reduced.reduce({1: given})
    table, length = method.reduced.head(result)
    head = seal(ALICE, run_id(), Kind.CONTRIBUTION, 1, 0, 512, result[:length])
    name = open_envelope(head, run_id(), Kind.CONTRIBUTION, length).id
    alice = PeerId(ALICE.peer_id)
    question = Question((name, 1), 0, alice, alice, 0.0, head + result[length:], table.shards[1], bodies)
    return method, question


def proof(chance: Random) -> Question:
    """That Alice has lied, which she has not."""
    _, question = audited()
    slices = {
        one: bent(body, chance) if chance.random() < 0.5 else body for one, body in question.slices.items()
    }
    result = bent(question.result, chance) if chance.random() < 0.5 else question.result
    number = chance.choice((1, 1, 1, 0, 2, 2**61))
    return replace(question, name=(question.name[0], number), result=result, slices=slices)


def judge(question: Question, _: Path) -> None:
    method, honest = audited()
    assert method.reduced is not None
    outcome, reason = outcome_of(question, run_id(), 1, method.reduced)
    is_whole = (question.result, question.slices) == (honest.result, honest.slices)
    assert outcome == ("agrees" if is_whole and question.name == honest.name else "not_in_order"), reason


@cache
def window() -> tuple[bytes, ...]:
    """Heads of three contributions of Alice's."""
    log = WorkLog(settings_of(b"a text", "here"), PeerId(ALICE.peer_id), 4)
    log.accused = (Accused(PeerId(BOB.peer_id), NOT_YET),)
    log.published(-1, -1)
    heads = []
    for round in range(3):
        log.computed(round, 1000)
        written = log.told(round, b"moves").written()
        heads.append(seal(ALICE, run_id(), Kind.CONTRIBUTION, 0, round, 512, written))
    return tuple(heads)


def open_all(heads: list[bytes]) -> None:
    for head in heads:
        assert open_commitment(head, run_id()).sender == ALICE.peer_id


def bent_window(chance: Random) -> bytes:
    heads = [bent(head, chance) if chance.random() < 0.2 else head for head in window()]
    return bent(joined(heads), chance) if chance.random() < 0.5 else joined(heads)


DECODERS = (
    Decoder("proofs of a lie", proof, judge, ()),
    Decoder(
        "what a peer commits to",
        lambda chance: bent(chance.choice(window())[ENVELOPE_BYTES:], chance),
        lambda data, _: Commitment.read(data),
        (CommitmentError,),
    ),
    Decoder("windows of work", bent_window, lambda data, _: open_all(cut(data)), (WireError,)),
)
