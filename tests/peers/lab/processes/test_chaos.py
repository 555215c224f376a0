"""What the chaos report counts, on logs written by hand; and real peers, all killed and started again."""

import asyncio
import io
import json
import shutil
import time
from itertools import pairwise

import pytest
from rich.console import Console

from peers.lab.processes import chaos_report
from peers.lab.processes.chaos import ChaosOptions, ChaosSwarm, plan
from peers.lab.processes.chaos_report import InjectedFault
from peers.state.checkpoint_writer import aligned
from peers.telemetry.event import Unknown
from peers.telemetry.event_log import parse

USUAL = {
    "committed": {"tokens": 32},
    "contribution_returned": {"code": "contribution_returned"},
    "rerouted": {"code": "gone", "counter": 0, "to": "z"},
}
"""What is not asked for."""


class Log:
    """A peer's event log, written line by line; times in seconds."""

    def __init__(self, folder, name, stage=0):
        self.name, self.stage, self.lines = name, stage, []
        self.path = folder / name / "events.jsonl"
        self("started", 0, peer=name)
        self.life()

    def life(self, at=0.0):
        return self("assembled", at, stage=self.stage)

    def __call__(self, event, at, **fields):
        fields = {**USUAL.get(event, {}), **fields}
        assert not isinstance(parse(event, fields), Unknown), event
        self.lines.append(json.dumps({"time": at, "monotonic": at, "event": event, **fields}))
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("\n".join(self.lines) + "\n")
        return self

    def settled(self, round, ids, at=1.0, digest=None):
        return self("settled", at, round=round, ids=ids, digest=digest or f"d{round}{ids}")

    def made(self, id, round, at=0.5):
        return self("contribution_made", at, round=round, id=id)

    def took(self, id, round, contributor, at=0.6):
        return self("contribution_accepted", at, round=round, id=id, contributor=contributor)


def fate(folder, ended=()):
    return chaos_report.contributions(chaos_report.read(folder), dict.fromkeys(ended, 0.0))


def of_results(log):
    log("reduced", 0.7, round=0, id="r", shards=[0], contributors=1).settled(0, ["r"])
    log("reduced", 0.8, round=1, id="s", shards=[0], contributors=1).settled(1, [])


FATES = {
    "settled everywhere": (
        lambda a, b: (a.settled(0, ["x"]), b.took("x", 0, "a").settled(0, ["x"])), {"settled": 1},
    ),
    "of results one in no set is left out": (lambda a, b: of_results(a), {"left_out": 1}),
    "held by no set though its maker lives": (lambda a, b: a.settled(0, []), {"lost": 1}),
    "given back": (
        lambda a, b: a("contribution_returned", 1, round=0, id="x").settled(0, []),
        {"contribution_returned": 1},
    ),
    "given back and settled": (
        lambda a, b: a("contribution_returned", 1, round=0, id="x").settled(0, []).settled(1, ["x"]),
        {"twice": 1},
    ),
    "undecided when its maker left": (lambda a, b: a.settled(0, [])("undecided", 1, ids=["x"]), {"open": 1}),
    "superseded after a restart": (
        lambda a, b: a.life(2.0).made("y", 0, 3.0).settled(0, ["y"], 4.0), {"superseded": 1},
    ),
    "in two rounds": (lambda a, b: a.settled(0, ["x"]).settled(1, ["x"]), {"twice": 1}),
    "a round settled again": (lambda a, b: a.settled(0, ["x"]).settled(0, ["x"]), {"settled_again": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", FATES)
def test_what_becomes_of_a_contribution_follows_from_the_logs(tmp_path, name):
    story, expected = FATES[name]
    story(Log(tmp_path, "a").made("x", 0), Log(tmp_path, "b"))
    found = fate(tmp_path)
    counted = {key: len(value) if isinstance(value, list) else value for key, value in found.items()}
    kinds = ("lost", "twice", "left_out", "open", "superseded", "settled_again")
    assert {key: counted[key] for key in (*kinds, *expected)} == dict.fromkeys(kinds, 0) | expected


def test_what_nobody_saw_of_a_killed_peer_is_unseen_what_others_had_is_lost(tmp_path):
    Log(tmp_path, "a").made("x", 0).made("y", 1)
    Log(tmp_path, "b").took("y", 1, "a").settled(0, []).settled(1, [])
    found = fate(tmp_path, ended=["a"])
    assert found["unseen"] == 1
    assert [text.split()[0] for text in found["lost"]] == ["y"]


def test_different_digests_for_a_shared_round_are_named(tmp_path):
    Log(tmp_path, "a").settled(0, [], digest="p").settled(1, [], digest="q")
    Log(tmp_path, "b").settled(0, [], digest="p").settled(1, [], digest="other")
    Log(tmp_path, "c", stage=1).settled(1, [], digest="third")
    assert chaos_report.digests(chaos_report.read(tmp_path)) == (2, ["stage 0 round 1"])


def test_times_from_kill_to_commit_look_at_the_others_of_the_stage(tmp_path):
    commit = {"origin": "o", "counter": 1, "loss": 1.0}
    Log(tmp_path, "dead")("committed", 10.1, **commit)
    Log(tmp_path, "other", 1)("committed", 10.2, **commit)
    Log(tmp_path, "b")("committed", 9.0, **commit)("committed", 12.5, **commit)
    kill = InjectedFault("kill", "dead", "dead", 0, 10.0)
    assert chaos_report.kills_to_commit(chaos_report.read(tmp_path), [kill]) == [2.5]


def test_a_frozen_peer_is_routed_around_when_its_last_microbatch_went_elsewhere(tmp_path):
    frozen = InjectedFault("freeze", "f", "f", 1, 10.0, until=20.0)
    log = Log(tmp_path, "a")("rerouted", 9.0, tried=["f"])("rerouted", 12.0, tried=["f"])
    log("rerouted", 14.0, tried=["f", "g"])("rerouted", 15.0, tried=["g"])("rerouted", 21.0, tried=["f"])
    assert chaos_report.frozen_to_reroute(chaos_report.read(tmp_path), frozen) == 4.0


def test_a_thawed_peer_is_in_step_once_it_has_settled_nearly_what_its_stage_has(tmp_path):
    frozen = InjectedFault("freeze", "f", "f", 0, 10.0, until=20.0)
    log = Log(tmp_path, "f").settled(3, [], 9.0).settled(4, [], 21.0)
    log.settled(9, [], 22.0).settled(12, [], 23.0)
    other = Log(tmp_path, "a").settled(4, [], 10.0).settled(14, [], 20.5)
    lives = chaos_report.read(tmp_path)
    assert chaos_report.thawed_to_in_step(lives, frozen) == 3.0
    other.settled(40, [], 22.5)
    assert chaos_report.thawed_to_in_step(chaos_report.read(tmp_path), frozen) is None
    log("process_stalled", 20.1, seconds=10.0)
    assert [life.stood_still for life in chaos_report.read(tmp_path)] == [[], [10.0]]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0, 1.0, 2.0, 4.0], 0.5, 2.0), ([3.0, 1.0, 2.0, 4.0], 0.99, 4.0), ([7.0], 0.5, 7.0), ([], 0.5, None)],
)
def test_a_quantile_is_a_measured_value(values, share, expected):
    assert chaos_report.quantile(values, share) == expected


