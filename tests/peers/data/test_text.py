import hashlib
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm import tokens_of

from peers.data.documents import (
    HELD_OUT,
    DocumentText,
    ReadSummary,
    TextError,
    excerpt,
    files_at,
    fingerprint,
    held_out_text,
    joined,
    read_text,
    text_at,
)
from peers.data.tokenizer import ByteTokenizer, open_tokenizer
from swarmnet.run.schema import STANDARD_LIBRARY


def text_of(*places: Path | str, **choices: Any) -> bytes:
    return joined(chosen(*places, **choices))


def chosen(*places: Path | str, **choices: Any) -> DocumentText:
    reading = ReadSummary()
    files = [file for place in places for _, file in files_at(str(place), reading)]
    return DocumentText(files, reading, places=", ".join(map(str, places)), **choices)


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_standard_library_trains_without_its_tests_and_the_held_out_modules() -> None:
    text = text_of(STANDARD_LIBRARY)
    library = Path(sysconfig.get_paths()["stdlib"])
    assert 5_000_000 < len(text) < 20_000_000
    assert (library / "ast.py").read_bytes() in text
    for module in HELD_OUT:
        assert (library / f"{module}.py").read_bytes() not in text, module
    assert b"class AST_Tests" not in text


def test_the_index_of_a_text_is_no_text_that_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "index.json").write_text("{}")
    reading = ReadSummary()
    assert [name for name, _ in files_at(str(tmp_path), reading)] == ["a.txt"]
    assert reading.warnings() == []


def test_the_held_out_text_is_all_of_the_held_out_modules() -> None:
    text = held_out_text()
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in HELD_OUT:
        assert (library / f"{module}.py").read_bytes() in text, module


def test_a_python_without_its_library_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(TextError, match="holds no Python source"):
        text_of(STANDARD_LIBRARY)
    with pytest.raises(TextError, match="none of the held-out modules"):
        held_out_text()


def test_a_folder_is_read_in_order_with_an_empty_line_between_documents(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first \xff")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "picture.png").write_bytes(b"not text")
    write_lines(tmp_path / "inner" / "c.jsonl", {"text": "third"}, {"text": ""}, {"text": "fourth", "id": 4})
    expected = b"first \xff\n\nsecond\n\nthird\n\nfourth"
    assert text_of(tmp_path) == expected
    warnings: list[str] = []
    assert read_text(str(tmp_path), warnings.append) == expected
    assert [warning.partition(": ")[0] for warning in warnings] == ["left out of the text", "not UTF-8"]
    assert text_of(tmp_path / "b.txt", tmp_path / "a.txt") == b"second\n\nfirst \xff"


def test_any_file_can_be_scored(tmp_path: Path) -> None:
    (tmp_path / "letter.md").write_bytes(b"# Dear\n")
    assert read_text(str(tmp_path / "letter.md"), pytest.fail) == b"# Dear\n"


def test_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"text .*nowhere does not exist"):
        text_of(tmp_path / "nowhere")


def test_a_folder_with_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"not text")
    with pytest.raises(TextError, match=r"holds no text: put \.txt, \.md, .* and \.parquet files there"):
        text_of(tmp_path)
    (tmp_path / "empty.txt").write_bytes(b" \n")
    with pytest.raises(TextError, match=r"no text in .*picture\.png"):
        text_of(tmp_path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"content": "x"}', 'no field "text"'),
        ('{"text": 3}', 'no field "text"'),
        ('["text"]', 'no field "text"'),
        ('{"text": "x"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\udcff", "not JSON"),
    ],
)
def test_a_line_without_text_is_left_out_and_named_by_file_and_number(
    tmp_path: Path, line: str, problem: str
) -> None:
    path = tmp_path / "lines.jsonl"
    bad = line.encode("utf-8", "surrogateescape")
    path.write_bytes(b'{"text": "fine"}\n\n' + bad + b'\n{"text": "goes on"}\n' + bad)
    text = text_at([str(path)])
    assert joined(text) == b"fine\n\ngoes on"
    (warning,) = text.reading.warnings()
    assert f"lines.jsonl:3: {problem}" in warning
    assert warning.endswith(", and 1 more")
    assert "\n" not in warning


