"""The common event log of a simulated world: what its peers log, and the errors that escape from them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from peers.lab.world.world_events import Returned
from peers.telemetry.event import Event
from peers.telemetry.log_events import ContributionReturned


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One line of a peer's event log. `life` counts the processes of that name."""

    time: float
    name: str
    life: int
    what: Event

    @property
    def event(self) -> str:
        return self.what.name

    @property
    def fields(self) -> dict[str, Any]:
        return self.what.fields

    def line(self) -> str:
        fields = json.dumps(self.fields, default=bytes.hex, sort_keys=True)
        return f"{self.time:.6f} {self.name}.{self.life} {self.event} {fields}"


class Journal:
    """Everything that the peers of a world log, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.events: list[RecordedEvent] = []
        self.escaped: list[tuple[str, BaseException]] = []
        """Errors that ended a task, with the name of the peer."""
        self._returning: Counter[tuple[str, int]] = Counter()
        loop.set_exception_handler(self._on_error)

    def record(self, name: str, life: int, event: Event) -> None:
        """Record an event of a peer at the present time."""
        self.events.append(RecordedEvent(round(self._loop.time(), 6), name, life, event))
        if isinstance(event, (ContributionReturned, Returned)):
            self._returning[name, life] += 1 if isinstance(event, ContributionReturned) else -1

    def is_returning(self, name: str, life: int) -> bool:
        """Return whether compute has not processed all returned contributions of a peer. Requires stubs."""
        return self._returning[name, life] != 0

    def _on_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.escaped.append(("?", context.get("exception") or RuntimeError(str(context["message"]))))
