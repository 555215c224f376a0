"""What a report on a run's training content is made of, gathered from its manifest and an archive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from typing import Any

from peers.archive.archive import Archive
from peers.archive.store import ArchiveError
from peers.run_file import SignedManifest
from protocols.errors import WireError
from protocols.orders import open_order
from swarmnet.manifest import Manifest
from swarmnet.orders import NO_ORDER, Order
from swarmnet.parameters import parameter_shapes

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Forward and backward of a dense decoder (Kaplan et al., arXiv:2001.08361): compute = 6 N D."""
FLOPS_PER_JOULE = 2.0e10
"""Assumed for home computers of all kinds: a GPU of 2022 at 300 W and a third of its 20 TFLOP/s of float32,
that is about 2e10 useful operations per joule. Processors are below it."""
OVERHEAD = 1.5
"""Assumed: of the whole machine and the network, per joule of the computing part."""
JOULES_PER_KILOWATT_HOUR = 3.6e6


@dataclass(frozen=True, slots=True)
class Contributor:
    peer: str
    name: str
    tokens: int
    """By its own records."""
    signed: int = 0
    """Archived checkpoints whose weights it has signed."""


@dataclass(frozen=True, slots=True)
class Facts:
    signed: SignedManifest
    order: Order
    made_at: datetime
    rounds: tuple[int, ...]
    """Newest settled round that is known of each stage; -1: none. Stages close their own rounds: where
    microbatches leave stages out, those in the middle have fewer."""
    contributors: tuple[Contributor, ...]
    origin: str
    """Where the rounds and contributors come from, for people."""

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def round(self) -> int:
        """Of the stage that is furthest behind; -1: not every stage has one."""
        return min(self.rounds)

    @property
    def parameters(self) -> int:
        return sum(self._parameters())

    def _parameters(self) -> list[int]:
        """Of each stage."""
        manifest = self.manifest
        spans = map(manifest.span, range(len(manifest.stages)))
        return [sum(map(prod, parameter_shapes(manifest.model, span).values())) for span in spans]

    def _tokens(self) -> list[int]:
        """Trained on, by stage: every settled round holds about its target."""
        return [(round + 1) * self.manifest.rounds.target_tokens for round in self.rounds]

    @property
    def tokens(self) -> int:
        """Trained on: the first stage is on every way."""
        return self._tokens()[0] if self.round >= 0 else 0

    @property
    def flops(self) -> int:
        each = zip(self._parameters(), self._tokens(), strict=True)
        return FLOPS_PER_PARAMETER_AND_TOKEN * sum(parameters * tokens for parameters, tokens in each)

    @property
    def kilowatt_hours(self) -> float:
        return self.flops / FLOPS_PER_JOULE * OVERHEAD / JOULES_PER_KILOWATT_HOUR


def from_manifest(signed: SignedManifest, order: Order, now_seconds: float) -> Facts:
    """Of a run of which nothing is archived."""
    none = (-1,) * len(signed.manifest.stages)
    return Facts(signed, order, datetime.fromtimestamp(now_seconds, UTC), none, (), "the manifest alone")


def from_archive(archive: Archive, signed: SignedManifest, now_seconds: float) -> Facts:
    """`archive` is open. Raises ArchiveError."""
    order = NO_ORDER
    held = archive.order()
    if held is not None:
        try:
            order = open_order(held, signed.run_id, signed.manifest.owner).order
        except WireError as error:
            raise ArchiveError(f"{archive.store.url}: its order is refused: {error}") from None
    stages = range(len(signed.manifest.stages))
    newest = [archive.newest(stage) for stage in stages]
    rounds = tuple(entries[0].round if entries else -1 for entries in newest)
    contributors = sorted(map(_contributor, archive.contributors()), key=lambda one: (-one.tokens, one.peer))
    at = datetime.fromtimestamp(now_seconds, UTC)
    return Facts(signed, order, at, rounds, tuple(contributors), f"the archive {archive.store.url}")


def _contributor(one: Mapping[str, Any]) -> Contributor:
    tokens = one.get("tokens")
    counts = tokens.values() if isinstance(tokens, dict) else ()
    total = sum(count for count in counts if isinstance(count, int))
    signed = one.get("signed")
    return Contributor(
        str(one.get("peer", ""))[:64], str(one.get("name", ""))[:64], total,
        signed if isinstance(signed, int) else 0,
    )  # fmt: skip
