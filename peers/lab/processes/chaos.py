"""`swarmnet chaos`: run real peers with injected faults, then the same swarm undisturbed, and report.

Every peer is a process with its own p2pd on 127.0.0.1. Over the run half of the peers are killed with
SIGKILL and replaced by fresh ones, one is frozen and thawed, and one loses its p2pd. Three undisturbed runs
to the same round follow. The report is computed from the event logs alone (chaos_report.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.config.run_file import publish
from peers.lab.processes import chaos_report
from peers.lab.processes.chaos_report import InjectedFault
from peers.lab.processes.demo import LOOPBACK, by_method, stage_layers
from peers.lab.processes.local_processes import DemoPeer, start
from protocols.signed.identity import load_or_create
from swarmnet.run.sync_methods import DEFAULT_LOCAL_METHOD

READY_SECONDS = 90.0
REPLACE_SECONDS = 3.0
"""Time from a kill to the start of the replacement."""
FROZEN_SECONDS = 12.0
"""Length of a freeze: three times the time to notice it, so that a round settles without the frozen peer."""
FIRST, LAST = 0.12, 0.82
"""Parts of the run between which the faults happen; the rest shows that the swarm has recovered."""
LOOK_SECONDS = 0.25
DRAIN_SECONDS = 10.0
LONGEST_FACTOR = 4.0
"""Time limit of an undisturbed run, as a multiple of the chaos run's time."""


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """Options of `swarmnet chaos`."""

    seed: int = 0
    seconds: float = 75.0
    """Length of the run with faults, after all peers are in step."""
    peers: int = 8
    stages: int = 2
    undisturbed: int = 3
    sharded: bool = False
    """Whether peers use local steps, and exchange through reducers."""
    report: Path | None = None
    folder: Path = Path()


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned fault and its time, in seconds since the training started."""

    at: float
    kind: str


def plan(options: ChaosOptions) -> list[Planned]:
    """Plan kills of half of the peers, a freeze and a p2pd kill, spread over the run in random order."""
    chance = Random(f"chaos {options.seed}")
    kinds = ["kill"] * (options.peers // 2) + ["freeze", "kill p2pd"]
    chance.shuffle(kinds)
    step = (LAST - FIRST) * options.seconds / len(kinds)
    first = FIRST * options.seconds
    return [
        Planned(first + step * (index + chance.uniform(0.0, 0.6)), kind) for index, kind in enumerate(kinds)
    ]


def run_chaos(options: ChaosOptions) -> int:
    """Run the command; return 0 if all promises held, and 1 otherwise."""
    return asyncio.run(_run(options, Console(highlight=False)))


async def _run(options: ChaosOptions, console: Console) -> int:
    """Run a swarm with faults, then swarms without faults for comparison, and write the report. Returns the
    exit code: 1 if an invariant did not hold."""
    began = time.monotonic()
    swarm = ChaosSwarm(options, options.folder / "chaos", console)
    async with asyncio.timeout(2 * READY_SECONDS + 2 * options.seconds):
        await swarm.under_fire()
    lives = chaos_report.read(swarm.folder)
    rounds = chaos_report.last_round(lives)
    calm = []
    for number in range(options.undisturbed):
        again = ChaosSwarm(options, options.folder / f"undisturbed-{number + 1}", console)
        async with asyncio.timeout(2 * READY_SECONDS + LONGEST_FACTOR * options.seconds):
            await again.undisturbed(rounds)
        calm.append(chaos_report.read(again.folder))
    report = chaos_report.build(lives, swarm.faults, calm)
    report["run"] = {
        "seed": options.seed,
        "peers": options.peers,
        "stages": options.stages,
        "seconds": options.seconds,
        "sharded": options.sharded,
        "wall_seconds": round(time.monotonic() - began, 1),
        "load": os.getloadavg()[0],
    }
    path = options.report or options.folder / "report.json"
    await asyncio.to_thread(write_atomically, path, (json.dumps(report, indent=1) + "\n").encode())
    failures = chaos_report.failures(report)
    console.print_json(json.dumps({key: report[key] for key in chaos_report.KEYS}))
    for failure in failures:
        console.print(f"NOT HELD: {failure}")
    console.print(f"report {path}")
    return 1 if failures else 0


class ChaosSwarm:
    """A bootstrap and the peers of one run, in one folder."""

    def __init__(self, options: ChaosOptions, folder: Path, console: Console) -> None:
        self.options = options
        self.folder = folder
        self.console = console
        self.chance = Random(f"victims {options.seed}")
        self.peers: list[DemoPeer] = []
        self.boot: DemoPeer | None = None
        self.faults: list[InjectedFault] = []
        self.began = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    async def under_fire(self) -> None:
        try:
            await self.start()
            for planned in plan(self.options):
                await asyncio.sleep(max(0.0, self.began + planned.at - time.monotonic()))
                await self._strike(planned.kind)
            await asyncio.sleep(max(0.0, self.began + self.options.seconds - time.monotonic()))
            await asyncio.gather(*self._tasks)
        finally:
            await self.stop()

    async def undisturbed(self, rounds: int) -> None:
        """Train until some peer has settled `rounds`."""
        try:
            await self.start()
            await self.until(lambda: any(peer.status.get("round", 0) > rounds + 4 for peer in self.living()))
        finally:
            await self.stop()

    async def start(self) -> None:
        """Publish the run, start all peers, and wait until they train."""
        await asyncio.to_thread(self._publish)
        self.notify("starting")
        await self.start_bootstrap()
        for stage in self.stages():
            await self.add(stage)
        async with asyncio.timeout(READY_SECONDS):
            await self.until(lambda: all(peer.status.get("state") == "training" for peer in self.peers))
        self.began = time.monotonic()
        self.notify(f"{len(self.peers)} peers train")

    async def start_bootstrap(self) -> None:
        prefix, more = self.place("bootstrap")
        keys = {"role": "bootstrap", "run": "run.json", **LOOPBACK, **more}
        self.boot = await start(self.folder, "bootstrap", keys, prefix)
        await self.boot.until_listening()

    def stages(self) -> list[int]:
        """Return the stage of every peer at the start."""
        peers, stages = self.options.peers, self.options.stages
        return [number * stages // peers for number in range(peers)]

    def place(self, name: str) -> tuple[Sequence[str], dict[str, object]]:
        """Return the command prefix with which a peer runs, and the keys that this adds to its file."""
        return (), {}

    def run_keys(self) -> dict[str, object]:
        seed, layers = self.options.seed, stage_layers(self.options.stages)
        run: dict[str, object] = {
            "name": "chaos",
            "seed": seed,
            "stages": layers,
            "model": {"num_hidden_layers": sum(layers)},
        }
        return run | by_method(DEFAULT_LOCAL_METHOD, sharded=True) if self.options.sharded else run

    def _publish(self) -> None:
        self.folder.mkdir(parents=True)
        run = self.run_keys()
        file = self.folder / "run.yaml"
        file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in run.items()))
        publish(file, load_or_create(self.folder / "owner.key"), self.folder / "run.json")

    async def add(self, stage: int | str, name: str | None = None) -> DemoPeer:
        """Start a peer; a known name starts that peer again with its disk."""
        assert self.boot is not None
        name = name or f"peer-{len(self.peers) + 1}"
        prefix, more = self.place(name)
        keys = {
            "run": "run.json",
            "bootstrap": self.boot.addresses,
            "stage": stage,
            "in_flight": 2,
            "slots": 8,
            **LOOPBACK,
            "drain_seconds": DRAIN_SECONDS,
            "checkpoint_seconds": 10,
            **more,
        }
        peer = await start(self.folder, name, keys, prefix)
        self.peers = [known for known in self.peers if known.name != peer.name] + [peer]
        return peer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Raises UserError if a peer ends unexpectedly."""
        while not condition():
            for peer in self.peers:
                if not peer.alive and peer.killed_at is None:
                    words = " | ".join(list(peer.said)[-3:])
                    raise UserError(f"{peer.name} ended with code {peer.process.returncode}: {words}")
            await asyncio.sleep(LOOK_SECONDS)

    def living(self) -> list[DemoPeer]:
        return [peer for peer in self.peers if peer.alive]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self.living():
            if peer.p2pd:
                peer.freeze(signal.SIGCONT)
        await asyncio.gather(*(peer.stop(DRAIN_SECONDS + 5.0) for peer in self.peers))
        if self.boot is not None:
            await self.boot.stop(DRAIN_SECONDS)

    def notify(self, text: str) -> None:
        self.console.print(f"{self.folder.name:15} {time.monotonic() - self.began:6.1f} s  {text}")

    # -- faults ---------------------------------------------------------------------------------------

    async def _strike(self, kind: str) -> None:
        victim = await self._victim(last_stage=kind == "freeze")
        stage = int(victim.status["stage"])
        fault = InjectedFault(kind, victim.name, victim.peer_id, stage, time.time())
        self.faults.append(fault)
        self.notify(f"{kind}: {victim.name} of stage {stage}")
        if kind == "kill":
            victim.kill()
            self._tasks.append(asyncio.create_task(self._replace(stage)))
        elif kind == "freeze":
            victim.freeze()
            self._tasks.append(asyncio.create_task(self._thaw(victim, fault)))
        else:
            os.kill(victim.p2pd, signal.SIGKILL)

    async def _victim(self, last_stage: bool) -> DemoPeer:
        """Wait for a peer that trains in a stage where two others do, and return it.

        `last_stage`: choose one of the last stage, to which other peers send; used for a freeze.
        """
        found: list[DemoPeer] = []

        def look() -> bool:
            hurt = {fault.name for fault in self.faults if fault.kind != "kill" and fault.until is None}
            stages = [
                [
                    peer
                    for peer in self.living()
                    if peer.status.get("state") == "training"
                    and peer.status.get("stage") == stage
                    and peer.name not in hurt
                ]
                for stage in range(self.options.stages)
            ]
            found[:] = [
                peer for peers in (stages[-1:] if last_stage else stages) if len(peers) > 2 for peer in peers
            ]
            return bool(found)

        await self.until(look)
        return self.chance.choice(found)

    async def _replace(self, stage: int) -> None:
        await asyncio.sleep(REPLACE_SECONDS)
        peer = await self.add(stage)
        self.notify(f"a fresh peer joins stage {stage} as {peer.name}")

    async def _thaw(self, victim: DemoPeer, fault: InjectedFault) -> None:
        await asyncio.sleep(FROZEN_SECONDS)
        fault.until = time.time()
        victim.freeze(signal.SIGCONT)
        self.notify(f"{victim.name} is thawed")
