"""Look at a text before a run is proposed: its format, its size, and its tokens by a tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peers.data.documents import LONGEST_CORPUS_BYTES, ReadSummary, TextError, files_at, text_at
from peers.data.files import LINES, Unreadable, open_content
from swarmnet.run.schema import FormatName

if TYPE_CHECKING:
    from peers.data.tokenizer import Tokenizer

LONG_SHARE = 0.99
"""Share of the conversations that fit into a sequence."""


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What a run would read of a text."""

    documents: int
    bytes: int
    read_bytes: int
    """Bytes that were read here: all, or a random part of a text over 64 MiB."""
    tokens: int
    """All tokens; of a text over 64 MiB, estimated from a random part of that size."""
    learned: int
    """Tokens with a loss: all, or those of the answers."""
    long_tokens: int
    """Tokens of a long conversation: LONG_SHARE have at most as many. 0 for plain text."""
    warnings: tuple[str, ...]


def format_of(place: Path) -> FormatName:
    """Return the format of a text: that of the first line of its first file with lines of JSON. Raises
    TextError if there is no text."""
    from peers.data.conversations import messages_of

    for _, file in files_at(str(place), ReadSummary()):
        try:
            with open_content(file) as content:
                line = content.stream.readline() if content.form == LINES else b""
        except (OSError, Unreadable):
            continue  # The reading reports it.
        if line:
            try:
                messages_of(line)
            except ValueError:
                return "text"
            return "messages"
    return "text"


def facts_of(place: str, reads: Tokenizer, progress: Callable[[int, int], None]) -> TextFacts:
    """Read a text and count its tokens. `progress` is called with the bytes read and in all. Raises
    TextError."""
    from peers.data.tokens import encoded

    text = text_at([place], parse_line=reads.parse_line)
    tokens = learned = 0
    lengths: list[int] = []
    if reads.parse_line is None:
        tokens = learned = sum(map(len, encoded(text, reads, progress)))
    else:
        for _, block in text.blocks():
            (conversation,) = reads.encode_pieces([block])
            lengths.append(len(conversation))
            learned += int((conversation >= 0).sum())
            progress(text.reading.bytes, text.total_bytes)
        tokens = sum(lengths)
    if tokens < 2:
        raise TextError(f"{place} has {tokens} tokens: add text")
    whole = text_at([place], sys.maxsize).total_bytes
    factor = max(1.0, whole / LONGEST_CORPUS_BYTES)
    lengths.sort()
    return TextFacts(
        documents=text.reading.documents,
        bytes=whole,
        read_bytes=text.total_bytes,
        tokens=int(tokens * factor),
        learned=int(learned * factor),
        long_tokens=lengths[min(len(lengths) - 1, int(LONG_SHARE * len(lengths)))] if lengths else 0,
        warnings=tuple(text.reading.warnings()),
    )
