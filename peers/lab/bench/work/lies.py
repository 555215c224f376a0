"""Ways to contribute something else than one's work, for the group of audits.py, where signs are told.

Each liar commits to what it contributes, and to microbatches as an honest peer would: nothing gives it away
but the work itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

import torch

from swarmnet.identifiers import PeerId
from swarmnet.optimizer.moved.bits import Signs
from swarmnet.optimizer.moved.code import LARGEST_EXPONENT
from swarmnet.optimizer.own_steps.local_steps import LocalSteps

FLIPPED = 0.04
"""Of the signs: a cosine of 1 - 2 * 0.04 = 0.92 is left, above the 0.9 that is enough elsewhere."""
WITHIN = 0.03
"""So much is missing of the likeness of what is told with what is honest: it is ENOUGH yet (standing.py), and
what is carried on, as it should be, makes up for what rounding takes."""
LOUDER_BY = 3
"""Powers of two."""
FIRST_LIE = 4
"""The round: a liar has something old to send by then."""
OLD_BY = 4
"""Rounds: the same part of the weights had its turn then, as a rule."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Of a liar that is about to contribute."""

    round: int
    honest: bytes
    """What it would tell, had it nothing to hide."""
    before: Mapping[int, bytes]
    """What it told in earlier rounds."""
    others: Mapping[PeerId, bytes]
    """What honest peers have told in this one."""
    method: LocalSteps

    @property
    def signs(self) -> Iterator[Signs]:
        """Of each plane, of the honest payload."""
        for moves in self.method.moves_of(self.honest):
            assert isinstance(moves, Signs), "where signs are told"
            yield moves

    def chance(self) -> torch.Generator:
        return torch.Generator().manual_seed(Random(self.honest[:64]).getrandbits(63))


@dataclass(frozen=True, slots=True)
class Lie:
    told: Callable[[Situation], bytes]
    work: float = 1.0
    """Share of the microbatches that are computed; one in a round at least, as who has none says nothing."""
    carries: Callable[[LocalSteps, bytes], bytes] | None = None
    """What it says that it carries from a window into the next, in place of what an honest peer does; all
    else follows from it."""

    def skips(self, step: int, steps: int) -> bool:
        """Whether the step-th microbatch of a round is said to be computed and is not."""
        return step >= max(1, round(steps * self.work))


def _noise(now: Situation) -> bytes:
    chance = now.chance()
    return b"".join(
        replace(signs, negative=torch.rand(signs.negative.shape, generator=chance) < 0.5).written()
        for signs in now.signs
    )


def _zero(now: Situation) -> bytes:
    """What it tells that has moved nothing: signs that a coin decides, of the smallest size."""
    chance = now.chance()
    return b"".join(
        Signs(
            torch.rand(signs.negative.shape, generator=chance) < 0.5, torch.zeros_like(signs.exponents)
        ).written()
        for signs in now.signs
    )


def _flipped(now: Situation) -> bytes:
    return b"".join(replace(signs, negative=~signs.negative).written() for signs in now.signs)


def _scaled(now: Situation) -> bytes:
    return b"".join(
        replace(signs, exponents=(signs.exponents + LOUDER_BY).clamp(max=LARGEST_EXPONENT)).written()
        for signs in now.signs
    )


def _nearly(now: Situation) -> bytes:
    chance = now.chance()
    return b"".join(
        replace(
            signs, negative=signs.negative ^ (torch.rand(signs.negative.shape, generator=chance) < FLIPPED)
        ).written()
        for signs in now.signs
    )


def _within(now: Situation) -> bytes:
    """Turns the largest, until as much is turned as goes unnoticed: each takes twice its square."""
    planes = list(now.signs)
    squares = torch.cat([(signs.units().double() ** 2).flatten() for signs in planes])
    largest = squares.sort(descending=True, stable=True)
    turned = torch.zeros_like(squares, dtype=torch.bool)
    turned[largest.indices[largest.values.cumsum(0) <= WITHIN / 2 * squares.sum()]] = True
    of_planes = torch.split(turned, [signs.negative.numel() for signs in planes])
    return b"".join(
        replace(signs, negative=signs.negative ^ those.view_as(signs.negative)).written()
        for signs, those in zip(planes, of_planes, strict=True)
    )


def _honest(now: Situation) -> bytes:
    return now.honest


def _against(method: LocalSteps, honest: bytes) -> bytes:
    """The opposite of what was moved and not told, and more of it."""
    told = []
    for moves in method.moves_in_all(honest):
        louder = (moves.exponents + LOUDER_BY).clamp(max=LARGEST_EXPONENT)
        told.append(Signs(~moves.negative, louder).written())
    return b"".join(told)


def _stale(now: Situation) -> bytes:
    return now.before[now.round - OLD_BY]


def _copied(now: Situation) -> bytes:
    return next(iter(now.others.values()))


LIES: Mapping[str, Lie] = {
    "noise": Lie(_noise, work=0.0),
    "zero": Lie(_zero, work=0.0),
    "stale": Lie(_stale, work=0.0),
    "copier": Lie(_copied, work=0.0),
    "sign-flip": Lie(_flipped),
    "scaled": Lie(_scaled),
    "lazy": Lie(_honest, work=0.5),
    "cosine-0.9": Lie(_nearly),
    "carrier": Lie(_honest, carries=_against),
    "within": Lie(_within),
}
