"""Paths that people type and that lead nowhere: one line says what is wrong, and nothing is left behind."""

import errno
import os
from pathlib import Path

import pytest
from sharp_weights import LLAMA, stage_weights
from typed import files_below, refused, write

from peers.config.atomic_files import is_file, is_folder, is_there
from peers.config.errors import UserError
from peers.runtime.state_lock import lock_state_folder
from peers.tools.model.export import export

INVITE = "swarmnet-invite-1." + "A" * 400
RUN = "ab" * 32


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A folder that nobody but its user sees into, for root too: the system's calls on what is in it fail."""
    folder = tmp_path / "others"
    folder.mkdir()

    def refusing(call):
        def called(path, *arguments, **options):
            if isinstance(path, str | Path) and folder in Path(path).parents:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *arguments, **options)

        return called

    for name in ("stat", "mkdir", "open"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    return folder


def test_what_a_path_is_where_it_may_be_seen(tmp_path):
    (tmp_path / "f").touch()
    assert (is_file(tmp_path / "f"), is_folder(tmp_path / "f"), is_there(tmp_path / "f")) == (
        True,
        False,
        True,
    )
    assert (is_file(tmp_path), is_folder(tmp_path), is_there(tmp_path)) == (False, True, True)
    for nowhere in (tmp_path / "g", tmp_path / "f" / "g", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        assert (is_file(nowhere), is_folder(nowhere), is_there(nowhere)) == (False, False, False)


def test_the_state_folder_cannot_be_made(swarmnet, tmp_path, closed):
    file = write("p.yaml", f"role: bootstrap\nstate: {closed}/state\n")
    refused(
        swarmnet("run", file), f"{closed}/state: cannot be written: Permission denied", "another state folder"
    )
    write("file", "")
    file = write("p.yaml", "role: bootstrap\nstate: file/state\n")
    refused(swarmnet("run", file), "work/file/state: cannot be written: Not a directory")


def test_only_a_peer_that_runs_is_said_to_use_a_state_folder(tmp_path, monkeypatch):
    with (
        lock_state_folder(tmp_path),
        pytest.raises(UserError, match="used by another running peer"),
        lock_state_folder(tmp_path),
    ):
        pass

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("peers.runtime.state_lock.fcntl.flock", no_locks)
    with pytest.raises(UserError, match="cannot be locked: No locks available"), lock_state_folder(tmp_path):
        pass


def test_a_long_text_where_the_run_belongs_is_no_run(swarmnet, started, tmp_path):
    refused(
        swarmnet("join", INVITE, "--state", "here"),
        "is neither a run id",
        "swarmnet-invite-1.",
        "418 characters",
    )
    write("p.yaml", f"run: {INVITE}\n")
    refused(swarmnet("config", "check", "p.yaml"), "p.yaml:1: run: ", "is neither a run id")
    assert (started, files_below(tmp_path / "work")) == ([], ["p.yaml"])


def test_what_lies_in_another_users_folder_is_said_to_be_closed(swarmnet, started, closed):
    shut = f"{closed}/x: cannot be looked at: Permission denied"
    refused(swarmnet("join", closed / "x"), shut)
    refused(swarmnet("join", RUN, "--state", closed), f"{closed}/peer.yaml: cannot be looked at")
    refused(swarmnet("credit", closed / "x"), shut)
    refused(swarmnet("report", closed / "x"), shut)
    refused(swarmnet("evaluate", "--eval-text", closed / "x"), shut)
    refused(swarmnet("export", "--hf", "model", "--eval-text", closed / "x"), shut)
    refused(
        swarmnet("config", "check", write("p.yaml", f"threads: 1\nrun: {closed}/x\n")),
        "p.yaml:2: run: ",
        shut,
    )
    assert started == []


@pytest.mark.parametrize("key", ["state", "identity", "run", "archive"])
def test_the_home_of_nobody_is_a_mistake_in_the_file(swarmnet, key):
    file = write("p.yaml", f"role: bootstrap\n{key}: ~nobody-here/x\n")
    refused(
        swarmnet("config", "check", file),
        f"p.yaml:2: {key}: '~nobody-here/x': this machine has no such home folder",
        "full path",
    )


@pytest.mark.parametrize("out", [".", "", "/", "here"])
def test_a_folder_where_a_file_belongs_is_not_written_to(swarmnet, tmp_path, out):
    assert swarmnet("publish", write("tiny.yaml", "seed: 4\n"))[0] == 0
    (tmp_path / "work" / "here").mkdir()
    before = files_below(tmp_path)
    refused(
        swarmnet("report", "tiny.run.json", "--out", out),
        "cannot be written",
        "folder" if out != "here" else "",
    )
    assert files_below(tmp_path) == before


def test_an_exported_model_is_read_where_one_stands(swarmnet, tmp_path, monkeypatch):
    export(tmp_path / "model", LLAMA, stage_weights(LLAMA, (2, 1)))
    monkeypatch.chdir(tmp_path / "model")
    code, out, err = swarmnet("generate", "def", "--tokens", 3)
    assert (code, err) == (0, "")
    assert out.startswith("def")
