"""Look at a text before a run is proposed: its format, its size, and its tokens by a tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peers.data.documents import ReadSummary, TextError, files_at, text_at
from peers.data.files import LINES, ROWS, Unreadable, open_content
from peers.data.forms import json_lines, parquet_lines
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
    tokens: int
    """All tokens; of a text over 64 MiB, estimated from a random part of that size."""
    long_tokens: int
    """Tokens of a long conversation: LONG_SHARE have at most as many. 0 for plain text."""
    warnings: tuple[str, ...]


def format_of(place: str) -> FormatName:
    """Return the format of a text: that of the first conversation or line of its first file with lines of
    JSON or Parquet. Raises TextError if there is no text."""
    from peers.data.conversations import messages_of

    for _, file in files_at(place, ReadSummary()):
        try:
            with open_content(file) as content:
                if content.form not in (LINES, ROWS):
                    continue
                is_table = content.form == ROWS
                lines = parquet_lines(file.name, content.stream) if is_table else json_lines(content.stream)
                if not isinstance(first := next(lines, b""), Unreadable):
                    messages_of(first)
        except (OSError, Unreadable):  # Parquet without conversations, or what the reading reports.
            continue
        except ValueError:
            return "text"
        return "messages"
    return "text"


def facts_of(place: str, reads: Tokenizer, progress: Callable[[int, int], None]) -> TextFacts:
    """Read a text and count its tokens. `progress` gets the bytes read and in all. Raises TextError."""
    from peers.data.tokens import encoded

    text = text_at([place], parse_line=reads.parse_line)
    lengths: list[int] = []
    if reads.parse_line is None:
        tokens = sum(map(len, encoded(text, reads, progress)))
    else:
        lengths = sorted(len(reads.encode_pieces([block])[0]) for _, block in text.blocks())
        tokens = sum(lengths)
    if tokens < 2:
        raise TextError(f"{place} has {tokens} tokens: add text")
    whole = text_at([place], sys.maxsize).total_bytes
    return TextFacts(
        text.reading.documents,
        whole,
        tokens * whole // max(1, text.total_bytes),
        lengths[int(LONG_SHARE * (len(lengths) - 1))] if lengths else 0,
        tuple(text.reading.warnings()),
    )
