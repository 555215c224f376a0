"""A new user's first hour, played: real commands, real peers, and a document with what each of them showed.

    scripts/first-hour [--demo-seconds 90] [--train-seconds 60]

It runs in an empty folder with a copy of configs/, and writes docs/first-hour.md and docs/pictures/. A step
that does not show what it must ends the play with a non-zero exit code, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = ROOT / ".venv" / "bin"
QUIET = ["--set", "relay=false", "--set", "nat=false", "--set", "listen=[/ip4/127.0.0.1/tcp/0]"]
"""Loopback only: the files in configs/ listen to the world."""
WORKERS = 4
LOAD = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("model")
print(type(model).__name__, sum(tensor.numel() for tensor in model.parameters()), "parameters")
"""


class Failed(Exception):
    """A step did not show what it must."""


class Hour:
    """The play: a folder, the processes that run in it, and the document that grows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(folder),
                            "COLUMNS": "100", "NO_COLOR": "1"}  # fmt: skip

    def tell(self, text: str) -> None:
        self.lines += [text, ""]

    def title(self, text: str) -> None:
        print(f"== {text}", flush=True)
        self.tell(f"## {text}")

    def show(self, command: str, output: str, last: int = 40) -> None:
        """A command and what it printed, at most the last lines of it."""
        told = output.rstrip().splitlines()
        cut = ["..."] * (len(told) > last)
        text = "\n".join([f"$ {command}", *cut, *told[-last:]])
        self.lines += ["```", self.plain(text), "```", ""]

    def plain(self, text: str) -> str:
        """Without what is of this machine alone."""
        return text.replace(str(self.folder), "~").replace(str(ROOT), "swarmnet").expandtabs()

    def run(
        self, command: list[str], seconds: float, given: str = "", last: int = 40, expect: int = 0
    ) -> str:
        done = subprocess.run(command, cwd=self.folder, env=self.environment, input=given, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)  # fmt: skip
        told = self.written(command)
        self.show(told if not given else f"echo {given.splitlines()[0]!r} | {told}", done.stdout, last)
        if done.returncode != expect:
            raise Failed(f"{told} ended with {done.returncode}, not {expect}:\n{done.stdout[-3000:]}")
        return done.stdout

    def written(self, command: list[str]) -> str:
        shown = [word for word in command if word not in QUIET or word == "--set"]
        text = " ".join(f"'{word}'" if set(word) & set(' {"') else word for word in shown if word != "--set")
        return self.plain(text)

    def start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self.running[name] = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=out, stderr=subprocess.STDOUT
            )

    def said(self, name: str) -> list[dict[str, object]]:
        """The JSON lines that a peer wrote."""
        text = (self.folder / f"{name}.out").read_text(errors="replace")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]

    def until(self, what: str, seconds: float, condition: Callable[[], object]) -> object:
        end = time.monotonic() + seconds
        while not (found := condition()):
            for name, process in self.running.items():
                if process.poll() not in (None, -signal.SIGKILL):
                    said = (self.folder / f"{name}.out").read_text()[-2000:]
                    raise Failed(f"{name} ended while waiting for: {what}\n{said}")
            if time.monotonic() > end:
                raise Failed(f"not within {seconds:g} s: {what}")
            time.sleep(0.2)
        return found

    def close(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def page(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return dict(json.load(answer))


def play(hour: Hour, demo_seconds: int, train_seconds: int, pictures: Path) -> None:
    swarmnet = str(BIN / "swarmnet")
    shutil.copytree(ROOT / "configs", hour.folder / "configs")
    if demo_seconds:
        hour.title("The demo of the README")
        hour.run([swarmnet, "demo", "--seconds", str(demo_seconds)], demo_seconds + 240, last=30)

    hour.title("A run of one's own: publish it, start a bootstrap and an observer")
    hour.run([swarmnet, "publish", "configs/demo-run.yaml"], 60)
    run = hour.folder / "configs" / "demo.run.json"

    def start(name: str, file: str, *settings: str) -> list[str]:
        """A peer from a file of configs/, its state in a folder of its name."""
        command = [swarmnet, "run", f"configs/{file}"]
        for setting in (f"name={name}", f"state=../states/{name}", f"run={run}", *settings):
            command += ["--set", setting]
        hour.start(name, [*command, *QUIET])
        return command

    command = start("bootstrap", "bootstrap.yaml", "metrics.listen=off")
    address = str(hour.until("the bootstrap tells how to join", 60, lambda: join_line(hour)))
    hour.tell("The bootstrap prints the line with which others join:")
    hour.show(hour.written(command), text_of(hour, "bootstrap"))
    way_in = f'bootstrap=["{address}"]'
    start("observer", "observer.yaml", way_in, "metrics.listen=off")

    hour.title("Four workers join")
    everybody = [f"worker-{number}" for number in range(1, WORKERS + 1)]
    for name in everybody:
        command = start(name, "demo-peer.yaml", way_in, "checkpoint_seconds=5")
    hour.until("all four train", 120, lambda: all(trains(hour, name) for name in everybody))
    hour.show(hour.written(command), text_of(hour, "worker-4"))
    time.sleep(train_seconds)  # Training is what is waited for: the model is to be taken home below.

    hour.title("Is this machine fit? The doctor")
    done = hour.run([swarmnet, "doctor", "--run", str(run), "--bootstrap", address], 120)
    if "bootstrap" not in done:
        raise Failed("the doctor said nothing of the bootstrap")

    hour.title("Watching: top on one peer, and the observer's page for everybody")
    hour.run([swarmnet, "top", "states/worker-1"], 30)
    hour.run([swarmnet, "top", "--run", str(run), "--bootstrap", address], 60)
    observed = "http://127.0.0.1:9420/swarm.json"
    hour.until("the observer sees four workers", 60, lambda: stages_of(page(observed)) == WORKERS)
    photograph(hour, pictures / "observer.png", "1200,1400", "The observer's page with four workers:")

    hour.title("One worker is killed: the others go on, its stage thins on the page")
    victim, survivor = of_one_stage(hour, everybody)
    rounds = newest_round(hour, survivor)
    hour.running[victim].send_signal(signal.SIGKILL)
    hour.tell(f"{victim} gets SIGKILL; {survivor} holds the same stage.")
    killed = time.monotonic()
    hour.until("the observer sees three", 30, lambda: stages_of(page(observed)) == WORKERS - 1)
    thinned = time.monotonic() - killed
    hour.until("rounds go on", 60, lambda: newest_round(hour, survivor) > rounds)
    hour.tell(f"The page showed it {thinned:.1f} s after the SIGKILL, and the rounds went on.")
    hour.run([swarmnet, "top", f"states/{survivor}"], 30)

    hour.title("It comes back with the same command, one worker is paused and resumed")
    hour.show(hour.written(start(victim, "demo-peer.yaml", way_in, "checkpoint_seconds=5")), "")
    hour.until("it trains again", 120, lambda: trains(hour, victim))
    hour.show(f"cat {victim}.out    # what it said", text_of(hour, victim))
    hour.run([swarmnet, "pause", f"states/{survivor}"], 60)
    hour.run([swarmnet, "resume", f"states/{survivor}"], 60)
    hour.run([swarmnet, "me", f"states/{survivor}"], 60)

    hour.title("Taking the model home")
    for name in everybody:
        hour.run([swarmnet, "leave", f"states/{name}"], 60)
    hour.run([swarmnet, "export", "--from", "states", "--hf", "model"], 180)
    hour.show("cat model/README.md", (hour.folder / "model" / "README.md").read_text())
    loaded = hour.run([str(BIN / "python"), "-c", LOAD.strip()], 180)
    if "LlamaForCausalLM" not in loaded:
        raise Failed("transformers did not load the model")
    hour.run([swarmnet, "evaluate", "--from", "states"], 180)
    hour.run([swarmnet, "chat", "--from", "model"], 120, given="def main(self):\n/quit\n")


def text_of(hour: Hour, name: str) -> str:
    return "\n".join(str(line["text"]) for line in hour.said(name) if "text" in line)


def join_line(hour: Hour) -> str:
    for line in hour.said("bootstrap"):
        if line["event"] == "run":
            return str(line["text"]).split("--bootstrap ")[1].split()[0]
    return ""


def trains(hour: Hour, name: str) -> bool:
    return any(line["event"] == "trains" for line in hour.said(name))


def newest_round(hour: Hour, name: str) -> int:
    rounds = [line["round"] for line in hour.said(name) if line["event"] == "status" and "round" in line]
    return int(str(rounds[-1])) if rounds else -1


def of_one_stage(hour: Hour, names: list[str]) -> tuple[str, str]:
    """Two workers that hold the same stage."""
    held: dict[int, str] = {}
    for name in names:
        stage = [line["stage"] for line in hour.said(name) if line["event"] == "status" and "stage" in line][
            -1
        ]
        if int(str(stage)) in held:
            return name, held[int(str(stage))]
        held[int(str(stage))] = name
    raise Failed("no two workers hold the same stage")


def stages_of(swarm: dict[str, object]) -> int:
    """How many workers the observer counts."""
    stages = swarm["stages"]
    assert isinstance(stages, list)
    return sum(int(stage["peers"]) for stage in stages)


def photograph(hour: Hour, picture: Path, size: str, words: str) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        hour.tell("(No picture: chromium is not installed.)")
        return
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={size}",
         f"--screenshot={picture}",
         "--virtual-time-budget=4000", "http://127.0.0.1:9420/"],
        cwd=hour.folder, env=hour.environment, check=True, capture_output=True, timeout=90,
    )  # fmt: skip
    hour.tell(words)
    hour.tell(f"![the observer's page](pictures/{picture.name})")


def main() -> int:
    options = argparse.ArgumentParser(
        description="Play a new user's first hour and write docs/first-hour.md."
    )
    options.add_argument("--demo-seconds", type=int, default=90, help="0: leave it out")
    options.add_argument("--train-seconds", type=int, default=60)
    options.add_argument(
        "--out", type=Path, default=ROOT / "docs", help="Folder of first-hour.md and pictures/"
    )
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        hour = Hour(Path(folder))
        (hour.folder / "pictures").mkdir()
        hour.tell("# The first hour")
        hour.tell(
            "Made by `scripts/first-hour`, which plays all of it and fails where a step does not show what "
            "it must; do not edit. Options that only keep the peers on 127.0.0.1 are left out."
        )
        try:
            play(hour, given.demo_seconds, given.train_seconds, hour.folder / "pictures")
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
        finally:
            hour.close()
        (given.out / "pictures").mkdir(exist_ok=True)
        for picture in (hour.folder / "pictures").iterdir():
            shutil.copy(picture, given.out / "pictures" / picture.name)
        (given.out / "first-hour.md").write_text("\n".join(hour.lines))
    print(f"played; {given.out / 'first-hour.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
