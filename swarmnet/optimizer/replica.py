"""The weights of one stage on one peer, as a function of the applied and the settled rounds.

    live = settled + steps of the applied open rounds (+ this peer's local deltas)

All sums are integers. A late contribution corrects the live weights to exactly what they would be if it had
been in time. Settled weights depend only on the sets of contributions. The open rounds are always replayed in
order from the settled state, because with a group momentum a late contribution changes later rounds, too.

In a run with `sync.weights: agreement`, a round's step also depends on the agreement ledger after an earlier
round. Open rounds are weighed by the ledger as it is, and again whenever a round settles. When a round
settles itself, all before it have, so its weights are exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.experts.merging import ExpertMerging
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.agreement.ledger import KeepsLedger, Weighable
from swarmnet.optimizer.method import Method, RoundAggregate
from swarmnet.optimizer.step import Step, add_step
from swarmnet.optimizer.tiling import all_tiles
from swarmnet.optimizer.vote_agreement import VoteAgreement
from swarmnet.run.rates import WHOLE

HASHED_NUMBERS = 1 << 22
"""Numbers that are copied from a GPU at once for the digest: 16 MiB of pinned memory, to which the GPU writes
directly. This avoids a copy of all settled weights."""
NOT_HASHED = bytes(32)
"""Takes the place of a digest after a round for which none is needed."""


class ReplicaError(RuntimeError):
    """The order of rounds does not allow a call; the message says what is allowed."""


@dataclass(slots=True)
class _OpenRound:
    """A round that is not settled."""

    tally: RoundAggregate
    applied: Step | None = None
    """The round's step in the live weights; None if it is not applied."""
    is_corrected: bool = False
    """Whether contributions, weights or the factor have changed since the step was computed."""
    factor: int = WHOLE
    """Factor on its learning rate (`run/rates.py`)."""


