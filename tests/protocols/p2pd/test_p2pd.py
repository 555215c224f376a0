"""What only p2pd can do wrong: ports, its own death, silent strangers, and what it leaves behind."""

import asyncio
import contextlib
import errno
import gc
import os
import re
import signal
import socket
import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from freezing import freeze, frozen
from on_p2pd import DEADLINE, Listener, transports

from protocols.daemon import p2pd as daemon_module
from protocols.daemon.hivemind_imports import PeerID
from protocols.daemon.multiaddr import is_circuit, multiaddr_bytes
from protocols.daemon.p2pd import LOOPBACK, Daemon, DaemonOptions
from protocols.errors import CannotStart, PeerGone
from protocols.framing.frames import FrameWriter, wire_bytes
from protocols.messages.table import Act, Busy, encode
from protocols.p2pd import multipath_link, reading
from protocols.p2pd import transport as p2pd
from protocols.p2pd.transport import P2pdTransport
from protocols.signed.identity import Identity, create

pytestmark = pytest.mark.loopback
BUSY = Busy("12D3KooW", 3, 1)


@pytest.fixture
async def start(tmp_path):
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with transports(tmp_path) as start:
        yield start
    await asyncio.sleep(0)
    assert complaints == []


def busy_piece():
    writer = FrameWriter()
    writer.post(BUSY)
    return writer.next_piece()


async def raw_stream(attacker, target):
    await attacker.daemon.connect(target.peer, target.addresses, DEADLINE)
    return await attacker.daemon.open_stream(target.peer, p2pd.protocol_name("data"), DEADLINE)


async def test_the_identity_file_gives_p2pd_its_peer_id(start, tmp_path):
    transport = await start()
    data = (tmp_path / "identity0").read_bytes()
    assert transport.peer == Identity.from_seed(data[4:36]).peer_id


async def test_a_port_that_another_program_has_is_named(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        with pytest.raises(CannotStart, match=re.escape(address)) as raised:
            await start(DaemonOptions(listen=(address,)))
        assert "is taken" in str(raised.value)


async def test_a_port_that_another_p2pd_has_is_not_shared_with_it(start):
    # go-libp2p sets SO_REUSEPORT: without our check both would start and share the connections.
    address = (await start()).addresses[0]
    with pytest.raises(CannotStart, match=re.escape(address)):
        await start(DaemonOptions(listen=(address,)))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("/ip4/203.0.113.7/tcp/0", "no address of this machine"),
        ("/ip4/127.0.0.1/tcp/80000", "no valid port"),
        ("/ip4/127.0.0.1", "does not start"),
    ],
)
async def test_an_address_that_cannot_be_listened_on_is_explained(start, address, message):
    with pytest.raises(CannotStart, match=message) as raised:
        await start(DaemonOptions(listen=(address,), auto_nat=False, nat_port_map=False, relay=False))
    assert "\n" not in str(raised.value)


def test_a_machine_without_ipv6_is_told_what_to_take_out(monkeypatch):
    def socket_of(family, kind):
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(daemon_module.socket, "socket", socket_of)
    for address in ("/ip6/::/tcp/31331", "/ip6/::/udp/31331/quic-v1"):
        with pytest.raises(CannotStart, match=f"^this machine has no IPv6: take {address} out of listen$"):
            daemon_module.check_ports([address])


async def test_when_p2pd_dies_its_end_is_told_and_all_links_fail_at_once(start):
    a, b = await start(), await start()
    link = await a.open(b.peer, "data", DEADLINE, b.addresses)
    back = await b.open(a.peer, "data", DEADLINE)
    back.post(BUSY)
    await a.listener.until(lambda heard: heard.messages)
    os.kill(a.daemon.pid, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE):
        assert "signal 9" in await a.ended()
    await a.listener.until(lambda heard: len(heard.lost_) == 2)
    assert link.closed
    with pytest.raises(PeerGone, match="not running"):
        await a.open(b.peer, "data", DEADLINE, b.addresses)