def test_the_plan_follows_from_the_seed_and_fits_the_time():
    options = ChaosOptions(seed=5, seconds=100.0)
    faults = plan(options)
    assert faults == plan(options)
    assert faults != plan(ChaosOptions(seed=6, seconds=100.0))
    assert sorted(fault.kind for fault in faults) == ["freeze", *["kill"] * 4, "kill p2pd"]
    assert all(0 < a.at < b.at < 90 for a, b in pairwise(faults))


def test_failures_are_named():
    good = {
        "final_loss": 2.0, "undisturbed_losses": [1.9, 2.0, 2.1], "shared_settled_rounds": 9,
        "unequal_digests": [], "contributions_lost": 0,
        "contributions_twice": 0, "contributions": {"lost": [], "twice": []},
        "kill_to_commit_seconds": {"p50": 0.1, "p99": 0.2}, "frozen_to_reroute_seconds": 3.0,
    }  # fmt: skip
    assert chaos_report.failures(good) == []
    bad = {**good, "final_loss": 2.9, "frozen_to_reroute_seconds": 9.0}
    assert [failure.split()[0] for failure in chaos_report.failures(bad)] == ["final", "frozen"]


def test_neighbouring_intervals_of_checkpoints_share_rounds():
    assert [aligned(16, wanted) for wanted in (0.0, 31.0, 32.0, 100.0)] == [16, 16, 32, 64]


@pytest.mark.loopback
@pytest.mark.soak
async def test_a_swarm_that_is_killed_whole_goes_on_from_what_its_disks_share(tmp_path):
    """One of four disks is lost as well."""
    options = ChaosOptions(seed=3, peers=4, stages=2)
    swarm = ChaosSwarm(options, tmp_path / "swarm", Console(file=io.StringIO()))

    def lives():
        return chaos_report.read(swarm.folder)

    async def until(condition, seconds):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            await asyncio.sleep(0.2)

    def saved(name):
        paths = swarm.folder.glob(f"{name}/checkpoints/*.safetensors")
        return {int(path.stem.split("-")[-1]) for path in paths}

    def shared_on_disk():
        return [saved("peer-1") & saved("peer-2"), saved("peer-3") & saved("peer-4")]

    try:
        await swarm.start()
        await until(lambda: all(shared_on_disk()), 120)
        killed = time.time()
        for peer in [*swarm.peers, swarm.boot]:
            peer.kill()
        for peer in [*swarm.peers, swarm.boot]:
            await peer.process.wait()
        shared = shared_on_disk()
        shutil.rmtree(swarm.folder / "peer-1" / "checkpoints")
        await swarm.start_bootstrap()
        for number, stage in enumerate(swarm.stages()):
            await swarm.add(stage, f"peer-{number + 1}")
        await until(lambda: sum(len(life.settled) > 5 for life in lives() if life.began > killed) == 4, 120)
    finally:
        await swarm.stop()
    again = [life for life in lives() if life.began > killed]
    assert chaos_report.digests(again)[1] == []
    for life in again:
        newest_shared = max(shared[life.stage], default=-1)
        assert min(life.settled) > newest_shared, "a settled round that the disks share was lost"
        assert min(life.settled) > 0
