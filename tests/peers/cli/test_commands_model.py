"""export, generate and evaluate as commands, on a small model with random weights."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from model_sizes import model_shape
from typed import typing

from peers.config.errors import UserError
from peers.state.checkpoint_file import Model
from swarmnet.identifiers import PeerId
from swarmnet.model.parameters import parameter_shapes
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, InitCheckpoint, TextSource

SHAPE = model_shape(width=16, layers=2, heads=2, kv_heads=1, inner=24, max_position_embeddings=64)
MANIFEST = Manifest("tiny", PeerId("owner"), stages=(1, 1), model=SHAPE, data=Data(seq_len=32))


def random_stage(stage):
    generator = torch.Generator().manual_seed(stage)
    return {
        name: torch.randn(shape, generator=generator) * 0.05
        for name, shape in parameter_shapes(SHAPE, MANIFEST.span(stage)).items()
    }


@pytest.fixture
def swarmnet(monkeypatch, capsys, tmp_path):
    """Runs a command beside a checkpoint named `state`; returns exit code, standard output and error."""

    def newest(source):
        if source is None or source.name != "state":
            raise UserError(f"{source}: no checkpoint is there")
        return Model(MANIFEST, (random_stage(0), random_stage(1)), 5)

    monkeypatch.setattr("peers.state.checkpoint_file.newest", newest)
    text = b"for each in range(10):\n    print(each)\n" * 9
    monkeypatch.setattr("peers.data.documents.held_out_text", lambda: text)
    monkeypatch.chdir(tmp_path)
    return typing(capsys, monkeypatch)


@pytest.mark.slow
def test_an_exported_model_writes_the_same_text_as_its_checkpoint(swarmnet, tmp_path):
    code, out, _ = swarmnet("export", "--hf", "model", "--from", "state")
    assert code == 0
    assert f"run {MANIFEST.run_id()}, round 5" in out
    assert (tmp_path / "model/config.json").is_file()
    texts = [
        swarmnet("generate", "--from", source, "--prompt", "def ", "--tokens", 20, "--seed", seed)[1]
        for source, seed in (("state", 1), ("model", 1), ("state", 2))
    ]
    assert texts[0].startswith("def ")
    assert texts[0] == texts[1] != texts[2]


TIED = replace(MANIFEST, stages=(2,), model=replace(SHAPE, tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("manifest", "is_equal", "said"),
    [
        (TIED, True, "tied   embedding and head are equal"),
        (MANIFEST, True, "tied   embedding and head are equal"),
        (MANIFEST, False, "untied embedding and head differ"),
    ],
    ids=["tied in the run", "equal", "different"],
)
def test_a_head_that_equals_the_embedding_is_written_once_and_that_is_said(
    swarmnet, tmp_path, monkeypatch, manifest, is_equal, said
):
    first, last = random_stage(0), random_stage(1)
    head = last.pop("lm_head.weight")
    stages = (first | last,)
    if manifest is MANIFEST:
        last["lm_head.weight"] = first["model.embed_tokens.weight"].clone() if is_equal else head
        stages = (first, last)
    model = Model(replace(manifest, init_checkpoint=InitCheckpoint("base")), stages, 5)
    monkeypatch.setattr("peers.state.checkpoint_file.newest", lambda source: model)
    code, out, err = swarmnet("export", "--hf", "model", "--from", "state", "--no-score")
    assert code == 0, err
    assert said in out
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["tie_word_embeddings"] is is_equal
    texts = [
        swarmnet("generate", "--from", source, "--prompt", "def ", "--tokens", 9)[1]
        for source in ("state", "model")
    ]
    assert texts[0] == texts[1]


def test_a_folder_is_replaced_only_when_told_and_that_is_said_before_anything_is_read(swarmnet, monkeypatch):
    assert swarmnet("export", "--hf", "model", "--from", "state")[0] == 0
    with monkeypatch.context() as changed:
        changed.setattr("peers.state.checkpoint_file.newest", lambda source: pytest.fail("read a checkpoint"))
        code, _, err = swarmnet("export", "--hf", "model", "--from", "state")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "exists already" in err
    assert swarmnet("export", "--hf", "model", "--from", "state", "--replace")[0] == 0


def test_a_folder_that_is_there_is_told_without_torch_whose_import_takes_seconds(tmp_path):
    (tmp_path / "model").mkdir()
    without = "import sys; sys.modules['torch'] = None; from peers.cli.main import main; main()"
    typed = [sys.executable, "-c", without, "export", "--hf", "model"]
    told = subprocess.run(typed, cwd=tmp_path, capture_output=True, timeout=60)
    assert (told.returncode, told.stderr.count(b"\n")) == (2, 1)
    assert b"error: model exists already" in told.stderr


@pytest.mark.parametrize("command", [["generate"], ["evaluate"], ["export", "--hf", "model"]])
def test_a_tokenizer_is_opened_where_a_person_says_and_never_where_a_manifest_does(
    swarmnet, tmp_path, monkeypatch, command
):
    theirs = tmp_path / "theirs.json"
    theirs.write_text("no tokenizer, but a secret of this machine")
    manifest = replace(MANIFEST, data=replace(MANIFEST.data, tokenizer=str(theirs)))
    model = Model(manifest, (random_stage(0), random_stage(1)), 5)
    monkeypatch.setattr("peers.state.checkpoint_file.newest", lambda source: model)
    code, _, err = swarmnet(*command, "--from", "state")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "say where it is on this machine: --tokenizer FILE" in err
    code, _, err = swarmnet(*command, "--from", "state", "--tokenizer", "mine.json")
    assert code == 2
    assert "mine.json does not exist" in err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("paths", [["books"], ["python-stdlib", "books"]])
def test_a_run_of_its_own_text_is_scored_only_on_a_text_that_a_person_names(
    swarmnet, tmp_path, monkeypatch, paths
):
    sources = tuple(TextSource(path, path) for path in paths)
    manifest = replace(MANIFEST, data=replace(MANIFEST.data, sources=sources))
    model = Model(manifest, (random_stage(0), random_stage(1)), 5)
    monkeypatch.setattr("peers.state.checkpoint_file.newest", lambda source: model)
    command = ["export", "--hf", "model", "--from", "state", "--replace"]
    code, out, err = swarmnet(*command)
    assert (code, "score" in out) == (0, False)
    assert "warning: not scored: the held-out modules" in err
    assert "Not scored." in (tmp_path / "model/README.md").read_text()
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 20)
    code, out, err = swarmnet(*command, "--eval-text", "book.txt")
    assert (code, "bits per byte of book.txt" in out, err) == (0, True, "")
    code, out, err = swarmnet(*command, "--score")
    assert (code, "bits per byte of held-out text" in out) == (0, True)
    assert "warning: the held-out modules of Python's library may be in the text" in err
    assert swarmnet(*command, "--no-score")[::2] == (0, "")
    warned = "may be in the text that this run was trained on"
    assert warned in swarmnet("evaluate", "--from", "state")[2]
    assert swarmnet("evaluate", "--from", "state", "--eval-text", "book.txt")[::2] == (0, "")
    assert warned in swarmnet("evaluate", "--from", "model")[2]


def test_a_score_says_on_which_text_it_was_taken(swarmnet, tmp_path):
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 20)
    code, out, _ = swarmnet("evaluate", "--from", "state", "--eval-text", "book.txt")
    assert code == 0
    assert 7 < float(re.match(r"([\d.]+) bits per byte", out)[1]) < 9
    assert re.search(r"text sha256 [0-9a-f]{64}, window 32 tokens", out)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["generate", "--from", "nowhere"], "nowhere: no checkpoint is there"),
        (["export", "--hf", "model"], "no checkpoint is there"),
        (["evaluate", "--from", "state", "--eval-text", "nowhere.txt"], "text nowhere.txt does not exist"),
        (["export", "--hf", "model", "--from", "state", "--eval-text", "nowhere.txt"],
         "text nowhere.txt does not exist"),
        (["export", "--hf", "model", "--from", "state", "--eval-text", "."], "folder . holds no text"),
        (["export", "--hf", "model", "--from", "state", "--eval-text", "a.txt", "--no-score"],
         "--no-score asks for no score: give one"),
        (["generate", "--from", "state", "--tokens", "0"], "--tokens"),
        (["generate", "--from", "state", "--temperature", "-1"], "--temperature"),
        (["generate", "--from", "state", "one", "two"], "several need --run"),
        (["generate", "--from", "state", "--run", "run.json"], "give one of them"),
        (["evaluate", "--from", "state", "--bootstrap", "/ip4/1.2.3.4/tcp/1"], "--bootstrap needs --run"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line_and_writes_nothing(swarmnet, tmp_path, arguments, word):
    code, out, err = swarmnet(*arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert word in err
    assert list(tmp_path.iterdir()) == []
