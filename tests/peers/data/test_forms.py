"""Formats with fields, and tokens that were made elsewhere: what is read of them, and what is not."""

import gzip
import hashlib
import json
import struct

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from peers.cli.main import main
from peers.data.documents import ReadSummary, TextError, joined, text_at
from peers.data.shards import index_of, parsed, shards_of
from peers.data.tokens import ShardCache
from swarmnet.run.schema import TextSource

DOCUMENTS = ["first", 'zweites, "Stück"', "third\nwith a line"]
TEXT = "\n\n".join(DOCUMENTS).encode()


def silent(_done, _all):
    """Progress that nobody wants to know."""


def read(place, **options):
    text = text_at([str(place)], **options)
    try:
        return joined(text), text.reading
    except TextError:
        return b"", text.reading


def table(rows):
    quoted = [
        "id,body,other",
        *(f'{number},"{text.replace(chr(34), chr(34) * 2)}",x' for number, text in enumerate(rows)),
    ]
    return ("\n".join(quoted) + "\n").encode()


@pytest.mark.parametrize(
    "pack", [lambda data: data, gzip.compress, zstandard.compress], ids=["", "gz", "zst"]
)
@pytest.mark.parametrize("form", ["jsonl", "ndjson", "csv"])
def test_a_column_is_read_of_every_form_packed_or_not(tmp_path, form, pack):
    lines = "".join(json.dumps({"body": text, "text": "no"}) + "\n" for text in DOCUMENTS).encode()
    ending = {gzip.compress: ".gz", zstandard.compress: ".zst"}.get(pack, "")
    (tmp_path / f"a.{form}{ending}").write_bytes(pack(table(DOCUMENTS) if form == "csv" else lines))
    text, reading = read(tmp_path, column="body")
    assert text == TEXT
    assert (reading.documents, reading.left_out) == (3, 0)


def test_a_field_of_a_field_is_a_column_too(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"data": {"body": one}}) + "\n" for one in DOCUMENTS)
    )
    assert read(tmp_path, column="data.body")[0] == TEXT
    (tmp_path / "a.jsonl").unlink()
    rows = [{"body": one, "n": 1} for one in DOCUMENTS]
    parquet.write_table(pyarrow.table({"data": rows, "id": [1, 2, 3]}), tmp_path / "a.parquet")
    assert read(tmp_path, column="data.body")[0] == TEXT
    text, reading = read(tmp_path, column="data.text")
    assert text == b""
    assert "has no column data.text; it has data.body, data.n, id" in reading.first_left_out


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"id,text\n1,here\n2\n", "row 2: no column text"),
        (b"id,body\n1,here\n", "has no column text; it has id, body"),
        (b"", "has no column text; it has none"),
        (b'text\n"' + b"x" * (17 << 20), "is no CSV: field larger than field limit"),
    ],
    ids=["a short row", "another column", "empty", "a quote without end"],
)
def test_what_a_csv_file_lacks_is_counted_and_named(tmp_path, content, problem):
    (tmp_path / "a.csv").write_bytes(content)
    _, reading = read(tmp_path / "a.csv")
    assert problem in reading.first_left_out
    assert len(reading.warnings()) == 1


def test_one_warning_for_each_kind_of_loss_with_the_count_and_the_first_place(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"text": "good"}\n{"x": 2}\nnot json\n')
    (tmp_path / "b.csv").write_text("body\nx\n")
    _, reading = read(tmp_path)
    first, second, third = reading.warnings()
    assert first.endswith('a.jsonl:1: no field "text" with a string in it, and 1 more')
    assert "a.jsonl:4: not JSON" in second
    assert "b.csv: has no column text" in third


# -- tokens --------------------------------------------------------------------------------------------

TOKENS = [5, 0, 255, 17, 3, 250]
HEADER = struct.pack("<256i", 20240520, 1, len(TOKENS), *[0] * 253)


def npy(path, array):
    with path.open("wb") as file:
        np.save(file, array)


def made(place, state, tokens, **more):
    source = TextSource("books", "books", tokens=tokens, **more)
    (shard,) = shards_of(source, str(place), ReadSummary())
    return ShardCache(tokenizer=None, vocabulary=256, state=state).open(shard, silent)


@pytest.mark.parametrize(
    ("name", "content", "tokens"),
    [
        ("a.bin", np.array(TOKENS, "<u2").tobytes(), "uint16"),
        ("a.bin", np.array(TOKENS, "<u4").tobytes(), "uint32"),
        ("a.bin", HEADER + np.array(TOKENS, "<u2").tobytes(), "uint16"),
        ("a.npy", np.array(TOKENS, "<u2"), "uint16"),
        ("a.npy", np.array(TOKENS, "<u4"), "uint32"),
    ],
    ids=["uint16", "uint32", "with a header", "npy 16", "npy 32"],
)
def test_tokens_are_read_as_they_are(tmp_path, name, content, tokens):
    books = tmp_path / "books"
    books.mkdir()
    if isinstance(content, bytes):
        (books / name).write_bytes(content)
    else:
        npy(books / name, content)
    (books / "notes.txt").write_text("not read: the source holds tokens")
    opened = made(books, tmp_path / "state", tokens)
    assert opened.tokens.tolist() == TOKENS
    assert opened.reading.bytes == len(TOKENS) * np.dtype(tokens).itemsize
    withdrawn = hashlib.sha256((books / name).read_bytes()).digest()
    (shard,) = shards_of(TextSource("books", "books", tokens=tokens), str(books), ReadSummary())
    cache = ShardCache(tokenizer=None, vocabulary=256, state=tmp_path / "other", withdrawn={withdrawn})
    assert cache.open(shard, silent).tokens.tolist() == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (np.array([5, 256, 7], "<u2").tobytes(), "token 256 at 1: the run's tokenizer has ids up to 255"),
        (b"\1\0\2", "has 1 bytes too many for tokens of type uint16"),
        (struct.pack("<i", 20240801) + bytes(2000), "holds uint32, and the run says tokens: uint16"),
        (b"\x93NUMPY nonsense", "is no .npy file"),
    ],
    ids=["an id outside", "half a token", "another type", "no npy"],
)
def test_tokens_that_are_not_the_runs_are_left_out_and_named(tmp_path, content, problem):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.bin").write_bytes(content)
    opened = made(tmp_path / "books", tmp_path / "state", "uint16")
    assert opened.tokens.tolist() == []
    assert problem in opened.reading.first_left_out


def test_an_index_of_tokens_and_the_command_that_prints_what_a_run_reads(tmp_path, capsys):
    (tmp_path / "a.bin").write_bytes(np.array(TOKENS, "<u2").tobytes())
    (tmp_path / "a.txt").write_text("text")
    assert [one.name for one in parsed(index_of(tmp_path, ReadSummary(), silent, "uint16"))] == ["a.bin"]
    with pytest.raises(SystemExit):
        main(["text", str(tmp_path), "--tokens", "uint16"])
    said = capsys.readouterr()
    assert "read   1 documents in 1 files, 12 bytes" in said.out
    assert "makes  6 tokens" in said.out
    assert "a.txt: of a folder only .bin and .npy are read" in said.err


def test_another_column_or_type_makes_other_tokens_of_the_same_file(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.jsonl").write_text('{"text": "one", "body": "two"}\n')
    one = made(tmp_path / "books", tmp_path / "state", "")
    two = made(tmp_path / "books", tmp_path / "state", "", column="body")
    assert (bytes(one.tokens.tolist()), bytes(two.tokens.tolist())) == (b"one", b"two")
