"""Check the nesting and size of MessagePack data before it is decoded, without creating objects.

Depth: one small message of nested extensions overflows the C stack of an unguarded hivemind DHT process and
kills it (measured). Items: 4 MB of empty maps expand to 296 MB of objects. The check is a loop without
recursion and reads only the head of each item. MessagePack: github.com/msgpack/msgpack/spec.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from protocols.errors import Malformed, TooLarge
from protocols.fields import Body

DEPTH_LIMIT = 8
"""Maximum nesting. Our deepest message and hivemind's deepest DHT response each nest 4 levels."""
ITEM_LIMIT = 16 * 1024
"""Maximum number of items. Our longest header, 64 KiB of contribution references, has about 4100. Each
reference has 5 items in about 80 bytes."""

# After the leading byte follow either _SKIP bytes to skip, or a length field of _LENGTH bytes and the content
# that it counts.
_BYTES, _ITEMS, _PAIRS, _EXTENSION = range(4)
_SKIP = {
    0xC0: 0,
    0xC2: 0,
    0xC3: 0,
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
}
_LENGTH = {
    0xC4: (1, _BYTES),
    0xC5: (2, _BYTES),
    0xC6: (4, _BYTES),
    0xD9: (1, _BYTES),
    0xDA: (2, _BYTES),
    0xDB: (4, _BYTES),
    0xDC: (2, _ITEMS),
    0xDD: (4, _ITEMS),
    0xDE: (2, _PAIRS),
    0xDF: (4, _PAIRS),
    0xC7: (1, _EXTENSION),
    0xC8: (2, _EXTENSION),
    0xC9: (4, _EXTENSION),
}
_FIXED_EXTENSION = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_WHOLE = bytes(
    1 + (first & 0x1F if 0xA0 <= first <= 0xBF else _SKIP.get(first, 0))
    if first <= 0x7F or first >= 0xE0 or 0xA0 <= first <= 0xBF or first in _SKIP
    else 0
    for first in range(256)
)
"""Size in bytes of items whose leading byte determines it; 0 for all others. Most items of a header are such.
"""
_SHORT_BYTES = 0xC4
"""Leading byte of short binaries: ids, digests and keys, which are nearly all the other items."""
_FEW, _FEW_STOP = 0x80, 0xA0
"""Range of leading bytes of maps and arrays with fewer than 16 entries."""
_RUNS_OVER = "a string, or number, runs over the end"


def _head(data: bytes, at: int) -> tuple[int, int, int]:
    """Decode the head (type and length) of the item at offset `at`. Returns the offset of its content, the
    kind of things that it contains (`_BYTES`, `_ITEMS`, ...), and their number. Raises Malformed."""
    first = data[at]
    at += 1
    if first <= 0x7F or first >= 0xE0:  # A small integer, which is its leading byte.
        return at, _BYTES, 0
    if first <= 0x8F:  # A map of up to 15 pairs.
        return at, _PAIRS, first & 0x0F
    if first <= 0x9F:  # An array of up to 15 items.
        return at, _ITEMS, first & 0x0F
    if first <= 0xBF:  # A string of up to 31 bytes.
        return at, _BYTES, first & 0x1F
    if first in _SKIP:  # Nil, a boolean, a float or a larger integer.
        return at, _BYTES, _SKIP[first]
    if first in _FIXED_EXTENSION:  # An extension of 1 to 16 bytes.
        return at, _EXTENSION, _FIXED_EXTENSION[first]
    if first not in _LENGTH:
        raise Malformed(f"byte {first:#04x} starts nothing in MessagePack")
    width, counted = _LENGTH[first]  # Bytes of the length field, and what it counts.
    if at + width > len(data):
        raise Malformed("a length field runs over the end")
    return at + width, counted, int.from_bytes(data[at : at + width], "big")


def _enter_extension(
    data: bytes, at: int, count: int, end: int, allowed: Container[int]
) -> tuple[int, int, int]:
    """Check an extension's type and length. Its type byte is at offset `at`; `count` bytes follow. Returns
    the offset of its content, the number of objects in it (1), and its end. Raises Malformed."""
    if at >= end or data[at] not in allowed:
        raise Malformed("an extension type that does not belong here")
    at += 1
    if at + count > end:
        raise Malformed("an extension runs over the end")
    return at, 1, at + count


def check(
    data: Body,
    limit_bytes: int,
    *,
    depth_limit: int = DEPTH_LIMIT,
    item_limit: int = ITEM_LIMIT,
    extensions: Iterable[int] = (),
) -> None:
    """Raise Malformed or TooLarge unless `data` is exactly one MessagePack object within the limits.
    `extensions` lists the allowed extension types. Their contents are checked too, one level deeper."""
    if len(data) > limit_bytes:
        raise TooLarge(f"{len(data)} bytes of MessagePack; at most {limit_bytes} are allowed")
    data, allowed = bytes(data), frozenset(extensions)
    # `at` is the offset of the next item, and `items` the number of items read. `left` items are left in this
    # level (an array, map or extension), which must not run over `end`.
    at, end, items, left = 0, len(data), 0, 1
    # For each enclosing level: its `left`, its `end`, and whether the level within it is an extension.
    open_levels: list[tuple[int, int, bool]] = []
    while True:
        while left == 0:  # This level is complete: return to the enclosing one.
            if not open_levels:
                if at != end:
                    raise Malformed(f"{end - at} bytes after the end of the object")
                return
            left, outer_end, was_extension = open_levels.pop()
            if was_extension and at != end:
                raise Malformed("an extension holds more than one object")
            end = outer_end
        first = 0
        while left:  # Items that enclose nothing: nearly all of a header.
            if at >= end:
                raise Malformed(_RUNS_OVER if at > end else "ends in the middle")
            items += 1
            left -= 1
            first = data[at]
            size = _WHOLE[first]  # 0 if the leading byte does not determine it.
            if size:
                at += size
            elif first == _SHORT_BYTES and at + 1 < end:
                at += 2 + data[at + 1]  # The second byte is the length.
            else:
                break
        else:  # No item is left in this level.
            if at > end:
                raise Malformed(_RUNS_OVER)
            continue
        # The item holds `count` bytes, items or pairs from offset `at` on; `counted` tells which.
        if _FEW <= first < _FEW_STOP:  # A short array or map, as most are; no call is needed.
            counted = _ITEMS if first & 0x10 else _PAIRS
            at, count = at + 1, first & 0x0F
        else:
            at, counted, count = _head(data, at)
        if counted == _BYTES:
            at += count
            if at > end:
                raise Malformed(_RUNS_OVER)
            continue
        if len(open_levels) >= depth_limit:
            raise TooLarge(f"nested deeper than {depth_limit} levels")
        open_levels.append((left, end, counted == _EXTENSION))
        if counted == _EXTENSION:
            at, left, end = _enter_extension(data, at, count, end, allowed)
            continue
        left = count if counted == _ITEMS else 2 * count
        if left > end - at:  # every item takes at least a byte: refuses 2^32 of them at once
            raise Malformed("an array or map has more items than bytes follow")
        if items + left > item_limit:
            raise TooLarge(f"more than {item_limit} items")
