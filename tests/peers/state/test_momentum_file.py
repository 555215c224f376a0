"""The momentum on the disk: exact to bfloat16, and whatever else lies at its place is refused in one line."""

import asyncio
from dataclasses import replace
from random import Random

import pytest
import torch
from safetensors.torch import save
from swarm import tiny_manifest

from peers.compute.executor import InlineCompute
from peers.compute.stage_part import build_stage_part
from peers.config.errors import UserError
from peers.lab.world.virtual_time import run
from peers.state.checkpoint_file import content_hash
from peers.state.momentum_file import DTYPE, NAME, MomentumFile, MomentumKeeper
from swarmnet.identifiers import RunId
from swarmnet.optimizer.method import KeepsMomentum
from swarmnet.run.schema import Sync

MANIFEST = tiny_manifest(sync=Sync(method="sign-muon"))
STAGE = 1
LAYOUT = build_stage_part(MANIFEST, STAGE).layout
RANDOM = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(0)).to(DTYPE)


def file_in(folder, **changes):
    return replace(MomentumFile(folder, MANIFEST.run_id(), STAGE, LAYOUT), **changes)


def forged(file, **changes):
    """Write what a forger can: with a fitting hash."""
    tensors = {NAME: changes.pop(NAME, RANDOM)}
    metadata = {**file._expected(), "round": "7", **changes}
    metadata["content"] = content_hash(metadata, tensors)
    file.path.write_bytes(save(tensors, metadata))


def test_what_was_written_is_read_and_nothing_else_remains(tmp_path):
    file = file_in(tmp_path)
    for round in (3, 7):
        file.write(round, RANDOM * round)
    round, momentum = file.read()
    assert round == 7
    assert torch.equal(momentum, RANDOM * 7)
    assert list(tmp_path.iterdir()) == [file.path]


@pytest.mark.parametrize(
    "changes",
    [{"run_id": RunId("00" * 32)}, {"stage": 2}, {"layout": build_stage_part(MANIFEST, 0).layout}],
    ids=["run", "stage", "layout"],
)
def test_the_file_of_another_run_stage_or_layout_is_refused(tmp_path, changes):
    theirs = file_in(tmp_path, **changes)
    momentum = torch.zeros(theirs.layout.size, dtype=DTYPE)
    theirs.write(7, momentum)
    mine = file_in(tmp_path)
    theirs.path.replace(mine.path)
    with pytest.raises(UserError, match=r"another run, stage or layout|longer than"):
        mine.read()


@pytest.mark.parametrize(
    "changes",
    [
        {"round": "-1"}, {"round": "9" * 5000}, {"stage": "2"},
        {NAME: RANDOM.float()}, {NAME: RANDOM[:-1]}, {NAME: RANDOM.view(1, -1)},
        {NAME: torch.full_like(RANDOM, torch.nan)},
        {NAME: torch.zeros(20_000_000, dtype=DTYPE)},
    ],
)  # fmt: skip
def test_what_no_writer_has_written_is_refused(tmp_path, changes):
    forged(file_in(tmp_path), **changes)
    with pytest.raises(UserError, match="cannot be used"):
        file_in(tmp_path).read()


def test_flipped_bits_and_torn_files_are_refused(tmp_path):
    file, chance = file_in(tmp_path), Random(0)
    file.write(7, RANDOM)
    intact = file.path.read_bytes()
    for _ in range(50):
        damaged = bytearray(intact)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        file.path.write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be used"):
            file.read()
    for length in (0, 7, 8, 300, len(intact) - 1):
        file.path.write_bytes(intact[:length])
        with pytest.raises(UserError, match="cannot be used"):
            file.read()


def kept(folder, part, story):
    """Run `story(keeper)` and return the events."""
    events = []

    async def whole_story():
        keeper = MomentumKeeper(
            folder=folder,
            manifest=MANIFEST,
            run_id=MANIFEST.run_id(),
            stage=STAGE,
            part=part,
            compute=InlineCompute(lambda priority: 0.01),
            log_event=events.append,
        )
        await story(keeper)

    run(whole_story())
    return events


@pytest.mark.parametrize(("age", "used"), [(0, True), (10, True), (1000, False), (-1, False)])
def test_a_momentum_that_is_too_old_or_of_a_later_round_is_not_used(tmp_path, age, used):
    before, after = build_stage_part(MANIFEST, STAGE), build_stage_part(MANIFEST, STAGE)
    assert isinstance(before.method, KeepsMomentum)
    before.method.momentum.copy_(RANDOM)
    assert kept(tmp_path, before, lambda keeper: keeper.save(5)) == []
    (event,) = kept(tmp_path, after, lambda keeper: keeper.restore(5 + age))
    assert event.name == ("momentum_restored" if used else "momentum_ignored")
    assert torch.equal(after.method.momentum, RANDOM.float() * used)


def test_without_a_file_or_a_folder_or_such_a_momentum_nothing_happens(tmp_path):
    part = build_stage_part(MANIFEST, STAGE)
    demo = build_stage_part(tiny_manifest(), STAGE)
    for folder, of in ((tmp_path, part), (None, part), (tmp_path, demo)):
        assert kept(folder, of, lambda keeper: keeper.restore(5)) == []
    for folder, of in ((None, part), (tmp_path, demo)):
        assert kept(folder, of, lambda keeper: keeper.save(5)) == []
    assert not list(tmp_path.iterdir())


def test_a_disk_that_refuses_is_logged(tmp_path):
    (tmp_path / "file").write_text("no folder")
    part = build_stage_part(MANIFEST, STAGE)
    (event,) = kept(tmp_path / "file", part, lambda keeper: keeper.save(5))
    assert "cannot be written" in event.reason


def test_it_is_written_every_few_seconds(tmp_path):
    part = build_stage_part(MANIFEST, STAGE)

    async def story(keeper):
        saving = asyncio.create_task(keeper.save_forever(60.0, lambda: 9))
        await asyncio.sleep(61.0)
        saving.cancel()

    assert kept(tmp_path, part, story) == []
    assert file_in(tmp_path).read()[0] == 9
