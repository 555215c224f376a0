"""Which peer trains which group of experts, as the sets of contributions show it (`expert_steps.py`)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from swarmnet.identifiers import PeerId, RunId

BALANCE_ROUNDS = 4
"""Rounds between two switches of a stage's peers. After this time the sets show the effect of the switch
before."""
ROUNDS_COUNTED = 2
"""Newest rounds from which trainers are counted. In a round of few tokens some peers have nothing to
contribute."""
ROUNDS_REMEMBERED = 8
"""Settled rounds for which assignments are remembered."""


@dataclass(frozen=True, slots=True)
class ExpertAssignment:
    """The current assignment of expert groups. Immutable, so any thread may read it."""

    group: int
    """The group that this peer trains."""
    holders: tuple[int, ...]
    """Number of trainers of each group, in the newest two applied rounds."""
    trained: tuple[int, ...]
    """Newest settled round in which each group was trained; -1 if this peer has seen none settle."""
    stale_rounds: tuple[int, ...]
    """Number of rounds that settled since each group was last trained, or since this peer joined."""


class GroupTrainers:
    """The trainers of each group of a stage."""

    def __init__(self, run_id: RunId, groups: int) -> None:
        self._run_id = run_id
        self._groups = range(groups)
        self.applied_round = -1
        self._assignments: dict[int, dict[PeerId, Mapping[str, int]]] = {}
        """Maps a recent round to its contributors, and each of them to the groups that its payload names."""
        self._trained: dict[int, int] = {}
        """Maps a group to the newest settled round with a contribution to its experts."""
        self._seen = range(0)
        """Rounds that this peer has seen settle."""

    def record(self, round: int, contributor: PeerId, held: Mapping[str, int] | None) -> None:
        """Record which groups a contributor's payload for `round` names; None removes the record."""
        of_round = self._assignments.setdefault(round, {})
        of_round.pop(contributor, None)
        if held is not None:
            of_round[contributor] = held

    def settled(self, round: int) -> None:
        """Update the times of training after `round` settled, and forget old assignments."""
        self._seen = range(self._seen.start if self._seen else round, round + 1)
        self._trained |= dict.fromkeys(self.groups_in(round).values(), round)
        for old in [old for old in self._assignments if old < round - ROUNDS_REMEMBERED]:
            del self._assignments[old]

    def assignment(self, group: int) -> ExpertAssignment:
        """Return the current assignment, if this peer trains `group`."""
        trained = tuple(self._trained.get(group, -1) for group in self._groups)
        stale = tuple(self._seen.stop - 1 - max(self._seen.start - 1, newest) for newest in trained)
        return ExpertAssignment(group, tuple(self.counts()), trained, stale)

    @property
    def is_known(self) -> bool:
        """Whether the newest applied round shows the current assignment. It must be at most one round older
        than the newest round with known contributions."""
        newest_known = max((round for round, held in self._assignments.items() if held), default=None)
        is_current = newest_known is not None and self.applied_round + 1 >= newest_known
        return is_current and bool(self._newest(ROUNDS_COUNTED))

    def counts(self) -> list[int]:
        """Return the number of trainers of each group in the newest applied rounds."""
        counts = Counter(self._newest(ROUNDS_COUNTED).values())
        return [counts[group] for group in self._groups]

    def switch(self, round: int, group: int, name: str) -> int | None:
        """Return the group with the fewest trainers if it is the turn of the peer `name`, which trains
        `group`, to switch to it; else None."""
        # A trainer of the fullest group may have contributed nothing in the newest two rounds.
        newest, holders = self._newest(BALANCE_ROUNDS), self.counts()
        counts = Counter(newest.values())
        fullest, emptiest = max(self._groups, key=counts.__getitem__), holders.index(min(holders))
        candidates = [name for name, held in newest.items() if held == fullest]
        if (
            round % BALANCE_ROUNDS
            or counts[fullest] - holders[emptiest] < 2
            or group != fullest
            or name != min(candidates, key=lambda name: self.drawn(round, name))
        ):
            return None
        return emptiest

    def groups_in(self, round: int) -> dict[str, int]:
        """Return the group of each peer name in one round."""
        of_round = sorted(self._assignments.get(round, {}).items())
        return {name: group for _, held in of_round for name, group in held.items()}

    def drawn(self, round: int, name: str) -> bytes:
        """Return pseudo-random bytes that depend on the run, a round and a peer name."""
        return hashlib.sha256(f"{self._run_id}\nexperts\n{round}\n{name}".encode()).digest()

    def _newest(self, rounds: int) -> dict[str, int]:
        """Return the group of each peer name in the newest `rounds` applied rounds."""
        applied = sorted(
            round for round, held in self._assignments.items() if held and round <= self.applied_round
        )
        return {name: group for round in applied[-rounds:] for name, group in self.groups_in(round).items()}
