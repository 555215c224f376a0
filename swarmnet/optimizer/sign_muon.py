"""Sync method `sign-muon`: one-bit votes on the orthogonalized momentum, a fragment of the weights per round.

    momentum  = beta * momentum + (1 - beta) * clipped mean gradient
    direction = beta * momentum + (1 - beta) * clipped mean gradient
    votes     = sign(polar factor of the direction)
    step      = rate * sign(sum of the votes)

This is SignMuon (arXiv:2605.16311) with a majority in place of a mean. The direction is Muon's (Nesterov),
and so is the polar factor, five Newton-Schulz steps. Only the matrices of layers have one. Embedding, head
and norms vote by the direction itself.

A fragment is about an n-th of the weights, the same for all peers, so no index is sent. It concerns some of
the matrices only (`fragments.py`), so a round takes the polar factors of these. Fragments have their turns in
a fixed order, and step n times as far. What is sent stays in the momentum and decays there, as in Muon, so
nothing has to return to it.

Until a round is applied, the peer computes at weights that include its own votes. The group's step then
takes their place exactly. Votes of peers differ, so the mean of the own steps of all peers is shorter than
the group's step. Own steps are therefore longer (`lead_factor`): on the mean over peers, gradients are then
taken nearer to the weights that the group's step gives.

A vote is a peer's own matter and computed in floating point. A step is an integer function of the votes,
bit-identical on all peers.

Shapes: C chunks of a plane, N numbers in a chunk, M votes in a chunk of a fragment; R rows and A columns of
a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Entry, Layout, Plane
from swarmnet.model.fragments import FragmentPart, cut_fragments
from swarmnet.model.parameters import trains_with_muon
from swarmnet.model.state_layout import state_of
from swarmnet.optimizer.agreement.ledger import AgreementLedger
from swarmnet.optimizer.agreement.weighed_tally import WeighedTally
from swarmnet.optimizer.device_groups.device_group import ALONE, DeviceGroup
from swarmnet.optimizer.device_groups.payload import Sections
from swarmnet.optimizer.index_code import ContributionError, pack, packed_bytes, unpack
from swarmnet.optimizer.mean_gradient import BlockClip
from swarmnet.optimizer.polar_factor import matrix_batches, polar_factors
from swarmnet.optimizer.sign_votes import Votes, VoteTally
from swarmnet.optimizer.sparsify import coin_flips, seed_of
from swarmnet.optimizer.step import RateRange, RoundAggregate, SignStep, StepSum, rate_units
from swarmnet.optimizer.tiling import plane_of, tiles_of
from swarmnet.run.manifest import Manifest
from swarmnet.run.method_config import MUON_RMS
from swarmnet.run.rates import WHOLE, scaled
from swarmnet.run.sync_methods import SignMuonConfig

VOTE_CHUNK = 512
"""Votes of a chunk. A reducer counts those of whole chunks. Fewer would make tallies slower, more would pad
the contributions of small models."""


class SignMuon:
    """Sync method `sign-muon` for one peer of one stage."""

    own = held = reduced = None
    lookahead_accuracy = 0.99
    """Equal peers have equal votes. Only numbers that are exactly zero are not predicted."""
    momentum_norm = None
    """None: nothing waits to be sent, because what is sent stays in the momentum."""

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        config = manifest.sync.config
        assert isinstance(config, SignMuonConfig), "only for sign-muon"
        self._manifest = manifest
        self._run_id = manifest.run_id()
        self._fragments = config.fragments
        self._decay = config.momentum
        self.state = state_of(layout, manifest.sync)
        weighs, is_private = config.weighs_by_agreement, manifest.data.private
        self.ledger = AgreementLedger(is_private=is_private) if weighs else None
        self._layout = layout
        self._device = device
        self._clip = BlockClip(layout, manifest.sync.max_grad_norm, device)
        self._device_group: DeviceGroup = ALONE
        self.momentum = torch.zeros(layout.size, device=device)
        self._cut()
        self._open_rounds = manifest.rounds.window + 1
        self._own: dict[int, Tensor] = {}
        """Maps a round that may not be applied yet to the signs of this peer's votes, int8 [voted.size]; 0
        where the direction was exactly zero."""
        self.sections: Sections = ()
        """Empty: every device makes and takes whole payloads."""

    def use_device_group(self, company: DeviceGroup) -> None:
        """Use collectives of several devices for norms and matrices."""
        self._clip.device_group = self._device_group = company
        self._cut()

    @property
    def gradient_norm(self) -> float | None:
        return self._clip.norm

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        gains = self._clip.gains(gradient, tokens, 1 - self._decay)
        self._accumulate(gradient, self._clip.by_chunk(gains))
        signs = self._direction_signs(round, gradient, self._clip.by_block(gains))
        self._own = {of: own for of, own in self._own.items() if of >= round - self._open_rounds}
        self._own[round] = signs
        seed = seed_of(self._run_id, round, peer)
        signs_CM = plane_of(signs, self._plane).cpu().numpy()
        negative_CM, zero_CM = signs_CM < 0, signs_CM == 0
        if zero_CM.any():
            negative_CM = np.where(zero_CM, coin_flips(seed, VOTE_CHUNK, VOTE_CHUNK), negative_CM)
        return pack(negative_CM.view(np.uint8))

    def give_back(self, payload: bytes, round: int, peer: PeerId, shards: tuple[int, ...] = ()) -> None:
        """Do nothing: the momentum still contains what was sent, as far as it has not decayed."""

    def check(self, payload: bytes) -> None:
        for _ in self.votes_of(payload):
            pass

    def tally(self, round: int) -> RoundAggregate:
        if self.ledger is None:
            return VoteTally(method=self, layout=self.voted, device=self._device, round=round)
        return WeighedTally(
            method=self, layout=self.voted, device=self._device, round=round, ledger=self.ledger
        )

    def lookahead(self, round: int, factor: int = WHOLE, contributors: int = 1) -> StepSum | None:
        """Return the steps of this peer's own votes in all rounds from `round` on, which are not applied, as
        long as the number of contributors asks for. The peer computes ahead by them until the group's step
        takes their place. None if there are none."""
        self._own = {of: signs for of, signs in self._own.items() if of >= round}
        factor = scaled(lead_factor(contributors), factor)
        steps = tuple(self.step_of(signs, of, factor) for of, signs in self._own.items())
        return StepSum(steps) if steps else None

    def votes_of(self, payload: bytes) -> Iterator[Votes]:
        if len(payload) != self.payload_bytes:
            raise ContributionError(f"payload of {len(payload)} bytes where {self.payload_bytes} belong")
        bits_CM = unpack(payload, self._plane.chunks, VOTE_CHUNK)
        yield Votes(None, torch.from_numpy(1 - 2 * bits_CM.view(np.int8)))

    def votes_in(self, round: int) -> int:
        votes: int = max(turn.votes.stop for turn in self._turns[round % self._fragments])
        return votes

    def signs_at(self, payload: bytes, places: NDArray[np.int64]) -> NDArray[np.int8]:
        bytes_at = np.frombuffer(payload, np.uint8)[places >> 3]
        negative = bytes_at >> (places & 7).astype(np.uint8) & 1
        signs: NDArray[np.int8] = 1 - 2 * negative.view(np.int8)
        return signs

    def own_votes(self, round: int) -> list[Votes] | None:
        signs = self._own.get(round)
        return None if signs is None else [Votes(None, plane_of(signs, self._plane))]

    def invert(self, plane: int, sums_CN: Tensor, voters: int) -> Tensor:
        """Return the sums: votes are on the weights themselves."""
        return sums_CN

    def step_of(self, signs: Tensor, round: int, factor: int) -> SignStep:
        """Return the step with these signs of the fragment of `round`. Its size is Muon's root mean square
        times the number of fragments, so that weights move as far as if all had their turn in each round."""
        size = self._fragments * MUON_RMS
        ranges = (
            RateRange(
                start=turn.weights.start,
                stop=turn.weights.stop,
                signs=turn.votes_here.start,
                rate=rate_units(self._manifest, turn.entry.name, round, factor, size),
                stride=turn.numbers.step,
            )
            for turn in self._turns[round % self._fragments]
        )
        return SignStep(signs, tuple(ranges))

    def _accumulate(self, gradient: Tensor, gains: list[Tensor]) -> None:
        """Add a gradient to the momentum, with the gains of its chunks, float32 [C, 1] per plane."""
        for plane, gains_C1 in zip(self._layout.planes, gains, strict=True):
            tiles = zip(
                tiles_of(plane_of(self.momentum, plane)),
                tiles_of(plane_of(gradient, plane)),
                tiles_of(gains_C1),
                strict=True,
            )
            for momentum_CN, gradient_CN, gain_C1 in tiles:
                momentum_CN.mul_(self._decay).addcmul_(gradient_CN, gain_C1)

    def _direction_signs(self, round: int, gradient: Tensor, gains: dict[str, float]) -> Tensor:
        """Return the signs of the direction of the fragment of `round`, int8 [voted.size]; 0 in the padding.
        `gains` are those of blocks, by which the gradient was added to the momentum."""

        def direction(entry: Entry, weights: slice) -> Tensor:
            momentum = self.momentum[weights] * self._decay
            return momentum.add_(gradient[weights], alpha=gains[entry.block])

        signs = torch.zeros(self.voted.size, dtype=torch.int8, device=self._device)
        group, matrices = self._device_group, dict[Entry, _Turn]()
        for turn in self._turns[round % self._fragments]:
            if turn.is_matrix:
                matrices[turn.entry] = turn
            else:
                signs[turn.votes_here] = direction(turn.entry, turn.weights).sign()
        signs = group.total(signs)
        for batch in matrix_batches(list(matrices), self._device, group):
            wholes = [group.whole(entry, direction(entry, entry.place).view(entry.shape)) for entry in batch]
            for entry, factor_RA in zip(batch, polar_factors(wholes), strict=True):
                turn = matrices[entry]
                signs[turn.votes] = factor_RA.reshape(-1)[turn.numbers].sign()
        return signs

    def _cut(self) -> None:
        """Divide the parameters of the stage among rounds."""
        group, entries = self._device_group, self._layout.entries
        shapes = [group.shape(entry) for entry in entries]
        self._turns: list[list[_Turn]] = []
        """Maps a round, modulo the number of fragments, to what it concerns."""
        longest = 0
        for fragment in cut_fragments(entries, shapes, self._fragments):
            turns, votes = [], 0
            for part in fragment:
                entry = entries[part.parameter]
                is_matrix = trains_with_muon(entry.name, shapes[part.parameter])
                turns.append(_turn(entry, is_matrix, part, votes, group.place(entry)))
                votes += len(part.numbers)
            self._turns.append(turns)
            longest = max(longest, votes)
        self._plane = Plane(0, -(-longest // VOTE_CHUNK), VOTE_CHUNK)
        self.voted = Layout((), (self._plane,), (), self._plane.stop)
        """Layout of the votes of one round. It lists no parameters."""
        self.payload_bytes = packed_bytes(self._plane.chunks, VOTE_CHUNK)


def lead_factor(contributors: int) -> int:
    """Return the length of own steps that are not applied, in thousandths of the group's step: 1 for a single
    peer, a quarter more for each doubling of the contributors.

    With 4 peers 1.5 was better than 1 and 2, with 16 peers 2 was better than 1.5 and 3 (docs/learning.md).
    """
    return WHOLE + round(WHOLE * log2(max(1, contributors)) / 4)


@dataclass(frozen=True, slots=True)
class _Turn:
    """The numbers of a parameter that one round concerns."""

    entry: Entry
    """The parameter as it is on this device."""
    is_matrix: bool
    """Whether it votes by its polar factor."""
    numbers: slice
    """Their place in the whole parameter."""
    votes: slice
    """Their place in the votes, int8 [voted.size]."""
    weights: slice
    """Place of those that are on this device in the flat vector."""
    votes_here: slice
    """The place of these in the votes."""


def _turn(entry: Entry, is_matrix: bool, part: FragmentPart, first_vote: int, here: slice) -> _Turn:
    """Return the turn of a part. `here` is the part of the whole parameter that is on this device."""
    numbers, step = part.numbers, part.numbers.step
    first, stop = (
        min(len(numbers), max(0, -(-(edge - numbers.start) // step))) for edge in (here.start, here.stop)
    )
    weights = numbers[first:stop]
    shift = entry.offset - here.start
    return _Turn(
        entry=entry,
        is_matrix=is_matrix,
        numbers=slice(numbers.start, numbers.stop, step),
        votes=slice(first_vote, first_vote + len(numbers)),
        weights=slice(weights.start + shift, max(weights.start, weights.stop) + shift, step),
        votes_here=slice(first_vote + first, first_vote + stop),
    )
