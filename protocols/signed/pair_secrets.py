"""Secrets that two peers share without a message: X25519 between their identity keys.

An Ed25519 key is also a key for X25519 (RFC 7748, section 4.1: u = (1 + y) / (1 - y)), so a peer id is
enough. A secret is used through HKDF only, with the run and a context.
"""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocols.signed.identity import Identity, public_key_bytes
from swarmnet.identifiers import PeerId, RunId

FIELD = 2**255 - 19
"""Prime of the field of both curves (RFC 7748)."""
KEY_BYTES = 32


class PairSecrets:
    """The secrets of one peer with each other peer of a run."""

    def __init__(self, identity: Identity, run_id: RunId) -> None:
        # RFC 8032, section 5.1.5: the scalar of an Ed25519 key is the first half of this hash. X25519 clamps
        # it.
        scalar = hashlib.sha512(identity.seed_bytes()).digest()[:KEY_BYTES]
        self._key = X25519PrivateKey.from_private_bytes(scalar)
        self._run_id = run_id
        self._shared: dict[PeerId, bytes] = {}

    def keystream(self, peer: PeerId, context: bytes, size: int) -> bytes:
        """Return `size` pseudo-random bytes of a context, which only this peer and `peer` can compute. Raises
        ValueError if `peer` is no key."""
        if peer not in self._shared:
            self._shared[peer] = self._key.exchange(X25519PublicKey.from_public_bytes(montgomery_bytes(peer)))
        info = b"swarmnet secure sum/" + self._run_id.encode() + b"/" + context
        key = HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(self._shared[peer])
        return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))


def montgomery_bytes(peer: PeerId) -> bytes:
    """Return the X25519 public key of a peer. Raises ValueError if `peer` is no key."""
    y = int.from_bytes(public_key_bytes(peer), "little") & (2**255 - 1)
    return ((1 + y) * pow(1 - y, -1, FIELD) % FIELD).to_bytes(KEY_BYTES, "little")
