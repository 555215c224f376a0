"""Real processes: a peer whose stage devices of one or two nodes hold together, beside a peer with one."""

import asyncio
import contextlib
import signal
import socket

import psutil
import pytest
from processes import QUIET, times, until

from peers.config.run_file import publish
from peers.lab.processes.local_processes import start
from peers.runtime.child_process import start_swarmnet
from peers.telemetry.event_log import read
from protocols.signed.identity import load_or_create

RUN = """
name: small
seed: 1
stages: [2]
model: {num_hidden_layers: 2, hidden_size: 32, num_attention_heads: 2,
  num_key_value_heads: 2, head_dim: 16, intermediate_size: 64}
data: {seq_len: 64, micro_batch_size: 2}
rounds: {global_batch_tokens: 1024, finality_timeout_seconds: 2, snapshot_interval: 4}
"""


@contextlib.asynccontextmanager
async def swarm(folder, run=RUN, compute=None):
    """Two peers of one stage, the first of them with two devices."""
    (folder / "run.yaml").write_text(run)
    publish(folder / "run.yaml", load_or_create(folder / "owner.key"), folder / "run.json")
    keys = {**QUIET, "run": "run.json", "compute_duty_cycle": 0.3, "drain_seconds": 2}
    peers = [await start(folder, "two", {**keys, "compute": compute or {"devices": 2}})]
    try:
        await peers[0].until_listening()
        peers.append(await start(folder, "one", {**keys, "bootstrap": peers[0].addresses[:1]}))
        yield peers
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in peers))


def settled(peer):
    """Round -> digest of what was settled."""
    log = peer.state / "events.jsonl"
    events = read(log) if log.exists() else ()
    return {event.fields["round"]: event.fields["digest"] for event in events if event.name == "settled"}


def made(peer):
    """Rounds to which it contributed."""
    log = peer.state / "events.jsonl"
    return [
        event.fields["round"]
        for event in (read(log) if log.exists() else ())
        if event.name == "contribution_made"
    ]


def agree(one, other, after=-1):
    """How many rounds after that one both have settled; AssertionError if not with equal digests."""
    ours, theirs = settled(one), settled(other)
    both = ours.keys() & theirs.keys()
    assert all(ours[round] == theirs[round] for round in both)
    return sum(round > after for round in both)


def devices(peer):
    """Its devices' processes."""
    return [
        child for child in psutil.Process(peer.process.pid).children()
        if "peers.compute.devices.rank" in child.cmdline()
    ]  # fmt: skip


@pytest.mark.loopback
@pytest.mark.soak
async def test_a_peer_of_two_devices_settles_what_others_do_and_survives_the_death_of_one(tmp_path):
    async with swarm(tmp_path) as (two, one):
        await until(lambda: agree(two, one) > 4 and len(made(two)) > 4, "both settle, both contribute")
        first = devices(two)
        assert len(first) == 2

        first[1].send_signal(signal.SIGKILL)
        await until(lambda: times(two.state, "devices_lost"), "it says that a device was lost")
        assert "device 1 of 2: ended by signal 9; the stage starts again in 1 s" in " ".join(two.said)
        newest = max(settled(one))
        await until(lambda: agree(two, one, newest) > 4 and max(made(two)) > newest, "it takes part again")
        assert two.alive
        assert not {device.pid for device in devices(two)} & {device.pid for device in first}
        assert not any(device.is_running() for device in first)

        left = devices(two)
        left[0].send_signal(signal.SIGSTOP)
        two.kill()  # Whoever hangs just then must not stay behind.
        await until(lambda: not any(device.is_running() for device in left), "they end with their peer")


@contextlib.asynccontextmanager
async def lender(port, key):
    """Another node, which lends one device."""
    arguments = ["lend", f"127.0.0.1:{port}", "--key", str(key), "--device", "cpu"]
    process = await start_swarmnet(arguments)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        _, said = await process.communicate()
    assert "lent to the peer" in said.decode()


@pytest.mark.loopback
@pytest.mark.soak
async def test_a_peer_over_two_nodes_settles_what_others_do_and_waits_for_a_lost_node(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    key = tmp_path / "nodes.key"
    key.write_text("k" * 64)
    key.chmod(0o600)
    compute = {"nodes": {"listen": f"127.0.0.1:{port}", "key": "nodes.key"}}
    async with swarm(tmp_path, compute=compute) as (two, one):
        async with lender(port, key) as node:
            await until(lambda: agree(two, one) > 4 and len(made(two)) > 4, "both settle, both contribute")
            assert len(devices(two)) == 1
            node.kill()
            await until(lambda: times(two.state, "devices_lost"), "it says that a device was lost")
        newest = max(settled(one))
        async with lender(port, key):
            await until(lambda: agree(two, one, newest) > 4, "it follows again")
            await until(lambda: max(made(two)) > newest, "it takes part again")
            assert two.alive
            assert f"waits for 1 device of other nodes: swarmnet lend 127.0.0.1:{port}" in " ".join(two.said)
