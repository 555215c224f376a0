"""Real processes: a stage loses a peer, and the others help it by their own decision.

    scripts/soak moving [--share 0.04]

Nine peers on 127.0.0.1 in three stages; one of the first stage is five times as slow as the others. Then one
of the two of the last stage is killed. Throughput is counted from the event logs and compared with the best
assignment of the eight that are left, played as a swarm of its own in which nobody moves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import fmean

from peers import event_log
from peers.demo import LOOPBACK
from peers.demo_peers import DemoPeer, start
from peers.run_file import publish
from protocols.identity import load_or_create

RUN = {
    "name": "moving", "stages": [2, 2, 1],
    "model": {
        "layers": 5, "width": 64, "heads": 4, "key_value_heads": 4, "head_width": 16, "feed_forward": 128,
    },
    "data": {"sequence_tokens": 64, "microbatch_sequences": 4},
    "rounds": {"target_tokens": 4096, "snapshot_rounds": 8},
}  # fmt: skip
NINE = (0, 0, 0, 0, 1, 1, 1, 2, 2)
SLOW, KILLED = 3, 8
WARM_SECONDS, WATCHED_SECONDS, LAST_SECONDS = 20.0, 60.0, 15.0
SLOWNESS = 5.0


class Played:
    """One swarm of processes in a folder of its own."""

    def __init__(self, folder: Path, share: float) -> None:
        self.folder = folder
        self.share = share
        self.peers: dict[int, DemoPeer] = {}
        self.boot: DemoPeer | None = None

    async def begin(self, stages: dict[int, int], moves: bool) -> None:
        file = self.folder / "run.yaml"
        file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in RUN.items()))
        publish(file, load_or_create(self.folder / "owner.key"), self.folder / "run.json")
        self.boot = await start(self.folder, "boot", {"role": "bootstrap", "run": "run.json", **LOOPBACK})
        await self.boot.until_listening()
        for number, stage in stages.items():
            share = self.share / (SLOWNESS if number == SLOW else 1.0)
            keys = {"run": "run.json", "bootstrap": self.boot.addresses, "stage": stage, **LOOPBACK}
            keys |= {"moves": moves, "work_share": share, "in_flight": 16, "slots": 16}
            self.peers[number] = await start(self.folder, f"peer-{number}", keys)
        deadline = time.monotonic() + 90.0
        while not all(self.events(number, "committed") for number in stages):
            assert time.monotonic() < deadline, {n: list(peer.said)[-2:] for n, peer in self.peers.items()}
            await asyncio.sleep(1.0)

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


def best_assignment(seconds: tuple[float, ...]) -> dict[int, int]:
    """Of the eight, by trying all; `seconds` is what a peer of usual speed takes at each stage."""
    speeds = {number: 1 / SLOWNESS if number == SLOW else 1.0 for number in range(9) if number != KILLED}

    def least(stages: tuple[int, ...]) -> float:
        pairs = list(zip(speeds.values(), stages, strict=True))
        return min(sum(speed for speed, at in pairs if at == stage) / seconds[stage] for stage in range(3))

    return dict(zip(speeds, max(product(range(3), repeat=8), key=least), strict=True))


async def moving(folder: Path, share: float) -> tuple[float, tuple[float, ...], Played]:
    """When the peer was killed, what a peer takes at each stage, and all event logs."""
    swarm = Played(folder, share)
    try:
        await swarm.begin(dict(enumerate(NINE)), moves=True)
        await asyncio.sleep(WARM_SECONDS)
        swarm.peers[KILLED].kill()
        killed_at = time.time()
        await asyncio.sleep(WATCHED_SECONDS + LAST_SECONDS)
    finally:
        await swarm.end()
    seconds: list[float] = []
    for stage in range(3):
        looks = [
            1 / event.fields["rate"]
            for number, at in enumerate(NINE)
            if at == stage and number != SLOW
            for event in swarm.events(number, "looked")
            if event.fields["rate"] > 0 and event.time < killed_at
        ]
        seconds.append(fmean(looks))
    return killed_at, tuple(seconds), swarm


async def fixed(folder: Path, share: float, stages: dict[int, int]) -> float:
    swarm = Played(folder, share)
    try:
        await swarm.begin(stages, moves=False)
        await asyncio.sleep(WARM_SECONDS)
        began = time.time()
        await asyncio.sleep(2 * LAST_SECONDS)
        ended = time.time()
    finally:
        await swarm.end()
    return swarm.rate(began, ended)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.04, help="of a core, for each peer's compute")
    share = parser.parse_args().share
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        killed_at, seconds, swarm = asyncio.run(moving(Path(first), share))
        stages = best_assignment(seconds)
        best = asyncio.run(fixed(Path(second), share, stages))
        print("seconds per microbatch and stage:", ", ".join(f"{value:.3f}" for value in seconds))
        print(f"best assignment of the eight (peer: stage): {stages}, {best:.2f} microbatches/s")
        for after in range(-15, int(WATCHED_SECONDS + LAST_SECONDS), 5):
            rate = swarm.rate(killed_at + after, killed_at + after + 5)
            print(f"  {after:>4} s after the kill: {rate:6.2f}/s  {rate / best:6.1%}")
        for number in swarm.peers:
            for event in [*swarm.events(number, "moving"), *swarm.events(number, "in_step")]:
                if event.time > killed_at:
                    print(f"  peer {number}: {event.name} {event.fields} at {event.time - killed_at:.1f} s")
        last = swarm.rate(killed_at + WATCHED_SECONDS, killed_at + WATCHED_SECONDS + LAST_SECONDS)
        print(f"after {WATCHED_SECONDS:g} s: {last:.2f}/s, {last / best:.1%} of the best assignment")
    return 0 if last >= 0.9 * best else 1


if __name__ == "__main__":
    raise SystemExit(main())
