"""The self-proving entries of the DHT: records of peers and manifests of runs.

A stored record is a run id and a signed envelope. Any node of any run can therefore check the key, the owner
and the age of what it is asked to store. The envelope's sequence is the time of signing in microseconds. It
orders a peer's records. The expiry is counted from it, so replaying a record does not prolong its life. A
manifest proves itself: its SHA-256 is the run id in its key, and the owner has signed that.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from random import Random

import msgspec

from protocols.errors import BadSignature, Malformed, TooLarge, WireError, WrongRun
from protocols.signed.envelope import (
    ENVELOPE_BYTES,
    RUN_ID_BYTES,
    Envelope,
    EnvelopeKind,
    open_envelope,
    run_bytes,
    seal,
)
from protocols.signed.identity import SIGNATURE_BYTES, Identity, verify
from protocols.signed.peer_record import NAME_CHARACTERS, PeerRecord
from swarmnet.identifiers import PeerId, RunId
from swarmnet.run.canonical_form import MANIFEST_LIMIT, owner_statement

RECORD_SECONDS = 120.0
"""Life of a record in seconds. It outlives a lost announcement, and a partition of 40 s plus the 15 s of
libp2p's dial back-off after it (measured). It is short because dead peers stay listed until then."""
ANNOUNCE_SECONDS = 30.0
"""Announcement interval in seconds: at most a third of a record's life, so that two in a row may be lost."""
RECORD_LIMIT = 4096
"""Maximum size in bytes of a stored record, including run id and envelope."""
MANIFEST_SECONDS = 600.0
"""Life of a stored manifest in seconds. Peers that have it store it again; its content cannot change."""
SKEW_SECONDS = 3.0
"""Maximum difference in seconds between a clock and the swarm's time (hivemind's own bound)."""
VERIFIED_AT_ONCE = 1024
"""Maximum number of records that one look-up verifies. More are false, or wait for the next: an attacker can
store any number, and verifying one takes about 0.2 ms (measured)."""
RECORD_BYTES = RECORD_LIMIT - RUN_ID_BYTES
_ADDRESSES, _TEXT = 16, 256
_decoder: msgspec.msgpack.Decoder[PeerRecord] = msgspec.msgpack.Decoder(PeerRecord)


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A verified `PeerRecord`."""

    record: PeerRecord
    peer: PeerId
    sequence: int

    @property
    def expires_seconds(self) -> float:
        """The expiry in swarm time, seconds since 1970."""
        return self.sequence / 1e6 + RECORD_SECONDS


def seal_record(identity: Identity, run_id: RunId, record: PeerRecord, now_seconds: float) -> bytes:
    """Sign this peer's own record at `now_seconds`, the DHT's time. Returns the envelope. Raises Malformed or
    TooLarge if other peers would refuse it."""
    data = seal(
        identity,
        run_id,
        EnvelopeKind.RECORD,
        record.stage,
        record.round,
        int(now_seconds * 1e6),
        _encode(record),
    )
    open_record(data, run_id)  # Raises if other peers would refuse this record.
    return data


def _encode(record: PeerRecord) -> bytes:
    """Encode a record. Trailing fields from `invite` on are left out if they have their defaults. Such a
    record equals one from before these fields existed."""
    fields: list[object] = msgspec.to_builtins(record, builtin_types=(bytes,))
    names = PeerRecord.__struct_fields__
    optional_count = len(names) - names.index("invite")  # These fields may be left out, from the end on.
    for default in reversed(PeerRecord.__struct_defaults__[-optional_count:]):
        if fields[-1] != default:
            break
        fields.pop()
    return msgspec.msgpack.encode(fields)


def open_record(data: bytes, run_id: RunId) -> SignedRecord:
    """Verify a record, not its age, and decode it. Raises Malformed, TooLarge, WrongRun or BadSignature."""
    envelope = open_envelope(data, run_id, EnvelopeKind.RECORD, RECORD_BYTES - ENVELOPE_BYTES)
    try:
        record = _decoder.decode(envelope.payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not a record of a peer: {error}") from None
    _check_fields(record, envelope)
    return SignedRecord(record, envelope.sender, envelope.sequence)


def _check_fields(record: PeerRecord, envelope: Envelope) -> None:
    """Raise Malformed unless the fields agree with the envelope and are within their limits."""
    texts = (record.role, record.version, *record.addresses)
    problems = [
        (record.peer != envelope.sender, "it speaks for another peer"),
        (record.stage != envelope.stage or record.stage < -1, "its stage is not the signed one"),
        (record.round != envelope.round, "its round is not the signed one"),
        (len(record.addresses) > _ADDRESSES, f"more than {_ADDRESSES} addresses"),
        (any(len(text) > _TEXT for text in texts), f"a text of more than {_TEXT} characters"),
        (not (isfinite(record.tokens_per_second) and record.tokens_per_second >= 0), "an impossible speed"),
        (len(record.name) > NAME_CHARACTERS, f"a name of more than {NAME_CHARACTERS} characters"),
        (not record.name.isprintable(), "a name that would steer a terminal"),
        (not (isfinite(record.checkpoint_seconds) and record.checkpoint_seconds >= 0), "an impossible time"),
    ]
    for is_wrong, problem in problems:
        if is_wrong:
            raise Malformed(f"the record of {envelope.sender} is refused: {problem}")


def _run_id_of(canonical: bytes) -> RunId:
    return RunId(hashlib.sha256(canonical).hexdigest())


class _Owner(msgspec.Struct):
    owner: str


def open_manifest(signed: bytes, run_id: RunId) -> bytes:
    """Check a manifest against the run id and the owner's signature, and return its canonical bytes. Raises
    Malformed, TooLarge, WrongRun or BadSignature."""
    if len(signed) > MANIFEST_LIMIT:
        raise TooLarge(f"a manifest of {len(signed)} bytes; at most {MANIFEST_LIMIT} are allowed")
    if len(signed) <= SIGNATURE_BYTES:
        raise Malformed(f"a manifest of {len(signed)} bytes")
    canonical, signature = bytes(signed[:-SIGNATURE_BYTES]), bytes(signed[-SIGNATURE_BYTES:])
    actual_run = _run_id_of(canonical)
    if actual_run != run_id:
        raise WrongRun(f"this is the manifest of the run {actual_run[:16]}..., not of {run_id[:16]}...")
    try:
        owner = PeerId(msgspec.json.decode(canonical, type=_Owner).owner)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"the manifest names no owner: {error}") from None
    if not verify(owner, owner_statement(run_id), signature):
        raise BadSignature(f"the manifest of the run {run_id[:16]}... is not signed by its owner {owner}")
    return canonical


class Remembered:
    """Keeps the newest record of each (run, peer) until it expires. The number of records is bounded."""

    def __init__(self, chance: Random, limit: int = 16 * 1024) -> None:
        self._chance = chance
        self._limit = limit
        self._newest: OrderedDict[tuple[RunId, PeerId], tuple[SignedRecord, bytes]] = OrderedDict()

    def take(self, run_id: RunId, found: Mapping[PeerId, bytes]) -> list[WireError]:
        """Verify records that are said to be of these peers, and keep each that is newer than the kept one.
        Returns why some were refused. Records that are kept already are not verified again, and of more than
        `VERIFIED_AT_ONCE` others only as many, at random. Beyond the limit, the least recently found one is
        dropped."""
        news = []
        for peer, data in found.items():
            _, known_data = self._newest.get((run_id, peer), (None, b""))
            if known_data == data:
                self._newest.move_to_end((run_id, peer))
            else:
                news.append(peer)
        errors = []
        for peer in news if len(news) <= VERIFIED_AT_ONCE else self._chance.sample(news, VERIFIED_AT_ONCE):
            try:
                self._verify_and_keep(run_id, peer, found[peer])
            except WireError as error:
                errors.append(error)
        return errors

    def _verify_and_keep(self, run_id: RunId, peer: PeerId, data: bytes) -> None:
        """Keep a record unless a newer one is kept. Raises Malformed, TooLarge, WrongRun or BadSignature."""
        signed = open_record(data, run_id)
        if signed.peer != peer:
            raise Malformed(f"a record of {signed.peer} where one of {peer} belongs")
        known, _ = self._newest.get((run_id, peer), (None, b""))
        if known is not None and known.sequence > signed.sequence:
            return
        self._newest[run_id, peer] = (signed, data)
        self._newest.move_to_end((run_id, peer))
        if len(self._newest) > self._limit:
            self._newest.popitem(last=False)

    def at(self, run_id: RunId, stage: int, now_seconds: float) -> dict[PeerId, bytes]:
        """Return the newest signed record of each peer of a stage, without expired ones. A peer whose newest
        record names another stage is left out."""
        expired = [key for key, (signed, _) in self._newest.items() if signed.expires_seconds < now_seconds]
        for key in expired:
            del self._newest[key]
        return {
            peer: data
            for (run, peer), (signed, data) in self._newest.items()
            if run == run_id and signed.record.stage == stage
        }


def stage_key(run_id: RunId, stage: int) -> bytes:
    """Return the DHT key of one stage of a run. Its subkeys are peer ids."""
    return b"swarmnet stage 1\0" + run_bytes(run_id) + struct.pack(">h", stage)


def manifest_key(run_id: RunId) -> bytes:
    """Return the DHT key of a run's manifest."""
    return b"swarmnet manifest 1\0" + run_bytes(run_id)
