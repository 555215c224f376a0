"""`swarmnet export`: its card says what is known, and what transformers reads differently is not left."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_sizes import model_shape
from ruamel.yaml import YAML
from typed import typing

from peers.config.errors import how_to_install
from peers.data.documents import held_out_text
from peers.state import checkpoint_file
from peers.telemetry import log_events
from peers.telemetry.event_log import EventLog, parse
from peers.tools.model import export as exporting
from peers.tools.model.model_card import card, plain
from peers.tools.model.provenance import ModelProvenance, facts
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.identity import Identity
from protocols.signed.signed_receipts import seal_receipt
from swarmnet.identifiers import PeerId
from swarmnet.model.decoder import initial_units
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes
from swarmnet.rounds.receipt_rules import Receipt
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import Data, InitCheckpoint, Lora, Paths, TextSource

SHAPE = model_shape(
    width=16, layers=2, heads=2, kv_heads=1, inner=24, max_position_embeddings=64, rope_theta=5e5
)
SOURCES = (
    TextSource("books", "books", "CC0-1.0", "https://example.org/books"),
    TextSource("code", "code", "MIT"),
)
OWNER = Identity.from_seed(bytes(32))
MANIFEST = Manifest(
    "tiny", PeerId(OWNER.peer_id), stages=(1, 1), model=SHAPE, intended_use="to be tested",
    contact="owner@example.org", data=Data(sources=SOURCES, seq_len=32),
)  # fmt: skip
RUN = MANIFEST.run_id()
PEERS = [Identity.from_seed(bytes([number + 1]) * 32) for number in range(3)]
ONE, TWO, THREE = (identity.peer_id for identity in PEERS)


def leave_checkpoint(
    folder: Path, stage: int, round: int, signers: list[Identity], manifest=MANIFEST, tokens=None
) -> Path:
    span = manifest.span(stage)
    layout = layout_of(parameter_shapes(SHAPE, span))
    units = initial_units(SHAPE, span, layout, seed=1)
    statements = [
        seal(each, manifest.run_id(), EnvelopeKind.SETTLED, stage, round, 1, bytes(40)) for each in signers
    ]
    return checkpoint_file.write(
        folder / "checkpoints", manifest, stage, round, bytes(8), units, layout, statements, tokens=tokens
    )


def leave_log(folder: Path, peer: str, stage: int, events: list[tuple[str, dict[str, object]]]) -> Path:
    clock = iter(range(1000, 2000))
    with EventLog(path=folder / "events.jsonl", clock=lambda: next(clock), monotonic=lambda: 0.0) as log:
        log.record(parse("started", {"peer": peer}))
        log.record(parse("assembled", {"stage": stage}))
        for event, fields in events:
            log.record(parse(event, fields))
    return folder / "events.jsonl"


def leave_receipts(folder: Path, contributor: PeerId) -> None:
    """Two peers have signed for one block, one of them for a second one, and there is what counts nothing."""
    block = MANIFEST.rounds.snapshot_interval
    receipts = [
        seal_receipt(
            signer, RUN, Receipt(PeerId(signer.peer_id), contributor, 0, first, first + 1, count), 1.0
        )
        for signer, first, count in ((PEERS[0], 0, 2), (PEERS[2], 0, 2), (PEERS[2], block, 1))
    ]
    forged = receipts[0][:-1] + b"\x07"
    lines = [{"receipt": base64.b64encode(data).decode()} for data in (*receipts, receipts[1], forged)]
    lines += [{"own": 0, "stage": 0, "made": 99, "tokens": 99}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "receipts.jsonl").write_text(text + "no receipt\n[]\n")


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """What two peers of the first stage and one of the second left, one without its log."""
    folder = tmp_path / "states"
    leave_checkpoint(folder / "other", 0, 99, PEERS, replace(MANIFEST, seed=4))
    leave_checkpoint(folder / "one", 0, 7, PEERS[:2])
    leave_checkpoint(folder / "one", 0, 3, PEERS[2:])
    leave_checkpoint(folder / "two", 0, 7, [])
    leave_checkpoint(folder / "three", 1, 5, PEERS[2:])
    leave_log(folder / "other", "stranger", 0, [("committed", {"origin": "stranger", "tokens": 999})])
    leave_log(folder / "one", ONE, 0, [
        ("committed", {"origin": ONE, "counter": 0, "tokens": 64}),
        ("committed", {"origin": ONE, "counter": 1, "tokens": 64}),
        ("contribution_made", {"round": 0, "id": "aa", "tokens": 128}),
        ("contribution_accepted", {"round": 0, "id": "bb", "contributor": TWO}),
        ("contribution_accepted", {"round": 1, "id": "cc", "contributor": TWO}),
        ("contribution_accepted", {"round": 2, "id": "dd", "contributor": TWO}),  # never settled
        ("settled", {"round": 0, "digest": "00", "ids": ["aa", "bb"]}),
        ("settled", {"round": 1, "digest": "00", "ids": ["cc"]}),
    ])  # fmt: skip
    leave_log(folder / "three", THREE, 1, [
        ("committed", {"origin": ONE, "counter": 0, "tokens": 64}),
        ("committed", {"origin": TWO, "counter": 0, "tokens": 32}),
        ("contribution_made", {"round": 0, "id": "ee", "tokens": 96}),
        ("settled", {"round": 0, "digest": "00", "ids": ["ee"]}),
    ])  # fmt: skip
    leave_receipts(folder / "two", PeerId(TWO))
    contributors = [{"peer": ONE, "name": "attic", "tokens": {"0": 64, "1": 6}}]
    (folder / "one" / "contributors.json").write_text(json.dumps(contributors))
    return folder


@pytest.fixture
def swarmnet(monkeypatch, capsys, tmp_path):
    """Runs a command; returns exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    text = b"for each in range(10):\n    print(each)\n" * 9
    monkeypatch.setattr("peers.data.documents.held_out_text", lambda: text)
    return typing(capsys, monkeypatch)


