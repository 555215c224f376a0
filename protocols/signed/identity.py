"""Who a peer is: one Ed25519 key, in the file that p2pd reads; the peer id *is* the public key.

The file is libp2p's protobuf `PrivateKey{type: Ed25519, data: seed 32 B, public key 32 B}`: 68 bytes. Go
wants the 64-byte data, py-libp2p only its first half (measured). A peer id is the identity
multihash of `PublicKey{type: Ed25519, data: 32 B}` in base58 (libp2p peer-id specification), so whatever a
peer signed is verified from its id alone and no keys are ever exchanged.
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
"""In a key's last byte; the rest of it is y."""
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
"""y of the eight points of small order, which are no keys: all can sign in their names. The last two are 0
and 1 spelt with p added, as decoders take them (libsodium's list, ge25519_has_small_order)."""
_KEPT_KEYS = 4096
"""Parsed keys kept in memory (about 300 bytes each): more than the peers one peer ever talks to."""

_KEPT_ANSWERS = 2048
"""Signatures whose check is remembered: records are met again in every Hello, Known and look-up."""


@dataclass(slots=True)
class Checked:
    """How many signatures were really checked, not only looked up, on behalf of somebody."""

    count: int = 0


CHECKED: ContextVar[Checked | None] = ContextVar("checked", default=None)
"""Set while a message is handed on, so that its sender's share of the work is known (framing/intake.py)."""


class IdentityError(Exception):
    """The identity file cannot be used; the message says why and what to do."""


class Identity:
    """A peer's private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes_raw()
        self.peer_id: PeerId = peer_id_of(self.public_key)

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity of a 32-byte seed: an invite's secret, or in tests and simulations any (shorter seeds
        are filled with zeros)."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed.ljust(32, b"\0")))

    def sign(self, statement: bytes) -> bytes:
        """64 bytes; the caller puts a domain prefix into the statement (envelope.py, records.py)."""
        return self._key.sign(statement)

    def seed_bytes(self) -> bytes:
        """The 32-byte seed of the private key: `from_seed` makes the same identity of it."""
        return self._key.private_bytes_raw()

    def file_bytes(self) -> bytes:
        return _PRIVATE_KEY + self._key.private_bytes_raw() + self.public_key


@lru_cache(maxsize=_KEPT_KEYS)
def peer_id_of(public_key: bytes) -> PeerId:
    return PeerId(base58.b58encode(_PEER_ID + public_key).decode())


@lru_cache(maxsize=_KEPT_KEYS)
def public_key_bytes(peer: PeerId) -> bytes:
    """The 32 bytes in a peer id; ValueError if it is not the canonical text of an Ed25519 peer id."""
    raw = base58.b58decode(peer) if len(peer) <= 64 else b""
    if len(raw) != len(_PEER_ID) + PUBLIC_KEY_BYTES or not raw.startswith(_PEER_ID):
        raise ValueError(f"{peer[:64]!r} is not the id of an Ed25519 key")
    if base58.b58encode(raw).decode() != peer:  # base58 ignores trailing spaces: two names for one peer
        raise ValueError(f"{peer!r} is not written canonically")
    if raw[len(_PEER_ID) : -1] + bytes([raw[-1] & ~_SIGN_OF_X]) in _SMALL_ORDER:
        raise ValueError(f"{peer} is nobody's key: a point of small order")
    return raw[len(_PEER_ID) :]


@lru_cache(maxsize=_KEPT_KEYS)
def public_key(peer: PeerId) -> Ed25519PublicKey:
    """The key in a peer id; ValueError if there is none."""
    return Ed25519PublicKey.from_public_bytes(public_key_bytes(peer))


@lru_cache(maxsize=_KEPT_ANSWERS)
def verify(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    """Whether `peer` signed `statement`. Never raises on hostile arguments."""
    checked = CHECKED.get()
    if checked is not None:
        checked.count += 1
    return is_signed(peer, statement, signature)


def is_signed(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    """As `verify`, but the answer is not remembered and does not count against a link: for signatures that
    are met once, as many as the round has contributors, in a message that its maker has signed."""
    try:
        public_key(peer).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


def load_or_create(path: Path) -> Identity:
    """The identity in `path`; made there, readable by the owner only, if there is no such file."""
    if not path.exists():
        create(path)
    return load(path)


def create(path: Path) -> Identity:
    """Write a new identity; IdentityError if the file exists or cannot be written."""
    identity = Identity.generate()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity.file_bytes())
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # unlike rename, never replaces an identity that another process just made
    except FileExistsError:
        raise IdentityError(f"identity {path} exists already; remove it to start as a new peer") from None
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        draft.unlink(missing_ok=True)
    return identity


def _unwritable(path: Path, error: OSError) -> IdentityError:
    return IdentityError(
        f"cannot write identity {path}: {error.strerror}; choose another place: --state FOLDER of `join`, "
        "--key FILE of `publish`, `state` in a peer file"
    )


def load(path: Path) -> Identity:
    """The identity in `path`; IdentityError if it is not one, or others may read it."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(IDENTITY_BYTES + 1)
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
    identity = Identity(Ed25519PrivateKey.from_private_bytes(data[4:36]))
    if identity.public_key != data[36:]:
        raise IdentityError(f"identity {path} is damaged (its two halves disagree); restore it from a backup")
    return identity
