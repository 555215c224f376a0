"""What time it is in the swarm, as some peers say it: a correction of minutes, never more.

Whoever says what time it is can make invites expire, and records that were signed in time look like those of
another day. So only those are asked that a person has named and those to whom links stand, each address range
has one voice, and what differs from this machine's clock by more than MOST_OFFSET_SECONDS is not believed:
either they lie, or this clock is wrong and a person must set it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protocols.signed.records import SKEW_SECONDS

MOST_OFFSET_SECONDS = 300.0
"""As much as Kerberos allows (RFC 4120): clocks that nobody sets drift by seconds a day (quartz: 20 parts in
a million are 1.7 s). One that is wrong by more is wrong by hours or days: a battery, a time zone."""
SET_IT = "Set the clock (sudo timedatectl set-ntp true)"


@dataclass(frozen=True, slots=True)
class Told:
    """What others say, as seconds that their time is ahead of this machine's clock."""

    offset: float | None
    """In the middle of what is believed; None: nobody is."""
    unbelieved: float | None
    """In the middle of what is too far off to be believed; None: nothing is."""
    voices: int

    @property
    def refusal(self) -> str:
        """Why this machine's clock cannot be mended by what is told; empty if it can."""
        if self.offset is not None or self.unbelieved is None:
            return ""
        return (
            f"this machine's clock is {_difference(self.unbelieved)} that of all who were asked (in "
            f"{self.voices} networks): more than the {MOST_OFFSET_SECONDS:.0f} s that a peer corrects by "
            f"itself, and others refuse what it signs. {SET_IT}; if it is right, those who were asked are "
            "wrong: name other bootstraps"
        )


def told(offsets: Mapping[str, float], ranges: Mapping[str, str]) -> Told:
    """What the peers of `offsets` say together; those whose range is empty or not given have no voice."""
    voices: dict[str, list[float]] = {}
    for peer, offset in offsets.items():
        if ranges.get(peer):
            voices.setdefault(ranges[peer], []).append(offset)
    middles = [middle(each) for each in voices.values()]
    believed = [each for each in middles if abs(each) <= MOST_OFFSET_SECONDS]
    others = [each for each in middles if abs(each) > MOST_OFFSET_SECONDS]
    return Told(
        middle(believed) if believed else None, middle(others) if others else None, len(middles)
    )  # fmt: skip


def middle(offsets: Iterable[float]) -> float:
    """The median; of two in the middle the one nearer to this machine's clock."""
    ordered = sorted(offsets)
    return min(ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2], key=abs)


def correction(offset: float) -> float:
    """What this machine's clock is corrected by: nothing as long as its records are taken."""
    return offset if abs(offset) > SKEW_SECONDS else 0.0


def changed(offset: float) -> str:
    """What is said when another correction is made."""
    if correction(offset) == 0.0:
        return "this machine's clock agrees with the swarm's again"
    difference = _difference(offset)
    return f"this machine's clock is {difference} the swarm's; records use the swarm's time. {SET_IT}"


def _difference(offset: float) -> str:
    return f"{abs(offset):.0f} s {'behind' if offset > 0 else 'ahead of'}"
