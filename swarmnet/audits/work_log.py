"""What one peer writes down of its own work while it computes, so that it can commit to it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from swarmnet.audits.commitment import (
    MOST_MICROBATCHES,
    MOST_STRETCHES,
    NOTHING_BEFORE,
    SETS_BYTES,
    Accused,
    Change,
    Commitment,
    Found,
    Stretch,
    digest_of,
)
from swarmnet.audits.windows import ends_window
from swarmnet.identifiers import PeerId


class SetNames:
    """Which contributions rounds hold, in a few bytes. Weights are the same where these are the same of all
    rounds that were open, and the history before is one: a peer that was parted from the others is no
    liar."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[PeerId, bytes]] = {}
        self._chains: dict[int, bytes] = {}

    def add(self, round: int, peer: PeerId, payload: bytes) -> None:
        self.name(round, peer, hashlib.sha256(payload).digest())

    def name(self, round: int, peer: PeerId, digest: bytes) -> None:
        """SHA-256 of a contribution, where that is known."""
        self._rounds.setdefault(round, {})[peer] = digest

    def settled(self, round: int, chain: bytes) -> None:
        """With this value of the chain of all sets (rounds/history.py)."""
        self._chains[round] = chain

    def remove(self, round: int, peer: PeerId) -> None:
        del self._rounds[round][peer]

    def between(self, settled: int, applied: int) -> bytes:
        """Of those that were applied and not settled."""
        digest = hashlib.sha256(self._chains.get(settled, b""))
        for round in range(settled + 1, applied + 1):
            names = sorted(self._rounds.get(round, {}).values())
            digest.update(len(names).to_bytes(4, "big") + b"".join(names))
        return digest.digest()[:SETS_BYTES]

    def forget_until(self, round: int) -> None:
        for old in [each for each in self._rounds if each <= round]:
            del self._rounds[old]
        for old in [each for each in self._chains if each < round]:
            del self._chains[old]


class WorkLog:
    """Touched by whoever computes alone."""

    def __init__(self, settings: bytes, peer: PeerId, every: int, since: int = 0) -> None:
        """`settings`: of this peer's computing; `every`: sync.afresh_rounds; `since`: microbatches with
        smaller counters began at weights that this log does not know."""
        self.settings, self._peer, self._every, self._since = settings, peer, every, since
        self.sets = SetNames()
        self.carried = b""
        """Into this window."""
        self.accused: tuple[Accused, ...] = ()
        """That the next commitment names. Set by whoever audits, as what follows."""
        self.findings: tuple[Found, ...] = ()
        self.changes: tuple[Change, ...] = ()
        self._begun: int | None = None
        self.before = NOTHING_BEFORE
        """The name of the newest commitment, unless all that rests on it was dropped."""
        self._stretches: list[Stretch] = []
        self._microbatches = 0
        """In these."""
        self._at = (-1, -1, bytes(SETS_BYTES))
        self.is_published = False
        """Since the newest microbatch."""

    def published(self, settled: int, applied: int) -> None:
        """It computes with the group's weights after these rounds, as it has them, from now on."""
        self._at = (settled, applied, self.sets.between(settled, applied))
        self.is_published = True

    def takes(self, counter: int) -> bool:
        """Whether a microbatch can be committed to; if not, nothing can be that rests on it."""
        has_room = len(self._stretches) < MOST_STRETCHES and self._microbatches < MOST_MICROBATCHES
        return counter >= self._since and has_room

    def computed(self, counter: int, factor: int) -> None:
        """A microbatch is in the gradient, or cannot be (its loss is not finite): whoever does it again finds
        out. Its step, if it comes to one, has that factor."""
        self._microbatches += 1
        if self._stretches and not self.is_published:
            last = self._stretches[-1]
            if (last.factor, last.first + last.count) == (factor, counter):
                self._stretches[-1] = replace(last, count=last.count + 1)
                return
        self._stretches.append(Stretch(*self._at, factor, counter, 1, self.is_published))
        self.is_published = False

    def told(self, round: int, payload: bytes) -> Commitment:
        """What is to be signed of everything since it last told."""
        self._begun = round if self._begun is None else self._begun
        stretches, self._stretches, self._microbatches = tuple(self._stretches), [], 0
        told, carried = hashlib.sha256(payload).digest(), digest_of(self.carried)
        commitment = Commitment(
            round, self._begun, self.settings, self.before, carried, told, stretches, self.accused,
            self.findings, self.changes,
        )  # fmt: skip
        self.before = commitment.name
        return commitment

    def ends_window(self, round: int) -> bool:
        """Whether it begins afresh after that round."""
        return ends_window(round, self._peer, self._every)

    def is_in_window(self, round: int) -> bool:
        """Whether what it told in that round follows from the beginning of this window."""
        return self._begun is not None and round >= self._begun

    def begins_afresh(self, carried: bytes) -> None:
        """With this, and publishes then. With nothing: it is as if it had only come."""
        self._begun, self._stretches, self._microbatches, self.carried = None, [], 0, carried
        if not carried:
            self.before = NOTHING_BEFORE
