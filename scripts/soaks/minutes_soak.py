"""How long a volunteer and a creator wait: the commands that they type, in a terminal, with seconds per step.

    scripts/soak minutes [--only volunteer]

A volunteer: from the link to the first counted round, in a run that three peers train. A creator: from a
folder of text to three peers that train. Each person has a home folder on this computer, and answers what
`swarmnet join` asks. Peers reach each other on 127.0.0.1. Prints a table of each, and ends with 1 if one
takes longer than promised.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.telemetry import event_log, log_events

ROOT = Path(__file__).parents[2]
SWARMNET = (sys.executable, "-m", "peers.cli.main")
QUIET = ("--set", "listen=[/ip4/127.0.0.1/tcp/0]", "--set", "relay=false", "--set", "nat=false")
"""Only these options are not what a person would type: they keep a peer on 127.0.0.1."""
PROMISED_SECONDS = {"volunteer": 180.0, "creator": 600.0}
STEP_SECONDS = 300.0
"""Time limit of one step."""
LOOK_SECONDS = 0.2
TEXT, HELD_OUT = "docs/*.md", "lab.md"
"""Text of the creator's run, and the file that is kept from it."""


class TooLate(Exception):
    """A step did not come to its end."""


class Person:
    """Somebody with a home folder, who types commands in a terminal."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
        self.environment = {
            **kept,
            "HOME": str(home),
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.said = ""
        """What the command has printed."""

    def type(self, *arguments: str) -> None:
        """Start `swarmnet` with these arguments in a new terminal."""
        self._terminal, inner = pty.openpty()
        self.process = subprocess.Popen(
            [*SWARMNET, *arguments], cwd=self.home, env=self.environment, stdin=inner, stdout=inner,
            stderr=inner, start_new_session=True,
        )  # fmt: skip
        os.close(inner)

    def answer(self, words: str) -> None:
        os.write(self._terminal, words.encode() + b"\n")

    def reads(self, pattern: str) -> str:
        """Return what the terminal shows of this pattern; empty: not yet."""
        while select.select([self._terminal], [], [], 0)[0]:
            try:
                self.said += os.read(self._terminal, 65536).decode(errors="replace").replace("\r", "")
            except OSError:  # Linux, when the command has ended.
                break
        found = re.search(pattern, self.said)
        return found[0] if found else ""

    def has_ended(self) -> bool:
        """Return whether the command has ended. Raises TooLate if it has failed."""
        assert self.process is not None
        self.reads("")
        code = self.process.poll()
        if code:
            raise TooLate(f"{self.process.args!r} ended with {code}:\n{self.said[-2000:]}")
        return code == 0

    def leave(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def events(self, state: Path | None = None) -> list[event_log.LogLine]:
        """Return the event log of the peer that this person has joined with, or of the one in `state`."""
        logs = (self.home / ".local/state/swarmnet").glob("*/events.jsonl")
        path = state / "events.jsonl" if state is not None else next(logs, None)
        return list(event_log.read(path)) if path is not None and path.exists() else []


class Play:
    """The steps of one person, with the seconds that each took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.people: list[Person] = []
        self.steps: list[tuple[str, float]] = []
        self.began = time.monotonic()

    def person(self, name: str) -> Person:
        self.people.append(Person(self.folder / name))
        return self.people[-1]

    def begin(self) -> None:
        self.began = time.monotonic()
        self.steps = []

    def until(self, what: str, condition: Callable[[], object]) -> Any:
        """Wait, and note when it was so. Returns the condition's value. Raises TooLate."""
        end = time.monotonic() + STEP_SECONDS
        while not (found := condition()):
            for person in self.people:
                if person.process is not None and person.process.poll():
                    raise TooLate(f"{person.process.args!r} ended:\n{person.said[-2000:]}")
                if person.process is not None:
                    person.reads("")  # Else a full terminal would stop the command.
            if time.monotonic() > end:
                raise TooLate(f"not within {STEP_SECONDS:g} s: {what}\n{self.people[0].said[-3000:]}")
            time.sleep(LOOK_SECONDS)
        self.steps.append((what, time.monotonic() - self.began))
        print(f"{self.steps[-1][1]:6.1f} s  {what}", file=sys.stderr, flush=True)
        return found

    def join(self, person: Person, link: str) -> None:
        """Type the link, a name and yes."""
        person.type("join", link, *QUIET)
        self.until(
            f"{person.home.name}: `swarmnet join LINK` asks for a name", lambda: person.reads("Your name")
        )
        person.answer(person.home.name)
        self.until("it shows what it will use, and asks once", lambda: person.reads(r"Join\?"))
        person.answer("y")
        self.until("the peer is in step with its stage", lambda: person.reads("in step with its stage"))

    def table(self) -> list[str]:
        rows, before = ["| step | seconds | since the start |", "|---|---:|---:|"], 0.0
        for what, at in self.steps:
            rows.append(f"| {what} | {at - before:.1f} | {at:.1f} |")
            before = at
        return rows

    def close(self) -> None:
        for person in reversed(self.people):
            person.leave()
        for person in self.people:
            if person.process is not None:
                try:
                    person.process.wait(120.0)
                except subprocess.TimeoutExpired:
                    person.process.kill()


