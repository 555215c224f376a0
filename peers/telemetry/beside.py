"""Print messages on standard error while a text streams on standard output, without mixing the two."""

from __future__ import annotations

import os
from typing import TextIO

from rich.cells import cell_len

from peers.telemetry.console import shown

TAB = 8
"""Columns between two tab stops of a terminal."""


class Beside:
    """Both streams may end on one terminal, in one file, or apart.

    On a terminal, a message in the middle of a line is shown below it and erased when the text continues. In
    one file a message gets a line of its own. Separate streams need no care."""

    def __init__(self, text: TextIO, words: TextIO, columns: int) -> None:
        """`columns` is the width of the terminal, if there is one."""
        self._text, self._words, self._columns = text, words, max(2, columns)
        self._terminal = text.isatty() and words.isatty()
        self._together = self._terminal or _same(text, words)
        self._column, self._last = 0, " "
        self._below = False
        """Whether a message is shown below an unfinished line, with the cursor behind it."""

    def write(self, text: str) -> None:
        """Append to the streamed text."""
        if not text:
            return
        if self._below:
            self._words.write("\r\x1b[2K" + self._back())
            self._words.flush()
            self._below = False
        self._text.write(text)
        self._text.flush()
        for character in text if self._together else ():
            self._column = self._after(character)

    def notify(self, _event: str, words: str) -> None:
        """Print one line for people."""
        words = shown(words, self._words)
        if self._column == 0 or not self._together:
            self._words.write(words + "\n")
        elif not self._terminal:
            self._words.write("\n" + words + "\n")
            self._column = 0
        else:
            self._words.write(("\r\x1b[2K" if self._below else "\n") + _cut(words, self._columns - 1))
            self._below = True
        self._words.flush()

    def _back(self) -> str:
        """Return the control sequence that moves the cursor back to the end of the text. After the last
        column a terminal wraps only at the next character, so the last character is written again."""
        if self._column < self._columns:
            return f"\x1b[A\x1b[{self._column + 1}G"
        return f"\x1b[A\x1b[{self._columns - cell_len(self._last) + 1}G{self._last}"

    def _after(self, character: str) -> int:
        """Return the column after `character`."""
        if character == "\n":
            return 0
        at, width = self._column, cell_len(character)
        self._last = character if width else self._last
        if character == "\t":
            return min(self._columns - 1, (at // TAB + 1) * TAB)
        return at + width if at + width <= self._columns else width


def _same(one: TextIO, other: TextIO) -> bool:
    """Return whether both streams end in the same file or pipe."""
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError):  # An in-memory stream of a test, or a closed one.
        return False


def _cut(words: str, columns: int) -> str:
    while cell_len(words) > columns:
        words = words[:-1]
    return words
