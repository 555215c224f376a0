"""What tests of sync methods begin from."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.optimizer.method import add_own, method_of
from swarmnet.optimizer.replica import Replica
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync

SELECTIONS = ["top-k", "group"]
PEERS = [PeerId(f"peer {index}") for index in range(5)]


def shapes_of(layers, width=24, first=True, last=True, start=0):
    shapes = {"model.embed_tokens.weight": (256, width)} if first else {}
    for layer in range(start, start + layers):
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (width,)
        shapes[f"model.layers.{layer}.self_attn.q_proj.weight"] = (width, width)
        shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (11 * width, width)
    if last:
        shapes |= {"model.norm.weight": (width,), "lm_head.weight": (256, width)}
    return shapes


def manifest(**sync):
    return Manifest("test", PeerId("owner"), sync=Sync(**{"topk_per_chunk": 64, "warmup_rounds": 1, **sync}))


def gradient_of(layout, seed):
    """float32 [layout.size], drawn by parameter name, so that it is the same for any cut in stages."""
    gradient = torch.zeros(layout.size)
    for entry in layout.entries:
        digest = hashlib.sha256(f"{seed} {entry.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        gradient[entry.offset : entry.offset + entry.size] = torch.randn(entry.size, generator=generator)
    return gradient


def stepped(settings, layout, seed=0, steps=3):
    """A method of own steps whose peer has moved."""
    method = method_of(settings, layout)
    for number in range(steps):
        method.own.step(gradient_of(layout, 10 * seed + number), 7, 0)
    return method


def moved_by(method, layout, applied=-1):
    """float32 [layout.size]: what only this peer's weights hold."""
    own = torch.zeros(layout.size)
    add_own(method.own, own, layout, applied)
    return own


def replica_of(method, layout):
    return Replica(layout=layout, method=method, units=torch.zeros(method.state.size, dtype=torch.int32))


def bent(honest, data):
    """The payload with a few bits turned, a byte less or a byte more."""
    payload = bytearray(honest)
    for place in data.draw(st.lists(st.integers(0, 8 * len(payload) - 1), max_size=4)):
        payload[place // 8] ^= 1 << (place % 8)
    return data.draw(st.sampled_from([bytes(payload), bytes(payload[:-1]), bytes(payload) + b"\0"]))


def correlated_votes(honest, numbers=4096, errors=0.3, seed=0):
    """Votes of honest peers, int8 [honest, numbers]. Each has some wrong. Then the right votes."""
    generator = np.random.default_rng(seed)
    right_N = generator.choice(np.array([-1, 1], np.int8), numbers)
    wrong_CN = generator.random((honest, numbers)) < errors
    return np.where(wrong_CN, -right_N, right_N).astype(np.int8), right_N
