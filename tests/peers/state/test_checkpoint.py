"""Checkpoints survive what happens to disks: torn writes, flipped bytes, truncation, a disk that is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save
from swarm import tiny_manifest

from peers.state import checkpoint_file
from peers.state.checkpoint_file import CheckpointError
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.lineage import DIGEST_BYTES
from swarmnet.model.decoder import initial_units
from swarmnet.model.flat_layout import Layout, layout_of
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.model.state_layout import state_layout
from swarmnet.rounds.events import Reference
from swarmnet.rounds.history import Earlier, SettledSet
from swarmnet.rounds.own_contributions import NOTHING_PAST, RestartState
from swarmnet.run.schema import Sync

MANIFEST = tiny_manifest()
STAGE = 1
CHAIN = b"8 bytes."


def layout() -> Layout:
    return layout_of(parameter_shapes(MANIFEST.model, MANIFEST.span(STAGE)))


def units(round: int) -> torch.Tensor:
    """Other weights for every round; the padding of the layout stays zero."""
    made = initial_units(MANIFEST.model, MANIFEST.span(STAGE), layout(), MANIFEST.seed)
    for entry in layout().entries:
        made[entry.offset : entry.offset + entry.size] += round
    return made


def write(folder: Path, round: int) -> Path:
    return checkpoint_file.write(folder, MANIFEST, STAGE, round, CHAIN, units(round), layout())


def usable(folder: Path) -> tuple[int, list[str]]:
    """As a worker restarts: the newest usable round (-1: none), and what was said of the others."""
    said = []
    for path in checkpoint_file.files(folder, STAGE):
        try:
            round, chain, restored = checkpoint_file.restore(path, MANIFEST.run_id(), STAGE, layout())
        except CheckpointError as error:
            said.append(str(error))
            continue
        assert chain == CHAIN
        assert torch.equal(restored, units(round))
        return round, said
    return -1, said


def test_what_was_written_is_read_and_the_newest_two_are_kept(tmp_path):
    for round in (3, 9, 100_000_000 - 1):
        write(tmp_path, round)
    assert [path.name for path in checkpoint_file.files(tmp_path, STAGE)] == [
        "stage-1-round-99999999.safetensors", "stage-1-round-00000009.safetensors",
    ]  # fmt: skip
    assert usable(tmp_path) == (99_999_999, [])


def test_what_is_known_of_the_rounds_before_is_kept_beside_the_weights(tmp_path):
    id_ = ContributionId(bytes(range(16)))
    sets = {3: (Reference(3, PeerId("12D3KooW"), id_, 100), Reference(3, PeerId("x"), id_, 7)), 4: ()}
    past = RestartState(
        sets, Earlier(bytes(DIGEST_BYTES), (SettledSet(2, b"twelve bytes"), SettledSet(0, b"twelve more.")))
    )
    path = checkpoint_file.write(tmp_path, MANIFEST, STAGE, 5, CHAIN, units(5), layout(), past=past)
    assert checkpoint_file.read(path).past == past
    assert checkpoint_file.read(write(tmp_path, 6)).past == NOTHING_PAST


def test_a_file_whose_sets_are_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_file, "_encode_sets", lambda _: '{"3": [["x", 1]]}')
    path = write(tmp_path, 5)
    with pytest.raises(checkpoint_file.CheckpointError, match="no checkpoint that can be used"):
        checkpoint_file.read(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("round", "9" * 4000), ("round", "9" * 5000), ("round", "\u0661"), ("stage", "-1"),
        ("chain", "00" * 10**6), ("digest", "00"),
        ("sets", "{" + ",".join(f'"{round}":[]' for round in range(65)) + "}"),
        ("sets", '{"1":[' + ",".join(['["x","AAAA",1]'] * 16385) + "]}"),
        ("sets", "{" + " " * 3_000_000 + "}"),
    ],
)  # fmt: skip
def test_a_file_that_says_more_than_any_run_has_is_refused_before_it_is_used(tmp_path, key, value):
    path = write(tmp_path, 5)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    del metadata["content"]
    metadata[key] = value
    metadata["content"] = checkpoint_file.content_hash(metadata, tensors)  # A forger can hash it too.
    path.write_bytes(save(tensors, metadata))
    with pytest.raises(checkpoint_file.CheckpointError, match="no checkpoint that can be used"):
        checkpoint_file.restore(path, MANIFEST.run_id(), STAGE, layout())


def test_large_weights_are_kept_exactly(tmp_path):
    large = units(0)
    large[:4] = torch.tensor([2**31 - 1, -(2**31), 2**24 + 1, -(2**24) - 1], dtype=torch.int32)
    path = checkpoint_file.write(tmp_path, MANIFEST, STAGE, 5, CHAIN, large, layout())
    assert torch.equal(checkpoint_file.restore(path, MANIFEST.run_id(), STAGE, layout())[2], large)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    write(folder, 1)
    return folder, write(folder, 2), write(folder, 2).read_bytes()


IN_MODULE = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # fmt: skip


@IN_MODULE
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.booleans())
def test_a_flipped_byte_is_found_and_named_and_the_older_checkpoint_is_used(two, place, flip, early):
    folder, path, good = two
    span = 1500 if early else len(good)  # The header is short, and as likely as the rest here.
    at = int(place * span)
    bad = bytearray(good)
    bad[at] ^= flip
    path.write_bytes(bad)
    round, said = usable(folder)
    if round == 2:  # Only white space that pads the header may change and mean the same.
        assert bytes([good[at], bad[at]]).isspace()
    else:
        assert round == 1
        assert len(said) == 1
        assert str(path) in said[0]


@IN_MODULE
@given(st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_found_and_named_and_the_older_checkpoint_is_used(two, share):
    folder, path, good = two
    path.write_bytes(good[: int(share * len(good))])
    round, said = usable(folder)
    assert round == 1
    assert str(path) in said[0]


def written_everywhere(folder: Path, round: int) -> list[Path]:
    """A checkpoint of every stage."""
    paths = []
    for stage in range(len(MANIFEST.stages)):
        there = layout_of(parameter_shapes(MANIFEST.model, MANIFEST.span(stage)))
        made = initial_units(MANIFEST.model, MANIFEST.span(stage), there, MANIFEST.seed)
        paths.append(checkpoint_file.write(folder, MANIFEST, stage, round, CHAIN, made, there))
    return paths


def test_a_model_is_put_together_from_the_newest_that_can_be_used_and_the_others_are_named(tmp_path):
    written_everywhere(tmp_path, 3)
    damaged = written_everywhere(tmp_path, 4)[STAGE]
    assert checkpoint_file.newest(tmp_path).round == 4
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    model = checkpoint_file.newest(tmp_path)
    assert model.round == 3
    (told,) = model.passed_over
    assert str(damaged) in told
    for path in tmp_path.glob(f"stage-{STAGE}-round-00000003*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=damaged.name):
        checkpoint_file.newest(tmp_path)


def test_a_groups_momentum_is_kept_with_the_weights_and_is_no_part_of_the_model(tmp_path):
    manifest = replace(MANIFEST, sync=Sync(method="diloco"))
    for stage in range(len(manifest.stages)):
        there = state_layout(manifest, stage)
        made = torch.zeros(there.size, dtype=torch.int32)
        for number, entry in enumerate(there.entries):
            made[entry.offset : entry.offset + entry.size] = number + 1
        path = checkpoint_file.write(tmp_path, manifest, stage, 5, CHAIN, made, there)
        assert torch.equal(checkpoint_file.restore(path, manifest.run_id(), stage, there)[2], made)
        weights_alone = layout_of(parameter_shapes(manifest.model, manifest.span(stage)))
        with pytest.raises(CheckpointError, match="digest"):
            checkpoint_file.restore(path, manifest.run_id(), stage, weights_alone)
    names = parameter_shapes(manifest.model, whole(manifest.model))
    assert set(checkpoint_file.newest(tmp_path).whole()) == set(names)


def test_a_damaged_older_file_and_another_runs_state_beside_it_spoil_no_model(tmp_path):
    for path in written_everywhere(tmp_path, 3):
        path.write_bytes(path.read_bytes()[:-8])
    other = replace(MANIFEST, seed=99)
    stage = layout_of(parameter_shapes(other.model, other.span(STAGE)))
    made = initial_units(other.model, other.span(STAGE), stage, other.seed)
    os.utime(checkpoint_file.write(tmp_path / "other", other, STAGE, 77, CHAIN, made, stage), (1, 1))
    written_everywhere(tmp_path, 4)
    model = checkpoint_file.newest(tmp_path)
    assert (model.round, model.manifest, model.passed_over) == (4, MANIFEST, ())


def test_files_of_another_run_or_stage_are_refused_by_name(tmp_path):
    path = write(tmp_path, 4)
    other = tiny_manifest(name="another")
    with pytest.raises(CheckpointError, match="not stage 1 of"):
        checkpoint_file.restore(path, other.run_id(), STAGE, layout())
    with pytest.raises(CheckpointError, match=str(path)):
        checkpoint_file.restore(path, MANIFEST.run_id(), 2, layout())


def test_what_a_killed_writer_leaves_is_not_taken_for_a_checkpoint(tmp_path):
    good = write(tmp_path, 4)
    (tmp_path / f".{good.name}.123.part").write_bytes(good.read_bytes()[:100])
    assert usable(tmp_path) == (4, [])


PROGRAM = """
import resource, sys
from pathlib import Path
from peers.config.errors import UserError
from test_checkpoint import write
folder, what = Path(sys.argv[1]), sys.argv[2]
write(folder, 1)
print("ready", flush=True)
if what == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        write(folder, 2)
    except UserError as error:
        print(error, flush=True)
else:
    for round in range(2, 100_000):
        write(folder, round)
"""


def start(folder: Path, what: str) -> subprocess.Popen[str]:
    place = Path(__file__).parent
    found = f"{place}:{place.parents[2]}:{place.parents[1] / 'support'}"
    environment = {**os.environ, "PYTHONPATH": found, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), what], env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_full_disk_is_said_and_the_old_checkpoint_stays(tmp_path):
    with start(tmp_path, "full") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "cannot be written" in said
    assert usable(tmp_path) == (1, [])
    assert [path.name for path in tmp_path.iterdir()] == ["stage-1-round-00000001.safetensors"]


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_a_usable_checkpoint(tmp_path):
    process = start(tmp_path, "endless")
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        wanted = Random(1).randrange(3, 9)
        while len(checkpoint_file.files(tmp_path, STAGE)) < 2 or usable(tmp_path)[0] < wanted:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    round, said = usable(tmp_path)
    assert round >= wanted
    assert said == []
