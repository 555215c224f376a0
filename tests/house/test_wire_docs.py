"""docs/wire.md says what the code does: the message table, the layouts' sizes and the limits.

Run as a program, this file writes the message table anew.
"""

import re
from pathlib import Path

import pytest

from protocols.dht import (
    answers,
    storage,
    stored_values,
    swarm_time,
)
from protocols.dht import (
    directory as dht,
)
from protocols.framing import frames
from protocols.messages import table as messages
from protocols.p2pd import (
    multipath_link,
    reading,
    speed_test,
)
from protocols.p2pd import (
    transport as p2pd,
)
from protocols.reachability import (
    circuit_relay,
    dial_back,
    dial_back_service,
    fresh_dial,
    relay_service,
)
from protocols.signed import (
    envelope,
    invites,
    msgpack_guard,
    opinions,
    orders,
    records,
    registry_entry,
)
from swarmnet.membership import dial_budget
from swarmnet.resources import allowances, circuit_table
from swarmnet.run.canonical_form import MANIFEST_LIMIT
from swarmnet.run.owner_orders import ORDER_LIMIT

PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
WIRE = PAGE.read_text()
TABLE = re.compile(r"(?:^\| \d+ \| [A-Z][^\n]*\n)+", re.MULTILINE)


def message_table():
    rows = []
    for message in messages.MESSAGES:
        fields = ", ".join(message.__struct_fields__) or "-"
        tag = message.__struct_config__.tag
        rows.append(f"| {tag} | {message.__name__} | {message.priority} | {fields} |")
    return rows


def test_every_message_stands_in_the_table_as_it_is():
    (table,) = TABLE.findall(WIRE)
    assert table.splitlines() == message_table(), "run: .venv/bin/python tests/house/test_wire_docs.py"


def test_the_page_names_the_messages_that_have_a_body():
    _, _, section = WIRE.partition("### Bodies")
    named = re.findall(r"^\| `(\w+)` \|", section.partition("\n### ")[0], re.MULTILINE)
    assert set(named) == {message.__name__ for message in messages.MESSAGES if message.body}


def test_every_test_that_the_trap_table_names_exists():
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", WIRE))
    assert len(named) > 15
    assert {name for name in named if f"def {name}(" not in tests} == set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("envelope", f"{envelope.ENVELOPE_BYTES} bytes"),
        ("header limit", f"{messages.HEADER_LIMIT} bytes"),
        ("body limit", f"{frames.BODY_LIMIT // 2**20} MiB"),
        ("piece written", f"{frames.PIECE_BYTES // 1024} KiB"),
        ("piece read", f"{frames.PIECE_LIMIT // 1024} KiB"),
        ("depth", str(msgpack_guard.DEPTH_LIMIT)),
        ("items", str(msgpack_guard.ITEM_LIMIT)),
        ("record", f"{records.RECORD_LIMIT} bytes, {records.RECORD_SECONDS:g} s"),
        ("announced every", f"{records.ANNOUNCE_SECONDS:g} s"),
        ("manifest", f"{MANIFEST_LIMIT} bytes, {records.MANIFEST_SECONDS:g} s"),
        ("order", f"{ORDER_LIMIT} bytes, {orders.ORDER_SECONDS:g} s"),
        ("invite", f"{invites.INVITE_LIMIT} bytes"),
        ("opinion", f"{opinions.OPINION_LIMIT} bytes, {opinions.OPINION_SECONDS / 86400:g} days"),
        ("registry entry", f"{registry_entry.LISTING_BYTES} bytes, {registry_entry.LISTING_SECONDS:g} s"),
        ("clock", f"{records.SKEW_SECONDS:g} s"),
        ("clock's correction", f"{swarm_time.MAX_OFFSET_SECONDS:g} s"),
        ("streams", f"{p2pd.STREAMS_PER_PEER} per peer, {p2pd.STREAMS} in all"),
        (
            "streams of strangers",
            f"{p2pd.STREAMS_PER_STRANGER} per peer, {p2pd.STREAMS_OF_STRANGERS} in all",
        ),
        (
            "unfinished bytes",
            f"{allowances.BODIES_OF_ONE} times the longest body per peer, "
            f"{allowances.BODIES_OF_ALL} times in all",
        ),
        ("pace of a body", f"{allowances.PACE_BYTES // 1024} KiB in {allowances.PACE_SECONDS:g} s"),
        (
            "signature checks",
            f"{allowances.CHECKS_PER_SECOND:g} per peer and second, {allowances.CHECKS_AT_ONCE} at once",
        ),
        ("subflows", f"{p2pd.MAX_SUBFLOWS} per peer"),
        ("unread acknowledgements", f"{reading.UNREAD_BYTES // 1024} KiB"),
        ("first message", f"{reading.FIRST_MESSAGE_SECONDS:g} s"),
        ("keep-alive", f"{multipath_link.KEEPALIVE_SECONDS:g} s"),
        ("idle", f"{reading.IDLE_SECONDS:g} s"),
        ("write", f"{multipath_link.WRITE_SECONDS:g} s"),
        ("DHT call", f"{dht.CALL_SECONDS:g} s"),
        ("DHT storage", f"{storage.STORAGE_LIMIT // 2**20} MiB"),
        ("of these for orders and manifests", f"{storage.SHARED_LIMIT // 2**20} MiB"),
        (
            "strangers' addresses dialled",
            f"{dial_budget.BURST_ADDRESSES}, then {dial_budget.ADDRESSES_PER_MINUTE} a minute",
        ),
        ("DHT peers per key", str(stored_values.PEERS_PER_KEY)),
        ("DHT records per peer", str(storage.RECORDS_PER_PEER)),
        (
            "slots at a relay",
            f"{relay_service.SLOTS}, {relay_service.SLOTS_PER_RANGE} per /24 or /48, "
            f"for {relay_service.SLOT_SECONDS:g} s",
        ),
        (
            "circuits",
            f"{relay_service.CIRCUITS_PER_PEER} per peer, {relay_service.CIRCUITS_PER_RANGE} per /24 or /48, "
            f"{relay_service.CIRCUITS} in all, {circuit_table.IDLE_SECONDS:g} s without a byte",
        ),
        (
            "answers of the directory",
            f"{answers.STRANGERS_ANSWER_LIMIT // 1024} KiB to a stranger, "
            f"{answers.ANSWER_LIMIT} bytes to a neighbour; "
            f"{allowances.ANSWER_BYTES_PER_SECOND / 1e3:g} kB a second and "
            f"{allowances.ANSWER_BYTES_AT_ONCE / 1e6:g} MB at once per peer and per /24 or /48",
        ),
        ("relay's message", f"{circuit_relay.MESSAGE_LIMIT} bytes"),
        (
            "dial-backs",
            f"{dial_back_service.REQUESTS_PER_IP} per IP and minute, "
            f"{dial_back_service.REQUESTS_PER_MINUTE} in all",
        ),
        ("dial-back part", f"{dial_back.PART_LIMIT} bytes"),
        ("dial-back dials", f"{fresh_dial.ADDRESSES}, of {fresh_dial.DIAL_SECONDS:g} s each"),
        (
            "speed",
            f"{speed_test.BYTES_LIMIT // 2**20} MiB, {speed_test.PER_PEER} per peer and minute, "
            f"{speed_test.PER_MINUTE} in all",
        ),
    ],
)
def test_every_limit_stands_in_the_table_as_it_is(name, value):
    (row,) = re.findall(rf"^\| {re.escape(name)} \| ([^|]*) \|", WIRE, re.MULTILINE)
    assert row.strip() == value


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub("\n".join(message_table()) + "\n", WIRE, count=1))
