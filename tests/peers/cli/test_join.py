"""`swarmnet join`: from where a run may come, what is written, and what a peer says that it found."""

import contextlib
import errno
import http.server
import json
import os
import re
import shlex
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from swarm import OWNER, sign, tiny_manifest
from typed import BOOTSTRAP, files_below, refused, write

from peers.compute.memory_budget import all_needs, gib
from peers.config import run_url
from peers.config.errors import UnknownRun, UserError
from peers.config.limits import LimitsFile
from peers.config.peer_file import load
from peers.config.run_file import published_text
from peers.config.run_url import fetch_run
from peers.lab.world import virtual_time
from peers.worker.watch.startup_summary import machine_line, pace_of, run_line, swarm_line, traffic_line
from protocols.messages.table import PeerRecord
from protocols.signed.envelope import ENVELOPE_BYTES
from protocols.signed.identity import load as load_identity
from protocols.signed.invites import invite_text, seal_invite
from protocols.signed.records import SignedRecord
from swarmnet.model.computing.choices import PLAIN
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes
from swarmnet.optimizer.method import METHODS, method_of
from swarmnet.resources.bandwidth_estimate import contribution_bytes, traffic_of

SIGNED = sign(tiny_manifest())


class Served(http.server.BaseHTTPRequestHandler):
    """Answers with what the test has put into `pages`."""

    pages: ClassVar[dict] = {}

    def do_GET(self):
        status, body = self.pages.get(self.path, (404, b"no"))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", body)
            body = b""
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def web():
    """A web server; put pages into it by path. Yields its address and the pages."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Served)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    Served.pages = {"/run.json": (200, published_text(SIGNED).encode())}
    yield f"http://127.0.0.1:{server.server_port}", Served.pages
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_run_is_joined_from_a_url_and_the_file_can_be_read_by_people(swarmnet, started, web):
    address, _ = web
    url = f"{address}/run.json#{SIGNED.run_id}"
    code, _, err = swarmnet("join", url, "--bootstrap", BOOTSTRAP, "--state", "here")
    assert code == 0
    (config,) = started
    text = (config.state / "peer.yaml").read_text()
    assert "# limits:" in text
    assert "# peers through which to find others" in text
    assert "Ctrl+C leaves politely" in err
    assert load(config.state / "peer.yaml").bootstrap == (BOOTSTRAP,)
    assert (config.state / "run.json").read_text() == published_text(SIGNED)
    optional = text[text.index("# limits") :].replace("# ", "", 1).replace("\n# ", "\n")
    (config.state / "peer.yaml").write_text(text[: text.index("# Uncomment")] + optional)
    again = load(config.state / "peer.yaml")
    assert again.limits == LimitsFile(
        upload=2.5e6,
        memory=8 << 30,
        hours="22:00-08:00",
        only_when_idle=True,
        share_when_busy=0.2,
        only_when_plugged_in=True,
    ), "without the #, what is offered is right"


def test_an_option_of_a_later_join_counts_for_that_start_and_the_file_stays(swarmnet, started, tmp_path):
    (tmp_path / "a.json").write_text(published_text(SIGNED))
    for name in ("first", "second"):
        code, _, _ = swarmnet("join", str(tmp_path / "a.json"), "--name", name, "--state", "here", "--alone")
        assert code == 0
        assert started[-1].name == name
    assert 'name: "first"' in (started[0].state / "peer.yaml").read_text(), "what a person edited stays"


INVITES = [
    invite_text(seal_invite(OWNER, SIGNED.run_id, None, expires, expires - 3600.0)) for expires in (2e9, 3e9)
]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "invite: ''\n",
        f'invite: "{INVITES[0]}"   # the old one\n',
        "invite: >-\n  " + INVITES[0] + "\n",
        "invite: ''",
    ],
)
def test_an_invite_of_a_later_join_is_kept_and_all_else_in_the_file_is_as_it_was(
    swarmnet, started, tmp_path, line
):  # fmt: skip
    (tmp_path / "a.json").write_text(published_text(SIGNED))
    assert swarmnet("join", tmp_path / "a.json", "--state", "here", "--alone")[0] == 0
    file = started[0].state / "peer.yaml"
    mine = file.read_text() + "\n# mine: keep\nlimits: {upload: 20Mbit/s}  # évening\n" + line
    file.write_text(mine)
    file.chmod(0o600)
    code, _, err = swarmnet("join", tmp_path / "a.json", "--state", "here", "--invite", INVITES[1])
    assert code == 0
    assert f"wrote  the invite into {file}" in err
    assert load(file).invite == started[-1].invite == INVITES[1]
    written = file.read_text()
    assert written.startswith(mine.removesuffix(line))
    assert "# the old one" not in line or "   # the old one\n" in written
    assert file.stat().st_mode & 0o777 == 0o600
    code, _, err = swarmnet("join", tmp_path / "a.json", "--state", "here", "--invite", INVITES[1])
    assert (code, file.read_text()) == (0, written)
    assert "wrote" not in err


OTHER_BOOTSTRAP = BOOTSTRAP.replace("/tcp/31330", "/tcp/31331")


@pytest.fixture
def joined(monkeypatch):
    """Stands in for the peer process; lists what is called when a bootstrap has answered."""
    calls = []
    stand_in = SimpleNamespace(run_peer_file=lambda _, joined, _others: calls.append(joined) or 0)
    monkeypatch.setitem(sys.modules, "peers.process.process", stand_in)
    return calls


def join_again(swarmnet, *bootstrap):
    given = [word for address in bootstrap for word in ("--bootstrap", address)]
    assert swarmnet("join", "a.json", "--state", "here", *(given or ["--alone"]))[0] == 0


def test_a_bootstrap_that_answers_is_kept_where_none_had_answered(swarmnet, joined):
    Path("a.json").write_text(published_text(SIGNED))
    file = Path("here/peer.yaml")
    join_again(swarmnet)
    join_again(swarmnet, BOOTSTRAP)
    assert load(file).bootstrap == (), "it has not answered yet"
    assert joined[-1]().startswith(f"wrote  the bootstrap into {file.absolute()}: ")
    assert load(file).bootstrap == (BOOTSTRAP,)
    assert joined[-1]() == ""
    join_again(swarmnet, OTHER_BOOTSTRAP)
    assert "for this start only" in joined[-1]()
    assert load(file).bootstrap == (BOOTSTRAP,)


def test_one_that_never_answered_gives_way_to_one_that_does_and_remarks_stay(swarmnet, joined):
    Path("a.json").write_text(published_text(SIGNED))
    file = Path("here/peer.yaml")
    join_again(swarmnet, BOOTSTRAP)
    lines = f"bootstrap:\n- {BOOTSTRAP}\n# mine: keep\n"
    file.write_text(file.read_text().replace(f'bootstrap: ["{BOOTSTRAP}"]\n', lines))
    join_again(swarmnet, OTHER_BOOTSTRAP)
    joined[-1]()
    assert load(file).bootstrap == (OTHER_BOOTSTRAP,)
    assert "# mine: keep\n" in file.read_text()


def test_a_home_that_cannot_be_written_is_said_with_the_option_that_helps(swarmnet, joined, monkeypatch):
    Path("a.json").write_text(published_text(SIGNED))

    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("os.link", read_only)
    refused(swarmnet("join", "a.json", "--alone"), "Read-only file system", "--state FOLDER")


def test_a_wrong_invite_and_a_file_of_another_shape_are_left_alone(swarmnet, started, tmp_path):
    (tmp_path / "a.json").write_text(published_text(SIGNED))
    assert swarmnet("join", tmp_path / "a.json", "--state", "here", "--alone")[0] == 0
    file = started[0].state / "peer.yaml"
    again = ("join", tmp_path / "a.json", "--state", "here", "--invite")
    for text, invite, words in (
        (file.read_text(), "nonsense", "swarmnet invite"),
        ("{run: run.json, state: .}\n", INVITES[0], "type in it: invite: "),
    ):
        file.write_text(text)
        before = files_below(tmp_path)
        refused(swarmnet(*again, invite), words)
        assert (file.read_text(), files_below(tmp_path)) == (text, before)
    assert len(started) == 1


def test_a_peer_without_a_name_is_called_by_the_end_of_its_own_id(swarmnet, started, tmp_path):
    (tmp_path / "a.json").write_text(published_text(SIGNED))
    for state in ("here", "there"):
        assert swarmnet("join", tmp_path / "a.json", "--state", state, "--alone")[0] == 0
    names = [config.name for config in started]
    assert names == [load_identity(config.identity).peer_id[-6:] for config in started]
    assert names[0] != names[1]
    for options in (["--name", "attic"], ["--set", "name=attic"]):
        assert swarmnet("join", tmp_path / "a.json", "--state", options[0][2:], "--alone", *options)[0] == 0
        assert started[-1].name == "attic"


@pytest.mark.parametrize("was_there", [False, True])
def test_of_a_run_that_nobody_knows_nothing_stays_but_in_a_folder_that_was_there(
    swarmnet, monkeypatch, was_there
):
    def asks(config, *_):
        for name in ("events.jsonl", "lock", "bootstraps.json"):
            (config.state / name).write_text("")
        raise UnknownRun("no peer knows the run")

    monkeypatch.setitem(sys.modules, "peers.process.process", SimpleNamespace(run_peer_file=asks))
    if was_there:
        Path("here").mkdir()
    code, _, err = swarmnet("join", "ab" * 32, "--bootstrap", BOOTSTRAP, "--state", "here")
    assert code == 2
    assert "error: no peer knows the run" in err
    assert ("nothing is kept of this try" in err) == (not was_there)
    assert Path("here").exists() == Path("here/peer.yaml").exists() == was_there


def test_a_peer_that_is_stopped_before_a_peer_knew_the_run_leaves_no_folder(swarmnet, monkeypatch):
    def stopped(config, *_):
        if not tries:
            (config.state / "run.json").write_text("")
        return tries.append(config) or 0

    tries = []
    monkeypatch.setitem(sys.modules, "peers.process.process", SimpleNamespace(run_peer_file=stopped))
    for state in ("known", "unknown"):
        assert swarmnet("join", "ab" * 32, "--bootstrap", BOOTSTRAP, "--state", state)[0] == 0
    assert tries[1].state.name == "unknown"
    assert (Path("known/peer.yaml").exists(), Path("unknown").exists()) == (True, False)


def test_a_file_url_is_joined_too(swarmnet, started, tmp_path):
    (tmp_path / "a.json").write_text(published_text(SIGNED))
    assert swarmnet("join", f"file://{tmp_path}/a.json", "--state", "here", "--alone")[0] == 0
    assert len(started) == 1


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/run.json#" + "ab" * 32, ["not " + "ab" * 32, "ask the person who gave you the URL"]),
        ("/run.json#abc", ["write the run id there"]),
        ("/nothing.json", ["responds 404"]),
        ("/endless.json", ["longer than a published run may be"]),
        ("/forged.json", ["not the owner's"]),
        ("/html.json", ["no valid published run"]),
    ],
)
def test_a_url_that_is_not_what_it_should_be_writes_nothing(
    swarmnet, started, web, tmp_path, path, words
):  # fmt: skip
    address, pages = web
    text = published_text(SIGNED)
    signature = SIGNED.signature.hex()
    pages["/endless.json"] = (200, b" " * (run_url.MAX_BYTES + 1))
    pages["/forged.json"] = (200, text.replace(signature, OWNER.sign(b"something else").hex()).encode())
    pages["/html.json"] = (200, b"<html>")
    before = files_below(tmp_path)
    refused(swarmnet("join", address + path, "--state", "here"), *words)
    assert (started, files_below(tmp_path)) == ([], before)


def test_urls_of_other_kinds_and_dead_servers_are_said(web, tmp_path):
    with pytest.raises(UserError, match="only https, http, file"):
        fetch_run("ftp://example.org/run.json")
    with pytest.raises(UserError, match="cannot be fetched"):
        fetch_run("http://127.0.0.1:9/run.json")
    with pytest.raises(UserError, match="cannot be fetched"):
        fetch_run(f"file://{tmp_path}/nothing.json")


@pytest.mark.parametrize(
    "url", ["https://example.org/my run.json", "http://host:abc/x.json", "http://[::1/x"]
)
def test_what_is_no_url_is_said_in_a_line(url):
    with pytest.raises(UserError, match="is no URL"):
        fetch_run(url)


def test_a_port_where_no_web_server_listens_is_said_in_a_line():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with server.accept()[0] as line:
                line.recv(4096)
                line.sendall(b"\x13/multistream/1.0.0\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UserError, match="not from a web server"):
            fetch_run(f"http://127.0.0.1:{server.getsockname()[1]}/x.json")
        thread.join()


def test_who_has_joined_by_a_url_with_its_id_goes_on_though_the_web_server_is_gone(
    swarmnet, started, web, tmp_path
):  # fmt: skip
    address, pages = web
    url = f"{address}/run.json#{SIGNED.run_id}"
    assert swarmnet("join", url, "--bootstrap", BOOTSTRAP)[0] == 0
    pages.clear()
    assert swarmnet("join", url)[0] == 0
    assert len(started) == 2
    refused(swarmnet("join", f"{address}/run.json"), "responds 404")


def test_who_took_part_joins_again_with_the_first_digits_of_the_runs_id(swarmnet, started, tmp_path):
    (tmp_path / "a.json").write_text(published_text(SIGNED))
    digits = SIGNED.run_id[:16]
    refused(swarmnet("join", digits), "neither a run id")
    assert swarmnet("join", tmp_path / "a.json", "--alone")[0] == 0
    assert swarmnet("join", digits, "--stage", "0")[0] == 0
    assert started[-1].stage == 0


def test_a_stage_that_the_run_has_not_is_refused_before_anything_is_written(swarmnet, started, web, tmp_path):
    last = len(SIGNED.manifest.stages) - 1
    before = files_below(tmp_path)
    outcome = swarmnet("join", f"{web[0]}/run.json", "--stage", str(last + 1))
    refused(outcome, f"the run has 0 to {last}", "or to auto")
    assert (started, files_below(tmp_path)) == ([], before)


def test_nobody_else_reads_the_file_in_which_an_invite_stands(swarmnet, started, web):
    assert swarmnet("join", f"{web[0]}/run.json", "--bootstrap", BOOTSTRAP, "--state", "here")[0] == 0
    file = Path("here/peer.yaml")
    assert file.stat().st_mode & 0o077 == 0
    file.chmod(0o644)
    invite = invite_text(seal_invite(OWNER, SIGNED.run_id, None, 2e9, 1e9))
    Path("invite.txt").write_text(invite + "\n")  # Where no other user sees it in the process list.
    assert swarmnet("join", SIGNED.run_id, "--invite", "@invite.txt", "--state", "here")[0] == 0
    assert invite in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


@contextlib.contextmanager
def dripping(start):
    """A server that sends `start`, then a byte each tenth of a second for 10 s.
    Yields its URL and whether it got to the end."""
    ended, finished = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip():
            with server.accept()[0] as line, contextlib.suppress(OSError):
                line.recv(4096)
                line.sendall(start)
                for _ in range(100):
                    if ended.wait(0.1):
                        return
                    line.sendall(b" ")
                finished.set()

        thread = threading.Thread(target=drip)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/x.json", finished.is_set
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    "start",
    [b"HTTP/1.0 200 OK\r\nContent-Length: 60000\r\n\r\n", b"HTTP/1.0 200 OK\r\nX: "],
    ids=["body", "header"],
)
def test_a_server_that_drips_is_given_up(monkeypatch, start):
    monkeypatch.setattr(run_url, "FETCH_SECONDS", 0.3)
    with dripping(start) as (url, finished):
        with pytest.raises(UserError, match="is not downloaded after"):
            fetch_run(url)
        assert not finished(), "it was not waited for"
        for thread in threading.enumerate():
            if thread.name == "fetch":
                assert thread.daemon, "it keeps no process from ending"


@pytest.mark.parametrize(
    "target",
    ["ftp://127.0.0.1:1/x", "file:///etc/hostname", "http://127.0.0.1:1/", "https://127.0.0.1:1/", "https://[::1]:1/",
     "https://localhost:1/", "https://10.0.0.1/", "https://169.254.169.254/latest", "http://192.0.2.1/"],
)  # fmt: skip
def test_a_redirect_leads_only_to_https_on_the_internet(web, target):
    address, pages = web
    pages["/moved.json"] = (302, target)
    with pytest.raises(UserError, match=r"leads to .*, which is not followed|file:.* is not allowed"):
        fetch_run(f"{address}/moved.json")


def test_a_redirect_on_the_same_server_is_followed(web):
    address, pages = web
    pages["/moved.json"] = (302, f"{address}/run.json")
    assert fetch_run(f"{address}/moved.json") == SIGNED


def record(stage, state="training", loss=3.0, round=7, speed=500.0):
    said = PeerRecord("p", stage, "worker", [], round, speed, "0", state=state, loss=loss)
    return SignedRecord(peer="p", record=said, sequence=1)


def test_what_was_found_is_said_in_a_few_lines():
    manifest = SIGNED.manifest
    assert SIGNED.run_id[:16] in run_line(SIGNED)
    assert "3 stages" in run_line(SIGNED)
    assert "does not answer yet" in swarm_line(None)
    assert "this peer is the first" in swarm_line({})
    records = {"a": record(0), "b": record(1, loss=None, round=9), "c": record(2, "paused", 99.0)}
    assert swarm_line(records) == "swarm  3 peers, 2 training, round 8, loss 3.000 (as reported)"
    needs = all_needs(manifest, pytest.importorskip("torch").device("cpu"), 0)[1]
    line = machine_line(needs, 5, 8 << 30, True, "cpu", PLAIN)
    assert line.startswith("you    stage 1 on cpu")
    most = gib(needs.least + 4 * needs.graph)
    assert f"with one microbatch under way and {most} with the most, 5 at a time; limits.memory" in line
    limits = LimitsFile(upload=20_000.0, hours="22:00-08:00")
    line = traffic_line(manifest, 1, 500.0, records, limits)
    assert "never more than 20.0 kB/s up; only at 22:00-08:00" in line
    assert f"send at most about {20_000 * 3600 / 1e6:.1f} MB" in line
    assert "an hour at its pace so far (500 tokens/s)" in line
    received = traffic_of(manifest, 1, 500.0, 2).received
    month = f"{(20_000 + received) * 30 * 36_000 / 1e9:.1f} GB in all if it works through a month"
    assert month in line, "ten hours of each day"
    assert "next to nothing" in traffic_line(tiny_manifest(stages=(3,)), 0, 9.0, {}, LimitsFile())


def test_what_is_said_of_traffic_follows_from_this_machines_own_pace():
    committed = iter([0, 0, 0, *range(50, 100_000, 50)])
    held = {"tokens": 0}

    def tokens():
        held["tokens"] = next(committed)
        return held["tokens"]

    assert virtual_time.run(pace_of(tokens, 200)) == pytest.approx(50.0, rel=0.1)


def test_traffic_follows_the_manifest():
    manifest = tiny_manifest()
    alone = traffic_of(manifest, 1, 1000.0, 1)
    assert alone.sent == alone.received == 1000.0 * (32 * 2 * 2 + 4)
    first, last = traffic_of(manifest, 0, 1000.0, 1), traffic_of(manifest, 2, 1000.0, 1)
    assert (first.sent, first.received) == (last.received, last.sent) == (68_000.0, 64_000.0)
    group = traffic_of(manifest, 1, 1000.0, 3)
    gossip = contribution_bytes(manifest, 1) * 2 * 3000.0 / manifest.rounds.global_batch_tokens
    assert group.sent - alone.sent == pytest.approx(gossip)


@pytest.mark.parametrize("method", METHODS)
def test_a_contribution_takes_about_what_is_said_of_it(method):
    plain = tiny_manifest()
    manifest = replace(plain, sync=replace(plain.sync, method=method))
    for stage in range(len(manifest.stages)):
        layout = layout_of(parameter_shapes(manifest.model, manifest.span(stage)))
        payload = method_of(manifest, layout).payload_bytes
        about = pytest.approx(payload, rel=0.1, abs=ENVELOPE_BYTES)
        assert contribution_bytes(manifest, stage) == about, stage


HINTED = replace(SIGNED, bootstraps=(BOOTSTRAP, OTHER_BOOTSTRAP))


def test_a_published_file_or_its_url_is_enough_to_join(swarmnet, started, web):
    address, pages = web
    pages["/run.json"] = (200, published_text(HINTED).encode())
    Path("a.json").write_text(published_text(HINTED))
    for state, run in enumerate((f"{address}/run.json", "a.json")):
        assert swarmnet("join", run, "--state", f"peer-{state}")[0] == 0
        assert started[-1].bootstrap == HINTED.bootstraps
        assert load(started[-1].state / "peer.yaml").bootstrap == HINTED.bootstraps
    assert swarmnet("join", "a.json", "--state", "own", "--bootstrap", OTHER_BOOTSTRAP)[0] == 0
    assert started[-1].bootstrap == (OTHER_BOOTSTRAP,), "what the person gives counts alone"


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        (["/ip4/127.0.0.1/tcp/31330"], "does not name the peer"),
        ([BOOTSTRAP] * 9, "at most 8"),
        (BOOTSTRAP, "at most 8"),
        ([7], "is no multiaddr"),
        (["/dns4/" + "a" * 256 + BOOTSTRAP], "is no multiaddr"),
        ([BOOTSTRAP + "\n"], "is no multiaddr"),
    ],
)
def test_addresses_beside_a_manifest_are_checked(swarmnet, started, tmp_path, addresses, words):
    content = json.loads(published_text(SIGNED))
    Path("a.json").write_text(json.dumps({**content, "bootstraps": addresses}))
    before = files_below(tmp_path)
    refused(swarmnet("join", "a.json", "--state", "here"), "a.json", words)
    assert (started, files_below(tmp_path)) == ([], before)


@pytest.mark.parametrize("run", [SIGNED.run_id, "a.json"])
def test_without_an_address_a_peer_starts_only_where_that_is_meant(swarmnet, started, tmp_path, run):
    Path("a.json").write_text(published_text(SIGNED))
    before = files_below(tmp_path)
    refused(swarmnet("join", run), "Ask for the whole join line", "swarmnet:RUN@/ip4/", "--alone")
    assert (started, files_below(tmp_path)) == ([], before)
    for number, options in enumerate((["--alone"], ["--set", "lan=true"])):
        assert swarmnet("join", run, "--state", f"peer-{number}", *options)[0] == 0


def test_join_alone_resumes_the_only_peer_and_lists_several(swarmnet, started):
    refused(swarmnet("join"), "name the run")
    for name, signed in (("a.json", SIGNED), ("b.json", sign(replace(tiny_manifest(), name="other")))):
        Path(name).write_text(published_text(signed))
    assert swarmnet("join", "a.json", "--bootstrap", BOOTSTRAP)[0] == 0
    assert swarmnet("join")[0] == 0
    assert started[0] == started[1]
    assert swarmnet("join", "b.json", "--bootstrap", BOOTSTRAP)[0] == 0
    code, _, err = swarmnet("join")
    lines = re.findall(r"`swarmnet ([^`]*)`", err)
    assert (code, len(started), len(lines)) == (2, 3, 2)
    for line, config in zip(sorted(lines), sorted(started[1:], key=lambda each: each.state), strict=True):
        assert swarmnet(*shlex.split(line))[0] == 0
        assert started[-1].state == config.state


def test_a_peer_that_does_not_run_tells_the_command_that_starts_it(swarmnet, started):
    Path("a.json").write_text(published_text(SIGNED))
    assert swarmnet("join", "a.json", "--bootstrap", BOOTSTRAP)[0] == 0
    code, out, _ = swarmnet("credit")
    assert (code, "not running" in out) == (0, True)
    (line,) = re.findall(r"`swarmnet ([^`]*)`", out)
    assert swarmnet(*shlex.split(line))[0] == 0
    assert started[0] == started[1]


def test_the_lines_that_publishing_prints_join_as_they_are_printed(swarmnet, started):
    write("tiny.yaml", "seed: 4\n")
    _, out, _ = swarmnet("publish", "tiny.yaml", "--bootstrap", BOOTSTRAP, "--bootstrap", OTHER_BOOTSTRAP)
    lines = re.findall(r"^(?:first|join) +swarmnet (.*)$", out, re.MULTILINE)
    assert len(lines) == 2
    for line in [*lines, "join tiny.run.json"]:
        assert swarmnet(*shlex.split(line), "--state", f"peer-{len(started)}")[0] == 0
        assert started[-1].bootstrap == (BOOTSTRAP, OTHER_BOOTSTRAP)
