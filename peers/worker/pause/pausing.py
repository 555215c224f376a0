"""The reasons for which a worker is paused, and waiting for them to change.

A reason is a word with a text for people. The peer is paused while at least one reason holds. Only the source
that set a reason can clear it: a user's pause outlasts the hours of the peer file, and vice versa. The
owner's order to pause the run is not among them: then peers keep their stages in memory
(peers/worker/order_enforcement.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from peers.compute.limits_watch import Why
from peers.runtime.supervision import until_one_ends

REASONS: Mapping[Why, str] = {
    "user": "paused by `swarmnet pause`; to continue: `swarmnet resume`",
    "schedule": "outside the hours that the peer file allows",
    "idle": "something else needs this machine",
    "traffic": "the traffic that the peer file allows in a month is used up",
    "battery": "this machine runs on its battery",
}

DRAIN_SECONDS = 1.5
"""How long a pause may finish work in progress; short, because a person wants the machine back now."""
CUT_SECONDS = 3.0
"""After this time the stage is dropped even if work is unfinished, provided other peers have it too."""


class PauseControl:
    def __init__(self) -> None:
        self.texts: dict[Why, str] = {}
        """Reasons that hold now, in the order in which they were set."""
        self.resting = asyncio.Event()
        """Set while these reasons keep every stage out of memory."""
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    def __bool__(self) -> bool:
        return bool(self.texts)

    def pause(self, reason: Why, text: str = "") -> None:
        """Leave the stage soon, and load none until this reason is cleared."""
        self.texts[reason] = text or REASONS[reason]
        self._begun.set()
        self._ended.clear()

    def resume(self, reason: Why) -> None:
        """Clear this reason; others may still hold."""
        self.texts.pop(reason, None)
        if not self.texts:
            self._begun.clear()
            self._ended.set()

    async def begun(self) -> None:
        """Wait until there is a reason to pause."""
        await self._begun.wait()

    async def ended(self) -> None:
        """Wait until no reason holds."""
        await self._ended.wait()

    async def rested(self) -> bool:
        """Wait until no stage is in memory or no reason holds any more. Returns whether it is paused."""
        await until_one_ends(resting=self.resting.wait(), ended=self._ended.wait())
        return self.resting.is_set()

    @staticmethod
    def meaning(reason: Why) -> str:
        return REASONS[reason]

    def line(self) -> str:
        """Return a line for people, such as `paused (user)`."""
        return f"paused ({', '.join(self.texts)})"
