"""One peer's events, folded one by one into what is known of it: while it runs, or later from its log."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from peers.telemetry.event_log import Event
from peers.telemetry.notices import EVERYDAY, told
from peers.telemetry.picture import Happened, PeerSeen
from swarmnet.pipeline.ledger import RecentLoss

SPEED_SECONDS = 10.0
"""Tokens per second are an average over so long (as in worker/sampler.py)."""
SILENT_SECONDS = 12.0
"""A running peer writes its ledger every 5 s (sampler.NOTE_EVERY): after two that are missing it was killed,
or froze."""
MOST_POINTS = 512
MOST_EVENTS = 200
PLAIN = {"started": "started", "assembled": "holds stage {stage}", "in_step": "in step at round {round}",
         "saved": "checkpoint of round {round} written", "stood_still": "stood still for {seconds} s",
         "moving": "would move to stage {stage}", "fetching": "fetches the state of round {round}",
         "bye_sent": ""}  # fmt: skip
"""Events without a code that are news, in words; empty: none."""
SAID = frozenset({"run", "listening", "metrics", "text", "trains", "weights", "checkpoint", "holder"})
"""Said to people at the start, or told by another event too."""


class Curve:
    """A series of any length in bounded room: when it is full, neighbours are merged."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        """(time, mean value)."""
        self._each = 1
        self._sum, self._count, self._at = 0.0, 0, 0.0

    def add(self, at: float, value: float) -> None:
        self._at = at if not self._count else self._at
        self._sum += value
        self._count += 1
        if self._count < self._each:
            return
        self.points.append((self._at, self._sum / self._count))
        self._sum, self._count = 0.0, 0
        if len(self.points) >= MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [(at, (one + other) / 2) for (at, one), (_, other) in pairs]
            self._each *= 2


class Story:
    """What is known of one peer after the events so far."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.peer = ""
        self.role = "worker"
        self.run = ""
        self.state = "connecting"
        self.stage = -1
        self.round: int | None = None
        self.settled: int | None = None
        self.settled_tokens: int | None = None
        self.recent = RecentLoss()
        self.losses = Curve()
        self.tokens = 0
        """Since it started; a new process counts anew."""
        self.rounds: Counter[str] = Counter()
        self.microbatches: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.received: dict[str, int] = {}
        self.waits_for: tuple[int, ...] = ()
        self.neighbours: dict[str, int] = {}
        """Peer -> stage of those that are linked."""
        self.events: deque[Happened] = deque(maxlen=MOST_EVENTS)
        self.seen_at = 0.0
        """Unix time of the newest event."""
        self._commits: deque[tuple[float, int]] = deque()

    def take(self, event: Event) -> None:
        """The next event."""
        self.seen_at = max(self.seen_at, event.time)
        follow = _FOLLOW.get(event.name)
        if follow is not None:
            follow(self, event)
        happened = self._news(event)
        if happened is not None:
            self.events.append(happened)

    def speed(self, now: float) -> float:
        """Tokens per second lately."""
        while self._commits and self._commits[0][0] <= now - SPEED_SECONDS:
            self._commits.popleft()
        return sum(tokens for _, tokens in self._commits) / SPEED_SECONDS

    def state_at(self, now: float) -> str:
        """Its state; `gone` when a worker's log has ended without a word. Other roles write too seldom."""
        if self.state == "stopped" or self.role != "worker" or now <= self.seen_at + SILENT_SECONDS:
            return self.state
        return "gone"

    def seen(self, now: float) -> PeerSeen:
        state = self.state_at(now)
        alive = state not in ("gone", "stopped")
        return PeerSeen(
            self.peer, self.stage, state, self.name, self.round, self.recent.mean,
            self.speed(now) if alive and self.stage >= 0 else None,
            sent_bytes=sum(self.sent.values()) if self.stage >= 0 else None,
            received_bytes=sum(self.received.values()) if self.stage >= 0 else None,
        )  # fmt: skip

    # -- events ---------------------------------------------------------------------------------------

    def _started(self, event: Event) -> None:
        self.peer, self.role = str(event.fields.get("peer", "")), str(event.fields.get("role", "worker"))
        self.state = "connecting" if self.role == "worker" else self.role
        self.tokens, self.stage = 0, -1
        self.microbatches, self.sent, self.received = {}, {}, {}
        self.neighbours.clear()
        self._commits.clear()

    def _assembled(self, event: Event) -> None:
        self.stage, self.state = int(event.fields["stage"]), "joining"
        self.round = self.settled = None
        self.waits_for = ()
        self.neighbours.clear()

    def _in_step(self, event: Event) -> None:
        self.state, self.round = "training", int(event.fields["round"])

    def _committed(self, event: Event) -> None:
        tokens, loss = int(event.fields["tokens"]), event.fields.get("loss")
        self.tokens += tokens
        self._commits.append((event.time, tokens))
        if isinstance(loss, float):
            self.recent.add(loss * tokens, tokens)
            self.losses.add(event.time, loss)

    def _applied(self, event: Event) -> None:
        self.round = int(event.fields["round"]) + 1
        self.rounds[str(event.fields.get("code", "applied"))] += 1

    def _settled(self, event: Event) -> None:
        self.settled, self.settled_tokens = int(event.fields["round"]), event.fields.get("tokens")

    def _linked(self, event: Event) -> None:
        self.neighbours[str(event.fields["peer"])] = int(event.fields["stage"])

    def _unlinked(self, event: Event) -> None:
        self.neighbours.pop(str(event.fields["peer"]), None)

    def _traffic(self, event: Event) -> None:
        self.sent, self.received = dict(event.fields["sent"]), dict(event.fields["received"])

    def _ledger(self, event: Event) -> None:
        self.microbatches = counts_of(event.fields)

    def _waiting(self, event: Event) -> None:
        self.waits_for = tuple(event.fields.get("stages", ()))

    def _ran(self, event: Event) -> None:
        self.run = str(event.fields.get("text", "")).removeprefix("run ").partition(" ")[0].rstrip(":")

    def _becomes(self, event: Event) -> None:
        self.state = _BECOMES[event.name]

    def _news(self, event: Event) -> Happened | None:
        """A line for people, if it is worth one."""
        if event.fields.get("code") in EVERYDAY or event.name in SAID:
            return None
        words = told(event.name, event.fields)
        if words is not None:
            return Happened(event.time, words.code, words.text, words.level, self.name)
        plain = PLAIN.get(event.name)
        if plain:
            return Happened(event.time, event.name, plain.format_map(_Blank(event.fields)), "info", self.name)
        text = event.fields.get("text")
        if isinstance(text, str) and plain is None:
            return Happened(event.time, event.name, text[:200], "info", self.name)
        return None


