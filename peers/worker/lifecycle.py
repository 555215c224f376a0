"""The state of a worker from joining to leaving, and what its services and its life cycle wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from peers.network.discovery.announcer import RecordAnnouncer
from peers.worker.settings import Settings
from peers.worker.starting_state import combine_requests
from swarmnet.rounds.events import FetchGroupState

LOOK_AGAIN_SECONDS = 0.2
"""Upper bound on the delay of a condition that no message triggers."""


class Lifecycle:
    """One worker's state, and the requests to leave, to move and to fetch the group's state again."""

    def __init__(self, presence: RecordAnnouncer, settings: Settings) -> None:
        self._presence = presence
        self.state = "connecting"
        self.drain_seconds = settings.drain_seconds
        self.goodbye = "leaving"
        self.goes_to: int | None = None
        """The stage to which this peer moves, if any; the next worker serves it."""
        self.hands_over = True
        """Whether a leaving worker finishes its work and saves its weights."""
        self.leaving = asyncio.Event()
        self.behind = asyncio.Event()
        """Set while the group's state must be fetched again."""
        self.request: FetchGroupState | None = None
        """Why the state is being fetched again; None if it is not."""
        self._changed = asyncio.Event()

    def enter(self, state: str) -> None:
        """Change the state and announce it in the directory at once."""
        if state != self.state:
            self.state = state
            self._presence.announce_now()

    def leave(self, drain_seconds: float | None, goodbye: str) -> None:
        """Request the end. `drain_seconds` limits how long finishing may take; None: as in the settings."""
        self.goes_to = None
        self.goodbye = goodbye
        if drain_seconds is not None:
            self.drain_seconds = drain_seconds
        self.leaving.set()
        self.wake()

    def move(self, stage: int) -> None:
        """Request the end of this worker; the next one serves `stage`."""
        self.leave(None, "moving")
        self.goes_to = stage

    def begin_again(self, stage: int) -> None:
        """Request the end of this worker without handing anything over. The next one serves the same stage,
        by the owner's newest orders."""
        self.move(stage)
        self.hands_over = False

    def resynchronise(self, request: FetchGroupState) -> bool:
        """Request to fetch the group's state again. Returns whether this is the first such request."""
        self.request = combine_requests(self.request, request)
        is_first = not self.behind.is_set()
        self.behind.set()
        self.wake()
        return is_first

    def take_request(self) -> FetchGroupState | None:
        """Return the request to fetch the state again and clear it: the state is here."""
        request = self.request
        self.request = None
        self.behind.clear()
        return request

    @property
    def is_interrupted(self) -> bool:
        """Whether the worker leaves or must fetch the state again."""
        return self.leaving.is_set() or self.behind.is_set()

    def wake(self) -> None:
        """Let `wait_until` check its condition at once."""
        self._changed.set()

    async def wait_until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until `condition()` holds. It is checked after each message and at intervals, since compute
        and timers change it too. Returns False at the deadline, a time of the event loop."""
        loop = asyncio.get_running_loop()
        while not condition():
            now = loop.time()
            if now >= deadline:
                return False
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(deadline, now + LOOK_AGAIN_SECONDS)):
                    await self._changed.wait()
        return True
