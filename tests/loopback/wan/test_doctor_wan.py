"""The doctor tells apart on the emulated network what hivemind's own check finds reachable alike."""

import asyncio

import pytest
from needs import needs_libp2p, without_network
from wan_doctor import NOBODY, PORT, examine

pytestmark = [pytest.mark.loopback, pytest.mark.soak, pytest.mark.timeout(500)]


@without_network
@needs_libp2p
def test_a_reachable_a_firewalled_and_a_wrongly_announced_peer_are_told_apart(tmp_path):
    found = asyncio.run(examine(tmp_path))
    assert {name: each["hivemind"] for name, each in found.items()} == dict.fromkeys(found, "reachable")
    assert [each["doctor"]["said"] for each in found.values() if "said" in each["doctor"]] == []
    verdicts = {name: each["doctor"]["data"]["verdict"] for name, each in found.items()}
    assert verdicts == {
        "reachable": "reachable", "firewalled": "firewalled", "wrong": "wrongly_announced",
    }  # fmt: skip
    assert {name: each["doctor"]["exit"] for name, each in found.items()} == {
        "reachable": 0, "firewalled": 0, "wrong": 1,
    }  # fmt: skip
    assert f"tcp/{PORT}" in found["firewalled"]["doctor"]["text"]
    assert "through a relay, slower: /ip4/10.77.0.1/" in found["firewalled"]["doctor"]["text"]
    wrong = found["wrong"]["doctor"]
    # A helper dials the asker's own address alone: those of others, announced by mistake, are not tried.
    assert "the address that works is not announced" in wrong["text"]
    assert NOBODY not in wrong["text"]
    assert "reached at /ip4/10.77.0." in wrong["text"]
    assert wrong["fix"].startswith("announce: [/ip4/10.77.0.")
    assert wrong["fix"].endswith(f"/tcp/{PORT}] in the peer file")