@pytest.fixture
def without_transformers(monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "transformers" else there(name, *more),
    )


def head_of(page: str) -> dict[str, object]:
    """The YAML that the hub reads."""
    return YAML(typ="safe").load(io.StringIO(page.split("---\n")[1]))


def test_what_is_known_comes_from_the_files_of_that_run_alone(states):
    found = facts(states, MANIFEST)
    assert found.rounds == {0: 8, 1: 6}
    assert found.signers == {ONE, TWO, THREE}
    assert found.logs == 2
    assert found.tokens == 128 + 32
    assert found.contributions == {ONE: 1, TWO: 2, THREE: 1}
    assert found.receipts == {TWO: 3}
    assert found.claims == {ONE: 70}
    assert found.seconds == 9.0
    assert found.troubles == []


def test_tokens_are_those_that_the_weights_have_settled_and_not_what_a_crash_has_cost(states):
    leave_checkpoint(states / "one", 0, 8, [], tokens=4000)
    leave_checkpoint(states / "three", 1, 9, [], tokens=5000)
    found = facts(states, MANIFEST)
    assert (found.finalized_tokens, found.tokens) == (4000, 160)
    page = card(MANIFEST, found, None, None, Path("model"), shape=MANIFEST.model)
    assert "| tokens | 4,000 in the settled rounds of the first stage |" in page


START = InitCheckpoint("base", "cd" * 32, "https://example.org/base", ("ab" * 32,) * 2)
CARDS = {
    "without-logs": MANIFEST,
    "started": replace(MANIFEST, model=replace(SHAPE, lora=Lora(rank=2)), init_checkpoint=START),
    "skipping": replace(MANIFEST, stages=(1,) * 6, paths=Paths(skip_ratio=1 / 3)),
}


@pytest.mark.parametrize("name", CARDS)
def test_a_card_of_weights_without_logs_says_what_is_not_known(golden, tmp_path, name):
    leave_checkpoint(tmp_path, 0, 7, [])
    manifest = CARDS[name]
    exported = exporting.plain_shape(manifest.model)
    page = card(manifest, facts(tmp_path, manifest), None, None, Path("model"), shape=exported)
    golden(f"card-{name}.md", page, run=manifest.run_id())


def test_a_damaged_log_is_named_and_the_rest_counts(states):
    (states / "one" / "events.jsonl").write_text("no event\n")
    (states / "one" / "contributors.json").write_text('[{"peer": 3}]')
    found = facts(states, MANIFEST)
    assert found.contributions == {THREE: 1}
    assert "one/events.jsonl:1" in found.troubles[0]
    assert "one/contributors.json: is no list of contributors" in found.troubles[1]


def committed(origin, tokens):
    return ("committed", {"origin": origin, "counter": 0, "tokens": tokens})


def move(folder: Path, events: list[tuple[str, dict[str, object]]]) -> None:
    """The log becomes `.old`, and another one begins, as versions before this one did it."""
    log = folder / "events.jsonl"
    log.replace(folder / "events.jsonl.old")
    clock = iter(range(1100, 2000))
    with EventLog(path=log, clock=lambda: next(clock), monotonic=lambda: 0.0) as begun:
        for event, fields in events:
            begun.record(parse(event, fields))


