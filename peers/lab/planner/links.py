"""What lies between peers: a table of regions, their lines, and the links from each to each.

    regions:
      eu: {down: 100, up: 40}            # Mbit/s of a peer's line, where --peers says nothing else
      us: {down: 300, up: 20}
    links:
      - {between: [eu, eu], latency: 5ms-30ms}
      - {between: [eu, us], latency: 45ms-70ms, mbit: 30}
      - {between: [us, us], latency: 5ms-40ms}

Latency is one way; a pair of peers draws its own from the range. `mbit`: what one connection carries at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from peers.config.quantities import seconds
from peers.config.schema import TypeLabel
from peers.config.validation import validate
from peers.config.yaml_lines import read
from peers.lab.planner.speeds import DEFAULT_LINE, MEGABIT

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
Pair = tuple[str, str]


def seconds_range(text: object) -> tuple[float, float]:
    """`5ms-30ms`, or one duration. Raises ValueError."""
    low, _, high = str(text).partition("-")
    ends = float(str(seconds(low))), float(str(seconds(high or low)))
    if ends[0] > ends[1]:
        raise ValueError(f"is {text!r}: from the shorter to the longer")
    return ends


class Region(BaseModel):
    model_config = STRICT

    down: Annotated[float, Field(gt=0)] = DEFAULT_LINE[0]
    """Mbit/s that a peer's line there receives."""
    up: Annotated[float, Field(gt=0)] = DEFAULT_LINE[1]
    """Mbit/s that it sends."""


class LinkRow(BaseModel):
    model_config = STRICT

    between: tuple[str, str]
    """Two regions, or one twice. Both directions are alike."""
    latency: Annotated[
        tuple[float, float],
        BeforeValidator(seconds_range),
        TypeLabel("duration, or a range such as 5ms-30ms"),
    ]
    """One way."""
    mbit: Annotated[float, Field(gt=0)] | None = None
    """Mbit/s that one connection carries at most; none: what the lines do."""


class LinksFile(BaseModel):
    model_config = STRICT

    regions: Annotated[dict[str, Region], Field(min_length=1)]
    """Names that --peers uses."""
    links: tuple[LinkRow, ...]
    """Every pair of regions once."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        pairs = [_pair(*row.between) for row in self.links]
        for name in sorted({name for pair in pairs for name in pair} - self.regions.keys()):
            raise ValueError(f"links: {name!r} is no region of this file")
        for pair in combinations_with_replacement(sorted(self.regions), 2):
            if pairs.count(pair) != 1:
                rows = pairs.count(pair)
                raise ValueError(f"links: {rows} rows between {pair[0]} and {pair[1]}, where one belongs")
        return self


def _pair(a: str, b: str) -> Pair:
    return (a, b) if a <= b else (b, a)


@dataclass(frozen=True, slots=True)
class Links:
    """Seconds one way, and bytes per second."""

    latency: Mapping[Pair, tuple[float, float]]
    connection: Mapping[Pair, float] = field(default_factory=dict)
    lines: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Mbit/s down and up, by region."""

    @classmethod
    def everywhere(cls, latency: tuple[float, float]) -> Links:
        """One region without a name."""
        return cls({("", ""): latency})

    def between(self, regions: Sequence[str], seed: int) -> Callable[[int, int], float]:
        """Latency of a pair, always the same: a hash of the two, so that ten thousand peers need no table."""
        names = {name: index for index, name in enumerate(sorted(set(regions)))}
        at = [names[region] for region in regions]
        table = [[self.latency[_pair(a, b)] for b in names] for a in names]

        def latency(a: int, b: int) -> float:
            low, high = table[at[a]][at[b]]
            mixed = (min(a, b) * 2654435761 ^ max(a, b) * 40503 ^ seed * 97) * 2246822519 & 0xFFFFFFFF
            return low + (high - low) * ((mixed ^ mixed >> 15) & 0xFFFF) / 0xFFFF

        return latency

    def carried(self, regions: Sequence[str]) -> Callable[[int, int], float] | None:
        """What a connection carries; None: nothing bounds it but the lines."""
        if not self.connection:
            return None
        return lambda a, b: self.connection.get(_pair(regions[a], regions[b]), float("inf"))


def load(path: Path) -> Links:
    """Raises ConfigError with file and line."""
    file = validate(LinksFile, read(path))
    return Links(
        {_pair(*row.between): row.latency for row in file.links},
        {_pair(*row.between): row.mbit * MEGABIT for row in file.links if row.mbit is not None},
        {name: (region.down, region.up) for name, region in file.regions.items()},
    )
