"""The demo's words, without its peers."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from peers.config.errors import UserError
from peers.config.peer_file import DemoOptions
from peers.config.run_file import load_manifest
from peers.lab.processes.demo import Demo, by_method
from peers.lab.processes.demo_report import CURVE_POINTS, DemoPeerReport, build, contribution_bytes, curve
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync
from swarmnet.run.sync_methods import COMMON_STEP_METHOD


class Process:
    """As much of a `DemoPeer` as the choice of whom to kill needs."""

    def __init__(self, name, stage=None):
        self.name, self.alive = name, True
        self.status = {} if stage is None else {"state": "training", "stage": stage}

    def kill(self):
        self.alive = False


REPORT = {
    "kill_to_commit_seconds": 0.5, "join_to_contribution_seconds": None, "loss_start": 5.5, "loss_end": 2.5,
    "bits_per_byte": 3.5, "tokens": 1000, "rounds": 10, "unequal_digests": [],
}  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_what_happened_is_told_once(tmp_path, terminal):
    demo = Demo(DemoOptions(), tmp_path)
    demo.console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    demo._notify("a fresh peer joins")
    told_at_once = "a fresh peer joins" in demo.console.file.getvalue()
    assert told_at_once is not terminal, "a terminal shows it in the live table"
    demo._print_report(REPORT, "pass", Path("model"), Path("report.json"))
    assert demo.console.file.getvalue().count("a fresh peer joins") == 1


def test_too_few_rounds_for_a_checkpoint_say_for_how_long_to_train(tmp_path):
    with pytest.raises(UserError, match=r"holds no checkpoint .* in 61 s: .* \(--seconds 180\)$"):
        Demo(DemoOptions(seconds=60.0), tmp_path)._model(61.2)


def test_the_run_file_of_the_examples_trains_as_the_demo_does():
    example = load_manifest(Path(__file__).parents[4] / "configs" / "demo-run.yaml", PeerId(""), {})
    demo_keys = by_method(COMMON_STEP_METHOD, sharded=False)["sync"]
    assert example.sync == Sync(**demo_keys, weights="agreement")


@pytest.mark.parametrize(
    ("stages", "victims"),
    [
        ((0, 0, 1, None, None), {"peer-0", "peer-1"}),
        ((0, 1, None, None), set()),
        ((None, None), set()),
        ((0, 1, 2), {"peer-0", "peer-1", "peer-2"}),
    ],
)
def test_a_peer_is_killed_once_it_trains_and_its_stage_has_another_that_does(tmp_path, stages, victims):
    killed = set()
    for seed in range(20):
        demo = Demo(DemoOptions(seed=seed), tmp_path)
        demo.peers = [Process(f"peer-{number}", stage) for number, stage in enumerate(stages)]
        demo._kill_one()
        assert [peer for peer in demo.peers if not peer.alive] == ([demo.victim] if demo.victim else [])
        killed |= {demo.victim.name} if demo.victim else set()
    assert killed == victims


def test_a_curve_is_of_what_the_first_stage_committed_in_the_order_of_time():
    first = [DemoPeerReport(name, stage=0) for name in "ab"]
    for number in range(4 * CURVE_POINTS):
        first[number % 2].commits.append((float(number), "o", number, 8, 100.0 - number))
    other = DemoPeerReport("c", stage=1, commits=[(0.5, "o", 0, 8, 1000.0)])
    points = curve([other, *first])
    assert [tokens for tokens, _ in points] == [32 * (place + 1) for place in range(CURVE_POINTS)]
    assert points[0] == (32, 98.5), "of two peers, one after the other"
    assert curve([other]) == []


@pytest.mark.parametrize(("exchange", "is_computed"), [("all-gather", True), ("sharded-reduce", False)])
def test_what_contributions_took_is_computed_where_all_are_of_one_length(exchange, is_computed):
    manifest = Manifest("demo", PeerId("o"), sync=Sync(method="local-steps", topology=exchange))
    story = DemoPeerReport("a", stage=0, took=[(1.0, "b"), (2.0, "b")])
    report = build(manifest, [story], None, None, 2.0, "", 3.0)
    assert report["contribution_bytes"]["computed"] == (
        2 * contribution_bytes(manifest, 0) if is_computed else None
    )
