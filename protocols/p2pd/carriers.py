"""Carriers: extra p2pd processes (libp2p daemons) of one peer, which give it more TCP connections.

Between two peers, libp2p keeps one TCP connection for all streams. At 50 ms and 1 % loss it carries 2.7
Mbit/s with cubic, with one stream as with four (measured). Each carrier has a throw-away key of its own, so
libp2p gives it separate connections. A carrier only dials. Snapshots are fetched through carriers
(chunk_streams.py), and slow links send through them (multipath_link.py).

The receiver sees only the carrier's key. If it must know the peer behind it, the carrier first sends an
introduction, which that peer has signed:

    introduction   public key 32 of the peer it carries for | its signature 64
    statement      "swarmnet carrier 1\\0" | public key 32 of the carrier | public key 32 of the receiver
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from protocols.daemon.p2pd import Daemon, DaemonOptions
from protocols.daemon.temporary import prefix
from protocols.errors import BadSignature, CannotStart
from protocols.signed.identity import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    IdentityError,
    create,
    peer_id_of,
    public_key_bytes,
    verify,
)
from swarmnet.identifiers import PeerId

INTRODUCTION_BYTES = PUBLIC_KEY_BYTES + SIGNATURE_BYTES
_DOMAIN = b"swarmnet carrier 1\0"


def introduction(identity: Identity, carrier: PeerId, receiver: PeerId) -> bytes:
    """Return the bytes by which `identity` confirms to `receiver` that `carrier` sends for it. They need no
    expiry, since the carrier's key is thrown away. Raises ValueError if a peer id contains no key."""
    return identity.public_key + identity.sign(_statement(carrier, receiver))


def carried_peer(shown: bytes, carrier: PeerId, receiver: PeerId) -> PeerId:
    """Return the peer for which `carrier` acts, from the introduction `shown`. Raises BadSignature if that
    peer did not sign it for this carrier and this receiver."""
    peer, signature = peer_id_of(shown[:PUBLIC_KEY_BYTES]), shown[PUBLIC_KEY_BYTES:]
    try:
        statement = _statement(carrier, receiver)
    except ValueError as error:
        raise BadSignature(f"a carrier without a key of its own: {error}") from None
    if len(shown) != INTRODUCTION_BYTES or not verify(peer, statement, signature):
        raise BadSignature(f"{carrier} claims to carry for {peer}, which did not sign that")
    return peer


def _statement(carrier: PeerId, receiver: PeerId) -> bytes:
    """Return the bytes that are signed in an introduction. Raises ValueError if a peer id contains no key."""
    return _DOMAIN + public_key_bytes(carrier) + public_key_bytes(receiver)


def _cannot_start(error: OSError | IdentityError) -> CannotStart:
    """Convert an error of starting carriers into a CannotStart. Carriers are optional and their callers work
    without them, so callers need to handle this error only."""
    hint = "is there room in the folder for temporary files (the environment's TMPDIR)?"
    return CannotStart(f"a carrier cannot start: {error}; {hint}")


class Carriers:
    """A pool of carriers of one peer. They are started on demand and ended together."""

    def __init__(self, options: DaemonOptions) -> None:
        self._options = options
        self._folder: Path | None = None
        self._started = 0
        self._running: list[Daemon] = []

    @property
    def running(self) -> list[Daemon]:
        """The carriers whose p2pd process still runs."""
        return [daemon for daemon in self._running if daemon.end_reason is None]

    async def start(self, count: int) -> list[Daemon]:
        """Start `count` more carriers in parallel and return those that started. Raises CannotStart if none
        did. If the caller is cancelled, the unfinished starts are cancelled too."""
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix=prefix("carriers")))
            except OSError as error:
                raise _cannot_start(error) from None
        paths = [self._folder / f"identity-{self._started + number}" for number in range(count)]
        self._started += count
        starting = [asyncio.create_task(self._start(path), name=f"carrier {path.name}") for path in paths]
        try:
            await asyncio.wait(starting)
        finally:
            for task in starting:
                task.cancel()
            results = await asyncio.gather(*starting, return_exceptions=True)
        daemons = [daemon for daemon in results if isinstance(daemon, Daemon)]
        if not daemons:
            raise next(error for error in results if isinstance(error, BaseException))
        return daemons

    async def _start(self, path: Path) -> Daemon:
        """Create a key in the file `path` and start a p2pd with it. Raises CannotStart."""
        try:
            create(path)
            daemon = await Daemon.start(path, self._options)
        except (OSError, IdentityError) as error:
            raise _cannot_start(error) from None
        # Added without an await in between, so that `close` ends this process if the caller is cancelled now.
        self._running.append(daemon)
        return daemon

    async def close(self) -> None:
        """End all carriers. Call it when no more are being started; it may be called more than once."""
        ending = self._running
        self._running = []
        await asyncio.gather(*(daemon.stop() for daemon in ending))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
