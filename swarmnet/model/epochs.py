"""Choose the text that a peer reads next with `data.sampling: epoch`: every window of every shard once, then
all of them again in another order.

A shard here is one part of the training text, and an epoch is one pass of one peer over all of them.
Consistent hashing orders the shards. In every epoch each shard has a position on a circle, given by its name
and the epoch. A peer starts at a position given by its id, and goes round the circle once. Peers need not
know of each other, and read different shards at a time. A missing or late shard does not move the others.
Memory does not grow with the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarmnet.identifiers import PeerId, RunId

_CIRCLE = 2**64
_PASSES = 4
"""Rounds of the Feistel network; four give a pseudorandom permutation (Luby and Rackoff, 1988)."""


@dataclass(frozen=True, slots=True)
class EpochReader:
    """The run and the peer that reads it; they decide every order."""

    run: RunId
    seed: int
    origin: PeerId


@dataclass(frozen=True, slots=True)
class TextPosition:
    """Position of a peer on one circle of shards."""

    epoch: int = 0
    shard: str = ""
    """Current shard; empty: none yet."""
    window: int = 0
    """Next window of the current shard."""
    shards: int = 0
    """Number of shards that were read to their end in this epoch."""
    read: int = 0
    """Number of windows that were read in all epochs."""
    since: int = 0
    """Value of `read` when the present shares of the sources began to hold."""


def following(reader: EpochReader, names: Collection[str], epoch: int, shard: str) -> tuple[int, str]:
    """Return the epoch and the name of the shard that the peer reads after `shard`. `shard` may no longer
    exist; it is empty before the first one of an epoch. `names` are the available shards, each once. After
    the last one the next epoch begins. Raises ValueError if there is no shard."""
    # Pairs of the distance from the peer's start on the circle, and the shard's name.
    current = _distance(reader, epoch, shard) if shard else (-1, "")
    shards = [_distance(reader, epoch, name) for name in names]
    shards_ahead = [pair for pair in shards if pair > current]
    if not shards_ahead:
        epoch += 1
        shards_ahead = [_distance(reader, epoch, name) for name in names]
    _, nearest_name = min(shards_ahead)
    return epoch, nearest_name


def reading_order(reader: EpochReader, names: Collection[str]) -> list[str]:
    """Return the names of shards in the order in which the peer reads them in its first epoch."""
    return [name for _, name in sorted(_distance(reader, 0, name) for name in names)]


def _distance(reader: EpochReader, epoch: int, shard: str) -> tuple[int, str]:
    """Return a shard's distance from the peer's start on the circle, and its name to break ties."""
    position = _hash(f"shard/{reader.run}/{reader.seed}/{epoch}/{shard}")
    start = _hash(f"origin/{reader.run}/{reader.seed}/{epoch}/{reader.origin}")
    return (position - start) % _CIRCLE, shard


def window_count(tokens: int, seq_len: int) -> int:
    """Return the number of windows of `seq_len` + 1 tokens in a shard. Neighbouring windows share a token: it
    is the last label of one and the first input of the next."""
    return max(0, (tokens - 1) // seq_len)


def window_token_start(
    reader: EpochReader, epoch: int, shard: str, number: int, tokens: int, seq_len: int
) -> int:
    """Return the index of the first token of the window that is read at turn `number` (below `window_count`).
    A shard has `tokens` tokens, and its windows are read in a permuted order. A window has `seq_len` + 1
    tokens; its last is the first of the next window. Tokens that fill no window are left out at the two ends
    of the shard. How many at each end changes with the epoch."""
    count = window_count(tokens, seq_len)
    key = f"windows/{reader.run}/{reader.seed}/{epoch}/{reader.origin}/{shard}"
    spare = (tokens - 1) % seq_len
    left_out_in_front = _hash(f"{key}/cut") % (spare + 1)
    return left_out_in_front + seq_len * permuted(number, count, key)


def permuted(number: int, count: int, key: str) -> int:
    """Return the image of `number` under a permutation of `range(count)` that `key` selects. A Feistel
    network permutes the next power of four. It is applied again until the result is in the range (Black and
    Rogaway, CT-RSA 2002), so no list is stored. This takes at most four applications on average."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask  # The two halves of its bits.
        for turn in range(_PASSES):
            left, right = right, left ^ (_hash(f"{key}/{turn}/{right}") & mask)
        number = left << half | right
        if number < count:
            return number


def mixed(read: Sequence[int], weights: Sequence[float]) -> int:
    """Return the index of the text whose next window is read: the one that is furthest behind its share.
    `read` counts the windows read of each text, and `weights` are the shares, up to a factor."""
    windows, total_weight = sum(read) + 1, sum(weights)
    return max(range(len(weights)), key=lambda text: windows * weights[text] / total_weight - read[text])


def _hash(name: str) -> int:
    """Return a 64-bit hash of a name."""
    return int.from_bytes(hashlib.blake2b(f"swarmnet epochs/{name}".encode(), digest_size=8).digest())
