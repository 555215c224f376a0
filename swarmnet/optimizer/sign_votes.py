"""Exact 1-bit DeMo: a contribution is one signed vote for each selected coefficient.

A tally adds votes as integers, inverts the transform in integers and takes the sign. All peers with the same
set of contributions make the same step to the bit, regardless of order, threads or device. Votes have no
magnitude, so no peer outweighs another.

Shapes: C chunks of a plane, N coefficients in a chunk, K kept of them, B bits of a chunk's code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.index_code import ContributionError, pack, packed_bytes, unpack
from swarmnet.optimizer.momentum import CoefficientMethod, Sent, selections_of
from swarmnet.optimizer.sparsify import Selection, coin_flips, seed_of
from swarmnet.optimizer.step import ContributionTally, SignStep
from swarmnet.optimizer.tiling import cut_of, plane_of, tiles_of
from swarmnet.optimizer.vote_agreement import VoteAgreement, vote_agreement
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE
from swarmnet.run.schema import Sync


@dataclass(frozen=True, slots=True)
class VoteSizes:
    """The size of a contribution of votes."""

    sections: list[tuple[int]]
    """Bits of a chunk's code, for each plane."""
    payload_bytes: int

    @classmethod
    def from_layout(cls, sync: Sync, layout: Layout) -> VoteSizes:
        """Return the size of the votes on the weights of `layout`."""
        cut = cut_of(sync.chunking, layout)
        return cls.from_selections(cut.layout, selections_of(sync, cut))

    @classmethod
    def from_selections(cls, layout: Layout, selections: Sequence[Selection]) -> VoteSizes:
        """Return the size of the votes that these selections take from the planes of `layout`."""
        chunks = [plane.chunks for plane in layout.planes]
        bits = [each.index_bits + each.kept for each in selections]
        return cls(
            sections=[(each,) for each in bits],
            payload_bytes=sum(map(packed_bytes, chunks, bits)),
        )


class VoteMethod(CoefficientMethod):
    """Sync method `demo-sign` for one peer of one stage."""

    lookahead_accuracy = 0.75
    """Votes have no size, so the own momentum predicts only a part of the step."""

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        super().__init__(manifest, layout, device)
        self._run_id = manifest.run_id()
        sizes = VoteSizes.from_selections(self._layout, self._selections)
        self.sections, self.payload_bytes = sizes.sections, sizes.payload_bytes

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        self.accumulate(gradient, tokens)
        return self.vote(round, peer)

    def accumulate(self, gradient: Tensor, tokens: int, weight: float = 1.0) -> None:
        """Add a gradient to the momentum: float32 [layout.size], summed over `tokens` tokens, zero in the
        padding.

        The mean gradient of each block is clipped and multiplied by `weight`, at most 1. Raises GradientError
        if the gradient is not finite or `tokens` is not positive."""
        self._momentum.accumulate(self._cut.chunked(gradient), tokens, weight)

    def left(self) -> Tensor:
        """Return the momentum in the domain of the weights, float32 [layout.size]."""
        return self._cut.flat(self._momentum.values())

    def add(self, flat: Tensor) -> None:
        """Add float32 [layout.size], in the domain of the weights, to the momentum."""
        self._momentum.add(self._cut.chunked(flat))

    def vote(self, round: int, peer: PeerId) -> bytes:
        """Return a payload of the momentum's selected coefficients, and remove them from it."""
        seed = seed_of(self._run_id, round, peer)
        parts = []
        taken = self._momentum.take(self._selections, round)
        for plane, selection, sent in zip(self._layout.planes, self._selections, taken, strict=True):
            values_CK = sent.values.cpu().numpy()
            negative_CK, zero_CK = values_CK < 0, values_CK == 0
            if zero_CK.any():
                flips_K = coin_flips(seed, plane.chunk, selection.kept)
                negative_CK = np.where(zero_CK, flips_K, negative_CK)
            bits_CB = np.concatenate([selection.write(sent.indices), negative_CK.view(np.uint8)], axis=1)
            parts.append(pack(bits_CB))
        return b"".join(parts)

    def give_back(self, payload: bytes, round: int, peer: PeerId, shards: tuple[int, ...] = ()) -> None:
        votes = self.votes_of(payload)
        for index, found in enumerate(list(votes)):
            assert found.indices is not None
            signs_CK = found.signs.to(self._device, torch.float32)
            strength_C1 = self._momentum.strength(index)
            self._momentum.put(index, found.indices.to(self._device), signs_CK * strength_C1)

    def check(self, payload: bytes) -> None:
        for _ in self.votes_of(payload):
            pass

    def tally(self, round: int) -> VoteTally:
        return VoteTally(method=self, layout=self._layout, device=self._device, round=round)

    def votes_of(self, payload: bytes) -> Iterator[Votes]:
        """Yield the votes of each plane. Raises ContributionError if no honest peer sends them."""
        if len(payload) != self.payload_bytes:
            raise ContributionError(f"payload of {len(payload)} bytes where {self.payload_bytes} belong")
        start = 0
        for plane, selection in zip(self._layout.planes, self._selections, strict=True):
            bits = selection.index_bits + selection.kept
            stop = start + packed_bytes(plane.chunks, bits)
            bits_CB = unpack(memoryview(payload)[start:stop], plane.chunks, bits)
            indices_CK = selection.read(bits_CB[:, : selection.index_bits])
            signs_CK = 1 - 2 * bits_CB[:, selection.index_bits :].view(np.int8)
            yield Votes(indices_CK, torch.from_numpy(signs_CK))
            start = stop

    def own_votes(self, round: int) -> list[Votes] | None:
        taken = self.sent(round)
        if taken is None:
            return None
        return [Votes(each.indices, torch.sign(each.values).to(torch.int8)) for each in taken]

    def sent(self, round: int) -> list[Sent] | None:
        """Return what this peer's contribution to `round` took from each plane; None if not the newest."""
        return self._momentum.sent(round)

    def invert(self, plane: int, sums_CN: Tensor, voters: int) -> Tensor:
        """Return the exact inverse transform of the vote sums of `voters` peers."""
        return self._transforms[plane].exact_inverse(sums_CN, max(1, voters) * self._selections[plane].kept)


