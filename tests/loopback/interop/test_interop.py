"""What implementations that nobody here wrote make of our peers: hivemind's own DHT program and client,
py-libp2p, and the plain MessagePack package."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgpack
import msgspec
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st
from model_sizes import model_keys
from processes import publish_run

from peers.config.errors import how_to_install
from peers.lab.processes.demo import LOOPBACK
from peers.lab.processes.local_processes import DemoPeer, start
from protocols.daemon.hivemind_imports import dht_pb2
from protocols.daemon.p2pd import LOOPBACK as LOOPBACK_ONLY
from protocols.daemon.p2pd import Daemon
from protocols.dht.directory import DhtDirectory
from protocols.dht.validator import PING
from protocols.framing.frames import FrameWriter
from protocols.messages.table import MESSAGES, PeerRecord, decode
from protocols.signed.envelope import ENVELOPE_BYTES
from protocols.signed.identity import create, public_key_bytes
from protocols.signed.records import manifest_key, open_manifest, open_record, stage_key
from swarmnet.identifiers import PeerId, RunId

HERE = Path(__file__).parent


def real_peers(test: Any) -> Any:
    """Of one swarm that they share, on one event loop."""
    loop = pytest.mark.asyncio(loop_scope="module")
    for mark in (pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(600), loop):
        test = mark(test)
    return test


PATIENCE_SECONDS = 120.0
RUN = {
    "name": "interop",
    "stages": [1, 1],
    "model": model_keys(width=16, layers=2, heads=2, kv_heads=2, inner=24),
    "data": {"seq_len": 16, "micro_batch_size": 2},
}


@dataclass(frozen=True)
class Swarm:
    run: RunId
    boot: DemoPeer
    peer: DemoPeer


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def swarm(tmp_path_factory) -> AsyncIterator[Swarm]:
    """A bootstrap and a peer of the second stage, as processes of their own."""
    folder = tmp_path_factory.mktemp("swarm")
    signed, _ = publish_run(folder, RUN)
    boot = await start(folder, "boot", {"role": "bootstrap", "run": "run.json", **LOOPBACK})
    peer = None
    try:
        await boot.until_listening()
        keys = {"run": "run.json", "bootstrap": boot.addresses, "stage": 1, **LOOPBACK}
        peer = await start(folder, "peer", keys)
        await peer.until_listening()
        yield Swarm(signed.run_id, boot, peer)
    finally:
        for each in (peer, boot):
            if each is not None:
                await each.stop(60.0)


async def output(*command: str) -> tuple[int, str, str]:
    """Exit code, standard output and error of a program, which ends with this test."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    finally:
        await end(process)
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def end(process: asyncio.subprocess.Process) -> None:
    """With all that it started: hivemind's DHT runs in a process of its own."""
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, PATIENCE_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), seconds)


@real_peers
async def test_hivemind_dht_joins_through_our_bootstrap(swarm):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hivemind.hivemind_cli.run_dht", "--initial_peers", swarm.boot.addresses[0],
        "--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--no_relay", "--refresh_period", "2",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said, nodes, deadline = [], 0, time.monotonic() + PATIENCE_SECONDS
    try:
        while nodes < 3:
            left = deadline - time.monotonic()
            raw = await asyncio.wait_for(process.stdout.readline(), max(0.1, left))
            assert raw, f"hivemind-dht ended: {said[-5:]}"
            said.append(raw.decode())
            found = re.search(r"(\d+) DHT nodes \(including this one\)", said[-1])
            nodes = max(nodes, int(found[1]) if found else 0)
    finally:
        await end(process)
    assert swarm.boot.alive, "it met an ordinary hivemind node"


@real_peers
async def test_hivemind_reads_the_signed_record_of_our_peer_and_the_manifest(swarm):
    keys = {"record": stage_key(swarm.run, 1).hex(), "manifest": manifest_key(swarm.run).hex()}
    deadline, found = time.monotonic() + PATIENCE_SECONDS, {}
    # The peer announces itself when it has found the others; until then there is nothing to read.
    while not (found.get(keys["record"]) and found.get(keys["manifest"])):
        assert time.monotonic() < deadline, (found, list(swarm.peer.said)[-3:])
        code, out, errors = await output(
            sys.executable, str(HERE / "interop_hivemind.py"), swarm.boot.addresses[0], *keys.values()
        )
        assert code == 0, errors[-2000:]
        found = json.loads(out.splitlines()[-1])
    value = bytes.fromhex(found[keys["record"]][swarm.peer.peer_id])
    assert value[:32].hex() == swarm.run
    record = msgpack.unpackb(value[32 + ENVELOPE_BYTES :])
    assert record[:3] == ["peer", swarm.peer.peer_id, 1]
    assert open_record(value[32:], swarm.run).peer == swarm.peer.peer_id
    manifest = open_manifest(bytes.fromhex(found[keys["manifest"]][""]), swarm.run)
    assert json.loads(manifest)["name"] == "interop"


