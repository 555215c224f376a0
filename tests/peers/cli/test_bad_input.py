"""What people and disks do wrong, through the real command: one clear line, exit code 2, nothing half-made.

Where a peer goes on (a silent bootstrap, a damaged file), it says what is wrong and what it does about it.
"""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from swarm import Swarm, shared_rounds, tiny_manifest

from peers.compute.stage_part import build_stage_part
from peers.config.run_file import SignedManifest, load_signed, published_text
from peers.lab.world.virtual_time import run as run_virtual
from peers.state import checkpoint_file
from protocols.memory.transport import Conditions
from protocols.messages.table import Chunk
from protocols.signed.identity import Identity, load
from protocols.signed.orders import seal_order
from swarmnet.rounds.history import START
from swarmnet.run import owner_orders
from swarmnet.run.canonical_form import owner_statement
from swarmnet.run.owner_orders import NO_ORDER

OWNER = Identity.from_seed(b"the owner of the run")
LONGEST_SECONDS = 120.0
LOOPBACK = """\
listen: [/ip4/127.0.0.1/tcp/0]
relay: false
nat: false
log: json
metrics: {listen: off}
state: here
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in, and an empty home."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    for name in list(os.environ):
        if name.startswith(("SWARMNET__", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def command(*arguments):
    return [sys.executable, "-m", "peers.cli.main", *map(str, arguments)]


def refused(*arguments, says):
    """Runs the command, which must end with one line that says all of these, and code 2."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=LONGEST_SECONDS)
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr
    assert len(errors) == 1, done.stderr
    assert lines[-1] == errors[0]
    for line in lines[:-1]:
        json.loads(line)  # What a peer said before is whole lines, no traceback.
    for word in says:
        assert word in errors[0]
    assert not list(Path().rglob("*.part")), "nothing is half-written"


class Started:
    """A running peer, and what it says."""

    def __init__(self, process):
        self.process = process
        self.lines = []
        self._rest = b""

    def until(self, event, count=1):
        """The fields of the `count`th line about an event; AssertionError if it ends before."""
        limit = time.monotonic() + LONGEST_SECONDS
        stream = self.process.stderr
        while True:
            found = [line for line in self.lines if line["event"] == event]
            if len(found) >= count:
                return found[count - 1]
            ready, _, _ = select.select([stream], [], [], max(0.0, limit - time.monotonic()))
            data = os.read(stream.fileno(), 65536) if ready else b""
            assert data, f"no {event}: {self.lines} {self._rest!r}"
            *whole, self._rest = (self._rest + data).split(b"\n")
            self.lines += [json.loads(line) for line in whole]

    def terminate(self):
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        rest = self._rest + self.process.communicate(timeout=LONGEST_SECONDS)[1]
        self.lines += [json.loads(line) for line in rest.splitlines()]
        return self.process.returncode


@contextmanager
def started(*arguments):
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        yield Started(process)
    finally:
        process.kill()
        process.communicate()


def publish(path="tiny.run.json", **changes):
    """A published run of one stage."""
    manifest = replace(tiny_manifest((3,)), **changes)
    run_id = manifest.run_id()
    signed = SignedManifest(manifest, OWNER.sign(owner_statement(run_id)), run_id)
    Path(path).write_text(published_text(signed))
    return signed


def peer_file(**keys):
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in keys.items()]
    given = "".join(line for line in LOOPBACK.splitlines(True) if line.split(":")[0] not in keys)
    Path("peer.yaml").write_text(given + "".join(lines))
    return "peer.yaml"


@contextmanager
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("role: bootstrap\nlitsen: []\n", ["peer.yaml:2: litsen: unknown key", "did you mean 'listen'?"]),
        ("role: bootstrap\nslots: many\n", ["peer.yaml:2: slots: is the text 'many'", "a whole number"]),
        ("role: bootstrap\nrole: worker\n", ["peer.yaml:2: role: is already set on line 1"]),
        ("run: gone.run.json\n", ["peer.yaml:1: run: 'gone.run.json' is neither a run id"]),
        ("role: [\n", ["peer.yaml:"]),
    ],
    ids=["unknown key", "wrong type", "duplicate key", "missing run", "no YAML"],
)
def test_a_mistake_in_the_peer_file_is_named_with_its_line(place, text, says):
    Path("peer.yaml").write_text(text)
    refused("run", "peer.yaml", says=says)
    assert sorted(path.name for path in Path().iterdir()) == ["peer.yaml"]
    assert list((place / "home").iterdir()) == []


def test_a_missing_peer_file_is_named(place):
    refused("run", "nowhere.yaml", says=["nowhere.yaml: no such file"])
    assert list(Path().iterdir()) == []


def test_what_is_no_run_id_is_refused_before_anything_is_written(place):
    refused("join", "ab" * 31, says=["ab" * 31, "neither a run id (64 hexadecimal digits", "published run"])
    refused("join", "AB" * 32, says=["neither a run id"])
    assert list(Path().iterdir()) == []
    assert list((place / "home").iterdir()) == []


