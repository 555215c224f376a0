"""`swarmnet new`: a folder that can be published, with reasons, or an error and no folder."""

import json
import re
import shlex
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from chats import VOCABULARY, chat_folder, riddles, write_lines
from public_models import LLAMA, save

from peers.cli.main import main
from peers.config.run_file import load_manifest
from peers.lab.planner.new_run.machines import bootstrap_place, machines_of
from peers.lab.planner.new_run.proposal import MAX_EPOCHS, propose_size, vocabulary_for
from peers.lab.planner.new_run.text_facts import TextFacts
from swarmnet.identifiers import PeerId
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.run.manifest import Manifest

PEERS = "3x2ktps@100/40:8GB"
RUN = Manifest("new", PeerId(""))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    return tmp_path


def swarmnet(capsys, *arguments) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return ended.value.code or 0, told.out + told.err


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "base"
    save(folder, replace(LLAMA, vocab_size=VOCABULARY))
    chat_folder(folder)
    return folder


def books(here: Path) -> Path:
    folder = here / "books"
    folder.mkdir()
    (folder / "a.txt").write_text("call me by my name\n" * 2000)
    return folder


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_of_text_becomes_a_run_that_can_be_published(here, capsys):
    books(here)
    address = ("--address", "boot.example.org:4001")
    code, told = swarmnet(capsys, "new", "tale", "--text", "books", "--peers", PEERS, *address)
    assert code == 0, told
    assert files(here / "tale") == {"tale.yaml", "bootstrap.yaml", "README.md", "text"}
    manifest = load_manifest(here / "tale" / "tale.yaml", PeerId(""))
    assert manifest.data.tokenizer == "bytes"
    slower = "SLOWER THAN ONE OF ITS MEMBERS: one peer alone is sooner"
    assert f"note   warning: {slower}" in told, "as `plan --shape` warns"
    run_file = here / "tale" / "tale.yaml"
    filled = run_file.read_text().replace("# licence: unknown", "licence: CC0-1.0")
    run_file.write_text(filled.replace("# kind: other ", "kind: public "))
    (source,) = load_manifest(run_file, PeerId("")).data.sources
    assert (source.licence, source.kind) == ("CC0-1.0", "public"), "only the # must go"
    readme = (here / "tale" / "README.md").read_text()
    commands = re.findall(r"^next   swarmnet (.*)$", told, re.MULTILINE)
    assert len(commands) == 3
    assert all(f"$ swarmnet {command}\n" in readme for command in commands)
    assert "/dns4/boot.example.org/tcp/4001/p2p/12D3Koo" in commands[0]
    assert str(here / "tale" / "text") in commands[2]
    assert all(word in readme for word in ("model: ", "seq_len: ", "learning_rate: ", "vocab_size: "))
    code, told = swarmnet(capsys, *shlex.split(commands[0]), "--key", here / "owner.key")
    assert code == 0, told
    (options,) = re.findall(r"^first  swarmnet join .*? --bootstrap \S+( --set .*)$", told, re.MULTILINE)
    assert commands[2] == f"join tale/tale.run.json{options}", "as publishing says"
    code, told = swarmnet(capsys, "config", "check", "tale/bootstrap.yaml")
    assert code == 0, told


def test_conversations_and_a_model_become_a_fine_tuning(here, base, capsys):
    write_lines(here / "talks.jsonl", riddles(300))
    code, told = swarmnet(
        capsys, "new", "tuned", "--text", "talks.jsonl", "--from", base, "--lora", "8", "--peers", "3"
    )
    assert code == 0, told
    manifest = load_manifest(here / "tuned" / "tuned.yaml", PeerId(""))
    assert (manifest.model.lora.rank, manifest.data.format) == (8, "messages")
    assert manifest.stages == (3,)
    assert manifest.init_checkpoint.path == "model"
    assert manifest.data.seq_len == 64, "the longest conversation has some 40 tokens"
    assert {"model", "text.jsonl", "tokenizer.json", "tokenizer_config.json"} <= files(here / "tuned")
    readme = (here / "tuned" / "README.md").read_text()
    assert "swarmnet evaluate --from tuned/model --eval-text HELD_OUT --answers" in readme
    code, told = swarmnet(capsys, "publish", "tuned/tuned.yaml", "--key", here / "owner.key")
    assert code == 0, told
    assert "300 documents" in told


