"""The text of a run in an archive: whole or not at all, and never what was withdrawn."""

import hashlib
from pathlib import Path

import pytest

from peers.state.archive_store import ArchiveError, open_store
from peers.state.archived_text import INDEX, ArchivedText

TEXTS = [b"one" * 10, b"two" * 9, b""]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr("peers.state.archived_text.PART_BYTES", 8)


def stored(tmp_path) -> dict[str, Path]:
    files = {}
    for number, text in enumerate(TEXTS):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(text)
        files[hashlib.sha256(text).hexdigest()] = path
    return files


@pytest.mark.parametrize("place", ["folder", "memory://archived-text"])
def test_what_is_put_is_fetched_by_its_hash_and_what_is_withdrawn_is_gone(tmp_path, place):
    url = str(tmp_path / place) if place == "folder" else place
    files, archive = stored(tmp_path), ArchivedText(open_store(url))
    archive.put(files)
    archive.put({**files, "00" * 32: tmp_path / "nowhere"})
    (first, second, _), out = files, tmp_path / "new" / "text"
    assert archive.fetch(first, out, 30) == 30
    assert out.read_bytes() == TEXTS[0]
    assert archive.fetch(second, out, 26) == 0, "it is longer than the run states"
    assert archive.fetch("ab" * 32, out, 100) == 0
    archive.withdraw({bytes.fromhex(first)})
    assert ArchivedText(open_store(url)).fetch(first, out, 30) == 0
    assert archive.store.read(f"text/{first}-0") is None
    assert archive.fetch(second, out, 27) == 27
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["text"]


def test_damaged_text_is_refused_and_changed_files_are_not_added(tmp_path):
    files, archive = stored(tmp_path), ArchivedText(open_store(str(tmp_path / "archive")))
    first, second, _ = files
    files[second].write_bytes(b"changed")
    archive.put(files)
    out = tmp_path / "new" / "text"
    assert archive.fetch(second, out, 100) == 0
    assert not (tmp_path / "archive" / "text" / f"{second}-0").exists()
    (tmp_path / "archive" / "text" / f"{first}-1").write_bytes(b"damaged!")
    with pytest.raises(ArchiveError, match="is damaged"):
        archive.fetch(first, out, 100)
    assert list((tmp_path / "new").iterdir()) == []
    for bad in (b"[]", b'{"no hash": 3}', b'{"ab": 3}'):
        (tmp_path / "archive" / INDEX).write_bytes(bad)
        with pytest.raises(ArchiveError, match="cannot be used"):
            archive.fetch(first, out, 100)
