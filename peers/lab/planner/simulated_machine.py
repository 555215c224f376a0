"""What simulated peers run on: a virtual clock, compute that takes a given time, and links.

Times in seconds, sizes in bytes, speeds in bytes per second.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarmnet.identifiers import MicrobatchId
from swarmnet.resources.link_bandwidth import LinkBandwidth


class Events:
    """Event queue with a virtual clock in seconds; it is deterministic."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._waiting: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, time: float, callback: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        """Call `callback(*arguments)` at `time`, or now if that has passed."""
        heapq.heappush(self._waiting, (max(time, self.now), next(self._order), callback, arguments))

    def after(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        """Call `callback(*arguments)` in `seconds` seconds."""
        self.at(self.now + seconds, callback, *arguments)

    def run(self, until: float) -> None:
        """Run all callbacks that are due up to `until`, and set the clock to `until`."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= until:
            self.now, _, callback, arguments = heapq.heappop(waiting)
            self.happened += 1
            callback(*arguments)
        self.now = max(self.now, until)


class SharedCores:
    """Cores that all peers share; peers wait for a free core in the order in which they came."""

    def __init__(self, cores: int) -> None:
        self._free = cores
        self._waiting: deque[SimulatedCompute] = deque()

    def enter(self, compute: SimulatedCompute) -> None:
        self._waiting.append(compute)
        self._next()

    def leave(self) -> None:
        self._free += 1
        self._next()

    def _next(self) -> None:
        while self._free and self._waiting:
            compute = self._waiting.popleft()
            if not compute.stopped:
                self._free -= 1
                compute.run_next()


@dataclass(eq=False, kw_only=True)
class SimulatedCompute:
    """The compute of one peer: one task at a time, those of lower priority number first.

    `cost` returns the seconds of a task of a priority. `done` is called with priority, microbatch and seconds
    when a task ends. `waited` counts the seconds that each microbatch has waited."""

    events: Events
    cores: SharedCores | None
    waited: dict[MicrobatchId, float]
    cost: Callable[[int], float]
    done: Callable[[int, MicrobatchId, float], None]

    def __post_init__(self) -> None:
        self.stopped = False
        self._queue: list[tuple[int, int, MicrobatchId, float]] = []
        self._order = 0
        self._computing = False

    @property
    def queued(self) -> int:
        """Return the number of tasks that wait for compute."""
        return len(self._queue)

    def submit(self, priority: int, key: MicrobatchId) -> None:
        self._order += 1
        heapq.heappush(self._queue, (priority, self._order, key, self.events.now))
        if not self._computing:
            self._computing = True
            self._go_on()

    def _go_on(self) -> None:
        if self.cores is None:
            self.run_next()
        else:
            self.cores.enter(self)

    def run_next(self) -> None:
        """Run the first task of the queue."""
        priority, _, key, since = heapq.heappop(self._queue)
        self.waited[key] = self.waited.get(key, 0.0) + self.events.now - since
        seconds = self.cost(priority)
        self.events.after(seconds, self._ended, priority, key, seconds)

    def _ended(self, priority: int, key: MicrobatchId, seconds: float) -> None:
        if self.cores is not None:
            self.cores.leave()
        self._computing = not self.stopped and bool(self._queue)
        if self._computing:
            self._go_on()
        if not self.stopped:
            self.done(priority, key, seconds)


class AccessLink:
    """A peer's link, whose two directions carry one body after another."""

    def __init__(self, bandwidth: LinkBandwidth) -> None:
        self._bandwidth = bandwidth
        self._up_free = 0.0
        self._down_free = 0.0

    def send(self, size: int, now: float) -> tuple[float, float]:
        """Send a body. Returns when it begins, and how many seconds it takes."""
        begins, takes = max(now, self._up_free), size / self._bandwidth.up
        self._up_free = begins + takes
        return begins, takes

    def receive(self, size: int, takes: float, now: float) -> float:
        """Return when this link has carried a body that took its sender `takes` seconds to send.

        Bodies that arrive at the same time share the link, in the order in which they got through. A body
        that still waits at its sender uses none of it."""
        self._down_free = max(self._down_free, now - takes) + size / self._bandwidth.down
        return self._down_free
