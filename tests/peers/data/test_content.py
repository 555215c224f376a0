"""What a file holds decides how it is read; what is not read is named with its reason."""

import asyncio
import gzip
import hashlib
import os
import re
from types import SimpleNamespace

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from peers.data.documents import DocumentText, ReadSummary, TextError, files_at, joined, text_at
from peers.data.files import LINE_LIMIT, ReadingStopped, TextUnreachable, local_file
from peers.data.forms import parquet_rows
from peers.data.shards import INDEX, index_of, shards_of
from peers.data.tokens import ShardCache
from peers.state.archive import Archive
from peers.state.archive_store import ArchiveError, StoreUnreachable, open_store
from peers.worker.worker import Worker
from swarmnet.run.schema import TextSource

BOOKS = TextSource("books", "books")
LINES = b'{"text": "first"}\n{"text": "second"}\n'


def silent(_done, _all):
    """Progress that no test looks at."""


def read(place):
    reading = ReadSummary()
    (shard,) = shards_of(BOOKS, str(place), reading)
    text = DocumentText(shard.files, reading)
    return joined(text), text.reading


@pytest.mark.parametrize("name", ["a.ndjson", "B.JSONL", "a.data", "a.txt", "a.jsonl.zst", "A.ZST"])
def test_lines_of_json_are_known_by_their_content(tmp_path, name):
    (tmp_path / name).write_bytes(zstandard.compress(LINES) if name.lower().endswith("zst") else LINES)
    assert read(tmp_path / name)[0] == b"first\n\nsecond"


def test_parquet_is_known_by_its_content(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["first", "second"]}), tmp_path / "a.bin")
    assert read(tmp_path / "a.bin")[0] == b"first\n\nsecond"


@pytest.mark.parametrize(
    ("name", "content", "cure"),
    [
        ("a.txt.zst", zstandard.compress(gzip.compress(LINES)), "is packed twice, or "),
        ("a.txt.gz", gzip.compress(LINES)[:-20], "is not packed by gzip, or not whole"),
        ("a.json", b'[\n {"text": "first"}\n]\n', "jq -c "),
        ("a.txt", "text".encode("utf-16"), "iconv -f utf-16 "),
    ],
    ids=["gzip within Zstandard", "half of gzip", "one JSON document", "UTF-16"],
)
def test_what_cannot_be_read_is_left_out_with_the_cure(tmp_path, name, content, cure):
    (tmp_path / name).write_bytes(content)
    text, reading = read(tmp_path / name)
    assert text == b""
    assert cure in reading.first_left_out


def test_prose_that_begins_with_json_stays_prose(tmp_path):
    prose = b'{"size": 3} is what the file says.\n'
    (tmp_path / "a.txt").write_bytes(prose + b"More.\n")
    (tmp_path / "b.md").write_bytes(b'{"size": 3}\nis what the file says.\n')
    assert read(tmp_path)[0] == prose + b'More.\n\n\n{"size": 3}\nis what the file says.\n'


def test_a_name_that_is_not_utf_8_is_left_out_and_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with open(os.fsencode(tmp_path) + b"/b\xff.txt", "w") as file:
        file.write("other")
    text, reading = read(tmp_path)
    assert text == b"text"
    assert r"b\xff.txt: its name is not UTF-8" in reading.first_left_out
    index_of(tmp_path, ReadSummary(), silent)


@pytest.fixture
def snapshot(tmp_path):
    """A snapshot in a Hugging Face cache, whose files are links to blobs."""
    repository = tmp_path / "datasets--me--books"
    folder = repository / "snapshots" / "ab12"
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "12ab").write_bytes(LINES)
    (folder / "a.jsonl").symlink_to("../../blobs/12ab")
    return folder


def test_a_snapshot_of_a_hugging_face_cache_is_read(snapshot):
    assert read(snapshot)[0] == b"first\n\nsecond"


def test_a_link_out_of_the_cache_stays_refused(snapshot, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (snapshot / "a.jsonl").unlink()
    (snapshot.parent.parent / "blobs" / "cd").symlink_to(tmp_path / "secret.txt")
    for number, target in enumerate(("../../blobs/cd", "../../../secret.txt")):
        (snapshot / f"{number}.txt").symlink_to(target)
    with pytest.raises(TextError, match=r"0\.txt is a link to .*secret\.txt.* put a copy .*, and 1 more$"):
        files_at(str(snapshot), ReadSummary())


def test_lines_without_a_text_are_counted_where_there_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n' * 3)
    why = 'a.jsonl:1: no field "text" with a string in it, and 2 more'
    assert why in read(tmp_path)[1].reason()
    with pytest.raises(TextError, match=re.escape(why)):
        joined(text_at([str(tmp_path)]))


# -- packed text ---------------------------------------------------------------------------------------


def test_a_text_unpacks_to_a_hundred_times_its_bytes_at_most(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"a" * (64 << 20)))
    (shard,) = shards_of(BOOKS, str(tmp_path), ReadSummary())
    opened = ShardCache(tokenizer=None, vocabulary=256, state=tmp_path / "state").open(shard, silent)
    assert len(opened.tokens) <= 100 * shard.bytes
    assert "unpacks to over 100 times" in opened.reading.first_left_out


