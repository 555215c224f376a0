"""Compare the answers of several peers to one microbatch, and decide which peers to avoid.

A wrong tensor of usual size cannot be told from a right one. The sender of a microbatch keeps the answer that
came, and then sends a drawn share of its microbatches to a second peer of the same stage (`Comparison`). No
peer knows which of its answers will be compared, because the draw comes after the answer. The second peer
sends its hidden states to the same peer below as the first one, and gets the same gradient. The peer below
compares the hidden states, and the sender the gradients. Neither depends on what the stages below compute. If
two tensors differ, a third peer decides. `AnswerTrust` counts which peers differed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from random import Random
from typing import Literal

import torch
from torch import Tensor

from swarmnet.identifiers import PeerId

PEERS_ASKED = 4
"""Maximum number of peers that are asked to compute one microbatch again. Two answers are enough."""
DIFFERED, DIFFERED_OF = 2, 3
"""A peer is avoided if it differed in two of its newest three comparisons. A flipped bit happens once."""
MAX_ACCUSERS, OTHERS = 3, 4
"""Number of its newest four partners that must have differed from it, in a stage of five or more peers."""
AGREEMENTS = 16
"""Number of comparisons in a row that must agree until a peer that was avoided is trusted as before."""
MAX_PEERS = 4096
"""Number of peers that are remembered, the newest."""
MAX_SCALE = 100.0
"""Bound on the scale of limits, at which everything agrees."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """How alike two tensors are."""

    cosine: float
    ratio: float
    """Larger norm over the smaller one; at least 1."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How alike two tensors of honest peers are at least."""

    min_cosine: float
    max_ratio: float

    def at_step(self, multiple: float) -> Limits:
        """Return the limits where a round changes weights `multiple` times as far: peers are about a round
        apart. One minus a cosine is about half the angle's square, so it grows as the square. Smaller steps
        do not make limits stricter."""
        scale = min(MAX_SCALE, max(1.0, multiple))
        return Limits(1.0 - scale**2 * (1.0 - self.min_cosine), self.max_ratio**scale)

    def agree(self, likeness: Likeness) -> bool:
        """Return whether two tensors are as alike as those of honest peers; False for NaN."""
        return likeness.cosine >= self.min_cosine and likeness.ratio <= self.max_ratio


MEASURED_STEP = 8e-3
"""Root mean square by which a round changed weights where the following limits were measured: `demo-sign` at
twice the default learning rate."""
HIDDEN = Limits(min_cosine=0.95, max_ratio=1.25)
GRADIENT = Limits(min_cosine=0.8, max_ratio=1.5)
LOCAL_STEPS_GRADIENT = Limits(min_cosine=0.5, max_ratio=1.5)
"""Measured on honest peers (docs/benchmarks/attacks.md)."""


def likeness(first: Tensor, second: Tensor) -> Likeness:
    """Return how alike two float vectors of the same size are. A zero vector is only like another one."""
    norms = float(torch.linalg.vector_norm(first)), float(torch.linalg.vector_norm(second))
    if max(norms) == 0.0:
        return Likeness(cosine=1.0, ratio=1.0)
    if not min(norms) > 0.0:
        return Likeness(cosine=0.0, ratio=inf)
    # Each is divided first, because a product of norms may overflow.
    return Likeness(float(torch.dot(first / norms[0], second / norms[1])), max(norms) / min(norms))


