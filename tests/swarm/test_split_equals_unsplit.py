"""A model cut in stages learns what the whole one learns, to the bit: one peer per stage, one seed.

What keeps it so: parameters start from (seed, global name), chunks of votes never span two blocks, gradients
are clipped per block, a round takes in the same microbatches in every stage, and fp32 hidden states are
exact, with narrow boundaries too. What differs by run and peer is the coin that stands in for the sign of a
coefficient that is exactly zero; the text uses all 256 bytes, so that there is none.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from swarm import TINY_MODEL, Note, Swarm, tiny_manifest
from torch import Tensor

from peers.lab.world.virtual_time import run
from swarmnet.identifiers import RunId
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.schema import Experts, ModelShape, RopeScaling, Sync, TextSource

MICROBATCHES = 72
ROUNDS = 8
"""72 microbatches of 32 tokens are 9 rounds of 256; four of them are still open at the end."""
MODEL = replace(TINY_MODEL, num_hidden_layers=4)


def learn(
    stages: tuple[int, ...], model: ModelShape, sync: Sync, codec: str = "fp32", **data: object
) -> tuple[list[float], int, dict[str, Tensor]]:
    """The losses, the settled round, and the settled integers and live weights by parameter name."""
    manifest = tiny_manifest(stages, model=model, activation_codec=codec, sync=sync)
    manifest = replace(
        manifest,
        rounds=replace(manifest.rounds, max_seconds=1000.0),
        data=replace(manifest.data, **data),
    )
    swarm = Swarm(manifest, text_run=RunId("5a" * 32))

    def stop(note: Note) -> None:
        if note.event == "committed" and note.name == "0" and swarm.committed(0) == MICROBATCHES:
            swarm.members["0"].worker.services.pipeline_service.origin.text = None

    async def story() -> tuple[int, dict[str, Tensor]]:
        swarm.open()
        swarm.on_note = stop
        for stage in range(len(stages)):
            swarm.start(str(stage), stage, in_flight=1)
        await swarm.until(lambda: swarm.committed(0) == MICROBATCHES, 120.0)
        await swarm.during(1.0)
        rounds, weights = set(), {}
        for member in swarm.members.values():
            replica = member.worker.services.round_service.work.replica
            rounds.add(replica.settled_round)
            for entry in member.worker.services.part.layout.entries:
                span = slice(entry.offset, entry.offset + entry.size)
                weights[entry.name] = replica.settled_units()[span].view(entry.shape)
                weights[f"live {entry.name}"] = replica.live_floats(ahead=False)[span].view(entry.shape)
        assert len(rounds) == 1, "the stages have settled different rounds"
        await swarm.close()
        return rounds.pop(), weights

    settled, weights = run(story())
    return swarm.losses(0), settled, weights


GROUP = Sync(warmup_rounds=1, decay_rounds=100, learning_rate=8e-3)
TOP_K = replace(GROUP, selection="top-k", transform="dct", topk_per_chunk=32)
CASES = {
    "plain": (MODEL, GROUP),
    "QK-norm": (replace(MODEL, qk_norm=True), GROUP),
    "biases and stretched positions": (
        replace(MODEL, attention_bias=True, rope_scaling=RopeScaling("llama3", 4.0)),
        GROUP,
    ),
    "experts": (
        replace(MODEL, qk_norm=True, intermediate_size=24, experts=Experts(num_experts=4, top_k=2)),
        GROUP,
    ),
    "narrow boundaries": (
        replace(MODEL, boundary=Boundary("token-anchored", width=8, after=(1, 2, 3), anchor_rows=32)),
        GROUP,
    ),
    "top-k of the cosine transform": (MODEL, TOP_K),
}

ALL_CASES = CASES | {"tied": (replace(MODEL, tie_word_embeddings=True), GROUP)}
"""Embedding and head are tied only if one stage has both."""


@pytest.fixture(scope="module")
def unsplit():
    known = {}

    def of(case: str):
        if case not in known:
            known[case] = learn((4,), *ALL_CASES[case])
        return known[case]

    return of


@pytest.mark.parametrize("stages", [pytest.param((2, 1, 1), marks=pytest.mark.soak), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_loss_curve_and_the_settled_weights_are_those_of_the_unsplit_model(unsplit, case, stages):
    losses, settled, weights = unsplit(case)
    assert len(losses) == MICROBATCHES
    assert settled >= ROUNDS - 5
    assert sum(losses[-8:]) < sum(losses[:8]) - 8 * 0.3, "it learns"
    split_losses, split_settled, split_weights = learn(stages, *CASES[case])
    assert split_losses == losses
    assert split_settled == settled
    assert split_weights.keys() == weights.keys()
    unequal = [name for name, weight in weights.items() if not torch.equal(weight, split_weights[name])]
    assert unequal == []


@pytest.mark.parametrize(("case", "stages"), [("plain", (2, 1, 1)), ("experts", (3, 1)), ("tied", (2, 2))])
def test_so_are_they_if_owners_hold_both_ends(unsplit, case, stages):
    own = (TextSource("own", "own"),)
    learnt = learn(stages, *ALL_CASES[case], sources=own, private=True, u_shaped_layers=1)
    assert learnt[:2] == unsplit(case)[:2]
    weights, u_shaped = unsplit(case)[2], learnt[2]
    assert u_shaped.keys() == weights.keys()
    assert [name for name, weight in weights.items() if not torch.equal(weight, u_shaped[name])] == []


def test_it_would_be_seen_if_hidden_states_were_rounded(unsplit):
    losses, _, weights = unsplit("plain")
    rounded_losses, _, rounded = learn((2, 1, 1), *CASES["plain"], codec="bf16")
    assert rounded_losses != losses
    assert any(not torch.equal(weight, rounded[name]) for name, weight in weights.items())
