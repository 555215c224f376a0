"""Single keys from a terminal, without Enter; nothing where standard input is no terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any

ARROWS = {"[C": "right", "[D": "left", "[H": "home", "[F": "end", "OC": "right", "OD": "left", "OH": "home",
          "OF": "end", "[1~": "home", "[4~": "end"}  # fmt: skip
"""What comes after the escape character."""


class Keys:
    """While open, keys are read as they are pressed; the terminal is left as it was."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._before: list[Any] | None = None

    def __enter__(self) -> Keys:
        if sys.stdin is not None and sys.stdin.isatty():
            self._file = sys.stdin.fileno()
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None and self._before is not None:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    def pressed(self, wait_seconds: float) -> list[str]:
        """Keys that came within the time; returns early when there is one."""
        if self._file is None:
            select.select([], [], [], wait_seconds)
            return []
        ready, _, _ = select.select([self._file], [], [], wait_seconds)
        return split(os.read(self._file, 256).decode(errors="replace")) if ready else []


def split(text: str) -> list[str]:
    """Characters, with escape sequences as one key each; unknown ones are left out."""
    keys, index = [], 0
    while index < len(text):
        if text[index] != "\x1b":
            keys.append(text[index])
            index += 1
            continue
        name = next((name for name in ARROWS if text.startswith(name, index + 1)), None)
        index += 1 + len(name or "")
        if name is not None:
            keys.append(ARROWS[name])
        else:
            while index < len(text) and not (text[index].isalpha() or text[index] == "~"):
                index += 1
            index += 1
    return keys
