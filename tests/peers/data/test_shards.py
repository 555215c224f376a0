"""What a run in epochs is read from: any of the forms, here or elsewhere, and only what its index names."""

import hashlib
import io
import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import fsspec
import pyarrow
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from peers.cli.main import main
from peers.data.documents import DocumentText, ReadSummary, TextError, joined
from peers.data.files import TextUnreachable, Unreadable, local_file
from peers.data.shards import INDEX, all_shards, index_of, is_plain, parsed, shards_of
from peers.data.tokens import ShardCache
from swarmnet.run.schema import STANDARD_LIBRARY, Data, TextSource

BOOKS = TextSource("books", "books")
DOCUMENTS = ["first", "zweites Stück", "third 🐝", ""]


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr("peers.data.shards.MIN_SHARD_BYTES", 1)


def silent(_done, _all):
    """Progress that nobody wants to know."""


def lines_of(documents):
    return "".join(json.dumps({"text": text, "id": 3}) + "\n" for text in documents).encode()


def in_every_form(folder, documents=DOCUMENTS):
    folder.mkdir(exist_ok=True)
    lines = lines_of(documents)
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(lines[:20]) + zstandard.compress(lines[20:]))
    parquet.write_table(pyarrow.table({"id": range(len(documents)), "text": documents}), folder / "c.parquet")
    (folder / "d.txt.zst").write_bytes(zstandard.compress("\n\n".join(documents[:3]).encode()))
    return folder


def text_of(shard, withdrawn=()):
    text = DocumentText(shard.files, withdrawn=withdrawn)
    return joined(text), text.reading


def pinned(folder):
    data = index_of(folder, ReadSummary(), silent)
    (folder / INDEX).write_bytes(data)
    return replace(BOOKS, index=hashlib.sha256(data).hexdigest())


def test_every_form_gives_the_same_documents(tmp_path):
    shards = shards_of(BOOKS, str(in_every_form(tmp_path / "books")), ReadSummary())
    assert [shard.name for shard in shards] == [
        "books/a.jsonl", "books/b.jsonl.zst", "books/c.parquet", "books/d.txt.zst"
    ]  # fmt: skip
    texts = [text_of(shard) for shard in shards]
    assert {text for text, _ in texts} == {"first\n\nzweites Stück\n\nthird 🐝".encode()}
    assert [reading.documents for _, reading in texts] == [3, 3, 3, 1]
    assert all(reading.left_out == 0 for _, reading in texts)


