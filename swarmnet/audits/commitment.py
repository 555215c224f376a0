"""What a peer signs of its work in a round, beside its contribution: enough to do all of it again, in a few
hundred bytes. It comes before anybody draws what is looked into.

    round, begun u32 | settings 8 B | carried 32 B | payload 32 B | of each stretch: settled, applied i32
    | sets 16 B | factor u16 | first u64 | count u32 | published u8            (80 bytes and 39 a stretch)

All integers are big-endian. All that a peer has of its own follows from what stands here: its moments are
nothing where a window begins, and what it had moved and not told is what `carried` is the digest of, which it
gives to whoever asks.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

SETTINGS_BYTES, SETS_BYTES = 8, 16
_HEAD = struct.Struct(f">II{SETTINGS_BYTES}s32s32s")
_STRETCH = struct.Struct(f">ii{SETS_BYTES}sHQIB")
MOST_STRETCHES = 64
"""Of a round: one for each time that the group's weights changed under a peer, and for each gap between its
microbatches. 2,576 bytes."""
MOST_MICROBATCHES = 4096
"""Of a round: what an auditor can be made to compute for one."""


class CommitmentError(ValueError):
    """No honest peer can have signed this."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Microbatches one after the other, at one version of the group's weights."""

    settled: int
    """The newest round in them whose set was closed; -1: none."""
    applied: int
    """The newest round in them."""
    sets: bytes
    """`SetNames.between` these (work_log.py): what it had of the rounds that were open."""
    factor: int
    """Of the learning rate, in thousandths (run/rates.py)."""
    first: int
    """Counter of the first of them."""
    count: int
    published: bool
    """The weights were made anew before it; else it goes on with those of the stretch before."""

    @property
    def counters(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True)
class Commitment:
    round: int
    begun: int
    """The first round that this peer contributed to since it last began afresh: its window's beginning."""
    settings: bytes
    """`settings_of` what it computed with."""
    carried: bytes
    """`digest_of` what it carried into the window (OwnSteps.carried)."""
    payload: bytes
    """SHA-256 of what it contributed."""
    stretches: tuple[Stretch, ...]

    def written(self) -> bytes:
        head = _HEAD.pack(self.round, self.begun, self.settings, self.carried, self.payload)
        return head + b"".join(
            _STRETCH.pack(each.settled, each.applied, each.sets, each.factor, each.first, each.count,
            each.published) for each in self.stretches
        )

    @staticmethod
    def read(data: bytes | memoryview) -> Commitment:
        """Raises CommitmentError."""
        count, rest = divmod(len(data) - _HEAD.size, _STRETCH.size)
        if rest or not 0 <= count <= MOST_STRETCHES:
            raise CommitmentError(f"a commitment of {len(data)} bytes")
        round, begun, settings, carried, payload = _HEAD.unpack_from(data)
        stretches = tuple(
            Stretch(settled, applied, sets, factor, first, count, bool(published))
            for settled, applied, sets, factor, first, count, published in _STRETCH.iter_unpack(
                data[_HEAD.size :]
            )
        )
        begins_well = bool(stretches) and stretches[0].published
        if begun > round or (begun == round and not begins_well):
            raise CommitmentError(f"round {round} of a window that begins at {begun}, or on no weights")
        if sum(each.count for each in stretches) > MOST_MICROBATCHES or not all(
            each.count and -1 <= each.settled <= each.applied < round for each in stretches
        ):
            raise CommitmentError("stretches without microbatches, with too many, or on weights to come")
        return Commitment(round, begun, bytes(settings), bytes(carried), bytes(payload), stretches)


def digest_of(carried: bytes) -> bytes:
    """32 bytes; zeros where nothing is carried, as by who has just begun."""
    return hashlib.sha256(carried).digest() if carried else bytes(32)


def settings_of(*said: object) -> bytes:
    """A short name of all that may decide a bit of a result: versions, kind of device, numbers, threads."""
    return hashlib.sha256("\n".join(map(str, said)).encode()).digest()[:SETTINGS_BYTES]
