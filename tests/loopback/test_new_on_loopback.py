"""From a folder of text to three peers that train, by the commands that `swarmnet new` prints alone."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chats import VOCABULARY, chat_folder, riddles, write_lines
from public_models import LLAMA, save

from peers.lab.processes.demo_report import read_story

pytestmark = [pytest.mark.loopback, pytest.mark.soak, pytest.mark.timeout(900)]
PATIENCE_SECONDS = 240.0
ROUNDS = 20


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

    def run(self, command: str) -> str:
        done = subprocess.run(
            self._arguments(command), cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=PATIENCE_SECONDS, check=False,
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

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
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


@pytest.fixture
def shell(tmp_path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.stop()


def settled(state: Path) -> int:
    return max(read_story(state).settled, default=-1) if (state / "events.jsonl").is_file() else -1


def loss_of(told: str) -> float:
    (loss,) = re.findall(r"loss ([\d.]+) nats", told)
    return float(loss)


@pytest.mark.parametrize("tuned", [False, True], ids=["from a text", "a fine-tuning"])
def test_four_commands_lead_to_three_peers_that_train(shell, unused_port, tuned):
    folder, options = shell.folder, ""
    (folder / "text").mkdir()
    if tuned:
        save(folder / "base", replace(LLAMA, vocab_size=VOCABULARY))
        chat_folder(folder / "base")
        write_lines(folder / "text" / "talks.jsonl", riddles(3000))
        write_lines(folder / "held.jsonl", riddles(100, seed=1))
        options = " --from base --lora 8"
    else:
        (folder / "text" / "a.txt").write_text("".join(f"line {n} of a text\n" for n in range(20_000)))
    began = time.monotonic()
    told = shell.run(f"swarmnet new tale --text text --address 127.0.0.1:{unused_port} --hours 0.1{options}")
    publish, bootstrap, join = re.findall(r"^next   (.*)$", told, re.MULTILINE)
    shell.run(publish)
    shell.start(bootstrap)
    states = [folder / f"peer-{number}" for number in range(3)]
    for state in states:
        shell.start(f"{join} --state {state}")
    shell.until(lambda: min(map(settled, states)) >= 0, "all three train")
    print(f"all three train after {time.monotonic() - began:.0f} s")
    if not tuned:
        return
    before = loss_of(shell.run("swarmnet evaluate --from tale/model --eval-text held.jsonl --answers"))
    shell.until(lambda: min(map(settled, states)) >= ROUNDS, "rounds settle")
    shell.stop()
    shell.running.clear()
    tokenizer = "--tokenizer tale/tokenizer.json"
    shell.run(f"swarmnet export --hf tale-model --from peer-0 {tokenizer} --no-score")
    after = loss_of(shell.run("swarmnet evaluate --from tale-model --eval-text held.jsonl"))
    print(f"answers: {before:.3f} nats per token before, {after:.3f} after")
    assert after < before - 1.0
