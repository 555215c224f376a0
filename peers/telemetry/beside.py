"""Print messages on standard error while a text streams on standard output, without mixing the two.

The text is what a program writes piece by piece, for example a model's answer. A message is one line for the
user, such as a warning."""

from __future__ import annotations

import os
from typing import TextIO

from rich.cells import cell_len

from peers.telemetry.console import shown

TAB = 8
"""Columns between two tab stops of a terminal."""


class Beside:
    """A text stream and a message stream, which may end on one terminal, in one file, or apart.

    On a terminal, a message in the middle of a line is shown below it. It is erased when the text continues.
    In one file a message gets a line of its own. Separate streams need no care."""

    def __init__(self, text: TextIO, words: TextIO, columns: int) -> None:
        """`columns` is the width of the terminal, if there is one."""
        self._text = text
        self._messages = words
        self._columns = max(2, columns)
        self._terminal = text.isatty() and words.isatty()
        self._share_a_target = self._terminal or _end_in_same_file(text, words)
        self._column = 0
        self._last_character = " "
        self._message_below = False
        """Whether a message is shown below an unfinished line, with the cursor behind it."""

    def write(self, text: str) -> None:
        """Append to the streamed text. A message below the unfinished line is erased first."""
        if not text:
            return
        if self._message_below:
            self._messages.write("\r\x1b[2K" + self._return_to_text())
            self._messages.flush()
            self._message_below = False
        self._text.write(text)
        self._text.flush()
        if self._share_a_target:
            for character in text:
                self._column = self._column_after(character)

    def notify(self, _event: str, message: str) -> None:
        """Print one message. In the middle of a text line, a terminal shows it below that line, cut to one
        line; a shared file ends the text line first."""
        message = shown(message, self._messages)
        if self._column == 0 or not self._share_a_target:
            self._messages.write(message + "\n")
        elif not self._terminal:
            self._messages.write("\n" + message + "\n")
            self._column = 0
        else:
            line_start = "\r\x1b[2K" if self._message_below else "\n"
            self._messages.write(line_start + _cut_to_columns(message, self._columns - 1))
            self._message_below = True
        self._messages.flush()

    def _return_to_text(self) -> str:
        """Return the control sequence that moves the cursor back to the end of the text. After the last
        column a terminal wraps only at the next character, so the last character is written again."""
        if self._column < self._columns:
            return f"\x1b[A\x1b[{self._column + 1}G"
        return f"\x1b[A\x1b[{self._columns - cell_len(self._last_character) + 1}G{self._last_character}"

    def _column_after(self, character: str) -> int:
        """Return the cursor's column after `character`; a full line wraps. Also remember the last character
        that is visible (combining characters have no width)."""
        if character == "\n":
            return 0
        column, width = self._column, cell_len(character)
        if width:
            self._last_character = character
        if character == "\t":
            return min(self._columns - 1, (column // TAB + 1) * TAB)
        return column + width if column + width <= self._columns else width


def _end_in_same_file(one: TextIO, other: TextIO) -> bool:
    """Return whether both streams end in the same file or pipe."""
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError):  # An in-memory stream of a test, or a closed one.
        return False


def _cut_to_columns(text: str, columns: int) -> str:
    while cell_len(text) > columns:
        text = text[:-1]
    return text
