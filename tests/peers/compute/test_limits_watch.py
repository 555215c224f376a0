"""Hours and idleness of the peer file pause a peer and bring it back; memory is checked before anything."""

import subprocess
import sys
import time
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest
import torch

from peers.compute.limits_watch import LimitsWatch, on_battery
from peers.compute.machine_use import OtherUse
from peers.compute.memory_budget import all_needs, allowed_bytes, graphs_that_fit
from peers.compute.process_memory import memory_bytes
from peers.config.errors import UserError
from peers.config.limits import LimitsFile
from peers.worker.pause.pausing import PauseControl
from swarmnet.resources.idleness import Idleness, IdleRules
from swarmnet.resources.memory_estimate import DAEMON_BYTES
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import ModelShape

CPU = torch.device("cpu")
GIB = 1 << 30


class Use:
    """What others use, as a test says."""

    def __init__(self):
        self.used = 0.0

    def cores(self, daemon=None):
        return self.used


def test_a_peer_is_paused_outside_its_hours_and_told_until_when():
    pausing = PauseControl()
    watch = LimitsWatch(limits=LimitsFile(hours="22:00-08:00"), role=pausing)
    watch.look(12 * 60, 0.0)
    assert pausing.texts == {"schedule": "outside its hours until 22:00"}
    watch.look(22 * 60, 1.0)
    assert not pausing


def test_a_peer_makes_room_for_others_and_comes_back():
    pausing, use = PauseControl(), Use()
    rules = IdleRules(busy_seconds=5, quiet_seconds=120)
    watch = LimitsWatch(
        limits=LimitsFile(only_when_idle=True), role=pausing, others=use, idleness=Idleness(rules)
    )
    use.used = 1.7
    for now in range(6):
        watch.look(0, now)
    assert "1.7 cores" in pausing.texts["idle"]
    use.used = 0.0
    for now in range(6, 127):
        watch.look(0, now)
    assert not pausing


def test_a_peer_may_compute_less_instead_while_others_use_the_machine():
    pausing, use, shares = PauseControl(), Use(), []
    watch = LimitsWatch(
        limits=LimitsFile(only_when_idle=True, share_when_busy=0.2),
        duty_cycle=0.5,
        role=pausing,
        others=use,
        share_changed=shares.append,
    )
    use.used = 1.7
    for now in range(6):
        watch.look(0, now)
    assert not pausing
    assert (watch.share, shares) == (0.2, [0.2])
    watch.change(LimitsFile(only_when_idle=True, share_when_busy=0.1), 0.5)
    watch.change(LimitsFile(only_when_idle=True), 0.5)
    watch.look(0, 6)
    assert "1.7 cores" in pausing.texts["idle"]
    watch.change(LimitsFile(only_when_idle=True, share_when_busy=0.9), 0.5)
    use.used = 0.0
    for now in range(7, 128):
        watch.look(0, now)
    assert not pausing
    assert shares == [0.2, 0.1, 0.5]


def test_a_pulled_plug_pauses_and_a_loose_one_does_not():
    pausing, unplugged = PauseControl(), False
    watch = LimitsWatch(limits=LimitsFile(only_when_plugged_in=True), role=pausing, battery=lambda: unplugged)

    def during(seconds):
        nonlocal now
        for _ in range(seconds):
            watch.look(0, now)
            now += 1.0

    now = 0.0
    during(60)
    unplugged = True
    during(9)
    assert not pausing
    unplugged = False
    during(1)
    unplugged = True
    during(9)
    assert not pausing
    during(1)
    assert pausing.texts == {"battery": "this machine runs on its battery"}
    unplugged = False
    during(9)
    assert pausing
    during(1)
    assert not pausing


def test_who_begins_on_battery_is_paused_at_the_first_look_and_nobody_else_is():
    for says, paused in ((True, True), (False, False), (None, False)):
        pausing = PauseControl()
        watch = LimitsWatch(
            limits=LimitsFile(only_when_plugged_in=True), role=pausing, battery=lambda says=says: says
        )
        watch.look(0, 0.0)
        assert bool(pausing) == paused
        watch = LimitsWatch(
            limits=LimitsFile(), role=(careless := PauseControl()), battery=lambda says=says: says
        )
        watch.look(0, 0.0)
        assert not careless


