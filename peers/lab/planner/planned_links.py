"""The network between regions, read from a file: the peers' links, and latency and bandwidth between regions.

    regions:
      eu: {down: 100, up: 40}            # Mbit/s of a peer's link, unless --peers has others
      us: {down: 300, up: 20}
    links:
      - {between: [eu, eu], latency: 5ms-30ms}
      - {between: [eu, us], latency: 45ms-70ms, mbit: 30}
      - {between: [us, us], latency: 5ms-40ms}

Latency is one way; each pair of peers draws its own from the range. `mbit`: maximum of one connection.
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
    """Parse a range such as `5ms-30ms`, or one duration, to seconds. Raises ValueError."""
    low, _, high = str(text).partition("-")
    ends = float(str(seconds(low))), float(str(seconds(high or low)))
    if ends[0] > ends[1]:
        raise ValueError(f"is {text!r}: from the shorter to the longer")
    return ends


class Region(BaseModel):
    model_config = STRICT

    down: Annotated[float, Field(gt=0)] = DEFAULT_LINE[0]
    """Download speed of a peer's link in this region, in Mbit/s."""
    up: Annotated[float, Field(gt=0)] = DEFAULT_LINE[1]
    """Upload speed of a peer's link in this region, in Mbit/s."""


class LinkRow(BaseModel):
    model_config = STRICT

    between: tuple[str, str]
    """Two regions, or one region twice; both directions are equal."""
    latency: Annotated[
        tuple[float, float],
        BeforeValidator(seconds_range),
        TypeLabel("duration, or a range such as 5ms-30ms"),
    ]
    """Minimum and maximum one-way latency."""
    mbit: Annotated[float, Field(gt=0)] | None = None
    """Maximum of one connection in Mbit/s; none: only the peers' links limit it."""


class LinksFile(BaseModel):
    model_config = STRICT

    regions: Annotated[dict[str, Region], Field(min_length=1)]
    """Regions by the name that --peers uses."""
    links: tuple[LinkRow, ...]
    """One row for every pair of regions."""

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
    """Latency (seconds, one way) and bandwidth (bytes per second) between regions."""

    latency: Mapping[Pair, tuple[float, float]]
    connection: Mapping[Pair, float] = field(default_factory=dict)
    lines: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Download and upload speed of a peer's link in Mbit/s, by region."""

    @classmethod
    def everywhere(cls, latency: tuple[float, float]) -> Links:
        """Return links for one region without a name."""
        return cls({("", ""): latency})

    def between(self, regions: Sequence[str], seed: int) -> Callable[[int, int], float]:
        """Return a function for the latency of a pair of peers, which depends on a hash of the two.

        No table of all pairs is needed; it would be large for ten thousand peers.
        """
        names = {name: index for index, name in enumerate(sorted(set(regions)))}
        at = [names[region] for region in regions]
        table = [[self.latency[_pair(a, b)] for b in names] for a in names]

        def latency(a: int, b: int) -> float:
            low, high = table[at[a]][at[b]]
            mixed = (min(a, b) * 2654435761 ^ max(a, b) * 40503 ^ seed * 97) * 2246822519 & 0xFFFFFFFF
            return low + (high - low) * ((mixed ^ mixed >> 15) & 0xFFFF) / 0xFFFF

        return latency

    def carried(self, regions: Sequence[str]) -> Callable[[int, int], float] | None:
        """Return a function for the maximum of a connection; None if only the peers' links limit it."""
        if not self.connection:
            return None
        return lambda a, b: self.connection.get(_pair(regions[a], regions[b]), float("inf"))


def load(path: Path) -> Links:
    """Read a links file. Raises ConfigError with file and line."""
    file = validate(LinksFile, read(path))
    return Links(
        {_pair(*row.between): row.latency for row in file.links},
        {_pair(*row.between): row.mbit * MEGABIT for row in file.links if row.mbit is not None},
        {name: (region.down, region.up) for name, region in file.regions.items()},
    )
