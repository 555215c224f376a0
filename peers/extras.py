"""How to install what only some commands need: this checkout's extras (pyproject.toml)."""

from __future__ import annotations

import sys


def how_to_install(extra: str) -> str:
    """What to type: only what the lock has a hash of, into the environment that runs this."""
    return f"in this repository's folder, VENV={sys.prefix} scripts/setup {extra}"
