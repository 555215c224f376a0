"""Swarms that start from a model that others made: who has it, who gets it from whom, and what is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from archived import archived
from clocks import on_virtual_clock
from public_models import LLAMA, QWEN, logits, loss, save
from swarm import Swarm, shared_rounds, tiny_manifest

from peers.config.errors import UserError
from peers.lab.world.virtual_time import run
from peers.stageless.archivist.archivist import Policy
from peers.state.checkpoint_file import newest
from peers.state.start_folder import pinned, start_state
from peers.telemetry import log_events
from peers.tools.model.export import export
from protocols.signed.envelope import ENVELOPE_BYTES
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.model.decoder import forward
from swarmnet.model.flat_layout import frozen_layout, trained_layout
from swarmnet.model.parameters import whole
from swarmnet.model.sampling import IGNORE_INDEX
from swarmnet.optimizer.method import method_of
from swarmnet.rounds.history import START
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, InitCheckpoint, Lora, ModelShape, Sync

SIX = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 2}
HAVE = ("a", "c", "e")
"""Whose peer files name the model's folder."""
EXACT = {"activation_codec": "fp32"}


def from_model(folder: Path, shape: ModelShape, **changes: Any) -> Manifest:
    manifest = tiny_manifest(model=shape, init_checkpoint=InitCheckpoint("model"), **EXACT, **changes)
    return replace(manifest, init_checkpoint=pinned(folder, manifest))


@pytest.fixture(
    scope="module", params=[LLAMA, pytest.param(QWEN, marks=pytest.mark.soak)], ids=["llama", "qwen"]
)
def shape(request) -> ModelShape:
    return request.param


@pytest.fixture(scope="module")
def folder(shape, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("public") / "model", shape)


def play(swarm: Swarm, folder: Path, states: Path, story: Callable[[Swarm], Awaitable[None]]) -> None:
    async def whole_story() -> None:
        swarm.open()
        for name, stage in SIX.items():
            given = {"start": folder} if name in HAVE else {}
            swarm.start(name, stage, in_flight=2, checkpoints=states / name / "checkpoints", **given)
        await story(swarm)
        await swarm.close()

    run(whole_story())
    assert shared_rounds(swarm) > 0


async def until_settled(swarm: Swarm, round: int) -> None:
    await until_settled_by(swarm, round, len(SIX))


async def until_settled_by(swarm: Swarm, round: int, peers: int) -> None:
    def settled() -> bool:
        return len(swarm.rounds()) == peers and min(s for _, s in swarm.rounds().values()) > round

    await swarm.until(settled, 90.0)


def fetched(swarm: Swarm) -> dict[str, tuple[int, int]]:
    return {note.name: (note.fields["round"], note.fields["bytes"]) for note in swarm.of("fetched")}


def exported(states: Path, to: Path) -> tuple[Path, dict[str, torch.Tensor], Manifest]:
    model = newest(states)
    export(to, model.manifest.model, model.path())
    return to, model.whole(), model.manifest


def test_a_swarm_goes_on_from_a_model_and_gives_it_back(folder, shape, tmp_path):
    manifest = from_model(folder, shape)

    async def story(swarm: Swarm) -> None:
        await until_settled(swarm, 20)

    swarm = Swarm(manifest)
    play(swarm, folder, tmp_path, story)
    first = swarm.of("committed", "a", "b")[0].fields
    tokens, labels = swarm.text.microbatch(MicrobatchId(PeerId(first["origin"]), first["counter"]))
    assert abs(first["loss"] - loss(logits(folder, tokens), labels)) < 1e-4
    losses = swarm.losses(0)
    assert sum(losses[-20:]) < sum(losses[:20]) - 20 * 0.3, "it learns"
    states = {stage: trained_layout(manifest, stage).size * 4 for stage in range(3)}
    assert fetched(swarm) == {name: (-1, states[SIX[name]]) for name in "bdf"}, "others get it from those"
    home, weights, _ = exported(tmp_path, tmp_path / "model")
    torch.testing.assert_close(
        forward(weights, shape, whole(shape), tokens), logits(home, tokens), atol=1e-4, rtol=0
    )


