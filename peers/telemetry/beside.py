"""A text that streams on standard output, and words about it on standard error that never end up in it."""

from __future__ import annotations

import os
from typing import TextIO

from rich.cells import cell_len

from peers.telemetry.console import shown

TAB = 8
"""Columns between two stops of a terminal."""


class Beside:
    """Both may end on one terminal, in one file, or apart.

    On one terminal words that come in the middle of a line stand below it until the text goes on, and are
    erased then; in one file they get a line of their own. Apart, nothing has to be done.
    """

    def __init__(self, text: TextIO, words: TextIO, columns: int) -> None:
        """`columns`: of the terminal, where it is one."""
        self._text, self._words, self._columns = text, words, max(2, columns)
        self._terminal = text.isatty() and words.isatty()
        self._together = self._terminal or _same(text, words)
        self._column, self._last = 0, " "
        self._below = False
        """Words stand below an unfinished line, the cursor behind them."""

    def write(self, text: str) -> None:
        """The text goes on."""
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
        """A line for people."""
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
        """From the line below to where the text stopped. A full line is left by the next character only, and
        the terminal knows that it is full when its last character has been written."""
        if self._column < self._columns:
            return f"\x1b[A\x1b[{self._column + 1}G"
        return f"\x1b[A\x1b[{self._columns - cell_len(self._last) + 1}G{self._last}"

    def _after(self, character: str) -> int:
        """The column behind it."""
        if character == "\n":
            return 0
        at, width = self._column, cell_len(character)
        self._last = character if width else self._last
        if character == "\t":
            return min(self._columns - 1, (at // TAB + 1) * TAB)
        return at + width if at + width <= self._columns else width


def _same(one: TextIO, other: TextIO) -> bool:
    """Whether both end in one file or pipe."""
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError):  # Kept in memory by a test, or closed.
        return False


def _cut(words: str, columns: int) -> str:
    while cell_len(words) > columns:
        words = words[:-1]
    return words
