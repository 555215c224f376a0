"""A curve over any time in bounded memory: when it is full, every other point goes and the step doubles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST_POINTS = 360
"""More than a page is wide in points that can be told apart."""
FIRST_STEP_SECONDS = 5.0

Point = TypeVar("Point")


@dataclass(slots=True)
class Curve(Generic[Point]):
    step_seconds: float = FIRST_STEP_SECONDS
    points: list[tuple[float, Point]] = field(default_factory=list)

    def add(self, now: float, point: Point) -> None:
        """Kept if the newest one is a step old."""
        if self.points and now < self.points[-1][0] + self.step_seconds:
            return
        self.points.append((now, point))
        if len(self.points) > MOST_POINTS:
            del self.points[1::2]
            self.step_seconds *= 2