def test_lora_touches_and_sends_its_factors_alone_and_is_merged_at_home(folder, shape, tmp_path):
    adapted = replace(shape, lora=Lora(rank=2, alpha=8.0))
    manifest = from_model(folder, adapted, sync=Sync(warmup_rounds=1, learning_rate=8e-3))
    took: dict[int, set[int]] = {}

    async def story(swarm: Swarm) -> None:
        await until_settled(swarm, 20)
        for name, stage in SIX.items():
            part = swarm.members[name].worker.services.part
            took.setdefault(stage, set()).add(part.method.payload_bytes)
            update = swarm.members[name].worker.services.round_service
            stored = update.store.stored.values()
            assert {len(each.data) - ENVELOPE_BYTES for each in stored} == took[stage]
            settled = update.work.replica.settled_units()
            began = start_state(folder, manifest, stage)
            trained = part.layout.size
            assert torch.equal(settled[trained:], began[trained:]), "the model's own weights to the bit"
            assert not torch.equal(settled[:trained], began[:trained])

    swarm = Swarm(manifest)
    play(swarm, folder, tmp_path, story)
    for stage, sizes in took.items():
        all_trained = method_of(
            replace(manifest, model=shape, init_checkpoint=InitCheckpoint()),
            trained_layout(replace(manifest, model=shape), stage),
        ).payload_bytes
        factors = method_of(manifest, trained_layout(manifest, stage)).payload_bytes
        assert sizes == {factors}
        assert factors * 3 <= all_trained, "of matrices as small as these"
        names = {entry.name for entry in trained_layout(manifest, stage).entries}
        assert all(".lora_" in name for name in names)
        assert not any(".lora_" in entry.name for entry in frozen_layout(manifest, stage).entries)
    losses = swarm.losses(0)
    assert sum(losses[-20:]) < sum(losses[:20]) - 20 * 0.1, "it learns"
    home, weights, _ = exported(tmp_path, tmp_path / "model")
    tokens = swarm.text.tokens[:64].long().view(2, 32)
    ours = forward(weights, adapted, whole(adapted), tokens)
    torch.testing.assert_close(ours, logits(home, tokens), atol=1e-4, rtol=0)
    assert not torch.allclose(ours, logits(folder, tokens), atol=1e-2), "and not the model of before"


