"""The data of the observer's page as JSON of bounded size: the newest snapshot, the curve, how to join.

A snapshot is the state of the swarm at one moment. The curve has past values of loss, peers and speed. The
event loop encodes the data. The server's threads read only objects that are replaced and never changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from peers.config.run_file import SignedManifest
from peers.stageless.observer import order_reader as owner_orders
from peers.telemetry.event_log import LogLine
from peers.telemetry.log_events import SwarmSeen
from peers.telemetry.snapshot import ORDERS_NOT_READ, Curve, ExpertGroup, SwarmSnapshot, as_json

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
    """The data of the page of one run."""

    signed: SignedManifest
    join: str
    """The command that a newcomer types."""
    version: str
    snapshot: SwarmSnapshot = field(default_factory=lambda: SwarmSnapshot("", 0.0))
    curve: Curve[CurvePoint] = field(default_factory=Curve)
    _unfiltered_json: bytes = b"{}"
    _curve_points: tuple[tuple[float, CurvePoint], ...] = ()

    def restore_curve(self, lines: Iterable[LogLine]) -> None:
        """Restore the curve from the event log of an observer that showed this run before."""
        for line in lines:
            if isinstance(seen := line.event, SwarmSeen):
                self.curve.add(line.time, CurvePoint(seen.loss, seen.peers, seen.tokens_per_second))

    def show(self, snapshot: SwarmSnapshot) -> bool:
        """Publish a new snapshot. Return whether it became a point of the curve."""
        point = CurvePoint(snapshot.loss, snapshot.peers, snapshot.tokens_per_second)
        is_added = self.curve.add(snapshot.at, point)
        self._curve_points = tuple(self.curve.points)
        self.snapshot = snapshot
        self._unfiltered_json = self._encode("")
        return is_added

    def answer(self, search: str) -> bytes:
        """Return the page's data as JSON; with a search, only matching peers. Thread-safe."""
        search = " ".join(search.lower().split())
        return self._encode(search) if search else self._unfiltered_json

    def _encode(self, search: str) -> bytes:
        """Return the page's data as JSON, with only the peers that match `search`; empty: all. Lists are cut;
        `more` and `more_experts` are the numbers of entries that are left out."""
        snapshot, curve = self.snapshot, self._curve_points
        rows = snapshot.rows
        if search:
            is_searchable = len(search) <= LONGEST_SEARCH
            rows = tuple(row for row in rows if is_searchable and row.fits(search))
        # Experts and orders are encoded below in a shorter form.
        shortened = replace(snapshot, rows=rows[:SHOWN_PEERS], experts=(), ordered=ORDERS_NOT_READ)
        return msgspec.json.encode(
            {
                **as_json(shortened),
                "run": self._describe_run(),
                "ordered": owner_orders.as_json(snapshot.ordered),
                "peers": snapshot.peers,
                "others": snapshot.others,
                "experts": _describe_neediest_groups(snapshot.experts),
                "more_experts": max(0, len(snapshot.experts) - SHOWN_GROUPS),
                "search": search,
                "more": max(0, len(rows) - SHOWN_PEERS),
                "curve": {
                    "at": [at for at, _ in curve],
                    "loss": [point.loss for _, point in curve],
                    "peers": [point.peers for _, point in curve],
                    "tokens_per_second": [point.tokens_per_second for _, point in curve],
                },
            }
        )

    def _describe_run(self) -> dict[str, object]:
        """Return the run's name, owner, sources and other facts of its manifest, and the join command."""
        manifest = self.signed.manifest
        return {
            "id": self.signed.run_id,
            "name": manifest.name,
            "owner": manifest.owner,
            "join": self.join,
            "access": manifest.access,
            "intended_use": manifest.intended_use,
            "contact": manifest.contact,
            "sources": [
                {"name": source.name, "licence": source.licence, "origin": source.origin}
                for source in manifest.data.sources[:SHOWN_SOURCES]
            ],
            "more_sources": max(0, len(manifest.data.sources) - SHOWN_SOURCES),
            "layers": manifest.stages,
            "wire_version": manifest.wire_version,
            "observer": self.version,
        }


def _describe_neediest_groups(experts: Sequence[ExpertGroup]) -> list[dict[str, object]]:
    """Return at most SHOWN_GROUPS groups of experts as plain data, sorted by stage and group. These are the
    groups with the fewest peers and, among equals, those untrained for the most rounds."""
    by_need = sorted(experts, key=lambda group: (group.holders, -(group.stale_rounds or 0)))
    shown = sorted(by_need[:SHOWN_GROUPS], key=lambda group: (group.stage, group.group))
    return [
        {
            "stage": group.stage,
            "group": group.group,
            "first": group.first,
            "last": group.last,
            "holders": group.holders,
            "trained": group.trained,
            "stale_rounds": group.stale_rounds,
        }
        for group in shown
    ]
