"""How `only_when_idle` sees other programs on the GPU that this peer computes on, by NVIDIA's library."""

from __future__ import annotations

import io
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from peers.compute.limits_watch import LimitsWatch
from peers.compute.machine_use import NoGpu, Nvidia, gpu_use
from peers.config.compute_file import ComputeFile
from peers.config.limits import LimitsFile
from peers.config.peer_file import validate_peer_file
from peers.config.yaml_lines import ParsedYaml
from peers.telemetry.metrics import PeerMetrics
from peers.tools.doctor import gpu_checks as gpu
from peers.tools.doctor.gpu_checks import Graphics
from peers.tools.doctor.print_checks import run_doctor
from peers.worker.pause.pausing import PauseControl
from peers.worker.role import WorkerRole
from swarmnet.resources.idleness import Idleness, IdleRules

CPU, GPU, SECOND = torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 1)
HERE, THERE = "GPU-here", "GPU-there"
OTHER = os.getpid() + 1


class Library:
    """As much of NVIDIA's library as is asked: two cards, and samples of what runs on each."""

    class NVMLError(Exception):
        pass

    def __init__(self, *cards):
        self.cards, self.begun, self.asked = cards, 0, []
        self.running = {card: [] for card in cards}

    def nvmlInit(self):  # noqa: N802 - the library's name
        self.begun += 1

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in self.cards:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetProcessUtilization(self, device, since):  # noqa: N802
        self.asked.append(since)
        found = [sample for sample in self.running[device] if sample.timeStamp > since]
        if not found:
            raise self.NVMLError("Not Found")
        return found

    def runs(self, card, process, percent, at):
        """A sample, taken at so many microseconds."""
        self.running[card].append(SimpleNamespace(pid=process, smUtil=percent, timeStamp=at))


