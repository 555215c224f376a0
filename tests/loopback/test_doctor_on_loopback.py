"""The doctor among real processes: fresh dials by py-libp2p, the line's speed, and a peer that is running."""

import asyncio
import contextlib
import io
import json
import sys

import pytest
from needs import needs_libp2p

from peers.config.peer_file import validate_peer_file
from peers.config.run_file import publish
from peers.config.yaml_lines import ParsedYaml
from peers.lab.processes.local_processes import start as start_peer
from peers.tools.doctor import swarm
from peers.tools.doctor.print_checks import run_doctor
from protocols.daemon.p2pd import LOOPBACK, Daemon
from protocols.dht.directory import DhtDirectory
from protocols.errors import Backlog, PeerGone
from protocols.p2pd.speed_test import PER_PEER, ReceivedSample, measure, rate
from protocols.p2pd.transport import P2pdTransport
from protocols.reachability.dial_back import ask_dial_back
from protocols.reachability.fresh_dial import dial
from protocols.signed.identity import Identity, create, load

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(600)]

DOCTOR_SECONDS = 200.0
KEYS = {
    "role": "bootstrap", "listen": ["/ip4/127.0.0.1/tcp/0"], "relay": False, "nat": False, "log": "json",
    "metrics": {"listen": "off"},
}  # fmt: skip


@pytest.fixture
async def helper(tmp_path):
    create(tmp_path / "helper")
    transport = await P2pdTransport.start(tmp_path / "helper", LOOPBACK)
    yield transport
    await transport.close()


@pytest.fixture
async def asker(tmp_path, helper):
    create(tmp_path / "asker")
    daemon = await Daemon.start(tmp_path / "asker", LOOPBACK)
    await daemon.connect(helper.peer, helper.addresses, 20.0)
    yield daemon
    await daemon.stop()


@contextlib.asynccontextmanager
async def stranger(answer):
    """A server that is no libp2p; its address."""

    async def serve(reader, writer):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(60):
                await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"


async def flood(reader, writer):
    """A length of nearly 2^63, and bytes as fast as they are taken."""
    while True:
        writer.write(b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(65536))
        await writer.drain()


async def say_hello(reader, writer):
    writer.write(b"220 mail.example ESMTP\r\n")
    await reader.read(1)


async def say_nothing(reader, writer):
    await reader.read()


@needs_libp2p
async def test_a_helper_tells_apart_what_is_at_an_address(helper, asker, tmp_path):
    own, other, closed = asker.addresses[0], helper.addresses[0], "/ip4/127.0.0.1/tcp/1"
    async with stranger(flood) as flooding, stranger(say_hello) as mail, stranger(say_nothing) as mute:
        wanted = [own, other, closed, flooding, mail, mute, "/ip4/192.168.1.1/tcp/1"]
        found = await ask_dial_back(asker, helper.peer, load(tmp_path / "asker"), lambda _: wanted)
    assert found.code == "done"
    outcomes = {each.address: each.outcome for each in found.dialled}
    assert outcomes == {
        own: "reached", other: "other_peer", closed: "refused", flooding: "not_libp2p", mail: "not_libp2p",
        mute: "silent", "/ip4/192.168.1.1/tcp/1": "not_tried",
    }  # fmt: skip
    assert found.dialled[1].detail == helper.peer
    assert found.observed == own


async def test_a_dial_that_breaks_says_so_and_nothing_of_the_address(tmp_path):
    program = tmp_path / "broken.py"
    program.write_text("print('{\"address\": 1}'); raise SystemExit(3)")
    (found,) = await dial(Identity.from_seed(b"x").peer_id, ["/ip4/127.0.0.1/tcp/1"], program)
    assert (found.outcome, "unexpected answer" in found.detail) == ("failed", True)
    program.write_text("raise SystemExit(3)")
    (found,) = await dial(Identity.from_seed(b"x").peer_id, ["/ip4/127.0.0.1/tcp/1"], program)
    assert (found.outcome, "code 3" in found.detail) == ("failed", True)


async def test_the_speed_of_a_line_is_measured_both_ways_and_not_without_end(helper, asker):
    for direction in ("up", "down")[:PER_PEER]:
        assert await measure(asker, helper.peer, direction, 1 << 20) > 1e5
    with pytest.raises(Backlog, match="try again in a minute"):
        await measure(asker, helper.peer, "up", 1 << 20)


async def test_a_peer_without_the_service_is_gone_for_this_purpose(asker, tmp_path):
    create(tmp_path / "bare")
    bare = await Daemon.start(tmp_path / "bare", LOOPBACK)
    try:
        await asker.connect(bare.peer, bare.addresses, 20.0)
        with pytest.raises(PeerGone):
            await measure(asker, bare.peer, "up")
        with pytest.raises(PeerGone):
            await ask_dial_back(asker, bare.peer, load(tmp_path / "bare"), lambda _: bare.addresses)
    finally:
        await bare.stop()


