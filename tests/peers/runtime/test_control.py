"""The control socket: what commands ask of a peer that runs, and what they say when none does."""

import asyncio
import contextlib
import io
import json
import os
import socket
import stat
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peers.cli import control as commands
from peers.cli.run import create_role
from peers.config.errors import UserError
from peers.config.peer_file import validate_peer_file
from peers.config.yaml_lines import ParsedYaml
from peers.process.live_limits import LiveLimits
from peers.process.process import Peer
from peers.runtime import control_server
from peers.runtime.control_client import ask
from peers.runtime.control_server import Control
from peers.runtime.control_socket import LINE_BYTES, SOCKET_NAME, socket_path
from peers.runtime.find_running import state_of
from peers.runtime.state_lock import lock_state_folder
from peers.telemetry.console import counted, open_report
from protocols.signed.identity import Identity


async def echo(request):
    return {"heard": dict(request)}


async def refuse(request):
    raise UserError("not now; try later")


async def asked(state, request, seconds=5.0):
    return await asyncio.to_thread(ask, state, request, seconds)


@pytest.fixture
async def control(tmp_path):
    control = Control(tmp_path)
    control.answers.update(echo=echo, refuse=refuse)
    await control.start()
    yield control
    await control.close()


async def test_a_request_gets_its_answer_and_a_refusal_is_an_error_for_people(control, tmp_path):
    assert await asked(tmp_path, {"do": "echo", "n": 1}) == {"heard": {"do": "echo", "n": 1}}
    with pytest.raises(UserError, match="not now; try later"):
        await asked(tmp_path, {"do": "refuse"})
    with pytest.raises(UserError, match="one of: echo, refuse"):
        await asked(tmp_path, {"do": "fly"})


async def test_only_the_owner_may_open_it_and_it_goes_with_the_peer(control, tmp_path):
    path = tmp_path / SOCKET_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await control.close()
    assert not path.exists()


async def test_one_that_a_killed_peer_left_behind_is_replaced(tmp_path):
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / SOCKET_NAME))
    with pytest.raises(UserError, match="no peer runs with the state folder"):
        ask(tmp_path, {"do": "echo"}, 1.0)
    control = Control(tmp_path)
    control.answers["echo"] = echo
    await control.start()
    assert await asked(tmp_path, {"do": "echo"})
    await control.close()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="/proc is not there")
async def test_a_state_folder_with_a_long_path_works(tmp_path):
    state = tmp_path.joinpath(*["a-rather-long-name-of-a-folder"] * 6)
    state.mkdir(parents=True)
    assert len(os.fsencode(state)) > 107
    control = Control(state)
    control.answers["echo"] = echo
    await control.start()
    assert await asked(state, {"do": "echo"}) == {"heard": {"do": "echo"}}
    await control.close()
    assert list(state.iterdir()) == []


def test_where_there_is_no_way_around_a_long_path_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    with pytest.raises(UserError, match="shorter path"), socket_path(tmp_path / ("x" * 120)):
        pass


def test_a_folder_in_anothers_closed_one_is_said_to_be_so(tmp_path, monkeypatch):
    def refused(path, **_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(UserError, match="cannot be looked at: Permission denied"):
        ask(tmp_path, {"do": "echo"}, 1.0)


async def talk(state, *lines):
    """Send raw bytes; everything that comes back before the other side ends the conversation."""
    reader, writer = await asyncio.open_unix_connection(str(state / SOCKET_NAME))
    writer.writelines(lines)
    writer.write_eof()
    async with asyncio.timeout(10.0):
        answer = await reader.read()
    writer.close()
    return answer


async def test_several_requests_go_over_one_connection(control, tmp_path):
    answers = (await talk(tmp_path, b'{"do":"echo","n":1}\n', b'{"do":"echo","n":2}\n')).splitlines()
    assert [json.loads(answer)["heard"]["n"] for answer in answers] == [1, 2]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    line=st.one_of(st.binary(max_size=200), st.just(b"[" * 50_000), st.just(b'{"do": 1e999}'), st.just(b"{}"))
)
def test_whatever_is_asked_the_answer_is_one_line_of_json(line, tmp_path_factory):
    async def story():
        control = Control(tmp_path_factory.mktemp("c"))
        answer = await control._answer(line.replace(b"\n", b"") + b"\n")
        assert answer.endswith(b"\n")
        assert "error" in json.loads(answer)

    asyncio.run(story())


