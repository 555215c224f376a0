"""What the directory sends to its askers: within a budget of each, and within this peer's upload limit.

Without one a find request of 18 kB brings 3.5 MB, as often as it is sent. Beyond its budget (`AnswerBudget`)
an asker learns nothing: a short "not found" for each key, which never is more than it has sent.
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
"""Bytes of an answer. hivemind 1.1.12 never answers when a response reaches 4 MiB, and the caller hangs
(trap 1)."""
STRANGERS_ANSWER_LIMIT = 256 * 1024
"""Bytes of an answer to an asker that is no neighbour: neither in the routing table nor linked. A newcomer
is in the table after its first call. 400 records of an open run are 185 kB, 278 kB in a run by invite, all
in one stage (tests/protocols/dht/test_answers.py)."""
NEAREST_BYTES = 20 * 64
"""What the nearest nodes add to one key's result: 20 of them (hivemind's bucket size), 64 bytes each with a
peer id of 38 and a node id of 20."""
ANSWER_SECONDS = 3.0
"""So long an asker waits for an answer (hivemind's default): a later one is sent to nobody."""
SHARE_OF_UPLOAD = 4
"""One asker, and one address range, gets this part of an upload limit at most, so that a few others find
room."""
PIECE_BYTES = 64 * 1024
"""As links send them (protocols/framing/frames.py): a whole answer at once would hold up all other
traffic."""

Request: TypeAlias = Any
"""StoreRequest of hivemind's dht.proto, which has no types."""
Response: TypeAlias = Any
"""FindResponse, the like."""


@dataclass(frozen=True, slots=True)
class Asker:
    """A peer that the directory answers."""

    peer: PeerId
    address_range: str
    """Where it is connected from (swarmnet/membership/address_ranges.py); empty if that is not known."""
    near: bool
    """It is a neighbour: in the routing table, or linked."""


class Uploads(Protocol):
    """What is needed of `Upload` (protocols/framing/upload_turns.py)."""

    bytes_per_second: float

    async def turn(self, size: int, priority: int) -> None: ...


class Answers:
    """The account of what goes to whom."""

    def __init__(self, bytes_of: Callable[[bytes], int], budget: AnswerBudget | None = None) -> None:
        """`bytes_of`: how many bytes are stored under a key."""
        self._bytes_of = bytes_of
        self._budget = budget or AnswerBudget()
        self._chance = Random()
        self._waiting_bytes = 0
        """Of answers that wait for their turn, together."""
        self._upload: Uploads | None = None

    def limit_upload(self, upload: Uploads) -> None:
        """Take turns with all that this peer sends from now on. An asker's budget shrinks to its part of the
        limit."""
        self._upload = upload
        scale = min(1.0, upload.bytes_per_second / SHARE_OF_UPLOAD / ANSWER_BYTES_PER_SECOND)
        self._budget = AnswerBudget(scale * ANSWER_BYTES_PER_SECOND, scale * ANSWER_BYTES_AT_ONCE)

    def limit(self, asker: Asker) -> int:
        """Bytes that an answer to this asker may have now."""
        longest = ANSWER_LIMIT if asker.near else STRANGERS_ANSWER_LIMIT
        if self._upload is not None:  # Less than the line carries while the asker waits: others send, too.
            longest = min(longest, int(self._upload.bytes_per_second * ANSWER_SECONDS / 3))
        return min(longest, self._budget.left(asker.peer, asker.address_range, _now()))

    def fitting(self, keys: Sequence[bytes], limit: int) -> int:
        """How many of the first keys an answer of `limit` bytes has room for, the last of them in part. What
        is not sent is not built, either."""
        size = 0
        for number, key in enumerate(keys):
            if size >= limit:
                return number
            size += self._bytes_of(key) + NEAREST_BYTES
        return len(keys)

    def cut(self, response: Response, limit: int) -> None:
        """Take out of a FindResponse what goes beyond `limit` bytes. Of a dictionary that is longer than
        that by itself, a random part stays; any other value is left out whole."""
        room = limit
        for result in response.results:
            size = result.ByteSize()
            if size > room:
                if result.type == dht_pb2.FOUND_DICTIONARY and size > limit:
                    result.value = part_of_dictionary(result.value, room - NEAREST_BYTES, self._chance)
                else:
                    result.type = dht_pb2.NOT_FOUND
                    result.ClearField("value")
                size = result.ByteSize()
            if size > room:
                result.Clear()
                result.type = dht_pb2.NOT_FOUND
                size = 0
            room -= size

    async def hand_over(self, request: Request, asker: Asker) -> Request:
        """Those values of a StoreRequest that this peer may be sent now, in their turn. hivemind hands a
        node that it meets all that the new one should keep: for each key that a stranger makes, all of it
        again."""
        room = min(ANSWER_LIMIT, self._budget.left(asker.peer, asker.address_range, _now()))
        part = dht_pb2.StoreRequest(peer=request.peer)
        for index, value in enumerate(request.values):
            if len(value) <= room:
                room -= len(value)
                part.keys.append(request.keys[index])
                part.subkeys.append(request.subkeys[index])
                part.values.append(value)
                part.expiration_time.append(request.expiration_time[index])
                part.in_cache.append(request.in_cache[index])
        if part.keys and await self.may_send(part.ByteSize(), asker):
            return part
        return dht_pb2.StoreRequest(peer=request.peer)

    async def may_send(self, size: int, asker: Asker) -> bool:
        """Charge the asker for `size` bytes, and wait for their turn; False when that does not come in
        time."""
        self._budget.spend(asker.peer, asker.address_range, size, _now())
        if self._upload is None:
            return True
        if self._waiting_bytes + size > self._upload.bytes_per_second * ANSWER_SECONDS:
            return False
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
