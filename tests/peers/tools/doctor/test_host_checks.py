"""What the doctor makes of a container, of WSL2 and of a computer that falls asleep."""

import pytest

from peers.tools.doctor import gpu_checks, host_checks
from peers.tools.doctor.gpu_checks import AMD, Graphics
from peers.tools.doctor.host_checks import Host

LINUX, WSL2 = "6.8.0-45-generic\n", "5.15.153.1-microsoft-standard-WSL2\n"
POWERCFG = """Subgruppen-GUID: 238c9fa8-0aad-41ed-83f4-97be242c8f20  (Energie sparen)
    Minimal mögliche Einstellung: 0x00000000
    Maximal mögliche Einstellung: 0xffffffff
    Mögliche Einstellungsschritte: 0x00000001
  Index der aktuellen Wechselstromeinstellung: 0x{mains:08x}
  Index der aktuellen Gleichstromeinstellung: 0x00000384
"""
"""What a German Windows answers."""


def answering(**answers):
    """A system whose programs answer so, by the last word of the command."""
    return lambda *command: answers.get(command[-1].replace("-", "_").replace(".", "_"), "")


def silent(*_command):
    return ""


def host_of(folder, kernel=LINUX, files=(), environment=None, ask=silent):
    (folder / "proc" / "sys" / "kernel").mkdir(parents=True)
    (folder / "proc" / "sys" / "kernel" / "osrelease").write_text(kernel)
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    return host_checks.look(folder, environment or {}, ask)


@pytest.mark.parametrize(
    ("scene", "expected"),
    [
        ({}, Host()),
        ({"files": [".dockerenv"]}, Host("docker")),
        ({"files": ["run/.containerenv"]}, Host("podman")),
        ({"environment": {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}}, Host("kubernetes")),
        ({"environment": {"container": "lxc"}}, Host("lxc")),
        ({"kernel": WSL2, "ask": answering(__networking_mode="nat")}, Host("", True, "nat")),
        ({"kernel": WSL2, "files": [".dockerenv"]}, Host("docker", True)),
    ],
)
def test_a_container_and_wsl2_are_noticed(tmp_path, scene, expected):
    assert host_of(tmp_path, **scene) == expected


def test_without_proc_nothing_is_known(tmp_path):
    assert host_checks.look(tmp_path, {}, silent) == Host()


@pytest.mark.parametrize(
    ("host", "level", "text", "fix"),
    [
        (Host(), "ok", "no container", ""),
        (Host("docker"), "ok", "in a container (docker): others reach only ports", ""),
        (Host("", True, "mirrored"), "ok", "must also be open in Windows", ""),
        (Host("", True, "nat"), "warn", "nat networking: others cannot dial", "networkingMode=mirrored"),
        (Host("", True), "warn", "unknown networking", "wsl --shutdown"),
        (Host("", True, "wsl1"), "warn", "no GPU and was not tested", "wsl --set-version"),
    ],
)
def test_what_stands_between_a_port_and_others_is_named(host, level, text, fix):
    line = host_checks.system(host)
    assert (line.check, line.level) == ("system", level)
    assert text in line.text
    assert fix in line.fix


GNOME = {"sleep_inactive_ac_timeout": "900"}


@pytest.mark.parametrize(
    ("host", "answers", "level", "text"),
    [
        (Host(), {}, "ok", "not known"),
        (Host(), {"sleep_target": "masked"}, "ok", "sleep.target is masked"),
        (Host(), {**GNOME, "sleep_inactive_ac_type": "'suspend'"}, "warn", "GNOME sleeps after 15 minutes"),
        (Host(), {**GNOME, "sleep_inactive_ac_type": "'nothing'"}, "ok", "stays awake"),
        (Host("docker"), {**GNOME, "sleep_inactive_ac_type": "'suspend'"}, "ok", "runs this container"),
        (Host("", True), {"STANDBYIDLE": POWERCFG.format(mains=1800)}, "warn", "sleeps after 30 minutes"),
        (Host("", True), {"STANDBYIDLE": POWERCFG.format(mains=0)}, "ok", "Windows stays awake"),
        (Host("", True), {}, "ok", "Windows did not answer"),
    ],
)
def test_a_computer_that_falls_asleep_is_a_warning_with_the_command_that_keeps_it_awake(
    host, answers, level, text
):
    line = host_checks.sleep(host, answering(**answers))
    assert (line.check, line.level) == ("sleep", level)
    assert text in line.text
    assert bool(line.fix) == (level == "warn")


def test_a_program_that_is_missing_fails_or_hangs_is_no_answer(monkeypatch):
    monkeypatch.setattr(host_checks, "ANSWER_SECONDS", 0.2)
    assert host_checks.ask_system("no-such-program-here") == ""
    assert host_checks.ask_system("false") == ""
    assert host_checks.ask_system("sleep", "5") == ""
    assert host_checks.ask_system("echo", " word ") == "word"


CUDA = Graphics("2.13.0", cuda_build="12.6")
ROCM = Graphics("2.13.0", rocm_build="6.4", vendors=frozenset({AMD}))


@pytest.mark.parametrize(
    ("found", "why", "fix"),
    [
        (Graphics("2.13.0", windows="gpu"), "no NVIDIA driver", "install its driver in Windows"),
        (Graphics("2.13.0", cuda_build="12.6", windows="cuda"), "driver of Windows", "update the driver"),
        (Graphics("2.13.0", windows="cuda"), "built without CUDA", "pip install"),
        (ROCM, "ROCm 6.4 does not see it", "usermod -aG render"),
    ],
)
def test_a_gpu_behind_windows_or_rocm_that_torch_does_not_see_is_explained(found, why, fix):
    line = gpu_checks.judge(found, "auto")
    assert line.level == "warn"
    assert why in line.text
    assert fix in line.fix


def test_an_amd_gpu_that_torch_sees_is_said_to_be_untested():
    seen = Graphics("2.13.0", rocm_build="6.4", devices=(("RX 7900 XTX", 20 << 30, 24 << 30),))
    line = gpu_checks.judge(seen, "auto")
    assert (line.level, "no AMD GPU was tested" in line.text) == ("warn", True)
    assert gpu_checks.judge(seen, "cpu").level == "ok"