@pytest.fixture
def library(monkeypatch):
    """Of two cards torch sees the library's second one first, as CUDA_VISIBLE_DEVICES=1,0 has it."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda device: SimpleNamespace(uuid="there" if device.index == 1 else "here"), raising=False,
    )  # fmt: skip
    library = Library(THERE, HERE)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


@pytest.fixture
def warned():
    return []


def test_the_card_is_looked_at_that_torch_computes_on_whatever_its_number(library, warned):
    library.runs(THERE, OTHER, 80, 1)
    assert gpu_use(GPU, True, warned.append).share() == 0.0, "the other card is no concern of this peer"
    assert gpu_use(SECOND, True, warned.append).share() == 0.8
    library.runs(HERE, OTHER, 30, 1)
    assert gpu_use(GPU, True, warned.append).share() == 0.3
    assert warned == []


def test_the_own_work_on_it_is_not_that_of_others_and_each_sample_counts_once(library, warned):
    library.runs(HERE, os.getpid(), 90, 5)
    library.runs(HERE, OTHER, 7, 6)
    library.runs(HERE, OTHER + 1, 5, 4)
    use = gpu_use(GPU, True, warned.append)
    assert use.share() == pytest.approx(0.12)
    assert use.share() == 0.0, "nothing has run since"
    library.runs(HERE, OTHER, 99, 7)
    library.runs(HERE, OTHER + 1, 99, 8)
    assert use.share() == 1.0, "a share, whatever the samples add up to"
    assert library.asked == [0, 6, 6], "only what is newer than the newest"


@pytest.mark.parametrize(("device", "wanted"), [(CPU, True), (GPU, False)])
def test_who_computes_elsewhere_or_does_not_go_by_it_leaves_the_library_alone(
    library, warned, device, wanted
):
    assert gpu_use(device, wanted, warned.append).share() is None
    assert library.begun == 0
    assert warned == []


def test_without_the_library_a_warning_says_so_with_the_command_that_helps(library, warned, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    use = gpu_use(GPU, True, warned.append)
    assert isinstance(use, NoGpu)
    (text,) = warned
    assert "only_when_idle sees other programs on the processor only" in text
    assert text.endswith("scripts/setup gpu")
    assert use.share() is None
    assert len(warned) == 1, "once, not at every look"
    gpu_use(CPU, True, warned.append)
    gpu_use(GPU, False, warned.append)
    assert len(warned) == 1, "and not where it is no loss"


def test_a_card_that_the_library_does_not_know_is_a_warning_that_says_why(library, warned):
    library.cards = (THERE,)
    assert gpu_use(GPU, True, warned.append).share() is None
    assert "does not know it (Not Found)" in warned[0]


def test_of_another_makers_gpu_no_package_of_nvidia_is_asked_for(library, warned, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert gpu_use(GPU, True, warned.append).share() is None
    assert "install" not in warned[0]


def test_a_peer_makes_room_for_others_on_its_card_and_not_for_those_on_another(library, warned):
    use = gpu_use(GPU, True, warned.append)
    assert isinstance(use, Nvidia)
    pausing, idle = PauseControl(), SimpleNamespace(cores=lambda own: 0.0)
    rules = IdleRules(busy_seconds=5, quiet_seconds=120)
    watch = LimitsWatch(
        limits=LimitsFile(only_when_idle=True), role=pausing, others=idle, gpu=use, idleness=Idleness(rules)
    )
    for now in range(20):
        library.runs(THERE, OTHER, 100, now + 1)
        watch.look(0, float(now))
    assert not pausing
    for now in range(20, 40):
        library.runs(HERE, OTHER, 60, now + 1)
        watch.look(0, float(now))
    assert "60% of the GPU" in pausing.texts["idle"]


@pytest.mark.parametrize("only_when_idle", [True, False])
def test_a_worker_says_it_when_it_starts_as_a_warning(library, monkeypatch, only_when_idle, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    said = []
    report = SimpleNamespace(notify=lambda event, text, level="info", **_: said.append((event, level, text)))
    config = SimpleNamespace(
        device="cuda", stage="auto", limits=LimitsFile(only_when_idle=only_when_idle),
        metrics=SimpleNamespace(peak_flops=None), threads=1, compute=ComputeFile(dtype="fp32"),
        state=tmp_path, compute_duty_cycle=1.0,
    )  # fmt: skip
    WorkerRole(SimpleNamespace(
        config=config, report=report, metrics=PeerMetrics(process=False),
        identity=SimpleNamespace(peer_id="me"),
        log=SimpleNamespace(listeners=[]), live=SimpleNamespace(listeners=[]),
        control=SimpleNamespace(answers={}), notify=report.notify,
    ))  # fmt: skip
    assert [(event, level) for event, level, _ in said] == [("limits", "warning")] * only_when_idle
    assert all("scripts/setup gpu" in text for _, _, text in said)


# -- the doctor ---------------------------------------------------------------------------------------


SEEN = Graphics("2.13.0", cuda_build="13.0", devices=(("Some GPU", 9 << 30, 10 << 30),), library=False)


def test_the_doctor_says_when_only_when_idle_cannot_see_the_gpu():
    line = gpu.unwatched(SEEN, "auto", only_when_idle=True)
    assert line is not None
    assert (line.check, line.level) == ("gpu", "warn")
    assert line.fix.endswith("scripts/setup gpu")


@pytest.mark.parametrize(
    ("found", "wish", "only_when_idle"),
    [
        (SEEN, "auto", False),
        (SEEN, "cpu", True),
        (Graphics("2.13.0", library=False), "auto", True),
        (Graphics("2.13.0", devices=SEEN.devices), "cuda", True),
        (Graphics("2.13.0", rocm_build="6.4", devices=SEEN.devices, library=False), "cuda", True),
    ],
)
def test_and_says_nothing_where_it_can_or_need_not(found, wish, only_when_idle):
    assert gpu.unwatched(found, wish, only_when_idle) is None


def test_it_is_a_line_of_the_gpu_check(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "look", lambda: SEEN)
    data = {"role": "worker", "run": "ab" * 32, "state": str(tmp_path), "limits": {"only_when_idle": True}}
    config, out = validate_peer_file(ParsedYaml("test", data), tmp_path, "test", {}), io.StringIO()
    assert run_doctor(config, must_be_reached=False, swarm=False, only=["gpu"], out=out) == 0
    assert "only_when_idle sees no programs on the GPU" in out.getvalue()
    assert "1 warn" in out.getvalue()
