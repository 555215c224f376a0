"""Derive a running peer's recent history from its own event log.

The history has the loss curve, the news (events that are shown to people) and the fate of its contributions.
A contribution's fate is whether it was in time for its round, or late."""

from __future__ import annotations

from collections import deque

from peers.telemetry import log_events
from peers.telemetry.event import Event, event_text
from peers.telemetry.event_log import LogLine
from peers.telemetry.snapshot import Curve, ShownEvent
from swarmnet.pipeline.ledger import RecentLoss
from swarmnet.resources.upload_need import ContributionFates

MAX_EVENTS = 200


class SettledRounds(dict[int, log_events.Settled]):
    """Round -> the event of a round that this peer has settled, without rounds of abandoned branches."""

    def take(self, event: Event) -> None:
        """Process the peer's next event. A settled round is added. When the peer fetches the state again,
        the rounds from the fork on are removed."""
        match event:
            case log_events.Settled(round):
                self[round] = event
            case log_events.Resync(fork_round=int(first_abandoned)):
                for abandoned in [round for round in self if round >= first_abandoned]:
                    del self[abandoned]
            case _:
                pass


class PeerTimeline:
    """Follows a peer's event log from the start."""

    def __init__(self) -> None:
        self.recent = RecentLoss()
        self.losses: Curve[float] = Curve()
        self.contributions = ContributionFates()
        self.events: deque[ShownEvent] = deque(maxlen=MAX_EVENTS)

    def take(self, line: LogLine) -> None:
        """Process the next line of the log: update the history, and keep the event if it is news."""
        self._update_losses_and_fates(line.event, line.time)
        happened = self._news_of(line)
        if happened is not None:
            self.events.append(happened)

    def _update_losses_and_fates(self, event: Event, at: float) -> None:
        """Update the mean loss and the fates of contributions by an event. `at` is its time in seconds.
        `Committed` has a microbatch's loss. Contributions that are open when the peer fetches the state again
        (`Resync`) count as late."""
        match event:
            case log_events.Committed(tokens=tokens, loss=float(loss)):
                self.recent.add(loss * tokens, tokens)
                if self.recent.mean is not None:
                    self.losses.add(at, self.recent.mean)
            case log_events.ContributionMade(round, id):
                self.contributions.make(id, round)
            case log_events.ContributionReturned(id=id):
                self.contributions.give_back(id)
            case log_events.Settled(round):
                self.contributions.settle(round)
            case log_events.Resync():
                self.contributions.lose_open()
            case log_events.Started():
                self.contributions = ContributionFates()
            case _:
                pass

    def _news_of(self, line: LogLine) -> ShownEvent | None:
        """Return the log line as text for people, or None if the event is not news."""
        event = line.event
        words = event_text(event)
        if words is not None:
            return ShownEvent(line.time, words.code, words.text, words.level)
        if isinstance(event, log_events.Notice) and event.name not in log_events.NOT_AMONG_NEWS:
            return ShownEvent(line.time, event.name, event.text[:200])
        return None