def test_what_cannot_be_read_is_left_out_and_counted_and_the_first_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "b.txt").write_bytes(b"\x7fELF\0\0\0")
    (tmp_path / "c.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "d.py").write_bytes(b"print()")
    (tmp_path / "e.txt").write_bytes("fünf".encode("latin-1"))
    (tmp_path / "f.txt").write_bytes(b"")
    (tmp_path / "g.md").write_bytes(b"# Seven")
    (tmp_path / ".hidden.txt").write_bytes(b"secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "description.txt").write_bytes(b"secret")
    text = text_at([str(tmp_path)])
    assert joined(text) == b"first\n\nf\xfcnf\n\n# Seven"
    reading = text.reading
    assert (reading.files, reading.documents, reading.left_out, reading.not_utf8) == (3, 3, 3, 1)
    other_ending, missing, binary, not_utf8 = reading.warnings()
    assert "d.py: of a folder only" in other_ending
    assert "c.txt: No such file" in missing
    assert "b.txt: is no text" in binary
    assert "e.txt" in not_utf8
    joined(text)
    assert text.reading == reading


def test_a_text_of_which_nothing_can_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"\0" * 10)
    with pytest.raises(TextError, match=r"no text in .*: .*b\.txt: is no text: it holds zero bytes"):
        text_of(tmp_path)


def test_a_line_too_long_is_left_out_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.data.forms.LINE_LIMIT", 100)
    path = write_lines(tmp_path / "c.jsonl", {"text": "a"}, {"text": "b" * 350}, {"text": "c"})
    text = text_at([str(path)])
    assert joined(text) == b"a\n\nc"
    assert "c.jsonl:2: a line of more than 100 bytes" in text.reading.first_left_out


def test_a_part_of_a_long_file_begins_with_a_whole_character(tmp_path: Path) -> None:
    (tmp_path / "bees.txt").write_bytes("🐝".encode() * 1000)
    for seed in range(8):
        text = chosen(tmp_path, longest_bytes=100, seed=seed)
        assert joined(text).startswith("🐝".encode())
        assert text.reading.not_utf8 == 0


def test_a_text_too_large_is_cut_to_a_part_that_the_seed_chooses(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_bytes(bytes([65 + number]) * 100)
    (tmp_path / "long.txt").write_bytes(bytes(range(97, 123)) * 100)
    parts = [text_of(tmp_path, longest_bytes=500, seed=seed) for seed in (0, 0, 1, 2, 3)]
    assert parts[0] == parts[1]
    assert len(set(parts)) == 4
    assert all(400 <= len(part) <= 500 for part in parts)


def test_bytes_are_their_own_tokens(tmp_path: Path) -> None:
    everything = bytes(range(256))
    (tmp_path / "all.txt").write_bytes(everything)
    corpus = tokens_of([str(tmp_path / "all.txt")], 256)
    assert corpus.dtype == torch.uint8
    assert bytes(corpus.tolist()) == everything == ByteTokenizer().decode(corpus.tolist())
    assert ByteTokenizer().encode(b"").shape == (0,)
    assert ByteTokenizer().decode([65, 300]) == b"A"


@pytest.mark.parametrize("text", ["def function(self):\n", "naïve — 日本語 🐝", ""])
def test_a_tokenizer_file_encodes_and_decodes(tokenizer_file: Path, text: str) -> None:
    tokenizer = open_tokenizer(tokenizer_file, 300)
    tokens = tokenizer.encode(text.encode())
    assert tokens.dtype == torch.uint16
    assert tokenizer.decode(tokens.tolist()) == text.encode()


def test_a_long_text_is_tokenized_in_pieces_without_loss(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.data.tokenizer.PIECE_BYTES", 10)
    tokenizer = open_tokenizer(tokenizer_file, 300)
    text = "first line\nsecond wörld\n\nlast without an end".encode()
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_a_character_is_shown_when_its_last_byte_is_there(tokenizer_file: Path) -> None:
    tokenizer = open_tokenizer(tokenizer_file, 300)
    tokens = tokenizer.encode("a🐝".encode()).tolist()
    assert [tokenizer.decode(tokens[:count]) for count in range(1, 5)] == [b"a"] * 4
    assert tokenizer.decode(tokens) == "a🐝".encode()


def test_a_tokenizer_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"tokenizer .*absent\.json does not exist"):
        open_tokenizer(tmp_path / "absent.json", 256)
    (tmp_path / "broken.json").write_text('{"model": 3}')
    with pytest.raises(TextError, match=r"broken\.json is not a tokenizer\.json") as raised:
        open_tokenizer(tmp_path / "broken.json", 256)
    assert "\n" not in str(raised.value)


def test_a_missing_tokenizers_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(TextError, match=r"needs the package `tokenizers`: .*scripts/setup hf$"):
        open_tokenizer(Path("tokenizer.json"), 256)


@given(st.binary(max_size=300), st.integers(1, 200), st.integers(1, 50))
def test_an_excerpt_is_made_of_pieces_of_the_text(text: bytes, limit: int, piece: int) -> None:
    taken = excerpt(text, limit, piece)
    assert len(taken) <= limit
    if len(text) <= limit:
        assert taken == text
    else:
        assert len(taken) >= min(piece, limit)
        length = min(piece, limit)
        assert all(taken[start : start + length] in text for start in range(0, len(taken), length))


def test_an_excerpt_reaches_from_start_to_end() -> None:
    text = bytes(range(256)) * 4
    taken = excerpt(text, 64, 16)
    assert len(taken) == 64
    assert taken.startswith(text[:16])
    assert taken.endswith(text[-16:])
    assert fingerprint(taken) != fingerprint(text)


def test_a_withdrawn_file_is_known_by_all_of_it_where_a_part_is_read(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "b.txt").write_bytes(b"second" * 1000)
    withdrawn = {hashlib.sha256(b"second" * 1000).digest()}
    assert text_of(tmp_path, longest_bytes=100, withdrawn=withdrawn) == b"first"
