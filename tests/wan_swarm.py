"""Real peers on the emulated WAN: `scripts/soak wan tokens|partition|join`. Needs root; minutes per figure.

    tokens      tokens/s of 6 peers in 2 stages at 10/100 Mbit/s, 50 ms round trip, 1 % loss, cubic, beside
                the same swarm on loopback
    partition   50/50 for a minute, then healed: seconds until every stage has one digest again
    join        a newcomer to a stage with four holders: how much of the lines its fetch of the state uses

Everything is read from the peers' event logs.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

import wan
from rich.console import Console

from peers import chaos_report, event_log
from peers.chaos import ChaosOptions, ChaosSwarm

HOME = {"up": 10.0, "down": 100.0, "delay": 12.5, "loss": 0.005}
"""A home line. A packet crosses two: 50 ms round trip, 1 % loss."""
MODELS = {
    "1M": {"width": 128, "layers": 4},
    "25M": {"width": 512, "layers": 8, "heads": 8, "key_value_heads": 8, "head_width": 64,
            "feed_forward": 1408, "initial_deviation": 0.02},
}  # fmt: skip


class WanSwarm(ChaosSwarm):
    """Every peer in a namespace of its own; `net` None: all on loopback."""

    def __init__(self, options, folder, net, model, keys=(), run=(), line=HOME):
        super().__init__(options, folder, Console(highlight=False))
        self.net, self.model, self.keys, self.run, self.line = net, model, dict(keys), dict(run), line

    def run_keys(self):
        shape = MODELS[self.model]
        half = shape["layers"] // 2
        return {
            "name": f"wan-{self.model}", "seed": 0, "stages": [half, shape["layers"] - half], "model": shape,
            "hidden_codec": "int8", **self.run,
        }  # fmt: skip

    def place(self, name):
        if self.net is None:
            return (), self.keys
        host = self.net.hosts.get(name)
        if host is None:
            line = {"delay": self.line["delay"]} if name == "bootstrap" else self.line
            host = self.net.host(name, **line)
        return host.prefix, {**self.keys, "listen": [f"/ip4/{host.address}/tcp/0"]}


def events(folder, name):
    for log in sorted(folder.glob("*/events.jsonl")):
        for event in event_log.read(log):
            if event.name == name:
                yield log.parent.name, event


def sent_megabits(swarm, before, after):
    """What every peer that was there before has sent since."""
    return {
        peer.name: 8e-6 * (after["hosts"][peer.name]["sent_bytes"] - before["hosts"][peer.name]["sent_bytes"])
        for peer in swarm.peers
        if peer.name in before["hosts"]
    }


# -- tokens per second ------------------------------------------------------------------------------------


async def measure_tokens(folder, net, arguments):
    options = ChaosOptions(peers=6, stages=2)
    keys = {"in_flight": arguments.in_flight, "slots": 4 * arguments.in_flight}
    run = {"rounds": {"target_tokens": arguments.target_tokens}}
    swarm = WanSwarm(options, folder, net, arguments.model, keys, run)
    try:
        await swarm.start()
        await asyncio.sleep(arguments.warm_seconds)
        began = time.time()
        before = net.stats() if net else None
        await asyncio.sleep(arguments.seconds)
        ended = time.time()
        after = net.stats() if net else None
    finally:
        await swarm.stop()
    committed = [event for _, event in events(folder, "committed") if began < event.time <= ended]
    first = [event for event in committed if "answered" in event.fields]
    applied = [event for _, event in events(folder, "applied") if began < event.time <= ended]
    answered = fmean(event.fields["answered"] for event in first)
    below = fmean(event.fields["below"] for event in first)
    seconds = ended - began
    found = {
        "tokens_per_second": round(sum(event.fields["tokens"] for event in first) / seconds),
        "microbatch_seconds": {"answered": round(answered, 4), "compute_below": round(below, 4)},
        "waits_share": round(1 - below / answered, 3),
        "round_seconds": round(6 * seconds / max(1, len(applied)), 3),
        "round_waited_seconds": round(median(event.fields["waited"] for event in applied), 3),
        "rerouted": sum(1 for _, event in events(folder, "rerouted") if began < event.time <= ended),
        "unequal_digests": chaos_report.digests(chaos_report.read(folder))[1],
        "load": os.getloadavg()[0],
    }
    if net:
        sent = sent_megabits(swarm, before, after)
        found["uplink_mbit"] = {name: round(megabits / seconds, 2) for name, megabits in sent.items()}
        found["router_cpu_share"] = round((after["cpu_seconds"] - before["cpu_seconds"]) / seconds, 3)
    return found


async def tokens(folder, arguments):
    loop = await measure_tokens(folder / "loopback", None, arguments)
    print("loopback", json.dumps(loop), flush=True)
    with wan.Wan(seed=1) as net:
        far = await measure_tokens(folder / "wan", net, arguments)
    print("wan     ", json.dumps(far), flush=True)
    ratio = far["tokens_per_second"] / loop["tokens_per_second"]
    return {"model": arguments.model, "loopback": loop, "wan": far, "ratio": round(ratio, 3)}


# -- a partition ------------------------------------------------------------------------------------------


async def partition(folder, arguments):
    """Half of every stage on each side."""
    with wan.Wan(seed=2) as net:
        options = ChaosOptions(peers=8, stages=2)
        swarm = WanSwarm(options, folder / "swarm", net, "1M", {"in_flight": 4, "slots": 16},
                         {"rounds": {"target_tokens": 4096}})  # fmt: skip
        try:
            await swarm.start()
            await asyncio.sleep(15)
            sides = [[f"peer-{n}" for n in side] for side in ((1, 2, 5, 6), (3, 4, 7, 8))]
            sides[0].append("bootstrap")
            net.partition(*sides)
            cut = time.time()
            swarm.say("cut in two halves")
            await asyncio.sleep(arguments.seconds)
            net.heal()
            healed = time.time()
            swarm.say("healed")
            await asyncio.sleep(40)
        finally:
            await swarm.stop()
    return {"cut_seconds": healed - cut, **healing(chaos_report.read(swarm.folder), cut, healed)}


def healing(lives, cut, healed):
    """When the last peer was of one history with its stage again, and what became of the contributions."""
    seconds = {}
    for stage in sorted({life.stage for life in lives}):
        group = [life for life in lives if life.stage == stage]
        shared = set.intersection(*(set(life.settled) for life in group))
        agreed = sorted(round for round in shared if len({life.settled[round] for life in group}) == 1)
        if not agreed:
            seconds[stage] = None
            continue
        ends = [max(life.settled_at[round] for life in group) for round in agreed]
        later = [end for end in ends if end > healed]
        seconds[stage] = round(min(later) - healed, 2) if later else None
    fate = chaos_report.contributions(lives, {})
    return {
        "healed_to_one_digest_seconds": seconds,
        "resynchronised": [reason for life in lives for reason in life.resynchronised],
        "unequal_digests": len(chaos_report.digests(lives)[1]),
        "settled_while_cut": {
            life.name: sum(cut < at < healed for at in life.settled_at.values()) for life in lives
        },
        "contributions": fate,
    }


LARGE_STAGE = {
    "stages": [1, 8], "model": {**MODELS["25M"], "layers": 9},
    "data": {"sequence_tokens": 64, "microbatch_sequences": 1},
    "rounds": {"target_tokens": 512, "window": 1, "snapshot_rounds": 1},
}  # fmt: skip
"""Stage 1 has 25.7 million parameters; microbatches are small, so that its CPUs keep up."""


# -- a newcomer -------------------------------------------------------------------------------------------


async def join(folder, arguments):
    """Four holders in stage 1 and one peer above them train, then rest; a fifth joins stage 1."""
    with wan.Wan(seed=3) as net:
        swarm = WanSwarm(ChaosOptions(peers=5, stages=2), folder / "swarm", net, arguments.model,
                         {"in_flight": 2, "slots": 8},
                         LARGE_STAGE)  # fmt: skip
        swarm.stages = lambda: [0, 1, 1, 1, 1]
        try:
            await swarm.start()
            await swarm.until(lambda: chaos_report.last_round(chaos_report.read(swarm.folder)) >= 6)
            swarm.peers[0].kill()  # Without text nobody trains: the lines are free.
            await asyncio.sleep(10)
            before = net.stats()
            await swarm.add(1, "newcomer")
            began = time.time()
            fetched = []

            def arrived():
                fetched[:] = [event for name, event in events(swarm.folder, "fetched") if name == "newcomer"]
                return bool(fetched) or time.time() > began + arguments.seconds

            await swarm.until(arrived)
            after = net.stats()
        finally:
            await swarm.stop()
    asked = [event for name, event in events(swarm.folder, "fetching") if name == "newcomer"]
    took = fetched[-1].time - asked[0].time
    megabits = 8e-6 * asked[-1].fields["size"]
    allowed = min(4 * HOME["up"], HOME["down"])
    return {
        "bytes": asked[-1].fields["size"], "holders": asked[-1].fields["holders"], "seconds": round(took, 2),
        "mbit_per_second": round(megabits / took, 2), "lines_allow": allowed,
        "share": round(megabits / took / allowed, 3),
        "sent_mbit": {name: round(sent, 1) for name, sent in sent_megabits(swarm, before, after).items()},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["tokens", "partition", "join"])
    parser.add_argument("--model", choices=list(MODELS), default="1M")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--warm-seconds", type=float, default=20.0)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--target-tokens", type=int, default=8192)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    reason = wan.why_not()
    if reason is not None:
        sys.exit(f"error: no emulated network here: {reason}")
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="swarmnet-wan-"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    work = {"tokens": tokens, "partition": partition, "join": join}[arguments.what]
    print(json.dumps(asyncio.run(work(folder, arguments)), indent=1))


if __name__ == "__main__":
    main()
