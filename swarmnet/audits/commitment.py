"""What a peer signs of its work in a round, at the head of its contribution: enough to do all of it again, in
a few hundred bytes. It comes before anybody draws what is looked into.

    round, begun u32 | settings 16 B | before 16 B | carried 32 B | payload 32 B
    | stretches, findings, changes, accused u8
    | of each stretch: settled, applied i32 | sets 16 B | factor u16 | first u64 | count u32 | published u8
    | of each finding: peer 8 B | round u32 | rounds, word u8 | likeness u16
    | of each change: peer 8 B | from u32 | standing u8
    | of each accused: length u8 | peer id | from u32
                                    (108 bytes, 39 a stretch, 16 a finding, 13 a change, 57 an accused peer)

All integers are big-endian. All that a peer has of its own follows from what stands here: its moments are
nothing where a window begins, and what it had moved and not told is what `carried` is the digest of, which it
gives to whoever asks. Each names the one before it, so that nobody can leave one out of a window: neither
the peer, nor who accuses it.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from operator import gt, mul

from swarmnet.identifiers import PeerId
from swarmnet.rounds.result_table import TAG_BYTES

TEXT_BYTES, SETTINGS_BYTES, SETS_BYTES, NAME_BYTES = 8, 16, 16, 16
_HEAD = struct.Struct(f">II{SETTINGS_BYTES}s{NAME_BYTES}s32s32sBBBB")
_STRETCH = struct.Struct(f">ii{SETS_BYTES}sHQIB")
MOST_STRETCHES = 64
"""Of a round: one for each time that the group's weights changed under a peer, and for each gap between its
microbatches. 2,576 bytes."""
MOST_MICROBATCHES = 4096
"""Of a round: what an auditor can be made to compute for one."""
MOST_ACCUSED = 16
"""The newest: as many as proofs are kept (rounds/audits.py)."""
MOST_FINDINGS = 16
"""Of what an auditor has found since it was heard last: more than it can compute in a few rounds."""
MOST_CHANGES = 16
"""The newest, for those who have just come."""
_FINDING = struct.Struct(f">{TAG_BYTES}sIBBH")
_CHANGE = struct.Struct(f">{TAG_BYTES}sIB")
_FROM = struct.Struct(">I")
_ID_BYTES = 64
"""Of a peer id at most: it has 52."""
MOST_BYTES = (
    _HEAD.size + MOST_STRETCHES * _STRETCH.size + MOST_FINDINGS * _FINDING.size
    + MOST_CHANGES * _CHANGE.size + MOST_ACCUSED * (1 + _ID_BYTES + _FROM.size)
)  # fmt: skip
_SIZES = _STRETCH.size, _FINDING.size, _CHANGE.size
NOT_YET = 0xFFFFFFFF
"""From which round on an accused peer does not count, as long as no settled set has said so."""
NOTHING_BEFORE = bytes(NAME_BYTES)
WHOLLY_ALIKE = 1000
"""Likeness is in thousandths."""


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


class Word(IntEnum):
    """What an auditor found of a window of somebody's work. That somebody lied is no word but a proof."""

    AGREES = 0
    UNANSWERED = 1
    ALIKE = 2
    """Done with other numbers than this auditor has: how alike it is to what comes out here."""


@dataclass(frozen=True, slots=True)
class Found:
    peer: bytes
    """`tag_of` it."""
    round: int
    """The last of the window."""
    rounds: int
    """That it contributed to in the window."""
    word: Word
    likeness: int = 0
    """Of ALIKE: as `Finding` has it (verdict.py), no less than 0."""


class Kind(IntEnum):
    """What a peer's standing is (standing.py)."""

    NONE = 0
    JUDGED = 1


@dataclass(frozen=True, slots=True)
class Change:
    """In somebody's standing, as settled sets have brought it about."""

    peer: bytes
    """`tag_of` it."""
    first: int
    """The round from which on it holds."""
    kind: Kind