@dataclass(frozen=True, slots=True)
class Votes:
    """Votes of one plane."""

    indices: Tensor | None
    """int64 [C, K]; None: all coefficients in their order."""
    signs: Tensor
    """int8 [C, K]: +1 and -1, and 0 for own votes on a coefficient that was zero."""

    def add_to(self, sums_CN: Tensor, weight: int) -> None:
        """Add the votes, times `weight`, to int16 [C, N]."""
        signs_CK = self.signs.to(sums_CN.device)
        if self.indices is None:
            sums_CN.add_(signs_CK, alpha=weight)
        else:
            sums_CN.scatter_add_(1, self.indices.to(sums_CN.device), signs_CK.to(torch.int16) * weight)

    def at(self, sums_CN: Tensor) -> Tensor:
        """Return the sums [C, K] of the coefficients that the votes concern."""
        return sums_CN if self.indices is None else sums_CN.gather(1, self.indices)


class VotingMethod(Protocol):
    """What a tally of votes needs from its method."""

    def votes_of(self, payload: bytes) -> Iterator[Votes]:
        """Yield the votes of each plane. Raises ContributionError if no honest peer sends them."""

    def own_votes(self, round: int) -> list[Votes] | None:
        """Return this peer's votes of `round` in each plane; None if they are not the newest ones."""

    def invert(self, plane: int, sums_CN: Tensor, voters: int) -> Tensor:
        """Return an integer multiple of the direction against which a plane steps, from the vote sums of
        `voters` peers."""

    def step_of(self, signs: Tensor, round: int, factor: int) -> SignStep:
        """Return the step with these signs, int8 [layout.size of the tally], at the rate of `round`."""


class VoteTally(ContributionTally[bytes]):
    """The votes of one round, and until it is applied their int16 sums: no group has 32768 peers."""

    def __init__(self, *, method: VotingMethod, layout: Layout, device: torch.device, round: int) -> None:
        """`layout` has a plane for each plane of the votes."""
        super().__init__(round)
        self._method = method
        self._layout = layout
        self._device = device
        self._sums: Tensor | None = None

    def _checked(self, peer: PeerId, payload: bytes) -> bytes:
        votes = list(self._method.votes_of(payload))
        weight = self.weight(peer)
        if weight:
            self._count(votes, weight, self._summed())
        return payload

    def remove(self, peer: PeerId) -> None:
        payload, weight = self._kept[peer], self.weight(peer)
        if weight:
            self._count(self._method.votes_of(payload), -weight, self._summed())
        super().remove(peer)

    def weight(self, peer: PeerId) -> int:
        """Return how many votes a contribution of `peer` counts for."""
        return 1

    def rest(self) -> None:
        """Free the sums, which are computed again if needed."""
        self._sums = None

    def step(self, factor: int = WHOLE) -> SignStep:
        signs = torch.empty(self._layout.size, dtype=torch.int8, device=self._device)
        voters = sum(map(self.weight, self._kept))
        for index, plane in enumerate(self._layout.planes):
            targets, sums = tiles_of(plane_of(signs, plane)), tiles_of(plane_of(self._summed(), plane))
            for target_CN, sums_CN in zip(targets, sums, strict=True):
                inverse_CN = self._method.invert(index, sums_CN, voters)
                target_CN.copy_(torch.sign(inverse_CN))
        return self._method.step_of(signs, self._round, factor)

    def vote_agreement(self, me: PeerId) -> VoteAgreement | None:
        # The votes are remembered as they were taken: decoding the payload would cost ten times as much.
        sent = self._method.own_votes(self._round) if me in self._kept else None
        if sent is None:
            return None
        found = VoteAgreement(0, 0, 0)
        for plane, own in zip(self._layout.planes, sent, strict=True):
            found += vote_agreement(own.signs, own.at(plane_of(self._summed(), plane)), self.weight(me))
        return found

    def _summed(self) -> Tensor:
        """Return the sums of all votes, int16 [layout.size]."""
        if self._sums is None:
            self._sums = torch.zeros(self._layout.size, dtype=torch.int16, device=self._device)
            for peer, payload in self._kept.items():
                self._count(self._method.votes_of(payload), self.weight(peer), self._sums)
        return self._sums

    def _count(self, votes: Iterable[Votes], weight: int, sums: Tensor) -> None:
        """Add votes, times `weight`, to `sums`."""
        for plane, found in zip(self._layout.planes, votes, strict=True):
            found.add_to(plane_of(sums, plane), weight)
