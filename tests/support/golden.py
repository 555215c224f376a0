"""Whole outputs that are compared with files: what a command says is read, and changed, in one place."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RENEW = "SWARMNET_RENEW"


class Golden:
    """Compares texts with the files in the folder `golden` beside a test."""

    def __init__(self, test: Path) -> None:
        self.test = test.relative_to(ROOT)
        self.folder = test.parent / "golden"

    def __call__(self, name: str, text: str, **stands_for: str) -> None:
        """Fail unless the file has this text, in which each value stands as its <NAME>."""
        for word, value in stands_for.items():
            text = text.replace(value, f"<{word.upper()}>")
        file = self.folder / name
        if os.environ.get(RENEW):
            self.folder.mkdir(exist_ok=True)
            file.write_text(text)
        expected = file.read_text() if file.exists() else ""
        if text != expected:
            before, now = expected.splitlines(), text.splitlines()
            lines = difflib.unified_diff(before, now, name, "now", lineterm="")
            renew = f"{RENEW}=1 scripts/test {self.test}"
            pytest.fail("\n".join([*lines, f"if that is meant: {renew}"]), pytrace=False)
