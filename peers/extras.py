"""How to install what only some commands need: this checkout's extras (pyproject.toml)."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """What to type. By name alone, `swarmnet` would be whatever else is called so."""
    return f"in this repository's folder, python -m pip install -c scripts/requirements.lock -e '.[{extra}]'"
