"""Private runs: what their files say, what publishing leaves out, and which commands refuse."""

from types import SimpleNamespace

import pytest

from peers.cli.owner import commands
from peers.config.errors import ConfigError, NoAnswer, UserError
from peers.config.peer_file import PeerFile
from peers.config.run_file import load_manifest, load_straight_manifest, publish
from peers.data.local_text import missing_text, require_text, unservable_stages
from peers.tools.model.swarm_session import not_let_in, score
from peers.tools.owner.run_check import check_run, counted_data
from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId

OWNER = Identity.from_seed(b"owner")
RUN = """
name: private
stages: [4]
data: {sources: [{name: own, path: own.txt}], private: true, privacy: {epsilon: 3}}
"""

U_SHAPED = """
name: hospitals
stages: [2, 2]
data: {sources: [{name: own, path: own}], private: true, u_shaped_layers: 1}
"""


@pytest.fixture
def run_file(tmp_path):
    def write(text=RUN):
        file = tmp_path / "private.yaml"
        file.write_text(text)
        return file

    return write


def test_publishing_reads_no_private_text_and_names_nothing_of_it(run_file, tmp_path):
    (tmp_path / "own.txt").write_bytes(b"this is the text of the run's owner " * 100)
    file = run_file()
    manifest = load_manifest(file, PeerId(""))
    warnings = check_run(file, manifest)
    assert "data.sources: the text was not opened: it is each owner's own" in warnings
    signed, path = publish(file, OWNER, data=counted_data(manifest, tmp_path, None))
    (source,) = signed.manifest.data.sources
    assert (source.sha256, source.bytes, source.documents, source.index, source.shared) == (
        "",
        0,
        0,
        "",
        "auto",
    )
    assert not list(tmp_path.glob("*index*"))
    assert b"text of the run" not in path.read_bytes()


@pytest.mark.parametrize(("method", "weights"), [("sign-muon", "equal"), ("diloco", "equal")])
def test_private_text_weighs_equally_unless_the_file_says_otherwise(run_file, method, weights):
    manifest = load_manifest(run_file(f"{RUN}sync: {{method: {method}}}\n"), PeerId(""))
    assert manifest.sync.weights == weights


def test_a_mistake_has_its_place(run_file):
    with pytest.raises(ConfigError, match=r"private.yaml:4: data.private: with 2 stages"):
        load_manifest(run_file(RUN.replace("stages: [4]", "stages: [2, 2]")), PeerId(""))


def test_no_order_names_a_private_document(run_file, monkeypatch, tmp_path):
    signed, _ = publish(run_file(), OWNER)
    connection = SimpleNamespace(signed=signed)
    monkeypatch.setattr(commands, "load_owner_key", lambda key: (tmp_path / "key", OWNER))

    def with_run(run, bootstrap, use):
        with pytest.raises(StopIteration):
            use(connection).send(None)

    monkeypatch.setattr("peers.cli.connecting.with_run", with_run)
    with pytest.raises(UserError, match="text is private: no order may name a document"):
        commands.withdraw("ab" * 32, "0" * 64)


async def test_live_peers_score_no_private_text(run_file):
    manifest = load_manifest(run_file(), PeerId(""))
    with pytest.raises(NoAnswer, match="each owner scores its own at home: `swarmnet evaluate --from"):
        await score(SimpleNamespace(manifest=manifest), b"a secret")


async def test_a_u_shaped_run_has_no_visitors_and_no_plan(run_file):
    file = run_file(U_SHAPED)
    signed, _ = publish(file, OWNER)
    assert any("set access: invite" in line for line in check_run(file, signed.manifest))
    assert "its peers serve no texts" in not_let_in(signed, b"", PeerId("visitor"), 0.0)
    with pytest.raises(UserError, match=r"data.u_shaped_layers is 1, and plans .* leave u_shaped_layers"):
        load_straight_manifest(file)
    masked = run_file(U_SHAPED + "sync: {method: sign-muon, secure_owners: 3}\n")
    with pytest.raises(ConfigError, match=r"private.yaml:4: data.u_shaped_layers: .* sync.secure_owners: 0"):
        load_manifest(masked, PeerId(""))


@pytest.mark.parametrize(
    ("stage", "has_text", "never"),
    [("auto", True, {1}), (0, True, {1}), (1, True, {0}), ("auto", False, {0}), (1, False, {0})],
)
def test_the_stage_with_both_ends_is_that_of_owners_alone(run_file, tmp_path, stage, has_text, never):
    manifest = load_manifest(run_file(U_SHAPED), PeerId(""))
    (tmp_path / "own.txt").write_bytes(b"a text")
    places = {"own": str(tmp_path / "own.txt")} if has_text else {}
    config = PeerFile(run="ab" * 32, state=tmp_path, stage=stage, data_paths=places)
    assert unservable_stages(manifest, config, missing_text(manifest, config)) == never


def test_only_a_peer_with_text_may_ask_for_the_stage_of_owners(run_file, tmp_path):
    manifest = load_manifest(run_file(U_SHAPED), PeerId(""))
    with pytest.raises(UserError, match=r"source `own` is not on this machine .* data_paths: .own: PATH."):
        require_text(manifest, PeerFile(run="ab" * 32, state=tmp_path, stage=0))
