"""The weights of one stage on one peer, as a function of the rounds that were applied and settled.

    live = settled + the steps of the open rounds that were applied (+ what a peer moved by itself)

in integers, so a contribution that comes late corrects the live weights to exactly what they would have
been had it come in time, and settled weights depend on the sets of contributions alone. Open rounds are gone
through in their order each time, from what is settled: where the group has a momentum, a late contribution of
one round changes what the next ones do, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.experts.merging import ExpertMerging
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.method import Method, RoundAggregate
from swarmnet.optimizer.step import Step, add_step
from swarmnet.optimizer.tiling import all_tiles
from swarmnet.optimizer.vote_agreement import VoteAgreement
from swarmnet.run.rates import WHOLE

HASHED_NUMBERS = 1 << 22
"""That leave a GPU at once for the digest: 16 MiB of pinned memory, which it writes to by itself, instead of
a copy of all that is settled."""
NOT_HASHED = bytes(32)
"""In the place of a digest, after a round for which nobody needs one."""


class ReplicaError(RuntimeError):
    """Asked for what the order of rounds does not allow; the message says what is allowed."""


@dataclass(slots=True)
class _OpenRound:
    tally: RoundAggregate
    applied: Step | None = None
    """What the live weights hold of this round."""
    factor: int = WHOLE
    """Of its learning rate (run/rates.py)."""


class Replica:
    """Settled weights, open rounds and live weights of one stage."""

    def __init__(
        self, layout: Layout, method: Method, units: Tensor, settled_round: int = -1,
        frozen: Tensor | None = None, merging: ExpertMerging | None = None,
    ) -> None:  # fmt: skip
        """`units`: int32 [method.state.size], what was settled after `settled_round` (-1: the beginning).
        `frozen`: what lies behind that and never changes, int32, in the machine's memory; None: nothing.
        `merging`: what a settled round does to experts besides."""
        size = method.state.size
        if units.shape != (size,) or units.dtype != torch.int32:
            raise ReplicaError(f"weights are {units.dtype} {tuple(units.shape)}, not int32 ({size},)")
        self._layout, self._method, self._merging = layout, method, merging
        self._settled = units.clone()
        self._weights = self._settled[: layout.size]
        self._momentum = self._settled[layout.size :] if size > layout.size else None
        self._frozen = frozen if frozen is not None and len(frozen) else None
        self._open: dict[int, _OpenRound] = {}
        self.settled_round = settled_round
        self.applied_round = settled_round
        """The newest round in the live weights."""

    @property
    def size(self) -> int:
        """Weights, padding included."""
        return self._weights.numel()

    def add(self, round: int, peer: PeerId, payload: bytes) -> None:
        """Take in a contribution, before or after its round is applied. ContributionError if it is none."""
        open_round = self._opened(round)
        open_round.tally.add(peer, payload)
        self._correct(open_round)

    def remove(self, round: int, peer: PeerId) -> None:
        """Take a contribution out again; KeyError if it is not in."""
        open_round = self._opened(round)
        open_round.tally.remove(peer)
        self._correct(open_round)

    def rate(self, round: int, factor: int) -> None:
        """The round's learning rate has this factor, before or after it is applied."""
        open_round = self._opened(round)
        open_round.factor = factor
        self._correct(open_round)

    def apply(self, round: int) -> None:
        """Let the round's step enter the live weights. A round without contributions has the step zero."""
        open_round = self._opened(round)
        if open_round.applied is not None:
            raise ReplicaError(f"round {round} is applied already")
        open_round.applied = open_round.tally.step(open_round.factor)
        self.applied_round = max(self.applied_round, round)

    def vote_agreement(self, round: int, me: PeerId) -> VoteAgreement | None:
        """What the others' votes of a round that was just applied say of this peer's own; None where nothing
        can be said. Asked once: the tally rests then."""
        open_round = self._open.get(round)
        if open_round is None:
            return None
        found = open_round.tally.vote_agreement(me)
        open_round.tally.rest()
        return found

    def settle(self, round: int, hashed: bool = True) -> bytes:
        """Close the oldest open round for ever; its step enters the settled weights. Their digest, or
        NOT_HASHED."""
        self.close(round)
        return self.digest() if hashed else NOT_HASHED

    def close(self, round: int) -> None:
        """As `settle`, where nobody asks for a digest."""
        if round != self.settled_round + 1:
            raise ReplicaError(f"round {round} cannot settle now: {self.settled_round + 1} is next")
        open_round = self._open.get(round)
        if open_round is None or open_round.applied is None:
            raise ReplicaError(f"round {round} cannot settle before it is applied")
        add_step(self._weights, open_round.applied, self._layout, self._momentum)
        if self._merging is not None:
            self._merging.merge(self._weights, round)
        if self._method.held is not None:
            self._method.held.settled(round)
        del self._open[round]
        self.settled_round = round

    def digest(self) -> bytes:
        """SHA-256 over the settled round (8 bytes, signed), what is settled and what is frozen, int32,
        little-endian."""
        digest = digest_of(self.settled_round)
        for units in (self._settled, self._frozen):
            for piece in _in_the_machine(units):
                digest.update(piece.numpy().astype("<i4", copy=False).data)
        return digest.digest()

    def settled_units(self) -> Tensor:
        """A copy, int32: what is settled, and behind it what is frozen."""
        return self._settled.clone() if self._frozen is None else self.settled_now()

    def settled_now(self) -> Tensor:
        """No copy where nothing is frozen: whoever reads it is done before the next round settles, and writes
        nothing to it."""
        return self._settled if self._frozen is None else torch.cat([self._settled.cpu(), self._frozen])

    def live_floats(self, ahead: bool) -> Tensor:
        """float32 [layout.size]: all `live_tiles`."""
        weights = torch.empty_like(self._weights, dtype=torch.float32)
        for start, tile in self.live_tiles(ahead):
            weights[start : start + len(tile)] = tile
        return weights

    def live_tiles(self, ahead: bool) -> Iterator[tuple[int, Tensor]]:
        """What to compute with, and what this peer moved by itself in it: float32, where each tile of the
        flat vector begins and its numbers. `ahead`: where the next round is expected to take the weights;
        meant for the time between this peer's contribution and the application of its round."""
        applied = [each.applied for _, each in sorted(self._open.items()) if each.applied is not None]
        next_round = self.applied_round + 1
        lead = self._method.lookahead(next_round, self.factor(next_round)) if ahead else None
        own = self._method.own
        if own is not None:
            own.applied(self.applied_round)
        for tile in all_tiles(self._layout, self._weights.device):
            units_CN = tile.of(self._weights).clone()
            momentum_CN = None if self._momentum is None else tile.of(self._momentum).clone()
            for step in applied:
                step.add_to(units_CN, tile, momentum_CN)
            if lead is not None:
                lead.add_to(units_CN, tile)
            floats_CN = to_floats(units_CN)
            if own is not None:
                own.add_to(floats_CN, tile)
            yield tile.start, floats_CN.view(-1)

    def factor(self, round: int) -> int:
        """Of the learning rate of a round that is not settled."""
        return self._open[round].factor if round in self._open else WHOLE

    def _opened(self, round: int) -> _OpenRound:
        if round <= self.settled_round:
            raise ReplicaError(f"round {round} is settled: its set is closed")
        if round not in self._open:
            self._open[round] = _OpenRound(self._method.tally(round))
        return self._open[round]

    def _correct(self, open_round: _OpenRound) -> None:
        if open_round.applied is not None:
            open_round.applied = open_round.tally.step(open_round.factor)


def _in_the_machine(units: Tensor | None) -> Iterator[Tensor]:
    """All of them, piece by piece, each until the next is asked for."""
    if units is None or units.device.type == "cpu":
        yield from () if units is None else (units,)
        return
    room = torch.empty(HASHED_NUMBERS, dtype=units.dtype, pin_memory=True)
    for piece in torch.split(units, HASHED_NUMBERS):
        yield room[: len(piece)].copy_(piece)


def digest_of(settled_round: int) -> hashlib._Hash:
    """Of a settled round, before the weights."""
    return hashlib.sha256(settled_round.to_bytes(8, "little", signed=True))
