"""Real processes: a stage loses a peer, and the others help it by their own decision.

    scripts/soak moving [--story change] [--share 0.04] [--report FILE]

Nine peers on 127.0.0.1 in three stages. In the story `change` all are equally fast until one of the last
stage is killed and another of it becomes five times as slow, at the same moment. In `slow-first` one of the
first stage has been slow from the start, and then one of the two of the last stage is killed. Throughput is
counted from the event logs and compared with the best assignment of the eight that are left, played as a
swarm of its own in which nobody moves and the slow one is slow from the start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from peers import event_log
from peers.demo.peers import DemoPeer, start
from peers.demo.show import LOOPBACK
from peers.run_file import publish
from protocols.identity import load_or_create

RUN: dict[str, Any] = {
    "name": "moving", "stages": [2, 2, 1],
    "model": {
        "layers": 5, "width": 64, "heads": 4, "key_value_heads": 4, "head_width": 16, "feed_forward": 128,
    },
    "data": {"sequence_tokens": 64, "microbatch_sequences": 4},
    "rounds": {"target_tokens": 4096, "snapshot_rounds": 8},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Story:
    """Who is where, who dies, and who is slow."""

    stages: tuple[int, ...]
    slow: int
    killed: int
    slow_first: bool
    """From the start; else from the moment when the other one is killed."""


STORIES = {
    "change": Story((0, 0, 0, 1, 1, 1, 2, 2, 2), slow=7, killed=8, slow_first=False),
    "slow-first": Story((0, 0, 0, 0, 1, 1, 1, 2, 2), slow=3, killed=8, slow_first=True),
}
WARM_SECONDS, WATCHED_SECONDS, LAST_SECONDS = 20.0, 60.0, 15.0
SLOWNESS = 5.0
ENOUGH = 0.9
"""Of the best assignment, after WATCHED_SECONDS (issue 4, showing 5)."""
STAGES = len(RUN["stages"])
SLOWED_PEER = (sys.executable, str(Path(__file__).with_name("slowed_peer.py")), str(SLOWNESS))


class Played:
    """One swarm of processes in a folder of its own."""

    def __init__(self, folder: Path, share: float, story: Story) -> None:
        self.folder = folder
        self.share = share
        self.story = story
        self.peers: dict[int, DemoPeer] = {}
        self.boot: DemoPeer | None = None

    async def begin(self, stages: dict[int, int], moves: bool, slow_first: bool) -> None:
        file = self.folder / "run.yaml"
        file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in RUN.items()))
        publish(file, load_or_create(self.folder / "owner.key"), self.folder / "run.json")
        self.boot = await start(self.folder, "boot", {"role": "bootstrap", "run": "run.json", **LOOPBACK})
        await self.boot.until_listening()
        for number, stage in stages.items():
            slow = number == self.story.slow
            share = self.share / (SLOWNESS if slow and slow_first else 1.0)
            keys = {"run": "run.json", "bootstrap": self.boot.addresses, "stage": stage, **LOOPBACK}
            keys |= {"moves": moves, "work_share": share, "in_flight": 16, "slots": 16}
            prefix = SLOWED_PEER if slow and not slow_first else ()
            self.peers[number] = await start(self.folder, f"peer-{number}", keys, prefix)
        deadline = time.monotonic() + 90.0
        while not all(self.events(number, "committed") for number in stages):
            assert time.monotonic() < deadline, {n: list(peer.said)[-2:] for n, peer in self.peers.items()}
            await asyncio.sleep(1.0)

    def change(self) -> float:
        """One peer dies, and one becomes slow, if it is not yet. When that was (Unix time)."""
        if not self.story.slow_first:
            self.peers[self.story.slow].process.send_signal(signal.SIGUSR2)
        self.peers[self.story.killed].kill()
        return time.time()

    async def end(self) -> None:
        await asyncio.gather(*(peer.stop(15.0) for peer in self.peers.values()))
        if self.boot is not None:
            await self.boot.stop(5.0)

    def events(self, number: int, name: str) -> list[event_log.Event]:
        log = self.peers[number].state / "events.jsonl"
        return [event for event in event_log.read(log) if event.name == name] if log.exists() else []

    def rate(self, began: float, ended: float) -> float:
        """Microbatches per second that came back to where they started."""
        count = sum(
            event.fields["origin"] == peer.peer_id and began <= event.time < ended
            for number, peer in self.peers.items()
            for event in self.events(number, "committed")
        )
        return count / (ended - began)

    def seconds(self, until: float) -> tuple[float, ...]:
        """What a peer of usual speed took for a microbatch at each stage, by what it said before `until`."""
        return tuple(
            fmean(
                1 / event.fields["rate"]
                for number, at in enumerate(self.story.stages)
                if at == stage and number not in (self.story.slow, self.story.killed)
                for event in self.events(number, "looked")
                if event.fields["rate"] > 0 and event.time < until
            )
            for stage in range(STAGES)
        )


def best_assignment(story: Story, seconds: tuple[float, ...]) -> dict[int, int]:
    """Of the eight, by trying all; `seconds` is what a peer of usual speed takes at each stage."""
    left = [number for number in range(len(story.stages)) if number != story.killed]
    speeds = {number: 1 / SLOWNESS if number == story.slow else 1.0 for number in left}

    def least(stages: tuple[int, ...]) -> float:
        pairs = list(zip(speeds.values(), stages, strict=True))
        return min(
            sum(speed for speed, at in pairs if at == stage) / seconds[stage] for stage in range(STAGES)
        )

    return dict(zip(speeds, max(product(range(STAGES), repeat=len(left)), key=least), strict=True))


async def moving(folder: Path, share: float, story: Story) -> tuple[float, Played]:
    """When the change was, and all event logs."""
    swarm = Played(folder, share, story)
    try:
        await swarm.begin(dict(enumerate(story.stages)), moves=True, slow_first=story.slow_first)
        await asyncio.sleep(WARM_SECONDS)
        changed_at = swarm.change()
        await asyncio.sleep(WATCHED_SECONDS + LAST_SECONDS)
    finally:
        await swarm.end()
    return changed_at, swarm


async def fixed(folder: Path, share: float, story: Story, stages: dict[int, int]) -> float:
    """Microbatches per second of an assignment that stays as it is."""
    swarm = Played(folder, share, story)
    try:
        await swarm.begin(stages, moves=False, slow_first=True)
        await asyncio.sleep(WARM_SECONDS)
        began = time.time()
        await asyncio.sleep(2 * LAST_SECONDS)
        ended = time.time()
    finally:
        await swarm.end()
    return swarm.rate(began, ended)


def told(swarm: Played, changed_at: float, best: float, stages: dict[int, int]) -> dict[str, Any]:
    """The report: throughput over time beside the best assignment's, and who moved when."""
    over_time = {
        after: round(swarm.rate(changed_at + after, changed_at + after + 5), 2)
        for after in range(-15, int(WATCHED_SECONDS + LAST_SECONDS), 5)
    }
    moves = [
        {"peer": number, "event": event.name, "stage": event.fields.get("stage"),
         "seconds": round(event.time - changed_at, 1)}
        for number in swarm.peers
        if swarm.events(number, "moving")
        for name in ("moving", "not_moving", "in_step")
        for event in swarm.events(number, name)
        if event.time > changed_at
    ]  # fmt: skip
    ended = changed_at + WATCHED_SECONDS
    last = swarm.rate(ended, ended + LAST_SECONDS)
    return {
        "seconds_per_microbatch": [round(value, 3) for value in swarm.seconds(changed_at)],
        "best_assignment": stages, "best_rate": round(best, 2), "rates": over_time,
        "moves": sorted(moves, key=lambda move: move["seconds"]), "last_rate": round(last, 2),
        "share_of_best": round(last / best, 4),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--story", choices=STORIES, default="change", help="what happens (see above)")
    parser.add_argument("--share", type=float, default=0.04, help="of a core, for each peer's compute")
    parser.add_argument("--report", type=Path, help="where to write all figures as JSON")
    options = parser.parse_args()
    story = STORIES[options.story]
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        changed_at, swarm = asyncio.run(moving(Path(first), options.share, story))
        stages = best_assignment(story, swarm.seconds(changed_at))
        best = asyncio.run(fixed(Path(second), options.share, story, stages))
        report = told(swarm, changed_at, best, stages)
    if options.report:
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    print("seconds per microbatch and stage:", *report["seconds_per_microbatch"])
    print(f"best assignment of the eight (peer: stage): {stages}, {best:.2f} microbatches/s")
    for after, rate in report["rates"].items():
        print(f"  {after:>4} s after the change: {rate:6.2f}/s  {rate / best:6.1%}")
    for move in report["moves"]:
        print(f"  peer {move['peer']}: {move['event']} {move['stage']} at {move['seconds']:.1f} s")
    share = report["share_of_best"]
    print(f"after {WATCHED_SECONDS:g} s: {report['last_rate']:.2f}/s, {share:.1%} of the best assignment")
    return 0 if share >= ENOUGH else 1


if __name__ == "__main__":
    raise SystemExit(main())
