"""A worker's checkpoints on a disk that refuses: said now and then, tried again all the time."""

import asyncio
from pathlib import Path

import pytest
import torch
from clocks import on_virtual_clock

from peers.state import checkpoint_file
from peers.state.checkpoint_writer import CheckpointWriter
from peers.state.snapshot_store import Weights
from swarmnet.rounds.history import START


@pytest.fixture
def disk(monkeypatch, tmp_path):
    """A Disk that is full until `room` is set, and what it says, with the time."""
    said = []

    class Full(CheckpointWriter):
        room = False

    def write(*_):
        if not made.room:
            raise checkpoint_file.DiskError("stage-0: cannot be written: No space left on device")
        path = Path(tmp_path / "stage-0")
        path.touch()
        return path

    class Nothing:
        manifest = layout = state = None

        @property
        def method(self):
            return self

        def of_round(self, round):
            return []

    monkeypatch.setattr(checkpoint_file, "write", write)
    made = Full(
        folder=tmp_path,
        signed=Nothing(),
        stage=0,
        part=Nothing(),
        compute=None,
        log_event=lambda *_, **__: None,
        notify=lambda event, _: said.append((round(asyncio.get_running_loop().time()), event)),
        digests=Nothing(),
        past=lambda round: None,
    )
    return made, said


@on_virtual_clock
async def test_a_full_disk_is_said_every_minute_and_used_as_soon_as_there_is_room(disk):
    made, said = disk
    for second in range(150):
        made.room = second == 149
        await made._write(Weights(torch.zeros(1), second, START))
        await asyncio.sleep(1)
    first = said[0][0]
    assert said == [(first + at, "checkpoint_failed") for at in (0, 60, 120)] + [(first + 149, "checkpoint")]


@on_virtual_clock
async def test_the_last_try_is_always_said(disk):
    made, said = disk
    await made._write(Weights(torch.zeros(1), 1, START))
    await made._write(Weights(torch.zeros(1), 1, START), last=True)
    assert [event for _, event in said] == ["checkpoint_failed"] * 2
