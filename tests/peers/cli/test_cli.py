"""The commands as people type them: what they print, exit codes, and that mistakes leave nothing behind."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typed import BOOTSTRAP, files_below, refused, write

from peers.cli import main as cli
from peers.config.errors import UserError
from peers.config.peer_file import DemoOptions
from peers.config.run_file import load_signed
from peers.lab.processes.demo import run_demo

CONFIGS = Path(__file__).parents[3] / "configs"


def test_help_needs_neither_torch_nor_hivemind():
    code = (
        "import sys, peers.cli.main\n"
        "try: peers.cli.main.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'hivemind', 'numpy', 'grpc'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import os; assert os.environ['OMP_NUM_THREADS'] == '1'\n"
        "assert os.environ['OMP_WAIT_POLICY'] == 'passive'"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "join" in done.stdout


def test_what_the_user_set_for_openmp_stays():
    environment = {"OMP_NUM_THREADS": "8"}
    cli.prepare_for_torch(environment)
    assert environment == {"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "passive"}


def test_version_names_what_it_runs_on(swarmnet):
    code, out, _ = swarmnet("version")
    assert code == 0
    assert out.startswith("swarmnet 0.")
    assert "hivemind 1.1.12" in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["jion"], "No such command 'jion'"),
        (["run"], "Missing argument"),
        (["run", "a.yaml", "--sett", "x=1"], "No such option"),
        (["demo", "--peers", "many"], "--peers"),
        (["demo", "--peers", "0"], "--peers"),
        (["config"], ""),
    ],
)
def test_a_wrong_command_is_one_line_with_code_2(swarmnet, arguments, word):
    code, _, err = swarmnet(*arguments)
    assert code == 2
    assert word in err
    assert len(err.splitlines()) == 1 or arguments == ["config"]


def test_no_command_shows_what_there_is(swarmnet):
    code, _, err = swarmnet()
    assert code == 2
    assert "publish" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("role: bootstrap\nlisten: 3\n", ["p.yaml:2: listen: is 3; expected a list"]),
        ("role: bootstrap\nlitsen: []\n", ["p.yaml:2: litsen: unknown key; did you mean 'listen'?"]),
        ("role: bootstrap\nrole: worker\n", ["p.yaml:2: role: is already set on line 1"]),
        ("run: other.run.json\n", ["p.yaml:1: run: 'other.run.json' is neither a run id"]),
    ],
)
def test_a_mistake_in_a_peer_file_stops_before_anything_is_written(swarmnet, started, tmp_path, text, words):
    write("p.yaml", text)
    before = files_below(tmp_path)
    refused(swarmnet("run", "p.yaml"), *words)
    assert (started, files_below(tmp_path)) == ([], before)


def test_run_starts_the_peer_that_was_typed_and_returns_its_exit_code(swarmnet, monkeypatch):
    seen = []
    stand_in = SimpleNamespace(run_peer_file=lambda it, _joined, _create_role: seen.append(it) or 3)
    monkeypatch.setitem(sys.modules, "peers.process.process", stand_in)
    monkeypatch.setenv("SWARMNET__SLOTS", "9")
    write("p.yaml", "role: bootstrap\nthreads: 2\n")
    assert swarmnet("run", "p.yaml", "--set", "metrics.listen=off", "--set", "threads=3")[0] == 3
    assert (seen[0].threads, seen[0].slots, seen[0].metrics.address) == (3, 9, None)


def test_every_problem_of_a_file_gets_its_line(swarmnet):
    code, _, err = swarmnet("config", "check", write("p.yaml", "role: bootstrap\nthreads: x\nslots: y\n"))
    assert code == 2
    assert [line.split(":")[2] for line in err.splitlines()] == ["2", "3"]


def test_set_without_a_value_is_refused(swarmnet, started):
    refused(swarmnet("run", write("p.yaml", "role: bootstrap\n"), "--set", "threads"), "expected KEY=VALUE")


def test_a_missing_file_is_named(swarmnet):
    refused(swarmnet("run", "nowhere.yaml"), "nowhere.yaml: no such file")
    refused(swarmnet("publish", "nowhere.yaml"), "nowhere.yaml: no such file")
    refused(swarmnet("join", "nowhere.run.json"), "nowhere.run.json: no such file, and no run id")


def test_a_right_file_is_said_to_be_right(swarmnet):
    code, out, err = swarmnet("config", "check", CONFIGS / "worker.yaml")
    assert (code, err) == (0, "")
    assert "worker.yaml: ok, peer file of 'attic', role worker" in out


def test_explain_knows_every_key_and_shows_what_a_file_sets(swarmnet):
    code, out, _ = swarmnet("config", "explain")
    assert code == 0
    assert "metrics.listen: HOST:PORT | off (default: 127.0.0.1:9410)" in out
    assert "sync.topk_per_chunk" in swarmnet("config", "explain", "--run")[1]
    assert "threads: 8\n" in swarmnet("config", "explain", CONFIGS / "lab-node.yaml")[1]


def test_explain_takes_settings_as_check_does(swarmnet):
    lab = CONFIGS / "lab-node.yaml"
    assert "threads: 3\n" in swarmnet("config", "explain", lab, "--set", "threads=3")[1]
    refused(swarmnet("config", "explain", "--set", "threads=3"), "config explain PEER.yaml")


def test_a_run_file_and_a_published_run_are_told_from_a_peer_file(swarmnet, started):
    publish(swarmnet)
    join = "join it with `swarmnet join tiny.run.json"
    refused(swarmnet("run", "tiny.run.json"), f"is a published run, not a peer file; {join}")
    refused(swarmnet("join", "tiny.yaml"), "is a run file; publish it first: `swarmnet publish tiny.yaml`")
    write("p.yaml", "role: bootstrap\n")
    refused(swarmnet("join", "p.yaml"), "started with `swarmnet run p.yaml`")
    refused(swarmnet("join", "gone.yaml"), "neither a run id")
    assert started == []


def test_publishing_signs_and_says_how_to_join(swarmnet, tmp_path):
    code, out, _ = swarmnet("publish", write("tiny.yaml", "seed: 4\n"), "--bootstrap", BOOTSTRAP)
    assert code == 0
    signed = load_signed(Path("tiny.run.json"))
    assert signed.manifest.seed == 4
    assert f"swarmnet join swarmnet:{signed.run_id}@{BOOTSTRAP}\n" in out
    key = tmp_path / "home/.local/state/swarmnet/owner.key"
    assert f"key    {key}: keep a copy elsewhere" in out
    assert key.stat().st_mode & 0o777 == 0o600
    other = write("tiny.yaml", "seed: 5\n")
    refused(swarmnet("publish", other), "tiny.run.json is the published run", "--out")
    write("tiny.yaml", "seed: 4\n")
    again = swarmnet("publish", "tiny.yaml", "--out", "again.json")
    assert again[0] == 0
    assert load_signed(Path("again.json")) == signed


@pytest.mark.parametrize(
    ("text", "arguments", "word"),
    [
        ("sede: 4\n", [], "tiny.yaml:1: sede: unknown key; did you mean 'seed'?"),
        ("stages: [9]\n", [], "tiny.yaml:1: stages hold 9 layers together, model.num_hidden_layers is 4"),
        ("data: {sources: [{name: a, path: ~/a.txt}]}\n", [], "data.sources.0.path: '~/a.txt' is a place"),
        ("data: {tokenizer: /srv/tokenizer.json}\n", [], "data.tokenizer: '/srv/tokenizer.json' is a place"),
        ("seed: 4\n", ["--bootstrap", "here"], "--bootstrap: bootstrap.0: 'here' is no multiaddr"),
        ("seed: 4\n", ["--key", "bad.key"], "bad.key"),
    ],
)
def test_a_run_that_cannot_be_published_leaves_no_file_and_no_key(swarmnet, tmp_path, text, arguments, word):
    write("bad.key", "no key")
    write("tiny.yaml", text)
    before = files_below(tmp_path)
    refused(swarmnet("publish", "tiny.yaml", *arguments), word)
    assert files_below(tmp_path) == before


def publish(swarmnet, seed=4):
    assert swarmnet("publish", write("tiny.yaml", f"seed: {seed}\n"))[0] == 0
    return load_signed(Path("tiny.run.json"))


OWN_TEXT = """
name: tiny
data: {sources: [{name: books, path: books}, {name: library, path: python-stdlib}, {name: far, path: far}]}
"""


def test_an_owner_joins_with_the_printed_line_and_reads_the_text_beside_the_run_file(
    swarmnet, started, tmp_path
):
    (tmp_path / "work/books").mkdir()
    (tmp_path / "work/books/one.txt").write_text("once upon a time")
    out = swarmnet("publish", write("tiny.yaml", OWN_TEXT + "stages: [4]\n"))[1]
    (first,) = [line for line in out.splitlines() if line.startswith("first ")]
    assert "peers of the first stage name their copy of the text" in out
    typed = shlex.split(first.replace("MULTIADDR", BOOTSTRAP).replace("PATH", "/srv/far"))[2:]
    assert swarmnet(*typed, "--state", "here")[0] == 2, "a run of one stage needs all of its text"
    Path("far").write_text("and far away")
    out = swarmnet("publish", "tiny.yaml")[1]
    (first,) = [line for line in out.splitlines() if line.startswith("first ")]
    typed = shlex.split(first.replace("MULTIADDR", BOOTSTRAP))[2:]
    assert swarmnet(*typed, "--state", "here")[0] == 0
    (config,) = started
    assert config.data_paths == {"books": str(tmp_path / "work/books"), "far": str(tmp_path / "work/far")}


def test_publishing_counts_the_text_beside_the_run_file_once(swarmnet, tmp_path):
    books = tmp_path / "work/books"
    books.mkdir()
    for name in ("one", "two"):
        (books / f"{name}.txt").write_text("once upon a time")
    (tmp_path / "work/far").write_text("and far away")
    sources = "{name: books, path: books, bytes: 7}, {name: far, path: far}, {name: py, path: python-stdlib}"
    text = f"name: tiny\ndata: {{seq_len: 8, sources: [{sources}]}}\n"
    file = write("tiny.yaml", text)
    assert swarmnet("publish", file)[0] == 0
    signed = load_signed(Path("tiny.run.json"))
    found = [(one.bytes, one.documents, one.sha256) for one in signed.manifest.data.sources]
    assert found == [(7, 2, ""), (12, 1, hashlib.sha256(b"and far away").hexdigest()), (0, 0, "")]
    (books / "three.txt").write_text("another one")
    assert swarmnet("publish", file)[0] == 0
    assert load_signed(Path("tiny.run.json")).run_id == signed.run_id
    assert swarmnet("publish", write("tiny.yaml", text + "seed: 3\n"))[0] == 2, "another run"


def test_the_first_stage_without_the_runs_text_is_refused_and_nothing_is_written(swarmnet, started):
    assert swarmnet("publish", write("tiny.yaml", OWN_TEXT + "stages: [2, 2]\n"))[0] == 0
    outcome = swarmnet("join", "tiny.run.json", "--bootstrap", BOOTSTRAP, "--state", "here", "--stage", 0)
    refused(outcome, "source `books` is not on this machine", "in the peer file: data_paths: {books: PATH}")
    assert not Path("here").exists()
    assert started == []
    assert swarmnet("join", "tiny.run.json", "--bootstrap", BOOTSTRAP, "--state", "here")[0] == 0


def test_what_an_owner_wrote_steers_no_terminal_and_reaches_a_program_as_it_is(swarmnet, monkeypatch):
    words = "\x9b31m\u202egnp.exe"
    file = write("tiny.yaml", 'name: tiny\nintended_use: "\\x9b31m\\u202egnp.exe"\n')
    assert swarmnet("publish", file)[0] == 0
    _, piped, _ = swarmnet("report", "tiny.run.json", "--json")
    assert words in piped
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    _, seen, _ = swarmnet("report", "tiny.run.json", "--json")
    assert all(character.isprintable() or character == "\n" for character in seen)
    assert json.loads(seen)["general"]["intended_use"] == words


def test_joining_leaves_a_folder_that_nobody_else_looks_into(swarmnet, started):
    publish(swarmnet)
    assert swarmnet("join", "tiny.run.json", "--bootstrap", BOOTSTRAP, "--state", "here")[0] == 0
    assert Path("here").stat().st_mode & 0o077 == 0


def test_joining_writes_a_peer_file_and_starts_it(swarmnet, started, tmp_path):
    signed = publish(swarmnet)
    outcome = swarmnet("join", "tiny.run.json", "--bootstrap", BOOTSTRAP, "--state", "here", "--stage", 1,
                       "--name", "attic", "--set", "slots=7")  # fmt: skip
    assert outcome[0] == 0
    (config,) = started
    assert (config.stage, config.slots, config.name, config.bootstrap) == (1, 7, "attic", (BOOTSTRAP,))
    assert config.state == tmp_path / "work/here"
    assert load_signed(Path(config.run or "")) == signed
    assert files_below(tmp_path / "work/here") == ["peer.yaml", "run.json"]


def test_joining_by_id_keeps_state_where_the_system_does(swarmnet, started, tmp_path):
    assert swarmnet("join", "ab" * 32, "--bootstrap", BOOTSTRAP)[0] == 0
    assert started[0].run == "ab" * 32
    assert started[0].state == tmp_path / "home/.local/state/swarmnet" / ("ab" * 8)


def test_joining_again_goes_on_with_the_file_as_it_was_edited(swarmnet, started):
    publish(swarmnet)
    swarmnet("join", "tiny.run.json", "--bootstrap", BOOTSTRAP, "--state", "here")
    file = Path("here/peer.yaml")
    file.write_text(file.read_text() + "threads: 5\n")
    edited = file.read_text()
    assert swarmnet("join", "tiny.run.json", "--state", "here", "--stage", 2)[0] == 0
    assert (started[1].threads, started[1].stage, started[1].bootstrap) == (5, 2, (BOOTSTRAP,))
    assert file.read_text() == edited


def test_a_folder_of_another_run_is_not_taken_over(swarmnet, started):
    run = publish(swarmnet).run_id
    swarmnet("join", "tiny.run.json", "--state", "here", "--alone")
    refused(swarmnet("join", "cd" * 32, "--state", "here"), f"is for run {run}", "--state")
    assert len(started) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (
            ["--bootstrap", "/ip4/1.2.3.4/tcp/5"],
            "--bootstrap: bootstrap.0: '/ip4/1.2.3.4/tcp/5' does not name the peer",
        ),
        (["--stage", "last"], "--stage: stage: is 'last'; expected a stage"),
        (["--set", "thraeds=1"], "--set: thraeds: unknown key; did you mean 'threads'?"),
    ],
)
def test_a_wrong_join_writes_nothing(swarmnet, started, tmp_path, arguments, word):
    refused(swarmnet("join", "ab" * 32, "--state", "here", *arguments), word)
    assert (started, files_below(tmp_path)) == ([], [])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda it: it.update(signature="00" * 64), "the signature is not the owner's"),
        (lambda it: it.update(run_id="00" * 32), "its manifest is run"),
        (lambda it: it["manifest"].update(seed=5), "the signature is not the owner's"),
    ],
)
def test_a_forged_run_file_is_not_joined(swarmnet, started, change, word):
    publish(swarmnet)
    content = json.loads(Path("tiny.run.json").read_text())
    change(content)
    write("forged.run.json", json.dumps(content))
    refused(swarmnet("join", "forged.run.json", "--state", "here"), "forged.run.json: ", word)
    refused(swarmnet("config", "check", "forged.run.json"), word)
    assert not Path("here").exists()
    assert started == []


def test_the_demo_gets_what_was_asked_for(swarmnet, started):
    assert swarmnet("demo")[0] == 0
    assert (
        swarmnet("demo", "--peers", 4, "--stages", 2, "--seconds", 30, "--report", "r.json", "--seed", 7)[0]
        == 0
    )
    assert started == [DemoOptions(), DemoOptions(4, 2, 30.0, Path("r.json"), 7, None)]


def test_a_demo_takes_what_its_help_says(swarmnet, started):
    with pytest.raises(UserError, match="shorter than 10 seconds"):
        run_demo(DemoOptions(seconds=9.9))
    refused(swarmnet("demo", "--seconds", "9.9"), "10")
    assert swarmnet("demo", "--seconds", "10")[0] == 0


def test_a_demo_that_cannot_be_is_refused_before_it_starts(swarmnet, started):
    refused(swarmnet("demo", "--peers", 2, "--stages", 3), "every stage needs a peer")
    refused(swarmnet("demo", "--report", "no/such/r.json"), "its folder does not exist")
    assert started == []


def test_a_reader_that_leaves_early_gets_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "peers.cli.main", "config", "explain"],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
