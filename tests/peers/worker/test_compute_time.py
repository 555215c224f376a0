"""Where a compute thread's time goes: every second is counted once, under the reason that held."""

import asyncio
from types import SimpleNamespace

import pytest
from clocks import on_virtual_clock
from prometheus_client.parser import text_string_to_metric_families
from swarm import Swarm, tiny_manifest

from peers.telemetry.metrics import PeerMetrics
from peers.worker.watch.compute_sampler import ComputeTime, idle_reason


class Thread:
    """A compute thread that has worked and rested as a test says."""

    def __init__(self):
        self.busy_seconds = self.rested_seconds = 0.0


def counted(metrics):
    """Seconds by what they were spent on, those that are not 0."""
    families = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    (busy,) = families["swarmnet_compute_busy_seconds"].samples
    idle = families["swarmnet_compute_idle_seconds"].samples
    seconds = {"busy": busy.value, **{sample.labels["reason"]: sample.value for sample in idle}}
    return {what: pytest.approx(value) for what, value in seconds.items() if value}


def test_time_is_split_into_work_rest_and_waiting_by_its_reason():
    metrics, thread = PeerMetrics(process=False), Thread()
    spent = ComputeTime(metrics.compute)
    assert spent.idle_share is None
    spent.look(100.0, thread, "joining")
    assert spent.idle_share is None
    spent.look(102.0, thread, "joining")
    thread.busy_seconds, thread.rested_seconds = 0.5, 0.25
    spent.look(103.0, thread, "answers")
    assert counted(metrics) == {"joining": 2.0, "busy": 0.5, "compute_duty_cycle": 0.25, "answers": 0.25}
    assert spent.idle_share == pytest.approx(2.5 / 3.0)
    for second in range(104, 120):
        thread.busy_seconds += 1.0
        spent.look(float(second), thread, "answers")
    assert spent.idle_share == pytest.approx(0.0)
    assert counted(metrics)["busy"] == 16.5


def test_another_thread_begins_at_nothing_and_none_at_all_only_waits():
    metrics, first, second = PeerMetrics(process=False), Thread(), Thread()
    spent = ComputeTime(metrics.compute)
    spent.look(0.0, first, "answers")
    first.busy_seconds = 1.0
    spent.look(1.0, first, "answers")
    spent.look(4.0, None, "paused")
    second.busy_seconds = 0.5
    spent.look(5.0, second, "joining")
    assert counted(metrics) == {"busy": 1.5, "paused": 3.0, "joining": 0.5}


def test_work_that_is_told_late_makes_no_negative_time():
    metrics, thread = PeerMetrics(process=False), Thread()
    spent = ComputeTime(metrics.compute)
    spent.look(0.0, thread, "answers")
    thread.busy_seconds = 3.0
    spent.look(1.0, thread, "answers")
    thread.busy_seconds = 2.9
    spent.look(2.0, thread, "answers")
    assert counted(metrics) == {"busy": 1.0, "answers": 1.0}


@pytest.mark.parametrize(
    ("state", "serving", "missing", "phases", "reason"),
    [
        ("connecting", False, (), "", "joining"),
        ("joining", False, (2,), "", "joining"),
        ("training", False, (), "waiting", "joining"),
        ("training", True, (2,), "unrouted", "stage_missing"),
        ("training", True, (), "forward waiting", "answers"),
        ("training", True, (), "unrouted done", "answers"),
        ("training", True, (), "forward backward done", "microbatches"),
        ("training", True, (), "", "microbatches"),
        ("paused_by_owner", True, (), "", "paused_by_owner"),
        ("leaving", False, (), "waiting", "leaving"),
    ],
)
def test_what_it_waits_for_has_a_word(state, serving, missing, phases, reason):
    pipeline = SimpleNamespace(jobs={phase: SimpleNamespace(phase=phase) for phase in phases.split()})
    data = SimpleNamespace(serving=serving, missing=SimpleNamespace(now=missing), pipeline=pipeline)
    worker = SimpleNamespace(state=state, services=SimpleNamespace(pipeline_service=data))
    assert idle_reason(worker) == reason
    assert idle_reason(SimpleNamespace(state="connecting", services=None)) == "joining"


@on_virtual_clock
async def test_a_slow_last_stage_is_busy_and_the_first_one_waits_for_its_answers():
    """Where a pipeline is too narrow is told by who is not idle."""
    swarm, found = Swarm(tiny_manifest((2, 1))), {}
    swarm.open()
    swarm.start("first", 0, in_flight=4)
    swarm.start("last", 1, compute=lambda priority: 0.2)
    await swarm.until(lambda: swarm.committed(0) > 3, 60.0)
    accounts = {}
    for name in ("first", "last"):
        metrics = PeerMetrics(process=False)
        accounts[name] = metrics, ComputeTime(metrics.compute), swarm.members[name].worker
    for _ in range(12):
        for _, spent, worker in accounts.values():
            spent.look(asyncio.get_running_loop().time(), worker.context.compute, idle_reason(worker))
        await swarm.during(1.0)
    await swarm.close()
    found.update({name: spent.idle_share for name, (_, spent, _) in accounts.items()})
    found["reasons"] = counted(accounts["first"][0])
    assert found["last"] < 0.2 < 0.6 < found["first"]
    assert found["reasons"]["answers"].expected > 6.0
