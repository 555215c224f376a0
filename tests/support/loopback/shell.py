"""Commands of swarmnet as a person would type them, and what they have done and printed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from peers.lab.processes.demo_report import read_story

PATIENCE_SECONDS = 240.0


class Shell:
    """Runs commands as a person would, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            "PATH": os.environ["PATH"],
            "XDG_STATE_HOME": str(folder / "states"),
            "OMP_NUM_THREADS": "1",
        }
        self.running: list[subprocess.Popen[bytes]] = []

    def _arguments(self, command: str) -> list[str]:
        program, *arguments = shlex.split(command)
        assert program == "swarmnet"
        return [sys.executable, "-m", "peers.cli.main", *arguments]

    def run(self, command: str, patience: float = PATIENCE_SECONDS) -> str:
        done = subprocess.run(
            self._arguments(command), cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=patience, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, command: str) -> None:
        with (self.folder / f"{len(self.running)}.log").open("wb") as log:
            self.running.append(
                subprocess.Popen(
                    self._arguments(command), cwd=self.folder, env=self.environment, stdout=log, stderr=log
                )
            )

    def until(self, condition: Callable[[], bool], what: str, patience: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + patience
        while not condition():
            logs = [path.read_text()[-400:] for path in sorted(self.folder.glob("*.log"))]
            assert all(each.poll() is None for each in self.running), logs
            assert time.monotonic() < deadline, f"{what}: {logs}"
            time.sleep(0.5)

    def stop(self) -> None:
        for each in self.running:
            each.send_signal(signal.SIGTERM)
        for each in self.running:
            each.wait(60.0)


def settled(state: Path) -> int:
    return max(read_story(state).settled, default=-1) if (state / "events.jsonl").is_file() else -1


def loss_of(told: str) -> float:
    (loss,) = re.findall(r"loss ([\d.]+) nats", told)
    return float(loss)
