"""Read single keys from a terminal without Enter; none if standard input is no terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any


class Keys:
    """Reads keys as they are pressed while open, and restores the terminal at the end."""

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

    def pressed(self, wait_seconds: float) -> str:
        """Return the keys pressed within the time; returns early with the first."""
        ready, _, _ = select.select([] if self._file is None else [self._file], [], [], wait_seconds)
        if self._file is None or not ready:
            return ""
        return os.read(self._file, 256).decode(errors="replace")
