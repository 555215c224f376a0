"""Bytes in a file without a name: the same bytes, no name, and memory where there is no disk for them."""

import os

import pytest

from peers.state import unnamed_file
from peers.state.unnamed_file import store_unnamed

PARTS = [b"first", b"", b"third one" * 1000]


@pytest.mark.parametrize("has_folder", [True, False])
def test_what_is_laid_down_is_read_as_it_was(tmp_path, has_folder):
    found = store_unnamed(PARTS, tmp_path / "state" if has_folder else None)
    assert [bytes(part) for part in found] == PARTS
    assert [type(part) for part in found] == [memoryview if has_folder else bytes] * 3
    assert not has_folder or os.listdir(tmp_path / "state") == [], "nothing is left of it after a crash"


@pytest.mark.parametrize("parts", [[], [b""], [b"", b""]])
def test_nothing_needs_no_file(tmp_path, parts):
    assert store_unnamed(parts, tmp_path / "state") == parts
    assert not (tmp_path / "state").exists()


def test_a_full_disk_costs_memory_and_nothing_else(tmp_path, monkeypatch):
    def full(dir):
        raise OSError("no space left on device")

    monkeypatch.setattr(unnamed_file, "TemporaryFile", full)
    assert store_unnamed([memoryview(part) for part in PARTS], tmp_path) == PARTS
