"""Prove a shared key between a peer and a node that lends it devices, before either trusts the other.

The lender sends MAGIC with a nonce. The peer answers with its own nonce and a proof, and the lender with its
proof. A proof is the HMAC-SHA256 (RFC 2104) of the prover's role and both nonces, so it fits neither another
connection nor the other role. Later messages are not protected: the network must be private.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import stat
import time
from pathlib import Path

from peers.config.atomic_files import is_file
from peers.config.errors import UserError

MAGIC = b"swarmnet lend 1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
"""Length of a SHA-256."""
PEER, LENDER = b"peer", b"lender"
"""The roles."""
STEP_SECONDS = 10.0
"""Time limit for each message of the other side. The peer handles one connection at a time."""
MIN_KEY_BYTES, MAX_KEY_BYTES = 32, 4096
"""Length of a key: at least 128 bits in hexadecimal digits; more bytes are not read."""


class HandshakeError(Exception):
    """The other side cannot be used; the message says why."""


class WrongKey(HandshakeError):
    """The other side speaks this protocol and has another key."""


def read_key(path: Path) -> bytes:
    """Return the key in a file. Raises UserError if it cannot be read, is short, or can be read by others."""
    advice = f"make one with: (umask 077; openssl rand -hex 32 > '{path}')"
    if not is_file(path):
        raise UserError(f"key {path} is not there or no file; {advice}")
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read(MAX_KEY_BYTES).strip()
    except OSError as error:
        raise UserError(f"key {path} cannot be read ({error.strerror}); {advice}") from None
    if mode & 0o077:
        raise UserError(f"key {path} can be read by others (mode {mode:03o}); run: chmod 600 '{path}'")
    if len(key) < MIN_KEY_BYTES:
        raise UserError(f"key {path} has {len(key)} bytes and needs {MIN_KEY_BYTES}; {advice}")
    return key


def prove(key: bytes, role: bytes, lender_nonce: bytes, peer_nonce: bytes) -> bytes:
    """Return the proof of one side for this connection."""
    return hmac.digest(key, MAGIC + lender_nonce + peer_nonce + role, "sha256")


def accept_lender(end: socket.socket, key: bytes) -> None:
    """Do the peer's side of the handshake. Raises HandshakeError or OSError; WrongKey if the keys differ."""
    lender_nonce = _nonce_of(_read(end, len(MAGIC) + NONCE_BYTES))
    peer_nonce = secrets.token_bytes(NONCE_BYTES)
    end.sendall(MAGIC + peer_nonce + prove(key, PEER, lender_nonce, peer_nonce))
    _check(_read(end, PROOF_BYTES), prove(key, LENDER, lender_nonce, peer_nonce))


def greet_peer(end: socket.socket, key: bytes) -> None:
    """Do the lender's side of the handshake. Raises as `accept_lender` does."""
    lender_nonce = secrets.token_bytes(NONCE_BYTES)
    end.settimeout(STEP_SECONDS)
    end.sendall(MAGIC + lender_nonce)
    answer = _read(end, len(MAGIC) + NONCE_BYTES + PROOF_BYTES)
    peer_nonce = _nonce_of(answer[:-PROOF_BYTES])
    _check(answer[-PROOF_BYTES:], prove(key, PEER, lender_nonce, peer_nonce))
    end.sendall(prove(key, LENDER, lender_nonce, peer_nonce))


def _nonce_of(message: bytes) -> bytes:
    if not message.startswith(MAGIC):
        raise HandshakeError("the other side is no `swarmnet` of this version")
    return message.removeprefix(MAGIC)


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise WrongKey("the other side has another key")


def _read(end: socket.socket, size: int) -> bytes:
    """Return the next message, of this size, if it is complete within STEP_SECONDS."""
    data, deadline = b"", time.monotonic() + STEP_SECONDS
    while len(data) < size:
        end.settimeout(max(1e-3, deadline - time.monotonic()))
        piece = end.recv(size - len(data))
        if not piece or time.monotonic() > deadline:
            raise HandshakeError(f"the message ended after {len(data)} of {size} bytes, or was late")
        data += piece
    return data
