"""Run all checks and print them: a line for each as it ends, or one JSON document at the end."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO, cast, get_args

import uvloop
from rich.console import Console
from rich.text import Text

from peers.config.errors import UserError, as_user_errors
from peers.config.peer_file import PeerFile
from peers.runtime.state_lock import is_held
from peers.telemetry.console import printable
from peers.tools.doctor import gpu_checks as graphics
from peers.tools.doctor import host_checks
from peers.tools.doctor import machine_checks as machine
from peers.tools.doctor.line import Check, CheckResult
from protocols.daemon.temporary import prefix
from protocols.reachability.fresh_dial import can_dial
from protocols.signed.identity import IdentityError, create, load

CHECKS: tuple[str, ...] = get_args(Check)
NETWORK = frozenset({"p2pd", "bootstrap", "clock", "run", "stage", "text", "bandwidth", "reachability"})
UNSEEN = ("clock", "bandwidth", "reachability")
"""Checks of NETWORK that concern this machine."""
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass
class DoctorReport:
    """Collects the results, and prints each at once unless the output is JSON."""

    wanted: frozenset[str]
    out: TextIO
    as_json: bool
    lines: list[CheckResult] = field(default_factory=list)

    def show(self, line: CheckResult) -> None:
        """Add a result if its check is wanted or it failed: other checks depend on a failed one."""
        if line.check not in self.wanted and line.level != "fail":
            return
        self.lines.append(line)
        if not self.as_json:
            console = Console(file=self.out, highlight=False, soft_wrap=True)
            text = f"  {line.check:<12}  {printable(line.text)}"
            console.print(Text.assemble((f"{line.level:<4}", COLOURS[line.level]), text))
            if line.fix:
                console.print(Text(f"{'':<18}  -> {printable(line.fix)}"))

    @property
    def failed(self) -> bool:
        return any(line.level == "fail" for line in self.lines)

    def end(self) -> None:
        if self.as_json:
            document = {"ok": not self.failed, "checks": [asdict(line) for line in self.lines]}
            self.out.write(json.dumps(document, indent=1) + "\n")
            return
        counts = {level: sum(line.level == level for line in self.lines) for level in COLOURS}
        self.out.write(f"{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail\n")


def wanted_checks(names: Sequence[str]) -> frozenset[str]:
    """Return the named checks, or all. Raises UserError for an unknown name."""
    for name in names:
        if name not in CHECKS:
            raise UserError(f"--only {name}: there is no such check; there are {', '.join(CHECKS)}")
    return frozenset(names or CHECKS)


def run_doctor(
    config: PeerFile,
    *,
    must_be_reached: bool,
    swarm: bool,
    only: Sequence[str] = (),
    as_json: bool = False,
    out: TextIO | None = None,
) -> int:
    """Run the checks. Return 0 if none fails, else 1. `swarm`: the peer file names a swarm, so check the
    network. Raises UserError for bad input."""
    report = DoctorReport(wanted_checks(only), out or sys.stdout, as_json)
    with as_user_errors(IdentityError):
        running = is_held(config.state)
        found = _machine(config, running, must_be_reached, report)
        if not swarm and not only and not as_json:
            unseen = ", ".join(UNSEEN)
            report.out.write(f"not checked, because no swarm is named (--run, --bootstrap): {unseen}\n")
        if swarm and report.wanted & NETWORK:
            if found is None:
                report.show(
                    CheckResult("p2pd", "fail", "not checked: hivemind needs torch, which cannot be imported")
                )
            else:
                _swarm(config, running, must_be_reached, found, report)
    for check in sorted(set(only) - {line.check for line in report.lines}):
        unseen = "was requested and could not be checked"
        fix = "fix the problems above; network checks need a peer that answers"
        report.show(CheckResult(cast(Check, check), "fail", unseen, fix))
    report.end()
    return 1 if report.failed else 0


def _machine(
    config: PeerFile, running: bool, must_be_reached: bool, report: DoctorReport
) -> graphics.Graphics | None:
    """Run the checks that need no network. Return what is known of GPUs; None without torch."""
    available, total = machine.free_memory()
    checks: dict[str, Callable[[], CheckResult]] = {
        "memory": lambda: machine.memory(available, total),
        "disk": lambda: machine.disk(config.state),
        "files": machine.open_files,
        "port": lambda: machine.port(config, running),
        "metrics": lambda: machine.metrics(config, running),
        "libp2p": lambda: machine.second_opinion(can_dial(), must_be_reached),
    }
    report.show(machine.python())
    host = host_checks.look()
    report.show(host_checks.system(host))
    if "sleep" in report.wanted:
        report.show(host_checks.sleep(host))
    found = graphics.look()
    report.show(graphics.torch_line(found))
    if found.torch:
        judged = graphics.judge(found, config.device)
        report.show(judged)
        refused = graphics.as_asked(config)[1]
        if refused is not None and judged.level != "fail":
            report.show(refused)
        unwatched = graphics.unwatched(found, config.device, config.limits.only_when_idle)
        if unwatched is not None:
            report.show(unwatched)
    for name, check in checks.items():
        if name in report.wanted and not (name == "memory" and total == 0):
            report.show(check())
    return found if found.torch else None


def _swarm(
    config: PeerFile, running: bool, must_be_reached: bool, found: graphics.Graphics, report: DoctorReport
) -> None:
    from peers.tools.doctor.stage_memory import Memory
    from peers.tools.doctor.swarm import ExaminedPeer, NetworkChecks

    gpu = found.devices[0][1] if found.devices and config.device != "cpu" else None
    free = Memory(machine.free_memory()[0], gpu, config.limits.memory)
    with tempfile.TemporaryDirectory(prefix=prefix("doctor")) as folder:
        place = Path(folder)
        create(place / "stranger.key")
        key = config.identity if config.identity.exists() else place / "stranger.key"
        subject = ExaminedPeer(config, load(key), key, running, must_be_reached, free, place)
        visit = NetworkChecks(subject, report.show, report.wanted)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(visit.run())