PLUG, EMPTIED, FILLED = {"type": "Mains"}, {"type": "Battery", "status": "Discharging"}, {"type": "Battery"}
MOUSE = {"type": "Battery", "scope": "Device", "status": "Discharging"}


@pytest.mark.parametrize(
    ("supplies", "says"),
    [
        ({}, None),
        ({"AC": {**PLUG, "online": "1"}}, None),
        ({"hidpp_battery_0": MOUSE}, None),
        ({"BAT0": FILLED, "AC": {**PLUG, "online": "1"}}, False),
        ({"BAT0": EMPTIED, "AC": {**PLUG, "online": "1"}}, False),
        ({"BAT0": EMPTIED, "AC": {**PLUG, "online": "0"}}, True),
        ({"BAT0": FILLED, "AC": {**PLUG, "online": "0"}, "mouse": MOUSE}, True),
        ({"BAT0": EMPTIED, "ucsi1": {"type": "USB", "online": "0"}, "ucsi2": {"type": "USB", "online": "1"}},
         False),
        ({"BAT0": EMPTIED}, True),
        ({"BAT0": {**FILLED, "status": "Charging"}, "BAT1": {**FILLED, "status": "Full"}}, False),
        ({"BAT0": {"type": "Battery\xff", "status": ""}}, None),
    ],
)  # fmt: skip
def test_the_system_tells_whether_it_runs_on_its_battery(tmp_path, monkeypatch, supplies, says):
    monkeypatch.setattr(sys, "platform", "linux")
    for name, files in supplies.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_bytes(text.encode("latin-1") + b"\n")
    assert on_battery(tmp_path) is says


def test_elsewhere_psutil_is_asked(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    for plugged, says in ((True, False), (False, True), (None, None)):
        known = SimpleNamespace(power_plugged=plugged)
        monkeypatch.setattr("psutil.sensors_battery", lambda known=known: known, raising=False)
        assert on_battery() is says
    monkeypatch.setattr("psutil.sensors_battery", lambda: None, raising=False)
    assert on_battery() is None


def test_a_persons_pause_outlasts_the_hours_and_the_other_way_round():
    pausing = PauseControl()
    watch = LimitsWatch(limits=LimitsFile(hours="22:00-08:00"), role=pausing)
    pausing.pause("user")
    watch.look(12 * 60, 0.0)
    watch.look(23 * 60, 1.0)
    assert list(pausing.texts) == ["user"]
    watch.look(12 * 60, 2.0)
    pausing.resume("user")
    assert pausing.line() == "paused (schedule)"
    assert pausing


Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")


def test_others_use_what_the_machine_does_besides_this_process_and_those_named(monkeypatch):
    """In chosen figures, each of which would show."""
    now, own, daemon, machine = 100.0, 7.0, 3.0, [50.0, 2.0, 9.0, 800.0, 90.0, 1.0, 1.0, 1.0, 40.0, 1.0]

    def process(number):
        assert number == 77
        return SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=daemon, system=1.0))

    clock = SimpleNamespace(monotonic=lambda: now, process_time=lambda: own)
    system = SimpleNamespace(cpu_times=lambda: Times(*machine), Process=process, Error=psutil.Error)
    monkeypatch.setattr("peers.compute.machine_use.time", clock)
    monkeypatch.setattr("peers.compute.machine_use.psutil", system)
    use = OtherUse()
    assert use.cores([77]) == 0.0, "nothing to compare with"
    now, own, daemon = now + 10.0, own + 9.0, daemon + 4.0
    busy, waiting = 18.0, 22.0
    machine[0] += busy
    machine[3] += waiting / 2
    machine[4] += waiting / 2
    machine[8] += 5.0  # Of a guest: it is in `user` already.
    assert use.cores([77]) == pytest.approx((busy - 9.0 - 4.0) / 10.0)