def test_a_model_too_large_for_a_peer_is_cut_into_stages(here, base, capsys):
    write_lines(here / "talks.jsonl", riddles(50))
    peers = "3x2ktps@100/40:0.002GB"
    code, told = swarmnet(capsys, "new", "cut", "--text", "talks.jsonl", "--from", base, "--peers", peers)
    assert code == 0, told
    assert len(load_manifest(here / "cut" / "cut.yaml", PeerId("")).stages) > 1


WRONG = {
    "no text": (["--text", "nowhere"], "does not exist"),
    "empty folder": (["--text", "empty"], "holds no text"),
    "conversations alone": (["--text", "talks.jsonl"], "add --from MODEL_DIR"),
    "lora alone": (["--text", "books", "--lora", "8"], "--lora trains adapters"),
    "no model": (["--text", "talks.jsonl", "--from", "books"], "there is no config.json"),
    "peers": (["--text", "books", "--peers", "three"], "give a number of machines"),
    "no peers": (["--text", "books", "--peers", "0"], "--peers 0: give 1 to"),
    "address": (["--text", "books", "--address", "a b"], "expected HOST or HOST:PORT"),
    "port": (["--text", "books", "--address", "a:99999"], "expected HOST or HOST:PORT"),
    "too little memory": (
        ["--text", "talks.jsonl", "--from", "BASE", "--peers", "1x2ktps@100/40:0.001GB"],
        "cannot hold this model",
    ),
    "another architecture": (["--text", "talks.jsonl", "--from", "other"], "GPT2LMHeadModel"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input_leaves_no_folder_and_says_what_to_do(here, base, capsys, wrong):
    books(here)
    (here / "empty").mkdir()
    chat_folder(here / "other")
    (here / "other" / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    write_lines(here / "talks.jsonl", riddles(20))
    before = files(here)
    arguments, reason = WRONG[wrong]
    code, told = swarmnet(capsys, "new", "tale", *(str(base) if one == "BASE" else one for one in arguments))
    assert (code, reason in told) == (2, True), told
    assert files(here) == before


def test_names_that_are_taken_or_no_names_are_refused(here, capsys):
    books(here)
    taken = {"books": "is never overwritten", "a b": "is no name", "no/where": "is no folder"}
    for name, reason in taken.items():
        code, told = swarmnet(capsys, "new", name, "--text", "books")
        assert (code, reason in told) == (2, True), told


def facts(tokens: int) -> TextFacts:
    return TextFacts(1, tokens, tokens, 0, ())


def test_size_follows_text_and_machines():
    fast, slow = machines_of("8x100000ktps"), machines_of("3x1tps")
    sizes = []
    for tokens in (10**6, 10**8, 10**10):
        run, needed, why = propose_size(RUN, facts(tokens), 4096, fast, 10**9)
        sizes.append(sum(map(prod, parameter_shapes(run.model, whole(run.model)).values())))
        assert needed <= MAX_EPOCHS * tokens
        assert "epochs" in why[0]
    assert sizes == sorted(set(sizes))
    run, _, why = propose_size(RUN, facts(10**10), 4096, slow, 3600.0)
    assert run.model.hidden_size == 64
    assert "hours" in why[0]


def test_vocabulary_and_address_have_their_limits():
    assert [vocabulary_for(size) for size in (10**6, 10**7, 10**9 - 1, 10**10)] == [0, 4096, 8192, 32768]
    assert bootstrap_place("203.0.113.5") == ("/ip4/203.0.113.5", 31330)
    assert bootstrap_place("host.example:99") == ("/dns4/host.example", 99)
    assert bootstrap_place(None)[0].startswith("/ip4/")
