"""Peers that nobody can dial, on the emulated network: what carries their links, and what comes of it.

    scripts/soak wan-relay [--seconds S] [--cut S] [--open PEER] [--inside PEER]       needs root

Three workers in two stages, all firewalled but those that are opened, and a bootstrap that relays. With
`--cut` the bootstrap is killed after so long and started again: every circuit ends at once. A peer that is
`--inside` exchanges packets with the bootstrap alone, as a compute node does with its login node.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

import wan
from wan_swarm import WanSwarm, events

from peers.lab.processes import chaos_report
from peers.lab.processes.chaos import ChaosOptions

LINE = {"up": 20.0, "down": 100.0, "delay": 10.0}
KEYS = {"relay": True, "in_flight": 4, "slots": 16}
HEAL_SECONDS = 5.0
"""After the relay has gone, until links must stand again."""
RUN = {"rounds": {"global_batch_tokens": 1024}}


class FirewalledSwarm(WanSwarm):
    """Nothing comes in at the workers but answers, except at those named in `opened`."""

    opened = ()
    inside = ()

    def line_of(self, name):
        if name not in self.net.hosts:
            shut = name != "bootstrap" and name not in self.opened
            self.net.host(name, firewall=shut, translated=shut, **self.line)
            for other in set(self.net.hosts) - {name, "bootstrap"}:
                if name != "bootstrap" and {name, other} & set(self.inside):
                    self.net.partition([name], [other])
        prefix, keys = super().line_of(name)
        port = 31330 + list(self.net.hosts).index(name)  # Found again where it was.
        return prefix, {**keys, "listen": [f"/ip4/{self.net.hosts[name].address}/tcp/{port}"]}


async def train(folder, seconds, cut=None, opened=(), stages=(0, 0, 1), inside=()):
    """What was seen of a swarm that trains for so long."""
    with wan.Wan(seed=3) as net:
        options = ChaosOptions(peers=len(stages), stages=max(stages) + 1)
        swarm = FirewalledSwarm(options, folder / "swarm", net, "1M", KEYS, RUN, line=LINE)
        swarm.stages, swarm.opened, swarm.inside = lambda: list(stages), opened, inside
        try:
            began = time.monotonic()
            await swarm.start()
            ready = time.monotonic() - began
            cut_at = None
            if cut is not None:
                await asyncio.sleep(cut)
                cut_at = time.time()
                swarm.boot.kill()
                await swarm.boot.stop(1.0)
                await swarm.start_bootstrap()
            await asyncio.sleep(seconds)
            stats = net.stats()["hosts"]
        finally:
            await swarm.stop()
    return {"ready_seconds": round(ready, 1), **seen(swarm.folder, cut_at), "hosts": stats}


def seen(folder, cut_at):
    lives = chaos_report.read(folder)
    shared, unequal = chaos_report.digests(lives)
    carried = [(event.fields["bytes"], event.fields["open"]) for _, event in events(folder, "circuits")]
    return {
        "commits": sum(len(life.commits) for life in lives),
        "settled": {life.name: len(life.settled) for life in lives},
        "settled_after_the_cut": {
            life.name: sum(at > (cut_at or 0.0) + HEAL_SECONDS for at in life.settled_at.values())
            for life in lives
        },
        "equal_digests": shared - len(unequal),
        "unequal_digests": len(unequal),
        "contributions": chaos_report.contributions(lives, {}),
        "relayed": sorted({name for name, _ in events(folder, "relayed")}),
        "circuits": max((count for _, count in carried), default=0),
        "carried_bytes": max((count for count, _ in carried), default=0),
        "unlinked": [(name, event.fields["code"]) for name, event in events(folder, "unlinked")],
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--cut", type=float)
    parser.add_argument("--open", action="append", default=[], metavar="PEER")
    parser.add_argument("--inside", action="append", default=[], metavar="PEER")
    arguments = parser.parse_args()
    reason = wan.why_not()
    if reason is not None:
        sys.exit(f"error: no emulated network here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are taken down
    with tempfile.TemporaryDirectory(prefix="swarmnet-wan-") as folder:
        train_all = train(
            Path(folder), arguments.seconds, arguments.cut, arguments.open, inside=arguments.inside
        )
        found = asyncio.run(train_all)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
