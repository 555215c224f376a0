"""A peer of a middle stage whose answers have the usual size and are wrong: who finds it, and how soon."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from clocks import on_virtual_clock
from swarm import Swarm, nothing_is_committed_twice, shared_rounds, tiny_manifest
from torch import Tensor

from peers.worker.pipeline.microbatch_compute import MicrobatchWork

Change = Callable[[Tensor], Tensor]
PEERS = {"a": 0, "b": 0, "c": 1, "d": 1, "bad": 1, "e": 2, "f": 2}


def changed(work: MicrobatchWork, what: str, change: Change) -> None:
    """Change every tensor of this kind that a peer sends, in checks as well."""
    encode = work._encode

    def encode_changed(kind: str, tensor: Tensor, chance: torch.Generator | None = None) -> bytes:
        return encode(kind, change(tensor) if kind == what else tensor, chance)

    work._encode = encode_changed


def noisy(tensor: Tensor) -> Tensor:
    noise = torch.randn_like(tensor)
    return (tensor + noise * tensor.norm() / noise.norm()) / 2**0.5


class Old:
    def __init__(self) -> None:
        self.last: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        last, self.last = self.last, tensor.clone()
        return tensor if last is None else last


CHANGES = {"flip": torch.neg, "scale": lambda tensor: 2 * tensor, "noise": noisy, "old": Old()}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("what", ["gradient", "activation"])
@on_virtual_clock
async def test_a_peer_that_answers_otherwise_is_avoided_by_each_neighbour(what, kind):
    swarm = Swarm(tiny_manifest(compared_fraction=0.1))
    swarm.open()
    for name, stage in PEERS.items():
        swarm.start(name, stage, in_flight=4)
    await swarm.until(lambda: swarm.committed(0) >= 10, 60.0)
    changed(swarm.members["bad"].worker.services.pipeline_service.work, what, CHANGES[kind])
    for _ in range(20):
        await swarm.during(1.0)
    await swarm.close()
    nothing_is_committed_twice(swarm)
    names = {member.peer: name for name, member in swarm.members.items()}
    for note in swarm.of("answers_compared") + swarm.of("peer_avoided"):
        fields = dict(note.fields)
        print(round(note.time,1), note.name, note.event, {k: (names.get(v, v) if isinstance(v, str) else [names.get(x,x) for x in v] if isinstance(v, list|tuple) else v) for k, v in fields.items()})
    for name, member in swarm.members.items():
        print(name, member.worker.services.pipeline_service.checks.outcomes if member.worker.services else "")
    assert shared_rounds(swarm) > 0
