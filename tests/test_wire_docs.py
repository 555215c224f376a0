"""docs/wire.md says what the code does: the message table, the layouts' sizes and the limits."""

import re
from pathlib import Path
from typing import get_args

import pytest

from protocols import dht, envelope, frames, gate, guard, messages, p2pd, records, stored

WIRE = (Path(__file__).parent.parent / "docs" / "wire.md").read_text()


def message_table():
    rows = []
    for message in get_args(messages.AnyMessage):
        fields = ", ".join(message.__struct_fields__) or "-"
        body = "yes" if message.body else "-"
        rows.append(
            f"| {message.__struct_config__.tag} | {message.__name__} | {message.priority} | {body} | {message.kind} "
            f"| {fields} |"
        )
    return rows


def test_every_message_stands_in_the_table_as_it_is():
    for row in message_table():
        assert row in WIRE.splitlines()
    assert len(re.findall(r"^\| \d+ \| [A-Z]", WIRE, re.MULTILINE)) == len(message_table())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("envelope", f"{envelope.ENVELOPE_BYTES} bytes"),
        ("header limit", f"{messages.HEADER_LIMIT} bytes"),
        ("body limit", f"{frames.BODY_LIMIT // 2**20} MiB"),
        ("piece written", f"{frames.PIECE_BYTES // 1024} KiB"),
        ("piece read", f"{frames.PIECE_LIMIT // 1024} KiB"),
        ("depth", str(guard.DEPTH_LIMIT)),
        ("items", str(guard.ITEM_LIMIT)),
        ("record", f"{records.RECORD_LIMIT} bytes, {records.RECORD_SECONDS:g} s"),
        ("announced every", f"{records.ANNOUNCE_SECONDS:g} s"),
        ("manifest", f"{records.MANIFEST_LIMIT} bytes, {records.MANIFEST_SECONDS:g} s"),
        ("clock", f"{records.SKEW_SECONDS:g} s"),
        ("streams", f"{p2pd.STREAMS_PER_PEER} per peer, {p2pd.STREAMS} in all"),
        ("first message", f"{p2pd.FIRST_MESSAGE_SECONDS:g} s"),
        ("keep-alive", f"{p2pd.KEEPALIVE_SECONDS:g} s"),
        ("idle", f"{p2pd.IDLE_SECONDS:g} s"),
        ("write", f"{p2pd.WRITE_SECONDS:g} s"),
        ("DHT call", f"{dht.CALL_SECONDS:g} s"),
        ("DHT storage", f"{gate.STORAGE_LIMIT // 2**20} MiB"),
        ("DHT peers per key", str(stored.PEERS_PER_KEY)),
        ("DHT records per peer", str(gate.RECORDS_PER_PEER)),
    ],
)
def test_every_limit_stands_in_the_table_as_it_is(name, value):
    (row,) = re.findall(rf"^\| {re.escape(name)} \| ([^|]*) \|", WIRE, re.MULTILINE)
    assert row.strip() == value
