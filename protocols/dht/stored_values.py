"""Parse and verify the values that hivemind's DHT stores, without hivemind's own decoder.

A value stands under a key, or several stand under one key with different subkeys. There are five kinds:

    value                                    key              subkey
    record, after its run id                 of its stage     the peer that it announces
    registry entry                           of the registry  the run that it announces
    opinion, after its run id                of its kind      its author, and what it is about
    a run's manifest, an order of its owner  of their own     none: these values are *plain*

hivemind 1.1.12 keeps a value as MessagePack (`bin`). A packed subkey is a tag. All values under one key with
subkeys form a dictionary (extension 0x50): [size limit, latest expiry, [[subkey, value, expiry], ...]].
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from random import Random
from typing import Any

import msgpack

from protocols.daemon.hivemind_imports import DictionaryDHTValue, MSGPackSerializer, PeerID
from protocols.errors import Malformed
from protocols.signed import msgpack_guard
from protocols.signed.envelope import RUN_ID_BYTES
from protocols.signed.identity import SIGNATURE_BYTES
from protocols.signed.opinions import is_opinion, open_opinion, opinions_key
from protocols.signed.records import RECORD_LIMIT, manifest_key, open_manifest, open_record, stage_key
from protocols.signed.registry_entry import LISTING_BYTES, RUNS_KEY, open_listing
from protocols.signed.stored_orders import STORED_ORDER_LIMIT, is_stored_order, open_stored_order, order_key
from swarmnet.identifiers import RunId
from swarmnet.run.canonical_form import MANIFEST_LIMIT

DICTIONARY, PLAIN = b"", b"\xc0"
"""hivemind's two reserved subkeys: for a whole dictionary, and for a value without subkey."""
PEERS_PER_KEY = 768
"""Maximum peers per key. At 4 KB each they stay below 4 MiB, at which hivemind never sends an answer."""
DICTIONARY_LIMIT = 3_500_000
"""Maximum size of one dictionary in bytes."""
_HEAD_BYTES = 5
_PLAIN_LIMIT = max(MANIFEST_LIMIT, STORED_ORDER_LIMIT)
_ENTRY_BYTES = 32
"""Bytes that MessagePack adds to a record in a dictionary: heads, an expiry of 9 bytes, and a reserve. The
same amount covers the dictionary itself."""
_DICTIONARY_ITEMS = 4 * PEERS_PER_KEY + 16


def node_id(peer: PeerID) -> bytes:
    """Return the DHT id that a peer must have, so that it cannot choose it: a hash of its peer id."""
    return node_id_of(peer.to_bytes())


def node_id_of(peer_id: bytes) -> bytes:
    """Return the DHT id for a peer id's bytes, even if they are invalid. Constructing a `PeerID` from them
    would take time quadratic in their number: minutes for a megabyte."""
    return hashlib.sha256(b"swarmnet node 1\0" + peer_id).digest()[:20]


def key_id(key: bytes) -> bytes:
    """Return hivemind's position of a key in the id space."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


@dataclass(frozen=True, slots=True)
class VerifiedValue:
    """The signed facts in a verified value. Times are the swarm's, in seconds since 1970."""

    key: bytes
    subkey: str | None
    sequence: int
    """A newer record or order has a larger one: its time of signing in microseconds. Others have 0."""
    issued_seconds: float
    expires_seconds: float | None
    """The expiry; None if any peer may store the value again, for `MANIFEST_SECONDS` at a time."""


@dataclass(frozen=True, slots=True)
class Item:
    """One value of a request or response. `index` is its position there, and `tag` its packed subkey.
    `expires` is the swarm's time, as on the wire."""

    index: int
    key: bytes
    tag: bytes
    value: bytes
    expires: float


def verify_value(value: bytes, *, plain: bool) -> VerifiedValue:
    """Verify a stored value's signature and return what it says about itself: its key, subkey and times. The
    value is MessagePack `bin`. If `plain`, it must be a manifest or an order. Otherwise it must be a record,
    a registry entry or an opinion. Raises a WireError if it is invalid."""
    content_limit = _PLAIN_LIMIT if plain else RECORD_LIMIT
    msgpack_guard.check(value, content_limit + _HEAD_BYTES)
    content = unpack_value(value)
    if plain and is_stored_order(content):
        run, signed_order = open_stored_order(content)
        key, sequence = key_id(order_key(run, signed_order.owner)), signed_order.order.sequence
        return VerifiedValue(
            key, subkey=None, sequence=sequence, issued_seconds=sequence / 1e6, expires_seconds=None
        )
    if plain:  # A manifest. The run id is the hash of its content.
        run = RunId(hashlib.sha256(content[:-SIGNATURE_BYTES]).hexdigest())
        open_manifest(content, run)
        key = key_id(manifest_key(run))
        return VerifiedValue(key, subkey=None, sequence=0, issued_seconds=0.0, expires_seconds=None)
    if len(content) == LISTING_BYTES:  # A registry entry; no record is as short.
        key, subkey = key_id(RUNS_KEY), open_listing(content).run_id
        return VerifiedValue(key, subkey=subkey, sequence=0, issued_seconds=0.0, expires_seconds=None)
    if is_opinion(content):
        opinion = open_opinion(content)
        key = key_id(opinions_key(opinion.run_id, opinion.kind))
        issued_seconds = opinion.sequence / 1e6
        return VerifiedValue(key, opinion.subkey, opinion.sequence, issued_seconds, opinion.expires_seconds)
    run = RunId(content[:RUN_ID_BYTES].hex())
    if len(content) <= RUN_ID_BYTES:
        raise Malformed("a stored record without a run id")
    signed = open_record(content[RUN_ID_BYTES:], run)
    key = key_id(stage_key(run, signed.record.stage))
    issued_seconds = signed.sequence / 1e6
    return VerifiedValue(key, signed.peer, signed.sequence, issued_seconds, signed.expires_seconds)


