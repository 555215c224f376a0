"""Float DeMo against DeMo by its paper (peers/lab/bench/learning/plain_demo.py), on the same gradients."""

from dataclasses import replace

import pytest
import torch
from method_cases import PEERS, gradient_of

from peers.lab.bench.learning.ground import Gradient, Parameter
from peers.lab.bench.learning.plain_demo import DECAY, PlainDemo
from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.method import method_of
from swarmnet.optimizer.step import dense
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Rounds, Sync

ROUNDS = 30
RATE = 2.0**-10
TOKENS = 100
SQUARE = {"model.layers.0.self_attn.q_proj.weight": (128, 64), "model.layers.0.mlp.up_proj.weight": (192, 64)}
"""Rows of 64: so a chunk of the flat vector is a tile, too."""
ANY = {
    "model.embed_tokens.weight": (257, 96),  # A prime: tiles of 1 x 48, all of which is sent.
    "model.layers.0.input_layernorm.weight": (96,),
    "model.layers.0.self_attn.q_proj.weight": (96, 130),
    "model.layers.0.mlp.up_proj.weight": (176, 100),
    "model.norm.weight": (100,),
}


class Given:
    """What plain DeMo learns on: gradients that do not ask for the weights."""

    def __init__(self, layout):
        self.layout = layout
        self.parameters = [
            Parameter(each.name, each.shape, each.offset, each.size) for each in layout.entries
        ]

    def initial_weights(self):
        return torch.zeros(self.layout.size)

    def gradient(self, weights_P, peer, number):
        """What all share, and noise: a few coefficients of all peers are the same, most are not."""
        own, shared = gradient_of(self.layout, f"{peer} {number}"), gradient_of(self.layout, f"{number // 8}")
        return Gradient(TOKENS * 1e-3 * (own + shared), 0.0, TOKENS)


def signs_of_the_paper(given):
    """Of each round int8 [size]."""
    plain = PlainDemo(ground=given, peers=len(PEERS), rate=lambda number: RATE)
    before = plain.weights()
    for number in range(ROUNDS):
        plain.step(number)
        after = plain.weights()
        yield torch.sign(before - after).to(torch.int8)
        before = after


def signs_of_the_product(given, **sync):
    settings = Sync(
        method="demo",
        selection="top-k",
        topk_per_chunk=32,
        momentum=DECAY,
        learning_rate=RATE,
        warmup_rounds=1,
        min_lr_ratio=1.0,
        **sync,
    )
    # A gradient counts by its share of a round's tokens: each peer has all of them, so that none is shrunk.
    run = Manifest(
        "test", PeerId("owner"), sync=settings, rounds=replace(Rounds(), global_batch_tokens=TOKENS)
    )
    methods = [method_of(run, given.layout) for _ in PEERS]
    for number in range(ROUNDS):
        tally = methods[0].tally(number)
        for index, (peer, method) in enumerate(zip(PEERS, methods, strict=True)):
            found = given.gradient(None, index, number)
            tally.add(peer, method.contribute(found.summed, found.tokens, number, peer))
        yield -torch.sign(dense(tally.step(), given.layout)).to(torch.int8)


def agreement(shapes, **sync):
    """Share of the weights, of all rounds, that step the same way."""
    given = Given(layout_of(shapes))
    held = torch.ones(given.layout.size, dtype=torch.bool)
    for start, stop in given.layout.padding:
        held[start:stop] = False
    equal = [
        float((paper[held] == product[held]).float().mean())
        for paper, product in zip(signs_of_the_paper(given), signs_of_the_product(given, **sync), strict=True)
    ]
    return sum(equal) / len(equal), min(equal)


@pytest.mark.parametrize("cut", ["flat", "tiled"])
def test_where_a_run_of_the_vector_is_a_tile_the_steps_are_the_papers(cut):
    mean, least = agreement(SQUARE, transform="fine-dct", chunking=cut)
    assert mean >= 0.9999
    assert least >= 0.999


def test_matrices_of_any_shape_step_as_in_the_paper():
    mean, least = agreement(ANY, transform="fine-dct", chunking="tiled")
    assert mean >= 0.9999
    assert least >= 0.999


def test_what_differs_otherwise_is_the_basis_of_eight_bits():
    rounded, _ = agreement(SQUARE, transform="dct")
    assert 0.995 < rounded < 0.998
