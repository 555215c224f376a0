"""A download's chunks on disk: what was cut is gone on with, and nothing but the right bytes is believed."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.lab.world.virtual_time import run
from peers.state import partial_download
from peers.state.partial_download import Download, KeptChunks
from protocols.messages.table import SnapshotRoot

CHUNK = 64


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr("swarmnet.snapshots.fetch.SMALLEST_CHUNK_BYTES", CHUNK)


def at_once(story: Callable) -> Callable:
    """What is meant for a thread runs at once, on a virtual clock."""

    @wraps(story)
    def test(*arguments, **fixtures) -> None:
        run(story(*arguments, **fixtures))

    return test


def state(seed: int, size: int = 20 * CHUNK + 7, like: bytes = b"", equal: Iterable[int] = ()) -> bytes:
    """Random bytes; the chunks in `equal` are those of `like`, one of them twice if there is room."""
    made = bytearray(Random(seed).randbytes(size))
    for index in equal:
        made[index * CHUNK : (index + 1) * CHUNK] = like[index * CHUNK : (index + 1) * CHUNK]
    if size >= 3 * CHUNK:
        made[CHUNK : 2 * CHUNK] = made[:CHUNK]
    return bytes(made)


def chunks(data: bytes) -> list[bytes]:
    return [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]


def hashes(data: bytes) -> list[bytes]:
    return [hashlib.sha256(chunk).digest() for chunk in chunks(data)]


def kept_in(folder: Path | None) -> tuple[KeptChunks, list[str]]:
    said: list[str] = []
    return KeptChunks(folder, lambda event, text: said.append(f"{event}: {text}")), said


async def life(kept: KeptChunks, data: bytes, arriving: Iterable[int]) -> tuple[set[int], Download]:
    """A peer begins the download and takes these chunks before it is cut; what it found on disk."""
    download = Download(kept, hashes(data), len(data))
    here = await download.resume()
    for index in arriving:
        download.put(index, chunks(data)[index])
        download.keep(index)
        await asyncio.sleep(0)
    await download.close()
    return here, download


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


# -- cut and gone on with ---------------------------------------------------------------------------------

DAMAGES = (
    lambda data: bytes([data[0] ^ 1]) + data[1:],
    lambda data: data[: len(data) // 2],
    lambda data: b"",
    lambda data: data + b"x",
)


@given(
    st.integers(0, 2**32), st.integers(1, 12 * CHUNK), st.lists(st.floats(0, 1), max_size=3),
    st.lists(st.sampled_from(DAMAGES), max_size=3),
)  # fmt: skip
def test_a_download_that_is_cut_at_any_chunk_goes_on_with_what_was_there(seed, size, cuts, damages):
    """Some lives, each cut somewhere; then some files are damaged. What is left is taken up, bit for bit."""
    chance, data = Random(seed), state(seed, size)
    count = len(chunks(data))

    async def story(folder: Path) -> None:
        kept, said = kept_in(folder)
        on_disk: set[int] = set()
        for cut in cuts:
            missing = [index for index in range(count) if index not in on_disk]
            chance.shuffle(missing)
            arriving = missing[: int(cut * len(missing))]
            here, _ = await life(kept, data, arriving)
            assert here == on_disk
            written = {hashes(data)[index] for index in on_disk.union(arriving)}
            on_disk = {index for index in range(count) if hashes(data)[index] in written}
        for name, damage in zip(
            chance.sample(sorted(names(folder)), len(names(folder))), damages, strict=False
        ):
            (folder / name).write_bytes(damage((folder / name).read_bytes()))
            on_disk -= {index for index in on_disk if hashes(data)[index].hex() == name}
        here, download = await life(kept, data, ())
        assert here == on_disk
        assert all(download.part(index) == chunks(data)[index] for index in here)
        assert names(folder) == {hashes(data)[index].hex() for index in here}, "what was damaged is gone"
        for index in set(range(count)) - here:
            download.put(index, chunks(data)[index])
        assert download.data == data
        assert said == []

    with TemporaryDirectory() as place:
        run(story(Path(place) / "download"))


@at_once
async def test_a_chunk_counts_for_every_state_in_which_it_occurs(tmp_path):
    kept, _ = kept_in(tmp_path / "download")
    older = state(1)
    newer = state(2, like=older, equal=(3, 8, 9))
    await life(kept, older, (3, 5, 8))
    here, download = await life(kept, newer, ())
    assert here == {3, 8}
    assert download.part(8) == chunks(older)[8]


@at_once
async def test_only_the_newest_download_is_kept_and_from_its_first_chunk_on(tmp_path):
    kept, _ = kept_in(tmp_path / "download")
    older = state(1)
    newer = state(2, like=older, equal=(3,))
    await life(kept, older, range(2, 20))
    await life(kept, newer, ())
    assert len(names(tmp_path / "download")) == 18, "nothing has come of the newer one yet"
    await life(kept, newer, (7,))
    assert names(tmp_path / "download") == {hashes(newer)[index].hex() for index in (3, 7)}


@at_once
async def test_what_is_no_chunk_is_neither_believed_nor_followed_and_goes(tmp_path):
    folder, data = tmp_path / "download", state(1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(chunks(data)[4])
    kept, said = kept_in(folder)
    await life(kept, data, (2,))
    (folder / hashes(data)[3].hex()).mkdir()
    (folder / hashes(data)[4].hex()).symlink_to(elsewhere)
    os.mkfifo(folder / hashes(data)[5].hex())
    (folder / hashes(data)[6].hex()).with_suffix(".part").write_bytes(chunks(data)[6])
    (folder / "notes.txt").write_text("mine")
    (folder / ("z" * 64)).write_text("no number")
    (folder / "more" / "and more").mkdir(parents=True)
    here, _ = await life(kept, data, (4, 5, 9))
    assert here == {2}
    assert names(folder) == {hashes(data)[index].hex() for index in (2, 4, 5, 9)}
    assert elsewhere.read_bytes() == chunks(data)[4], "what a link leads to is not touched"
    assert said == []
    await kept.remove()
    assert not folder.exists()


@at_once
async def test_of_a_download_that_is_done_nothing_is_left(tmp_path):
    kept, _ = kept_in(tmp_path / "state" / "download")
    await kept.remove()
    await life(kept, state(1), (1, 2, 3))
    await kept.remove()
    assert names(tmp_path / "state") == set()
    assert (await life(kept, state(1), ()))[0] == set()


@at_once
async def test_without_a_disk_nothing_is_kept_and_nothing_is_said():
    kept, said = kept_in(None)
    data = state(1)
    _, download = await life(kept, data, range(5))
    assert download.part(3) == chunks(data)[3]
    assert (await life(kept, data, ()))[0] == set()
    await kept.remove()
    assert said == []


@at_once
async def test_half_of_a_state_on_disk_is_worth_going_on_with(tmp_path):
    kept, _ = kept_in(tmp_path / "download")
    data = state(1, size=20 * CHUNK)
    root = SnapshotRoot(7, 0, len(data), b"seven", b"", hashes(data))
    other = SnapshotRoot(8, 0, len(data), b"eight", b"", hashes(state(2, size=20 * CHUNK)))
    assert await kept.worth_resuming([root, other]) == set()
    await life(kept, data, range(2, 11))
    assert await kept.worth_resuming([root, other]) == set()
    await life(kept, data, (0,))
    assert await kept.worth_resuming([root, other]) == {(7, b"seven")}, "its second chunk is as its first"
    for path in (tmp_path / "download").iterdir():
        path.write_bytes(b"")
    assert await kept.worth_resuming([root, other]) == set(), "as power loss leaves files"


# -- a disk that refuses ----------------------------------------------------------------------------------


def full_after(monkeypatch, count: int) -> list[Path]:
    """The disk takes so many more chunks, and half of the next."""
    written: list[Path] = []
    whole = Path.write_bytes

    def write(path: Path, data: bytes) -> int:
        if len(written) == count:
            whole(path, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        return whole(path, data)

    monkeypatch.setattr(Path, "write_bytes", write)
    return written


@at_once
async def test_a_full_disk_is_said_once_and_costs_only_what_did_not_fit(tmp_path, monkeypatch):
    kept, said = kept_in(tmp_path / "download")
    data = state(1)
    with monkeypatch.context() as patch:
        full_after(patch, 3)
        _, download = await life(kept, data, range(2, 12))
        await life(kept, data, range(12, 15))
    assert download.part(11) == chunks(data)[11], "it goes on in memory"
    assert len(said) == 1
    assert said[0].startswith(f"chunks_not_kept: {tmp_path / 'download'}: cannot be written: No space left")
    assert "fetched again if this peer is restarted" in said[0]
    assert names(tmp_path / "download") == {hashes(data)[index].hex() for index in (2, 3, 4)}
    assert (await life(kept, data, (5, 6)))[0] == {2, 3, 4}, "there is room again"
    assert (await life(kept, data, ()))[0] == {2, 3, 4, 5, 6}


@at_once
async def test_a_folder_that_cannot_be_made_is_said_once(tmp_path):
    (tmp_path / "file").touch()
    kept, said = kept_in(tmp_path / "file" / "download")
    data = state(1)
    for _ in range(2):
        here, download = await life(kept, data, range(5))
        assert here == set()
        assert download.part(4) == chunks(data)[4]
    await kept.remove()
    assert len(said) == 1
    assert "Not a directory" in said[0]


@at_once
async def test_a_disk_that_may_only_be_read_gives_what_it_has(tmp_path, monkeypatch):
    kept, said = kept_in(tmp_path / "download")
    data = state(1)
    await life(kept, data, (2, 3))
    (tmp_path / "download" / hashes(data)[3].hex()).write_bytes(b"damaged")

    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("unlink", "mkdir", "write_bytes"):
        monkeypatch.setattr(Path, name, refused)
    assert (await life(kept, data, (5,)))[0] == {2}
    assert len(said) == 1
    assert "Read-only file system" in said[0]


# -- beside the event loop --------------------------------------------------------------------------------


async def test_files_are_read_and_written_in_threads_and_what_waits_takes_no_memory(tmp_path, monkeypatch):
    """A disk that stands still: the event loop goes on, and a close waits for one chunk only."""
    goes_on, here = threading.Event(), threading.get_ident()
    threads: list[int] = []
    write, sizes = partial_download._write_chunk, partial_download._sizes

    def slow(path: Path, chunk: memoryview) -> None:
        threads.append(threading.get_ident())
        goes_on.wait(30.0)
        write(path, chunk)

    def seen(folder: Path) -> dict[bytes, int]:
        threads.append(threading.get_ident())
        return sizes(folder)

    monkeypatch.setattr(partial_download, "_write_chunk", slow)
    monkeypatch.setattr(partial_download, "_sizes", seen)
    kept, _ = kept_in(tmp_path / "download")
    data = state(1)
    download = Download(kept, hashes(data), len(data))
    await download.resume()
    for index in range(2, 20):
        download.put(index, chunks(data)[index])
        download.keep(index)
        await asyncio.sleep(0)
    assert len(threads) <= 2
    assert all(isinstance(index, int) for index in download._unwritten)
    closing = asyncio.create_task(download.close())
    await asyncio.sleep(0)
    goes_on.set()
    await closing
    assert len(names(tmp_path / "download")) <= 1
    assert here not in threads
