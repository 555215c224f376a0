"""Real processes: the only holder of a stage leaves, a newcomer takes the stage, and the holder comes back.

    scripts/soak standstill [--elsewhere]

A bootstrap and two peers of two stages on 127.0.0.1, each started with `swarmnet join` and a home of its own.
The holder comes back with the run's first digits alone; with `--elsewhere` it is sent to the other stage, and
must move back by its own decision. Prints a JSON object: what `me`, `top` and `top --run` say while the swarm
stands still, and seconds from the holder's start until it, the newcomer and the other stage settle rounds.
Ends with 1 if that took more than the promised time, or a command does not name the stuck stage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from processes import QUIET, times, until

from peers.config.run_file import load_signed, publish
from peers.lab.processes.local_processes import DemoPeer, start
from peers.telemetry import event_log
from protocols.signed.identity import load_or_create

PROMISED_SECONDS, MOVED_SECONDS = 30.0, 120.0
"""For a holder that chooses its stage itself, and for one that is sent elsewhere: it looks around, announces
its move and fetches nothing."""
ROUNDS = 40
"""Settled before the holder leaves: by then its disk has a checkpoint."""
WAIT_SECONDS = 15.0
"""From the newcomer's start to the holder's, after the newcomer has begun to wait."""
SWARMNET = (sys.executable, "-m", "peers.cli.main")
RUN = """
name: standstill
stages: [2, 1]
model: {num_hidden_layers: 3, hidden_size: 64, num_attention_heads: 4,
  num_key_value_heads: 4, head_dim: 16, intermediate_size: 128}
data: {seq_len: 64, micro_batch_size: 2}
rounds: {global_batch_tokens: 2048, snapshot_interval: 8, finality_timeout_seconds: 3, max_seconds: 5}
"""


class Home:
    """A person's machine: a home folder, in which peers run one after the other."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder = folder
        folder.mkdir()
        self.state = folder / ".local/state/swarmnet" / run_id[:16]
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("XDG_")},
            "HOME": str(folder), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "COLUMNS": "80",
        }  # fmt: skip
        self.process: asyncio.subprocess.Process | None = None

    async def join(self, *arguments: str) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *SWARMNET, "join", *arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.environment, start_new_session=True,
            )  # fmt: skip

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def says(self, *arguments: str) -> str:
        done = subprocess.run(
            [*SWARMNET, *arguments], env=self.environment, capture_output=True, text=True, timeout=60
        )
        return done.stdout + done.stderr

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            try:
                async with asyncio.timeout(30.0):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()

    def settled_since(self, began: float) -> int:
        return sum(at > began for at in times(self.state, "settled"))


def stage_of(state: Path) -> int:
    """That a peer took first."""
    events = event_log.read(state / "events.jsonl")
    return next(event.fields["stage"] for event in events if event.name == "assembled")


async def play(folder: Path, elsewhere: bool) -> dict[str, object]:
    (folder / "run.yaml").write_text(RUN)
    publish(folder / "run.yaml", load_or_create(folder / "owner.key"), folder / "run.json")
    signed = load_signed(folder / "run.json")
    boot: DemoPeer = await start(folder, "boot", {"role": "bootstrap", "run": "run.json", **QUIET})
    holder, other, newcomer = (Home(folder / name, signed.run_id) for name in ("bob", "cat", "dan"))
    try:
        await boot.until_listening()
        keys = {**QUIET, "checkpoint_seconds": 30}
        settings = [f"--set={key}={json.dumps(value)}" for key, value in keys.items() if key != "metrics"]
        first = [str(folder / "run.json"), "--bootstrap", boot.addresses[0], "--set=metrics.listen=off",
                 *settings]  # fmt: skip
        await holder.join(*first)
        await until(lambda: times(holder.state, "assembled"), "the first peer has a stage")
        await other.join(*first)
        await until(lambda: holder.settled_since(0.0) > ROUNDS, "two peers train")
        await holder.stop()
        await newcomer.join(*first)
        await until(lambda: " is stuck: " in newcomer.log(), "it waits")
        await asyncio.sleep(WAIT_SECONDS)
        by_run = ("top", "--run", str(folder / "run.json"), "--bootstrap", boot.addresses[0])
        said = {
            "me": other.says("credit", str(other.state)),
            "top": other.says("top", str(other.state)), "top --run": other.says(*by_run),
        }  # fmt: skip
        began = time.time()
        away = 1 - stage_of(holder.state)
        again = ("--stage", str(away), "--set", "auto_rebalance=true") if elsewhere else ()
        await holder.join(signed.run_id[:16], "--set=metrics.listen=off", *settings, *again)
        homes = (holder, other, newcomer)
        await until(lambda: all(home.settled_since(began) > 2 for home in homes), "all train again")
        trains = max(sorted(at for at in times(home.state, "settled") if at > began)[0] for home in homes)
        told = [json.loads(line) for line in holder.log().splitlines() if line.startswith("{")]
        chose = [line["text"] for line in told if line["event"] in ("stage", "moves")]
        return {"said": said, "stage": 1 - away, "chose": chose[1:], "seconds": round(trains - began, 1)}
    finally:
        await asyncio.gather(*(home.stop() for home in (holder, other, newcomer)))
        await boot.stop(30.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elsewhere", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmnet-standstill-") as place:
        seen = asyncio.run(play(Path(place), options.elsewhere))
    print(json.dumps(seen, indent=1))
    command = f"--stage {seen['stage']}"
    silent = [name for name, text in seen["said"].items() if " is stuck: " not in text or command not in text]
    if silent or seen["seconds"] > (MOVED_SECONDS if options.elsewhere else PROMISED_SECONDS):
        sys.exit(f"too slow, or no word of it: {silent}")