def test_a_published_run_with_a_broken_signature_is_refused_before_anything_is_written(place):
    publish()
    content = json.loads(Path("tiny.run.json").read_text())
    content["signature"] = "00" * 64
    Path("forged.run.json").write_text(json.dumps(content))
    refused("join", "forged.run.json", says=["forged.run.json: ", "the signature is not the owner's"])
    refused("run", peer_file(run="forged.run.json"), says=["the signature is not the owner's"])
    assert not Path("here/run.json").exists()


@pytest.mark.loopback
def test_a_state_folder_with_another_run_is_not_mixed_up(place):
    publish()
    other = publish("other.run.json", seed=7)
    Path("here").mkdir()
    Path("here/run.json").write_text(Path("tiny.run.json").read_text())
    held = load_signed(Path("tiny.run.json")).run_id
    refused("run", peer_file(run=other.run_id), says=["here/run.json", held, other.run_id, "another state"])


@pytest.mark.loopback
def test_an_occupied_port_of_peers_is_named(place):
    with taken_port() as port:
        address = f"/ip4/127.0.0.1/tcp/{port}"
        file = peer_file(role="bootstrap", listen=[address])
        refused("run", file, says=[address, "is taken", "choose another"])


@pytest.mark.loopback
def test_an_occupied_port_of_metrics_is_named(place):
    with taken_port() as port:
        refused(
            "run", peer_file(role="bootstrap", metrics={"listen": f"127.0.0.1:{port}"}),
            says=["metrics.listen", f"port {port}", "already in use", "choose another port"],
        )  # fmt: skip


@pytest.mark.loopback
def test_a_folder_without_text_is_named(place):
    Path("empty").mkdir()
    publish()
    refused(
        "run", peer_file(run="tiny.run.json", data_paths={"python-stdlib": "empty"}),
        says=["empty holds no text: put .txt, .md, .jsonl, .ndjson, ", ".parquet files there"],
    )  # fmt: skip


