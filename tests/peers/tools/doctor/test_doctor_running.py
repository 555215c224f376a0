"""What the doctor knows of a peer that runs: from its event log, also after that has moved."""

import json
import socket
from types import SimpleNamespace

import pytest
from examined import command, config, event
from swarm import sign, tiny_manifest

from peers.config.run_file import published_text
from peers.network.addresses import tcp_port
from peers.runtime.state_lock import lock_state_folder
from peers.telemetry.event_log import EventLog, parts, read
from peers.telemetry.log_events import Listening, PlacementChecked, Started
from peers.tools.doctor.swarm import NetworkChecks, logged_addresses


def test_relays_of_a_running_peer_are_those_that_it_has_not_lost(tmp_path):
    circuits = [f"/ip4/9.9.9.9/tcp/1/p2p/{relay}/p2p-circuit" for relay in "ab"]
    slots = [event("relayed", text="", relay=name, addresses=[circuits["ab".index(name)]]) for name in "ab"]
    said = [event("started", peer="me"), *slots, event("not_relayed", text="", relay="a")]
    (tmp_path / "events.jsonl").write_text("".join(said))
    assert logged_addresses(tmp_path, "12D3KooWme") == circuits[1:]


HERE = "listening on /ip4/8.8.4.4/tcp/2/p2p/12D3KooWme"


def test_the_addresses_of_a_running_peer_are_known_after_its_log_has_moved(tmp_path):
    (tmp_path / "events.jsonl.old").write_text(event("started", peer="me") + event("listening", text=HERE))
    log = tmp_path / "events.jsonl"
    for text in ("", event("placement_checked")):
        log.write_text(text)
        assert logged_addresses(tmp_path, "12D3KooWme") == ["/ip4/8.8.4.4/tcp/2"]
    log.unlink()
    with EventLog(
        path=log, clock=lambda: 1.0, monotonic=lambda: 1.0, flush_count=1, limit_bytes=400
    ) as running:
        running.record(Started("12D3KooWme"))
        running.record(Listening(HERE))
        for _ in range(100):
            running.record(PlacementChecked((), 1.0))
    assert "listening" not in {one.name for file in parts(log) for one in read(file)}, "it moved often"
    assert logged_addresses(tmp_path, "12D3KooWme") == ["/ip4/8.8.4.4/tcp/2"]


def test_of_a_running_peer_whose_log_has_lost_its_start_no_address_is_known(tmp_path):
    assert logged_addresses(tmp_path, "12D3KooWme") is None
    for name in ("events.jsonl.old", "events.jsonl"):
        (tmp_path / name).write_text(
            event("placement_checked") + event("relayed", text="", relay="a", addresses=["/x"])
        )
    assert logged_addresses(tmp_path, "12D3KooWme") is None


@pytest.mark.parametrize("announce", [[], ["/ip4/8.8.4.4/tcp/31331"]])
async def test_where_no_address_is_known_nobody_is_asked_to_dial_those_announced_apart(tmp_path, announce):
    wish = config(tmp_path, role="worker", run="ab" * 32, announce=announce)
    (wish.state / "events.jsonl").parent.mkdir(parents=True, exist_ok=True)
    (wish.state / "events.jsonl").write_text(event("placement_checked"))
    subject = SimpleNamespace(config=wish, identity=SimpleNamespace(peer_id="12D3KooWme"), running=True)
    told, asked = [], []

    async def first(seconds):
        return False

    async def ask(transport, addresses, reasons):
        asked.append(addresses.announced)
        return True

    visit = NetworkChecks(subject, told.append, frozenset({"reachability"}))
    visit._ask_helpers = ask
    await visit._reachability(SimpleNamespace(relays=SimpleNamespace(first=first)))
    if announce:
        assert (told, asked) == ([], [tuple(announce)])
    else:
        assert asked == []
        assert (told[0].level, told[0].data["verdict"]) == ("warn", "unknown")
        assert "unknown" in told[0].text
        assert "relay" in told[0].text
        assert told[0].fix


def test_the_addresses_of_a_running_peer_are_those_since_its_last_start(tmp_path):
    old, new = (f"listening on /ip4/8.8.4.4/tcp/{port}/p2p/12D3KooWme" for port in (1, 2))
    start = event("started", peer="me")
    text = start + event("listening", text=old) + start + event("listening", text=new)
    (tmp_path / "events.jsonl").write_text(text + event("listening", text=new) + '{"torn')
    assert logged_addresses(tmp_path, "12D3KooWme") == ["/ip4/8.8.4.4/tcp/2"]
    assert [tcp_port(each) for each in ("/ip4/1.1.1.1/tcp/7", "/ip4/1.1.1.1/udp/7/quic-v1", "")] == [7, 0, 0]


# -- whom the command means ---------------------------------------------------------------------------


def told(capsys, *arguments):
    """The checks that a command told, by name."""
    capsys.readouterr()
    command(*arguments, "--json")
    return {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


@pytest.fixture
def states(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "swarmnet"


def test_the_peer_that_runs_here_is_the_one_that_is_looked_at(states, capsys):
    """Its own metrics port is not in its way; its folder will do as its name."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for name in ("one", "two"):
            (states / name).mkdir(parents=True)
        (states / "one/peer.yaml").write_text(
            f"role: bootstrap\nstate: .\nmetrics: {{listen: '{address}'}}\n"
        )
        with lock_state_folder(states / "one"):
            for arguments in ([], [states / "one"], [states / "one/peer.yaml"]):
                metrics = told(capsys, *arguments, "--only", "metrics")["metrics"]
                assert (metrics["level"], "by the running peer" in metrics["text"]) == ("ok", True)
            with lock_state_folder(states / "two"):
                assert command("--only", "metrics") == 2
                assert "several peers run here" in capsys.readouterr().err
        assert told(capsys, states / "one", "--only", "metrics")["metrics"]["level"] == "fail"
        with lock_state_folder(states / "two"):
            assert command("--only", "metrics") == 2
        assert "there is no peer.yaml in it; name the file" in capsys.readouterr().err


def test_a_run_is_remembered_in_the_folder_that_join_takes_for_it(states, capsys):
    signed = sign(tiny_manifest())
    file = states.parent / "demo.run.json"
    file.write_text(published_text(signed))
    for run in (file, signed.run_id):
        disk = told(capsys, "--run", run, "--only", "disk")["disk"]
        assert disk["data"]["state"] == str(states / signed.run_id[:16])
