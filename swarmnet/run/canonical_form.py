"""The canonical form of a manifest: the bytes that its id and its owner's signature cover.

The run id is the SHA-256 of the canonical form, which is JSON with sorted keys and no spaces. Anyone who has
the bytes can check the id. The owner's signature over the id proves who published the run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass

from swarmnet.identifiers import RunId

MANIFEST_LIMIT = 16 * 1024
"""Maximum bytes of a canonical manifest with its signature: the directory stores no more."""
ADDED = "added"
"""Marks a key that was added after the first runs were published. It is left out of the canonical form at its
default."""


def canonical_json(keys: object) -> bytes:
    """Return a dataclass's JSON: all keys except `ADDED` ones at their default, sorted, without spaces."""
    return json.dumps(_plain_data(keys), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def run_id_of(canonical: bytes) -> RunId:
    """Return the SHA-256 of the canonical form."""
    return RunId(hashlib.sha256(canonical).hexdigest())


def owner_statement(run_id: RunId) -> bytes:
    """Return the bytes that a run's owner signs. The prefix prevents the signature from being valid for
    another purpose."""
    return b"swarmnet manifest v1" + bytes.fromhex(run_id)


def _plain_data(value: object) -> object:
    """Return a value as dictionaries, lists and scalars, like `asdict`. Keys that were added later (`ADDED`)
    and have their default are left out.

    Runs that were published before such a key existed therefore keep their id. Older programs understand runs
    that do not use it.
    """
    if is_dataclass(value):
        return {
            key.name: _plain_data(getattr(value, key.name))
            for key in fields(value)
            if not (key.metadata.get(ADDED) and getattr(value, key.name) == key.default)
        }
    return [_plain_data(item) for item in value] if isinstance(value, tuple) else value
