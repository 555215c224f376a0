"""The agreement ledger: how far each contributor agreed with the others so far, and what its votes weigh.

The ledger is a function of the settled sets. It is a part of the settled state (`model/state_layout.py`), so
the state's digest covers it, snapshots and checkpoints contain it, and a peer that gives up its branch
replaces it with the state.

A round is weighed by the ledger as it was `LAG` rounds before. By the time a round is applied, that one has
usually settled. If not, the newest weights stand in for it. They are exact before the round settles, because
rounds settle in order.

    row of a contributor: tag 4 | standing | shared | rounds | last round | newest weights 2        (int32)

Shapes: E rows of the ledger, F fields of a row, C contributors of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from swarmnet.model.state_layout import LEDGER_FIELDS, LEDGER_ROWS
from swarmnet.optimizer.agreement.comparison import (
    RATIO,
    Integers,
    RoundAgreement,
    base_weights,
    compare,
)
from swarmnet.optimizer.agreement.weight_report import (
    FULL_WEIGHT,
    NEWCOMER,
    RECENT_ROUNDS,
    REPORT_INTERVAL,
    encode_report,
    short_tag,
)
from swarmnet.rounds.open_round import MIN_CONTRIBUTORS, Votes
from swarmnet.rounds.result_table import tag_key

LAG = 6
"""A round is weighed by the ledger after the round this many before it. Rounds up to `rounds.window` + 1
before it have mostly settled when it is applied."""
PROBATION_ROUNDS = 4
"""Rounds until a newcomer's votes count, while others are known."""
MAX_ROUNDS = 1 << 20
"""Rounds of a contributor are counted up to this number."""
FALL_BITS, RISE_BITS = 2, 3
"""A standing moves by 1/4 of the difference down, and by 1/8 of it up: trust is lost faster than earned."""
SHARED_BITS = 4
"""Fraction bits of the number of peers that share a vote."""
FORGET_SHARED_BITS = 3
"""A vote that was shared once is shared less by 1/8 each round."""
HISTORY = 12
"""Rounds after which weights are remembered. Reducers weigh by any of them, as far as they have settled."""
WEIGHT_BITS = 5
"""Bits of a weight or `NEWCOMER`."""
NOTHING_KNOWN = (1 << HISTORY * WEIGHT_BITS) - 1
TAG = slice(0, 4)
STANDING, SHARED, ROUNDS, LAST_ROUND, WEIGHTS = range(4, 9)
FIELDS = 9
"""Fields of a row here. In the state, weights take two."""
HALF_BITS = 30
HALF = (1 << HALF_BITS) - 1


@runtime_checkable
class KeepsLedger(Protocol):
    """A method whose rounds may be weighed by agreement."""

    @property
    def ledger(self) -> AgreementLedger | None:
        """The ledger; None if all votes count in full. The replica loads it from the settled state, and
        records each settled round."""


@runtime_checkable
class Weighable(Protocol):
    """The contributions of one round of such a method."""

    def weigh(self, ahead: int) -> bool:
        """Weigh the contributors by the ledger. The round is `ahead` rounds after the newest settled one.
        Returns whether the round's step has changed since they were last weighed."""


