"""What peers send, before it is encrypted, and what of a text would be in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

_COPIES = '''
"""Copy all that is written to streams, so what a process gives to p2pd, to a file of the process."""

import asyncio
import os

plain_write, plain_lines = asyncio.StreamWriter.write, asyncio.StreamWriter.writelines


def copy(data):
    with open(os.path.join({folder!r}, str(os.getpid())), "ab") as file:
        file.write(data)


def write(writer, data):
    copy(data)
    plain_write(writer, data)


def writelines(writer, lines):
    lines = list(lines)
    copy(b"".join(lines))
    plain_lines(writer, lines)


asyncio.StreamWriter.write, asyncio.StreamWriter.writelines = write, writelines
'''


class Wire:
    """What Python processes that start with `prefix` write to streams."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "sent"
        self._folder.mkdir()
        (folder / "copying").mkdir()
        (folder / "copying" / "sitecustomize.py").write_text(_COPIES.format(folder=str(self._folder)))
        self.prefix = ("/usr/bin/env", f"PYTHONPATH={folder / 'copying'}")

    def sent(self, pid: int) -> bytes:
        """What one process has sent."""
        return (self._folder / str(pid)).read_bytes()

    def all_sent(self) -> bytes:
        return b"\0".join(path.read_bytes() for path in self._folder.iterdir())


def token_windows(text: bytes) -> set[bytes]:
    """All sequences of six tokens near the start of a text, and so of its labels: as bytes, which are also
    what msgpack makes of small integers, and as integers of each width that the wire knows."""
    tokens = np.frombuffer(text[:64], np.uint8)
    assert tokens.max() < 128
    kinds = ("u1", "<u2", ">u2", "<i4", ">i4", "<i8", ">i8")
    return {tokens[at : at + 6].astype(kind).tobytes() for at in range(32) for kind in kinds}
