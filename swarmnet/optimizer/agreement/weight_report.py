"""What the votes of a stage's contributors weigh, as a few of its peers report it in their records.

Weights are equal on all peers of a stage, so few reports suffice. Reports on the same round that differ show
a fork or a false report.

    round u32 | for each contributor: first 60 bits of its tag, as 8 bytes | weight or `NEWCOMER` u8
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmnet.identifiers import PeerId

REPORT_INTERVAL = 8
"""Rounds between two reports. Records are minutes old, so most of them report on the same round only if
these are few."""
RECENT_ROUNDS = 64
"""Contributors whose last contribution is older are not reported."""
MAX_REPORTED = 96
"""Maximum number of contributors in a report, the lowest weights first."""
FULL_WEIGHT = 15
"""Weight of a vote that counts in full. Sums of 2,184 such votes fit into int16; weights in thousandths would
need int32 sums, and longer results of reducers."""
NEWCOMER = 31
"""In the place of a weight: the contributor is not known yet."""
REPORTERS = 8
"""Number of peers of a large stage that report, on average. In a small one, all do."""
_ROUND = struct.Struct(">I")
_ROW = struct.Struct(">8sB")
REPORT_BYTES = _ROUND.size + MAX_REPORTED * _ROW.size
"""Maximum size of a report."""


@dataclass(frozen=True, slots=True)
class WeightReport:
    """The weights after a settled round."""

    round: int
    marks: Mapping[bytes, int]
    """Short name of each contributor (`short_tag`) -> its weight, or `NEWCOMER`. Empty if all count in full,
    because too few are known."""
    is_complete: bool
    """Whether no contributor was left out for lack of space."""


def short_tag(key: Sequence[int]) -> bytes:
    """Return the 8 bytes that name a contributor in reports. `key`: its tag as `tag_key` returns it."""
    return (key[0] << 30 | key[1]).to_bytes(8, "big")


def encode_report(round: int, marks: Iterable[tuple[bytes, int]]) -> bytes:
    """Return the report on the weights after a round. `marks` are pairs of `short_tag` and weight."""
    rows = sorted((mark, tag) for tag, mark in marks)[:MAX_REPORTED]
    return _ROUND.pack(round) + b"".join(_ROW.pack(tag, mark) for mark, tag in rows)


def open_report(data: bytes) -> WeightReport | None:
    """Return the report in a record; None if there is none, or bytes that are no report."""
    rows = memoryview(data)[_ROUND.size :]
    if len(data) < _ROUND.size or len(rows) % _ROW.size:
        return None
    (round,) = _ROUND.unpack_from(data)
    marks = dict(_ROW.iter_unpack(rows))
    return WeightReport(round, marks, len(marks) < MAX_REPORTED)


def is_reporter(peer: PeerId, group: int) -> bool:
    """Return whether a peer of a stage with `group` peers reports, so that about `REPORTERS` do."""
    draw = int.from_bytes(hashlib.sha256(b"reports weights" + peer.encode()).digest()[:8], "big")
    return draw * group < REPORTERS << 64
