"""A peer of a middle stage whose answers have the usual size and are wrong: who finds it, and how soon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from clocks import on_virtual_clock
from swarm import Note, Swarm, nothing_is_committed_twice, tiny_manifest
from torch import Tensor

from peers.tools.top.live import snapshots
from peers.worker.pipeline.answer_checks import AnswerChecks
from peers.worker.pipeline.microbatch_compute import MicrobatchWork
from protocols.signed.records import ANNOUNCE_SECONDS
from swarmnet.identifiers import PeerId

Change = Callable[[Tensor], Tensor]
PEERS = {"a": 0, "c": 1, "d": 1, "bad": 1, "e": 2}
QUICK = {("gradient", "noise"), ("gradient", "scale"), ("activation", "flip"), ("activation", "old")}
"""The others take as long and are marked `soak`."""


def changed(work: MicrobatchWork, what: str, change: Change) -> None:
    """Change every tensor of this kind that a peer sends, but none that is only compared: a peer knows that
    it is asked a second time."""
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
SEES = {"gradient": "a", "activation": "e"}
"""Which neighbour sees what the bad peer changes: the one that sends to it, or the one that it sends to."""


def swarm_of(fraction: float, peers: dict[str, int]) -> Swarm:
    swarm = Swarm(tiny_manifest(compared_fraction=fraction))
    swarm.open()
    for name, stage in peers.items():
        swarm.start(name, stage, in_flight=4)
    return swarm


def avoided(swarm: Swarm, *names: str) -> list[Note]:
    """What these peers say of peers that get no work any more, in order."""
    return [note for note in swarm.of("refused", *names) if note.fields["code"] == "differs"]


def checks_of(swarm: Swarm, name: str) -> AnswerChecks:
    return swarm.members[name].worker.services.pipeline_service.checks


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        pytest.param(what, kind, marks=() if (what, kind) in QUICK else pytest.mark.soak)
        for what in SEES
        for kind in CHANGES
    ],
)
@on_virtual_clock
async def test_a_peer_that_answers_otherwise_is_avoided_after_at_most_three_comparisons(what, kind):
    swarm = swarm_of(0.2, PEERS)
    await swarm.until(lambda: swarm.committed(0) >= 10, 60.0)
    changed(swarm.members["bad"].worker.services.pipeline_service.work, what, CHANGES[kind])
    bad, sees = swarm.members["bad"].peer, SEES[what]
    await swarm.until(lambda: avoided(swarm, sees), 60.0)
    found = avoided(swarm, *swarm.members)
    seen = [note.fields for note in swarm.of("answers_compared", sees) if note.time <= found[0].time]
    compared = {fields["counter"] for fields in seen if fields["code"] == "differed"}
    assert len(compared) <= 3, "before these its answers were compared that it gave before it lied"
    assert {note.fields["peer"] for note in found} == {bad}, "nobody else is blamed"
    await swarm.during(1.0)  # What is under way to it comes back.
    asked = len(swarm.of("committed", "bad"))
    router = swarm.members[sees].worker.services.pipeline_service.pipeline.router
    assert set(router.shunned(swarm.loop.time())) == {bad}
    if what == "gradient":
        await swarm.during(2.0)
        assert len(swarm.of("committed", "bad")) == asked, "it gets no work"
    await swarm.during(ANNOUNCE_SECONDS)
    found = SimpleNamespace(signed=swarm.signed, directory=swarm.network.directory(PeerId("visitor")))
    shown = await anext(snapshots(found))
    verdicts = {row.peer: row.verdicts for row in shown.rows if row.verdicts}
    assert set(verdicts) == {bad}, "the owner sees who is avoided, and nobody else"
    said = next(one for one in verdicts[bad] if one.by == swarm.members[sees].peer)
    assert said.what == ("gradients" if what == "gradient" else "hidden states")
    assert 2 <= said.differed <= said.compared
    await swarm.close()
    nothing_is_committed_twice(swarm)
    assert checks_of(swarm, sees).outcomes["differed"] >= 2


@on_virtual_clock
async def test_honest_peers_agree_and_what_was_computed_for_comparisons_is_not_counted():
    swarm = swarm_of(0.5, {"a": 0, "c": 1, "d": 1, "e": 2})
    await swarm.until(lambda: checks_of_all(swarm)["agreed"] >= 20, 60.0)
    alone = [note.name for note in swarm.of("answers_compared") if note.fields["code"] == "alone"]
    assert sorted(alone) == ["c", "d"], "each says so once"
    await swarm.close()
    nothing_is_committed_twice(swarm)
    assert set(checks_of_all(swarm)) <= {"agreed", "unanswered"}
    for stage in (1, 2):
        assert swarm.committed(stage) == swarm.committed(0), "each microbatch is counted once in each stage"


def checks_of_all(swarm: Swarm) -> Counter[str]:
    services = [member.worker.services for member in swarm.members.values()]
    return sum((one.pipeline_service.checks.outcomes for one in services if one), Counter())