@dataclass(frozen=True, slots=True)
class Commitment:
    round: int
    begun: int
    """The first round that this peer contributed to since it last began afresh: its window's beginning."""
    settings: bytes
    """`settings_of` what it read and computed with."""
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
    findings: tuple[Found, ...] = ()
    """Since a settled set held one of its contributions."""
    changes: tuple[Change, ...] = ()
    """The newest that it knows."""

    @property
    def name(self) -> bytes:
        return hashlib.sha256(self.written()).digest()[:NAME_BYTES]

    def written(self) -> bytes:
        counts = len(self.stretches), len(self.findings), len(self.changes), len(self.accused)
        head = _HEAD.pack(
            self.round, self.begun, self.settings, self.before, self.carried, self.payload, *counts
        )
        stretches = (
            _STRETCH.pack(each.settled, each.applied, each.sets, each.factor, each.first, each.count,
            each.published) for each in self.stretches
        )
        findings = (
            _FINDING.pack(each.peer, each.round, each.rounds, each.word, each.likeness)
            for each in self.findings
        )
        changes = (_CHANGE.pack(each.peer, each.first, each.kind) for each in self.changes)
        ids = ((each.peer.encode(), each.first) for each in self.accused)
        accused = (bytes([len(peer)]) + peer + _FROM.pack(first) for peer, first in ids)
        return b"".join((head, *stretches, *findings, *changes, *accused))

    @staticmethod
    def read(data: bytes | memoryview) -> Commitment:
        """Raises CommitmentError."""
        data = bytes(data)
        if len(data) < _HEAD.size:
            raise CommitmentError(f"a commitment of {len(data)} bytes")
        round, begun, settings, before, carried, payload, *counts, accused = _HEAD.unpack_from(data)
        ends = list(accumulate(map(mul, counts, _SIZES), initial=_HEAD.size))
        most = MOST_STRETCHES, MOST_FINDINGS, MOST_CHANGES, MOST_ACCUSED
        if len(data) < ends[-1] or any(map(gt, (*counts, accused), most)):
            raise CommitmentError(f"a commitment of {len(data)} bytes with {counts[0]} stretches")
        stretched, said, changed = (data[start:end] for start, end in pairwise(ends))
        stretches = tuple(
            Stretch(settled, applied, sets, factor, first, microbatches, bool(published))
            for settled, applied, sets, factor, first, microbatches, published in _STRETCH.iter_unpack(
                stretched
            )
        )
        found = Commitment(
            round, begun, settings, before, carried, payload, stretches,
            _accused(data[ends[-1] :], accused), _findings(said), _changes(changed),
        )  # fmt: skip
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


def _findings(data: bytes) -> tuple[Found, ...]:
    try:
        read = _FINDING.iter_unpack(data)
        found = tuple(Found(peer, last, rounds, Word(word), like) for peer, last, rounds, word, like in read)
    except ValueError as error:
        raise CommitmentError(f"a finding that nobody makes: {error}") from None
    if any(each.likeness > (WHOLLY_ALIKE if each.word is Word.ALIKE else 0) for each in found):
        raise CommitmentError("something is more alike than the same, or was not compared")
    return found


def _changes(data: bytes) -> tuple[Change, ...]:
    try:
        return tuple(Change(peer, first, Kind(kind)) for peer, first, kind in _CHANGE.iter_unpack(data))
    except ValueError as error:
        raise CommitmentError(f"a standing that nobody has: {error}") from None


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


def settings_of(text: bytes, *said: object) -> bytes:
    """A short name of all that may decide a bit of a result: the text, versions, kind of device, numbers,
    threads."""
    numbers = hashlib.sha256("\n".join(map(str, said)).encode()).digest()
    return hashlib.sha256(text).digest()[:TEXT_BYTES] + numbers[: SETTINGS_BYTES - TEXT_BYTES]


def read_alike(ones: bytes, others: bytes) -> bool:
    """Whether both settings are with the same text: who has another one can judge nothing."""
    return ones[:TEXT_BYTES] == others[:TEXT_BYTES]