async def test_a_line_without_an_end_and_too_many_connections_are_cut(control, tmp_path):
    assert await talk(tmp_path, b"x" * (3 * LINE_BYTES)) == b""
    silent = [await asyncio.open_unix_connection(str(tmp_path / SOCKET_NAME)) for _ in range(40)]
    await asyncio.sleep(0.1)
    assert len(control._connections) <= control_server.MAX_CONNECTIONS
    for _, writer in silent:
        writer.close()
    await asyncio.sleep(0.1)
    assert await asked(tmp_path, {"do": "echo"})


async def test_an_answer_that_takes_too_long_is_said_on_both_sides(control, tmp_path, monkeypatch):
    async def never(request):
        await asyncio.Event().wait()

    control.answers["never"] = never
    with pytest.raises(UserError, match=r"did not answer within 0\.2 s"):
        await asked(tmp_path, {"do": "never"}, 0.2)
    monkeypatch.setattr(control_server, "ANSWER_SECONDS", 0.1)
    with pytest.raises(UserError, match="did not finish within"):
        await asked(tmp_path, {"do": "never"})


@pytest.mark.parametrize("role", ["bootstrap", "observer", "archivist"])
async def test_a_peer_without_a_stage_says_so_to_whoever_asks_for_one(tmp_path, role):
    keys = {"bootstrap": {}, "observer": {"run": "ab" * 32}, "archivist": {"run": "ab" * 32, "archive": "x"}}
    typed = ParsedYaml("test", {"role": role, "state": str(tmp_path), **keys[role]})
    report = open_report("line", io.StringIO(), time.time, "test")
    peer = Peer(
        config=validate_peer_file(typed, tmp_path, "test", {}),
        identity=Identity.from_seed(b"me"),
        report=report,
        create_role=create_role,
    )
    try:
        await peer.control.start()
        for word in ("pause", "resume", "credit", "page"):
            with pytest.raises(UserError, match=rf"holds no stage \({role}\).*swarmnet leave"):
                await asked(tmp_path, {"do": word})
        assert (await asked(tmp_path, {"do": "status"}))["role"] == role
    finally:
        await peer.control.close()
        peer.log.close()
        report.close()


async def limits_of(folder):
    """A control socket with the limits of a bootstrap and a page, as a running peer has."""
    typed = ParsedYaml("test", {"role": "bootstrap", "state": str(folder)})
    control = Control(folder)
    live = LiveLimits(validate_peer_file(typed, folder, "test", {}))
    control.answers["limit"] = live.answer
    await control.start()
    return control, live


async def test_a_limit_is_changed_from_the_command_line(tmp_path, capsys):
    control, live = await limits_of(tmp_path)
    try:
        await asyncio.to_thread(commands.limit, "upload", "2MB/s", tmp_path)
        assert live.config.limits.upload == 2e6
        told = capsys.readouterr()
        assert told.out.splitlines()[0] == "upload  2.0 MB/s (16 Mbit/s)"
        assert told.out.splitlines()[2:4] == ["hours   all day", "share   100% of the time"]
        assert "until the peer stops" in told.err
        await asyncio.to_thread(commands.limit, None, None, tmp_path)
        assert "until" not in capsys.readouterr().err
        await asyncio.to_thread(commands.limit, "upload", "none", tmp_path)
        assert live.config.limits.upload is None
        for name, value, words in (
            ("upload", "2Mbit", "upload is '2Mbit'; expected a rate"),
            ("share", "0", "share is '0'; expected a percentage"),
            ("share", "half", "expected a percentage"),
            ("mains", "yes", "mains is 'yes'; expected on or off"),
            ("memory", "8GiB", "'memory' is no limit; there are: upload, traffic"),
            ("upload", None, "such as `swarmnet limit upload 2MB/s`"),
            ("hours", "22:00-08:00", "hours is for workers"),
        ):
            with pytest.raises(UserError, match=words):
                await asyncio.to_thread(commands.limit, name, value, tmp_path)
    finally:
        await control.close()


