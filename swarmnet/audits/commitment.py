"""What a peer signs of its work in a round, at the head of its contribution: enough to do all of it again, in
a few hundred bytes. It comes before anybody draws what is looked into.

    round, begun u32 | settings 8 B | before 16 B | carried 32 B | payload 32 B | stretches, accused u8
    | of each stretch: settled, applied i32 | sets 16 B | factor u16 | first u64 | count u32 | published u8
    | of each accused: length u8 | peer id | from u32            (98 bytes, 39 a stretch, 57 an accused peer)

All integers are big-endian. All that a peer has of its own follows from what stands here: its moments are
nothing where a window begins, and what it had moved and not told is what `carried` is the digest of, which it
gives to whoever asks. Each names the one before it, so that nobody can leave one out of a window: neither
the peer, nor who accuses it.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from itertools import pairwise

from swarmnet.identifiers import PeerId

SETTINGS_BYTES, SETS_BYTES, NAME_BYTES = 8, 16, 16
_HEAD = struct.Struct(f">II{SETTINGS_BYTES}s{NAME_BYTES}s32s32sBB")
_STRETCH = struct.Struct(f">ii{SETS_BYTES}sHQIB")
MOST_STRETCHES = 64
"""Of a round: one for each time that the group's weights changed under a peer, and for each gap between its
microbatches. 2,576 bytes."""
MOST_MICROBATCHES = 4096
"""Of a round: what an auditor can be made to compute for one."""
MOST_ACCUSED = 16
"""The newest: as many as proofs are kept (rounds/audits.py)."""
_FROM = struct.Struct(">I")
_ID_BYTES = 64
"""Of a peer id at most: it has 52."""
MOST_BYTES = _HEAD.size + MOST_STRETCHES * _STRETCH.size + MOST_ACCUSED * (1 + _ID_BYTES + _FROM.size)
NOT_YET = 0xFFFFFFFF
"""From which round on an accused peer does not count, as long as no settled set has said so."""
NOTHING_BEFORE = bytes(NAME_BYTES)


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
class Accused:
    peer: PeerId
    first: int
    """From that round on nothing of it counts, as settled sets have said; NOT_YET."""


@dataclass(frozen=True, slots=True)
class Commitment:
    round: int
    begun: int
    """The first round that this peer contributed to since it last began afresh: its window's beginning."""
    settings: bytes
    """`settings_of` what it computed with."""
    before: bytes
    """`name` of the commitment before it, where a window begins that of the last one before the window; zeros
    where it begins with nothing."""
    carried: bytes
    """`digest_of` what it carried into the window (OwnSteps.carried)."""
    payload: bytes
    """SHA-256 of what it contributed."""
    stretches: tuple[Stretch, ...]
    accused: tuple[Accused, ...] = ()
    """Who has lied as this peer found, or as it follows others in (convictions.py)."""

    @property
    def name(self) -> bytes:
        return hashlib.sha256(self.written()).digest()[:NAME_BYTES]

    def written(self) -> bytes:
        counts = len(self.stretches), len(self.accused)
        head = _HEAD.pack(
            self.round, self.begun, self.settings, self.before, self.carried, self.payload, *counts
        )
        stretches = (
            _STRETCH.pack(each.settled, each.applied, each.sets, each.factor, each.first, each.count,
            each.published) for each in self.stretches
        )
        ids = ((each.peer.encode(), each.first) for each in self.accused)
        accused = (bytes([len(peer)]) + peer + _FROM.pack(first) for peer, first in ids)
        return b"".join((head, *stretches, *accused))

    @staticmethod
    def read(data: bytes | memoryview) -> Commitment:
        """Raises CommitmentError."""
        data = bytes(data)
        if len(data) < _HEAD.size:
            raise CommitmentError(f"a commitment of {len(data)} bytes")
        round, begun, settings, before, carried, payload, count, accused = _HEAD.unpack_from(data)
        end = _HEAD.size + count * _STRETCH.size
        if len(data) < end or count > MOST_STRETCHES or accused > MOST_ACCUSED:
            raise CommitmentError(f"a commitment of {len(data)} bytes with {count} stretches")
        stretches = tuple(
            Stretch(settled, applied, sets, factor, first, microbatches, bool(published))
            for settled, applied, sets, factor, first, microbatches, published in _STRETCH.iter_unpack(
                data[_HEAD.size : end]
            )
        )
        found = Commitment(
            round, begun, settings, before, carried, payload, stretches, _accused(data[end:], accused)
        )
        found.check()
        return found

    def check(self) -> None:
        """Raises CommitmentError where it contradicts itself."""
        begins = self.begun == self.round
        if self.begun > self.round or (begins and not (self.stretches and self.stretches[0].published)):
            raise CommitmentError(f"round {self.round} of a window that begins at {self.begun}, or nowhere")
        if (self.before == NOTHING_BEFORE) != (begins and self.carried == bytes(32)):
            raise CommitmentError("something is carried from nowhere, or nothing is before it in its window")
        if sum(each.count for each in self.stretches) > MOST_MICROBATCHES or not all(
            each.count and -1 <= each.settled <= each.applied < self.round for each in self.stretches
        ):
            raise CommitmentError("stretches without microbatches, with too many, or on weights to come")
        if any(later.applied < sooner.applied for sooner, later in pairwise(self.stretches)):
            raise CommitmentError("it went back to weights of before")


def _accused(data: bytes, count: int) -> tuple[Accused, ...]:
    found: list[Accused] = []
    for _ in range(count):
        length = data[0] if data else 0
        peer, first, data = data[1 : 1 + length], data[1 + length :][: _FROM.size], data[5 + length :]
        if not 0 < length <= _ID_BYTES or len(first) < _FROM.size or not peer.isascii():
            raise CommitmentError("somebody is accused of whom nothing can be said")
        found.append(Accused(PeerId(peer.decode()), *_FROM.unpack(first)))
    if data or len({each.peer for each in found}) < count:
        raise CommitmentError("somebody is accused twice, or more follows")
    return tuple(found)


def digest_of(carried: bytes) -> bytes:
    """32 bytes; zeros where nothing is carried, as by who has just begun."""
    return hashlib.sha256(carried).digest() if carried else bytes(32)


def settings_of(*said: object) -> bytes:
    """A short name of all that may decide a bit of a result: versions, kind of device, numbers, threads."""
    return hashlib.sha256("\n".join(map(str, said)).encode()).digest()[:SETTINGS_BYTES]
