"""What goes wrong around an archive: liars, stores that are not reached, disks that are full, newcomers that
go again. None of it stops the archivist, and none of it spoils what is archived."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from functools import partial

import pytest
from archived import MANIFEST, SIGNED, SLOW, STAGE, Desk, archived, entry, open_archive, trained, unreachable
from clocks import on_virtual_clock
from fsspec.implementations.memory import MemoryFileSystem
from swarm import Swarm

from peers.stageless.archivist import serve
from peers.stageless.archivist.archivist import Policy
from peers.state.archive import INDEX, Archive
from peers.state.archive_store import ArchiveError, open_store
from protocols.messages.table import GetChunk, GetState
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.identity import Identity
from protocols.signed.records import RECORD_SECONDS
from swarmnet.rounds.history import START

FAR = 4_000_000_000
"""A round that no run reaches."""


# -- liars --------------------------------------------------------------------------------------------


def signed_far_ahead(swarm: Swarm, name: str) -> list[bytes]:
    liar = Identity.from_seed(name.encode())
    return [
        seal(liar, swarm.signed.run_id, EnvelopeKind.SETTLED, 0, at, at, START + bytes(32))
        for at in range(FAR, FAR + 4)
    ]


@on_virtual_clock
async def test_a_peer_that_signs_rounds_far_ahead_pushes_out_nobody_elses_words_and_is_forgotten(tmp_path):
    swarm = Swarm(MANIFEST, seed=1)
    await trained(swarm, {"a": 0, "b": 0, "c": 1}, 5, compute=SLOW)
    honest, liar = (swarm.members[name].peer for name in "ab")
    swarm.members["b"].worker.services.digests.restore(signed_far_ahead(swarm, "b"))
    archivist, archive, said = await archived(swarm, str(tmp_path), Policy())
    await archivist.once()
    assert not [text for text in said if "not archived" in text]
    assert archive.newest(0)[0].signers == (honest,)
    around = archivist.circle.states[0][0]
    assert min(around.statements[liar]) == FAR
    for name in swarm.living():
        await swarm.crash(name)
    await swarm.during(RECORD_SECONDS)  # The directory forgets them.
    await archivist.once()
    assert around.statements == {}
    archivist.circle.close()


# -- newcomers that go again --------------------------------------------------------------------------


async def test_a_newcomer_that_goes_while_weights_are_read_leaves_none_in_memory(tmp_path):
    desk = Desk(str(tmp_path))
    desk.put(3)
    gone = await desk.greeted("e")
    assert not desk.serving.on_request(gone, GetState())
    desk.serving.lost(gone)
    await desk.done()
    assert desk.notes == [], "they were read"
    assert desk.held() == []
    desk.serving.close()


async def test_a_newcomer_is_offered_what_the_archive_has_now_and_gets_the_rest_of_what_it_fetches(tmp_path):
    desk = Desk(str(tmp_path))
    desk.put(3)
    peer = await desk.greeted("e")
    asked = partial(desk.serving.on_request, peer)
    assert not asked(GetState())
    await desk.done()
    assert asked(GetState())
    assert desk.held() == [3]
    digest = desk.snapshots.held[0].root.digest
    desk.put(7)
    assert not asked(GetState()), "what is held is not the newest"
    assert asked(GetChunk(digest, 0))
    await desk.done()
    assert asked(GetState())
    assert desk.held() == [7, 3]
    desk.serving.close()


async def test_who_fetches_chunks_over_carriers_is_not_let_go_for_its_silence(tmp_path, monkeypatch):
    desk = Desk(str(tmp_path))
    await desk.greeted("e")
    monkeypatch.setattr(serve, "IDLE_SECONDS", 0.2)
    began = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() < began + 0.4:
        desk.serving.gave(STAGE, 7)
        desk.serving._beat()
        await asyncio.sleep(0.01)
    assert len(desk.serving.served()) == 1
    assert desk.serving.served_bytes[STAGE] >= 7
    desk.serving.gave(STAGE + 1, 7)
    async with asyncio.timeout(5.0):
        while desk.serving.served():
            desk.serving._beat()
            await asyncio.sleep(0.01)
    await desk.done()
    desk.serving.close()


async def test_a_damaged_newest_checkpoint_is_read_once_and_the_one_before_it_offered(tmp_path):
    desk = Desk(str(tmp_path))
    desk.put(3)
    desk.put(7, damaged=True)
    peer = await desk.greeted("e")
    assert not desk.serving.on_request(peer, GetState())
    await desk.done()
    for _ in range(3):
        assert desk.serving.on_request(peer, GetState())
        await desk.done()
    assert desk.held() == [3]
    assert [event for event, _ in desk.notes] == ["archive_unusable"]
    desk.serving.close()


async def test_a_full_disk_for_temporary_files_is_noted(tmp_path, monkeypatch):
    desk = Desk(str(tmp_path / "archive"))
    desk.put(3)
    peer = await desk.greeted("e")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert not desk.serving.on_request(peer, GetState())
    await desk.done()
    ((event, fields),) = desk.notes
    assert event == "archive_unusable"
    assert "TMPDIR" in fields["reason"]
    desk.serving.close()


async def test_a_store_that_is_not_reached_when_a_newcomer_asks_is_noted(tmp_path, monkeypatch):
    desk = Desk(f"memory://{tmp_path.name}/served")
    desk.put(3)
    peer = await desk.greeted("e")
    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, "cat_file", unreachable)
        assert not desk.serving.on_request(peer, GetState())
        await desk.done()
    assert "Unreachable: no route" in desk.notes[0][1]["reason"]
    assert not desk.serving.on_request(peer, GetState()), "it is read again"
    await desk.done()
    assert desk.held() == [3]
    desk.serving.close()


# -- the index ----------------------------------------------------------------------------------------


def test_an_index_of_many_checkpoints_that_many_have_signed_is_read(tmp_path):
    archive = Archive(open_store(str(tmp_path)))
    archive.open(SIGNED)
    signers = tuple(f"12D3KooW{number:044}" for number in range(64))
    archive.entries = tuple(entry(0, at, b"x", signers=signers) for at in range(1200))
    archive.put(entry(0, 1200, b"x", signers=signers), b"x")
    assert (tmp_path / INDEX).stat().st_size > 4 * 1024 * 1024
    assert len(open_archive(str(tmp_path)).entries) == 1201


def test_no_more_is_added_than_a_reader_takes(tmp_path, monkeypatch):
    archive = Archive(open_store(str(tmp_path)))
    archive.open(SIGNED)
    for at in range(3):
        archive.put(entry(0, at, b"x"), b"x")
    monkeypatch.setattr("peers.state.archive.INDEX_LIMIT", (tmp_path / INDEX).stat().st_size + 9)
    with pytest.raises(ArchiveError, match=r"is full.*keep fewer \(archiving.newest"):
        archive.put(entry(0, 3, b"x"), b"x")
    assert open_archive(str(tmp_path)).entries == archive.entries
    assert len(list(tmp_path.glob("stage-*"))) == len(archive.entries), "no file that the index does not name"
    archive.prune(4, 1, 0)
    archive.put(entry(0, 100, b"x"), b"x")
    assert len(open_archive(str(tmp_path)).entries) == 2


@on_virtual_clock
async def test_a_full_archive_takes_more_once_less_of_it_is_to_stay(tmp_path, monkeypatch):
    swarm = Swarm(MANIFEST, seed=1)
    await trained(swarm, {"a": 0, "c": 1}, 4, compute=SLOW)
    archivist, archive, said = await archived(swarm, str(tmp_path), Policy(newest=100))
    for stage, at in ((stage, at) for stage in (0, 1) for at in range(3)):
        archive.put(entry(stage, at, b"old"), b"old")
    monkeypatch.setattr("peers.state.archive.INDEX_LIMIT", (tmp_path / INDEX).stat().st_size)
    await archivist.once()
    assert len([text for text in said if "is full" in text]) == 2
    assert archive.entries == open_archive(str(tmp_path)).entries
    archivist.policy = replace(archivist.policy, newest=1)
    await archivist.once()
    assert [len(archive.newest(stage)) for stage in (0, 1)] == [1, 1]
    assert min(archive.newest(stage)[0].round for stage in (0, 1)) >= 3
    archivist.circle.close()
    await swarm.close()


# -- stores that are not reached ----------------------------------------------------------------------


@on_virtual_clock
async def test_a_store_that_is_not_reached_is_said_and_tried_again_the_next_time(tmp_path, monkeypatch):
    swarm = Swarm(MANIFEST, seed=1)
    await trained(swarm, {"a": 0, "c": 1}, 4, compute=SLOW)
    place = f"memory://{tmp_path.name}/swarm"
    archivist, archive, said = await archived(swarm, place, Policy())
    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, "pipe_file", unreachable)
        await archivist.once()
    told = [text for text in said if "not archived this time" in text and "Unreachable" in text]
    assert len(told) == 2
    assert archive.entries == ()
    await archivist.once()
    assert all(archive.newest(stage) for stage in (0, 1))
    archivist.circle.close()
    await swarm.close()
