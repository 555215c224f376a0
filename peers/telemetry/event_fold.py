"""The timeline of a running peer, from its own events: losses, news for people, fate of its contributions."""

from __future__ import annotations

from collections import deque

from peers.telemetry import events as noted
from peers.telemetry.event import Event, words_of
from peers.telemetry.event_log import LogLine
from peers.telemetry.snapshot import Curve, Happened
from swarmnet.pipeline.ledger import RecentLoss
from swarmnet.resources.upload_need import ContributionFates

MAX_EVENTS = 200


class SettledRounds(dict[int, noted.Settled]):
    """Round -> the event of a round that this peer has settled, without rounds of abandoned branches."""

    def take(self, event: Event) -> None:
        """Take the peer's next event."""
        match event:
            case noted.Settled(round):
                self[round] = event
            case noted.Resync(fork_round=int(first)):
                for round in [round for round in self if round >= first]:
                    del self[round]
            case _:
                pass


class PeerTimeline:
    """Follows a peer's event log from the start."""

    def __init__(self) -> None:
        self.recent = RecentLoss()
        self.losses: Curve[float] = Curve()
        self.contributions = ContributionFates()
        self.events: deque[Happened] = deque(maxlen=MAX_EVENTS)

    def take(self, line: LogLine) -> None:
        """Take the next line of the log."""
        self._follow(line.event, line.time)
        happened = self._news(line)
        if happened is not None:
            self.events.append(happened)

    def _follow(self, event: Event, at: float) -> None:
        """Update the mean loss and the fates of contributions by an event. `at` is its time in seconds."""
        match event:
            case noted.Committed(tokens=tokens, loss=float(loss)):
                self.recent.add(loss * tokens, tokens)
                if self.recent.mean is not None:
                    self.losses.add(at, self.recent.mean)
            case noted.ContributionMade(round, id):
                self.contributions.make(id, round)
            case noted.ContributionReturned(id=id):
                self.contributions.give_back(id)
            case noted.Settled(round):
                self.contributions.settle(round)
            case noted.Resync():
                self.contributions.lose_open()
            case noted.Started():
                self.contributions = ContributionFates()
            case _:
                pass

    def _news(self, line: LogLine) -> Happened | None:
        """Return a line for people, or None if the event is not news."""
        event = line.event
        if (words := words_of(event)) is not None:
            return Happened(line.time, words.code, words.text, words.level)
        if isinstance(event, noted.Notice) and event.name not in noted.NOT_AMONG_NEWS:
            return Happened(line.time, event.name, event.text[:200])
        return None
