import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocols.errors import Malformed, TooLarge
from protocols.signed.msgpack_guard import DEPTH_LIMIT, check

LIMIT = 64 * 1024
HIVEMIND_EXTENSIONS = (0x40, 0x50)
"""hivemind 1.1.12's tuple and DictionaryDHTValue; what is inside them is MessagePack again."""
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=300)
    | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=40,
)  # fmt: skip


def depth(value):
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth, inner), default=0)
    return 0


def nested(levels, middle=b"\xc0"):
    return b"\x91" * levels + middle


def nested_extensions(levels, code=0x40):
    data = b"\xc0"
    for _ in range(levels):
        data = b"\xc9" + len(data).to_bytes(4, "big") + bytes([code]) + data
    return data


@given(values)
def test_what_msgpack_packs_passes_if_it_is_not_too_deep(value):
    data = msgpack.packb(value)
    if depth(value) <= DEPTH_LIMIT:
        check(data, len(data))
    else:
        with pytest.raises(TooLarge):
            check(data, len(data))


@given(st.binary(max_size=200))
@example(b"\x92\xc7\x03\x40\xc0\xc0\xc0")  # an extension that holds more than one object
@example(b"\xd9")
def test_the_guard_agrees_with_an_independent_decoder(data):
    """Whatever passes is one object to the msgpack package too (only texts may hold bad UTF-8)."""
    try:
        check(data, LIMIT)
    except Malformed:
        return
    msgpack.unpackb(data, raw=True, strict_map_key=False, object_pairs_hook=list)


@given(values, st.data())
def test_what_is_cut_or_has_something_behind_it_is_refused(value, data):
    packed = msgpack.packb(value)
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(Malformed):
        check(packed[:cut], LIMIT)
    with pytest.raises(Malformed):
        check(packed + b"\xc0", LIMIT)


def test_depth_is_bounded_exactly_and_without_recursion():
    check(nested(DEPTH_LIMIT), LIMIT)
    with pytest.raises(TooLarge, match="nested"):
        check(nested(DEPTH_LIMIT + 1), LIMIT)
    with pytest.raises(TooLarge, match="nested"):
        check(nested(60_000), LIMIT)


def test_extensions_count_as_levels_and_their_contents_are_walked():
    check(nested_extensions(DEPTH_LIMIT), LIMIT, extensions=HIVEMIND_EXTENSIONS)
    for code in HIVEMIND_EXTENSIONS:
        with pytest.raises(TooLarge, match="nested"):
            check(nested_extensions(2_000, code), LIMIT, extensions=HIVEMIND_EXTENSIONS)
    two_objects = b"\xd5\x40\xc0\xc0"
    with pytest.raises(Malformed, match="more than one"):
        check(two_objects, LIMIT, extensions=HIVEMIND_EXTENSIONS)
    array_borrows_from_outside = b"\x92\xd4\x40\x91\xc0"
    with pytest.raises(Malformed):
        check(array_borrows_from_outside, LIMIT, extensions=HIVEMIND_EXTENSIONS)


def test_extensions_are_refused_where_none_belong():
    with pytest.raises(Malformed, match="extension"):
        check(nested_extensions(1), LIMIT)
    with pytest.raises(Malformed, match="extension"):
        check(msgpack.packb(msgpack.Timestamp(1)), LIMIT, extensions=HIVEMIND_EXTENSIONS)


def test_lengths_that_promise_more_than_there_is_are_refused_at_once():
    for head in (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ):
        with pytest.raises(Malformed):
            check(head + bytes(100), LIMIT)


def test_size_and_number_of_items_are_bounded():
    with pytest.raises(TooLarge, match="bytes"):
        check(bytes(101), 100)
    many = b"\xdd" + (20_000).to_bytes(4, "big") + b"\x80" * 20_000
    with pytest.raises(TooLarge, match="items"):
        check(many, LIMIT)
    check(many, LIMIT, item_limit=20_001)


def test_the_one_byte_that_means_nothing_is_refused():
    with pytest.raises(Malformed, match="starts nothing"):
        check(b"\xc1", LIMIT)
