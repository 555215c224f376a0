"""What happened, again: the event logs of one or several peers as a picture of any moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peers.config.atomic_files import is_file
from peers.errors import UserError
from peers.telemetry import event_log
from peers.telemetry.console import counted
from peers.telemetry.event_fold import Story
from peers.telemetry.event_log import Line
from peers.telemetry.events import Looked, Made, OffersMissing, Took
from peers.telemetry.notices import short
from peers.telemetry.picture import Happened, Picture, curve, lag_of, summed

EVENTS = "events.jsonl"
SHOWN_EVENTS = 100
UNUSED = (Took, Made, OffersMissing, Looked)
"""The most frequent events that no story tells: not kept while a log is read."""
SLOWEST, FASTEST = 1 / 16, 1024.0
JUMP_SECONDS = 10.0


def logs_of(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Name of a peer -> its logs, oldest first. A path may be a log, a state folder, or a folder of those.
    UserError names the first path without any."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        one = path if is_file(path) else path / EVENTS
        logs = [one] if is_file(one) else sorted(path.glob(f"*/{EVENTS}"))
        if not logs:
            raise UserError(f"{path}: holds no event log; name an {EVENTS}, or a peer's state folder")
        for log in logs:
            name = log.parent.name or log.parent.resolve().name
            while name in found:
                name += "'"
            found[name] = event_log.parts(log)
    return found


class Replay:
    """Pictures of any moment; moving forward is cheap, moving back tells the stories again."""

    def __init__(self, events: Iterable[tuple[str, Line]], names: Sequence[str]) -> None:
        """`events`: with the name of the peer whose log they are from, in any order."""
        self.names = tuple(names)
        self._events = sorted(events, key=lambda one: one[1].time)
        if not self._events:
            raise UserError("the event logs are empty: the peers had not begun")
        self.began = self._events[0][1].time
        """Unix time of the first event in seconds."""
        self.seconds = self._events[-1][1].time - self.began
        self._begin()

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Replay:
        """Raises UserError for what is no log."""
        logs = logs_of(paths)
        events = [
            (name, line)
            for name, files in logs.items()
            for number, file in enumerate(files)
            for line in _read(file, first=number == 0)
            if not isinstance(line.event, UNUSED)
        ]
        return cls(events, list(logs))

    def _begin(self) -> None:
        self._stories = {name: Story(name) for name in self.names}
        self._next = 0

    def at(self, seconds: float) -> Picture:
        """The picture so many seconds after the first event."""
        until = self.began + min(max(0.0, seconds), self.seconds)
        if self._next and self._events[self._next - 1][1].time > until:
            self._begin()
        while self._next < len(self._events) and self._events[self._next][1].time <= until:
            name, line = self._events[self._next]
            try:
                self._stories[name].take(line)
            except (TypeError, ValueError):
                raise UserError(
                    f"the event `{line.name}` in the log of {name} is not as this version writes it; "
                    "replay it with the version that wrote it"
                ) from None
            self._next += 1
        return self._picture(until)

    def _picture(self, now: float) -> Picture:
        stories = [story for story in self._stories.values() if story.seen_at]
        peers = sorted((story.seen(now) for story in stories), key=lambda seen: (seen.stage, seen.name))
        origins = [story for story in stories if story.stage == 0] or stories
        losses = [story.recent.mean for story in origins if story.recent.mean is not None]
        steps = [(seen.stage, seen.round) for seen in peers
                 if seen.round is not None and seen.state == "training"]  # fmt: skip
        events = sorted((one for story in stories for one in story.events), key=lambda one: one.time)
        named = {short(story.peer): story.name for story in stories if story.peer}
        missing = {
            stage for story in stories for stage in story.waits_for if story.state_at(now) == "training"
        }
        first = origins[0].stage if origins else 0
        return Picture(
            source=f"replay of {counted(len(self.names), 'event log')}",
            time=now,
            run=next((story.run for story in stories if story.run), ""),
            stages=max((seen.stage for seen in peers), default=-1) + 1,
            peers=tuple(peers),
            round=max((round for _, round in steps), default=None),
            settled=max((story.settled for story in stories if story.settled is not None), default=None),
            lag=lag_of(steps),
            loss=sum(losses) / len(losses) if losses else None,
            losses=curve(point for story in origins for point in story.losses.points),
            tokens=sum(story.tokens for story in origins),
            settled_tokens=max(
                (story.settled_tokens for story in origins if story.settled_tokens is not None), default=None
            ),
            tokens_per_second=sum(seen.tokens_per_second or 0.0 for seen in peers if seen.stage == first),
            sent=summed(story.sent for story in stories),
            received=summed(story.received for story in stories),
            microbatches=summed(story.microbatches for story in stories),
            rounds=summed(story.rounds for story in stories),
            events=tuple(_named(one, named) for one in events[-SHOWN_EVENTS:]),
            waits_for=tuple(sorted(missing)),
        )


def _read(path: Path, first: bool) -> Iterable[Line]:
    """Of the first file of a log what held already when it began, too: what stood before it is gone."""
    try:
        yield from event_log.read_part(path) if first else event_log.read(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _named(event: Happened, names: Mapping[str, str]) -> Happened:
    """With the names of those whose logs are here in the place of their ids."""
    text = event.text
    for known, name in names.items():
        text = text.replace(known, name)
    return event if text == event.text else replace(event, text=text)


@dataclass(slots=True)
class Player:
    """Where a replay is. Time in seconds on the caller's clock; nothing here reads one."""

    seconds: float
    """The replay's length."""
    now: float
    speed: float = 1.0
    position: float = 0.0
    paused: bool = False

    def advance(self, now: float) -> float:
        """The position by now; it stays at the end."""
        if not self.paused:
            self.position = min(self.seconds, self.position + (now - self.now) * self.speed)
        self.now = now
        return self.position

    def press(self, key: str, now: float) -> bool:
        """A key; False: leave."""
        self.advance(now)
        match key:
            case "q":
                return False
            case " ":
                self.paused = not self.paused
            case "+" | "=":
                self.speed = min(FASTEST, self.speed * 2)
            case "-":
                self.speed = max(SLOWEST, self.speed / 2)
            case "right" | "l":
                self.position = min(self.seconds, self.position + JUMP_SECONDS)
            case "left" | "h":
                self.position = max(0.0, self.position - JUMP_SECONDS)
            case "home" | "0":
                self.position = 0.0
            case "end" | "$":
                self.position = self.seconds
            case _:
                pass
        return True

    @property
    def line(self) -> str:
        how = "paused" if self.paused else f"{self.speed:g} x"
        return f"{self.position:,.1f} of {self.seconds:,.1f} s, {how}"