async def test_the_page_is_opened_only_for_a_person_at_a_desktop(tmp_path, capsys, monkeypatch):
    control, _ = await limits_of(tmp_path)
    opened = []
    file = tmp_path / "page.html"

    async def page(_request):
        return {"url": "http://127.0.0.1:9400/#secret", "file": str(file)}

    control.answers["page"] = page
    monkeypatch.setattr(commands.webbrowser, "open", opened.append)
    try:
        for desktop, person in ((":0", False), ("", True), (":0", True)):
            monkeypatch.setenv("DISPLAY", desktop)
            monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
            monkeypatch.setattr(commands, "is_interactive", lambda person=person: person)
            assert opened == []
            await asyncio.to_thread(commands.page, tmp_path)
            assert capsys.readouterr().out == "http://127.0.0.1:9400/#secret\n"
        for _ in range(100):
            if opened:
                break
            await asyncio.sleep(0.05)
        assert opened == [file.as_uri()], "not the secret itself: other users see the arguments of programs"
    finally:
        await control.close()


def test_whom_a_command_means(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(UserError, match="no peer seems to run below"):
        state_of(None, "credit")
    for command in ("pause", "top", "service install"):
        with pytest.raises(UserError, match=rf"as in: swarmnet {command} FOLDER$"):
            state_of(None, command)
    one, two = tmp_path / "swarmnet" / "one", tmp_path / "swarmnet" / "two"
    for state in (one, two):
        state.mkdir(parents=True)
        (state / SOCKET_NAME).touch()  # As a peer that was killed leaves it behind.
    (tmp_path / "swarmnet" / "owner.key").touch()
    with pytest.raises(UserError, match="no peer seems to run below"):
        state_of(None, "credit")
    with contextlib.ExitStack() as alive:
        alive.enter_context(lock_state_folder(one))
        assert state_of(None, "credit") == one
        alive.enter_context(lock_state_folder(two))
        with pytest.raises(UserError, match="several peers run here; name the state folder of one"):
            state_of(None, "credit")
    with lock_state_folder(one, "bootstrap"), lock_state_folder(two, "worker"):
        assert state_of(None, "top") == two, "a volunteer means the peer that trains"
    with (
        lock_state_folder(one, "worker"),
        lock_state_folder(two, "worker"),
        pytest.raises(UserError, match="several peers"),
    ):
        state_of(None, "top")
    assert state_of(two, "me") == two
    (tmp_path / "p.yaml").write_text("role: bootstrap\nstate: swarmnet/two\n")
    assert state_of(tmp_path / "p.yaml", "me") == two
    with pytest.raises(UserError, match="no such folder or file"):
        state_of(tmp_path / "nowhere", "me")


def test_where_no_peer_runs_the_only_state_will_do_for_who_only_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    one, two = tmp_path / "swarmnet" / "one", tmp_path / "swarmnet" / "two"
    for state in (one, two):
        state.mkdir(parents=True)
    (one / "identity.key").touch()
    assert state_of(None, "credit", at_rest=True) == one
    with pytest.raises(UserError, match="no peer seems to run below"):
        state_of(None, "pause")
    (two / "peer.yaml").touch()
    with pytest.raises(UserError, match=r"no peer runs, and there are states of several; name one: .*one, "):
        state_of(None, "credit", at_rest=True)


def test_a_peer_that_is_just_starting_is_not_said_not_to_run(tmp_path):
    with lock_state_folder(tmp_path), pytest.raises(UserError, match="just starting or ending; ask again"):
        commands.leave(tmp_path)


def test_a_peer_that_does_not_end_is_not_said_to_end_at_the_first_signal(tmp_path):
    with lock_state_folder(tmp_path), pytest.raises(UserError, match="SIGTERM, sent twice, ends it at once"):
        commands._wait_until_ended(tmp_path, 0.0)


@pytest.mark.parametrize(("count", "said"), [(0, "0 peers"), (1, "1 peer"), (1200, "1,200 peers")])
def test_one_is_told_from_many(count, said):
    assert counted(count, "peer") == said
