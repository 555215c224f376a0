"""The doctor's judgement: what was found, in words that help, each with the right fix. No network here."""

import fcntl
import io
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from examined import command
from swarm import tiny_manifest

from peers.compute.memory_budget import all_needs
from peers.config.errors import UserError
from peers.config.peer_file import validate_peer_file
from peers.config.yaml_lines import ParsedYaml
from peers.data.documents import ReadSummary
from peers.data.tokens import ShardTokens
from peers.network.addresses import Addresses
from peers.runtime.state_lock import is_held
from peers.tools.doctor import gpu_checks as gpu
from peers.tools.doctor import machine_checks as machine
from peers.tools.doctor import stage_memory
from peers.tools.doctor.gpu_checks import AMD, NVIDIA, Graphics
from peers.tools.doctor.line import CheckResult
from peers.tools.doctor.print_checks import CHECKS, DoctorReport, run_doctor, wanted_checks
from peers.tools.doctor.reachability import judge, no_bootstrap, undialled
from peers.tools.doctor.stage_memory import Memory
from peers.tools.doctor.swarm import verdicts
from protocols.reachability.fresh_dial import ADDRESSES, DialOutcome

SEEN = "/ip4/8.8.4.4/tcp/40000"
DOOR = "/ip4/8.8.4.4/tcp/31331"
OTHER = "/ip4/9.9.9.9/tcp/4001"
GIB = 1 << 30
TEXT = 1 << 20
"""Bytes of text that a peer may hold."""


def met(address, outcome, detail=""):
    return DialOutcome(address, outcome, detail, 0.05)


def verdict(announced, *dialled, chosen=True, must=False, ports=(31331,)):
    return judge(Addresses(tuple(announced), chosen, ports), SEEN, dialled, must)


# -- reachability ------------------------------------------------------------


DOCKER, PRIVATE = "/ip4/172.17.0.1/tcp/31331", "/ip4/192.168.1.5/tcp/31331"
RELAY = "/ip4/9.9.9.9/tcp/1/p2p/12D3KooWrelay/p2p-circuit"
VERDICTS = {
    "reached where it announces itself": verdict([DOOR], met(DOOR, "reached")),
    "one of the addresses that p2pd found is not tried": verdict(
        [DOCKER, DOOR], met(DOCKER, "not_tried"), met(DOOR, "reached"), chosen=False
    ),
    "one of the addresses that p2pd found is silent": verdict(
        [DOCKER, DOOR], met(DOCKER, "silent"), met(DOOR, "reached"), chosen=False
    ),
    "another peer is there": verdict([OTHER], met(OTHER, "other_peer", "12D3KooWelse"), met(DOOR, "reached")),
    "a wrong address beside a right one": verdict([OTHER, DOOR], met(OTHER, "refused"), met(DOOR, "reached")),
    "a forwarded port of which no peer learns": verdict(
        [PRIVATE], met(PRIVATE, "not_tried"), met(DOOR, "reached"), chosen=False
    ),
    **{
        f"the door answers: {outcome}": verdict([], met(DOOR, outcome, "detail"), chosen=False)
        for outcome in ("silent", "refused", "no_way", "not_libp2p", "other_peer")
    },
    "a bootstrap behind a firewall": verdict([DOOR], met(DOOR, "silent"), must=True),
    "a firewall, and a wrong address": verdict([OTHER], met(OTHER, "refused"), met(DOOR, "silent")),
    "a firewall and a relay": verdict([RELAY], met(DOOR, "silent"), chosen=False),
    "nothing could be tried": verdict([OTHER], met(OTHER, "not_tried", "no"), met(DOOR, "failed", "broke")),
    "braces of a stranger": verdict([], met(DOOR, "no_way", "{0} {x}"), chosen=False),
}


def test_each_finding_has_its_verdict_and_its_fix(golden):
    told = [
        f"{case}: {one.verdict}, {one.level}\n  {one.text}\n  -> {one.fix}\n"
        for case, one in VERDICTS.items()
    ]
    golden("verdicts.txt", "\n".join(told))


def test_the_own_door_is_always_asked_for_and_loopback_never_from_afar():
    many = [f"/ip4/9.9.9.9/tcp/{port}" for port in range(1, 20)]
    asked = Addresses(("/ip4/127.0.0.1/tcp/1", *many), True, (31331,)).to_ask(SEEN)
    assert len(asked) == ADDRESSES
    assert asked[-1] == DOOR
    assert not any("127.0.0.1" in each for each in asked)
    assert Addresses(("/ip4/127.0.0.1/tcp/1",), False, (1,)).to_ask("/ip4/127.0.0.1/tcp/9") == (
        "/ip4/127.0.0.1/tcp/1",
    )


