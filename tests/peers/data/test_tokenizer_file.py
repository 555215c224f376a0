"""A tokenizer.json changes no text: what would is switched off and named, and what it loses is counted."""

import json
import os

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models

from peers.data.documents import ReadSummary, text_at
from peers.data.shards import Shard, shards_of
from peers.data.tokenizer import MAX_FILE_BYTES, FileTokenizer, TextError, open_tokenizer, read_settings
from peers.data.tokens import ShardCache, encoded
from swarmnet.run.schema import TextSource

LETTERS = "abcdefghijklmnopqrstuvwxyz"
END = "<|end|>"


def silent(_done, _all):
    """Progress that no test looks at."""


def made(path, model, *ends):
    """Write a tokenizer.json of this model."""
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([end for end in ends if isinstance(end, str)])
    tokenizer.add_tokens([end for end in ends if not isinstance(end, str)])
    tokenizer.save(str(path))
    return path


def changed(path, **settings):
    content = json.loads(path.read_text())
    for name, value in settings.items():
        part = content["model"] if name == "dropout" else content
        part[name] = value
    path.write_text(json.dumps(content))
    return path


PADDING = {
    "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "[PAD]",
}  # fmt: skip
TRUNCATION = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize(
    "settings",
    [{"truncation": TRUNCATION}, {"padding": PADDING}, {"dropout": 0.5}],
    ids=["truncation", "padding", "dropout"],
)
def test_settings_that_change_a_text_are_switched_off_and_named(tokenizer_file, tmp_path, settings):
    text = b"def function(self): return self\n" * 20
    pieces = [text, b"def"]
    expected = [each.tolist() for each in FileTokenizer(tokenizer_file).encode_pieces(pieces)]
    tokenizer = FileTokenizer(changed(tokenizer_file, **settings))
    assert [each.tolist() for each in tokenizer.encode_pieces(pieces)] == expected
    assert next(iter(settings)) in tokenizer.warning
    (tmp_path / "a.txt").write_bytes(text)
    cache = ShardCache(tokenizer=tokenizer_file, vocabulary=300, state=tmp_path / "state")
    opened = cache.open(Shard("a", (), ReadSummary(tokenizer=cache.warning)), silent)
    assert opened.reading.warnings() == [tokenizer.warning]
    exported, removed = read_settings(tokenizer_file)
    assert removed
    assert not json.loads(exported).get("truncation")


def test_the_largest_id_counts_where_ids_have_gaps(tmp_path):
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)} | {"~": 400}
    path = made(tmp_path / "tokenizer.json", models.BPE(vocab=vocabulary, merges=[]))
    with pytest.raises(TextError, match=r"ids up to 400, .* 300 tokens: set model\.vocab_size: 401"):
        open_tokenizer(path, 300)
    tokenizer = open_tokenizer(path, 401)
    assert tokenizer.encode(b"a~").tolist() == [0, 400]
    assert tokenizer.encode(b"a").dtype == torch.uint16, "uint8 would hold no 400"


WORDS = {letter: number for number, letter in enumerate(LETTERS + "<|>/")}
PIECES = [("<unk>", 0.0), (END, -1.0), *((letter, -5.0) for letter in LETTERS + "<|>/")]


@pytest.mark.parametrize(
    ("model", "end"),
    [
        (models.BPE(vocab=WORDS, merges=[]), END),
        (models.BPE(vocab=WORDS, merges=[]), AddedToken(END, special=False)),
        (models.Unigram(PIECES, unk_id=0), END),
    ],
    ids=["special", "added", "unigram"],
)
def test_an_end_of_text_in_a_document_is_plain_text_and_counted(tmp_path, model, end):
    path = made(tmp_path / "tokenizer.json", model, end)
    books = tmp_path / "books.jsonl"
    documents = [f"a{END}b", "c", f"{END}{END}"]
    books.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    tokenizer, text = open_tokenizer(path, 300, END), text_at([str(books)])
    tokens = torch.cat(list(encoded(text, tokenizer, silent))).tolist()
    assert tokens.count(tokenizer.end.token) == len(documents) - 1, "it is put in by its id alone"
    assert text.reading.ends_in_text == 3
    assert text.reading.lost_bytes == 0
    assert tokenizer.end.token not in tokenizer.encode(f"a prompt with {END} in it".encode()).tolist()


@pytest.mark.parametrize("kept", [None, 1000.0])
def test_bytes_that_decoding_does_not_give_back_are_counted(tmp_path, kept):
    vocabulary = {letter: number for number, letter in enumerate("abcdefg")}
    path = made(tmp_path / "tokenizer.json", models.BPE(vocab=vocabulary, merges=[]))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text(LETTERS)
    (shard,) = shards_of(TextSource("b", "b"), str(tmp_path / "books"), ReadSummary())
    cache = ShardCache(tokenizer=path, vocabulary=300, state=tmp_path / "state")
    if kept is not None:
        cache.open(shard, silent)
        os.utime(tmp_path / "books" / "a.txt", (kept, kept))
        (shard,) = shards_of(TextSource("b", "b"), str(tmp_path / "books"), ReadSummary())
    opened = cache.open(shard, silent)
    assert opened.made == (kept is None)
    reading = opened.reading
    assert (reading.lost_bytes, reading.encoded_bytes) == (19, 26)
    assert any("loses 19 bytes of 26" in warning for warning in reading.warnings())


def test_a_byte_level_tokenizer_loses_nothing(tokenizer_file):
    tokenizer, pieces = FileTokenizer(tokenizer_file), ["naïve 日本語\r\n\t 🐝".encode(), b" again"]
    assert tokenizer.lost_bytes(pieces, tokenizer.encode_pieces(pieces))[1] == 0
    assert tokenizer.warning == ""


def test_an_expression_that_gives_up_is_a_text_error(tmp_path):
    path = made(tmp_path / "tokenizer.json", models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    with pytest.raises(TextError, match="cannot encode a text"):
        FileTokenizer(changed(path, pre_tokenizer=split))


def test_a_file_that_is_too_long_is_not_read(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(TextError, match="is longer than 64 MiB"):
        FileTokenizer(tmp_path / "tokenizer.json")
