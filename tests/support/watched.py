"""A swarm in memory with an observer at every worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families
from swarm import Swarm

from peers.network.counted_directory import CountedDirectory
from peers.network.dht_sampler import DirectoryObserver
from peers.telemetry.metrics import PeerMetrics
from peers.worker.watch.sampler import WorkerSampler


class Silent:
    """A report and an event log that nobody reads."""

    def __init__(self):
        self.statuses, self.events = [], []

    def status(self, status):
        self.statuses.append(status)

    def record(self, event):
        self.events.append((event.name, event.fields))

    def flush(self):
        pass


def seen(**fields):
    """What is read of a directory."""
    return SimpleNamespace(**{"refusals": Counter(), "sent_bytes": 0, "received_bytes": 0, **fields})


class Watched(Swarm):
    """A swarm with an observer at every worker."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.metrics, self.observers, self.watching = {}, {}, []
        plain = self.network.directory
        self.network.directory = lambda peer: CountedDirectory(plain(peer))

    def start(self, name, *arguments, **more):
        member = super().start(name, *arguments, **more)
        metrics = self.metrics.setdefault(name, PeerMetrics(process=False))
        silent = Silent()
        observer = self.observers[name] = WorkerSampler(
            worker=member.worker, metrics=metrics, report=silent, log=silent
        )
        counted = member.worker.context.presence.directory
        directory = DirectoryObserver(counted, seen(measured_offset=None), metrics)
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
