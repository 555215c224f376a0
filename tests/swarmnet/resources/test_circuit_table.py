"""Which circuits of a relay give way, and when a silent one ends."""

import pytest

from swarmnet.resources.circuit_table import (
    IDLE_SECONDS,
    CircuitLimits,
    CircuitTable,
    NoCircuit,
    circuit_to_displace,
)


def opened(table, source, target, address_range, now=0.0):
    return table.open(source=source, target=target, address_range=address_range, now=now)


@pytest.mark.parametrize(
    ("held", "newcomer", "expected"),
    [
        ("aaab", "b", 2),
        ("aaab", "c", 2),
        ("aaab", "a", None),
        ("aabb", "b", None),
        ("abc", "d", None),
        ("abab", "c", 3),
        ("", "a", None),
    ],
)
def test_the_newest_of_the_range_that_has_most_gives_way(held, newcomer, expected):
    assert circuit_to_displace(dict(enumerate(held)), newcomer) == expected


def test_one_range_holds_its_part_and_no_more():
    table = CircuitTable(CircuitLimits(most=256, most_of_peer=32, most_of_range=64))
    for number in range(64):
        opened(table, f"source {number // 8}", f"target {number // 8}", "198.51.100.0/24")
    with pytest.raises(NoCircuit, match="range_full"):
        opened(table, "source 9", "target 9", "198.51.100.0/24")
    assert opened(table, "honest", "hidden", "203.0.113.0/24") == (64, None)


def test_many_circuits_to_one_peer_leave_it_reachable_from_elsewhere():
    table = CircuitTable(CircuitLimits(most=256, most_of_peer=4, most_of_range=64))
    for number in range(4):
        opened(table, f"key {number}", "hidden", "198.51.100.0/24")
    with pytest.raises(NoCircuit, match="peer_full"):
        opened(table, "key 5", "hidden", "198.51.100.0/24")
    assert opened(table, "honest", "hidden", "203.0.113.0/24") == (4, 3)
    assert len(table) == 4
    for number in range(3):
        opened(table, "honest", f"other {number}", "203.0.113.0/24")
    with pytest.raises(NoCircuit, match="peer_full"):
        opened(table, "honest", "one more", "203.0.113.0/24")


def test_a_circuit_ends_a_minute_after_its_last_byte_and_at_once_when_it_has_given_way():
    table = CircuitTable(CircuitLimits(most=1, most_of_peer=4, most_of_range=4))
    number, _ = opened(table, "a", "b", "range", now=5.0)
    assert table.ends_at(number) == 5.0 + IDLE_SECONDS
    table.carried(number, 50.0)
    assert table.ends_at(number) == 50.0 + IDLE_SECONDS
    table.close(number)
    assert table.ends_at(number) < 0