@dataclass(eq=False, kw_only=True)
class Replica:
    """Settled weights, open rounds and live weights of one stage. `units` is the settled state after
    `settled_round` (-1: the start), int32 [method.state.size]. `frozen` are parameters that never change,
    int32 in host memory, stored after it. `merging` merges experts when a round settles."""

    layout: Layout
    method: Method
    units: InitVar[Tensor]
    settled_round: int = -1
    frozen: InitVar[Tensor | None] = None
    merging: ExpertMerging | None = None

    def __post_init__(self, units: Tensor, frozen: Tensor | None) -> None:
        size = self.method.state.size
        if units.shape != (size,) or units.dtype != torch.int32:
            raise ReplicaError(f"weights are {units.dtype} {tuple(units.shape)}, not int32 ({size},)")
        self._settled = units.clone()
        self._weights = self._settled[: self.layout.size]
        beside = self._settled[self.layout.size :] if size > self.layout.size else None
        """What is settled besides weights: a momentum or a ledger, never both."""
        self._ledger = self.method.ledger if isinstance(self.method, KeepsLedger) else None
        self._beside = beside
        self._momentum = beside if self._ledger is None else None
        if self._ledger is not None and beside is not None:
            self._ledger.load(beside.cpu().numpy())
        self._frozen = frozen if frozen is not None and len(frozen) else None
        self._open: dict[int, _OpenRound] = {}
        self.applied_round = self.settled_round
        """The newest round in the live weights."""
        self.corrections = 0
        """How often the step of an applied round has changed, and with it the live weights."""
        self._contributors = 1
        """Number of contributors of that round, as it was applied."""

    @property
    def size(self) -> int:
        """Number of weights, including padding."""
        return self._weights.numel()

    def add(self, round: int, peer: PeerId, payload: bytes) -> None:
        """Add a contribution, before or after its round is applied. One whose contributor has no weight
        corrects nothing. Raises ContributionError if it is invalid."""
        open_round = self._opened(round)
        open_round.tally.add(peer, payload)
        if open_round.applied is not None and self._weigh(round, open_round):
            self._correct(open_round)

    def remove(self, round: int, peer: PeerId) -> None:
        """Remove a contribution. Raises KeyError if it is not in the set."""
        open_round = self._opened(round)
        open_round.tally.remove(peer)
        if open_round.applied is not None:
            self._weigh(round, open_round)
            self._correct(open_round)

    def rate(self, round: int, factor: int) -> None:
        """Set the factor on the round's learning rate, before or after the round is applied."""
        open_round = self._opened(round)
        open_round.factor = factor
        if open_round.applied is not None:
            self._correct(open_round)

    def apply(self, round: int) -> None:
        """Add the round's step to the live weights. Without contributions the step is zero. Raises
        ReplicaError if it is applied already."""
        open_round = self._opened(round)
        if open_round.applied is not None:
            raise ReplicaError(f"round {round} is applied already")
        self._weigh(round, open_round)
        open_round.applied = open_round.tally.step(open_round.factor)
        self.applied_round = max(self.applied_round, round)
        self._contributors = open_round.tally.contributors

    def vote_agreement(self, round: int, me: PeerId) -> VoteAgreement | None:
        """Return how the group's votes in a round that was just applied compare with this peer's; None if
        unknown. Called once per round: it frees the tally's caches."""
        open_round = self._open.get(round)
        if open_round is None:
            return None
        found = open_round.tally.vote_agreement(me)
        open_round.tally.rest()
        return found

    def settle(self, round: int, hashed: bool = True, chain: bytes = b"") -> bytes:
        """Settle the oldest open round and return the digest of the settled state, or `NOT_HASHED`. `chain`
        is the value of the chain of settled sets after it; only the agreement ledger needs it."""
        self.close(round, chain)
        return self.digest() if hashed else NOT_HASHED

    def close(self, round: int, chain: bytes = b"") -> None:
        """Settle the oldest open round without computing a digest. Raises ReplicaError if it is another round
        or is not applied."""
        if round != self.settled_round + 1:
            raise ReplicaError(f"round {round} cannot settle now: {self.settled_round + 1} is next")
        self._compute_corrections()
        open_round = self._open.get(round)
        if open_round is None or open_round.applied is None:
            raise ReplicaError(f"round {round} cannot settle before it is applied")
        add_step(self._weights, open_round.applied, self.layout, self._momentum)
        if self.merging is not None:
            self.merging.merge(self._weights, round)
        if self.method.held is not None:
            self.method.held.settled(round)
        del self._open[round]
        self.settled_round = round
        open_round.tally.settle(chain)
        if self._ledger is not None and self._beside is not None:
            self._beside.copy_(torch.from_numpy(self._ledger.numbers()))
            for number, later in self._open.items():
                if later.applied is not None and self._weigh(number, later):
                    self._correct(later)

    def digest(self) -> bytes:
        """Return the SHA-256 over the settled round (8 bytes, signed), the settled state and the frozen
        parameters (int32, little-endian)."""
        digest = digest_of(self.settled_round)
        for units in (self._settled, self._frozen):
            for piece in _in_the_machine(units):
                digest.update(piece.numpy().astype("<i4", copy=False).data)
        return digest.digest()

    def settled_units(self) -> Tensor:
        """Return a copy of the settled state, followed by the frozen parameters, int32."""
        return self._settled.clone() if self._frozen is None else self.settled_now()

    def settled_now(self) -> Tensor:
        """Return the same without a copy if nothing is frozen. The caller must not change it, and must finish
        before the next round settles."""
        return self._settled if self._frozen is None else torch.cat([self._settled.cpu(), self._frozen])

    def live_floats(self, ahead: bool) -> Tensor:
        """Return the live weights, float32 [layout.size]: all tiles of `live_tiles`."""
        weights = torch.empty_like(self._weights, dtype=torch.float32)
        for start, tile in self.live_tiles(ahead):
            weights[start : start + len(tile)] = tile
        return weights

    def live_tiles(self, ahead: bool) -> Iterator[tuple[int, Tensor]]:
        """Yield the weights to compute with, tile by tile: the tile's start in the flat vector, and its
        numbers in float32.

        They include this peer's local deltas. With `ahead` they also include the expected step of the next
        round. This is meant for the time between this peer's contribution and the application of its round.
        """
        self._compute_corrections()
        applied = [each.applied for _, each in sorted(self._open.items()) if each.applied is not None]
        lead = self.lookahead(self.method) if ahead else None
        own = self.method.own
        if own is not None:
            own.applied(self.applied_round)
        for tile in all_tiles(self.layout, self._weights.device):
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

    def lookahead(self, method: Method) -> Step | None:
        """Return the step of the round after the applied ones that the method of a peer expects."""
        next_round = self.applied_round + 1
        return method.lookahead(next_round, self.factor(next_round), self._contributors)

    def factor(self, round: int) -> int:
        """Return the factor on the learning rate of a round that is not settled."""
        return self._open[round].factor if round in self._open else WHOLE

    def _opened(self, round: int) -> _OpenRound:
        """Return an open round, which is created if needed. Raises ReplicaError if it is settled."""
        if round <= self.settled_round:
            raise ReplicaError(f"round {round} is settled: its set is closed")
        if round not in self._open:
            self._open[round] = _OpenRound(self.method.tally(round))
        return self._open[round]

    def _weigh(self, round: int, open_round: _OpenRound) -> bool:
        """Set the weights of a round's contributors by the ledger. Returns whether its step has changed since
        this was last done; always True if all votes count in full."""
        if self._ledger is None:
            return True
        assert isinstance(open_round.tally, Weighable), "of a method with a ledger"
        return open_round.tally.weigh(round - self.settled_round)

    def _correct(self, open_round: _OpenRound) -> None:
        """Have the step of an applied round computed again when it is next used."""
        open_round.is_corrected = True
        self.corrections += 1

    def _compute_corrections(self) -> None:
        """Compute the steps of corrected rounds, once for all contributions that have arrived meanwhile."""
        for open_round in self._open.values():
            if open_round.is_corrected:
                open_round.applied = open_round.tally.step(open_round.factor)
                open_round.is_corrected = False


def _in_the_machine(units: Tensor | None) -> Iterator[Tensor]:
    """Yield all numbers in host memory, piece by piece. A piece is valid until the next one is requested."""
    if units is None or units.device.type == "cpu":
        yield from () if units is None else (units,)
        return
    room = torch.empty(HASHED_NUMBERS, dtype=units.dtype, pin_memory=True)
    for piece in torch.split(units, HASHED_NUMBERS):
        yield room[: len(piece)].copy_(piece)


def digest_of(settled_round: int) -> hashlib._Hash:
    """Return a SHA-256 that starts with the settled round."""
    return hashlib.sha256(settled_round.to_bytes(8, "little", signed=True))
