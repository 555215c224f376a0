"""A stage on devices of two nodes: this process and a real `swarmnet lend`, on loopback with gloo."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from pydantic import ValidationError

from peers.compute.devices import nodes as nodes_module
from peers.compute.devices.lending import Lender
from peers.compute.devices.node_handshake import read_key
from peers.compute.devices.nodes import NodeListener
from peers.compute.devices.part import spread_part
from peers.compute.stage_part import build_stage_part
from peers.config.compute_file import NodesFile
from peers.config.errors import DevicesLost, UserError
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.model.computing.choices import PLAIN
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import ModelShape, Sync

CPU = torch.device("cpu")
SHAPE = ModelShape(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=16,
    intermediate_size=192,
    max_position_embeddings=256,
)
RUN = Manifest("nodes", PeerId("owner"), stages=(2,), model=SHAPE, sync=Sync(method="sign-muon"))
ME = PeerId("me")


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o600)
    return path


@contextmanager
def lending(port, key, log):
    """The command on another node, as a process of its own."""
    command = [sys.executable, "-m", "peers.cli.main", "lend", f"127.0.0.1:{port}", "--key", str(key)]
    with log.open("ab") as output:
        process = subprocess.Popen([*command, "--device", "cpu"], stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def listen(key, port=0, is_stopped=lambda: False):
    return NodeListener(NodesFile(listen=f"127.0.0.1:{port}", key=key), "cpu", is_stopped)


def port_of(nodes):
    return int(nodes.invitation.split()[2].rpartition(":")[2])


def until(condition, what, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@contextmanager
def spread(nodes):
    part, processes = spread_part(RUN, 0, [CPU], PLAIN, 1, nodes)
    try:
        processes.ready()
        yield part, processes
    finally:
        processes.close()


def trained(part, replica, round):
    """The loss of a microbatch and the contribution made of it."""
    part.compute.publish(replica.live_tiles(False))
    tokens = torch.randint(256, (4, 21), generator=torch.Generator().manual_seed(round))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    loss = part.compute.finish(MicrobatchId(ME, round), inputs, labels).loss_sum / labels.numel()
    payload = part.compute.use_gradient(lambda gradient: part.method.contribute(gradient, 80, round, ME))
    return loss, payload


def same_rounds(parts, replicas, rounds):
    """Both train, and settle in each round what the second has contributed."""
    for round in rounds:
        (ours, own), (theirs, payload) = map(trained, parts, replicas, [round] * 2)
        assert abs(ours - theirs) < 1e-5
        assert len(own) == len(payload)
        digests = []
        for replica in replicas:
            replica.add(round, ME, payload)
            replica.apply(round)
            digests.append(replica.settle(round))
        assert digests[0] == digests[1]
    assert torch.equal(*(replica.settled_units() for replica in replicas))


@pytest.mark.loopback
@pytest.mark.slow
def test_two_nodes_settle_what_one_device_does_and_a_lost_node_is_waited_for(tmp_path, key):
    alone, log = build_stage_part(RUN, 0), tmp_path / "lend.txt"
    single, nodes = alone.replica(alone.first_units(), -1), listen(key)
    port = port_of(nodes)
    with lending(port, key, log) as lender, spread(nodes) as (part, processes):
        assert len(processes.pids) == 1, "the other process runs at the lender"
        replica = part.replica(part.first_units(), -1)
        same_rounds((alone, part), (single, replica), range(2))
        settled = replica.settled_units()
        lender.kill()
        with pytest.raises(DevicesLost, match=r"device [01] of 2: "):
            trained(part, replica, 2)
    with lending(port, key, log) as lender:
        with spread(listen(key, port)) as (part, _):
            same_rounds((alone, part), (single, part.replica(settled, 1)), [2])
        until(lambda: "let go" in log.read_text(), "the lender notices that the peer is done")
        until(lambda: "waits for the peer" in log.read_text(), "it waits for the peer's next start")
        lender.send_signal(signal.SIGTERM)
        assert lender.wait(60) == 0


@contextmanager
def waiting(nodes, is_over):
    """A peer that waits for devices in another thread until the block ends."""
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(nodes.accept_devices)
        try:
            yield
        finally:
            is_over.set()
            assert isinstance(accepted.exception(60), DevicesLost)
            nodes.close()


@pytest.mark.loopback
@pytest.mark.slow
def test_the_command_ends_with_code_2_if_the_peer_has_another_key(tmp_path, key):
    other, log, is_over = tmp_path / "other", tmp_path / "lend.txt", threading.Event()
    other.write_text("f" * 64)
    other.chmod(0o600)
    nodes = listen(key, is_stopped=is_over.is_set)
    with waiting(nodes, is_over), lending(port_of(nodes), other, log) as lender:
        assert lender.wait(120) == 2
    assert "has another key; copy the file of its compute.nodes.key" in log.read_text()


@pytest.mark.loopback
def test_a_device_of_another_kind_is_refused_with_the_option(key):
    is_over = threading.Event()
    nodes = listen(key, is_stopped=is_over.is_set)
    lender = Lender(("127.0.0.1", port_of(nodes)), read_key(key), lambda _: None)
    with waiting(nodes, is_over), pytest.raises(UserError, match=r"of type cpu: --device cpu"):
        lender.run([torch.device("cuda:0")])


def test_devices_that_do_not_come_are_named_with_the_command(key, monkeypatch):
    monkeypatch.setattr(nodes_module, "WAIT_SECONDS", 0.1)
    nodes = listen(key)
    with pytest.raises(DevicesLost) as lost:
        nodes.accept_devices()
    nodes.close()
    words = f"0 of 1 device of other nodes came within 0.1 s; on each other node: {nodes.invitation}"
    assert str(lost.value) == words
    assert nodes.invitation == f"swarmnet lend 127.0.0.1:{port_of(nodes)} --key {key}"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"listen": "0.0.0.0:29500", "key": "k"}, "name the address of this machine in the private network"),
        ({"listen": "[::]:29500", "key": "k"}, "name the address of this machine"),
        ({"listen": "10.0.0.1:29500"}, "needs compute.nodes.key"),
    ],
)
def test_nodes_are_refused_without_a_key_or_on_all_addresses(keys, words):
    with pytest.raises(ValidationError, match=words):
        NodesFile.model_validate(keys, strict=False)


def test_an_address_of_another_machine_is_refused(key):
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.7, port 29500"):
        NodeListener(NodesFile(listen="192.0.2.7:29500", key=key), "cpu", lambda: False)
