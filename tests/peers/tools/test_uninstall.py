"""`swarmnet uninstall`: all that peers left is named, what no peer made stays, no link is followed."""

import io
import sys
from pathlib import Path

import pytest
from swarm import OWNER, sign, tiny_manifest
from typed import refused

from peers.config.run_file import published_text
from peers.runtime.state_lock import lock_state_folder
from protocols.daemon import temporary
from protocols.signed.identity import Identity, create, load

SIGNED = sign(tiny_manifest())


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where states lie, with one peer's state and an owner's key."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    home = tmp_path / "home" / ".local" / "state" / "swarmnet"
    make_state(home / "one")
    create(home / "owner.key")
    return home


def make_state(state):
    """As a peer leaves it."""
    create(state / "identity.key")
    (state / "run.json").write_text(published_text(SIGNED))
    (state / "peer.yaml").write_text("run: run.json\nstate: .\n")
    for name in (
        "events.jsonl", "lock", ".peers.json.77.part", "checkpoints/stage-0-round-00000007.safetensors",
        "checkpoints/download/" + "ab" * 32, "text/newest.json",
    ):  # fmt: skip
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_bytes(b"0")


def all_files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_dry_run_names_everything_and_removes_nothing(swarmnet, home):
    before = all_files(home)
    code, out, _ = swarmnet("uninstall", "--dry-run")
    assert code == 0
    assert f"  state    {home / 'one'}   0.00 MB" in out
    assert f"{home / 'owner.key'}   an owner's key" in out
    assert f"{sys.prefix}   this program" in out
    assert all_files(home) == before


def test_a_state_goes_whole_and_an_owners_key_stays(swarmnet, home):
    assert swarmnet("uninstall", "--yes")[0] == 0
    assert all_files(home) == {"owner.key"}


def test_what_a_bootstrap_keeps_goes_too(swarmnet, home):
    (home / "one" / "height.json").write_text("{}")
    (home / "one" / "moderated-order.bin").write_bytes(b"bans")
    code, out, _ = swarmnet("uninstall", "--yes")
    assert (code, all_files(home)) == (0, {"owner.key"})
    assert "no peer made it" not in out


def test_what_an_owner_ordered_stays_and_is_named(swarmnet, home):
    (home / "orders").mkdir()
    (home / "orders" / "run").write_bytes(b"1")
    code, out, _ = swarmnet("uninstall", "--yes")
    assert (code, all_files(home)) == (0, {"owner.key", "orders", "orders/run"})
    assert f"{home / 'orders'}   what an owner has ordered from here" in out


def test_an_owners_key_goes_only_when_it_is_named(swarmnet, home, tmp_path):
    refused(swarmnet("uninstall", "--yes", "--owner-key", home / "one" / "peer.yaml"), "nothing was removed")
    assert (home / "one" / "peer.yaml").is_file()
    assert swarmnet("uninstall", "--yes", "--owner-key", home / "owner.key")[0] == 0
    assert not home.exists()


def test_a_peers_own_key_that_signs_for_the_run_stays_like_an_owners(swarmnet, home):
    key = home / "one" / "identity.key"
    key.write_bytes(OWNER.file_bytes())
    code, out, _ = swarmnet("uninstall", "--yes")
    assert (code, all_files(home)) == (0, {"owner.key", "one", "one/identity.key"})
    assert "it signs for a run as its owner" in out
    assert swarmnet("uninstall", "--yes", "--owner-key", key)[0] == 0
    assert all_files(home) == {"owner.key"}


def test_an_export_and_whatever_else_no_peer_made_stays_and_is_named(swarmnet, home):
    for kept in ("model/model.safetensors", "checkpoints/mine.safetensors", "notes.txt", "second.key"):
        (home / "one" / kept).parent.mkdir(exist_ok=True)
        (home / "one" / kept).write_bytes(b"mine")
    (home / "letters").mkdir()
    code, out, _ = swarmnet("uninstall", "--yes")
    assert code == 0
    files = ("one/checkpoints/mine.safetensors", "one/notes.txt", "one/second.key")
    folders = ("one", "one/model", "one/checkpoints", "letters")
    assert all_files(home) == {"owner.key", "one/model/model.safetensors", *files, *folders}
    for kept in ("one/model", "letters", *files):
        assert f"{home / kept}   no peer made it" in out


