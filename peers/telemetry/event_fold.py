"""One peer's events, folded one by one into what is known of it: while it runs, or later from its log."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from peers.telemetry import events as noted
from peers.telemetry.event_log import Line
from peers.telemetry.events import NOTED, Event, Unknown
from peers.telemetry.notices import EVERYDAY, told
from peers.telemetry.picture import Happened, PeerSeen
from peers.telemetry.reasons import code_of
from peers.telemetry.said import Paused, Pausing, Remark, Resuming
from swarmnet.pipeline.ledger import RecentLoss
from swarmnet.resources.upload_need import ContributionFates

SPEED_SECONDS = 10.0
"""Tokens per second are an average over so long (as in worker/sampler.py)."""
SILENT_SECONDS = 12.0
"""A running peer writes its ledger every 5 s (sampler.NOTE_EVERY): after two that are missing it was killed,
or froze."""
MOST_POINTS = 512
MOST_EVENTS = 200
PLAIN: Mapping[type[Event], str] = {
    noted.Started: "started",
    noted.Assembled: "holds stage {stage}",
    noted.InStep: "in step at round {round}",
    noted.Saved: "checkpoint of round {round} written",
    noted.StoodStill: "stood still for {seconds} s",
    noted.Moving: "would move to stage {stage}",
    noted.Fetching: "fetches the state of round {round}",
}
"""Events without a code that are news, in words."""
NO_NEWS = frozenset({"run", "listening", "metrics", "text", "trains", "weights", "checkpoint", "holder"})
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


class SettledRounds(dict[int, noted.Settled]):
    """Round -> what a peer has settled, without what it gave up as the group had another history."""

    def take(self, event: Event) -> None:
        """The peer's next event."""
        match event:
            case noted.Settled(round):
                self[round] = event
            case noted.Resynchronise(fork_round=int(first)):
                for round in [round for round in self if round >= first]:
                    del self[round]
            case _:
                pass


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
        self.contributions = ContributionFates()
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

    def take(self, line: Line) -> None:
        """The next event."""
        self.seen_at = max(self.seen_at, line.time)
        self._follow(line.event, line.time)
        happened = self._news(line)
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

    def _follow(self, event: Event, at: float) -> None:
        self._follow_contributions(event)
        match event:
            case noted.Started(peer, role=role):
                self.peer, self.role = peer, role
                self.state = "connecting" if role == "worker" else role
                self.tokens, self.stage = 0, -1
                self.microbatches, self.sent, self.received = {}, {}, {}
                self.neighbours.clear()
                self._commits.clear()
            case noted.Assembled(stage):
                self.stage, self.state = stage, "joining"
                self.round = self.settled = None
                self.waits_for = ()
                self.neighbours.clear()
            case noted.InStep(round):
                self.state, self.round = "training", round
            case noted.Committed(tokens=tokens, loss=loss):
                self.tokens += tokens
                self._commits.append((at, tokens))
                if loss is not None:
                    self.recent.add(loss * tokens, tokens)
                    self.losses.add(at, loss)
            case noted.Applied(round, code):
                self.round = round + 1
                self.rounds[code] += 1
            case noted.Settled(round, tokens=settled_tokens):
                self.settled, self.settled_tokens = round, settled_tokens
            case noted.Linked(peer, stage):
                self.neighbours[peer] = stage
            case noted.Unlinked(peer):
                self.neighbours.pop(peer, None)
            case noted.Traffic(sent, received):
                self.sent, self.received = sent, received
            case noted.Ledger():
                self.microbatches = counts_of(event)
            case noted.Waiting(stages=stages):
                self.waits_for = tuple(stages)
            case noted.WaitingOver():
                self.waits_for = ()
            case Remark(text, "run"):
                self.run = text.removeprefix("run ").partition(" ")[0].rstrip(":")
            case Unknown(kind) if kind in NOTED:
                raise ValueError(f"{kind} is written with other fields")
            case noted.Resynchronise() | Resuming():
                self.state = "joining"
            case Pausing() | Remark(topic="moves"):
                self.state = "leaving"
            case Paused():
                self.state = "paused"
            case noted.Stopped():
                self.state = "stopped"
            case _:
                pass

    def _follow_contributions(self, event: Event) -> None:
        match event:
            case noted.Made(round, id):
                self.contributions.make(id, round)
            case noted.GivenBack(id=id):
                self.contributions.give_back(id)
            case noted.Settled(round):
                self.contributions.settle(round)
            case noted.Resynchronise():
                self.contributions.lose_open()
            case noted.Started():
                self.contributions = ContributionFates()
            case _:
                pass

    def _news(self, line: Line) -> Happened | None:
        """A line for people, if it is worth one."""
        event = line.event
        if code_of(event) in EVERYDAY or event.name in NO_NEWS:
            return None
        if (words := told(event)) is not None:
            return Happened(line.time, words.code, words.text, words.level, self.name)
        if plain := PLAIN.get(type(event)):
            return Happened(line.time, event.name, plain.format_map(event.fields), "info", self.name)
        text = event.fields.get("text")
        if isinstance(text, str):
            return Happened(line.time, event.name, text[:200], "info", self.name)
        return None


def counts_of(ledger: noted.Ledger) -> dict[str, int]:
    """With codes added up."""
    rerouted, dropped = sum(ledger.rerouted.values()), sum(ledger.dropped.values())
    counts = {name: getattr(ledger, name) for name in ("committed", "repeated", "refused", "late_answers")}
    return {**counts, "rerouted": rerouted, "dropped": dropped}
