"""Which text an origin reads next where a run is read in epochs (`data.sampling: epoch`): every window of
every shard once, then all of them again in another order.

The shards of an epoch lie on a circle, each where its name and the epoch put it; an origin enters it where
its id puts it, and goes round once. So no origin has to know of another, those of a run read different shards
at a time, and a shard that is missing, or comes later, moves no other. Nothing here grows with the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarmnet.identifiers import PeerId, RunId

_CIRCLE = 2**64
_PASSES = 4
"""Of the Feistel network; a pseudorandom permutation from four on (Luby and Rackoff, 1988)."""


@dataclass(frozen=True, slots=True)
class EpochReader:
    """Who reads: what the order of everything follows from."""

    run: RunId
    seed: int
    origin: PeerId


@dataclass(frozen=True, slots=True)
class TextPosition:
    """How far an origin is on one circle of shards."""

    epoch: int = 0
    shard: str = ""
    """Under way; empty: none yet."""
    window: int = 0
    """Of that shard, the next one."""
    shards: int = 0
    """Read to their end in this epoch."""
    read: int = 0
    """Windows, in all epochs."""


def following(reader: EpochReader, names: Collection[str], epoch: int, shard: str) -> tuple[int, str]:
    """The epoch and the shard that come behind `shard` (which may be there no more; empty: none was read in
    this epoch). `names`, each once, are those that there are; raises ValueError if there is none."""
    behind = _distance(reader, epoch, shard) if shard else (-1, "")
    ahead = [where for name in names if (where := _distance(reader, epoch, name)) > behind]
    if ahead:
        return epoch, min(ahead)[1]
    return epoch + 1, min(_distance(reader, epoch + 1, name) for name in names)[1]


def _distance(reader: EpochReader, epoch: int, shard: str) -> tuple[int, str]:
    """From where the origin enters the circle."""
    lies = _number(f"shard/{reader.run}/{reader.seed}/{epoch}/{shard}")
    enters = _number(f"origin/{reader.run}/{reader.seed}/{epoch}/{reader.origin}")
    return (lies - enters) % _CIRCLE, shard


def window_count(tokens: int, seq_len: int) -> int:
    """Windows of `seq_len` + 1 tokens in a shard: each begins with the last token of another, which
    is nothing but its first input there and its last label here."""
    return max(0, (tokens - 1) // seq_len)


def window_start(reader: EpochReader, epoch: int, shard: str, number: int, tokens: int, seq_len: int) -> int:
    """Where the window that is read as `number` (below `window_count`) begins among the shard's tokens. What
    is left of a shard after all its windows is left at its beginning or its end, as the epoch will."""
    count = window_count(tokens, seq_len)
    key = f"windows/{reader.run}/{reader.seed}/{epoch}/{reader.origin}/{shard}"
    spare = (tokens - 1) % seq_len
    return _number(f"{key}/cut") % (spare + 1) + seq_len * permuted(number, count, key)


def permuted(number: int, count: int, key: str) -> int:
    """Where `number` goes in a permutation of `range(count)` that follows from `key`: a Feistel network on
    the next power of four, walked until it lands in the range (Black and Rogaway, CT-RSA 2002), so that no
    list is held. On average at most four walks."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for turn in range(_PASSES):
            left, right = right, left ^ (_number(f"{key}/{turn}/{right}") & mask)
        number = left << half | right
        if number < count:
            return number


def mixed(read: Sequence[int], weights: Sequence[float]) -> int:
    """Of which of several texts the next window is, `read` windows of each having been read: of the one that
    is furthest behind its share. So each has that at any time, to a window or two."""
    drawn, whole = sum(read) + 1, sum(weights)
    return max(range(len(weights)), key=lambda one: drawn * weights[one] / whole - read[one])


def _number(name: str) -> int:
    """64 bits that follow from a name."""
    return int.from_bytes(hashlib.blake2b(f"swarmnet epochs/{name}".encode(), digest_size=8).digest())
