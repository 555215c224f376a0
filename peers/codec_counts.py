"""What making bytes of tensors took, and how much it shrank them, for the metrics."""

from __future__ import annotations

from time import perf_counter
from typing import Literal

from peers.timings import Timings

Coded = Literal["activation", "gradient", "contribution"]
CODED: tuple[Coded, ...] = ("activation", "gradient", "contribution")
FLOAT_BYTES = 4
"""Of each number before it is encoded."""


class CodecCounts:
    """The compute thread adds; one reads."""

    def __init__(self, timings: Timings, *kinds: Coded) -> None:
        """`kinds`: what is encoded here; known from the start, so that reading never meets a new key."""
        self._timings = timings
        self.input_bytes: dict[Coded, int] = dict.fromkeys(kinds, 0)
        """As float32."""
        self.output_bytes: dict[Coded, int] = dict.fromkeys(kinds, 0)

    def encoded(self, kind: Coded, began: float, numbers: int, size: int) -> None:
        """So many numbers became `size` bytes; `began`: perf_counter() before."""
        self._timings.add(f"{kind} encode", perf_counter() - began)
        self.input_bytes[kind] += FLOAT_BYTES * numbers
        self.output_bytes[kind] += size

    def decoded(self, kind: Coded, began: float) -> None:
        self._timings.add(f"{kind} decode", perf_counter() - began)
