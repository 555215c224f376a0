"""Hosting a run: files of the parts, restarts, and leaving. The parts are tiny programs."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from swarm import tiny_manifest

from peers.config.errors import UserError
from peers.config.peer_file import load
from peers.runtime.find_running import state_of
from peers.runtime.state_lock import lock_state_folder
from peers.tools.owner import hosting
from peers.tools.owner.hosting import (
    SCORE_SECONDS,
    HostedPart,
    HostPlan,
    found_by_commands,
    host,
    host_until_stopped,
    listen_place,
    scoring_keys,
)
from swarmnet.run.schema import TextSource


def plan(tmp_path):
    run = tmp_path / "mine.run.json"
    run.write_text("{}")
    return HostPlan(folder=tmp_path / "mine-host", published=run, address="/ip4/192.0.2.7", port=31330,
                    page="127.0.0.1:9420", peers=2, listen="/ip4/0.0.0.0", is_announced=True)  # fmt: skip


def test_the_parts_know_the_bootstrap_by_its_key_and_use_ports_of_their_own(tmp_path):
    made = plan(tmp_path)
    parts = made.write(tiny_manifest(), ["--set", "tokenizer=/a/tokenizer.json"], {})
    assert [part.name for part in parts] == ["bootstrap", "observer", "archivist", "peer-1", "peer-2"]
    assert made.multiaddr() == made.multiaddr(), "the key is kept"
    peer_id = made.multiaddr().rpartition("/")[2]
    here = f"/ip4/127.0.0.1/tcp/31330/p2p/{peer_id}"
    files = {part.name: load(Path(part.arguments[1]), {}) for part in parts[:3]}
    assert files["bootstrap"].state == made.bootstrap_state, "where the key is"
    assert [files[name].bootstrap for name in ("observer", "archivist")] == [(here,), (here,)]
    ports = [files[name].listen[0].rpartition("/")[2] for name in files]
    assert ports == ["31330", "31331", "31332"]
    assert files["observer"].announce == ("/ip4/192.0.2.7/tcp/31331",)
    assert files["observer"].name == "observer"
    joining = (
        "join",
        str(made.published),
        "--bootstrap",
        here,
        "--state",
        str(tmp_path / "mine-host/peer-1"),
    )
    common = ("--set", "log=line", "--set", "tokenizer=/a/tokenizer.json")
    named = ("--name", "peer-1")
    assert parts[3].arguments == (*joining, *named, *common)
    (tmp_path / "mine-host/peer-1").mkdir()
    (tmp_path / "mine-host/peer-1/peer.yaml").touch()
    again = made.write(tiny_manifest(), ["--set", "tokenizer=/a/tokenizer.json"], {})
    assert again[3].arguments == (*joining, *common), "its owner may have named it otherwise"


def test_parts_of_an_address_of_this_machine_listen_there_only(tmp_path):
    assert listen_place("/ip4/192.0.2.7") == listen_place("/dns4/example.org") == "/ip4/0.0.0.0"
    here = listen_place("/ip4/127.0.0.1")
    made = replace(plan(tmp_path), address=here, listen=here, is_announced=False)
    parts = made.write(tiny_manifest(), [], {})
    for part in parts[:3]:
        config = load(Path(part.arguments[1]), {})
        assert config.listen[0].startswith("/ip4/127.0.0.1/tcp/3133")
        assert (config.lan, config.announce) == (False, ())
    for part in parts[3:]:
        assert {'listen=["/ip4/127.0.0.1/tcp/0"]', "nat=false", "lan=false"} <= set(part.arguments)


def test_commands_find_the_peer_that_trains_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.platform", "linux")
    made = replace(plan(tmp_path), peers=1)
    (made.folder / "peer-1").mkdir(parents=True)
    with lock_state_folder(made.folder / "peer-1", "worker"):
        with found_by_commands(made):
            assert state_of(None, "top") == made.folder.resolve() / "peer-1"
        with pytest.raises(UserError, match="no peer seems to run"):
            state_of(None, "top")
    assert list((tmp_path / "home" / "swarmnet").iterdir()) == [], "no link is left"


def test_a_file_that_was_changed_stays_as_it_is(tmp_path):
    made = plan(tmp_path)
    made.write(tiny_manifest(), [], {})
    file = made.folder / "observer.yaml"
    file.write_text(file.read_text() + "relay: false\n")
    made.write(tiny_manifest(), [], {})
    assert not load(file, {}).relay


def test_the_observer_scores_held_out_text_where_there_is_some(tmp_path):
    made, library = plan(tmp_path), tiny_manifest()
    made.write(tiny_manifest(), [], scoring_keys(library, tmp_path))
    found = load(made.folder / "observer.yaml", {})
    assert (found.evaluating.seconds, found.evaluating.text) == (SCORE_SECONDS, None)
    source = TextSource("tale", "tale.txt")
    read = replace(library, data=replace(library.data, sources=(source,), tokenizer="tokenizer.json"))
    assert scoring_keys(read, tmp_path) == {}, "no text was kept from it"
    (tmp_path / "held-out.txt").write_text("once")
    assert scoring_keys(read, tmp_path) == {}, "its tokenizer is not here"
    (tmp_path / "tokenizer.json").write_text("{}")
    (made.folder / "observer.yaml").unlink()
    parts = made.write(read, [], scoring_keys(read, tmp_path))
    alone = [part.name for part in parts if "--stage" in part.arguments]
    assert alone == ["peer-1"], "others have no text yet, and so it takes the stage that reads it"
    assert not any("--stage" in part.arguments for part in made.write(library, [], {}))
    found = load(made.folder / "observer.yaml", {})
    assert (found.evaluating.text, found.tokenizer) == (
        tmp_path / "held-out.txt",
        tmp_path / "tokenizer.json",
    )
    assert scoring_keys(replace(read, access="invite"), tmp_path) == {}
    assert scoring_keys(replace(read, data=replace(read.data, private=True)), tmp_path) == {}


class Parts:
    """Programs in the place of `swarmnet`; each call of a part runs the next of its programs."""

    def __init__(self, **programs):
        self.programs = {name: list(lines) for name, lines in programs.items()}
        self.parts = [HostedPart(name, (name,)) for name in programs]
        self.told = []
        self.all_said_hello = asyncio.Event()

    def tell(self, line):
        self.told.append(line)
        if self.told.count("[peer] hello") == self.told.count("[observer] hello") == 1:
            self.all_said_hello.set()

    async def spawn(self, arguments):
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", self.programs[arguments[0]].pop(0), stderr=asyncio.subprocess.PIPE
        )

    async def host(self):
        await host(self.parts, self.tell, self.spawn)


SAYS = "import sys; print('hello', file=sys.stderr)"
WAITS = f"{SAYS}; sys.stderr.flush(); import time; time.sleep(60)"


def test_a_part_that_fails_starts_again_and_one_that_is_done_does_not(monkeypatch):
    monkeypatch.setattr(hosting, "FIRST_WAIT_SECONDS", 0.0)
    parts = Parts(observer=["raise SystemExit(1)", SAYS], peer=[SAYS])
    asyncio.run(parts.host())
    assert sorted(parts.told) == [
        "[observer] ended with code 1; starts again in 0 s", "[observer] hello", "[observer] is done",
        "[peer] hello", "[peer] is done",
    ]  # fmt: skip


def test_an_error_of_the_user_ends_all_parts():
    parts = Parts(observer=[WAITS], peer=["raise SystemExit(2)"])
    with pytest.raises(UserError, match="the peer cannot run"):
        asyncio.run(parts.host())


def test_ctrl_c_lets_every_part_leave_and_says_so(monkeypatch):
    parts = Parts(observer=[WAITS], peer=[WAITS])
    monkeypatch.setattr(hosting, "start_swarmnet", parts.spawn)

    async def interrupted():
        work = asyncio.create_task(host_until_stopped(parts.parts, parts.tell))
        await parts.all_said_hello.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await work

    asyncio.run(asyncio.wait_for(interrupted(), 60))
    assert [line.partition(":")[0] for line in parts.told[2:]] == ["leaving", "stopped"]
    assert parts.programs == {"observer": [], "peer": []}


def test_when_it_is_cancelled_every_part_leaves():
    parts = Parts(observer=[WAITS], peer=[WAITS])

    async def cancelled():
        work = asyncio.create_task(parts.host())
        await parts.all_said_hello.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(asyncio.wait_for(cancelled(), 60))
    assert parts.programs == {"observer": [], "peer": []}
