"""Hostile inputs from a seed: what honest peers write, bent in every way, and values of any type and size."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, get_args, get_origin

import msgpack
import msgspec

from protocols.signed.identity import Identity

ALICE, BOB = Identity.from_seed(b"alice"), Identity.from_seed(b"bob")
INTEGERS = [
    0, 1, -1, 2**7, 2**8 - 1, 2**15 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53,
    2**62, 2**63 - 1, -(2**63), 2**64 - 1,
]  # fmt: skip
"""At the ends of every type that a number may be read into."""
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e300, 5e-324, math.nan, math.inf, -math.inf, 86400.0, 1e18]
TEXTS = [
    "", "a", "x" * 64, "x" * 65, "\x1b[2J\x1b[31m", "<script>alert(1)</script>", "\u202eevil", "\0", "é" * 40,
    "../../etc/passwd", "٣", "9" * 5000, ALICE.peer_id, BOB.peer_id + " ",
]  # fmt: skip
NUMBERS_IN_JSON = ["9" * 5000, "1e999", "-1e999", "NaN", "10e-9999", str(10**40)]
"""Written as a number, which no float holds or whose digits Python does not count."""
_HEADS = bytes.fromhex("00 ff 7f 80 c0 c1 dd df c9 91 81 d4 cb c6 db 0a 22 5b 7b")
"""First bytes of MessagePack's types, and JSON's punctuation."""
_LENGTHS = (0, 1, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
_NESTS = (b"\x91", b"\x81", b"\xc7\x01\x50", b"\xdc\x00\x01", b"[", b'{"a":')


@dataclass(frozen=True, slots=True)
class Decoder:
    """One way in for bytes of others."""

    name: str
    make: Callable[[Random], Any]
    """A hostile input."""
    decode: Callable[[Any, Path], object]
    """Takes one, and an empty folder of its own. A coroutine is run to its end."""
    errors: tuple[type[Exception], ...]
    """What it may raise: the decoder's own kinds. Anything else is a fault, failed assertions among it."""


def _flip(data: bytearray, at: int, chance: Random) -> bytearray:
    if data:
        data[at] ^= 1 << chance.randrange(8)
    return data


def _head(data: bytearray, at: int, chance: Random) -> bytearray:
    if data:
        data[at] = chance.choice(_HEADS)
    return data


def _truncate(data: bytearray, at: int, chance: Random) -> bytearray:
    return data[:at]


def _extend(data: bytearray, at: int, chance: Random) -> bytearray:
    return data + chance.randbytes(chance.randrange(1, 16))


def _repeat(data: bytearray, at: int, chance: Random) -> bytearray:
    data[at:at] = data[at : at + chance.randrange(1, 33)]
    return data


def _cut_out(data: bytearray, at: int, chance: Random) -> bytearray:
    del data[at : at + chance.randrange(1, 9)]
    return data


def _splice(data: bytearray, at: int, chance: Random) -> bytearray:
    other = chance.randrange(len(data) + 1)
    return data[:at] + data[other:]


def _length(data: bytearray, at: int, chance: Random) -> bytearray:
    data[at : at + 4] = struct.pack(">I", chance.choice(_LENGTHS))
    return data


def _float(data: bytearray, at: int, chance: Random) -> bytearray:
    data[at : at + 8] = struct.pack(">d", chance.choice(FLOATS))
    return data


def _nest(data: bytearray, at: int, chance: Random) -> bytearray:
    data[at:at] = chance.choice(_NESTS) * chance.choice((1, 7, 9, 300))
    return data


def _value(data: bytearray, at: int, chance: Random) -> bytearray:
    data[at:at] = packed(anything(chance))
    return data


_MUTATIONS = (
    _flip, _head, _truncate, _extend, _repeat, _cut_out, _splice, _length, _float, _nest, _value,
)  # fmt: skip


def bent(data: bytes, chance: Random) -> bytes:
    """`data` after none to four mutations: what is taken must be taken in the midst of all else."""
    changed = bytearray(data)
    for _ in range(chance.choice((0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 4))):
        changed = chance.choice(_MUTATIONS)(changed, chance.randrange(max(1, len(changed))), chance)
    return bytes(changed)


def packed(value: object) -> bytes:
    """In MessagePack."""
    return bytes(msgpack.packb(value, strict_types=False))


def anything(chance: Random, depth: int = 0) -> Any:
    """A value of any type that MessagePack has."""
    kind = chance.randrange(9 if depth < 3 else 6)
    if kind == 6:
        return [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 7:
        keys = [chance.choice([*TEXTS[:4], chance.randrange(9)]) for _ in range(chance.randrange(4))]
        return {key: anything(chance, depth + 1) for key in keys}
    if kind == 8:
        return msgpack.ExtType(chance.randrange(127), chance.randbytes(chance.randrange(20)))
    sizes = (0, 1, 8, 12, 16, 31, 32, 33, 64, 100)
    plain = (INTEGERS, FLOATS, TEXTS, [chance.randbytes(chance.choice(sizes))], [None, True, False], range(9))
    return chance.choice(plain[kind])


def anything_in_json(chance: Random) -> Any:
    """A value of any type that JSON has; of texts in NUMBERS_IN_JSON `written` makes numbers."""
    numbers = [f"NUMBER{number}" for number in NUMBERS_IN_JSON]
    return chance.choice([*INTEGERS, *FLOATS, *TEXTS, *numbers, None, True, [], {}, [[]] * 3, [1] * 50])


def written(content: object) -> bytes:
    """As JSON that no honest program writes: NaN, numbers of thousands of digits."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    for number in NUMBERS_IN_JSON:
        text = text.replace(f'"NUMBER{number}"', number)
    return text.encode()


def replaced(content: Any, chance: Random) -> Any:
    """A tree of dictionaries and lists: up to three of its values anything at all, or under odd keys."""
    content = deepcopy(content)
    for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3))):
        place = content
        while isinstance(place, dict | list) and place:
            key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if isinstance(place, dict) and chance.random() < 0.1:
                place[chance.choice(TEXTS)] = place.pop(key)
                break
            if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.25:
                place[key] = anything_in_json(chance)
                break
            place = place[key]
    return content


def built(kind: Any, chance: Random) -> Any:
    """A value of an annotated type, mostly within its bounds."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return built(arguments[0], chance)
    if origin is list:
        return [built(arguments[0], chance) for _ in range(chance.choice((0, 1, 2, 5)))]
    if origin is tuple:
        inner = [arguments[0]] * chance.randrange(4) if arguments[-1] is Ellipsis else arguments
        return tuple(built(each, chance) for each in inner)
    if type(None) in arguments:
        return None if chance.random() < 0.3 else built(arguments[0], chance)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(*(built(field.type, chance) for field in msgspec.structs.fields(kind)))
    plain = {
        int: (0, 1, 2, 7, 100, chance.randrange(2**14)), float: (0.0, 0.5, 1.0, 100.0), bool: (False, True),
        bytes: (b"", bytes(8), bytes(12), bytes(16), bytes(32)), str: ("", "left", ALICE.peer_id, "bf16"),
    }  # fmt: skip
    return chance.choice(plain[kind]) if kind in plain else anything(chance)


def fields_of(value: object) -> Any:
    """What a struct is on the wire: its fields in an array."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def swapped(fields: list[Any], chance: Random, first: int = 0) -> list[Any]:
    """Fields of which one or two, from number `first` on, are anything."""
    changed = list(fields)
    for _ in range(chance.randrange(1, 3)):
        changed[chance.randrange(first, len(changed))] = anything(chance)
    return changed
