"""The picture that other sites show beside a link to a run's page: its name, progress and loss, as a PNG.

It is drawn pixel by pixel, because an observer loads neither numpy nor a drawing library."""

from __future__ import annotations

import struct
import unicodedata
import zlib
from collections.abc import Sequence
from itertools import pairwise

WIDTH, HEIGHT = 1200, 630
"""The size that sites ask for in `og:image`."""
MARGIN = 60
PAPER, INK, SOFT, LINE, GOOD, MARK = range(6)
PALETTE = bytes.fromhex("14171a e4e7ea 98a1aa 2c323a 4fae85 6ea8e0")
"""The colours of the page in the dark, as red, green and blue."""
GLYPHS = bytes.fromhex(
    "000000000000005f00000007000700147f147f14242a7f2a12231308646236495620500008070300001c2241000041221c00"
    "2a1c7f1c2a08083e08080080703000080808080800006060002010080402"
    "3e5149453e00427f4000724949494621414949331814127f1027454545393c4a4949314121110907364949493646494929"
    "1e0000140000004034000000081422411414141414004122140802015909063e415d594e"
    "7c1211127c7f494949363e414141227f4141413e7f494949417f090909013e414151737f0808087f00417f41002040413f01"
    "7f081422417f404040407f021c027f7f0408107f3e4141413e7f090909063e4151215e7f09192946264949493203017f0103"
    "3f4040403f1f2040201f3f4038403f631408146303047804036159494d43"
)
"""Letters from the space to Z, of 5 by 7 pixels like those of small LCD displays: a byte for each column,
whose lowest bit is the pixel at the top."""
UNKNOWN = GLYPHS[5 * (ord("?") - 32) : 5 * (ord("?") - 31)]
COLUMNS, ADVANCE = 5, 6


class Picture:
    """Pixels in the colours of PALETTE."""

    def __init__(self) -> None:
        self._rows = [bytearray([PAPER]) * WIDTH for _ in range(HEIGHT)]

    def fill(self, left: int, top: int, width: int, height: int, colour: int) -> None:
        """Fill a rectangle, as far as it lies in the picture."""
        left, right = max(0, left), min(WIDTH, left + width)
        if right > left:
            for row in self._rows[max(0, top) : max(0, top + height)]:
                row[left:right] = bytes([colour]) * (right - left)

    def write(self, left: int, top: int, text: str, scale: int, colour: int) -> None:
        """Write a text in capital letters; each of their pixels becomes a square of `scale` pixels."""
        plain = unicodedata.normalize("NFKD", text.upper())
        letters = [letter for letter in plain if not unicodedata.combining(letter)]
        for place, letter in enumerate(letters):
            start = 5 * (ord(letter) - 32)
            columns = GLYPHS[start : start + COLUMNS] if 0 <= start < len(GLYPHS) else UNKNOWN
            for x, column in enumerate(columns):
                for y in range(8):
                    if column >> y & 1:
                        at = left + scale * (ADVANCE * place + x)
                        self.fill(at, top + scale * y, scale, scale, colour)

    def curve(self, points: Sequence[tuple[int, int]], colour: int, thickness: int = 6) -> None:
        """Draw a line through points, given from left to right."""
        for (x0, y0), (x1, y1) in pairwise(points):
            for x in range(x0, x1 + 1):
                slope = (y1 - y0) / max(1, x1 - x0)
                y = round(y0 + slope * (x - x0))
                height = round(abs(slope)) + thickness  # A steep line has no gaps.
                self.fill(x, y - height // 2, 2, height, colour)

    def png(self) -> bytes:
        """Return the picture as a PNG with a palette (ISO/IEC 15948)."""
        header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 3, 0, 0, 0)
        pixels = zlib.compress(b"".join(b"\0" + row for row in self._rows), 6)
        chunks = ((b"IHDR", header), (b"PLTE", PALETTE), (b"IDAT", pixels), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )


def draw_preview(name: str, lines: Sequence[str], done: float | None, losses: Sequence[float]) -> bytes:
    """Return the PNG: the run's `name`, some `lines` of text, the share `done` of its rounds (0 to 1), and
    its `losses`, oldest first."""
    picture = Picture()
    room = WIDTH - 2 * MARGIN
    scale = max(4, min(10, room // (ADVANCE * max(1, len(name)))))
    picture.write(MARGIN, MARGIN, name[: room // (ADVANCE * scale)], scale, INK)
    for number, line in enumerate(lines):
        picture.write(MARGIN, 170 + 50 * number, line[: room // (ADVANCE * 4)], 4, SOFT)
    top, bottom = 300, HEIGHT - 110
    picture.fill(MARGIN, bottom + 10, room, 2, LINE)
    if len(losses) > 1:
        low, high = min(losses), max(losses)
        points = [
            (
                MARGIN + round(room * index / (len(losses) - 1)),
                round(bottom - (bottom - top) * (loss - low) / max(1e-9, high - low)),
            )
            for index, loss in enumerate(losses)
        ]
        picture.curve(points, MARK)
    if done is not None:
        picture.fill(MARGIN, HEIGHT - 70, room, 24, LINE)
        picture.fill(MARGIN, HEIGHT - 70, round(room * min(1.0, max(0.0, done))), 24, GOOD)
    return picture.png()