def test_a_withdrawn_document_is_left_out_of_every_form(tmp_path):
    gone = {hashlib.sha256(one.encode()).digest() for one in ("zweites Stück", "\n\n".join(DOCUMENTS[:3]))}
    shards = shards_of(BOOKS, str(in_every_form(tmp_path / "books")), ReadSummary())
    assert [text_of(shard, gone)[0].decode() for shard in shards] == ["first\n\nthird 🐝"] * 3 + [""]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl.zst", b"no frame at all", "is not packed by Zstandard, or not whole"),
        ("a.txt.zst", b"", "is not packed by Zstandard, or not whole"),
        ("a.parquet", b"PAR1 it is not", "is no Parquet file, or not whole"),
        ("a.parquet", None, "has no column text"),
        ("a.parquet", [1, 2], "row 1: no string in its column text"),
        ("a.parquet", ["x", None], "row 2: no string in its column text"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_left_out_and_named(tmp_path, name, content, problem):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        parquet.write_table(pyarrow.table({"text" if content else "t": content or [1]}), path)
    text = DocumentText([local_file(path)])
    assert joined(text) in (b"", b"x")
    if content != b"":
        assert f"{name}: {problem}" in text.reading.first_left_out


def test_half_a_packed_file_is_left_out_from_where_it_ends(tmp_path):
    whole = zstandard.compress(lines_of(["line " * 100] * 10_000))
    (tmp_path / "a.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    (shard,) = shards_of(BOOKS, str(tmp_path / "a.jsonl.zst"), ReadSummary())
    _, reading = text_of(shard)
    assert reading.left_out == 1


def test_what_is_drawn_from_is_one_shard_with_the_files_of_every_form_and_source(tmp_path):
    folder = in_every_form(tmp_path / "books")
    (folder / "picture.png").touch()
    (tmp_path / "more.txt").write_text("more")
    data = Data((pinned(folder), TextSource("more", "more")))
    places, reading = {"books": str(folder), "more": str(tmp_path / "more.txt")}, ReadSummary()
    ((shard,),) = all_shards(data, places, reading, 10, 3).values()
    assert [Path(file.name).name for file in shard.files] == [
        "a.jsonl", "b.jsonl.zst", "c.parquet", "d.txt.zst", "more.txt"
    ]  # fmt: skip
    assert (shard.longest_bytes, shard.seed, shard.others) == (10, 3, reading)
    assert text_of(shard)[1].documents == 11


@pytest.mark.parametrize("form", ["jsonl", "jsonl.zst", "parquet"])
def test_a_part_of_a_text_has_documents_from_everywhere_in_it(tmp_path, form):
    documents = [f"line {number:04d} {os.urandom(20).hex()}" for number in range(2000)]
    path, lines = tmp_path / f"a.{form}", lines_of(documents)
    if form == "parquet":
        parquet.write_table(pyarrow.table({"text": documents}), path, use_dictionary=False)
    else:
        path.write_bytes(zstandard.compress(lines) if form.endswith("zst") else lines)
    parts = [joined(DocumentText([local_file(path)], longest_bytes=10_000, seed=seed)) for seed in (0, 1)]
    assert parts[0] != parts[1]
    assert all(len(part) <= 10_000 for part in parts)
    assert all(len(set(re.findall(rb"line (\d\d)", part))) > 1 for part in parts)


def test_the_standard_library_is_read_in_shards(monkeypatch):
    monkeypatch.setattr("peers.data.shards.MIN_SHARD_BYTES", 2**20)
    shards = shards_of(TextSource("python", STANDARD_LIBRARY), STANDARD_LIBRARY, ReadSummary())
    assert 5 < len(shards) < 30
    assert all(shard.name.startswith("python/") and shard.name.endswith(".py") for shard in shards)


@pytest.mark.parametrize("missing", ["pyarrow", "zstandard"])
def test_a_package_that_is_missing_is_named_with_what_brings_it(tmp_path, monkeypatch, missing):
    folder = in_every_form(tmp_path / "books")
    monkeypatch.setitem(sys.modules, missing, None)
    shards = shards_of(BOOKS, str(folder), ReadSummary())
    with pytest.raises(TextError, match=rf"needs the package {missing}: .*scripts/setup text$"):
        list(map(text_of, shards))


# -- the index -----------------------------------------------------------------------------------------


def test_what_the_index_does_not_name_is_not_read_and_what_differs_from_it_neither(tmp_path):
    folder = in_every_form(tmp_path / "books")
    source, reading = pinned(folder), ReadSummary()
    (folder / "more.txt").write_text("not in the index")
    (folder / "c.parquet").unlink()
    (folder / "a.jsonl").write_bytes(lines_of(["FIRST", *DOCUMENTS[1:]]))
    with (folder / "d.txt.zst").open("ab") as file:
        file.write(b"longer")
    shards = shards_of(source, str(folder), reading)
    assert [shard.name for shard in shards] == ["books/a.jsonl", "books/b.jsonl.zst"]
    assert reading.left_out == 2, "one is missing, one is longer"
    text, read = text_of(shards[0])
    assert text == b""
    assert "a.jsonl is not what the run's index names: get it again" in read.first_left_out
    cache = ShardCache(tokenizer=None, vocabulary=256, state=tmp_path / "state")
    assert len(cache.open(shards[0], silent).tokens) == 0


def test_an_index_that_is_not_the_runs_is_refused(tmp_path):
    folder = in_every_form(tmp_path / "books")
    source = pinned(folder)
    (folder / INDEX).write_bytes((folder / INDEX).read_bytes() + b" ")
    with pytest.raises(TextError, match=r"index of the source `books`.* is not the one that the run names"):
        shards_of(source, str(folder), ReadSummary())
    (folder / INDEX).unlink()
    with pytest.raises(TextError, match="No such file or directory; get it from the publisher"):
        shards_of(source, str(folder), ReadSummary())


def test_a_link_that_leads_out_of_the_folder_is_not_followed_though_the_index_names_it(tmp_path):
    folder = in_every_form(tmp_path / "books")
    source, secret, reading = pinned(folder), tmp_path / "secret.jsonl", ReadSummary()
    secret.write_bytes((folder / "a.jsonl").read_bytes())
    (folder / "a.jsonl").unlink()
    (folder / "a.jsonl").symlink_to(secret)
    assert "books/a.jsonl" not in [shard.name for shard in shards_of(source, str(folder), reading)]
    assert "is a link that leads out of the folder" in reading.first_left_out


@pytest.mark.parametrize(
    "name",
    ["../a.txt", "/etc/a.txt", "a/../b.txt", "a//b.txt", "./a.txt", "", "a.txt\n", ".git/a.txt", "C:\\a.txt",
     "a\\b.txt", "x" * 600 + ".txt", "a.py", "https://example.org/a.txt", "a?b.txt"],
)  # fmt: skip
def test_an_index_names_no_place_outside_of_its_folder(name):
    assert not is_plain(name)
    entry = {"name": name, "bytes": 1, "sha256": "a" * 64, "chunks": "b" * 64}
    told = {"form": "swarmnet index 2", "files": [entry]}
    with pytest.raises(Unreadable, match="names a file outside of its folder"):
        parsed(json.dumps(told).encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["form", "files", "name", "bytes", "sha256", "x"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


FILES = JSON.map(lambda files: {"form": "swarmnet index 2", "files": files})


@given(st.one_of(st.binary(max_size=50), st.one_of(JSON, FILES).map(lambda told: json.dumps(told).encode())))
def test_whatever_an_index_is_it_is_read_or_refused(data):
    with suppress(Unreadable):
        assert all(is_plain(one.name) for one in parsed(data))


def test_the_command_writes_an_index_and_what_goes_into_the_run_file(tmp_path, capsys):
    folder = in_every_form(tmp_path / "books")
    (folder / "picture.png").write_bytes(b"x")

    def swarmnet(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        return ended.value.code or 0

    assert swarmnet("index", folder) == 0
    said = capsys.readouterr()
    digest = hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()
    assert f"index: {digest}}}" in said.out
    assert "in 4 files" in said.out
    assert "picture.png: of a folder only" in said.err
    assert len(shards_of(replace(BOOKS, index=digest), str(folder), ReadSummary())) == 4
    assert swarmnet("index", folder) == 2
    assert swarmnet("index", folder, "--replace") == 0
    assert swarmnet("index", tmp_path / "nowhere") == 2
    assert "error: " in capsys.readouterr().err


# -- elsewhere -----------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path):
    """A folder of text that a URL leads to, in fsspec's memory."""
    folder, files = in_every_form(tmp_path / "books"), fsspec.filesystem("memory")
    source = pinned(folder)
    for path in folder.iterdir():
        files.pipe_file(f"/library/books/{path.name}", path.read_bytes())
    yield files, source
    files.rm("/library", recursive=True)


@pytest.mark.parametrize("with_index", [True, False])
def test_what_a_url_leads_to_is_read_as_a_folder_is(elsewhere, tmp_path, with_index):
    files, source = elsewhere
    files.pipe_file("/library/books/more.txt", b"not in the index")
    reading = ReadSummary()
    shards = shards_of(source if with_index else BOOKS, "memory://library/books", reading)
    assert len(shards) == 4 + (not with_index)
    (one,) = shards_of(BOOKS, "memory://library/books/c.parquet", ReadSummary())
    assert (one.name, text_of(one)[0]) == ("books/c.parquet", text_of(shards[2])[0])
    here = shards_of(source, str(tmp_path / "books"), ReadSummary())
    assert [text_of(shard)[0] for shard in shards[:4]] == [text_of(shard)[0] for shard in here]
    cache = ShardCache(tokenizer=None, vocabulary=256, state=tmp_path / "state")
    for made in (True, False):
        assert {cache.open(shard, silent).made for shard in shards} == {made}


def test_a_file_that_is_not_there_is_left_out_and_one_that_does_not_answer_is_not(elsewhere, tmp_path):
    files, source = elsewhere
    shards = shards_of(source, "memory://library/books", ReadSummary())
    whole = files.cat_file("/library/books/a.jsonl")
    for number, harm in enumerate((None, b"x" * len(whole))):
        cache = ShardCache(tokenizer=None, vocabulary=256, state=tmp_path / f"state {number}")
        files.rm_file("/library/books/a.jsonl")
        if harm is not None:
            files.pipe_file("/library/books/a.jsonl", harm)
        gone = cache.open(shards[0], silent)
        assert len(gone.tokens) == 0
        assert "a.jsonl" in gone.reading.first_left_out
        files.pipe_file("/library/books/a.jsonl", whole)
        assert len(cache.open(shards[0], silent).tokens) > 0, "it was put right, and looks as it did"

    class Broken(io.BytesIO):
        def read(self, *_):
            raise ConnectionResetError("reset by peer")

    files.open, opens = (lambda path, mode: Broken()), files.open
    try:
        with pytest.raises(TextUnreachable, match=r"memory://library/books cannot be read: Connection"):
            cache.open(shards[1], silent)
    finally:
        files.open = opens
    assert len(cache.open(shards[1], silent).tokens) > 0, "nothing was kept of what did not come"


def test_a_kind_of_place_that_nothing_opens_is_named_without_its_secret():
    with pytest.raises(TextError, match=r"text nowhere://example\.org/books cannot be opened") as raised:
        shards_of(BOOKS, "nowhere://me:secret@example.org/books", ReadSummary())
    assert "secret" not in str(raised.value)


def test_a_shard_is_called_the_same_wherever_it_lies(elsewhere, tmp_path):
    _, source = elsewhere
    places = ("memory://library/books", "memory://library/books/", str(tmp_path / "books"))
    names = [[shard.name for shard in shards_of(source, place, ReadSummary())] for place in places]
    assert names[0] == names[1] == names[2]
    assert Path(names[0][0]).name == "a.jsonl"


def test_a_text_with_an_index_is_read_from_a_plain_web_server(tmp_path):
    folder = in_every_form(tmp_path / "books")
    source = pinned(folder)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            """Nothing on standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/books"
        shards = shards_of(source, url, ReadSummary())
        texts = [text_of(shard)[0] for shard in shards]
        server.shutdown()
    assert texts == [text_of(shard)[0] for shard in shards_of(source, str(folder), ReadSummary())]
    assert shards[0].files[0].name == f"{url}/a.jsonl"