async def test_a_stranger_that_says_nothing_is_cut_off(start, monkeypatch):
    monkeypatch.setattr(reading, "FIRST_MESSAGE_SECONDS", 0.3)
    victim, stranger = await start(), await start()
    reader, writer = await raw_stream(stranger, victim)
    dripping = busy_piece()[:-1]
    writer.write(dripping)
    await victim.listener.until(lambda heard: heard.refused_)
    assert victim.listener.refused_[0][:2] == (stranger.peer, "malformed")
    async with asyncio.timeout(DEADLINE):
        assert await reader.read() == b""
    writer.close()


async def test_a_link_without_a_sign_of_life_is_lost_and_keep_alives_prevent_it(start, monkeypatch):
    monkeypatch.setattr(reading, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(multipath_link, "KEEPALIVE_SECONDS", 0.05)
    victim, peer = await start(), await start()
    link = await peer.open(victim.peer, "group", DEADLINE, victim.addresses)
    link.post(BUSY)
    _, writer = await raw_stream(peer, victim)
    writer.write(busy_piece())
    await victim.listener.until(lambda heard: heard.lost_)
    assert [lane for _, lane, _ in victim.listener.lost_] == ["data"]
    assert not link.closed
    writer.close()


async def test_a_flood_of_streams_is_cut_at_the_limit_and_others_are_served(start, monkeypatch):
    monkeypatch.setattr(p2pd, "STREAMS_PER_PEER", 4)
    victim, flooder, honest = await start(), await start(), await start()
    streams = [await raw_stream(flooder, victim) for _ in range(20)]
    await victim.listener.until(lambda heard: len(heard.refused_) == 16)
    assert {(peer, code) for peer, code, _ in victim.listener.refused_} == {(flooder.peer, "backlog")}
    link = await honest.open(victim.peer, "data", DEADLINE, victim.addresses)
    link.post(BUSY)
    await victim.listener.until(lambda heard: heard.messages == [BUSY])
    for _, writer in streams:
        writer.close()


async def test_a_receiver_that_answers_on_a_one_way_stream_is_refused(start):
    a, b = await start(), await start()

    async def answer(info, reader, writer):
        writer.write(b"hello")
        await reader.read(1)
        writer.close()

    b.daemon.p2p._client.control.handlers[p2pd.protocol_name("data")] = answer
    link = await a.open(b.peer, "data", DEADLINE, b.addresses)
    await a.listener.until(lambda heard: heard.refused_)
    assert a.listener.refused_[0][:2] == (b.peer, "malformed")
    assert link.closed


async def routed(a, b, *hints):
    """A link to a peer that only libp2p's routing can find, as soon as the one in the middle knows it."""
    async with asyncio.timeout(DEADLINE):
        while True:
            with contextlib.suppress(PeerGone):
                return await a.open(b.peer, "data", DEADLINE, hints)


async def test_a_third_peer_is_reached_by_its_id_alone_through_a_common_one(start):
    middle, a, b = await start(), await start(), await start()
    for peer in (a, b):
        await peer.daemon.connect(middle.peer, middle.addresses, DEADLINE)
    link = await routed(a, b)
    link.post(BUSY)
    await b.listener.until(lambda heard: heard.messages)


async def test_a_peer_that_moved_is_found_though_the_hint_is_old(start):
    middle, a, b = await start(), await start(), await start()
    for peer in (a, b):
        await peer.daemon.connect(middle.peer, middle.addresses, DEADLINE)
    link = await routed(a, b, "/ip4/127.0.0.1/tcp/1")
    assert not link.closed


async def test_an_open_ends_at_its_deadline_when_the_peer_is_frozen(start):
    a, b = await start(), await start()
    with frozen(b.daemon.pid), pytest.raises(PeerGone, match="no answer within"):
        await a.open(b.peer, "data", 0.3, b.addresses)


async def test_a_frozen_p2pd_is_killed_at_close(start, monkeypatch):
    monkeypatch.setattr(daemon_module, "STOP_SECONDS", 0.2)
    a = await start()
    freeze(a.daemon.pid)
    await a.close()
    with pytest.raises(ProcessLookupError):
        os.kill(a.daemon.pid, 0)


async def test_nothing_is_left_behind_by_a_peer_that_closed_and_killed_ones_are_swept(start, tmp_path):
    def ours():
        return set(Path(tempfile.gettempdir()).glob(f"swarmnet-{os.getpid()}-*"))

    stale = Path(tempfile.mkdtemp(prefix="swarmnet-4194304-"))  # above the largest process id of Linux
    before = ours()
    transport = await start()
    (folder,) = ours() - before
    assert os.stat(folder).st_mode & 0o077 == 0
    assert stale.name not in os.listdir(tempfile.gettempdir())
    await transport.close()
    assert ours() == before


async def test_the_child_has_its_memory_limit_and_our_environment_is_as_before(start, monkeypatch):
    monkeypatch.delenv("GOMEMLIMIT", raising=False)
    transport = await start()
    with open(f"/proc/{transport.daemon.pid}/environ", "rb") as file:  # noqa: ASYNC230 - a file in memory
        environment = file.read().split(b"\0")
    assert b"GOMEMLIMIT=100MiB" in environment
    assert b"GOGC=50" in environment
    assert "GOMEMLIMIT" not in os.environ


def test_the_transport_works_on_uvloop_as_well(tmp_path):
    uvloop = pytest.importorskip("uvloop")

    async def scenario():
        heard, peers = Listener(), []
        for name in ("a", "b"):
            create(tmp_path / name)
            peers.append(await P2pdTransport.start(tmp_path / name, LOOPBACK))
        peers[1].listen(heard)
        link = await peers[0].open(peers[1].peer, "data", DEADLINE, peers[1].addresses)
        link.post(Act("x", 1, 1, 1, 1.0, (1, 2, 3)), bytes(3_000_000))
        await heard.until(lambda heard: heard.messages)
        os.kill(peers[0].daemon.pid, signal.SIGKILL)
        await heard.until(lambda heard: heard.lost_)
        for peer in peers:
            await peer.close()
        assert link.closed
        assert asyncio.all_tasks() == {asyncio.current_task()}

    uvloop.run(scenario())


async def test_whoever_listened_before_hears_no_more_and_is_let_go_of_though_others_keep_their_links(start):
    a, b = await start(), await start()
    old = await a.open(b.peer, "data", DEADLINE, b.addresses)
    old.post(BUSY)
    await b.listener.until(lambda heard: heard.messages)
    before, b.listener = weakref.ref(b.listener), Listener()
    b.listen(b.listener)
    old.post(BUSY)
    new = await a.open(b.peer, "group", DEADLINE, b.addresses)
    new.post(BUSY)
    await b.listener.until(lambda heard: heard.messages)
    gc.collect()
    assert before() is None
    assert not old.closed
    old.close()
    new.close()
    await b.listener.until(lambda heard: heard.lost_)
    assert b.listener.received_ == [(a.peer, "group", BUSY, b"", wire_bytes(len(encode(BUSY)), 0))]
    assert [(peer, lane) for peer, lane, _ in b.listener.lost_] == [(a.peer, "group")]


async def test_addresses_can_be_asked_for_again(start):
    a = await start()
    assert await a.daemon.refresh_addresses(DEADLINE) == a.addresses
    os.kill(a.daemon.pid, signal.SIGKILL)
    await a.ended()
    with pytest.raises(PeerGone):
        await a.daemon.refresh_addresses(DEADLINE)


async def test_connections_are_named_by_the_peer_and_by_where_it_is(start, monkeypatch):
    a, b = await start(), await start()
    assert await a.daemon.connections(DEADLINE) == []
    await a.daemon.connect(b.peer, b.addresses, DEADLINE)
    assert await a.daemon.connections(DEADLINE) == [(b.peer, b.addresses[0])]
    (back,) = await b.daemon.connections(DEADLINE)
    assert back[0] == a.peer
    with monkeypatch.context() as patch:
        circuit = f"/ip4/1.2.3.4/tcp/5/p2p/{b.peer}/p2p-circuit"
        ends = [circuit, "/ip4/1.2.3.4/tcp/5", circuit]
        patch.setattr(a.daemon, "_request", answers_with_connections(b.peer, ends))
        found = await a.daemon.connections(DEADLINE)
        assert [(peer, is_circuit(end)) for peer, end in found] == [(b.peer, end == circuit) for end in ends]
    os.kill(a.daemon.pid, signal.SIGKILL)
    await a.ended()
    with pytest.raises(PeerGone):
        await a.daemon.connections(DEADLINE)


def answers_with_connections(peer, ends):
    """In the place of asking p2pd: connections to a peer at these addresses."""
    raw = PeerID.from_base58(peer).to_bytes()

    @contextlib.asynccontextmanager
    async def request(asked):
        assert asked.type == daemon_module.p2pd_pb2.Request.LIST_PEERS
        answer = daemon_module.p2pd_pb2.Response()
        for address in ends:
            answer.peers.add(id=raw, addrs=[multiaddr_bytes(address)])
        yield answer, None, SimpleNamespace(close=lambda: None)

    return request


def test_a_relayed_address_is_written_as_p2pd_reads_it():
    relay, peer = Identity.from_seed(b"relay"), Identity.from_seed(b"peer")
    head = bytes.fromhex("0401020304060005")  # /ip4/1.2.3.4/tcp/5
    assert multiaddr_bytes("/ip4/1.2.3.4/tcp/5") == head
    assert multiaddr_bytes(f"/ip4/1.2.3.4/tcp/5/p2p/{peer.peer_id}") == head
    circuit = f"/ip4/1.2.3.4/tcp/5/p2p/{relay.peer_id}/p2p-circuit"
    raw = b"\x00\x24\x08\x01\x12\x20" + relay.public_key
    assert multiaddr_bytes(circuit) == head + b"\xa5\x03\x26" + raw + b"\xa2\x02"
    assert multiaddr_bytes(f"{circuit}/p2p/{peer.peer_id}") == multiaddr_bytes(circuit)
    with pytest.raises(ValueError, match="does not know"):
        multiaddr_bytes(f"/ip4/1.2.3.4/tcp/5/p2p/{peer.peer_id}/tcp/5")


async def test_a_hint_that_is_no_address_is_a_peer_that_is_gone(start):
    a = await start()
    nobody = Identity.from_seed(b"nobody").peer_id
    for hint in (
        "",
        "nonsense",
        "/ip4/999.1.1.1/tcp/5",
        "/unknown/5",
        "/ip4/1.2.3.4/tcp/5/p2p/x/p2p-circuit",
    ):
        with pytest.raises(PeerGone):
            await a.open(nobody, "data", 1.0, [hint])


async def test_a_daemon_with_a_wrong_identity_file_does_not_start(tmp_path):
    (tmp_path / "identity").write_bytes(b"nonsense")
    (tmp_path / "identity").chmod(0o600)
    with pytest.raises(Exception, match="no Ed25519 identity"):
        await Daemon.start(tmp_path / "identity", LOOPBACK)


def test_that_another_peer_answers_is_said_in_words_for_people():
    said = (
        "failed to dial: * [/ip4/127.0.0.1/tcp/1] failed to negotiate security protocol: peer id mismatch: "
        "expected 12D3KooWRight, but remote key matches 12D3KooWOther"
    )
    told = daemon_module._reason(RuntimeError(said), 1.0)
    assert told.startswith("another peer answers at that address: its id is 12D3KooWOther; take the address")