@pytest.mark.loopback
async def test_an_ordinary_hivemind_node_is_told_whether_it_can_be_called(tmp_path):
    create(tmp_path / "ours"), create(tmp_path / "theirs")
    ours = await Daemon.start(tmp_path / "ours", LOOPBACK_ONLY)
    theirs = await Daemon.start(tmp_path / "theirs", LOOPBACK_ONLY)
    directory = await DhtDirectory.start(ours)
    answered = dht_pb2.NodeInfo(node_id=bytes(20))

    async def answer(request: Any, context: Any) -> Any:
        return dht_pb2.PingResponse(peer=answered)

    async def available(claimed: bytes) -> bool:
        request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=claimed), validate=True)
        target = ours.p2p.peer_id
        call = theirs.p2p.call_protobuf_handler(target, PING, request, dht_pb2.PingResponse)
        return (await asyncio.wait_for(call, PATIENCE_SECONDS)).available

    try:
        await theirs.connect(ours.peer, ours.addresses, PATIENCE_SECONDS)
        assert not await available(bytes(20)), "it answers nothing yet"
        await theirs.p2p.add_protobuf_handler(PING, answer, dht_pb2.PingRequest)
        assert await available(bytes(20))
        assert not await available(b"1" * 20), "it answers with another id"
        assert directory.known_nodes == 0
    finally:
        await directory.close()
        await theirs.stop()
        await ours.stop()


@real_peers
@pytest.mark.skipif(
    importlib.util.find_spec("libp2p") is None,
    reason=f"libp2p is not installed: {how_to_install('libp2p')}",
)
async def test_py_libp2p_identifies_and_pings_a_peer(swarm):
    code, out, errors = await output(sys.executable, str(HERE / "interop_libp2p.py"), swarm.peer.addresses[0])
    assert code == 0, errors[-2000:]
    said = json.loads(out.splitlines()[-1])
    key = bytes.fromhex(said["public_key"])
    assert key[:4] == b"\x08\x01\x12\x20", "an Ed25519 key, as libp2p writes it"
    assert key[4:] == public_key_bytes(PeerId(swarm.peer.peer_id))
    Ed25519PublicKey.from_public_bytes(key[4:])
    assert said["addresses"] == [swarm.peer.addresses[0].rpartition("/p2p/")[0]]
    assert any(name.startswith("/swarmnet/") for name in said["protocols"]), said["protocols"]
    assert "/ipfs/ping/1.0.0" in said["protocols"]
    assert len(said["round_trips"]) == 2
    assert all(0 <= microseconds < 30e6 for microseconds in said["round_trips"])


# MessagePack: what our typed codec writes, the plain package reads, and the other way round.


def plain(value: Any) -> Any:
    """As MessagePack's own types: a struct is an array, its tag first if it has one."""
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        return ([] if tag is None else [tag]) + [
            plain(getattr(value, name)) for name in value.__struct_fields__
        ]
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def valid(kind: Any, bounds: tuple[msgspec.Meta, ...] = ()) -> st.SearchStrategy[Any]:
    """Any value that a field of this type takes."""
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        return valid(inner, (*bounds, *more))
    least = max((meta.ge for meta in bounds if meta.ge is not None), default=0)
    most = min((meta.le for meta in bounds if meta.le is not None), default=1e9)
    below = min((meta.lt for meta in bounds if meta.lt is not None), default=2**62)
    longest = min((meta.max_length for meta in bounds if meta.max_length is not None), default=40)
    if get_origin(kind) is list or (get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis):
        items = st.lists(valid(get_args(kind)[0]), max_size=min(longest, 4))
        return items if get_origin(kind) is list else items.map(tuple)
    if get_origin(kind) is tuple:
        return st.tuples(*map(valid, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, *(valid(field.type) for field in msgspec.structs.fields(kind)))
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return st.one_of(*map(valid, get_args(kind)))
    if kind is NoneType:
        return st.none()
    patterns = [meta.pattern for meta in bounds if meta.pattern is not None]
    if patterns:
        return st.from_regex(patterns[0]).filter(lambda text: len(text) <= longest)
    simple = {
        int: st.integers(int(least), below - 1), float: st.floats(float(least), float(most)),
        str: st.text(max_size=longest), bytes: st.binary(max_size=longest), bool: st.booleans(),
    }  # fmt: skip
    return simple[kind]


def header_of(piece: bytes) -> bytes:
    """The header in a message's first piece, cut out by docs/wire.md: flags u8 | length u24 | header length
    u16 | body length u32 | header."""
    (length,) = struct.unpack_from(">H", piece, 4)
    return piece[10 : 10 + length]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_the_plain_package_reads_every_message_and_writes_what_we_read(kind):
    @settings(max_examples=15)
    @given(valid(kind))
    def both_ways(message: Any) -> None:
        writer = FrameWriter()
        writer.post(message)
        piece = writer.next_piece()
        assert piece is not None
        fields = msgpack.unpackb(header_of(piece), strict_map_key=True)
        assert fields == plain(message)
        assert fields[0] == kind.__struct_config__.tag
        assert decode(msgpack.packb(fields)) == message

    both_ways()


@settings(max_examples=30)
@given(valid(PeerRecord))
def test_the_plain_package_reads_a_record(record):
    assert msgpack.unpackb(msgspec.msgpack.encode(record)) == plain(record)
