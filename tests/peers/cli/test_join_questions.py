"""What `swarmnet join` asks a person at a terminal, and that it asks a script nothing."""

import re
from pathlib import Path

import observed
import pytest
from swarm import sign, tiny_manifest
from typed import BOOTSTRAP, files_below

from peers.cli import join as join_command
from peers.cli import join_questions
from peers.cli.join_questions import FoundRun
from peers.config.limits import LimitsFile
from peers.config.peer_file import load, validate_peer_file
from peers.config.run_file import published_text
from peers.config.yaml_lines import ParsedYaml
from peers.worker.watch.join_summary import summarize

SIGNED = sign(tiny_manifest(name="tales"))
LINK = f"swarmnet:{SIGNED.run_id}@{BOOTSTRAP}"


def record(number, stage, tokens_per_second=1000.0):
    return observed.record(f"peer-{number}", stage, tokens_per_second=tokens_per_second, loss=2.5).record


@pytest.fixture
def person(monkeypatch):
    """A person at a terminal: what they type, and the questions that they saw."""
    typed, seen = [], []

    def answer(question, **_):
        seen.append(question)
        return typed.pop(0)

    def confirm(question, **_):
        if not answer(question):
            raise join_questions.typer.Abort

    monkeypatch.setattr(join_command, "is_interactive", lambda: True)
    monkeypatch.setattr(join_questions.typer, "prompt", answer)
    monkeypatch.setattr(join_questions.typer, "confirm", confirm)
    monkeypatch.setattr(join_questions, "_find", lambda *_: FoundRun(SIGNED, (record(1, 0), record(2, 1))))
    return typed, seen


def test_one_string_a_name_and_one_yes_start_a_peer(swarmnet, started, person):
    typed, seen = person
    typed += ["Ada", True]
    code, _, err = swarmnet("join", LINK, "--state", "here")
    assert (code, len(seen)) == (0, 2)
    for subject in ("run ", "swarm ", "disk ", "memory ", "upload ", "hours ", "power ", "later "):
        assert f"\n{subject}" in f"\n{err}", subject
    assert "2 peers training, round 100 of" in err
    config = load(Path("here/peer.yaml"))
    assert (config.name, config.bootstrap, config.page) == ("Ada", (BOOTSTRAP,), "127.0.0.1:9400")
    assert Path("here/run.json").read_text() == published_text(SIGNED), "found is found"
    outcome = swarmnet("join", LINK, "--state", "here")
    assert outcome[0] == 0, outcome
    assert len(seen) == 2, "a later join asks nothing"
    assert started[0] == started[1]


def test_no_means_that_nothing_is_written(swarmnet, started, person, tmp_path):
    typed, _ = person
    typed += ["", False]
    before = files_below(tmp_path)
    assert swarmnet("join", LINK)[0] == 130
    assert (started, files_below(tmp_path)) == ([], before)


def test_scripts_are_asked_nothing(swarmnet, started, person, monkeypatch):
    _, seen = person
    assert swarmnet("join", LINK, "--yes", "--state", "a")[0] == 0
    monkeypatch.setattr(join_command, "is_interactive", lambda: False)
    code, _, err = swarmnet("join", LINK, "--state", "b")
    assert (code, seen) == (0, [])
    assert "upload " not in err
    assert [config.bootstrap for config in started] == [(BOOTSTRAP,)] * 2


def test_a_name_that_was_typed_as_an_option_is_not_asked_for(swarmnet, started, person):
    typed, seen = person
    typed.append(True)
    assert swarmnet("join", LINK, "--name", "Ada", "--state", "here")[0] == 0
    assert seen == ["Join?"]


def config_of(tmp_path, **limits):
    typed = ParsedYaml("x", {"run": SIGNED.run_id, "state": str(tmp_path), "device": "cpu", "limits": limits})
    return validate_peer_file(typed, tmp_path, "x", {})


def test_the_summary_says_what_the_limits_leave(tmp_path):
    records = [record(1, 0), record(2, 0, tokens_per_second=3000.0), record(3, 1)]
    free = "\n".join(summarize(config_of(tmp_path), SIGNED, records))
    assert "day and night, until you stop it" in free
    assert "no limit is set" in free
    assert "3 peers training" in free
    assert "loss 2.500" in free
    assert re.search(r"^memory +\d+ to \d+ MiB of memory, by stage; more", free, re.MULTILINE), free
    held = "\n".join(summarize(config_of(tmp_path, upload="8Mbit/s", hours="22:00-08:00"), SIGNED, records))
    assert "limited to 8 Mbit/s" in held
    assert "at 22:00-08:00" in held
    assert LimitsFile(upload=1e6) == config_of(tmp_path, upload="8Mbit/s").limits


def test_a_run_that_does_not_answer_is_said_to_be_tried_further(tmp_path):
    lines = summarize(config_of(tmp_path), None, [])
    assert lines[0] == "run       not reached yet; this computer keeps trying"
    assert not [line for line in lines if line.startswith(("disk", "memory"))]
    assert summarize(config_of(tmp_path), SIGNED, [])[1] == "swarm     no peer trains now"
