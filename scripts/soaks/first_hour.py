"""A new user's first hour, played: real commands, real peers, and a document with what each of them showed.

    scripts/first-hour [--demo-seconds 90] [--train-seconds 60]

It runs in an empty folder with a copy of configs/, and writes docs/first-hour.md and docs/pictures/. A step
that does not show what it must ends the play with a non-zero exit code, and nothing is written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from browser import Browser

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv" / "bin"
QUIET = ["--set", "relay=false", "--set", "nat=false", "--set", "listen=[/ip4/127.0.0.1/tcp/0]"]
"""Loopback only: the files in configs/ listen to the world."""
SWARMNET = str(BIN / "swarmnet")
MAX_COLUMNS = 110
"""Length at which the page cuts a line of output."""
WORKERS = 4
OBSERVED = "http://127.0.0.1:9420/swarm.json"
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
        """Append a paragraph to the page."""
        self.lines += [text if text.startswith(("#", "!")) else textwrap.fill(text, 100), ""]

    def title(self, text: str) -> None:
        print(f"== {text}", flush=True)
        self.tell(f"## {text}")

    def show(self, command: str, output: str, last: int = 40, first: int = 0) -> None:
        """Append a command and its output to the page: the `first` lines or, if that is 0, the `last` lines.

        Lines are cut at MAX_COLUMNS.
        """
        lines = [
            line if len(line) <= MAX_COLUMNS else line[:MAX_COLUMNS] + " ..."
            for line in self.plain(output).rstrip().splitlines()
        ]
        if first:
            shown = lines[:first] + ["..."] * (len(lines) > first)
        else:
            shown = ["..."] * (len(lines) > last) + lines[-last:]
        self.lines += ["```", "\n".join([self.plain(f"$ {command}"), *shown]), "```", ""]

    def plain(self, text: str) -> str:
        """Without what is of this machine alone."""
        text = text.replace(f"{BIN}/", "").replace(str(self.folder), "~").replace(str(ROOT), "swarmnet")
        return text.expandtabs()

    def run(
        self,
        command: list[str],
        seconds: float,
        given: str = "",
        last: int = 40,
        expect: int = 0,
        first: int = 0,
    ) -> str:
        done = subprocess.run(command, cwd=self.folder, env=self.environment, input=given, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)  # fmt: skip
        told = self.written(command)
        self.show(told if not given else f"echo {given.splitlines()[0]!r} | {told}", done.stdout, last, first)
        if done.returncode != expect:
            raise Failed(f"{told} ended with {done.returncode}, not {expect}:\n{done.stdout[-3000:]}")
        return done.stdout

    def written(self, command: list[str]) -> str:
        """As a person would type it, without what only keeps it on 127.0.0.1."""
        words = list(command)
        while "--set" in words and words[-2:][0] == "--set" and words[-1] in QUIET:
            del words[-2:]
        quoted = [f"'{word}'" if set(word) & set(' {"') else word for word in words]
        return self.plain(" ".join(quoted))

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
                last = [f"{name}: {(self.said(name) or [{}])[-1]}" for name in self.running]
                raise Failed("\n".join([f"not within {seconds:g} s: {what}", *last]))
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


class Play:
    """The steps, in their order; each shows its commands and checks what they did."""

    def __init__(self, hour: Hour, train_seconds: int) -> None:
        self.hour = hour
        self.train_seconds = train_seconds
        self.run = hour.folder / "configs" / "demo.run.json"
        self.bootstrap = ""
        self.workers = [f"worker-{number}" for number in range(1, WORKERS + 1)]

    def demo(self, seconds: int) -> None:
        self.hour.title("Watch the demo")
        self.hour.tell(
            "`swarmnet demo` trains with six peers on this computer. It kills one peer and starts a new one. "
            "You should see:"
        )
        self.hour.run([SWARMNET, "demo", "--seconds", str(seconds)], seconds + 240, last=28)

    def start(self, name: str, file: str, *settings: str) -> str:
        """A peer from a file of configs/, its state in a folder of its name. What a person would type."""
        command = [SWARMNET, "run", f"configs/{file}"]
        for setting in (f"name={name}", f"state=../states/{name}", f"run={self.run}", *settings):
            command += ["--set", setting]
        self.hour.start(name, [*command, *QUIET])
        return self.hour.written(command)

    def worker(self, name: str) -> str:
        return self.start(name, "demo-peer.yaml", self.way_in, "checkpoint_seconds=5")

    @property
    def way_in(self) -> str:
        return f'bootstrap=["{self.bootstrap}"]'

    def publish(self) -> None:
        hour = self.hour
        hour.title("Publish a run and start a bootstrap")
        hour.tell("`swarmnet publish` signs a run with your key and prints the run's id:")
        hour.run([SWARMNET, "publish", "configs/demo-run.yaml"], 60)
        command = self.start("bootstrap", "bootstrap.yaml", "metrics.listen=off")
        self.bootstrap = str(hour.until("the bootstrap tells how to join", 60, lambda: join_line(hour)))
        hour.tell("The bootstrap (a peer through which others join) prints the command to join the run:")
        hour.show(command, text_of(hour, "bootstrap"))
        hour.tell("Start an observer (a peer with a web page) in the same way, from `configs/observer.yaml`.")
        self.start("observer", "observer.yaml", self.way_in, "metrics.listen=off")
        hour.until("the observer's page answers", 60, answers)

    def train(self) -> None:
        hour = self.hour
        hour.title("Start four workers")
        hour.tell(
            "Each worker chooses the stage of the model that it trains. This is the output of the fourth "
            "worker:"
        )
        for name in self.workers:
            command = self.worker(name)
        hour.until("all four train", 180, lambda: all(trains(hour, name) for name in self.workers))
        # Begun in the same second they may draw the same stages: then one moves to the stage without anybody.
        hour.until("every stage has somebody who trains", 180, every_stage_is_held)
        hour.show(command, text_of(hour, self.workers[-1]))
        time.sleep(self.train_seconds)  # Training is what is waited for: the model is to be taken home.

    def doctor(self) -> None:
        self.hour.title("Check the computer")
        self.hour.tell(
            "`swarmnet doctor` prints a fix for each problem. A peer works in spite of a warning (`warn`)."
        )
        self.hour.run(
            [SWARMNET, "doctor", "--run", str(self.run), "--bootstrap", self.bootstrap], 180, last=9
        )

    def watch(self, pictures: Path) -> None:
        hour = self.hour
        hour.title("Watch one peer, and the whole swarm")
        hour.tell("`swarmnet top` shows one peer of this computer and the peers linked to it:")
        hour.run([SWARMNET, "top", f"states/{self.workers[0]}"], 60, first=16)
        hour.tell(
            "With `--run`, `swarmnet top` shows all peers of the run, as their signed records describe them:"
        )
        hour.run([SWARMNET, "top", "--run", str(self.run), "--bootstrap", self.bootstrap], 90)
        hour.until("the observer sees four workers", 60, lambda: counted_workers() == WORKERS)
        photograph(
            hour, pictures / "observer.png", "The observer's page shows the peers of the run in a browser:"
        )

    def kill(self) -> tuple[str, str]:
        """(who was killed, who holds the same stage)."""
        hour = self.hour
        hour.title("Kill a worker")
        pair = hour.until("two workers hold the same stage", 60, of_one_stage)
        assert isinstance(pair, list)
        victim, survivor = pair
        rounds = newest_round(hour, survivor)
        hour.running[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        hour.tell(f"{victim} is killed with SIGKILL. {survivor} trains the same stage and continues.")
        hour.until("the observer sees three", 60, lambda: counted_workers() == WORKERS - 1)
        thinned = time.monotonic() - killed
        hour.until("rounds continue", 130, lambda: newest_round(hour, survivor) > rounds)
        hour.tell(
            f"The observer's page showed {thinned:.1f} s after the kill that a worker was missing. "
            "`swarmnet top` should show the killed peer as `gone`:"
        )
        hour.run([SWARMNET, "top", f"states/{survivor}"], 60, first=10)
        return victim, survivor

    def come_back(self, victim: str, survivor: str) -> None:
        hour = self.hour
        hour.title("Start it again; pause and resume another")
        hour.tell(f"The command that first started {victim} also restarts it, from its checkpoint:")
        command = self.worker(victim)
        hour.until("it trains again", 120, lambda: trains(hour, victim))
        hour.show(command, text_of(hour, victim), last=5)
        hour.run([SWARMNET, "pause", f"states/{survivor}"], 60)
        hour.run([SWARMNET, "resume", f"states/{survivor}"], 60)
        hour.run([SWARMNET, "credit", f"states/{survivor}"], 60)

    def take_home(self) -> None:
        hour = self.hour
        hour.title("Take the model home")
        hour.tell(f"Stop each worker with `swarmnet leave`, for example {self.workers[0]}:")
        for name in self.workers:
            before = len(hour.lines)
            hour.run([SWARMNET, "leave", f"states/{name}"], 90)
            del hour.running[name]
            if name != self.workers[0]:
                del hour.lines[before:]
        hour.tell(
            "`swarmnet export` writes the model, checks its logits with transformers, and scores it on "
            "held-out text:"
        )
        hour.run([SWARMNET, "export", "--from", "states", "--hf", "model"], 240)
        hour.tell("The folder of the exported model contains a model card:")
        hour.show("cat model/README.md", (hour.folder / "model" / "README.md").read_text(), first=22)
        loaded = hour.run([str(BIN / "python"), "-c", LOAD.strip()], 180)
        if "LlamaForCausalLM" not in loaded:
            raise Failed("transformers did not load the model")
        hour.run([SWARMNET, "evaluate", "--from", "states"], 240)


def text_of(hour: Hour, name: str) -> str:
    return "\n".join(str(line["text"]) for line in hour.said(name) if "text" in line)


def join_line(hour: Hour) -> str:
    for line in hour.said("bootstrap"):
        if line["event"] == "run":
            return str(line["text"]).rpartition("@")[2]
    return ""


def trains(hour: Hour, name: str) -> bool:
    return any(line["event"] == "trains" for line in hour.said(name))


def newest_round(hour: Hour, name: str) -> int:
    rounds = [line["round"] for line in hour.said(name) if line["event"] == "status" and "round" in line]
    return int(str(rounds[-1])) if rounds else -1


def answers() -> bool:
    """Whether the observer's page does."""
    try:
        page(OBSERVED)
    except OSError:
        return False
    return True


