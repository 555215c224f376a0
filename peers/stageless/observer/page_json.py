"""The data of the observer's page as JSON of bounded size: the newest snapshot, the curve, how to join.

A snapshot is the state of the swarm at one moment. The curve has past values of loss, peers and speed. The
event loop encodes the data. The server's threads read only objects that are replaced and never changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from peers.config.run_file import SignedManifest
from peers.stageless.observer import order_reader as owner_orders
from peers.stageless.observer.join_code import draw_code
from peers.stageless.observer.preview_picture import draw_preview
from peers.stageless.observer.run_state import describe_state
from peers.telemetry.event_log import LogLine
from peers.telemetry.log_events import PromptContinued, SwarmSeen
from peers.telemetry.snapshot import ORDERS_NOT_READ, Curve, ExpertGroup, SwarmSnapshot, as_json
from swarmnet.run.progress import progress_text

SHOWN_PEERS = 100
"""Rows in one response; the others are found by searching."""
LONGEST_SEARCH = 100
"""Characters; a longer search is longer than any name or peer id and finds nothing."""
SHOWN_GROUPS = 64
"""Groups of experts in one response: those with the fewest peers, then those untrained for longest. The
others are only counted."""
SHOWN_SOURCES = 20
"""Sources of the run's text in one response; the others are only counted."""
ANSWER_CHARACTERS = 1200
"""Characters of the model's answer in one response; it has at most 64 tokens."""


@dataclass(slots=True)
class Board:
    """The data of the page of one run."""

    signed: SignedManifest
    join: str
    """The command that a newcomer types."""
    version: str
    snapshot: SwarmSnapshot = field(default_factory=lambda: SwarmSnapshot("", 0.0))
    curve: Curve[SwarmSeen] = field(default_factory=Curve)
    model_answer: tuple[float, PromptContinued] | None = None
    """The newest continuation of the prompt, and the Unix time at which it was made."""
    code: bytes | None = field(init=False)
    """The join link as a QR code (SVG); None without the extra `page`."""
    _unfiltered_json: bytes = b"{}"
    _curve_points: tuple[tuple[float, SwarmSeen], ...] = ()
    _last_seen: tuple[float, SwarmSeen] | None = None
    """The newest point at which peers trained. It is shown when none is here."""

    def __post_init__(self) -> None:
        self.code = draw_code(self.join.rpartition(" ")[2])

    def restore(self, lines: Iterable[LogLine]) -> None:
        """Restore curve and answer from the event log of an observer that showed this run before."""
        for line in lines:
            match line.event:
                case SwarmSeen() as seen:
                    self._add(line.time, seen)
                case PromptContinued() as answer:
                    self.model_answer = line.time, answer

    def _add(self, at: float, point: SwarmSeen) -> bool:
        """Add a point to the curve. Return whether it is part of it."""
        if point.round is not None:
            self._last_seen = at, point
        return self.curve.add(at, point)

    def show(self, snapshot: SwarmSnapshot) -> bool:
        """Publish a new snapshot. Return whether it became a point of the curve."""
        is_added = self._add(snapshot.at, seen_event(snapshot))
        self._curve_points = tuple(self.curve.points)
        self.snapshot = snapshot
        self._unfiltered_json = self._encode("")
        return is_added

    def state(self) -> tuple[str, str]:
        """Return a code and a sentence on what the run does now."""
        return describe_state(self.snapshot, self._last_seen[1].round if self._last_seen else None)

    def summary(self) -> str:
        """Return how far the run is, in one sentence for link previews."""
        snapshot, last = self.snapshot, self._last_seen
        planned, reached = snapshot.planned, last[1].round if last else None
        if reached is None or not planned:
            return self.state()[1]
        return f"{progress_text(reached, planned, snapshot.seconds_left).capitalize()}. {self.state()[1]}"

    def preview(self) -> bytes:
        """Return the picture for link previews (PNG). Takes some hundredths of a second."""
        losses = [point.loss for _, point in self._curve_points if point.loss is not None]
        planned, last = self.snapshot.planned, self._last_seen
        done = last[1].round / planned if last and last[1].round is not None and planned else None
        name = self.signed.manifest.name
        return draw_preview(name, [*self.summary().split(". ")][:2], done, losses)

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
                "does": dict(zip(("code", "text"), self.state(), strict=True)),
                "last": _describe_last(self._last_seen),
                "answer": _describe_answer(self.model_answer),
                "curve": _columns(curve),
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
            "has_code": self.code is not None,
            "licence": manifest.license,
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


def seen_event(snapshot: SwarmSnapshot) -> SwarmSeen:
    """Return the event that keeps a point of the curve. The log outlives this process."""
    tokens = snapshot.tokens if snapshot.finalized_tokens is None else snapshot.finalized_tokens
    return SwarmSeen(
        round=snapshot.round,
        tokens=tokens,
        loss=snapshot.loss,
        eval_loss=snapshot.eval_loss,
        peers=snapshot.peers,
        tokens_per_second=snapshot.tokens_per_second,
    )


def _columns(curve: Sequence[tuple[float, SwarmSeen]]) -> dict[str, object]:
    """Return the curve as plain data, one list for each value; tokens are not drawn."""
    return {
        "at": [at for at, _ in curve],
        "loss": [point.loss for _, point in curve],
        "eval_loss": [point.eval_loss for _, point in curve],
        "round": [point.round for _, point in curve],
        "peers": [point.peers for _, point in curve],
        "tokens_per_second": [point.tokens_per_second for _, point in curve],
    }


def _describe_last(seen: tuple[float, SwarmSeen] | None) -> dict[str, object] | None:
    """Return when peers trained last, and how far the run was then; None if never."""
    if seen is None:
        return None
    at, point = seen
    known = {"round": point.round, "tokens": point.tokens, "loss": point.loss, "eval_loss": point.eval_loss}
    return {"at": at, **known}


def _describe_answer(answer: tuple[float, PromptContinued] | None) -> dict[str, object] | None:
    if answer is None:
        return None
    at, made = answer
    text = made.continuation[:ANSWER_CHARACTERS]
    return {"at": at, "prompt": made.prompt[:ANSWER_CHARACTERS], "text": text, "round": made.round}


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