# -- graphics ------------------------------------------------------------

CUDA = Graphics("2.13.0", cuda_build="12.6", vendors=frozenset({NVIDIA}), driver="550.54")
CPU = replace(CUDA, cuda_build=None)


def test_a_gpu_that_torch_sees_is_named_with_its_memory():
    line = gpu.judge(replace(CUDA, devices=(("RTX 3080", 9 * GIB, 10 * GIB),)), "auto")
    assert (line.level, line.text) == ("ok", "torch sees RTX 3080, 9.0 GiB of 10.0 GiB free")


def test_a_gpu_that_another_program_has_is_a_warning():
    line = gpu.judge(replace(CUDA, devices=(("RTX 3080", GIB, 10 * GIB),)), "auto")
    assert line.level == "warn"


@pytest.mark.parametrize(
    ("found", "why", "fix"),
    [
        (CPU, "built without CUDA", "pip install --force-reinstall torch=="),
        (replace(CUDA, driver=None), "driver is not loaded", "ubuntu-drivers install"),
        (replace(CUDA, nodes=False), "not in this container", "--gpus all"),
        (CUDA, "driver 550.54 is too old for torch's CUDA 12.6", "nvidia-smi"),
        (replace(CPU, vendors=frozenset({AMD}), driver=None), "not built for ROCm", "ROCm build of torch=="),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_explained(found, why, fix):
    line = gpu.judge(found, "auto")
    assert line.level == "warn"
    assert why in line.text
    assert fix in line.fix
    assert gpu.judge(found, "cuda").level == "fail"
    assert gpu.judge(found, "cpu").level == "ok"


def test_a_machine_without_a_gpu_is_well_unless_one_is_asked_for():
    none = Graphics("2.13.0")
    assert gpu.judge(none, "auto").level == "ok"
    line = gpu.judge(none, "cuda")
    assert (line.level, line.fix) == ("fail", "set device: cpu in the peer file")


def test_what_pci_and_the_driver_say_is_read(tmp_path):
    card = tmp_path / "pci" / "0000:01:00.0"
    card.mkdir(parents=True)
    (card / "class").write_text("0x030000\n")
    (card / "vendor").write_text("0x10de\n")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb\n")
    found = gpu.look(tmp_path / "pci", tmp_path / "version")
    assert (found.vendors, found.driver) == ({NVIDIA}, "550.54.14")


def test_another_torch_than_the_tested_one_is_a_warning():
    assert gpu.torch_line(Graphics("2.13.0+cpu")).level == "ok"
    line = gpu.torch_line(Graphics("2.9.1"))
    assert line.level == "warn"
    assert f"{sys.executable} -m pip install" in line.fix
    assert gpu.torch_line(Graphics("", "libgomp.so.1: cannot open")).level == "fail"


# -- the machine ------------------------------------------------------------


def config(tmp_path, **keys):
    data = {"role": "bootstrap", "state": str(tmp_path / "state"), "metrics": {"listen": "off"}, **keys}
    return validate_peer_file(ParsedYaml("test", data), tmp_path, "test", {})


def test_memory_is_what_the_container_may_take(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    assert machine.free_memory(tmp_path / "meminfo", tmp_path) == (4 * GIB, 8 * GIB)
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    assert machine.free_memory(tmp_path / "meminfo", tmp_path) == (GIB, 2 * GIB)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory(tmp_path / "meminfo", tmp_path) == (4 * GIB, 8 * GIB)
    assert machine.free_memory(tmp_path / "nothing", tmp_path) == (0, 0)


def test_too_little_memory_fails():
    assert machine.memory(GIB // 2, GIB).level == "fail"
    assert machine.memory(4 * GIB, 8 * GIB).level == "ok"


def test_the_disk_of_a_state_that_is_not_made_yet_is_looked_at_and_nothing_is_made(tmp_path):
    line = machine.disk(tmp_path / "a" / "b")
    assert line.data["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_fails_and_that_of_the_running_peer_does_not(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        here = {"listen": f"127.0.0.1:{number}"}
        wish = config(tmp_path, listen=[f"/ip4/127.0.0.1/tcp/{number}"], metrics=here)
        assert machine.port(wish, running=False).level == "fail"
        assert machine.port(wish, running=True).level == "ok"
        assert machine.metrics(wish, running=False).level == "fail"
        assert machine.metrics(wish, running=True).level == "ok"


@pytest.mark.parametrize(("taken", "level"), [({9410}, "ok"), ({9410, *range(9430, 9440)}, "fail")])
def test_a_taken_port_of_metrics_that_no_file_names_is_no_failure_while_another_is_free(
    tmp_path, monkeypatch, taken, level
):
    monkeypatch.setattr(machine, "_refused", lambda _host, port: "in use" if port in taken else "")
    assert machine.metrics(config(tmp_path, metrics={}), running=False).level == level


def test_without_py_libp2p_a_bootstrap_is_told_the_command_that_brings_it_and_a_worker_needs_none():
    line = machine.second_opinion(able=False, is_bootstrap=True)
    assert line.level == "warn"
    assert line.fix.endswith(f"VENV={sys.prefix} scripts/setup libp2p")
    assert machine.second_opinion(able=False, is_bootstrap=False).level == "ok"


@pytest.mark.parametrize(
    ("reasons", "must", "level"),
    [(["a has no py-libp2p"], False, "ok"), (["a has no py-libp2p"], True, "warn"), ([], False, "warn")],
)
def test_peers_that_cannot_dial_back_are_no_warning_for_a_worker(reasons, must, level):
    assert undialled(reasons, must).level == level


def test_a_held_lock_means_that_the_peer_runs_and_nothing_is_made(tmp_path):
    assert not is_held(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "lock").touch()
    assert not is_held(tmp_path)
    with (tmp_path / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert is_held(tmp_path)


# -- the stage ------------------------------------------------------------


def test_a_stage_that_fits_nowhere_fails_and_the_one_that_fits_is_named():
    manifest = tiny_manifest()
    needs = [one.least for one in all_needs(manifest, stage_memory.CPU, TEXT)]
    assert stage_memory.judge(manifest, None, Memory(max(needs)), TEXT).level == "ok"
    assert stage_memory.judge(manifest, None, Memory(min(needs) - 1), TEXT).level == "fail"
    assert stage_memory.judge(manifest, 99, Memory(max(needs)), TEXT).level == "fail"
    between = stage_memory.judge(manifest, None, Memory(max(needs) - 1), TEXT)
    assert between.level == "warn"
    assert between.fix == f"stage: {needs.index(min(needs))} in the peer file"


def test_the_limit_of_the_peer_file_counts_as_it_does_for_the_peer_itself():
    manifest, plenty = tiny_manifest(), 1 << 50
    every = all_needs(manifest, stage_memory.CPU, TEXT)
    for limit in (min(one.least for one in every) - 1, max(one.least for one in every)):
        line = stage_memory.judge(manifest, None, Memory(plenty, None, limit), TEXT)
        refused = [one.stage for one in every if not one.graphs_within(limit)]
        assert line.level == ("fail" if refused else "ok")


def test_on_a_gpu_the_weights_lie_there_and_programs_and_text_beside_it():
    manifest = tiny_manifest()
    on_gpu = max(one.least for one in all_needs(manifest, stage_memory.GPU, TEXT))
    beside = max(one.process for one in all_needs(manifest, stage_memory.CPU, TEXT))
    assert stage_memory.judge(manifest, None, Memory(beside, on_gpu), TEXT).level == "ok"
    assert stage_memory.judge(manifest, None, Memory(beside, 1), TEXT).level == "fail"
    assert stage_memory.judge(manifest, None, Memory(1, on_gpu), TEXT).level == "fail"


# -- bootstraps -------------------------------------------------------------------------------------------


def test_one_bootstrap_that_answers_is_enough_and_gone_acquaintances_are_no_news():
    ok, gone = CheckResult("bootstrap", "ok", "answers"), CheckResult("bootstrap", "fail", "does not answer")
    assert verdicts(["a", "b"], ["a", "b", "c"], [ok, gone, gone]) == [ok, replace(gone, level="warn")]
    assert verdicts(["a", "b"], ["a", "b"], [gone, gone]) == [gone, gone]
    assert verdicts(["a"], ["a", "c"], [gone, ok]) == [replace(gone, level="warn"), ok]
    assert verdicts([], ["c", "d"], [gone, gone]) == [gone]


# -- the report ------------------------------------------------------------


def test_lines_are_shown_as_they_come_each_with_its_fix():
    out = io.StringIO()
    report = DoctorReport(frozenset(CHECKS), out, as_json=False)
    report.show(CheckResult("disk", "warn", "little room", "make room"))
    assert out.getvalue() == "warn  disk          little room\n                    -> make room\n"
    assert not report.failed


def test_json_is_one_document_with_the_same(tmp_path):
    out = io.StringIO()
    report = DoctorReport(frozenset({"port"}), out, as_json=True)
    report.show(CheckResult("disk", "ok", "not asked for"))
    report.show(CheckResult("p2pd", "fail", "what the rest hangs on", "fix", {"seconds": 1.0}))
    report.end()
    document = json.loads(out.getvalue())
    assert document["ok"] is False
    told = {"check": "p2pd", "level": "fail", "text": "what the rest hangs on", "fix": "fix"}
    assert document["checks"] == [{**told, "data": {"seconds": 1.0}}]


def test_a_check_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(UserError, match=r"nose.*there are python, system, sleep, torch"):
        wanted_checks(["nose"])
    assert wanted_checks([]) == set(CHECKS)


def test_every_check_is_in_the_documentation():
    text = (Path(__file__).parents[4] / "docs" / "doctor.md").read_text()
    assert [check for check in CHECKS if f"| {check} |" not in text] == []


@pytest.mark.parametrize(
    ("lan", "zeroconf", "neighbours", "fix"),
    [
        ("auto", True, True, "bootstrap: [MULTIADDR]"),
        (True, True, True, "bootstrap: [MULTIADDR]"),
        ("auto", False, False, "scripts/setup lan"),
        (True, False, False, "scripts/setup lan"),
        (False, True, False, "bootstrap: [MULTIADDR]"),
        (False, False, False, "bootstrap: [MULTIADDR]"),
    ],
)
def test_neighbours_are_promised_only_where_they_are_looked_for(lan, zeroconf, neighbours, fix):
    line = no_bootstrap(lan, zeroconf)
    assert line.level == "warn"
    assert ("peers on the local network can find this peer" in line.text) == neighbours
    assert fix in line.fix
    assert ("scripts/setup lan" in line.fix) == (bool(lan) and not zeroconf)


# -- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing.yaml"], "nothing.yaml"),
        (["--only", "nose"], "there is no such check"),
        (["--only", "reachability"], "add --run RUN --bootstrap ADDRESS"),
        (["--run", "not-a-run"], "neither a run id"),
        (["--bootstrap", "/ip4/1.2.3.4/tcp/1"], "does not name the peer"),
        (["peer.yaml", "--run", "ab" * 32], "a peer file already names run and bootstrap"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "peer.yaml").write_text("role: bootstrap\nstate: here\n")
    assert command(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert complaint in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["peer.yaml"]


def test_a_machine_alone_is_looked_at_without_leaving_a_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert command("--set", "metrics.listen=off", "--json") == 0
    checks = [check["check"] for check in json.loads(capsys.readouterr().out)["checks"]]
    assert checks == list(CHECKS[: CHECKS.index("p2pd")])
    assert list(tmp_path.iterdir()) == []


def read_of(tokens, **what):
    return ShardTokens("a", torch.zeros(tokens, dtype=torch.uint8), ReadSummary(**what), made=True)


def test_the_text_is_judged_by_what_a_peer_would_read_of_it():
    fine = stage_memory.judge_read(read_of(5000, files=3, documents=40, bytes=12_300_000), 129)
    assert (fine.level, fine.text) == ("ok", "5,000 tokens: 40 documents in 3 files, 12.3 MB")
    assert fine.data["tokens"] == 5000
    odd = stage_memory.judge_read(
        read_of(5000, files=1, documents=1, kinds={"binary": (2, "b.txt: is no text")}), 129
    )
    assert odd.level == "warn"
    assert "left out of the text: b.txt: is no text, and 1 more" in odd.text
    short = stage_memory.judge_read(read_of(128, files=1, documents=1), 129)
    assert (short.level, short.fix) == ("fail", "add text")


def test_a_check_that_was_asked_for_and_not_made_is_no_success(tmp_path):
    config = validate_peer_file(ParsedYaml("x", {"role": "bootstrap"}, {}), tmp_path, "x", {})
    told = io.StringIO()
    assert run_doctor(config, must_be_reached=False, swarm=False, only=["text", "python"], out=told) == 1
    assert "was requested and could not be checked" in told.getvalue()
    assert run_doctor(config, must_be_reached=False, swarm=False, only=["python"], out=io.StringIO()) == 0
