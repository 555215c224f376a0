"""Tokens are made once, a bounded part of the text at a time, and kept by what they were made of."""

import json
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm import tokens_of
from tokenizers import Tokenizer

from peers.data.documents import BETWEEN_DOCUMENTS, Text, TextError, joined
from peers.data.local_text import Tokenizing
from peers.data.tokenizer import ByteTokenizer, open_tokenizer, pieces_of
from peers.data.tokens import encoded, tokens_on_disk


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"book {number}: " + "call me by my name\n" * 50)
    return folder


def text_of(folder, **choices):
    return Text([str(folder)], **choices)


class Heard(list):
    def __call__(self, done, all):
        self.append((done, all))


def test_the_second_start_takes_the_tokens_that_the_first_one_made(folder, tmp_path, tokenizer_file):
    first = tokens_on_disk(text_of(folder), tokenizer_file, 300, tmp_path / "state", Heard())
    again = tokens_on_disk(text_of(folder), tokenizer_file, 300, tmp_path / "state", Heard())
    assert (first.made, again.made) == (True, False)
    assert first.tokens.dtype == again.tokens.dtype == torch.uint16
    assert first.tokens.tolist() == again.tokens.tolist()
    assert again.reading == first.reading
    text = joined(text_of(folder))
    assert open_tokenizer(tokenizer_file, 300).decode(first.tokens.tolist()) == text
    assert tokens_of([str(folder)], 300, tokenizer=tokenizer_file).tolist() == first.tokens.tolist()


def test_another_text_or_tokenizer_is_made_anew_and_what_was_there_is_said(
    folder, tmp_path, tokenizer_file
):
    state = tmp_path / "state"
    first = tokens_on_disk(text_of(folder), None, 256, state, Heard())
    assert first.before is None
    (folder / "0.txt").unlink()
    second = tokens_on_disk(text_of(folder), None, 256, state, Heard())
    assert second.made
    assert second.before == len(first.tokens) > len(second.tokens)
    third = tokens_on_disk(text_of(folder), tokenizer_file, 300, state, Heard())
    assert third.made
    assert third.before == len(second.tokens)
    assert len(list((state / "text").glob("*.tokens"))) == 1


@pytest.mark.parametrize("cut", ["truncated", "gone", "index is no JSON", "index is a list"])
def test_tokens_that_are_not_whole_are_made_again(folder, tmp_path, cut):
    state = tmp_path / "state"
    whole = bytes(tokens_on_disk(text_of(folder), None, 256, state, Heard()).tokens.tolist())
    (kept,) = (state / "text").glob("*.tokens")
    if cut == "truncated":
        with kept.open("r+b") as file:
            file.truncate(10)
    elif cut == "gone":
        kept.unlink()
    else:
        (state / "text" / "newest.json").write_text("{" if cut == "index is no JSON" else "[]")
    (state / "text" / "interrupted.part").write_bytes(b"half")
    again = tokens_on_disk(text_of(folder), None, 256, state, Heard())
    assert again.made
    assert bytes(again.tokens.tolist()) == whole
    assert {path.suffix for path in (state / "text").iterdir()} == {".tokens", ".json"}


def test_a_disk_without_room_is_said_and_leaves_no_half(folder, tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TextError, match="cannot be kept: No space left on device; they take as much room"):
        tokens_on_disk(text_of(folder), None, 256, tmp_path / "state", Heard())
    assert list((tmp_path / "state" / "text").iterdir()) == []


def test_only_the_owner_of_the_folder_reads_the_tokens(folder, tmp_path):
    tokens_on_disk(text_of(folder), None, 256, tmp_path, Heard())
    assert (tmp_path / "text").stat().st_mode & 0o077 == 0


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
    tokenizing = Tokenizing(lambda event, text: told.append(text), lambda: next(times))
    tokenizing.progress(5_000_000, 60_000_000)
    tokenizing.progress(10_000_000, 60_000_000)
    assert told == []
    tokenizing.progress(20_000_000, 60_000_000)
    tokenizing.progress(30_000_000, 60_000_000)
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
    opened = open_tokenizer(tokenizer_with_an_end, 400, "<|end|>")
    read = tokens_on_disk(
        text_of(tmp_path / "a"), tokenizer_with_an_end, 400, tmp_path / "state", Heard(), "<|end|>"
    )
    end = opened.end.token
    assert read.tokens.tolist().count(end) == 2
    assert opened.decode(read.tokens.tolist()) == b"x<|end|>y<|end|>z"
    other = tokens_on_disk(text_of(tmp_path / "a"), tokenizer_with_an_end, 400, tmp_path / "state", Heard())
    assert other.made
    assert opened.decode(other.tokens.tolist()) == b"x\n\ny\n\nz"


def test_an_end_that_is_not_one_token_is_refused(tokenizer_file):
    with pytest.raises(TextError, match=r"'<\|end\|>' is \d+ tokens of tokenizer .* must be one"):
        open_tokenizer(tokenizer_file, 300, "<|end|>")
    with pytest.raises(TextError, match="is 3 tokens of tokenizer bytes"):
        open_tokenizer(None, 256, "end")
    assert open_tokenizer(None, 256, "\0").end.token == 0