def test_a_log_that_has_moved_goes_on_in_the_next_file_as_the_same_peer_on_the_same_stage(states):
    move(states / "one", [
        committed(ONE, 64),
        ("contribution_made", {"round": 2, "id": "ff", "tokens": 64}),
        ("settled", {"round": 2, "digest": "00", "ids": ["ff"]}),
    ])  # fmt: skip
    move(states / "three", [committed(ONE, 128)])
    found = facts(states, MANIFEST)
    assert found.tokens == (128 + 64) + 32, "in each stage the same microbatches"
    assert found.contributions == {ONE: 2, TWO: 2, THREE: 1}
    assert found.logs == 2


def test_what_a_log_without_its_beginning_cannot_tell_is_left_out(states):
    move(states / "one", [])
    move(states / "one", [
        committed(ONE, 999),
        ("contribution_made", {"round": 0, "id": "aa", "tokens": 128}),
        ("contribution_accepted", {"round": 1, "id": "cc", "contributor": TWO}),
        ("settled", {"round": 1, "digest": "00", "ids": ["aa", "cc"]}),
    ])  # fmt: skip
    found = facts(states, MANIFEST)
    assert found.tokens == 64 + 32, "the other log's"
    assert found.contributions == {TWO: 1, THREE: 1}


def test_after_damage_a_log_counts_from_where_it_says_again_whose_it_is(states):
    move(states / "one", [
        committed(ONE, 999),
        ("started", {"peer": ONE}),
        ("assembled", {"stage": 0}),
        committed(ONE, 256),
    ])  # fmt: skip
    older = states / "one" / "events.jsonl.old"
    older.write_text(older.read_text().splitlines(keepends=True)[1] + "rubbish\n")
    found = facts(states, MANIFEST)
    assert found.tokens == 256 + 32
    assert "events.jsonl.old:2" in found.troubles[0]


def test_a_log_that_has_moved_twice_says_itself_whose_it_is(tmp_path):
    leave_checkpoint(tmp_path, 1, 7, [])
    log = tmp_path / "events.jsonl"
    with EventLog(
        path=log, clock=lambda: 1.0, monotonic=lambda: 1.0, flush_count=1, limit_bytes=500
    ) as running:
        running.record(log_events.Started(ONE))
        running.record(log_events.Assembled(1))
        for number in range(100):
            running.record(log_events.Committed(TWO, number, 10))
            running.record(log_events.ContributionMade(number, f"{number}"))
        running.record(log_events.Settled(99, "00", ["99"]))
    found = facts(tmp_path, MANIFEST)
    assert 0 < found.tokens < 1000
    assert found.contributions == {ONE: 1}


def test_the_card_of_an_export_says_what_the_model_is(
    golden, states, swarmnet, tmp_path, without_transformers
):
    code, out, err = swarmnet("export", "--hf", "model", "--from", states, "--score")
    assert code == 0, err
    assert "transformers is not installed" in err
    assert f"(run {RUN}, round 5)" in out
    page = (tmp_path / "model" / "README.md").read_text()
    assert head_of(page)["library_name"] == "transformers"
    assert head_of(page)["model_name"] == "tiny"
    golden("card-export.md", re.sub(r"[\d.]+ bits per byte, perplexity [\d.]+", "<SCORE>", page), run=RUN)
    manifest = (tmp_path / "model" / "swarmnet-manifest.json").read_bytes()
    assert hashlib.sha256(manifest).hexdigest() == RUN


def test_a_model_is_scored_on_the_text_that_was_named_and_the_card_says_which(
    states, swarmnet, tmp_path, monkeypatch, without_transformers
):
    text = b"It was a dark and stormy night. " * 20
    (tmp_path / "a *dark* night.txt").write_bytes(text)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "gone")})
    monkeypatch.setattr("peers.data.documents.held_out_text", held_out_text)
    code, _, err = swarmnet("export", "--hf", "model", "--from", states, "--score")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "none of the held-out modules is in" in err
    assert "give a text to score: --eval-text FILE" in err
    assert not (tmp_path / "model").exists()
    chosen = ("--eval-text", "a *dark* night.txt")
    code, out, err = swarmnet("export", "--hf", "model", "--from", states, *chosen)
    assert code == 0, err
    scored = re.search(r"score  ([\d.]+) bits per byte of a \*dark\* night.txt", out)
    page = (tmp_path / "model" / "README.md").read_text()
    assert f"{scored[1]} bits per byte, perplexity" in page
    digest = hashlib.sha256(text).hexdigest()
    assert f"on 640 bytes of a \\*dark\\* night.txt (SHA-256 `{digest}`, windows of 32 tokens)" in page
    assert "The author of this card chose that text" in page
    told = swarmnet("evaluate", "--from", states, *chosen)[1]
    assert told.startswith(f"{scored[1]} bits per byte over 640 bytes")
    assert f"text sha256 {digest}, window 32 tokens" in told