def holders() -> list[list[str]]:
    """Of each stage, the workers that train it, as the observer's page shows them."""
    seen = page(OBSERVED)
    stages, rows = seen["stages"], seen["rows"]
    assert isinstance(stages, list)
    assert isinstance(rows, list)
    return [
        [str(row["name"]) for row in rows if row["stage"] == stage["stage"] and row["state"] == "training"]
        for stage in stages
    ]


def every_stage_is_held() -> bool:
    return all(holders())


def of_one_stage() -> list[str]:
    """Two workers that hold the same stage; empty if there are none."""
    return next((names[:2] for names in holders() if len(names) > 1), [])


def counted_workers() -> int:
    """How many workers the observer counts."""
    stages = page(OBSERVED)["stages"]
    assert isinstance(stages, list)
    return sum(int(stage["peers"]) for stage in stages)


async def _photograph(picture: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with Browser(Path(folder)) as browser:
            await browser.look_like(1000, 800)
            await browser.open("http://127.0.0.1:9420/")
            await browser.until("document.querySelectorAll('#rows tr').length >= 4", 30.0)
            await browser.picture(picture)


def photograph(hour: Hour, picture: Path, words: str) -> None:
    if shutil.which("chromium") is None:
        hour.tell("(No picture: chromium is not installed.)")
        return
    asyncio.run(_photograph(picture))
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
            "This page shows the commands of a first hour with their real output, on one computer. The "
            "script `scripts/first-hour` writes the page; do not edit it. Long lines are cut, and options "
            "that only keep the peers on 127.0.0.1 are left out."
        )
        try:
            shutil.copytree(ROOT / "configs", hour.folder / "configs")
            play = Play(hour, given.train_seconds)
            if given.demo_seconds:
                play.demo(given.demo_seconds)
            play.publish()
            play.train()
            play.doctor()
            play.watch(hour.folder / "pictures")
            play.come_back(*play.kill())
            play.take_home()
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
        finally:
            hour.close()
        (given.out / "pictures").mkdir(parents=True, exist_ok=True)
        for picture in (hour.folder / "pictures").iterdir():
            shutil.copy(picture, given.out / "pictures" / picture.name)
        (given.out / "first-hour.md").write_text("\n".join(hour.lines))
    print(f"played; {given.out / 'first-hour.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
