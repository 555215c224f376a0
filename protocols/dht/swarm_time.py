"""Estimate the swarm's time from other peers' clocks, and correct this machine's clock by minutes at most.

A peer that lies about the time could make invites expire and make valid records look outdated. Therefore only
peers that the user named and linked peers are asked, and each address range has one vote. An offset is how
many seconds another clock is ahead of this machine's. Offsets of more than `MAX_OFFSET_SECONDS` are ignored:
either the peers lie, or this clock is wrong and a person must set it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protocols.signed.records import SKEW_SECONDS

MAX_OFFSET_SECONDS = 300.0
"""Maximum correction, as in Kerberos (RFC 4120). Clocks that are never set drift by seconds a day (quartz: 20
parts in a million are 1.7 s). Larger errors are hours or days: an empty battery, or a wrong time zone."""
SET_IT = "Set the clock (sudo timedatectl set-ntp true)"


@dataclass(frozen=True, slots=True)
class ClockVote:
    """The combined clock reports of other peers: seconds that their time is ahead of this machine's clock."""

    offset: float | None
    """Median of the plausible offsets; None if there are none."""
    implausible_offset: float | None
    """Median of the offsets that are too large to be believed; None if there are none."""
    voices: int
    """Number of address ranges that voted."""

    @property
    def refusal(self) -> str:
        """The message for the user if all offsets are too large to correct this machine's clock; empty if
        one is plausible, or if none was reported."""
        if self.offset is not None or self.implausible_offset is None:
            return ""
        return (
            f"this machine's clock is {_difference(self.implausible_offset)} that of all who were asked (in "
            f"{self.voices} networks): more than the {MAX_OFFSET_SECONDS:.0f} s that a peer corrects by "
            f"itself, and others refuse what it signs. {SET_IT}; if it is right, those who were asked are "
            "wrong: name other bootstraps"
        )


def agreed_offset(offsets: Mapping[str, float], ranges: Mapping[str, str]) -> ClockVote:
    """Combine the offsets that peers reported into one. `ranges` maps each peer to its address range; peers
    without a known range are ignored. Each range votes with the median of its peers' offsets."""
    per_range: dict[str, list[float]] = {}
    for peer, offset in offsets.items():
        if ranges.get(peer):
            per_range.setdefault(ranges[peer], []).append(offset)
    votes = [middle(range_offsets) for range_offsets in per_range.values()]
    plausible = [vote for vote in votes if abs(vote) <= MAX_OFFSET_SECONDS]
    implausible = [vote for vote in votes if abs(vote) > MAX_OFFSET_SECONDS]
    return ClockVote(
        offset=middle(plausible) if plausible else None,
        implausible_offset=middle(implausible) if implausible else None,
        voices=len(votes),
    )


def middle(offsets: Iterable[float]) -> float:
    """Return the median. With an even count, it is the one of the two middle values that is nearer to 0."""
    ordered = sorted(offsets)
    return min(ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2], key=abs)


def correction(offset: float) -> float:
    """Return the seconds to add to this machine's clock: the offset, or 0 if peers accept records anyway."""
    return offset if abs(offset) > SKEW_SECONDS else 0.0


def changed(offset: float) -> str:
    """Return the message for the user when the correction has changed to that of `offset`."""
    if correction(offset) == 0.0:
        return "this machine's clock agrees with the swarm's again"
    difference = _difference(offset)
    return f"this machine's clock is {difference} the swarm's; records use the swarm's time. {SET_IT}"


def _difference(offset: float) -> str:
    return f"{abs(offset):.0f} s {'behind' if offset > 0 else 'ahead of'}"
