"""A lab's page between two plays: its files are right, and its commands are there."""

import re

import pytest
import typer
from lab_page import PAGE, PLAYED, files_of

from peers.cli import main as cli
from peers.config.peer_file import load
from peers.config.run_file import load_manifest
from peers.tools.owner.run_check import unusual
from swarmnet.identifiers import PeerId

TEXT = PAGE.read_text()
ADDRESS = "/ip4/192.0.2.7/tcp/31330/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


@pytest.fixture
def written(tmp_path):
    """The folder with the files that the page shows."""
    for name, text in files_of(TEXT).items():
        (tmp_path / name).write_text(text.replace("ADDRESS", ADDRESS).replace("lab.run.json", "5a" * 32))
    return tmp_path


def test_its_run_is_right_and_has_nothing_unusual(written):
    manifest = load_manifest(written / "lab.yaml", PeerId("owner"))
    assert unusual(manifest) == []


def test_its_machines_hold_every_stage_and_know_their_bootstrap(written):
    stages = load_manifest(written / "lab.yaml", PeerId("owner")).stages
    files = [load(path, {}) for path in sorted(written.glob("*.yaml")) if path.name != "lab.yaml"]
    workers = [file for file in files if file.role == "worker"]
    assert [file.stage for file in workers] == list(range(len(stages)))
    assert {file.bootstrap for file in workers} == {(ADDRESS,)}
    assert len({file.listen for file in files}) == len(files)
    assert [file.announce for file in files if file.role == "bootstrap"] == [(ADDRESS.partition("/p2p")[0],)]


def test_every_command_in_it_is_there():
    commands = typer.main.get_command(cli.application()).commands
    typed = set(re.findall(r"^\$ swarmnet (\w+)", TEXT, re.MULTILINE))
    assert typed
    assert typed <= commands.keys()


def test_every_step_was_played():
    empty = [name for _, name, _ in PLAYED.findall(TEXT) if f"<!-- played {name} -->\n<!-- end -->" in TEXT]
    assert empty == []