def test_the_own_work_is_not_taken_for_that_of_others_and_that_of_others_is_seen():
    """In seconds of processors by this machine's own clocks, so it does not matter what else it does."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        children = [psutil.Process(process.pid) for process in busy]

        def used():
            """By the whole machine, by this process, by the two that do nothing else."""
            machine, theirs = psutil.cpu_times(), [child.cpu_times() for child in children]
            idle = machine.idle + getattr(machine, "iowait", 0.0)
            return (
                sum(machine[:8]) - idle,
                time.process_time(),
                sum(times.user + times.system for times in theirs),
            )

        strangers, helpers = OtherUse(), OtherUse()
        before, began = used(), time.monotonic()
        strangers.cores()
        helpers.cores([child.pid for child in children])
        while any(after - first < 0.25 for first, after in zip(before, used(), strict=True)):
            pass
        seconds = time.monotonic() - began
        with_the_two = strangers.cores() * seconds
        without = helpers.cores([child.pid for child in children]) * seconds
        whole, own, theirs = (after - first for first, after in zip(before, used(), strict=True))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert with_the_two > theirs / 2, "others are seen"
    assert with_the_two < whole - own / 2, "this process is none of them"
    assert without < with_the_two - theirs / 2, "nor is one that is named as its own"


def manifest(width=1024, layers=(8, 8, 8)):
    shape = ModelShape(
        hidden_size=width,
        num_hidden_layers=sum(layers),
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=width // 8,
        intermediate_size=4 * width,
        vocab_size=32_000,
        max_position_embeddings=2048,
    )
    return Manifest("big", "", stages=layers, model=shape)


def test_a_stage_that_does_not_fit_is_refused_with_what_would_help():
    every = all_needs(manifest(layers=(8, 2, 8)), CPU, 64 << 20)
    with pytest.raises(UserError) as refused:
        graphs_that_fit(every, 0, 4 * GIB, limited=True)
    text = str(refused.value)
    assert "stage 0 needs" in text
    assert "limits.memory allows 4.0 GiB" in text
    assert "`--stage 1`" in text
    with pytest.raises(UserError, match=r"this machine has 1\.0 GiB; try a machine with more memory"):
        graphs_that_fit(every, 0, GIB, limited=False)


def test_fewer_microbatches_are_kept_where_that_makes_it_fit():
    every = all_needs(manifest(), CPU, 0)
    needs = every[1]
    assert graphs_that_fit(every, 1, needs.least, limited=True) == 1
    assert graphs_that_fit(every, 1, needs.least + 3 * needs.graph, limited=True) == 4
    assert allowed_bytes(None, CPU) == memory_bytes(CPU)
    assert allowed_bytes(1000, CPU) == 1000


@pytest.mark.parametrize(
    ("width", "seen"),
    [(256, 534e6), (384, 717e6), (512, 873e6)],
)
def test_what_a_stage_is_said_to_need_lies_above_what_was_seen_and_not_far(width, seen):
    """Highest resident memory of a real peer of an only stage, without its p2pd (docs/volunteer.md)."""
    shape = ModelShape(
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=width // 8,
        intermediate_size=4 * width,
    )
    said = all_needs(Manifest("m", "", stages=(4,), model=shape), CPU, text_bytes=64 << 20)[0]
    assert seen < said.weights + said.process - DAEMON_BYTES < 1.5 * seen


def test_a_month_that_is_used_up_pauses_a_peer_until_the_next():
    pausing, used = PauseControl(), [0]
    watch = LimitsWatch(
        limits=LimitsFile(traffic_per_month="10MB"), role=pausing, month_bytes=lambda: used[0]
    )
    for count, paused in ((9_999_999, False), (10_000_000, True), (12_000_000, True), (0, False)):
        used[0] = count
        watch.look(0, 0.0)
        assert bool(pausing) is paused
    used[0] = 10_000_000
    watch.look(0, 0.0)
    assert "traffic that the peer file allows" in pausing.texts["traffic"]


def test_a_limit_that_is_lifted_ends_its_pause_and_no_other():
    pausing = PauseControl()
    watch = LimitsWatch(limits=LimitsFile(hours="22:00-08:00", traffic_per_month="10MB"), role=pausing)
    watch.month_bytes = lambda: 10**9
    pausing.pause("user")
    watch.look(12 * 60, 0.0)
    assert list(pausing.texts) == ["user", "schedule", "traffic"]
    watch.change(LimitsFile(hours="11:00-13:00"))
    assert list(pausing.texts) == ["user", "schedule"]
    watch.look(12 * 60, 1.0)
    assert list(pausing.texts) == ["user"]
    watch.change(LimitsFile(hours="22:00-08:00"))
    watch.look(12 * 60, 2.0)
    assert list(pausing.texts) == ["user", "schedule"]
