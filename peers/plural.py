"""How many of something, for people."""

from __future__ import annotations


def counted(count: int, one: str) -> str:
    """`1 peer`, `2 peers`, `1,200 peers`: of a noun whose plural ends in s."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"