class AgreementLedger:
    """The rows of the contributors to the settled rounds, sorted by tag."""

    def __init__(self, *, is_private: bool = False) -> None:
        """Begin without any contributor. `is_private`: whether each peer trains on its own text."""
        self.is_private = is_private
        self.report = b""
        """The newest report on the weights; empty before the first. Other threads may read it."""
        self.votes: Votes = {}
        """Whether the votes of each known contributor have weight after the newest settled round. It is
        replaced, never changed: other threads may read it."""
        self._rows_EF = np.zeros((0, FIELDS), np.int64)
        self._index_rows()

    def load(self, numbers: NDArray[np.int32]) -> None:
        """Read `LEDGER_ROWS` rows, of which unused ones are zero: int32 [size]. They replace all others."""
        rows_EF = numbers.reshape(LEDGER_ROWS, LEDGER_FIELDS).astype(np.int64)
        rows_EF[:, WEIGHTS] &= HALF
        rows_EF[:, WEIGHTS] |= (rows_EF[:, WEIGHTS + 1] & HALF) << HALF_BITS
        self._rows_EF = rows_EF[rows_EF[:, TAG].any(1), :FIELDS]
        self._index_rows()
        self._list_votes()

    def numbers(self) -> NDArray[np.int32]:
        """Return the ledger as int32 [size]."""
        numbers_EF = np.zeros((LEDGER_ROWS, LEDGER_FIELDS), np.int32)
        used_EF = numbers_EF[: len(self._rows_EF)]
        used_EF[:, :WEIGHTS] = self._rows_EF[:, :WEIGHTS]
        used_EF[:, WEIGHTS] = self._rows_EF[:, WEIGHTS] & HALF
        used_EF[:, WEIGHTS + 1] = self._rows_EF[:, WEIGHTS] >> HALF_BITS
        return numbers_EF.reshape(-1)

    def compare(self, tags: Sequence[bytes], signs_CN: NDArray[np.int8]) -> RoundAgreement | None:
        """Compare the contributors of a round by their votes, +1 or -1, and by their weights so far."""
        rows_CF = self._rows(tags)
        bases_C = base_weights(rows_CF[:, STANDING])
        return compare(signs_CN, bases_C, _are_known(rows_CF), is_private=self.is_private)

    def record(self, round: int, tags: Sequence[bytes], found: RoundAgreement | None) -> None:
        """Add a settled round, the next one. `found`: what its votes say of its contributors."""
        if found is not None:
            rows_CF = self._rows(tags)
            _update(rows_CF, round, found.ratios, found.shared)
            self._put(tags, rows_CF)
        rows_EF = self._rows_EF
        shared_E = np.maximum(rows_EF[:, SHARED], FULL_WEIGHT << SHARED_BITS)
        base_E = base_weights(rows_EF[:, STANDING]) * (FULL_WEIGHT << SHARED_BITS)
        weights_E = np.where(_are_known(rows_EF), (2 * base_E + shared_E) // (2 * shared_E), NEWCOMER)
        rows_EF[:, WEIGHTS] = (rows_EF[:, WEIGHTS] << WEIGHT_BITS | weights_E) & NOTHING_KNOWN
        self._list_votes()
        if (round + 1) % REPORT_INTERVAL == 0:
            recent_RF = rows_EF[rows_EF[:, LAST_ROUND] > round - RECENT_ROUNDS]
            marks = (recent_RF[:, WEIGHTS] & NEWCOMER).tolist()
            names = map(short_tag, recent_RF[:, TAG].tolist())
            self.report = encode_report(round, () if _say_nothing(marks) else zip(names, marks, strict=True))

    def weights(self, ahead: int, tags: Sequence[bytes]) -> list[int]:
        """Return the weight of each contributor, 0 to `FULL_WEIGHT`, in the round that is `ahead` rounds
        after the newest settled one. They are final up to `LAG` rounds ahead."""
        return counted(self.marks(max(0, LAG - ahead), tags))

    def marks(self, age: int, tags: Sequence[bytes]) -> list[int]:
        """Return the weight of each contributor, or `NEWCOMER`, as it was `age` rounds before the newest
        settled one. All count in full if fewer than `MIN_CONTRIBUTORS` are known, or if none of these has
        any weight."""
        shift = WEIGHT_BITS * age
        places = [self._places.get(tag_key(tag)) for tag in tags]
        found = [
            NEWCOMER if place is None else int(self._rows_EF[place, WEIGHTS]) >> shift & NEWCOMER
            for place in places
        ]
        return _usable(found)

    def _rows(self, tags: Sequence[bytes]) -> Integers:
        """Return copies of the contributors' rows, new ones where they have none: [C, F]."""
        rows_CF = np.zeros((len(tags), FIELDS), np.int64)
        for row_F, key in zip(rows_CF, map(tag_key, tags), strict=True):
            place = self._places.get(key)
            new = (*key, 0, FULL_WEIGHT << SHARED_BITS, 0, 0, NOTHING_KNOWN)
            row_F[:] = new if place is None else self._rows_EF[place]
        return rows_CF

    def _put(self, tags: Sequence[bytes], rows_CF: Integers) -> None:
        """Replace the rows of these contributors or insert them. If there are more rows than the ledger
        holds, those that contributed longest ago are dropped, and of these the newest contributors."""
        replaced = [self._places[key] for key in map(tag_key, tags) if key in self._places]
        rows_EF = np.concatenate([np.delete(self._rows_EF, replaced, 0), rows_CF])
        ranks_E = np.lexsort((*rows_EF[:, TAG].T, -rows_EF[:, ROUNDS], -rows_EF[:, LAST_ROUND]))
        rows_EF = rows_EF[ranks_E[:LEDGER_ROWS]]
        self._rows_EF = rows_EF[np.lexsort(tuple(rows_EF[:, TAG].T[::-1]))]
        self._index_rows()

    def _index_rows(self) -> None:
        self._places = {tuple(tag): place for place, tag in enumerate(self._rows_EF[:, TAG].tolist())}

    def _list_votes(self) -> None:
        marks = zip(self._places, (self._rows_EF[:, WEIGHTS] & NEWCOMER).tolist(), strict=True)
        self.votes = {tag: mark > 0 for tag, mark in marks if mark != NEWCOMER}


def votes_of(method: object) -> Votes:
    """Return whose votes have weight in a method's newest settled state; empty if all votes count in full."""
    ledger = method.ledger if isinstance(method, KeepsLedger) else None
    return ledger.votes if ledger is not None else {}


def counted(marks: Sequence[int]) -> list[int]:
    """Return the weights that these marks stand for: newcomers do not count."""
    return [0 if mark == NEWCOMER else mark for mark in marks]


def _usable(marks: list[int]) -> list[int]:
    """Return the marks of a round's contributors as they are used (`AgreementLedger.marks`)."""
    if _say_nothing(marks):
        return [FULL_WEIGHT] * len(marks)
    return [mark if mark == NEWCOMER else min(mark, FULL_WEIGHT) for mark in marks]


def _say_nothing(marks: list[int]) -> bool:
    """Return whether too few contributors are known, or none of them has weight: then all count in full."""
    return sum(mark != NEWCOMER for mark in marks) < MIN_CONTRIBUTORS or not any(counted(marks))


def _are_known(rows_EF: Integers) -> NDArray[np.bool_]:
    return rows_EF[:, ROUNDS] >= PROBATION_ROUNDS


def _update(rows_CF: Integers, round: int, ratios_C: Integers, shared_C: Integers) -> None:
    """Update the rows of a round's contributors. The first rounds of a contributor are averaged."""
    rounds_C, standing_C = rows_CF[:, ROUNDS], rows_CF[:, STANDING]
    change_C = ratios_C - standing_C
    slow_C = np.where(change_C < 0, change_C >> FALL_BITS, change_C >> RISE_BITS)
    is_new_C = rounds_C < PROBATION_ROUNDS
    standing_C += np.where(is_new_C, change_C // (rounds_C + 1), slow_C)
    np.clip(standing_C, -RATIO, 2 * RATIO, out=standing_C)
    alone = FULL_WEIGHT << SHARED_BITS
    faded_C = rows_CF[:, SHARED] - (rows_CF[:, SHARED] - alone >> FORGET_SHARED_BITS)
    rows_CF[:, SHARED] = np.maximum(shared_C << SHARED_BITS, faded_C)
    rows_CF[:, ROUNDS] = np.minimum(rounds_C + 1, MAX_ROUNDS)
    rows_CF[:, LAST_ROUND] = round
