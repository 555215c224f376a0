"""Peer identities: one Ed25519 key per peer, in p2pd's key file. The peer id *is* the public key.

The file is libp2p's protobuf `PrivateKey{type: Ed25519, data: seed 32 B, public key 32 B}`: 68 bytes. Go
needs the 64-byte data, py-libp2p only its first half (measured). A peer id is the identity multihash of
`PublicKey{type: Ed25519, data: 32 B}` in base58 (libp2p peer-id specification). Therefore a signature is
verified from the peer id alone, and no keys are exchanged.
"""

from __future__ import annotations

import os
import stat
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmnet.identifiers import PeerId

_PRIVATE_KEY = b"\x08\x01\x12\x40"
_PEER_ID = b"\x00\x24\x08\x01\x12\x20"
IDENTITY_BYTES = len(_PRIVATE_KEY) + 64
SIGNATURE_BYTES = 64
PUBLIC_KEY_BYTES = 32
_SIGN_OF_X = 0x80
"""The sign bit of x in a key's last byte; the remaining bits are y."""
_SMALL_ORDER = frozenset(
    bytes.fromhex(y)
    for y in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)
"""The y coordinates of the eight points of small order.

Any peer can sign in the name of such a point, so they are refused as keys. The last two are 0 and 1 with p
added, which decoders accept (libsodium's list, ge25519_has_small_order)."""
_CACHED_KEYS = 4096
"""Number of cached parsed keys, about 300 bytes each. It exceeds the number of peers that one peer contacts.
"""

_CACHED_CHECKS = 2048
"""Number of cached signature checks. The same records arrive again in every `Hello`, `Known` and look-up."""


@dataclass(slots=True)
class Checked:
    """Counts the signatures that were verified for one sender, without those answered from the cache."""

    count: int = 0


CHECKED: ContextVar[Checked | None] = ContextVar("checked", default=None)
"""Counter of the message that is being handled; it charges its sender for checks (framing/intake.py)."""


class IdentityError(Exception):
    """The identity file cannot be used. The message says why and what to do."""


class Identity:
    """A peer's private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes_raw()
        self.peer_id: PeerId = peer_id_of(self.public_key)

    @classmethod
    def generate(cls) -> Identity:
        """Return a new random identity."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """Return the identity of a 32-byte seed, such as an invite's secret. Tests and simulations use
        shorter seeds, which are padded with zeros."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed.ljust(32, b"\0")))

    def sign(self, statement: bytes) -> bytes:
        """Return the 64-byte signature. `statement` must have a domain prefix (envelope.py, records.py)."""
        return self._key.sign(statement)

    def seed_bytes(self) -> bytes:
        """Return the 32-byte seed of the private key. `allow_reinit` restores the identity from it."""
        return self._key.private_bytes_raw()

    def file_bytes(self) -> bytes:
        return _PRIVATE_KEY + self._key.private_bytes_raw() + self.public_key


@lru_cache(maxsize=_CACHED_KEYS)
def peer_id_of(public_key: bytes) -> PeerId:
    """Return the peer id of a 32-byte public key."""
    return PeerId(base58.b58encode(_PEER_ID + public_key).decode())


@lru_cache(maxsize=_CACHED_KEYS)
def public_key_bytes(peer: PeerId) -> bytes:
    """Return the 32-byte public key in a peer id. Raises ValueError if `peer` is not the canonical text of an
    Ed25519 peer id."""
    raw = base58.b58decode(peer) if len(peer) <= 64 else b""
    if len(raw) != len(_PEER_ID) + PUBLIC_KEY_BYTES or not raw.startswith(_PEER_ID):
        raise ValueError(f"{peer[:64]!r} is not the id of an Ed25519 key")
    if base58.b58encode(raw).decode() != peer:  # base58 ignores trailing spaces: two names for one peer
        raise ValueError(f"{peer!r} is not written canonically")
    y_coordinate = raw[len(_PEER_ID) : -1] + bytes([raw[-1] & ~_SIGN_OF_X])
    if y_coordinate in _SMALL_ORDER:
        raise ValueError(f"{peer} is nobody's key: a point of small order")
    return raw[len(_PEER_ID) :]


@lru_cache(maxsize=_CACHED_KEYS)
def public_key(peer: PeerId) -> Ed25519PublicKey:
    """Return the key in a peer id. Raises ValueError if there is none."""
    return Ed25519PublicKey.from_public_bytes(public_key_bytes(peer))


@lru_cache(maxsize=_CACHED_CHECKS)
def verify(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    """Return True if `peer` signed `statement`. The result is cached. A check that is not answered from the
    cache is charged to the sender (`CHECKED`). Never raises on hostile arguments."""
    checked = CHECKED.get()
    if checked is not None:
        checked.count += 1
    return is_signed(peer, statement, signature)


def is_signed(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    """Return the same as `verify`, but without caching and without charging the sender for the check. It is
    meant for signatures that are seen once, one per contributor, inside a message that is itself signed."""
    try:
        public_key(peer).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


def load_or_create(path: Path) -> Identity:
    """Return the identity in `path`. A missing file is created first, readable by the owner only."""
    if not path.exists():
        create(path)
    return load(path)


def create(path: Path) -> Identity:
    """Write a new identity, readable by the owner only, and return it. Raises IdentityError if the file
    exists or cannot be written."""
    identity = Identity.generate()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(path, error) from None
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity.file_bytes())
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike rename, never replaces an identity that another process just made
    except FileExistsError:
        raise IdentityError(f"identity {path} exists already; remove it to start as a new peer") from None
    except OSError as error:
        raise _write_error(path, error) from None
    finally:
        temporary.unlink(missing_ok=True)
    return identity


def _write_error(path: Path, error: OSError) -> IdentityError:
    """Return the exception for an identity file that cannot be written."""
    return IdentityError(
        f"cannot write identity {path}: {error.strerror}; choose another place: --state FOLDER of `join`, "
        "--key FILE of `publish`, `state` in a peer file"
    )


def load(path: Path) -> Identity:
    """Return the identity in `path`. Raises IdentityError if the file cannot be read or is invalid, or if
    other users may read it."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(IDENTITY_BYTES + 1)  # One more, to notice a file that is too long.
    except OSError as error:
        raise IdentityError(f"cannot read identity {path}: {error.strerror}") from None
    if mode & 0o077:
        raise IdentityError(
            f"identity {path} can be read by others (mode {mode:03o}); run: chmod 600 '{path}', "
            "and make a new one if the machine is shared"
        )
    if len(data) != IDENTITY_BYTES or not data.startswith(_PRIVATE_KEY):
        kind = "an RSA key, as hivemind makes them" if data.startswith(b"\x08\x00") else "no Ed25519 identity"
        raise IdentityError(f"identity {path} holds {kind}; move it away and a new one will be made")
    seed, stored_public_key = data[4:36], data[36:]
    identity = Identity(Ed25519PrivateKey.from_private_bytes(seed))
    if identity.public_key != stored_public_key:
        raise IdentityError(f"identity {path} is damaged (its two halves disagree); restore it from a backup")
    return identity
