"""Peers on one local network find each other; what anyone may say there is only ever an address to dial."""

import asyncio
import contextlib
import os
import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from needs import without_network
from processes import times, until

from peers.config.errors import UserError
from peers.config.peer_file import validate_peer_file
from peers.config.run_file import publish
from peers.config.yaml_lines import ParsedYaml
from peers.lab.processes.local_processes import start
from peers.network.discovery import mdns
from peers.network.discovery.mdns import (
    ADDRESSES,
    SERVICE,
    local_addresses,
    mark,
    neighbours,
    peer_in_announcement,
)
from peers.telemetry import event_log
from protocols.signed.identity import Identity, load_or_create

PEER = Identity.from_seed(b"neighbour").peer_id
NAME = f"{PEER}.{SERVICE}"
RUN, OTHER = "ab" * 32, "cd" * 32
HERE = "/ip4/192.168.1.5/tcp/31331"
needs_zeroconf = pytest.mark.skipif(not mdns.installed(), reason="zeroconf (the extra lan) is not installed")


def entries(run=RUN, *addresses):
    return {b"run": mark(run).encode(), **{b"a%d" % n: a.encode() for n, a in enumerate(addresses)}}


def test_a_neighbour_of_the_same_run_is_heard():
    assert peer_in_announcement(NAME, entries(RUN, HERE), RUN) == (PEER, [f"{HERE}/p2p/{PEER}"])


def test_one_of_another_run_is_not_and_a_bootstrap_for_any_run_is():
    assert peer_in_announcement(NAME, entries(OTHER, HERE), RUN) is None
    assert peer_in_announcement(NAME, entries(None, HERE), RUN) is not None
    assert peer_in_announcement(NAME, entries(OTHER, HERE), None) is not None


def test_the_run_is_not_told_to_the_network():
    assert RUN[:8] not in mark(RUN)
    assert mark(RUN) != mark(OTHER)


def test_what_is_no_address_is_left_out_and_no_peer_has_more_than_a_few():
    many = [f"/ip4/192.168.1.5/tcp/{port}" for port in range(1, 10)]
    _, found = peer_in_announcement(NAME, entries(RUN, "/unix/x", "nonsense", *many), RUN)
    assert found == [f"{address}/p2p/{PEER}" for address in many[: ADDRESSES - 2]]
    assert peer_in_announcement(f"12D3KooWnobody.{SERVICE}", entries(RUN, HERE), RUN) is None


@given(
    st.text(max_size=80),
    st.dictionaries(st.sampled_from([b"run", b"a0", b"a1", b"x"]), st.none() | st.binary(max_size=255)),
)
def test_no_service_of_a_stranger_is_more_than_ignored(name, said):
    assert peer_in_announcement(f"{name}.{SERVICE}", said, RUN) is None
    peer_in_announcement(NAME, said, None)


def test_only_addresses_that_neighbours_can_reach_are_announced():
    relayed = f"{HERE}/p2p/{PEER}/p2p-circuit"
    assert local_addresses(["/ip4/127.0.0.1/tcp/1", HERE, relayed, "/ip6/::1/tcp/1"]) == (HERE,)


def peer_file(tmp_path, **keys):
    data = {"role": "bootstrap", "state": str(tmp_path), **keys}
    return validate_peer_file(ParsedYaml("test", data), tmp_path, "test", {})


async def enter(config, addresses):
    said = []
    async with neighbours(config, PEER, addresses, lambda *line: said.append(line)) as found:
        return found, said


async def test_a_peer_of_one_machine_only_is_left_alone_unless_its_file_insists(tmp_path):
    loopback = ["/ip4/127.0.0.1/tcp/1"]
    assert await enter(peer_file(tmp_path), loopback) == (None, [])
    assert await enter(peer_file(tmp_path, lan=False), [HERE]) == (None, [])
    with pytest.raises(UserError, match="lan is true, but"):
        await enter(peer_file(tmp_path, lan=True), loopback)


async def test_without_zeroconf_auto_goes_on_and_true_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(mdns, "installed", lambda: False)
    assert await enter(peer_file(tmp_path), [HERE]) == (None, [])
    with pytest.raises(UserError, match="scripts/setup lan"):
        await enter(peer_file(tmp_path, lan=True), [HERE])


# -- on a real local network: two namespaces and a cable ---------------------------------------------------

RUN_OF_TWO_STAGES = """
name: lan
stages: [1, 1]
model: {num_hidden_layers: 2, hidden_size: 32, num_attention_heads: 2,
  num_key_value_heads: 2, head_dim: 16, intermediate_size: 64}
data: {seq_len: 64, micro_batch_size: 2}
rounds: {global_batch_tokens: 256}
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True, timeout=10, capture_output=True)


@contextlib.contextmanager
def cable():
    """Two network namespaces on one link, with nothing else; their names."""
    one, other = (f"lan{os.getpid():x}{end}" for end in "ab")
    try:
        for name in (one, other):
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", one, "type", "veth", "peer", "name", "eth0", "netns", other)
        for number, name in enumerate((one, other), 1):
            for words in ("link set lo up", f"addr add 192.168.77.{number}/24 dev eth0", "link set eth0 up"):
                ip("-n", name, *words.split())
            ip("-n", name, "route", "add", "default", "dev", "eth0")
        yield one, other
    finally:
        for name in (one, other):
            subprocess.run(["ip", "netns", "del", name], timeout=10, capture_output=True)


async def told(peer, beginning, seconds):
    """Whether the peer says a line that begins so in time."""
    until = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        if any(line.startswith(beginning) for line in peer.said):
            return True
        await asyncio.sleep(0.1)
    return False


@without_network
@needs_zeroconf
@pytest.mark.loopback
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_peers_without_a_bootstrap_find_their_run_on_the_local_network_and_train(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN_OF_TWO_STAGES)
    signed, _ = publish(tmp_path / "run.yaml", load_or_create(tmp_path / "owner.key"), tmp_path / "run.json")
    keys = {
        "relay": False, "nat": False, "log": "json", "metrics": {"listen": "off"}, "drain_seconds": 2,
        "checkpoint_seconds": 0,
    }  # fmt: skip
    # Whoever knows no more than the run's id has the manifest from whom it finds, too.
    every = {
        "boot": (0, {"role": "bootstrap", "run": "run.json"}),
        "other-boot": (1, {"role": "bootstrap", "run": signed.run_id}),
        "first": (0, {"role": "worker", "run": signed.run_id, "stage": 0}),
        "last": (1, {"role": "worker", "run": signed.run_id, "stage": 1}),
    }
    peers = {}
    with cable() as places:
        try:
            for name, (place, more) in every.items():
                prefix = ["ip", "netns", "exec", places[place]]
                peers[name] = await start(tmp_path, name, {**keys, **more}, prefix)
                await peers[name].until_listening()
            assert await told(peers["other-boot"], "run lan:", 120)
            for name in ("first", "last"):
                await until(lambda state=peers[name].state: times(state, "committed"), f"{name} trains")
        finally:
            await asyncio.gather(*(peer.stop(60.0) for peer in peers.values()))
    for name in ("other-boot", "first", "last"):
        events = event_log.read(tmp_path / name / "events.jsonl")
        joined = [event.fields["text"] for event in events if event.name == "joined"]
        assert re.fullmatch(r"joined the swarm through [1-3] addresses on the local network", joined[0])
