"""A lab's page, played: docs/lab.md has the files, real commands fill in what they showed.

    scripts/first-hour lab [--train-seconds 30]

It runs in an empty folder. A step that does not show what it must ends the play with a non-zero exit code,
and nothing is written.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from first_hour import BIN, ROOT, SWARMNET, Failed, Hour, newest_round, text_of, trains

PAGE = ROOT / "docs" / "lab.md"
FILE = re.compile(r"<!-- file (\S+) -->\n```yaml\n(.*?)```\n", re.DOTALL)
PLAYED = re.compile(r"(<!-- played (\S+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
HERE = {"192.0.2.7": "127.0.0.1", "/ip4/0.0.0.0/": "/ip4/127.0.0.1/"}
"""What the page says of machines, and what it is where all of them are this one."""
HELD_OUT = "consistency.md"
OWN = ("--tokenizer", "tokenizer.json", "--eval-text", "heldout.md")
NODES = ("node-1", "node-2", "node-3")
RUN = "lab.run.json"
LOAD = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
print(type(model).__name__, tokenizer.eos_token, model.config.eos_token_id)
print(tokenizer.decode(model.generate(**tokenizer("A peer", return_tensors="pt"), max_new_tokens=16)[0]))
"""
FIXED = """The rate follows the schedule in the run file, which cannot be changed after publishing."""
CHANGED = """The owner can multiply the scheduled learning rate by a factor. All peers apply the factor from
the same future round (`--from-round`)."""


def files_of(page: str) -> dict[str, str]:
    """The files that the page shows, by their names."""
    return dict(FILE.findall(page))


class Lab(Hour):
    """The page's play; what it showed lies in `shown`, by the names in the page."""

    def __init__(self, folder: Path, page: str) -> None:
        super().__init__(folder)
        self.page = page
        self.shown: dict[str, str] = {}
        self.address = ""
        self.environment["SWARMNET__METRICS__LISTEN"] = "127.0.0.1:0"  # One machine has one port 9410.
        self.environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

    def plain(self, text: str) -> str:
        text = re.sub(r"127\.0\.0\.1:\d+/metrics", "127.0.0.1:9410/metrics", super().plain(text))
        text = text.replace("```", "'''")  # A generated text may contain the fence that it stands in.
        return text.replace("127.0.0.1/tcp/3133", "192.0.2.7/tcp/3133")

    def place(self, name: str) -> None:
        """What was told and shown since the last one stands there."""
        print(f"== {name}", flush=True)
        self.shown[name] = "\n".join(self.lines)
        self.lines = []

    def swarmnet(self, *words: str, seconds: float = 240, last: int = 40) -> str:
        return self.run([SWARMNET, *words], seconds, last=last)

    def lay_out(self) -> None:
        """The text and the files, as a person would have them."""
        (self.folder / "text").mkdir()
        for page in (ROOT / "docs").glob("*.md"):
            if page == PAGE:  # It shows the end of text, which no document may contain.
                continue
            shutil.copy(page, self.folder / ("heldout.md" if page.name == HELD_OUT else f"text/{page.name}"))
        self.write("lab.yaml", "boot.yaml")

    def write(self, *names: str) -> None:
        for name in names:
            text = files_of(self.page)[name].replace("ADDRESS", self.address)
            for said, meant in HERE.items():
                text = text.replace(said, meant)
            (self.folder / name).write_text(text)

    def prepare(self) -> None:
        self.swarmnet("tokenizer", "text", "--vocab-size", "1024")
        self.place("tokenizer")
        self.swarmnet("config", "check", "lab.yaml")
        self.swarmnet("publish", "lab.yaml")
        self.place("publish")
        told = self.swarmnet("identity", "boot.yaml")
        self.address = told.split("address  ")[1].split()[0]
        self.write(*(f"{name}.yaml" for name in NODES))
        self.place("identity")

    def start_all(self) -> None:
        for name in ("boot", *NODES):
            self.start(name, [SWARMNET, "run", f"{name}.yaml"])
        self.until("all three train", 300, lambda: all(trains(self, name) for name in NODES))

    def train(self, seconds: int) -> None:
        self.start_all()
        for name in ("boot", NODES[0]):
            self.show(f"swarmnet run {name}.yaml", text_of(self, name))
        self.place("start")
        first = newest_round(self, NODES[0])
        time.sleep(seconds)  # Training is what is waited for.
        self.until("rounds go on", 120, lambda: newest_round(self, NODES[0]) > first + 20)
        self.until("every stage has a checkpoint", 120, lambda: len(self.checkpoints()) == len(NODES))

    def checkpoints(self) -> set[str]:
        """Which nodes have written one."""
        return {path.parts[-3] for path in self.folder.glob("states/*/checkpoints/stage-*.safetensors")}

    def watch(self) -> None:
        self.swarmnet("top", "--run", RUN, "--bootstrap", self.address)
        self.swarmnet("evaluate", "--from", "states", *OWN)
        self.place("watch")

    def rate(self) -> None:
        asked = [SWARMNET, "order", "rate", "--help"]
        if subprocess.run(asked, env=self.environment, capture_output=True, timeout=60).returncode == 0:
            self.tell(CHANGED)
            self.swarmnet("order", "rate", RUN, "0.5", "--bootstrap", self.address)
            self.swarmnet("orders", RUN, "--bootstrap", self.address)
        else:
            self.tell(FIXED)
        self.place("rate")

    def resume(self) -> None:
        reached = newest_round(self, NODES[0])
        for process in self.running.values():
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        self.start_all()
        self.until("rounds go on", 120, lambda: newest_round(self, NODES[0]) > reached)
        self.show("swarmnet run node-1.yaml", text_of(self, NODES[0]))
        self.place("resume")

    def take_home(self) -> None:
        for name in NODES:
            self.swarmnet("leave", f"states/{name}")
            del self.running[name]
        self.swarmnet("export", "--from", "states", "--hf", "model", *OWN)
        loaded = self.run([str(BIN / "python"), "-c", LOAD.strip()], 240)
        if "LlamaForCausalLM <|endoftext|>" not in loaded:
            raise Failed("transformers did not load the model with its end of text")
        self.place("export")

    def filled(self) -> str:
        """The page with what was shown."""
        missing = {name for _, name, _ in PLAYED.findall(self.page)} ^ self.shown.keys()
        if missing:
            raise Failed(f"the page and the play differ in {missing}")
        return PLAYED.sub(lambda found: f"{found[1]}{self.shown[found[2]]}{found[3]}", self.page)


def main() -> int:
    options = argparse.ArgumentParser(description="Play a lab's page and write docs/lab.md.")
    options.add_argument("--train-seconds", type=int, default=30)
    options.add_argument("--out", type=Path, default=PAGE)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        lab = Lab(Path(folder), PAGE.read_text())
        try:
            lab.lay_out()
            lab.prepare()
            lab.train(given.train_seconds)
            lab.watch()
            lab.rate()
            lab.resume()
            lab.take_home()
            given.out.write_text(lab.filled())
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
        finally:
            lab.close()
    print(f"played; {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
