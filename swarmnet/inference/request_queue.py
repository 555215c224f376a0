"""The queue of inference requests at a peer: which requests get a place, and which one is next.

Keys are free, IP ranges are not. The clients of one address range (a /24 network, or a /48 for IPv6)
therefore share what one client gets, and ranges take turns. If the queue is full, the range with most
requests loses one to a request of a range with fewer. If none has more, the new request is declined. Each
place that becomes free is reserved for a moment for one of the declined ranges, which is drawn by lot, no
matter how often each of them asked. Members of the run and invited clients come first.

Time is an argument in seconds. Few requests wait, so they are counted by iterating over all of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from swarmnet.identifiers import PeerId

MAX_DECLINED = 256
"""Declined ranges that take part in a draw: more than a botnet of some size has, at 100 bytes each."""
DECLINED_SECONDS = 5.0
"""How long a declined range takes part. An honest client asks again after 0.2 s (`machine.PASSING`)."""
RESERVED_SECONDS = 1.0
"""How long a place is reserved: the client's pause, and a round trip."""
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Client:
    """A client that sends requests."""

    peer: PeerId
    range: str
    """The client's address range; its own id if the range is private or unknown."""
    is_first: bool = False
    """True for members of the run and invited clients."""


@dataclass(frozen=True, slots=True)
class WaitingRequest(Generic[Item]):
    """A request in the queue. `item` is the caller's object for it."""

    client: Client
    item: Item
    size: int
    """Bytes of the request's body."""


class RequestQueue(Generic[Item]):
    """The waiting requests of one peer, bounded in number and in bytes."""

    def __init__(self, max_requests: int, max_bytes: int, chance: Random) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._chance = chance
        self._waiting: list[WaitingRequest[Item]] = []
        self._turns: OrderedDict[str, int] = OrderedDict()
        """Range or client -> the turn in which it was last served, or in which it came to the queue."""
        self._turn = 0
        self._declined: OrderedDict[str, float] = OrderedDict()
        """Range -> when it was last declined."""
        self._reserved = ("", float("-inf"))
        """A range for which a place is reserved, and until when."""

    def __len__(self) -> int:
        return len(self._waiting)

    def count(self, peer: PeerId) -> int:
        """Return how many requests of a client wait."""
        return sum(each.client.peer == peer for each in self._waiting)

    def add(
        self, client: Client, item: Item, size: int, now: float
    ) -> tuple[bool, list[WaitingRequest[Item]]]:
        """Add a request of `size` bytes. Returns whether it has a place, and the requests that lost their
        place to it. If it has none, its range is remembered as declined, and no request loses its place."""
        removed: list[WaitingRequest[Item]] = []
        kept = list(self._waiting)
        while not self._fits(kept, client, size, now):
            loser = self._choose_to_remove(kept, client)
            if loser is None:
                self._decline(client, now)
                return False, []
            kept.remove(loser)
            removed.append(loser)
        reserved_range, _ = self._reserved
        if reserved_range == client.range:
            self._reserved = ("", float("-inf"))  # None is reserved.
        self._declined.pop(client.range, None)
        for name in (client.range, client.peer):
            self._turns.setdefault(name, self._turn)  # A newcomer comes after those that wait.
        self._waiting = [*kept, WaitingRequest(client, item, size)]
        return True, removed

    def pop(self, now: float) -> WaitingRequest[Item]:
        """Remove and return the next request: members and invited clients first, then the range and the
        client whose last turn is longest ago. Raises `ValueError` if none waits."""

        def priority(waiting: WaitingRequest[Item]) -> tuple[bool, int, int]:
            client = waiting.client
            return not client.is_first, self._turns.get(client.range, 0), self._turns.get(client.peer, 0)

        request = min(self._waiting, key=priority)
        self._waiting.remove(request)
        self._turn += 1
        for name in (request.client.range, request.client.peer):
            self._turns.pop(name, None)  # Moves it to the end: the oldest turns are forgotten first.
            self._turns[name] = self._turn
        while len(self._turns) > 2 * (MAX_DECLINED + self._max_requests):
            self._turns.popitem(last=False)
        self._reserve(now)
        return request

    def clear(self) -> None:
        self._waiting.clear()

    def _fits(self, kept: list[WaitingRequest[Item]], client: Client, size: int, now: float) -> bool:
        """Return whether a request of `size` bytes fits beside those in `kept`. A place that is reserved for
        another range does not count; the first request always fits by its size."""
        reserved_range, until = self._reserved
        is_reserved = now < until and reserved_range != client.range and not client.is_first
        places = self._max_requests - 1 if is_reserved else self._max_requests
        fits_by_size = not kept or sum(each.size for each in kept) + size <= self._max_bytes
        return len(kept) < places and fits_by_size

    def _choose_to_remove(
        self, kept: list[WaitingRequest[Item]], client: Client
    ) -> WaitingRequest[Item] | None:
        """Return the request that must give way to a new one of `client`; None if none must.

        The range with most requests loses one, if the range of `client` has fewer even with the new one.
        Otherwise the own range of `client` loses one. In the chosen range it is the newest request of the
        client with most requests. In the own range, that client must have more than `client` has with the new
        one. Requests of members and invited clients never give way, and all others give way to theirs."""
        others = [each for each in kept if not each.client.is_first]
        if not others:
            return None
        by_range = Counter(each.client.range for each in others)
        losing_range, most = by_range.most_common(1)[0]
        if not client.is_first and most <= by_range[client.range] + 1:
            losing_range = client.range
        by_client = Counter(each.client.peer for each in others if each.client.range == losing_range)
        peer, most = by_client.most_common(1)[0] if by_client else (client.peer, 0)
        if losing_range == client.range and not client.is_first and most <= by_client[client.peer] + 1:
            return None
        return next(each for each in reversed(others) if each.client.peer == peer)

    def _decline(self, client: Client, now: float) -> None:
        """Remember the range of a declined request."""
        self._declined.pop(client.range, None)
        self._declined[client.range] = now
        if len(self._declined) > MAX_DECLINED:
            self._declined.popitem(last=False)

    def _reserve(self, now: float) -> None:
        """Reserve the free place for a range that was declined in the last `DECLINED_SECONDS`, drawn at
        random. An earlier reservation that has not expired stays."""
        while self._declined and next(iter(self._declined.values())) <= now - DECLINED_SECONDS:
            self._declined.popitem(last=False)
        _, reserved_until = self._reserved
        if self._declined and now >= reserved_until:
            drawn_range = self._chance.choice(list(self._declined))
            self._reserved = drawn_range, now + RESERVED_SECONDS