def odd_one_out(peers: Collection[PeerId], agree: Callable[[PeerId, PeerId], bool]) -> PeerId | None:
    """Return the peer that agrees with no other one, while all others agree with each other. None if there
    are fewer than three peers, or no such peer."""
    for peer in peers if len(peers) >= 3 else ():
        others = [other for other in peers if other != peer]
        if not any(agree(peer, other) for other in others):
            return peer if all(agree(one, other) for one, other in combinations(others, 2)) else None
    return None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome of a comparison. undecided: answers differ, and no majority agrees. unanswered: no second
    peer could compute the microbatch again."""

    verdict: Literal["agreed", "differed", "undecided", "unanswered"]
    agreed: tuple[PeerId, ...] = ()
    """Peers whose answers agreed."""
    odd: PeerId | None = None
    """The peer at fault."""
    accusers: tuple[PeerId, ...] = ()
    """The peers that differ from it."""


@dataclass(slots=True)
class Comparison:
    """One microbatch whose answer is compared, at its sender."""

    first: PeerId
    """The peer whose answer counts."""
    via: PeerId | None
    """The peer below from which `first` has the gradient; None if `first` is on the last stage."""
    digests: dict[PeerId, bytes]
    """Maps each peer that answered to the digest of the gradient that it got from `via`."""
    limits: Limits
    deadline: float = inf
    asked: PeerId | None = None
    """The peer whose answer is awaited."""
    tried: list[PeerId] = field(default_factory=list)
    unknown: int = 0
    """Number of peers to which `via` said that it never had the microbatch."""
    hidden_differ: bool = False
    """Whether `via` has found that hidden states differ."""
    likenesses: dict[frozenset[PeerId], Likeness] = field(default_factory=dict)

    def ask(self, candidates: Collection[PeerId], chance: Random, deadline: float) -> PeerId | None:
        """Draw and return the next peer to ask; None if there is none."""
        left = [peer for peer in candidates if peer != self.first and peer not in self.tried]
        self.asked = chance.choice(left) if left and len(self.tried) < PEERS_ASKED else None
        if self.asked is not None:
            self.tried.append(self.asked)
            self.deadline = deadline
        return self.asked

    def agree(self, one: PeerId, other: PeerId) -> bool:
        """Return whether the gradients of two peers agree."""
        return self.limits.agree(self.likenesses[frozenset((one, other))])

    def judge(self, is_last: bool = False) -> Judgement | None:
        """Return the outcome; None if one more peer must answer. `is_last`: no more peers can. If `first` and
        `via` report different gradients, one of the two is at fault, and `via` is the only accuser."""
        peers = tuple(self.digests)
        by_via = Judgement("differed", (), self.first, (self.via,) if self.via is not None else ())
        if len(peers) == 1:
            if self.unknown >= 2:
                return by_via
            return Judgement("unanswered") if is_last else None
        do_agree = all(self.agree(one, other) for one, other in combinations(peers, 2))
        if do_agree and (not self.hidden_differ or len(peers) > 2 or is_last):
            return Judgement("agreed", peers)
        if len(peers) == 2:  # If hidden states differ, `via` needs a third peer to decide.
            return Judgement("undecided") if is_last else None
        odd = odd_one_out(peers, self.agree)
        others = tuple(peer for peer in peers if peer != odd)
        if odd is not None and {self.digests[odd]} == {self.digests[peer] for peer in others}:
            return Judgement("differed", others, odd, others)
        return by_via if odd == self.first else Judgement("undecided")


@dataclass(slots=True)
class _Record:
    """What is known about one peer's answers."""

    differed: deque[bool] = field(default_factory=lambda: deque(maxlen=DIFFERED_OF))
    """Whether it differed in its newest comparisons."""
    others: OrderedDict[PeerId, bool] = field(default_factory=OrderedDict)
    """Its newest partners, and whether it differed from them the last time."""
    on_probation: bool = False
    """Whether it was avoided, and has not earned its trust back."""
    agreements: int = 0
    """Number of comparisons in a row that agreed."""
    faults: int = 0
    """Number of comparisons in which it differed."""
    compared: int = 0
    """Number of comparisons in which it took part."""


class AnswerTrust:
    """Which peers' answers agree with those of others."""

    def __init__(self) -> None:
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()

    def agreed(self, peer: PeerId, others: Iterable[PeerId]) -> bool:
        """Record that a peer agreed with `others`. Returns whether it has earned its trust back now."""
        record = self._compared(peer, others, differed=False)
        record.agreements += 1
        if not record.on_probation or record.agreements < AGREEMENTS:
            return False
        record.on_probation = False
        return True

    def differed(self, peer: PeerId, others: Iterable[PeerId], group: int) -> bool:
        """Record that a peer differed from `others`. Returns whether it must be avoided now. `group` is the
        size of its stage. More accusers are needed in a larger stage, so that two that conspire do not
        suffice. On probation one comparison is enough."""
        record = self._compared(peer, others, differed=True)
        record.agreements = 0
        is_repeated = record.on_probation or sum(record.differed) >= DIFFERED
        accusers = sum(record.others.values())
        if not is_repeated or accusers < min(MAX_ACCUSERS, max(2, 1 + (group - 1) // 2)):
            return False
        record.on_probation = True
        record.differed.clear()
        return True

    def verdicts(self, limit: int) -> tuple[tuple[PeerId, int, int], ...]:
        """Return at most `limit` peers that were avoided and have not earned their trust back, the newest
        first, each with the number of comparisons in which it differed, and of all its comparisons."""
        doubted = [(peer, one) for peer, one in reversed(self._records.items()) if one.on_probation]
        return tuple((peer, one.faults, one.compared) for peer, one in doubted[:limit])

    def _compared(self, peer: PeerId, others: Iterable[PeerId], differed: bool) -> _Record:
        record = self._records.setdefault(peer, _Record())
        self._records.move_to_end(peer)
        if len(self._records) > MAX_PEERS:
            self._records.popitem(last=False)
        record.differed.append(differed)
        record.faults += differed
        record.compared += 1
        for other in others:
            if other != peer:
                record.others[other] = differed
                record.others.move_to_end(other)
        while len(record.others) > OTHERS:
            record.others.popitem(last=False)
        return record
