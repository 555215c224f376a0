"""Choose the owners whose masks cancel in a round: those of a round that all have settled.

The contributors of the settled set of round r - lag are the *members* of round r, the same for all peers of a
branch. A member that is missing in round r makes it void: its sum stays masked, and no peer reveals anything.
Once the settled sets lack that owner, so do the members.

Each contribution carries a number that its contributor draws once per process, its *nonce*. Masks follow from
the nonces of both ends, so a restarted peer never uses a mask again: it is no member before a contribution of
its new process has settled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarmnet.identifiers import PeerId

NONCE_BYTES = 16
DIGEST_BYTES = 16
MIN_MEMBERS = 3
"""With two, each knows the other's votes from the sum."""


@dataclass(frozen=True, slots=True)
class Members:
    """The owners whose contributions to one round are masked, with their nonces."""

    round: int
    nonces: Mapping[PeerId, bytes]

    def digest(self) -> bytes:
        """Return the name of this set, which every masked contribution carries."""
        digest = hashlib.blake2b(self.round.to_bytes(8, "big"), digest_size=DIGEST_BYTES)
        for peer in sorted(self.nonces):
            digest.update(peer.encode() + b"\0" + self.nonces[peer])
        return digest.digest()


class MemberSets:
    """The nonces and settled sets of the newest rounds."""

    def __init__(self, lag: int) -> None:
        """`lag`: rounds from a settled set to the round whose members it decides."""
        self._lag = lag
        self._nonces: dict[int, dict[PeerId, bytes]] = {}
        """Maps an open round to the nonce in each contribution to it."""
        self._settled: dict[int, Mapping[PeerId, bytes]] = {}
        """Maps a settled round to its contributors' nonces."""

    def add(self, round: int, peer: PeerId, nonce: bytes) -> None:
        """Remember the nonce of a contribution to an open round."""
        self._nonces.setdefault(round, {})[peer] = nonce

    def remove(self, round: int, peer: PeerId) -> None:
        """Forget the nonce of a contribution that left the set."""
        del self._nonces[round][peer]

    def settle(self, round: int, contributors: Collection[PeerId]) -> None:
        """Remember the final set of a round. It is unknown if not all of its contributions were seen here."""
        nonces = self._nonces.pop(round, {})
        if nonces.keys() == set(contributors):
            self._settled[round] = nonces
        self._settled = {of: kept for of, kept in self._settled.items() if of > round - 2 * self._lag}

    def members(self, round: int, me: PeerId, nonce: bytes) -> Members | None:
        """Return the members of a round; None if there are too few, they are not known here, or this process
        is none of them."""
        nonces = self._settled.get(round - self._lag, {})
        return Members(round, nonces) if len(nonces) >= MIN_MEMBERS and nonces.get(me) == nonce else None


def complete_members(round: int, claims: Mapping[PeerId, tuple[bytes, bytes]]) -> Collection[PeerId]:
    """Return the members of a round whose contributions are all there; empty if one is missing. `claims` maps
    a contributor to its nonce and to the digest of its members. Of several complete sets the largest counts,
    then the one with the larger digest."""
    by_digest: dict[bytes, dict[PeerId, bytes]] = {}
    for peer, (nonce, digest) in claims.items():
        by_digest.setdefault(digest, {})[peer] = nonce
    complete = [
        (len(nonces), digest)
        for digest, nonces in by_digest.items()
        if len(nonces) >= MIN_MEMBERS and Members(round, nonces).digest() == digest
    ]
    return by_digest[max(complete)[1]].keys() if complete else ()
