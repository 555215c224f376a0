"""What the observer's page is told: the newest picture, the curve, how to join, as JSON of bounded size.

Drawn on the event loop, read from the server's threads: what they see is replaced whole, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from peers.config.run_file import SignedManifest
from peers.network.discovery.expert_groups import ExpertGroup
from peers.observer.curve import Curve
from peers.observer.picture import Picture, Row

SHOWN_PEERS = 100
"""Rows in one answer; the others are found by searching."""
LONGEST_SEARCH = 100
"""Characters; longer ones than any name or peer id find nothing anyway."""
SHOWN_GROUPS = 64
"""Of experts, those that the fewest peers train, and of these those that wait longest; the others are only
counted."""
SHOWN_SOURCES = 20
"""Of the run's text; the others are only counted."""


@dataclass(frozen=True, slots=True)
class Past:
    """One point of the curve."""

    loss: float | None
    peers: int
    tokens_per_second: float


@dataclass(slots=True)
class Board:
    signed: SignedManifest
    join: str
    """The line that a newcomer types."""
    version: str
    picture: Picture = field(default_factory=lambda: Picture(at=0.0))
    walked_at: float = 0.0
    """When the directory was last read; 0: not yet."""
    bootstraps: Mapping[str, bool] = field(default_factory=dict)
    """Address -> whether it answers."""
    curve: Curve[Past] = field(default_factory=Curve)
    _answer: bytes = b"{}"
    _shown: tuple[tuple[float, Past], ...] = ()

    def show(self, picture: Picture, walked_at: float, bootstraps: Mapping[str, bool]) -> None:
        self.curve.add(picture.at, Past(picture.loss, picture.peers, picture.tokens_per_second))
        self._shown = tuple(self.curve.points)
        self.walked_at, self.bootstraps, self.picture = walked_at, dict(bootstraps), picture
        self._answer = self._drawn("")

    def answer(self, search: str) -> bytes:
        """JSON; with a search, of the peers that fit it. Safe from any thread."""
        search = " ".join(search.lower().split())
        return self._drawn(search) if search else self._answer

    def _drawn(self, search: str) -> bytes:
        picture, past = self.picture, self._shown
        rows: Sequence[Row] = picture.rows
        if search:
            rows = [row for row in rows if len(search) <= LONGEST_SEARCH and row.fits(search)]
        return msgspec.json.encode({
            "at": picture.at,
            "run": self._run(),
            "order": picture.ordered.as_json(),
            "walked_at": self.walked_at,
            "round": picture.round,
            "settled": picture.settled,
            "loss": picture.loss,
            "eval_loss": picture.eval_loss,
            "tokens": picture.tokens,
            "settled_tokens": picture.settled_tokens,
            "tokens_per_second": picture.tokens_per_second,
            "sent_bytes_per_second": picture.sent_bytes_per_second,
            "received_bytes_per_second": picture.received_bytes_per_second,
            "peers": picture.peers,
            "stages": [
                {"stage": stage.stage, "layers": stage.layers, "peers": stage.peers, "states": stage.states,
                 "tokens_per_second": stage.tokens_per_second}
                for stage in picture.stages
            ],
            "experts": _groups(picture.experts),
            "more_experts": max(0, len(picture.experts) - SHOWN_GROUPS),
            "weakest": picture.weakest,
            "stuck": picture.stuck,
            "checkpoint": picture.checkpoint,
            "versions": picture.versions,
            "bootstraps": self.bootstraps,
            "contributors": picture.contributors,
            "departures": picture.departures,
            "recent": picture.recent,
            "search": search,
            "rows": rows[:SHOWN_PEERS],
            "more": max(0, len(rows) - SHOWN_PEERS),
            "left_out": picture.left_out,
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
    """By stage and group."""
    neediest = sorted(experts, key=lambda one: (one.holders, -(one.stale_rounds or 0)))[:SHOWN_GROUPS]
    return [
        {"stage": one.stage, "group": one.group, "first": one.first, "last": one.last,
         "holders": one.holders, "trained": one.trained, "stale_rounds": one.stale_rounds}
        for one in sorted(neediest, key=lambda one: (one.stage, one.group))
    ]  # fmt: skip
