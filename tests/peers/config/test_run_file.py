"""The run file, its publication, and what is refused of what others hand on."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.config.errors import ConfigError, UserError
from peers.config.run_file import (
    RunFileError,
    SignedManifest,
    from_published,
    from_wire,
    load_manifest,
    load_signed,
    parse,
    publish,
    published_text,
)
from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId, RunId
from swarmnet.run.canonical_form import MANIFEST_LIMIT, owner_statement
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import WIRE_VERSION, Data, ModelShape

OWNER = Identity.from_seed(b"owner")
STRANGER = Identity.from_seed(b"stranger")


def sign(manifest, identity=OWNER):
    run_id = manifest.run_id()
    return SignedManifest(manifest, identity.sign(owner_statement(run_id)), run_id)


@pytest.fixture
def run_yaml(tmp_path):
    def write(text):
        file = tmp_path / "tiny.yaml"
        file.write_text(text)
        return file

    return write


def test_an_empty_section_means_the_manifests_own_defaults(run_yaml):
    manifest = load_manifest(run_yaml("model: {}\n"), PeerId("owner"))
    assert manifest == Manifest(name="tiny", owner=PeerId("owner"))


def test_every_field_of_the_manifest_can_be_typed(run_yaml):
    plain = {key: value for key, value in asdict(Manifest("named", PeerId(""), seed=7)).items()
             if key not in ("owner", "wire_version")}  # fmt: skip
    assert load_manifest(run_yaml(json.dumps(plain)), PeerId("")) == Manifest("named", PeerId(""), seed=7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "name: x\nmodel:\n  hiden_size: 3\n",
            "3: model.hiden_size: unknown key; did you mean 'hidden_size'?",
        ),
        ("name: x\nmodle: {}\n", "2: modle: unknown key; did you mean 'model'?"),
        (
            "sync:\n  transform: fft\n",
            "2: sync.transform: is the text 'fft'; expected 'hadamard', 'dct' or 'fine-dct'",
        ),
        ("stages: [1, x]\n", "1: stages.1: is the text 'x'; expected a whole number"),
        ("stages: 3\n", "1: stages: is 3; expected a list"),
        ("data:\n  sources:\n  - name: x\n", "3: data.sources.0.path: is missing; it has no default"),
        (
            "data:\n  sources:\n  - {name: x, path: y, liecnce: z}\n",
            "3: data.sources.0.liecnce: unknown key; did you mean 'licence'?",
        ),
        ("rounds: {max_seconds: .inf}\n", "1: rounds.max_seconds: is inf; expected a finite number"),
        ("owner: me\n", "1: owner: is filled in by publishing; leave it out"),
        (
            "name: x\nstages: [1, 1]\n",
            "2: stages hold 2 layers together, model.num_hidden_layers is 4; make them equal",
        ),
        (
            "model:\n  num_hidden_layers: 5\n",
            "2: stages hold 4 layers together, model.num_hidden_layers is 5; make them equal",
        ),
        (
            "sync:\n  warmup_rounds: 1\n  topk_per_chunk: 100\n",
            "3: sync.topk_per_chunk is 100; it must be a power of two up to 4096",
        ),
        (
            "sync:\n  topology: sharded-reduce\n",
            "2: sync.topology: sharded-reduce does not work with this method; set sync.method to one of "
            "sign-muon, local-steps, diloco, streaming-diloco, sparse-loco, sparta",
        ),
        (
            "sync:\n  method: demo\n  topology: sharded-reduce\n",
            "3: sync.topology: sharded-reduce does not work with this method; set sync.method to one of "
            "sign-muon, local-steps, diloco, streaming-diloco, sparse-loco, sparta",
        ),
        (
            "sync:\n  method: demo\n  weights: agreement\n",
            "3: sync.weights: agreement does not work with this method; set sync.method to sign-muon",
        ),
        ("sync:\n  shards: 0\n", "2: sync.shards is 0; it must lie in 1 to 64"),
        ("sync:\n  shards: 65\n", "2: sync.shards is 65; it must lie in 1 to 64"),
        (
            "sync:\n  topology: all\n",
            "2: sync.topology: is the text 'all'; expected 'all-gather' or 'sharded-reduce'",
        ),
    ],
)
def test_every_mistake_in_a_run_file_has_its_place(run_yaml, text, expected):
    with pytest.raises(ConfigError) as caught:
        load_manifest(run_yaml(text), PeerId(""))
    assert str(caught.value).endswith(f"tiny.yaml:{expected}")


@pytest.mark.parametrize("shards", [1, 16, 64])
def test_a_run_file_can_say_that_its_exchange_is_sharded(run_yaml, shards):
    text = f"sync: {{method: local-steps, topology: sharded-reduce, shards: {shards}}}\n"
    manifest = load_manifest(run_yaml(text), OWNER.peer_id)
    assert (manifest.sync.topology, manifest.sync.shards) == ("sharded-reduce", shards)
    assert parse(manifest.canonical()) == manifest
    plain = replace(manifest, sync=replace(manifest.sync, topology="all-gather", shards=16))
    assert plain.run_id() != manifest.run_id()
    assert b"shards" not in plain.canonical(), "runs that do not say so keep their ids"


@pytest.mark.parametrize(
    ("sync", "weights"),
    [
        ("{method: sign-muon}", "agreement"),
        ("{method: sign-muon, weights: equal}", "equal"),
        ("{method: demo-sign}", "equal"),
        ("{method: local-steps}", "equal"),
    ],
)
def test_votes_of_signs_are_weighed_unless_the_run_file_says_otherwise(run_yaml, sync, weights):
    manifest = load_manifest(run_yaml(f"sync: {sync}\n"), OWNER.peer_id)
    assert manifest.sync.weights == weights
    assert (b'"weights":"agreement"' in manifest.canonical()) == (weights == "agreement")
    assert parse(manifest.canonical()) == manifest
    option = {"sync.weights": "equal"}
    assert load_manifest(run_yaml(f"sync: {sync}\n"), OWNER.peer_id, option).sync.weights == "equal"


def test_a_run_published_with_equal_weights_keeps_them_and_its_run_file_names_the_difference(run_yaml):
    before, path = publish(run_yaml("sync: {method: sign-muon, weights: equal}\n"), OWNER)
    assert b"weights" not in before.wire(), "as runs from before weights had the key"
    assert load_signed(path).manifest.sync.weights == "equal"
    with pytest.raises(UserError, match=r"would be another, \w+, with another value of sync\.weights: a run"):
        publish(run_yaml("sync: {method: sign-muon}\n"), OWNER)
    assert load_signed(path) == before


EPOCHS = "data: {sampling: epoch, sources: [{name: a, path: a, weight: 3}, {name: b, path: b, weight: 1.5"


def test_a_run_file_can_say_that_its_text_is_read_in_epochs_and_of_what_how_much(run_yaml):
    manifest = load_manifest(run_yaml(f"{EPOCHS}, index: {'ab' * 32}}}]}}\n"), OWNER.peer_id)
    assert [(one.weight, one.index) for one in manifest.data.sources] == [(3.0, ""), (1.5, "ab" * 32)]
    assert parse(manifest.canonical()) == manifest
    plain = load_manifest(run_yaml("data: {sources: [{name: a, path: a}]}\n"), OWNER.peer_id)
    for key in (b"order", b"weight", b"index"):
        assert key not in plain.canonical(), "runs that do not say so keep their ids"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {sources: [{name: a, path: a, weight: 1}]}", "data.sampling is random, which ignores"),
        (EPOCHS.replace("1.5", "0") + "}]}", "data.sources: weight is for all sources or for none"),
        (EPOCHS.replace("1.5", "-1") + "}]}", "data.sources: weight cannot be negative"),
        (EPOCHS + ", index: abc}]}", "data.sources: index is no SHA-256"),
        (EPOCHS + f", index: {'xy' * 32}}}]}}", "data.sources: index is no SHA-256"),
        (EPOCHS.replace("name: b", "name: a") + "}]}", "data.sources: each needs a name of its own"),
        (EPOCHS.replace("path: b", "path: python-stdlib") + f", index: {'ab' * 32}}}]}}", "it has no index"),
    ],
)
def test_what_cannot_be_read_in_epochs_is_refused(run_yaml, text, expected):
    with pytest.raises(ConfigError, match=expected):
        load_manifest(run_yaml(text + "\n"), OWNER.peer_id)


def test_what_is_published_loads_as_the_same_run(run_yaml, tmp_path):
    signed, path = publish(run_yaml("name: my run\nseed: 3\n"), OWNER)
    assert path == tmp_path / "my-run.run.json"
    assert signed.manifest.owner == OWNER.peer_id
    assert load_signed(path, signed.run_id) == signed
    assert from_wire(signed.wire()) == signed
    assert load_signed(signed.wire(), signed.run_id) == signed
    assert json.loads(path.read_text())["run_id"] == signed.run_id


def test_the_run_id_depends_on_every_field():
    manifest = Manifest("x", OWNER.peer_id)
    changed = replace(manifest, model=replace(manifest.model, rope_theta=10001.0))
    assert len({manifest.run_id(), changed.run_id(), replace(manifest, owner=STRANGER.peer_id).run_id()}) == 3


def test_a_run_too_long_for_the_directory_is_not_published(run_yaml, tmp_path):
    with pytest.raises(ConfigError, match="the limit is 16384"):
        publish(run_yaml(f"contact: {'x' * MANIFEST_LIMIT}\n"), OWNER)
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_publication_that_cannot_be_written_leaves_nothing(run_yaml, tmp_path):
    (tmp_path / "blocked").write_text("a file where a folder should be")
    with pytest.raises(UserError, match="cannot be written"):
        publish(run_yaml("seed: 1\n"), OWNER, tmp_path / "blocked" / "x.run.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["blocked", "tiny.yaml"]


def tampered(tmp_path, change):
    content = {
        "run_id": (signed := sign(Manifest("x", OWNER.peer_id))).run_id,
        "signature": signed.signature.hex(),
        "manifest": json.loads(signed.manifest.canonical()),
    }
    change(content)
    file = tmp_path / "x.run.json"
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda it: it.update(signature="00" * 64), "the signature is not the owner's"),
        (lambda it: it.update(signature="zz"), "non-hexadecimal"),
        (lambda it: it.update(signature=3), "is no valid published run"),
        (lambda it: it.update(run_id="0" * 64), f"names run {'0' * 64}, but its manifest is run"),
        (lambda it: it.pop("run_id"), "'run_id' is missing"),
        (lambda it: it.update(more=1), "expected exactly run_id, signature and manifest"),
        (lambda it: it["manifest"].update(seed=1), "the signature is not the owner's"),
        (lambda it: it["manifest"].update(owner=STRANGER.peer_id), "the signature is not the owner's"),
        (lambda it: it["manifest"].update(owner="nobody"), "the signature is not the owner's"),
        (lambda it: it["manifest"].update(code="import os"), "code: "),
        (lambda it: it["manifest"].pop("seed"), "not in canonical form"),
        (lambda it: it["manifest"]["model"].update(hidden_size="128"), "model.hidden_size: "),
        (lambda it: it["manifest"]["model"].update(rope_theta=10000), "not in canonical form"),
        (lambda it: it.update(manifest=[]), "expected exactly"),
    ],
)
def test_a_changed_publication_is_refused_in_one_line(tmp_path, change, reason):
    file = tampered(tmp_path, change)
    with pytest.raises(RunFileError) as caught:
        load_signed(file)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_a_publication_that_contradicts_itself_is_refused_though_signed(tmp_path):
    bad = sign(Manifest("x", OWNER.peer_id, stages=(1,)))
    with pytest.raises(RunFileError, match="stages hold 1 layers together"):
        from_wire(bad.wire())


@pytest.mark.parametrize(
    "size", ["vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"]
)
def test_a_size_of_zero_is_a_mistake_and_no_fault(size):
    with pytest.raises(ManifestError, match="sizes must be at least 1"):
        check(Manifest("x", OWNER.peer_id, model=replace(ModelShape(), **{size: 0})))


def test_another_run_than_the_one_asked_for_is_refused():
    signed = sign(Manifest("x", OWNER.peer_id))
    with pytest.raises(RunFileError, match=f"it is run {signed.run_id}, not {'1' * 64}"):
        from_wire(signed.wire(), RunId("1" * 64))


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b"\xff", b'{"run_id":1,"run_id":1}', b"[" * 60000, b" " * 70000]
)
def test_what_is_no_publication_is_refused(tmp_path, raw):
    file = tmp_path / "x.run.json"
    file.write_bytes(raw)
    with pytest.raises(RunFileError):
        load_signed(file)


def test_a_missing_publication_is_named():
    with pytest.raises(RunFileError, match=r"nowhere\.json: no such file, and no run id"):
        load_signed(Path("nowhere.json"))


@given(st.data())
def test_no_changed_byte_gets_through(data):
    wire = bytearray(sign(Manifest("x", OWNER.peer_id)).wire())
    position = data.draw(st.integers(0, len(wire) - 1))
    wire[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RunFileError):
        from_wire(bytes(wire))


def test_a_manifest_alone_is_read_back_or_refused():
    manifest = Manifest("x", OWNER.peer_id)
    assert parse(manifest.canonical()) == manifest
    for bad in (b"", b"{}", manifest.canonical()[:-1], replace(manifest, stages=()).canonical()):
        with pytest.raises(RunFileError, match="is no valid manifest"):
            parse(bad)


@given(st.binary(max_size=300))
def test_garbage_from_peers_is_refused(data):
    with pytest.raises(RunFileError):
        from_wire(data)


FIRST_RUN = (
    b'{"access":"open","activation_codec":"bf16","contact":"","data":{"micro_batch_size":4,'
    b'"seq_len":128,"sources":[{"bytes":0,"collected":"","kind":"other","languages":"",'
    b'"licence":"PSF-2.0","name":"python-stdlib","origin":"the Python installation of each peer",'
    b'"path":"python-stdlib","processing":"","sha256":""}],"tokenizer":"bytes"},"intended_use":"",'
    b'"listed":false,"model":{"head_dim":32,"hidden_size":128,"initializer_range":0.05,'
    b'"intermediate_size":384,"max_position_embeddings":2048,"num_attention_heads":4,'
    b'"num_hidden_layers":4,"num_key_value_heads":4,"qk_norm":false,"residual_init_scale":0.0,'
    b'"rms_norm_eps":1e-05,"rope_theta":10000.0,"vocab_size":256},"name":"first","owner":"owner",'
    b'"paths":{"full_path_fraction":0.0,"full_path_warmup_rounds":0,"skip_ratio":0.0},'
    b'"rounds":{"contribution_timeout_seconds":2.0,"finality_timeout_seconds":10.0,'
    b'"global_batch_tokens":2048,"max_seconds":30.0,"snapshot_interval":16,"window":4},"seed":0,'
    b'"stages":[2,1,1],"sync":{"decay_rounds":2000,"learning_rate":0.004,"max_grad_norm":1.0,'
    b'"method":"demo-sign","min_lr_ratio":0.1,"momentum":0.95,"selection":"group","topk_per_chunk":128,'
    b'"transform":"hadamard","warmup_rounds":20},"wire_version":4}'
)
"""The canonical form of a run from before keys were added; another WIRE_VERSION has runs of its own."""


def test_a_run_that_was_published_before_keys_were_added_keeps_its_id():
    versions = f'"wire_version":{WIRE_VERSION}'.encode()
    assert versions in FIRST_RUN, "WIRE_VERSION was raised: write FIRST_RUN anew, with the keys of today"
    assert parse(FIRST_RUN).canonical() == FIRST_RUN, (
        "every run that was ever published would get another id: a key that is added to the manifest has "
        "metadata={ADDED: True} and a default that changes nothing"
    )


def test_a_key_that_was_added_later_changes_no_run_that_does_not_use_it():
    plain = Manifest("x", OWNER.peer_id)
    ending = replace(plain, data=Data(eos_token="<|end|>"))
    assert b"eos_token" not in plain.canonical()
    assert parse(plain.canonical()) == plain
    assert parse(ending.canonical()) == ending
    assert ending.run_id() != plain.run_id()
    written = plain.canonical().replace(b'"data":{', b'"data":{"eos_token":"",')
    signed = published_text(sign(plain)).replace('"data": {', '"data": {"eos_token": "",')
    with pytest.raises(RunFileError, match="not in canonical form"):
        from_published(signed.encode(), "x.run.json")
    assert parse(written) == plain


SHIPPED = sorted((Path(__file__).parents[3] / "configs").glob("*-run.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_run_file_that_is_shipped_is_one(file):
    assert load_manifest(file, PeerId(""), {}).stages