def host(play: Play, run: str, peers: int) -> tuple[Person, str, Callable[[], dict[str, Any]]]:
    """Host a run. Returns its creator, its link, and what reads its page."""
    creator, port, page = play.people[0], free_port(), f"127.0.0.1:{free_port()}"
    creator.type("host", run, "--address", f"127.0.0.1:{port}", "--page", page, "--peers", str(peers))
    link = play.until("`swarmnet host` prints the link", lambda: creator.reads(r"swarmnet:[0-9a-f]{64}@\S+"))

    def swarm() -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://{page}/swarm.json", timeout=5) as answer:
                return dict(json.load(answer))
        except OSError:
            return {}

    return creator, link, swarm


def free_port() -> int:
    """Return the first of three free ports; a host listens on three."""
    while True:
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
                third.bind(("127.0.0.1", port + 2))
            except (OSError, OverflowError):
                continue
            return port


def has_counted(events: list[event_log.LogLine]) -> bool:
    """Return whether an own contribution has settled."""
    made = {line.event.id for line in events if isinstance(line.event, log_events.ContributionMade)}
    settled = (line.event.ids for line in events if isinstance(line.event, log_events.Settled))
    return any(made.intersection(ids) for ids in settled)


def has_receipt(events: list[event_log.LogLine]) -> bool:
    return any(isinstance(line.event, log_events.ReceiptArrived) for line in events)


def is_on_board(swarm: dict[str, Any], name: str) -> bool:
    return any(entry[1] == name and entry[2] > 0 for entry in swarm.get("contributors", ()))


def volunteer(play: Play) -> None:
    creator = play.person("creator")
    shutil.copytree(ROOT / "configs", creator.home / "configs")
    _, link, swarm = host(play, "configs/demo-run.yaml", 3)
    play.until("three peers train", lambda: swarm().get("peers", 0) >= 3 and swarm()["round"])
    ada = play.person("ada")
    play.begin()
    play.join(ada, link)
    play.until("her first contribution has settled: a counted round", lambda: has_counted(ada.events()))
    play.until("another peer has signed a receipt", lambda: has_receipt(ada.events()))
    play.until("the page's leaderboard counts her", lambda: is_on_board(swarm(), "ada"))
    play.until("the page has a held-out loss", lambda: swarm().get("eval_loss"))


def creator(play: Play) -> None:
    owner = play.person("owner")
    (owner.home / "letters").mkdir()
    for page in ROOT.glob(TEXT):
        shutil.copy(page, owner.home / "letters")
    play.begin()
    owner.type("new", "tale", "--text", "letters")
    play.until("`swarmnet new tale --text FOLDER` proposes a run", owner.has_ended)
    shutil.move(owner.home / "letters" / HELD_OUT, owner.home / "tale/held-out.md")
    run_file = owner.home / "tale/tale.yaml"
    # A creator states these, so that peers may send the text to others.
    text = run_file.read_text().replace("# licence: unknown", "licence: MIT")
    run_file.write_text(text.replace("# kind: other ", "kind: public "))
    _, link, swarm = host(play, "tale/tale.yaml", 1)
    people = [play.person(name) for name in ("ben", "cleo")]
    for person in people:
        play.join(person, link)
    state = owner.home / "tale/tale-host/peer-1"
    play.until("a contribution of each has settled", lambda: all(
        has_counted(events) for events in (owner.events(state), *(person.events() for person in people))
    ))  # fmt: skip
    play.until("the page has a held-out loss", lambda: swarm().get("eval_loss"))


def main() -> int:
    options = argparse.ArgumentParser(description="Time what a volunteer and a creator wait for.")
    options.add_argument("--only", choices=sorted(PROMISED_SECONDS))
    arguments = options.parse_args()
    late = []
    for name, story in (("volunteer", volunteer), ("creator", creator)):
        if arguments.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(prefix="minutes-") as folder:
            play = Play(Path(folder))
            try:
                story(play)
            except TooLate as error:
                print(f"FAILED: {name}: {error}", file=sys.stderr)
                return 1
            finally:
                play.close()
        print("\n".join(["", f"{name}, at most {PROMISED_SECONDS[name]:g} s:", "", *play.table()]))
        first = next(at for what, at in play.steps if "settled" in what)
        late += [name] * (first > PROMISED_SECONDS[name])
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