def riddle_corpus(count: int = 400, length: int = 12) -> torch.Tensor:
    """Random prompts as context, and answers that follow from their last byte."""
    chance, text = Random(0), list[int]()
    for _ in range(count):
        prompt = [chance.randrange(200) for _ in range(length // 2)]
        answer = [(prompt[-1] + step) % 8 + 200 for step in range(length // 2)]
        text += [*(-1 - token for token in prompt), *answer]
    return torch.tensor(text, dtype=torch.int32)


def test_lora_learns_answers_alone_by_sign_muon_and_a_newcomer_gets_the_base(folder, shape, tmp_path):
    adapted = replace(shape, lora=Lora(rank=2, alpha=8.0))
    manifest = from_model(
        folder,
        adapted,
        sync=Sync(method="sign-muon", warmup_rounds=1, learning_rate=2e-2),
        data=Data(tokenizer="t.json", format="messages", seq_len=16, micro_batch_size=2),
    )

    async def story(swarm: Swarm) -> None:
        await until_settled(swarm, 8)
        late = swarm.start("late", 1, in_flight=2)
        await swarm.until(lambda: late.worker.state == "training", 60.0)
        await until_settled_by(swarm, 22, len(SIX) + 1)

    swarm = Swarm(manifest)
    swarm.text = replace(swarm.text, tokens=riddle_corpus())
    play(swarm, folder, tmp_path, story)
    first = swarm.of("committed", "a", "b")[0].fields
    inputs, labels = swarm.text.microbatch(MicrobatchId(PeerId(first["origin"]), first["counter"]))
    assert 0 < int((labels == IGNORE_INDEX).sum()) < labels.numel()
    expected = loss(logits(folder, inputs), labels)  # torch leaves out the same labels.
    for stage in range(3):
        told = next(
            note.fields["loss"]
            for note in swarm.of("committed", *(name for name in SIX if SIX[name] == stage))
            if (note.fields["origin"], note.fields["counter"]) == (first["origin"], first["counter"])
        )
        assert abs(told - expected) < 1e-4
    assert first["tokens"] == labels.numel(), "work on context counts"
    losses = swarm.losses(0)
    assert sum(losses[-20:]) < sum(losses[:20]) - 20 * 0.5, "it learns"
    home, weights, _ = exported(tmp_path, tmp_path / "model")
    ours = forward(weights, adapted, whole(adapted), inputs)
    torch.testing.assert_close(ours, logits(home, inputs), atol=1e-4, rtol=0)


def test_lora_learns_answers_alone_by_local_steps_and_a_newcomer_gets_the_base(folder, shape, tmp_path):
    adapted = replace(shape, lora=Lora(rank=2, alpha=8.0))
    manifest = from_model(
        folder,
        adapted,
        stages=(shape.num_hidden_layers,),
        sync=Sync(method="local-steps", warmup_rounds=1, learning_rate=2e-2),
        data=Data(tokenizer="t.json", format="messages", seq_len=16, micro_batch_size=2),
    )
    swarm, began = Swarm(manifest), start_state(folder, manifest, 0)
    swarm.text = replace(swarm.text, tokens=riddle_corpus())
    trained = trained_layout(manifest, 0)
    assert all(".lora_" in entry.name for entry in trained.entries)

    async def story() -> None:
        swarm.open()
        for name in "abc":
            swarm.start(name, 0, in_flight=2, checkpoints=tmp_path / name / "checkpoints", start=folder)
        await until_settled_by(swarm, 8, 3)
        late = swarm.start("late", 0, in_flight=2)
        await swarm.until(lambda: late.worker.state == "training", 60.0)
        await until_settled_by(swarm, 22, 4)
        for name in ("a", "late"):
            services = swarm.members[name].worker.services
            settled = services.round_service.work.replica.settled_units()
            assert torch.equal(settled[trained.size :], began[trained.size :]), "the base to the bit"
            assert not torch.equal(settled[: trained.size], began[: trained.size])
        assert {note.fields["contributor"] for note in swarm.of("contribution_accepted", "a")} >= {late.peer}
        await swarm.close()

    run(story())
    assert shared_rounds(swarm) > 20
    losses = swarm.losses(0)
    assert sum(losses[-20:]) < sum(losses[:20]) - 20 * 0.5, "it learns"
    first = swarm.of("committed", "a")[0].fields
    inputs, labels = swarm.text.microbatch(MicrobatchId(PeerId(first["origin"]), first["counter"]))
    assert abs(first["loss"] - loss(logits(folder, inputs), labels)) < 1e-4
    home, weights, _ = exported(tmp_path, tmp_path / "model")
    ours = forward(weights, adapted, whole(adapted), inputs)
    torch.testing.assert_close(ours, logits(home, inputs), atol=1e-4, rtol=0)


@on_virtual_clock
async def test_without_the_folder_all_wait_and_an_archivist_that_has_it_is_enough(folder, shape, tmp_path):
    manifest = from_model(folder, shape)
    swarm = Swarm(manifest)
    swarm.open()
    alone = swarm.start("a", 0, in_flight=2)
    others = [swarm.start(name, stage) for name, stage in (("c", 1), ("d", 1), ("e", 2))]
    await swarm.during(75.0)
    assert not swarm.rounds()
    for member in (alone, *others):
        assert any("init_checkpoint: PATH" in text for event, text in member.said if event == "no_weights")
    await archived(swarm, str(tmp_path / "archive"), Policy(), folder)
    await swarm.until(lambda: len(swarm.rounds()) == 4, 30.0)
    await swarm.until(lambda: min(s for _, s in swarm.rounds().values()) > 3, 60.0)
    assert all(member.worker.state == "training" for member in (alone, *others))
    await swarm.close()
    assert {round for round, _ in fetched(swarm).values()} == {-1}


@on_virtual_clock
async def test_an_archivist_archives_what_comes_later_and_refuses_nobody(folder, shape, tmp_path):
    manifest = from_model(folder, shape)
    heard: list[log_events.Refused] = []
    swarm = Swarm(manifest)
    swarm.open()
    for name, stage in SIX.items():
        swarm.start(name, stage, in_flight=2, start=folder)
    await swarm.until(lambda: len(swarm.rounds()) == len(SIX), 30.0)
    archivist, archive, said = await archived(swarm, str(tmp_path / "archive"), Policy())
    archivist.circle.log_event = lambda what: (
        heard.append(what) if isinstance(what, log_events.Refused) else None
    )
    await archivist.once()
    assert not archive.entries, "of what the run starts from nothing is archived"
    await until_settled(swarm, 8)
    await archivist.once()
    assert {entry.stage for entry in archive.entries} == {0, 1, 2}
    assert min(entry.round for entry in archive.entries) > 0
    assert not heard, said
    await swarm.close()
    assert not swarm.of("refused")


def test_a_peer_whose_folder_is_another_model_ends_with_the_reason(folder, shape, tmp_path):
    manifest = from_model(folder, shape)
    other = save(tmp_path / "other", shape, initializer_range=0.1)

    async def story() -> None:
        swarm.open()
        swarm.start("a", 0, start=other)
        await swarm.during(10.0)

    swarm = Swarm(manifest)
    with pytest.raises(UserError, match="holds other weights than those that the run starts from"):
        run(story())


@on_virtual_clock
async def test_a_start_that_is_not_the_manifests_is_refused_and_an_honest_one_taken(folder, shape, tmp_path):
    manifest = from_model(folder, shape)
    swarm = Swarm(manifest)
    swarm.open()
    liar = swarm.start("liar", 0)
    honest = swarm.start("honest", 0, start=folder)
    for name, stage in (("c", 1), ("e", 2)):
        swarm.start(name, stage, start=folder)
    await swarm.until(lambda: liar.worker.services is not None, 10.0)
    units = start_state(folder, manifest, 0) + 1
    true = honest.worker.services.snapshot_service.snapshots.start.weights()
    liar.worker.services.snapshot_service.snapshots.hold(replace(true, units=units))
    newcomer = swarm.start("b", 0, in_flight=2)
    await swarm.until(lambda: newcomer.worker.state == "training", 60.0)
    await swarm.close()
    refused = [note.what for note in swarm.notes if isinstance(note.what, log_events.Refused)]
    assert any("another start than the run's" in what.reason for what in refused)


@on_virtual_clock
async def test_chunks_that_do_not_make_up_the_start_are_given_up_and_others_asked(folder, shape, tmp_path):
    manifest = from_model(folder, shape)
    swarm = Swarm(manifest)
    swarm.open()
    liar = swarm.start("liar", 0)
    for name, stage in (("c", 1), ("e", 2)):
        swarm.start(name, stage, start=folder)
    await swarm.until(lambda: liar.worker.services is not None, 10.0)
    held, digest = (
        liar.worker.services.snapshot_service.snapshots,
        bytes.fromhex(manifest.init_checkpoint.digests[0]),
    )
    held.start = held._make_snapshot(-1, start_state(folder, manifest, 0) + 1, digest, START, 0)
    newcomer = swarm.start("b", 0, in_flight=2)
    await swarm.until(lambda: any("do not make up its digest" in text for _, text in newcomer.said), 30.0)
    assert newcomer.worker.state == "joining"
    swarm.start("honest", 0, start=folder)
    await swarm.until(lambda: newcomer.worker.state == "training", 60.0)
    assert newcomer.worker.services.snapshot_service.snapshots.start.root.digest == digest
    await swarm.close()


def test_a_swarm_that_starts_again_goes_on_from_its_disks_and_not_from_the_start(folder, shape, tmp_path):
    manifest = from_model(folder, shape)

    async def story(swarm: Swarm) -> None:
        await until_settled(swarm, 10)

    async def further(swarm: Swarm) -> None:
        await swarm.until(lambda: len(swarm.of("settled")) > 12, 60.0)

    play(Swarm(manifest), folder, tmp_path, story)
    again = Swarm(manifest)
    play(again, folder, tmp_path, further)
    assert min(note.fields["round"] for note in again.of("settled")) > 8
