"""Tokens are made once, a bounded part of the text at a time, and kept by what they were made of."""

import json
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm import tokens_of
from tokenizers import Tokenizer

from peers.data.documents import BETWEEN_DOCUMENTS, ReadSummary, TextError, joined, text_at
from peers.data.local_text import progress_lines
from peers.data.shards import shards_of
from peers.data.tokenizer import ByteTokenizer, open_tokenizer, pieces_of
from peers.data.tokens import ShardCache, encoded
from swarmnet.run.schema import Data, TextSource


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"book {number}: " + "call me by my name\n" * 50)
    return folder


def text_of(folder):
    return text_at([str(folder)])


class Heard(list):
    def __call__(self, done, all):
        self.append((done, all))


def shards_in(folder):
    return shards_of(TextSource("b", "b"), str(folder), ReadSummary())


def opened(folder, state, tokenizer=None, vocabulary=256, end=""):
    (shard,) = shards_in(folder)
    return ShardCache(tokenizer=tokenizer, vocabulary=vocabulary, state=state, data=Data(eos_token=end)).open(
        shard, Heard()
    )


def test_the_second_start_takes_the_tokens_that_the_first_one_made(folder, tmp_path, tokenizer_file):
    first, again = (opened(folder, tmp_path / "state", tokenizer_file, 300) for _ in range(2))
    assert (first.made, again.made) == (True, False)
    assert first.tokens.dtype == again.tokens.dtype == torch.uint16
    assert first.tokens.tolist() == again.tokens.tolist()
    assert again.reading == first.reading
    text = joined(text_of(folder))
    assert open_tokenizer(tokenizer_file, 300).decode(first.tokens.tolist()) == text
    assert tokens_of([str(folder)], 300, tokenizer=tokenizer_file).tolist() == first.tokens.tolist()


def test_another_text_or_tokenizer_is_made_anew_and_a_touched_file_is_not(folder, tmp_path, tokenizer_file):
    state = tmp_path / "state"
    first = opened(folder, state)
    (folder / "1.txt").touch()
    assert not opened(folder, state).made
    (folder / "1.txt").write_text("other")
    second = opened(folder, state)
    assert second.made
    assert len(first.tokens) > len(second.tokens)
    assert opened(folder, state, tokenizer_file, 300).made


def test_what_is_of_other_shards_is_removed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("peers.data.shards.MIN_SHARD_BYTES", 1)
    cache, shards = ShardCache(tokenizer=None, vocabulary=256, state=tmp_path / "state"), shards_in(folder)
    for made in (True, False):
        assert {cache.open(shard, Heard()).made for shard in shards} == {made}
    kept = tmp_path / "state" / "text" / "shards"
    (kept / "half.part").write_bytes(b"x")
    cache.keep_only(shards[:1])
    assert len(list(kept.iterdir())) == 2


@pytest.mark.parametrize("harm", ["truncated", "gone", "no note", "note is no JSON", "note is a list"])
def test_tokens_that_are_not_whole_are_made_again(folder, tmp_path, harm):
    whole = opened(folder, tmp_path).tokens.tolist()
    kept = tmp_path / "text" / "shards"
    (tokens,), (note,) = kept.glob("*.tokens"), kept.glob("*.json")
    if harm == "truncated":
        tokens.write_bytes(b"short")
    elif harm == "gone":
        tokens.unlink()
    elif harm == "no note":
        note.unlink()
    else:
        note.write_text("{" if harm == "note is no JSON" else "[]")
    again = opened(folder, tmp_path)
    assert again.made
    assert again.tokens.tolist() == whole


@pytest.mark.parametrize("full", ["os.fsync", "shutil.disk_usage"])
def test_a_disk_without_room_is_said_and_leaves_no_half(folder, tmp_path, monkeypatch, full):
    def no_room(_of):
        if full == "os.fsync":
            raise OSError(28, "No space left on device")
        return SimpleNamespace(free=(1 << 30) - 1)

    monkeypatch.setattr(full, no_room)
    why = "No space left on device" if full == "os.fsync" else "less than 1024 MiB of the disk are free"
    with pytest.raises(TextError, match=f"cannot be kept: {why}; they take as much room"):
        opened(folder, tmp_path)
    assert list((tmp_path / "text" / "shards").iterdir()) == []


def test_only_the_owner_of_the_folder_reads_the_tokens(folder, tmp_path):
    opened(folder, tmp_path)
    assert (tmp_path / "text" / "shards").stat().st_mode & 0o077 == 0


