"""`swarmnet service`: the unit that is written, the commands that are run or named, and where nothing is."""

import shutil
import subprocess

import pytest
from typed import refused

from peers.config.peer_file import load
from peers.errors import UserError
from peers.runtime.state_lock import only_one
from peers.tools.systemd_unit import service_of

PEER = "role: bootstrap\nname: my peer\ndrain_seconds: 30\n"


@pytest.fixture
def systemctl(tmp_path, monkeypatch):
    """A systemctl that notes what it is asked; `answers` is its exit code, but for the step that `fails`."""
    tools, asked = tmp_path / "tools", tmp_path / "asked"
    tools.mkdir()

    def answers(code, fails="nothing"):
        script = tools / "systemctl"
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {asked}\n[ "$2" = is-active ] && echo active\n'
            f'[ "$2" = {fails} ] && echo it is masked && exit 1\nexit {code}\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
        return asked

    return answers


def unit(tmp_path):
    return tmp_path / "home/.config/systemd/user/swarmnet-my-peer.service"


def test_install_writes_a_unit_starts_it_and_says_so(swarmnet, systemctl, tmp_path):
    asked = systemctl(0)
    (tmp_path / "p.yaml").write_text(PEER)
    code, out, _ = swarmnet("service", "install", tmp_path / "p.yaml")
    assert code == 0
    assert f"wrote    {unit(tmp_path)}" in out
    assert "ran      systemctl --user enable --now --no-block swarmnet-my-peer.service" in out
    assert "loginctl enable-linger" in out
    text = unit(tmp_path).read_text()
    assert f"run {tmp_path}/p.yaml" in text
    assert "TimeoutStopSec=45" in text, "longer than the peer may take to leave"
    assert "--user daemon-reload" in asked.read_text()
    code, out, _ = swarmnet("service", "status", tmp_path / "p.yaml")
    assert out.startswith("swarmnet-my-peer.service: active")
    code, out, _ = swarmnet("service", "uninstall", tmp_path / "p.yaml")
    assert code == 0
    assert f"removed  {unit(tmp_path)}" in out
    assert not unit(tmp_path).exists()
    assert "not installed" in swarmnet("service", "status", tmp_path / "p.yaml")[1]
    refused(swarmnet("service", "uninstall", tmp_path / "p.yaml"), "is not there")


def test_where_no_user_manager_answers_the_commands_are_named(swarmnet, systemctl, tmp_path):
    systemctl(1)
    (tmp_path / "p.yaml").write_text(PEER)
    code, out, _ = swarmnet("service", "install", tmp_path / "p.yaml")
    assert code == 0
    assert "to do    systemctl --user enable --now --no-block swarmnet-my-peer.service" in out
    assert "ran " not in out


def test_a_step_that_failed_is_an_exit_code(swarmnet, systemctl, tmp_path):
    (tmp_path / "p.yaml").write_text(PEER)
    systemctl(0, fails="enable")
    code, out, _ = swarmnet("service", "install", tmp_path / "p.yaml")
    assert code == 1
    assert "failed   systemctl --user enable --now --no-block swarmnet-my-peer.service: it is masked" in out
    for step in ("disable", "daemon-reload"):
        systemctl(0)
        assert swarmnet("service", "install", tmp_path / "p.yaml")[0] == 0
        systemctl(0, fails=step)
        code, out, _ = swarmnet("service", "uninstall", tmp_path / "p.yaml")
        assert code == 1
        assert f"failed   systemctl --user {step}" in out


def test_the_unit_of_another_peer_of_the_same_name_is_left_alone(swarmnet, systemctl, tmp_path):
    asked = systemctl(0)
    first, second = tmp_path / 'a run "b"$c%d' / "p.yaml", tmp_path / "two.yaml"
    first.parent.mkdir()
    for file in (first, second):
        file.write_text(PEER)
    assert swarmnet("service", "install", first)[0] == 0
    text = unit(tmp_path).read_text()
    asked.write_text("")
    refused(swarmnet("service", "install", second), str(first), "give this peer another `name`")
    refused(swarmnet("service", "uninstall", second), str(first), "name that peer file")
    assert f"starts another peer: {first}" in swarmnet("service", "status", second)[1]
    assert (unit(tmp_path).read_text(), asked.read_text()) == (text, "")
    assert swarmnet("service", "install", first)[0] == 0, "again, for a change in the file"
    first.unlink()
    assert swarmnet("service", "install", second)[0] == 0, "the peer file was moved"
    assert f"run {second}\n" in unit(tmp_path).read_text()


def test_a_unit_that_starts_something_else_is_not_overwritten(swarmnet, systemctl, tmp_path):
    systemctl(0)
    (tmp_path / "p.yaml").write_text(PEER)
    unit(tmp_path).parent.mkdir(parents=True)
    unit(tmp_path).write_text("[Service]\nExecStart=/bin/true\n")
    refused(swarmnet("service", "install", tmp_path / "p.yaml"), "starts another peer (ExecStart=/bin/true)")
    assert unit(tmp_path).read_text() == "[Service]\nExecStart=/bin/true\n"


def test_without_systemd_or_with_a_mistake_nothing_is_written(swarmnet, systemctl, tmp_path, monkeypatch):
    (tmp_path / "p.yaml").write_text(PEER)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    refused(swarmnet("service", "install", tmp_path / "p.yaml"), "has no systemd", "swarmnet run")
    systemctl(0)
    refused(swarmnet("service", "install", tmp_path / "nowhere.yaml"), "no such file")
    (tmp_path / "p.yaml").write_text(PEER + "sots: 3\n")
    refused(swarmnet("service", "install", tmp_path / "p.yaml"), "sots: unknown key")
    assert not unit(tmp_path).parent.exists()


def test_a_path_with_signs_that_systemd_reads_is_escaped(tmp_path):
    folder = tmp_path / 'a b%c"$d'
    folder.mkdir()
    (folder / "p.yaml").write_text(PEER)
    config = load(folder / "p.yaml")
    text = service_of(folder / "p.yaml", config, ["/usr/bin/swarmnet"], tmp_path).text
    assert f'run "{tmp_path}/a b%%c\\"$$d/p.yaml"' in text
    bad = tmp_path / "a\nExecStartPre=evil"
    with pytest.raises(UserError, match="move the peer file"):
        service_of(bad / "p.yaml", config, ["/usr/bin/swarmnet"], tmp_path)


def test_a_peer_that_runs_is_to_be_stopped_first(swarmnet, systemctl, tmp_path):
    """The unit would find the state folder locked, end with exit code 2 and never be started again."""
    asked = systemctl(0)
    (tmp_path / "p.yaml").write_text(PEER + "state: here\n")
    with only_one(tmp_path / "here"):
        refused(
            swarmnet("service", "install", tmp_path / "p.yaml"),
            f"the peer of {tmp_path}/here runs: stop it first (swarmnet leave {tmp_path}/here), then install",
        )
    assert not unit(tmp_path).exists()
    assert not asked.exists()
    assert swarmnet("service", "install", tmp_path / "p.yaml")[0] == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_itself_finds_nothing_wrong_with_it(tmp_path):
    (tmp_path / "p.yaml").write_text(PEER)
    service = service_of(tmp_path / "p.yaml", load(tmp_path / "p.yaml"), ["/bin/true"], tmp_path)
    service.path.write_text(service.text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(service.path)],
        capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    assert service.name not in done.stderr, done.stderr