def test_the_license_of_a_run_is_that_of_its_model():
    licensed = replace(MANIFEST, license="apache-2.0")
    unknown = ModelProvenance(contributions=ModelProvenance().contributions)
    page = card(licensed, unknown, None, None, Path("model"), shape=licensed.model)
    assert head_of(page)["license"] == "apache-2.0"
    assert "| license | apache-2.0 |" in page
    assert licensed.run_id() != MANIFEST.run_id()
    with pytest.raises(ManifestError, match="SPDX"):
        check(replace(MANIFEST, license="apache 2\nmodel: x"))


def test_a_tied_head_is_named_and_counted_once():
    def page(shape):
        unknown = ModelProvenance(contributions=ModelProvenance().contributions)
        return card(MANIFEST, unknown, None, None, Path("model"), shape=shape)

    def count(text):
        return int(re.search(r"model of ([\d,]+) parameters", text)[1].replace(",", ""))

    untied, tied = page(MANIFEST.model), page(replace(MANIFEST.model, tie_word_embeddings=True))
    assert "| head | the embedding (`tie_word_embeddings`) |" in tied
    assert "tie_word_embeddings" not in untied
    assert count(untied) - count(tied) == MANIFEST.model.vocab_size * MANIFEST.model.hidden_size


def test_what_strangers_wrote_stays_text():
    name = '# x]\n---\nlicense: "mit" | <b>`a`</b>\x1b[2J'
    manifest = replace(MANIFEST, name=name, contact="[mail](https://example.org)\nmore")
    page = card(
        manifest,
        ModelProvenance(contributions=ModelProvenance().contributions),
        None,
        None,
        Path("a b/mo;del"),
        shape=manifest.model,
    )
    assert head_of(page)["model_name"] == name
    assert "license" not in head_of(page)
    assert "\x1b" not in page
    assert "| contact | \\[mail\\]\\(https://example.org\\) more |" in page
    assert 'from_pretrained("mo-del")' in page
    assert plain("") == "-"


def test_a_crowd_of_contributors_is_cut():
    crowd = ModelProvenance(logs=1)
    crowd.contributions.update({f"peer{number}": number + 1 for number in range(1000)})
    page = card(MANIFEST, crowd, None, None, Path("model"), shape=MANIFEST.model)
    assert len(re.findall(r"^\| `peer\d+` \|", page, re.MULTILINE)) == 200
    assert "| `peer999` | 1,000 | - | - |" in page
    assert "And 800 more." in page


def test_transformers_confirms_the_logits_before_it_says_done(states, swarmnet, tmp_path):
    pytest.importorskip("transformers", reason=f"transformers is not installed: {how_to_install('hf')}")
    code, out, err = swarmnet("export", "--hf", "model", "--from", states, "--no-score")
    assert code == 0, err
    assert re.search(r"check  transformers 5\.\S+ computes the same for 64 tokens", out)
    page = (tmp_path / "model" / "README.md").read_text()
    assert "loads it and gives the same logits for 64 tokens" in page
    assert "Not scored." in page


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "computes other logits"),
        ("rms_norm_eps", 0.5, "computes other logits"),
        ("num_hidden_layers", 1, "does not take every parameter"),
        ("num_hidden_layers", 3, "does not take every parameter"),
        ("hidden_size", 18, "does not"),
    ],
)
def test_a_folder_that_is_not_the_model_is_not_left(
    states, swarmnet, tmp_path, monkeypatch, key, value, word
):
    pytest.importorskip("transformers", reason=f"transformers is not installed: {how_to_install('hf')}")
    right = exporting._config
    monkeypatch.setattr(exporting, "_config", lambda shape: {**right(shape), "rope_theta": 1e4, key: value})
    monkeypatch.setattr(exporting, "_require_same", lambda folder, stages: None)
    before = sorted(tmp_path.iterdir())
    code, out, err = swarmnet("export", "--hf", "model", "--from", states, "--no-score")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert word in err
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_that_gives_back_other_bytes_is_noticed(states, swarmnet, tmp_path, monkeypatch):
    kept = exporting.save_file

    def rotten(tensors, file, metadata):
        name = next(iter(tensors))
        kept({**tensors, name: torch.zeros_like(tensors[name])}, file, metadata)

    monkeypatch.setattr(exporting, "save_file", rotten)
    code, _, err = swarmnet("export", "--hf", "model", "--from", states, "--no-score")
    assert code == 2
    assert "does not return model.embed_tokens.weight" in err
    assert not (tmp_path / "model").exists()


def test_an_exported_folder_knows_how_far_it_was_trained(states, swarmnet, without_transformers):
    from peers.tools.model.local_model import held

    assert swarmnet("export", "--hf", "model", "--from", states, "--no-score")[0] == 0
    assert held(Path("model"), pytest.fail).window == 32
    Path("model", "swarmnet-manifest.json").write_bytes(b"{}")
    code, _, err = swarmnet("generate", "--from", "model")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "manifest" in err