def unpack_value(value: bytes) -> bytes:
    """Unpack a stored value that passed `msgpack_guard`. Raises Malformed if it is not binary."""
    if value[0] not in (0xC4, 0xC5, 0xC6):
        raise Malformed("a stored value that is not binary")
    content: bytes = msgpack.unpackb(value)
    return content


def stored_value(content: bytes) -> bytes:
    """Pack content as MessagePack `bin`, the form in which hivemind stores it."""
    return bytes(msgpack.packb(content, use_bin_type=True))


def unpack_subkey(tag: bytes) -> str:
    """Unpack a subkey. Raises Malformed if it is not text packed as hivemind does: one peer, one subkey."""
    msgpack_guard.check(tag, 128)
    try:
        subkey = msgpack.unpackb(tag, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise Malformed(f"a subkey that cannot be read: {error}") from None
    if not isinstance(subkey, str) or MSGPackSerializer.dumps(subkey) != tag:
        raise Malformed("a subkey that is not text, or not written as text is")
    return subkey


def split_values(index: int, key: bytes, tag: bytes, value: bytes, expires: float) -> Iterator[Item]:
    """Yield the values that `value` contains: itself, or each entry if `tag` marks a dictionary. Raises
    Malformed for an invalid key, expiry or dictionary. If only some entries are invalid, the valid ones are
    yielded before it raises."""
    if len(key) != 20 or not isfinite(expires):
        raise Malformed("an impossible key or expiry")
    if tag != DICTIONARY:
        yield Item(index, key, tag, value, expires)
        return
    entries = _unpack_entries(value)
    if len(entries) > PEERS_PER_KEY:
        raise Malformed(f"a dictionary of {len(entries)} records")
    invalid = 0
    for entry in entries:
        match entry:
            case [str() as subkey, bytes() as content, float() as expiry] if isfinite(expiry):
                yield Item(index, key, MSGPackSerializer.dumps(subkey), content, expiry)
            case _:
                invalid += 1
    if invalid:
        raise Malformed(f"{invalid} dictionary entries that are not (peer id, value, expiry)")


def _unpack_entries(value: bytes) -> list[Any]:
    """Return a packed dictionary's entries. Each should be [subkey, value, expiry], which the caller must
    check. Raises Malformed if it is no dictionary."""
    msgpack_guard.check(value, DICTIONARY_LIMIT, item_limit=_DICTIONARY_ITEMS, extensions=(0x50,))
    try:
        packed = msgpack.unpackb(value, strict_map_key=True)
        if not isinstance(packed, msgpack.ExtType):
            raise Malformed("a dictionary of another type")
        match msgpack.unpackb(packed.data, strict_map_key=True):
            case [_, _, list() as entries]:
                return entries
    except (ValueError, msgpack.UnpackException) as error:
        raise Malformed(f"a dictionary that cannot be read: {error}") from None
    raise Malformed("a dictionary without its three parts")


def dictionary(items: list[Item], shift: float) -> bytes:
    """Return the packed DictionaryDHTValue of items, with their expiries shifted by `shift` seconds."""
    packed = DictionaryDHTValue()
    with packed.freeze():  # Otherwise hivemind drops expired items.
        for item in items:
            packed.store(unpack_subkey(item.tag), item.value, item.expires + shift)
        return bytes(MSGPackSerializer.dumps(packed))


def part_of_dictionary(value: bytes, limit: int, chance: Random) -> bytes:
    """Return a packed dictionary of at most about `limit` bytes, with randomly chosen records of the packed
    dictionary `value`. An attacker's large records thus displace a small record only by chance."""
    items = _items_of(value)
    chance.shuffle(items)
    part: list[Item] = []
    bytes_left = limit - _ENTRY_BYTES
    for item in items:
        size = len(item.value) + len(item.tag) + _ENTRY_BYTES
        if size <= bytes_left:
            bytes_left -= size
            part.append(item)
    return dictionary(part, 0.0)


def shifted_dictionary(value: bytes, shift: float) -> bytes:
    """Return the packed dictionary `value` with its expiries shifted by `shift` seconds."""
    return value if shift == 0 else dictionary(_items_of(value), shift)


def _items_of(value: bytes) -> list[Item]:
    """Return the entries of a packed dictionary; their index and key mean nothing."""
    return list(split_values(index=0, key=b"\0" * 20, tag=DICTIONARY, value=value, expires=0.0))
