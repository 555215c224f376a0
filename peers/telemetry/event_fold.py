"""What a running peer knows by its own events: its losses, what is worth a line, how its work fares."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from peers.telemetry import events as noted
from peers.telemetry.event_log import Line
from peers.telemetry.events import Event
from peers.telemetry.notices import EVERYDAY, told
from peers.telemetry.reasons import code_of
from peers.telemetry.snapshot import Curve, Happened
from swarmnet.pipeline.ledger import RecentLoss
from swarmnet.resources.upload_need import ContributionFates

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
    """Hears a peer's event log from the start."""

    def __init__(self) -> None:
        self.recent = RecentLoss()
        self.losses: Curve[float] = Curve()
        self.contributions = ContributionFates()
        self.events: deque[Happened] = deque(maxlen=MOST_EVENTS)

    def take(self, line: Line) -> None:
        """The next event."""
        self._follow(line.event, line.time)
        happened = self._news(line)
        if happened is not None:
            self.events.append(happened)

    def _follow(self, event: Event, at: float) -> None:
        match event:
            case noted.Committed(tokens=tokens, loss=float(loss)):
                self.recent.add(loss * tokens, tokens)
                if self.recent.mean is not None:
                    self.losses.add(at, self.recent.mean)
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
            return Happened(line.time, words.code, words.text, words.level)
        if plain := PLAIN.get(type(event)):
            return Happened(line.time, event.name, plain.format_map(event.fields), "info")
        text = event.fields.get("text")
        if isinstance(text, str):
            return Happened(line.time, event.name, text[:200], "info")
        return None
