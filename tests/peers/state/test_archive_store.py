"""Where archives lie elsewhere than in a folder: lines that break, stores that do not answer, passwords."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest
from archived import SIGNED, Unreachable, unreachable
from fsspec.implementations.memory import MemoryFileSystem

from peers.config.remote_files import retry_until_reached
from peers.lab.world.virtual_time import run
from peers.state.archive import Archive
from peers.state.archive_restore import Restoring
from peers.state.archive_store import ArchiveError, FolderStore, StoreUnreachable, open_store
from peers.tools.owner.run_facts import from_archive


def test_a_folder_with_a_link_to_a_device_in_it_is_said_and_not_read(tmp_path):
    (tmp_path / "order.bin").symlink_to("/dev/null")
    with pytest.raises(ArchiveError, match=r"order\.bin: is no file"):
        FolderStore(tmp_path).read("order.bin")
    assert FolderStore(tmp_path).read("none.bin") is None


def test_a_file_is_read_whatever_length_an_index_claims(tmp_path):
    (tmp_path / "small").write_bytes(b"abc")
    assert FolderStore(tmp_path).read("small", 1 << 62) == b"abc"
    with pytest.raises(ArchiveError):
        FolderStore(tmp_path).read("small", 2)


@pytest.mark.parametrize(
    ("broken", "use", "words"),
    [
        ("cat_file", lambda store: store.read("x"), "cannot be read"),
        ("pipe_file", lambda store: store.write("x", b""), "cannot be written"),
        ("makedirs", lambda store: store.write("x", b""), "cannot be written"),
        ("rm_file", lambda store: store.delete("x"), "cannot be removed"),
    ],
)
def test_whatever_a_backend_raises_is_told_with_its_kind_and_the_place(monkeypatch, broken, use, words):
    store = open_store("memory://broken/a")
    monkeypatch.setattr(MemoryFileSystem, broken, unreachable)
    with pytest.raises(ArchiveError, match=rf"memory://broken/a/x: {words}: Unreachable: no route"):
        use(store)


def test_a_backend_that_cannot_connect_is_told_with_its_kind_and_the_place(monkeypatch):
    monkeypatch.setattr("fsspec.core.url_to_fs", unreachable)
    with pytest.raises(ArchiveError, match="sftp://host/a: cannot be opened: Unreachable: no route"):
        open_store("sftp://host/a")


def test_what_stands_before_the_host_of_a_store_is_told_to_nobody(monkeypatch):
    secret = "sftp://bob:s3cret@host/runs/a"

    def refuses(url, **_):
        assert url == secret
        raise Unreachable(f"no route to {url}")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuses)
    with pytest.raises(StoreUnreachable, match="sftp://host/runs/a: cannot be opened") as told:
        open_store(secret)
    assert "s3cret" not in str(told.value)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **_: (Line(skip_instance_cache=True), "/runs/a"))
    archive = Archive(open_store(secret))
    archive.open(SIGNED)
    assert from_archive(archive, SIGNED, 0.0).origin == "the archive sftp://host/runs/a"
    assert Restoring(secret, SIGNED, lambda *_: None).url == "sftp://host/runs/a"


def test_an_archivist_waits_for_a_store_that_is_not_reached_when_it_starts(monkeypatch):
    said, connections = [], iter([unreachable, unreachable, lambda *_, **__: (Line(), "/late")])
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda *a, **b: next(connections)(*a, **b))

    async def story():
        began = asyncio.get_running_loop().time()
        store = await retry_until_reached(
            lambda: to_thread_of_this_one(open_store, "sftp://host/late"), StoreUnreachable, said.append
        )
        return store, asyncio.get_running_loop().time() - began

    store, seconds = run(story())
    assert store.url == "sftp://host/late"
    assert seconds == pytest.approx(15.0)
    assert [text.rpartition("; ")[2] for text in said] == [
        "trying again in 5 s (Ctrl+C stops)", "trying again in 10 s (Ctrl+C stops)"
    ]  # fmt: skip


@pytest.mark.parametrize("somebody_trains", [False, True])
def test_a_worker_waits_for_an_archive_that_is_away_until_somebody_trains_its_stage(
    monkeypatch, tmp_path, somebody_trains
):
    said, connections = [], iter([unreachable, unreachable, lambda *_, **__: (Line(), "/none")])
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda *a, **b: next(connections)(*a, **b))
    monkeypatch.setattr(asyncio, "to_thread", to_thread_of_this_one)
    restoring = Restoring("sftp://host/none", SIGNED, lambda _, text: said.append(text))

    async def story():
        loop = asyncio.get_running_loop()
        began = loop.time()
        await restoring.bring(tmp_path, 0, None, lambda: somebody_trains and loop.time() >= began + 10.0)
        return loop.time() - began

    assert run(story()) == pytest.approx(15.0)
    last = "trying again in 10 s (Ctrl+C stops)" if somebody_trains else "no checkpoint of stage 0"
    assert said[-1].endswith(last)


def test_a_strange_answer_of_a_store_in_use_is_no_reason_to_give_it_up(monkeypatch):
    store = open_store("memory://strange/a")

    def strange(*_, **__):
        raise ValueError("half an answer")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", strange)
    with pytest.raises(StoreUnreachable, match="cannot be read: ValueError: half an answer"):
        store.read("x")
    with pytest.raises(ArchiveError) as told:
        open_store("nowhere://a")
    assert not isinstance(told.value, StoreUnreachable)


async def to_thread_of_this_one(function, *arguments):
    return function(*arguments)


class Line(MemoryFileSystem):
    """As fsspec's sftp: one connection, which stays broken once it broke, and files written in place."""

    cuts: ClassVar[list[str]] = []
    """Paths at which the connection breaks when half is written, once each."""

    def __init__(self, **storage):
        super().__init__(**storage)
        self.broken = False

    def _used(self):
        if self.broken:
            raise OSError("Socket is closed")

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._used()
        return super().cat_file(path, start, end, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._used()
        if path in self.cuts:
            self.cuts.remove(path)
            self.broken = True
            super().pipe_file(path, value[: len(value) // 2], mode, **kwargs)
            self._used()
        super().pipe_file(path, value, mode, **kwargs)


def test_a_line_that_breaks_while_a_file_is_written_leaves_the_old_one_and_is_opened_again(monkeypatch):
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **_: (Line(skip_instance_cache=True), "/line/a"))
    monkeypatch.setattr(Line, "cuts", ["/line/a/x.part", "/line/a/x"])
    store = open_store("sftp://host/line/a")
    with pytest.raises(ArchiveError, match="cannot be written: OSError: Socket is closed"):
        store.write("x", b"first")
    assert store.read("x") is None
    store.write("x", b"first")
    Line.cuts.append("/line/a/x.part")
    with pytest.raises(ArchiveError, match="Socket is closed"):
        store.write("x", b"second")
    assert store.read("x") == b"first"
    store.write("x", b"second")
    assert store.read("x") == b"second"
    assert Line.cuts == ["/line/a/x"], "never written in place"