class _Blank(dict[str, Any]):
    """Fields of which one may be missing."""

    def __missing__(self, key: str) -> str:
        return "?"


def counts_of(ledger: Mapping[str, Any]) -> dict[str, int]:
    """A ledger's event or fields as plain counts."""
    dropped, rerouted = ledger.get("dropped", {}), ledger.get("rerouted", {})
    counts = {name: ledger.get(name, 0) for name in ("committed", "repeated", "refused", "late_answers")}
    return {**counts, "rerouted": sum(rerouted.values()), "dropped": sum(dropped.values())}


_BECOMES = {"resynchronise": "joining", "moves": "leaving", "leaving": "leaving", "stopped": "stopped",
            "pausing": "leaving", "paused": "paused", "resuming": "joining"}  # fmt: skip
_FOLLOW: dict[str, Callable[[Story, Event], None]] = {
    "started": Story._started,
    "run": Story._ran,
    "assembled": Story._assembled,
    "in_step": Story._in_step,
    "committed": Story._committed,
    "applied": Story._applied,
    "settled": Story._settled,
    "linked": Story._linked,
    "unlinked": Story._unlinked,
    "traffic": Story._traffic,
    "ledger": Story._ledger,
    "waiting": Story._waiting,
    "waiting_over": Story._waiting,
    **dict.fromkeys(_BECOMES, Story._becomes),
}
