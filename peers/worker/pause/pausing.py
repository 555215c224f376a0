"""Why a worker is paused, and whoever waits for that to change.

A reason is a word with a text for people. The peer is paused while any stands; each is taken back by whoever
gave it: a person's pause outlasts the hours of the peer file, and the other way round. The owner's order to
pause the run is none of them: its peers keep their stages in memory (creator/obedience.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from peers.compute.limits_watch import Why
from peers.runtime.supervision import until_one_ends

REASONS: Mapping[Why, str] = {
    "user": "somebody here asked for it; `swarmnet resume` goes on",
    "schedule": "outside the hours that the peer file allows",
    "idle": "something else needs this machine",
    "battery": "this machine runs on its battery",
}

DRAIN_SECONDS = 1.5
"""How long a pause may finish what is under way: a person wants the machine back now."""
CUT_SECONDS = 3.0
"""After so long the stage is left however far that came, if others hold it too."""


class Pausing:
    def __init__(self) -> None:
        self.texts: dict[Why, str] = {}
        """Reasons that stand, in the order in which they came."""
        self.resting = asyncio.Event()
        """Set while nothing of a stage is in memory because of them."""
        self._begun, self._ended = asyncio.Event(), asyncio.Event()
        self._ended.set()

    def __bool__(self) -> bool:
        return bool(self.texts)

    def pause(self, reason: Why, text: str = "") -> None:
        """Leave the stage soon, and hold none until this reason is taken back."""
        self.texts[reason] = text or REASONS[reason]
        self._begun.set()
        self._ended.clear()

    def resume(self, reason: Why) -> None:
        """This reason no longer stands; others may."""
        self.texts.pop(reason, None)
        if not self.texts:
            self._begun.clear()
            self._ended.set()

    async def begun(self) -> None:
        """Wait for a reason to pause."""
        await self._begun.wait()

    async def ended(self) -> None:
        """Wait until no reason stands."""
        await self._ended.wait()

    async def rested(self) -> bool:
        """Wait until nothing of a stage is in memory, or no reason stands any more; whether it rests."""
        await until_one_ends(resting=self.resting.wait(), ended=self._ended.wait())
        return self.resting.is_set()

    @staticmethod
    def meaning(reason: Why) -> str:
        return REASONS[reason]

    def line(self) -> str:
        """For people: `paused (user)`."""
        return f"paused ({', '.join(self.texts)})"
