"""The data of the observer's page as JSON of bounded size: the newest snapshot, the curve, how to join.

It is encoded on the event loop and read by the server's threads; they see objects that are replaced as a
whole and never changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from peers.config.run_file import SignedManifest
from peers.observer import owner_orders
from peers.telemetry.snapshot import UNASKED, Curve, ExpertGroup, SwarmSnapshot, as_json

SHOWN_PEERS = 100
"""Rows in one response; the others are found by searching."""
LONGEST_SEARCH = 100
"""Characters; a longer search is longer than any name or peer id and finds nothing."""
SHOWN_GROUPS = 64
"""Groups of experts in one response: those with the fewest peers, then those untrained for longest. The
others are only counted."""
SHOWN_SOURCES = 20
"""Sources of the run's text in one response; the others are only counted."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of the curve."""

    loss: float | None
    peers: int
    tokens_per_second: float | None


@dataclass(slots=True)
class Board:
    signed: SignedManifest
    join: str
    """The command that a newcomer types."""
    version: str
    snapshot: SwarmSnapshot = field(default_factory=lambda: SwarmSnapshot("", 0.0))
    curve: Curve[CurvePoint] = field(default_factory=Curve)
    _answer: bytes = b"{}"
    _shown: tuple[tuple[float, CurvePoint], ...] = ()

    def show(self, snapshot: SwarmSnapshot) -> None:
        """Publish a new snapshot and add it to the curve."""
        self.curve.add(snapshot.at, CurvePoint(snapshot.loss, snapshot.peers, snapshot.tokens_per_second))
        self._shown = tuple(self.curve.points)
        self.snapshot = snapshot
        self._answer = self._drawn("")

    def answer(self, search: str) -> bytes:
        """Return JSON; with a search, only matching peers. Thread-safe."""
        search = " ".join(search.lower().split())
        return self._drawn(search) if search else self._answer

    def _drawn(self, search: str) -> bytes:
        """Return the page's data as JSON, with only the peers that match `search`; empty: all."""
        snapshot, past = self.snapshot, self._shown
        rows = snapshot.rows
        if search:
            rows = tuple(row for row in rows if len(search) <= LONGEST_SEARCH and row.fits(search))
        return msgspec.json.encode({
            **as_json(replace(snapshot, rows=rows[:SHOWN_PEERS], experts=(), ordered=UNASKED)),
            "run": self._run(),
            "ordered": owner_orders.as_json(snapshot.ordered),
            "peers": snapshot.peers,
            "others": snapshot.others,
            "experts": _groups(snapshot.experts),
            "more_experts": max(0, len(snapshot.experts) - SHOWN_GROUPS),
            "search": search,
            "more": max(0, len(rows) - SHOWN_PEERS),
            "curve": {
                "at": [at for at, _ in past],
                "loss": [point.loss for _, point in past],
                "peers": [point.peers for _, point in past],
                "tokens_per_second": [point.tokens_per_second for _, point in past],
            },
        })  # fmt: skip

    def _run(self) -> dict[str, object]:
        manifest = self.signed.manifest
        return {
            "id": self.signed.run_id, "name": manifest.name, "owner": manifest.owner, "join": self.join,
            "access": manifest.access, "intended_use": manifest.intended_use, "contact": manifest.contact,
            "sources": [{"name": source.name, "licence": source.licence, "origin": source.origin}
                        for source in manifest.data.sources[:SHOWN_SOURCES]],
            "more_sources": max(0, len(manifest.data.sources) - SHOWN_SOURCES),
            "layers": manifest.stages, "wire_version": manifest.wire_version, "observer": self.version,
        }  # fmt: skip


def _groups(experts: Sequence[ExpertGroup]) -> list[dict[str, object]]:
    """Return the groups with the fewest peers, sorted by stage and group."""
    neediest = sorted(experts, key=lambda one: (one.holders, -(one.stale_rounds or 0)))[:SHOWN_GROUPS]
    return [
        {"stage": one.stage, "group": one.group, "first": one.first, "last": one.last,
         "holders": one.holders, "trained": one.trained, "stale_rounds": one.stale_rounds}
        for one in sorted(neediest, key=lambda one: (one.stage, one.group))
    ]  # fmt: skip
