"""What a peer's counters become: every series that a swarm must move does move, and health is told."""

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from swarm import Swarm, tiny_manifest

from peers.counted_directory import CountedDirectory
from peers.metrics import Metrics
from peers.observe import STUCK_SECONDS, DirectoryObserver, Growth, Observer, Pulse, by_code
from peers.virtual_time import run
from protocols.errors import Unreachable

OF_THE_PROCESS = {"build_info", "peer_info", "daemon_restarts_total"}
"""Set by the peer process itself: tests/test_bad_input.py looks at a real one."""
OF_FAULTS = {"train_nonfinite_total", "refused_total", "state_chunks_refused_total", "network_clock_offset_seconds",
             "round_lag", "stage_queue_microbatches"}  # fmt: skip


class Silent:
    """A report and an event log that nobody reads."""

    def __init__(self):
        self.statuses, self.events = [], []

    def status(self, status):
        self.statuses.append(status)

    def record(self, event, **fields):
        self.events.append((event, fields))

    def flush(self):
        pass


class Watched(Swarm):
    """A swarm with an observer at every worker."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.metrics, self.observers, self.watching = {}, {}, []
        plain = self.network.directory
        self.network.directory = lambda peer: CountedDirectory(plain(peer))

    def start(self, name, *arguments, **more):
        member = super().start(name, *arguments, **more)
        metrics = self.metrics.setdefault(name, Metrics(process=False))
        silent = Silent()
        observer = self.observers[name] = Observer(member.worker, metrics, silent, silent)
        counted = member.worker.presence.directory
        directory = DirectoryObserver(counted, SimpleNamespace(clock_offset=0.0, refusals=Counter()), metrics)
        self.watching += [self.loop.create_task(part.run()) for part in (observer, directory)]
        return member

    async def stop_watching(self):
        for observer in self.observers.values():
            observer.look()
        for task in self.watching:
            task.cancel()
        await asyncio.gather(*self.watching, return_exceptions=True)


def moved(metrics):
    """Names and labels of the samples that are not 0."""
    samples = [
        sample
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.value != 0 and not sample.name.endswith(("_bucket", "_sum"))
    ]
    return {
        sample.name.removeprefix("swarmnet_").removesuffix("_count")
        + "".join(f" {value}" for value in sample.labels.values())
        for sample in samples
    }


async def lively(swarm, folder):
    """Six peers; one dies, one joins in its place, one is frozen for a while, one comes back from its disk."""
    for name, stage in {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 2}.items():
        keeps = {"checkpoints": folder / name, "checkpoint_seconds": 3.0} if name == "b" else {}
        swarm.start(name, stage, in_flight=2, **keeps)
    settled = lambda: min((settled for _, settled in swarm.rounds().values()), default=-1)  # noqa: E731
    await swarm.until(lambda: settled() >= 20, 60.0)
    await swarm.crash("c")
    swarm.start("g", 1)
    await swarm.until(lambda: swarm.of("in_step", "g"), 30.0)
    swarm.network.freeze(swarm.members["f"].peer)
    await swarm.during(3.0)
    swarm.network.thaw(swarm.members["f"].peer)
    await swarm.until(lambda: swarm.of("saved", "b"), 30.0)
    await swarm.leave("b")
    swarm.start("b", 0, checkpoints=folder / "b")
    await swarm.until(lambda: len(swarm.of("in_step", "b")) > 1, 30.0)
    await swarm.during(10.0)
    await swarm.stop_watching()
    await swarm.close()


async def at_once(work, *arguments):
    """In the place of asyncio.to_thread: a virtual clock does not wait for threads."""
    return work(*arguments)


def test_x(tmp_path, monkeypatch):
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    async def story():
        swarm.open()
        await lively(swarm, tmp_path)

    swarm = Watched(tiny_manifest())
    run(story())
    alls = set()
    for name, metrics in swarm.metrics.items():
        print(name, sorted(moved(metrics)))
        alls |= moved(metrics)
    every = {}
    for family in text_string_to_metric_families(Metrics(process=False).text().decode()):
        pass
    declared = Metrics(process=False).declared
    print("NOT", [d.name for d in declared if not any(m.split()[0] == d.name.removeprefix("swarmnet_") for m in alls)])
    print(sorted(alls))
