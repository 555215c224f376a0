"""Limit what the DHT node sends in response to requests: a budget per requester, and this peer's upload
limit.

Without a budget, each find request of 18 kB would cost this peer 3.5 MB. A budget is a number of bytes at
once and per second. A requester that exceeds it gets a "not found" for each key, no longer than its request.
A requester is near if it is in this node's routing table or has a link to this peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeAlias

from protocols.daemon.hivemind_imports import dht_pb2
from protocols.dht.stored_values import part_of_dictionary
from protocols.messages.table import Chunk
from swarmnet.identifiers import PeerId
from swarmnet.resources.allowances import ANSWER_BYTES_AT_ONCE, ANSWER_BYTES_PER_SECOND, AnswerBudget

ANSWER_LIMIT = 3_500_000
"""Maximum bytes of a response. hivemind 1.1.12 never sends one that reaches 4 MiB, and the caller hangs."""
STRANGERS_ANSWER_LIMIT = 256 * 1024
"""Maximum size in bytes of a response to a requester that is neither in the routing table nor linked.

A newcomer is in the table after its first call. A response with 400 records of one stage has 185 kB in an
open run, and 278 kB in a run by invite (tests/protocols/dht/test_answers.py)."""
NEAREST_BYTES = 20 * 64
"""Bytes that the nearest nodes add to one key's result. There are 20 (hivemind's bucket size) of 64 bytes
each, with a peer id of 38 and a node id of 20."""
ANSWER_SECONDS = 3.0
"""Timeout of a requester in seconds (hivemind's default). A later response would not be received."""
SHARE_OF_UPLOAD = 4
"""One requester, and one address range, gets at most 1/4 of the upload limit, which leaves some to others."""
PIECE_BYTES = 64 * 1024
"""Bytes of one upload turn, as on links. A whole response at once would hold up all other traffic."""

Request: TypeAlias = Any
"""A StoreRequest of hivemind's dht.proto, which has no types."""
Response: TypeAlias = Any
"""A FindResponse of hivemind's dht.proto, which has no types."""


@dataclass(frozen=True, slots=True)
class Requester:
    """A peer that sends requests to this DHT node."""

    peer: PeerId
    address_range: str
    """The range that it is connected from (swarmnet/membership/address_ranges.py); empty if unknown."""
    near: bool
    """True if it is a neighbour: in the routing table, or linked."""


class Uploads(Protocol):
    """The part of `Upload` (protocols/framing/upload_turns.py) that this module needs."""

    bytes_per_second: float

    async def turn(self, size: int, priority: int) -> None: ...


class Answers:
    """Accounts for the bytes that each requester receives."""

    def __init__(self, bytes_of: Callable[[bytes], int], budget: AnswerBudget | None = None) -> None:
        """Create the accounting. `bytes_of` returns how many bytes are stored under a key."""
        self._bytes_of = bytes_of
        self._budget = budget or AnswerBudget()
        self._random = Random()
        self._waiting_bytes = 0
        """Total bytes of responses that wait for their upload turn."""
        self._upload: Uploads | None = None

    def limit_upload(self, upload: Uploads) -> None:
        """Share this upload limit. Requesters' budgets restart, with at most 1/`SHARE_OF_UPLOAD` of it."""
        self._upload = upload
        scale = min(1.0, upload.bytes_per_second / SHARE_OF_UPLOAD / ANSWER_BYTES_PER_SECOND)
        self._budget = AnswerBudget(scale * ANSWER_BYTES_PER_SECOND, scale * ANSWER_BYTES_AT_ONCE)

    def limit(self, requester: Requester) -> int:
        """Return the maximum bytes of a response to this requester now: at most its remaining budget, and a
        third of what this peer may upload until the requester's timeout."""
        max_bytes = ANSWER_LIMIT if requester.near else STRANGERS_ANSWER_LIMIT
        if self._upload is not None:  # Only a third, since other traffic uses the upload too.
            max_bytes = min(max_bytes, int(self._upload.bytes_per_second * ANSWER_SECONDS / 3))
        return min(max_bytes, self._budget.left(requester.peer, requester.address_range, _now()))

    def fitting(self, keys: Sequence[bytes], limit: int) -> int:
        """Return how many keys, from the first, it takes to fill a response of `limit` bytes. The last of
        them may fit only in part; the keys after it need not be looked up."""
        size = 0
        for number, key in enumerate(keys):
            if size >= limit:
                return number
            size += self._bytes_of(key) + NEAREST_BYTES
        return len(keys)

    def cut(self, response: Response, limit: int) -> None:
        """Shorten a FindResponse, which has a result for each key, in place, to `limit` bytes. A value that
        exceeds the bytes left becomes "not found". A dictionary longer than `limit` is instead cut to a
        random part. A result that is still too long also loses its nearest nodes."""
        bytes_left = limit
        for result in response.results:
            size = result.ByteSize()
            if size > bytes_left:
                # A dictionary longer than `limit` would fit no response, so a part of it is sent.
                if result.type == dht_pb2.FOUND_DICTIONARY and size > limit:
                    result.value = part_of_dictionary(result.value, bytes_left - NEAREST_BYTES, self._random)
                else:
                    result.type = dht_pb2.NOT_FOUND
                    result.ClearField("value")
                size = result.ByteSize()
            if size > bytes_left:
                result.Clear()
                result.type = dht_pb2.NOT_FOUND
                size = 0
            bytes_left -= size

    async def hand_over(self, request: Request, receiver: Requester) -> Request:
        """Return a copy of a StoreRequest that this node may send now, with the values that fit the budget of
        its `receiver`. Waits until they may be uploaded; if that takes too long, the copy has no values.

        On meeting a new node, hivemind sends it all values that it should store. An attacker can appear as a
        new node again and again, so these bytes are charged to the node as if it had requested them."""
        bytes_left = min(ANSWER_LIMIT, self._budget.left(receiver.peer, receiver.address_range, _now()))
        part = dht_pb2.StoreRequest(peer=request.peer)
        for index, value in enumerate(request.values):  # The other lists have one entry for each value.
            if len(value) <= bytes_left:
                bytes_left -= len(value)
                part.keys.append(request.keys[index])
                part.subkeys.append(request.subkeys[index])
                part.values.append(value)
                part.expiration_time.append(request.expiration_time[index])
                part.in_cache.append(request.in_cache[index])
        if part.keys and await self.may_send(part.ByteSize(), receiver):
            return part
        return dht_pb2.StoreRequest(peer=request.peer)

    async def may_send(self, size: int, requester: Requester) -> bool:
        """Charge the requester's budget for `size` bytes and wait until this peer may upload them. Returns
        True then. Returns False, and nothing may be sent, if that takes longer than `ANSWER_SECONDS`."""
        self._budget.spend(requester.peer, requester.address_range, size, _now())
        if self._upload is None:
            return True
        if self._waiting_bytes + size > self._upload.bytes_per_second * ANSWER_SECONDS:
            return False  # Other responses wait already, so it would take too long.
        self._waiting_bytes += size
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                for sent in range(0, size, PIECE_BYTES):
                    await self._upload.turn(min(PIECE_BYTES, size - sent), Chunk.priority)
        except TimeoutError:
            return False
        finally:
            self._waiting_bytes -= size
        return True


def _now() -> float:
    return asyncio.get_running_loop().time()