def test_the_rate_is_that_of_the_second_half():
    assert rate([ReceivedSample(0.0, 10), ReceivedSample(10.0, 500), ReceivedSample(11.0, 1000)]) == 500
    assert (
        rate([])
        == rate([ReceivedSample(1.0, 5)])
        == rate([ReceivedSample(1.0, 5), ReceivedSample(1.0, 6)])
        == 0.0
    )


@pytest.mark.slow
@needs_libp2p
async def test_a_peer_that_does_not_run_is_looked_at_from_outside(helper, tmp_path, monkeypatch):
    monkeypatch.setattr(swarm, "FIND_SECONDS", 0.5)  # Nobody knows the run.
    directory = await DhtDirectory.start(helper.daemon)
    data = {
        **KEYS, "role": "worker", "run": "ab" * 32, "state": str(tmp_path / "state"),
        "bootstrap": [f"{address}/p2p/{helper.peer}" for address in helper.addresses],
    }  # fmt: skip
    config = validate_peer_file(ParsedYaml("test", data), tmp_path, "test", {})
    config.state.mkdir(parents=True)
    create(config.identity)
    said = io.StringIO()
    only = {"only": ["p2pd", "reachability"], "as_json": True, "out": said}
    try:
        async with asyncio.timeout(DOCTOR_SECONDS):
            await asyncio.to_thread(run_doctor, config, must_be_reached=False, swarm=True, **only)
    finally:
        await directory.close()
    lines = [line for line in json.loads(said.getvalue())["checks"] if line["check"] != "run"]
    assert [(line["check"], line["level"]) for line in lines] == [("p2pd", "ok"), ("reachability", "ok")]
    assert lines[0]["data"]["peer"] == load(config.identity).peer_id
    assert lines[1]["text"].startswith("reachable directly at ")


async def test_a_published_file_tells_of_the_run_and_its_text_before_any_peer_of_it_runs(tmp_path):
    (tmp_path / "run.yaml").write_text("name: ours\ndata: {sources: [{name: own, path: own}]}\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "text.txt").write_text("words " * 1000)
    publish(tmp_path / "run.yaml", create(tmp_path / "owner.key"))
    data = {
        **KEYS, "role": "worker", "run": str(tmp_path / "ours.run.json"), "stage": 0,
        "data_paths": {"own": str(tmp_path / "own")}, "state": str(tmp_path / "state"),
        "bootstrap": ["/ip4/127.0.0.1/tcp/9/p2p/12D3KooWJN8n1vdmNGqUgeLL1phiasAAnhzQ1AqUhxxvfaBmmaPG"],
    }  # fmt: skip
    config = validate_peer_file(ParsedYaml("test", data), tmp_path, "test", {})
    said = io.StringIO()
    only = {"only": ["text", "run"], "as_json": True, "out": said}
    async with asyncio.timeout(DOCTOR_SECONDS):
        await asyncio.to_thread(run_doctor, config, must_be_reached=False, swarm=True, **only)
    told = {line["check"]: line for line in json.loads(said.getvalue())["checks"]}
    assert {check: line["level"] for check, line in told.items()} == {
        "bootstrap": "fail", "run": "ok", "text": "ok",
    }  # fmt: skip
    assert told["text"]["data"]["files"] == 1


@pytest.mark.slow
@needs_libp2p
async def test_a_running_peer_is_looked_at_from_outside_and_left_alone(helper, tmp_path):
    directory = await DhtDirectory.start(helper.daemon)
    bootstraps = [f"{address}/p2p/{helper.peer}" for address in helper.addresses]
    peer = await start_peer(tmp_path, "peer", {**KEYS, "bootstrap": bootstraps})
    try:
        await peer.until_listening()
        command = [sys.executable, "-m", "peers.cli.main", "doctor", str(tmp_path / "peer.yaml"), "--json"]
        doctor = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(DOCTOR_SECONDS):
            said, complaints = await doctor.communicate()
        assert peer.alive
    finally:
        await peer.stop(60.0)
        await directory.close()
    assert doctor.returncode == 0, (said, complaints)
    checks = {check["check"]: check for check in json.loads(said)["checks"]}
    assert {"python", "torch", "port", "p2pd", "bootstrap", "clock", "bandwidth"} <= checks.keys()
    assert "is running" in checks["port"]["text"]
    assert checks["bootstrap"]["data"]["py_libp2p"] == "reached"
    assert abs(checks["clock"]["data"]["seconds"]) < 3
    reached = checks["reachability"]["data"]
    assert reached["verdict"] == "reachable"
    assert f"{reached['dialled'][0]['address']}/p2p/{peer.peer_id}" in peer.addresses
    assert checks["p2pd"]["data"]["peer"] != peer.peer_id
