"""Encode text as tokens: one per byte, or by a `tokenizer.json`.

Text is encoded in pieces of limited length. The end of text is a token between two documents."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from peers.config.errors import how_to_install
from peers.data.documents import BETWEEN_DOCUMENTS, ParseLine, TextError
from swarmnet.run.schema import BYTES, Data

PIECE_BYTES = 64 * 1024
"""Maximum bytes of a piece that is encoded at once. For a piece without a line end the tokenizers package
takes time with the square of its length. It takes 1.4 s for 1 MiB, and 40 s and 1 GB of memory for 4 MiB
(docs/lessons.md)."""
BATCH_BYTES = 2**20
"""Bytes that are encoded at a time, on all threads that the package uses."""
MAX_TOKENS = 2**31
"""Maximum number of tokens: an id is an int32."""
MAX_FILE_BYTES = 64 * 2**20
"""Maximum bytes of a tokenizer.json. One with 262,144 tokens has 33 MB (Gemma 3)."""
_PROBE = "A text: naïve, 日本語, 12.5 %.\n\n\tif x == 1:  " + "a" * 32 + "b\r\n"
"""Text that is encoded when a tokenizer.json is loaded, to detect a pattern that backtracks without end."""
_SPACES = (b" ", b"\t", b"\r")
_LONGEST_CHARACTER = 4
"""Maximum bytes of a character in UTF-8."""


@dataclass(frozen=True, slots=True)
class DocumentSeparator:
    """Separator between two documents."""

    text: bytes = BETWEEN_DOCUMENTS
    token: int | None = None
    """Token that the model emits at the end of a text; None: it has no such token."""

    def count(self, text: bytes) -> int:
        """Return how often a document contains the separator, if the separator is one token; else 0."""
        return 0 if self.token is None else text.count(self.text)


class Tokenizer(ABC):
    vocabulary: int
    """Number of tokens: ids are 0 to `vocabulary` - 1."""
    warning = ""
    """Settings of the file that were switched off; empty: none."""
    end = DocumentSeparator()
    form = ""
    """What else the tokens depend on, besides the file and `end`."""
    parse_line: ParseLine | None = None
    """Returns the document in a .jsonl line; None: its field `text`. With it, a piece is a whole document."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of a text's tokens."""
        return dtype_for(self.vocabulary)

    @abstractmethod
    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tensor]:
        """Return the tokens of each piece of text as one-dimensional tensors of `dtype_for(vocabulary)`. A
        piece has at most some PIECE_BYTES. Raises TextError for text that the tokenizer cannot read."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens, without a trailing character whose last bytes are missing."""

    def encode(self, text: bytes) -> Tensor:
        """Return the tokens of a text of any length."""
        pieces = self.encode_pieces(list(pieces_of([text])))
        return torch.cat([torch.empty(0, dtype=dtype_for(self.vocabulary)), *pieces])

    def lost_bytes(self, pieces: Sequence[bytes], tokens: Sequence[Tensor]) -> tuple[int, int]:
        """Return the number of UTF-8 bytes in `pieces`, and how many of them decoding their `tokens` loses.
        The comparison counts how often each byte occurs, and ignores positions."""
        return 0, 0


def dtype_for(vocabulary: int) -> torch.dtype:
    """Return the smallest dtype that holds every token, so that tokens take no more room than the text."""
    if vocabulary <= 2**8:
        return torch.uint8
    return torch.uint16 if vocabulary <= 2**16 else torch.int32


class ByteTokenizer(Tokenizer):
    """Tokenizer with one token per byte."""

    vocabulary = 256

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tensor]:
        """Return the bytes of each piece of text as a uint8 tensor: a token is a byte."""
        return [torch.frombuffer(bytearray(piece), dtype=torch.uint8) for piece in pieces]

    def decode(self, tokens: Sequence[int]) -> bytes:
        # A model may have more than 256 outputs; the others are no text.
        return bytes(token for token in tokens if token < 256)


def read_settings(path: Path) -> tuple[str, list[str]]:
    """Read a tokenizer.json. Returns its JSON without the settings that change a text, and a list of the
    removed settings with their values.

    Truncation cuts a text, padding adds tokens, and dropout makes its tokens random. Raises TextError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            longest = f"{MAX_FILE_BYTES >> 20} MiB"
            raise TextError(f"tokenizer {path} is longer than {longest}: name a tokenizer.json")
        text = data.decode("utf-8-sig")  # Some editors put a byte order mark in front.
        content = json.loads(text)
    except OSError as error:
        raise TextError(f"tokenizer {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, RecursionError, json.JSONDecodeError) as error:
        cure = 'AutoTokenizer.from_pretrained("FOLDER").save_pretrained("FOLDER") in transformers writes one'
        raise TextError(f"{path} is not a tokenizer.json: {error}; {cure}") from None
    if not isinstance(content, dict):
        raise TextError(f"{path} is not a tokenizer.json: it is no JSON object")
    model = content.get("model")
    removed = _remove(content, ("truncation", "padding"))
    if isinstance(model, dict):
        removed += [f"model.{each}" for each in _remove(model, ("dropout",))]
    return (json.dumps(content, ensure_ascii=False) if removed else text), removed


def _faulty_key(text: str, load: Callable[[str], None]) -> str:
    """Return the key of a tokenizer.json without which `load` does not raise TextError; `model` if none is
    at fault alone."""
    content = json.loads(text)
    for key in content:
        with suppress(TextError):
            load(json.dumps({other: value for other, value in content.items() if other != key}))
            return str(key)
    return "model"


def _remove(settings: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Set these settings to null. Return those that were set, with their values."""
    found = [name for name in names if settings.get(name) not in (None, 0)]
    removed = [f"{name} {json.dumps(settings[name])[:80]}" for name in found]
    settings.update(dict.fromkeys(found))
    return removed