def test_rows_that_share_a_string_are_read_one_at_a_time(tmp_path):
    strings = pyarrow.array(["a" * (8 << 20), "b"])
    shared = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1] * 32), strings)
    parquet.write_table(pyarrow.table({"text": shared}), tmp_path / "a.parquet", store_schema=False)
    before = pyarrow.total_allocated_bytes()
    with local_file(tmp_path / "a.parquet").open() as file:
        rows = parquet_rows("a", file, "text")
        next(rows)
        assert pyarrow.total_allocated_bytes() - before < 64 << 20, "32 rows of 8 MiB"
        assert len(list(rows)) == 63


def test_a_string_that_is_too_long_is_left_out(tmp_path):
    table = pyarrow.table({"text": ["a" * (LINE_LIMIT + 1), "b" * 10**6]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    text, reading = read(tmp_path / "a.parquet")
    assert text == b"b" * 10**6
    assert "row 1: a string of more than" in reading.first_left_out


# -- elsewhere -----------------------------------------------------------------------------------------


def test_a_server_that_does_not_answer_is_no_empty_text(unused_port):
    url = f"http://127.0.0.1:{unused_port}"
    with pytest.raises(TextUnreachable, match=r"/ cannot be read: no response: connection refused"):
        shards_of(BOOKS, f"{url}/", ReadSummary())
    with pytest.raises(StoreUnreachable, match=r"Cannot connect|refused"):
        open_store(f"{url}/archive").read("run.json")


def test_a_server_without_an_index_is_said(web):
    with pytest.raises(TextError, match=r"no list of files: .*swarmnet index") as raised:
        shards_of(BOOKS, f"{web.url}/", ReadSummary())
    assert not isinstance(raised.value, TextUnreachable)


@pytest.mark.parametrize("sized", [True, False])
def test_a_file_whose_size_is_not_known_is_read(web, sized):
    web.sized = sized
    web.files["/"] = b'<a href="a.txt">a</a>'
    web.files["/a.txt"] = b"text " * 10
    assert read(f"{web.url}/")[0] == b"text " * 10


def test_a_server_that_sends_no_parts_is_read_as_a_stream(web, tmp_path):
    text = os.urandom(6 << 20).hex().encode()
    web.files["/a.txt"] = text
    assert read(f"{web.url}/a.txt")[0] == text, "12 MB"
    table = pyarrow.table({"text": [text.decode()[at : at + 10**6] for at in range(0, 10**7, 10**6)]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    web.files["/a.parquet"] = (tmp_path / "a.parquet").read_bytes()
    assert "sends no part of a file" in read(f"{web.url}/a.parquet")[1].first_left_out


def test_a_peer_that_leaves_does_not_read_a_file_to_its_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text" * 10**6)
    (tmp_path / INDEX).write_bytes(index := index_of(tmp_path, ReadSummary(), silent))
    source = TextSource("books", "books", index=hashlib.sha256(index).hexdigest())
    (shard,) = shards_of(source, str(tmp_path), ReadSummary())
    cache = ShardCache(tokenizer=None, vocabulary=256, state=tmp_path / "state")
    cache.stopped = True
    with pytest.raises(ReadingStopped):
        cache.open(shard, silent)
    assert list((tmp_path / "state" / "text" / "shards").iterdir()) == []


async def test_a_peer_leaves_while_its_text_is_not_there_yet():
    async def first_look(_seconds):
        leaving.set()

    async def choose_stage():
        return 0

    leaving, never = asyncio.Event(), asyncio.Event()
    worker = SimpleNamespace(
        context=SimpleNamespace(settings=SimpleNamespace(checkpoints=None, reduces_only=False)),
        lifecycle=SimpleNamespace(leaving=leaving),
        orders=SimpleNamespace(first_look=first_look, read_text=never.wait, last_round=None),
        elsewhere=None,
        _choose_stage=choose_stage,
    )
    await asyncio.wait_for(Worker.run(worker), 20)


def test_a_redirect_of_a_text_or_an_archive_leads_to_no_other_server(web, other_web):
    other_web.files["/secret.txt"] = b"secret"
    for name in ("/a.txt", "/archive/run.json", "/text/index.json"):
        web.redirects[name] = f"http://localhost:{other_web.port}/secret.txt"
    with pytest.raises(TextError, match=r"redirects to .*, which is not followed"):
        read(f"{web.url}/a.txt")
    with pytest.raises(TextError, match=r"redirects to .*, which is not followed"):
        shards_of(TextSource("books", "books", index="ab" * 32), f"{web.url}/text", ReadSummary())
    with pytest.raises(ArchiveError, match=r"redirects to .*, which is not followed"):
        Archive(open_store(f"{web.url}/archive")).open()
    assert other_web.asked == []
    web.redirects["/a.txt"] = f"{web.url}/b.txt"
    web.files["/b.txt"] = b"text"
    assert read(f"{web.url}/a.txt")[0] == b"text", "the server that was asked already"


@pytest.mark.parametrize("place", ["folder", "memory", "web"])
def test_a_file_of_an_archive_without_end_is_not_read_whole(web, tmp_path, place):
    (tmp_path / "run.json").write_bytes(b" " * 2000)
    web.files["/archive/run.json"] = b" " * (64 << 20)
    url = {"folder": str(tmp_path), "memory": "memory://endless", "web": f"{web.url}/archive"}[place]
    store = open_store(url)
    if place == "memory":
        store.write("run.json", b" " * 2000)
    with pytest.raises(ArchiveError, match="is longer than 1,000 bytes"):
        store.read("run.json", 1000)
    assert web.sent < 32 << 20
    if place != "web":
        assert store.read("run.json", 2000) == b" " * 2000
