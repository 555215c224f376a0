"""What a run file may say about paths."""

from dataclasses import replace

import pytest

from peers.config.errors import ConfigError
from peers.config.run_file import load_manifest
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.manifest_check import check
from swarmnet.run.path_rules import PathRules
from swarmnet.run.schema import ModelShape, Paths

SIX = Manifest("run", PeerId("owner"), stages=(1,) * 6, model=ModelShape(num_hidden_layers=6))


def test_a_manifest_without_paths_visits_every_stage_in_order():
    assert SIX.path_rules() == PathRules(6)
    assert not SIX.path_rules().skips


def test_the_manifest_gives_the_rules():
    manifest = replace(SIX, paths=Paths(1 / 3, 100, 0.25))
    check(manifest)
    assert manifest.path_rules() == PathRules(6, 2, 100, 0.25)
    assert manifest.run_id() != SIX.run_id()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (Paths(1.0), r"must lie in \[0, 1\)"),
        (Paths(-0.1), r"must lie in \[0, 1\)"),
        (Paths(0.1), "skips none"),
        (Paths(0.5, full_path_warmup_rounds=-1), "paths.full_path_warmup_rounds is -1"),
        (Paths(full_path_warmup_rounds=5), "have no effect without paths.skip_ratio"),
        (Paths(full_path_fraction=0.5), "have no effect without paths.skip_ratio"),
        (Paths(0.5, full_path_fraction=1.0), r"paths.full_path_fraction is 1; it must lie in \[0, 1\)"),
        (Paths(0.5, full_path_fraction=-0.1), "paths.full_path_fraction is -0.1"),
    ],
)
def test_paths_that_make_no_sense_are_refused(paths, message):
    with pytest.raises(ManifestError, match=message):
        check(replace(SIX, paths=paths))


def test_a_middle_stage_that_every_microbatch_may_leave_out_is_refused():
    with pytest.raises(ManifestError, match=r"0\.4 of 3 stages .* no peer would train them"):
        check(replace(SIX, stages=(2, 2, 2), paths=Paths(0.4)))
    check(replace(SIX, stages=(3, 3)))


def test_a_run_file_names_the_line_of_a_bad_ratio(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: x\nstages: [2, 1, 1]\npaths:\n  skip_ratio: 0.2\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:4.*skips none"):
        load_manifest(path, PeerId("x"))


def test_a_run_file_may_skip(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: x\nstages: [1, 1, 1, 1]\npaths: {skip_ratio: 0.25}\n")
    assert load_manifest(path, PeerId("x")).path_rules() == PathRules(4, 1)