Result = TypeVar("Result")


class FileTokenizer(Tokenizer):
    """Tokenizer of a `tokenizer.json`, read by the `tokenizers` package. Text that is not UTF-8 is replaced.

    Special tokens that occur in a text are encoded as plain text; the end of text only by its id."""

    def __init__(self, path: Path, eos_token: str = "", *, reads_special_tokens: bool = False) -> None:
        """Read a tokenizer.json. With `reads_special_tokens`, those in a text are encoded as what they are.
        Raises TextError."""
        self._path = path
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise TextError(f"{path} needs the package `tokenizers`: {how_to_install('hf')}") from None
        if not path.is_file():
            fault = "is a folder: name the tokenizer.json in it" if path.is_dir() else "does not exist"
            raise TextError(f"tokenizer {path} {fault}")
        text, removed = read_settings(path)
        changes = f"tokenizer {path}: switched off, as it changes a text: {', '.join(removed)}"
        self.warning = changes if removed else ""

        def load(text: str) -> None:
            """Load and try a tokenizer.json. Raises TextError."""
            self._loaded: Any = self._call_package(lambda: Loaded.from_str(text), "is not a tokenizer.json")
            self._loaded.encode_special_tokens = not reads_special_tokens
            self.vocabulary = max(self._loaded.get_vocab().values(), default=-1) + 1
            """Largest id plus 1; ids may have gaps."""
            if not 0 < self.vocabulary <= MAX_TOKENS:
                largest = f"the largest id is {self.vocabulary - 1}, at most {MAX_TOKENS - 1} is possible"
                raise TextError(f"tokenizer {path}: {largest if self.vocabulary else 'there are no tokens'}")
            self.encode_pieces([_PROBE.encode()])

        try:
            load(text)
        except TextError as error:
            raise TextError(f"{error}; the fault is in its key `{_faulty_key(text, load)}`") from None
        if eos_token:
            self.end = DocumentSeparator(eos_token.encode(), self._end_token(eos_token))

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tensor]:
        """Return the tokens of each piece of text as one-dimensional tensors of `dtype_for(vocabulary)`.
        Raises TextError for text that the tokenizer cannot read."""
        # A piece is cut within each end-of-text string. All parts are encoded in one call of the package.
        parts = [self._split_at_end_of_text(piece.decode("utf-8", "replace")) for piece in pieces]
        all_parts = [part for piece_parts in parts for part in piece_parts]
        encoded = iter(
            self._call_package(
                lambda: self._loaded.encode_batch_fast(all_parts, add_special_tokens=False),
                f"cannot encode a text of {sum(map(len, pieces)):,} bytes",
            )
        )
        dtype = dtype_for(self.vocabulary)
        tokens_of_pieces = []
        for piece_parts in parts:
            ids = [token for _ in piece_parts for token in next(encoded).ids]  # `encoded` has one per part.
            tokens_of_pieces.append(torch.tensor(ids, dtype=dtype))
        return tokens_of_pieces

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the tokens of each text, and of each token its first character and the one behind its last.
        Raises TextError."""
        encoded = self._call_package(
            lambda: self._loaded.encode_batch(list(texts), add_special_tokens=False),
            f"cannot encode a text of {sum(map(len, texts)):,} characters",
        )
        return [(each.ids, each.offsets) for each in encoded]

    @property
    def special_tokens(self) -> list[str]:
        added = self._loaded.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def decode(self, tokens: Sequence[int]) -> bytes:
        text = str(self._loaded.decode(list(tokens), skip_special_tokens=False))
        return text.rstrip("\N{REPLACEMENT CHARACTER}").encode()

    def lost_bytes(self, pieces: Sequence[bytes], tokens: Sequence[Tensor]) -> tuple[int, int]:
        """Return the number of UTF-8 bytes in `pieces`, and how many of them are missing after decoding their
        `tokens`. Only the count of each byte value is compared, not its positions."""
        original = _histogram("".join(piece.decode("utf-8", "replace") for piece in pieces))
        ids = [piece_tokens.tolist() for piece_tokens in tokens]
        decoded = self._call_package(
            lambda: self._loaded.decode_batch(ids, skip_special_tokens=True), "cannot decode"
        )
        lost = np.maximum(original - _histogram("".join(decoded)), 0)
        return int(original.sum()), int(lost.sum())

    def _split_at_end_of_text(self, text: str) -> list[str]:
        """Return the parts of a text that is cut after the first character of each end-of-text string, so
        that none is encoded as that token. "a</s>b" gives "a<" and "/s>b". Without such a token, return the
        whole text."""
        if self.end.token is None:
            return [text]
        end = self.end.text.decode()
        first, *rest = text.split(end)
        parts = [first, *(end[1:] + part for part in rest)]
        return [*(part + end[:1] for part in parts[:-1]), parts[-1]]

    def _end_token(self, end: str) -> int:
        """Return the id of the end of text `end`. Raises TextError if it is not one token."""
        token = self._loaded.token_to_id(end)
        tokens = self.encode(end.encode()).tolist() if token is None else [int(token)]
        return _only_token(tokens, end, self._path)

    def _call_package(self, use: Callable[[], Result], failed: str) -> Result:
        """Return the result of `use`, a call of the package. Raises TextError for everything that it raises;
        `failed` says what did not work.

        The package raises bare Exception for a bad file. For a pattern that gives up it raises Rust's
        PanicException, which is not a subclass of Exception."""
        try:
            return use()
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                why = f"tokenizer {self._path} {failed}: {error}"
                raise TextError(f"{why}; use another tokenizer.json") from None
            raise


def _histogram(text: str) -> np.ndarray:
    """Return how often each byte occurs in a text as UTF-8, int64 [256]."""
    return np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256)


def _only_token(tokens: Sequence[int], end: str, tokenizer: Path | str) -> int:
    """Return the single token of an end of text. Raises TextError."""
    if len(tokens) != 1:
        raise TextError(
            f"data.eos_token {end!r} is {len(tokens)} tokens of tokenizer {tokenizer}; it must be one: "
            "add it to the tokenizer as a special token, or name another"
        )
    return tokens[0]


def open_tokenizer(file: Path | None, vocabulary: int, eos_token: str = "") -> Tokenizer:
    """Return the tokenizer of the tokenizer.json `file`; None: one token per byte. `vocabulary` is the number
    of tokens of the model. `eos_token` ends a document; empty: an empty line separates documents. Raises
    TextError if the tokenizer has more tokens than the model, or if `eos_token` is not one token."""
    tokenizer = FileTokenizer(file, eos_token) if file is not None else ByteTokenizer()
    if file is None and eos_token:
        end = eos_token.encode()
        tokenizer.end = DocumentSeparator(end, _only_token(list(end), eos_token, BYTES))
    if tokenizer.vocabulary > vocabulary:
        raise TextError(
            f"tokenizer {file or BYTES} has ids up to {tokenizer.vocabulary - 1}, the model {vocabulary} "
            f"tokens: set model.vocab_size: {tokenizer.vocabulary}"
        )
    return tokenizer


def open_reader(data: Data, file: Path | None, vocabulary: int) -> Tokenizer:
    """Return the tokenizer of a run's text: `open_tokenizer`, or one of conversations if the run's text has
    that format. Raises TextError."""
    tokenizer = open_tokenizer(file, vocabulary, data.eos_token)
    if data.format != "messages":
        return tokenizer
    from peers.data.conversations import ChatTokenizer  # Loads Jinja.

    if file is None:
        raise TextError("conversations need the model's tokenizer.json: --tokenizer FILE")
    return ChatTokenizer(file, data.eos_token, data.chat_template_sha256)


def tokenizer_file(data: Data, given: Path | None) -> Path | None:
    """Return `given`, the path of the run's tokenizer.json that the user typed; None: the run's tokens are
    bytes. Raises TextError if the run needs a path and none is given, or the reverse."""
    if data.tokenizer == BYTES:
        if given is not None:
            raise TextError(f"tokenizer {given} is not for this run, whose tokens are bytes: leave it out")
        return None
    if given is None:
        raise TextError(
            f"the run's text is read with a tokenizer.json that its owner hands out ({data.tokenizer}): say "
            "where it is on this machine: --tokenizer FILE"
        )
    return given


def pieces_of(blocks: Iterable[bytes], length: int = PIECE_BYTES) -> Iterator[bytes]:
    """Split a document, given in blocks of any length, into pieces of at most `length` bytes. It is cut after
    a line end, else before white space (tokens begin with it), else between two characters."""
    rest = b""  # What is not in a piece yet.
    for block in blocks:
        rest = rest + block if rest else block
        start = 0
        while len(rest) - start > length:
            stop = _end_of_piece(rest, start, start + length)
            yield rest[start:stop]
            start = stop
        rest = rest[start:]
    if rest:
        yield rest


def _end_of_piece(text: bytes, start: int, last: int) -> int:
    """Return the index at which the piece of `text` from `start` ends, at most `last`. In the second half of
    that range it is the last line end, else the last white space. Else it is between two characters."""
    half = (start + last + 1) // 2
    line_end = text.rfind(b"\n", half, last)
    if line_end >= 0:
        return line_end + 1
    space = max(text.rfind(character, half, last) for character in _SPACES)
    if space > start:
        return space
    for stop in range(last, max(start, last - _LONGEST_CHARACTER), -1):
        if text[stop] & 0xC0 != 0x80:  # Not a continuation byte of a character.
            return stop
    return last