def test_what_a_link_leads_to_stays(swarmnet, home, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    make_state(elsewhere)
    kept = all_files(elsewhere)
    (home / "linked").symlink_to(elsewhere)
    (home / "one" / "events.jsonl").unlink()
    (home / "one" / "events.jsonl").symlink_to(elsewhere / "events.jsonl")
    (home / "one" / "text" / "more.tokens").symlink_to(elsewhere)
    code, out, _ = swarmnet("uninstall", "--yes")
    assert code == 0
    assert f"{home / 'linked'}   a link" in out
    assert all_files(elsewhere) == kept
    assert not (home / "one" / "events.jsonl").is_symlink()
    refused(swarmnet("uninstall", "--yes", "--state", home / "linked"), "is no state folder of a peer")


def test_nothing_goes_while_a_peer_runs(swarmnet, home):
    make_state(home / "two")
    before = all_files(home)
    with lock_state_folder(home / "two"):
        refused(swarmnet("uninstall", "--yes"), "a peer runs", str(home / "two"), "swarmnet leave")
        code, out, _ = swarmnet("uninstall", "--dry-run")
        assert (code, "a peer runs there" in out) == (0, True)
    assert all_files(home) == before


def test_nothing_goes_unasked(swarmnet, home, monkeypatch):
    before = all_files(home)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    refused(swarmnet("uninstall"), "nobody can confirm; add --yes")
    assert all_files(home) == before


@pytest.mark.parametrize("answer", ["n", "y"])
def test_a_person_is_asked(swarmnet, home, monkeypatch, answer):
    class Person(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Person(f"{answer}\n"))
    code, out, err = swarmnet("uninstall")
    assert "Remove all of this? It cannot be restored" in out + err
    assert (code, (home / "one").exists()) == ((0, False) if answer == "y" else (2, True))


def test_a_unit_stays_and_is_named_with_the_command_that_removes_it(swarmnet, home, tmp_path):
    unit = tmp_path / "home/.config/systemd/user/swarmnet.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\n")
    code, out, _ = swarmnet("uninstall", "--yes")
    assert (code, unit.is_file()) == (0, True)
    removal = f"systemctl --user disable --now swarmnet.service && rm {unit}"
    assert f"{unit}   a unit, removed by hand: {removal}" in out


def test_temporary_folders_stay_and_are_named_with_their_size(swarmnet, home, tmp_path):
    """No state here notes them: a demo's holds a model, and may be of another home."""
    place = tmp_path / "temporary"
    demo, stale = place / "swarmnet-demo-1", place / "swarmnet-999999999-visitor-x"
    for folder in (demo, stale):
        make_state(folder)
    (demo / "model.safetensors").write_bytes(bytes(2_000_000))
    before = all_files(place)
    code, out, _ = swarmnet("uninstall", "--yes")
    assert (code, all_files(place)) == (0, before)
    assert f"{demo}   2.0" in out
    assert f"{stale}   0.0" in out


def test_a_machine_without_leftovers_is_said_to_be_one(swarmnet, home):
    assert swarmnet("uninstall", "--yes", "--owner-key", home / "owner.key")[0] == 0
    code, out, _ = swarmnet("uninstall")
    assert (code, out.splitlines()[0]) == (0, "there is nothing to remove")


def test_the_folder_of_a_process_that_was_killed_goes_with_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone, mine = tmp_path / "swarmnet-999999999-visitor-x", tmp_path / (temporary.prefix("visitor") + "y")
    for folder in (gone, mine):
        folder.mkdir()
        create(folder / "identity.key")
    temporary.remove_stale()
    assert list(tmp_path.iterdir()) == [mine]
    assert isinstance(load(mine / "identity.key"), Identity)
    assert Path(tmp_path).is_dir()
