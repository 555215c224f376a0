"""Sync method `sign-muon` with secure sums: no peer sees the votes of another, only sums over all members.

    masked = votes + sum over members after it of mask(pair) - sum over members before it      modulo 2**bits

Each pair of members shares a secret, from which both compute the same mask (Bonawitz et al. 2017, section
4.0.1). In the sum over all members the masks cancel exactly, because votes are integers: 1 for a negative
vote, else 0. `bits` bits hold the count of `sync.secure_owners` owners. If a member is missing, the round is
void and its step is zero. Votes stay in the momentum, so a void round costs time only.

    payload = nonce, digest of the members (zero: no votes), bit planes of the masked votes

Shapes: C chunks, M votes in a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.index_code import ContributionError, pack, packed_bytes, unpack
from swarmnet.optimizer.secure_sums.member_sets import (
    DIGEST_BYTES,
    NONCE_BYTES,
    Members,
    MemberSets,
    complete_members,
)
from swarmnet.optimizer.sign_muon import VOTE_CHUNK, SignMuon
from swarmnet.optimizer.sign_votes import Votes
from swarmnet.optimizer.step import ContributionTally, SignStep
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE
from swarmnet.run.sync_methods import SignMuonConfig

LAG_WINDOWS = 2
"""A round settles about a window after it closed. Members follow from a set that is twice as old."""
HEAD_BYTES = NONCE_BYTES + DIGEST_BYTES
NO_MEMBERS = bytes(DIGEST_BYTES)
Masked: TypeAlias = NDArray[np.uint8]
"""Votes or masks modulo a power of two up to 256: [C, M]."""
Keystream: TypeAlias = Callable[[PeerId, bytes, int], bytes]
"""Returns so many pseudo-random bytes, which only this peer and the named one can compute, for a context."""


def mask_of(members: Members, me: PeerId, keystream: Keystream, size: int) -> Masked:
    """Return the sum of this peer's masks, modulo 256. Over all members these sums are zero."""
    total, name = np.zeros(size, np.uint8), members.digest()
    for other in members.nonces:
        if other != me:
            mask = np.frombuffer(keystream(other, name, size), np.uint8)
            total = total + mask if me < other else total - mask
    return total


class MaskedVotes(SignMuon):
    """Sync method `sign-muon` with secure sums, for one peer and one stage."""

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        super().__init__(manifest, layout, device)
        config = manifest.sync.config
        assert isinstance(config, SignMuonConfig), "only for sign-muon"
        self.device = device
        self.bits = config.vote_bits
        self.sets = MemberSets(LAG_WINDOWS * (manifest.rounds.window + 1))
        self.keystream: Keystream | None = None
        """The masks of this peer; None where it only applies rounds."""
        self.nonce = bytes(NONCE_BYTES)
        """Drawn once per process by the owner of `keystream`."""
        self._newest_masked = -1
        """The newest round with masked votes. A mask is never used twice, also not after a fork."""
        self.payload_bytes = HEAD_BYTES + packed_bytes(self._plane.chunks, self.bits * VOTE_CHUNK)

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        votes = super().contribute(gradient, tokens, round, peer)
        assert self.keystream is not None, "only a peer with secrets contributes"
        members = self.sets.members(round, peer, self.nonce) if round > self._newest_masked else None
        if members is None or len(members.nonces) >= 2**self.bits:
            return self.nonce + bytes(self.payload_bytes - NONCE_BYTES)
        self._newest_masked = round
        negative_CM = unpack(votes, self._plane.chunks, VOTE_CHUNK)
        masked = negative_CM.reshape(-1) + mask_of(members, peer, self.keystream, negative_CM.size)
        return self.nonce + members.digest() + self._pack(masked.reshape(negative_CM.shape))

    def check(self, payload: bytes) -> None:
        masked_CM = self.masked_of(payload)
        if payload[NONCE_BYTES:HEAD_BYTES] == NO_MEMBERS and masked_CM.any():
            raise ContributionError("votes of no members")

    def votes_of(self, payload: bytes) -> Iterator[Votes]:
        raise TypeError("masked votes are known only in sums")

    def tally(self, round: int) -> MaskedTally:
        return MaskedTally(self, round)

    def masked_of(self, payload: bytes) -> Masked:
        """Return the masked votes [C, M]. Raises ContributionError if no honest peer sends it."""
        if len(payload) != self.payload_bytes:
            raise ContributionError(f"payload of {len(payload)} bytes where {self.payload_bytes} belong")
        bits_CB = unpack(payload[HEAD_BYTES:], self._plane.chunks, self.bits * VOTE_CHUNK)
        planes_CKM = bits_CB.reshape(self._plane.chunks, self.bits, VOTE_CHUNK)
        weights_K = (1 << np.arange(self.bits)).astype(np.uint8)
        masked: Masked = (planes_CKM * weights_K[:, None]).sum(axis=1, dtype=np.uint8)
        return masked

    def _pack(self, masked_CM: Masked) -> bytes:
        planes_CKM = (masked_CM[:, None, :] >> np.arange(self.bits, dtype=np.uint8)[:, None]) & 1
        return pack(planes_CKM.reshape(len(masked_CM), -1).astype(np.uint8))


class MaskedTally(ContributionTally[bytes]):
    """The contributions of one round. Their sum is known only if it has all members of a set."""

    def __init__(self, method: MaskedVotes, round: int) -> None:
        super().__init__(round)
        self._method = method

    def _checked(self, peer: PeerId, payload: bytes) -> bytes:
        self._method.check(payload)
        self._method.sets.add(self._round, peer, payload[:NONCE_BYTES])
        return payload

    def remove(self, peer: PeerId) -> None:
        super().remove(peer)
        self._method.sets.remove(self._round, peer)

    def settle(self, chain: bytes) -> None:
        self._method.sets.settle(self._round, self._kept)

    def step(self, factor: int = WHOLE) -> SignStep:
        """Return the step by the majority of the members' votes; zero if a member is missing."""
        method = self._method
        signs = torch.zeros(method.voted.size, dtype=torch.int8)
        heads = {peer: payload[:HEAD_BYTES] for peer, payload in self._kept.items()}
        claims = {peer: (head[:NONCE_BYTES], head[NONCE_BYTES:]) for peer, head in heads.items()}
        members = complete_members(self._round, claims)
        if members:
            total = np.zeros((len(signs) // VOTE_CHUNK, VOTE_CHUNK), np.uint8)
            for peer in members:
                total += method.masked_of(self._kept[peer])
            negative = total.reshape(-1).astype(np.int16) & (2**method.bits - 1)
            signs = torch.from_numpy(np.sign(len(members) - 2 * negative).astype(np.int8))
        return method.step_of(signs.to(method.device), self._round, factor)
