"""What one peer writes down of its own work while it computes, so that it can commit to it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from swarmnet.audits.commitment import SETS_BYTES, Commitment, Stretch, digest_of
from swarmnet.audits.windows import ends_window
from swarmnet.identifiers import PeerId


class SetNames:
    """Which contributions rounds hold, in a few bytes. Weights are the same where these are the same of all
    rounds that were open, for what has settled is the same everywhere."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[PeerId, bytes]] = {}

    def add(self, round: int, peer: PeerId, payload: bytes) -> None:
        self._rounds.setdefault(round, {})[peer] = hashlib.sha256(payload).digest()

    def remove(self, round: int, peer: PeerId) -> None:
        del self._rounds[round][peer]

    def between(self, settled: int, applied: int) -> bytes:
        """Of those that were applied and not settled."""
        digest = hashlib.sha256()
        for round in range(settled + 1, applied + 1):
            names = sorted(self._rounds.get(round, {}).values())
            digest.update(len(names).to_bytes(4, "big") + b"".join(names))
        return digest.digest()[:SETS_BYTES]

    def forget_until(self, round: int) -> None:
        for old in [each for each in self._rounds if each <= round]:
            del self._rounds[old]


class WorkLog:
    """Touched by whoever computes alone."""

    def __init__(self, settings: bytes, peer: PeerId, every: int) -> None:
        """`settings`: of this peer's computing; `every`: sync.afresh_rounds; `window`: of the run's
        rounds."""
        self._settings, self._peer, self._every = settings, peer, every
        self.sets = SetNames()
        self.carried = b""
        """Into this window."""
        self._begun: int | None = None
        self._stretches: list[Stretch] = []
        self._at = (-1, -1, bytes(SETS_BYTES))
        self._published = False

    def published(self, settled: int, applied: int) -> None:
        """It computes with the group's weights after these rounds, as it has them, from now on."""
        self._at = (settled, applied, self.sets.between(settled, applied))
        self._published = True

    def computed(self, counter: int, factor: int) -> None:
        """A microbatch is in the gradient; its step, if it comes to one, has that factor."""
        if self._stretches and not self._published:
            last = self._stretches[-1]
            if (last.factor, last.first + last.count) == (factor, counter):
                self._stretches[-1] = replace(last, count=last.count + 1)
                return
        self._stretches.append(Stretch(*self._at, factor, counter, 1, self._published))
        self._published = False

    def told(self, round: int, payload: bytes) -> Commitment:
        """What is to be signed of everything since it last told."""
        self._begun = round if self._begun is None else self._begun
        stretches, self._stretches = tuple(self._stretches), []
        told, carried = hashlib.sha256(payload).digest(), digest_of(self.carried)
        return Commitment(round, self._begun, self._settings, carried, told, stretches)

    def ends_window(self, round: int) -> bool:
        """Whether it begins afresh after that round."""
        return ends_window(round, self._peer, self._every)

    def is_in_window(self, round: int) -> bool:
        """Whether what it told in that round follows from the beginning of this window."""
        return self._begun is not None and round >= self._begun

    def begins_afresh(self, carried: bytes) -> None:
        """With this, and publishes then."""
        self._begun, self._stretches, self.carried = None, [], carried