def test_a_text_is_encoded_a_bounded_part_at_a_time(folder, monkeypatch):
    monkeypatch.setattr("peers.data.tokens.BATCH_BYTES", 1000)
    monkeypatch.setattr("peers.data.documents.BLOCK_BYTES", 700)
    longest, heard = 0, Heard()

    class Counting(ByteTokenizer):
        def encode_pieces(self, pieces):
            nonlocal longest
            longest = max(longest, sum(map(len, pieces)))
            return super().encode_pieces(pieces)

    text = text_of(folder)
    parts = list(encoded(text, Counting(), heard))
    assert len(parts) >= 3
    assert longest < 1000 + 1000  # A batch and one document.
    assert bytes(torch.cat(parts).tolist()) == joined(text_of(folder))
    assert [all for _, all in heard] == [text.total_bytes] * len(heard)
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)


def test_documents_of_no_words_between_them_stay_apart(tmp_path):
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(5)))
    tokens = torch.cat(list(encoded(text_of(tmp_path), ByteTokenizer(), Heard())))
    assert bytes(tokens.tolist()) == BETWEEN_DOCUMENTS.join(b"%d" % n for n in range(5))


@given(
    st.lists(st.one_of(st.binary(max_size=60), st.text(max_size=30).map(str.encode)), max_size=8),
    st.integers(8, 40),
)
def test_pieces_are_the_text_and_none_is_too_long(blocks, length):
    pieces = list(pieces_of(blocks, length))
    assert b"".join(pieces) == b"".join(blocks)
    assert all(0 < len(piece) <= length for piece in pieces)


@given(st.text(alphabet="aé日🐝 \n", min_size=1, max_size=200), st.integers(8, 40))
def test_no_character_is_cut(text, length):
    assert "".join(piece.decode() for piece in pieces_of([text.encode()], length)) == text


def test_pieces_end_behind_a_line_or_before_a_space_where_there_is_one():
    words = " ".join("word" * Random(3).randrange(1, 4) for _ in range(500)).encode()
    pieces = list(pieces_of([words], 100))
    assert all(piece.startswith(b" ") for piece in pieces[1:])
    assert all(piece.endswith(b"\n") for piece in list(pieces_of([b"a line\n" * 100], 50))[:-1])
    assert [len(piece) for piece in pieces_of([b"x" * 250], 100)] == [100, 100, 50]


def test_who_makes_tokens_says_every_five_seconds_how_far_it_is():
    told, times = [], iter([100.0, 101.0, 104.9, 110.0, 112.0])
    progress = progress_lines(lambda event, text: told.append(text), lambda: next(times))
    progress(5_000_000, 60_000_000)
    progress(10_000_000, 60_000_000)
    assert told == []
    progress(20_000_000, 60_000_000)
    progress(30_000_000, 60_000_000)
    assert told == ["makes tokens of the text, once: 20 of 60 MB, 20 s to go"]


@pytest.fixture
def tokenizer_with_an_end(tokenizer_file):
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tokenizer_file))
    return tokenizer_file


def test_one_token_stands_between_documents_where_the_run_names_it(tmp_path, tokenizer_with_an_end):
    (tmp_path / "a").mkdir()
    for name in "xyz":
        (tmp_path / "a" / f"{name}.txt").write_text(name)
    tokenizer = open_tokenizer(tokenizer_with_an_end, 400, "<|end|>")
    read = opened(tmp_path / "a", tmp_path / "state", tokenizer_with_an_end, 400, "<|end|>")
    assert read.tokens.tolist().count(tokenizer.end.token) == 2
    assert tokenizer.decode(read.tokens.tolist()) == b"x<|end|>y<|end|>z"
    other = opened(tmp_path / "a", tmp_path / "state", tokenizer_with_an_end, 400)
    assert other.made
    assert tokenizer.decode(other.tokens.tolist()) == b"x\n\ny\n\nz"


def test_an_end_that_is_not_one_token_is_refused(tokenizer_file):
    with pytest.raises(TextError, match=r"'<\|end\|>' is \d+ tokens of tokenizer .* must be one"):
        open_tokenizer(tokenizer_file, 300, "<|end|>")
    with pytest.raises(TextError, match="is 3 tokens of tokenizer bytes"):
        open_tokenizer(None, 256, "end")
    assert open_tokenizer(None, 256, "\0").end.token == 0