@pytest.mark.loopback
@pytest.mark.parametrize(("role", "keys"), [("archivist", {"archive": "archive"}), ("worker", {})])
def test_who_may_not_take_part_ends_with_the_reason_and_the_owners_contact(place, role, keys):
    signed = publish(access="invite", contact="owner@example.org")
    file = peer_file(role=role, run="tiny.run.json", **keys)
    refused("run", file, says=["by invite only", "this peer has none (key `invite`)", "owner@example.org"])
    me = load(Path("here/identity.key")).peer_id
    order = replace(owner_orders.ban(NO_ORDER, me, "fills disks"), sequence=1)
    Path("here/order.bin").write_bytes(seal_order(OWNER, signed.run_id, order).data)
    refused("run", file, says=["the run's owner has banned this peer: fills disks", "owner@example.org"])
    assert not Path("archive").exists()
    last = json.loads(Path("here/events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["code"]) == ("stopped", "not_possible")
    assert "banned this peer: fills disks" in last["reason"]


@pytest.mark.loopback
def test_a_stage_that_the_run_has_not_is_named_with_those_it_has(place):
    publish()
    refused("run", peer_file(run="tiny.run.json", stage=1), says=["stage: 1, but the run has 0 to 0", "auto"])


@pytest.mark.loopback
def test_two_peers_do_not_share_a_state_folder(place):
    with started("run", peer_file(role="bootstrap")) as peer:
        peer.until("listening")
        refused("run", "peer.yaml", says=["is used by another running peer"])
        assert peer.terminate() == 0


@pytest.mark.loopback
def test_a_silent_bootstrap_is_tried_again_and_sigterm_ends_the_wait(place):
    publish()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # Closed below: nobody listens there.
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{OWNER.peer_id}"
    with started("run", peer_file(run="tiny.run.json", bootstrap=[address])) as peer:
        first, second = peer.until("unreachable"), peer.until("unreachable", 2)
        where = address.split("/p2p/")[0]
        assert first["text"].startswith(f"no bootstrap answered: {where}: ")
        assert first["text"].endswith("connection refused; asks again until one does (Ctrl+C stops)")
        assert first["text"].count(where) == 1
        assert re.fullmatch(r"still no answer, \d+ s", second["text"])
        assert peer.terminate() == 0
        assert peer.lines[-1]["event"] == "leaving"


@pytest.fixture
def short_folder():
    """A folder for temporary ones: p2pd's socket in them has 107 bytes for its path."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.loopback
def test_a_command_that_visits_leaves_no_key_behind_when_it_is_ended_by_sigterm(
    place, short_folder, monkeypatch
):  # fmt: skip
    publish()
    monkeypatch.setenv("TMPDIR", str(short_folder))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{OWNER.peer_id}"
    asking = subprocess.Popen(
        command("generate", "--run", "tiny.run.json", "--bootstrap", address),
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with asking:
        assert "no bootstrap answered" in asking.stderr.readline()
        assert list(short_folder.rglob("identity.key"))
        asking.terminate()
        asking.communicate(timeout=LONGEST_SECONDS)
    assert asking.returncode == 128 + signal.SIGTERM
    assert list(short_folder.iterdir()) == []


@pytest.mark.loopback
def test_a_run_that_nobody_knows_is_asked_for_again(place):
    with started("run", peer_file(run="ab" * 32)) as peer:
        said = peer.until("no_manifest")["text"]
        assert f"no peer knows the run {'ab' * 32}" in said
        assert re.search(r"asking again in \d+ s, for \d+ s more", said)
        assert peer.terminate() == 0
    assert not Path("here/run.json").exists()


def write_checkpoints(signed, rounds):
    """Checkpoints of the run's only stage, oldest first."""
    part = build_stage_part(signed.manifest, 0)
    units = part.first_units()
    return [
        checkpoint_file.write(Path("here/checkpoints"), signed.manifest, 0, number, START, units, part.layout)
        for number in rounds
    ]


@pytest.mark.loopback
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(place):
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("all work and no play makes a dull text. " * 200)
    older, newer = write_checkpoints(publish(), [4, 9])
    damaged = bytearray(newer.read_bytes())
    damaged[-5] ^= 1
    newer.write_bytes(damaged)
    before = older.read_bytes()
    with started("run", peer_file(run="tiny.run.json", data_paths={"python-stdlib": "texts"})) as peer:
        said = peer.until("checkpoint_unusable")["text"]
        assert str(newer) in said
        assert "damaged" in said
        assert "round 4" in peer.until("restored")["text"]
        peer.until("trains")
        assert older.read_bytes() == before
        assert peer.terminate() == 0
    assert not list(Path().rglob("*.part"))


def fetch(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


@pytest.mark.loopback
def test_a_peer_says_what_it_is_and_starts_its_p2pd_again(place):
    signed = publish()
    keys = {"role": "bootstrap", "run": "tiny.run.json", "metrics": {"listen": "127.0.0.1:0"}}
    with started("run", peer_file(**keys)) as peer:
        url = peer.until("metrics")["url"]
        listening = peer.until("listening")["text"].removeprefix("listening on ")
        joining = peer.until("run")["text"]
        assert f"swarmnet join swarmnet:{signed.run_id}@{listening}" in joining
        assert fetch(f"{url}/healthz") == fetch(f"{url}/readyz") == "ok\n"
        children = Path(f"/proc/{peer.process.pid}/task/{peer.process.pid}/children").read_text().split()
        (daemon,) = (int(pid) for pid in children if "p2pd" in Path(f"/proc/{pid}/cmdline").read_text())
        assert os.getsid(daemon) != os.getsid(peer.process.pid), "Ctrl+C must not end it before the peer"
        os.kill(daemon, signal.SIGKILL)
        assert "starting it again in 1 s" in peer.until("p2pd_ended")["text"]
        peer.until("run", 2)
        text = fetch(f"{url}/metrics")
        assert f'swarmnet_daemon_restarts_total{{run="{signed.run_id}"}} 1.0' in text
        assert re.search(
            rf'swarmnet_peer_info\{{device="none",peer="{listening[-52:]}",role="bootstrap",'
            rf'run="{signed.run_id}",version="0.+"\}} 1.0',
            text,
        )
        assert peer.terminate() == 0


def lies_about_chunks(neighbourhood):
    post = neighbourhood.post

    def lie(peer, lane, message, body=b""):
        if isinstance(message, Chunk):
            body = b"lies" + bytes(body[4:])  # Twice is as once: what waits for a link is posted again.
        return post(peer, lane, message, body)

    neighbourhood.post = lie


def test_holders_that_send_a_wrong_chunk_are_named_and_it_is_fetched_from_another():
    async def story():
        swarm.open()
        for name in ("a", "b", "c"):
            swarm.start(name, 0)
        await swarm.until(lambda: min((s for _, s in swarm.rounds().values()), default=-1) >= 20, 60.0)
        for liar in ("a", "b"):
            lies_about_chunks(swarm.members[liar].worker.services.links)
        newcomer = swarm.start("d", 0)
        swarm.network.set(swarm.members["c"].peer, newcomer.peer, Conditions(latency_seconds=0.03))
        await swarm.until(lambda: swarm.of("in_step", "d"), 30.0)
        await swarm.during(5.0)
        assert swarm.of("fetched", "d")
        assert newcomer.worker.services.snapshot_service.chunks_refused >= 2, (
            "what was asked for before counts too"
        )
        said = [text for event, text in newcomer.said if event == "holder"]
        for liar in ("a", "b"):
            peer = swarm.members[liar].peer
            told = [text for text in said if text.startswith(f"{peer} sent chunk ")]
            assert len(told) == 1
            assert "a wrong hash" in told[0]
        await swarm.close()

    swarm = Swarm(tiny_manifest((3,)), stub=True)
    run_virtual(story())
    assert shared_rounds(swarm) > 20
