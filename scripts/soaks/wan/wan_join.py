"""`scripts/soak wan join`: how much of the lines a fetch of the state uses, how soon bad holders are dropped.

Four holders in stage 1 and one peer above them train for some rounds. Then they rest (with --training they go
on), and a fifth joins stage 1. With `--holders lies,stalls` the first holders do so
(scripts/soaks/wan/wan_holder.py).
"""

import asyncio
import sys
import time
from itertools import pairwise
from pathlib import Path

import wan
from wan_swarm import HOME, MODELS, WanSwarm, events, sent_megabits

from peers.lab.processes import chaos_report
from peers.lab.processes.chaos import ChaosOptions

LARGE_STAGE = {
    "stages": [1, 8], "model": {**MODELS["25M"], "num_hidden_layers": 9},
    "data": {"seq_len": 64, "micro_batch_size": 1},
    "rounds": {"global_batch_tokens": 512, "window": 1, "snapshot_interval": 1},
}  # fmt: skip
"""Stage 1 has 25.7 million parameters; microbatches are small, so that its CPUs keep up."""
ROUNDS_BEFORE = 6
SAMPLE_SECONDS = 1.0


class Holders(WanSwarm):
    """Stage 1 is held by four; `wrong` says what is wrong with the first of them."""

    wrong = ()

    def stages(self):
        return [0, 1, 1, 1, 1]

    def place(self, name):
        prefix, keys = super().place(name)
        for number, what in enumerate(self.wrong):
            if name == f"peer-{number + 2}":
                prefix = [*prefix, sys.executable, str(Path(__file__).with_name("wan_holder.py")), what]
        return prefix, keys


async def join(folder, arguments):
    with wan.Wan(seed=3) as net:
        swarm = Holders(ChaosOptions(peers=5, stages=2), folder / "swarm", net, arguments.model,
                        {"in_flight": 2, "slots": 8}, LARGE_STAGE)  # fmt: skip
        swarm.wrong = [what for what in arguments.holders.split(",") if what]
        try:
            await swarm.start()
            rounds = lambda: chaos_report.last_round(chaos_report.read(swarm.folder))  # noqa: E731
            await swarm.until(lambda: rounds() >= ROUNDS_BEFORE)
            if not arguments.training:
                swarm.peers[0].kill()  # Without text nobody trains: the lines are free.
                await asyncio.sleep(10)
            before, began = net.stats(), time.time()
            sampling = asyncio.create_task(sample(net, samples := []))
            rounds_before = rounds()
            await swarm.add(1, "newcomer")
            until = began + arguments.seconds
            await swarm.until(lambda: of_newcomer(swarm, "fetched") or time.time() > until)
            after, ended, rounds_after = net.stats(), time.time(), rounds()
            sampling.cancel()
        finally:
            await swarm.stop()
    found = report(swarm, samples)
    found["sent_mbit"] = {n: round(sent, 1) for n, sent in sent_megabits(swarm, before, after).items()}
    found["newcomer_got_mbit"] = round(8e-6 * after["hosts"]["newcomer"]["received_bytes"], 1)
    found["newcomer_start_to_fetched_seconds"] = round(ended - began, 1)
    found["rounds_of_others_per_second"] = round((rounds_after - rounds_before) / (ended - began), 2)
    return found


async def sample(net, samples):
    while True:
        newcomer = net.stats()["hosts"].get("newcomer", {"received_bytes": 0})
        samples.append((time.time(), newcomer["received_bytes"]))
        await asyncio.sleep(SAMPLE_SECONDS)


def of_newcomer(swarm, event):
    return [found for name, found in events(swarm.folder, event) if name == "newcomer"]


def report(swarm, samples):
    asked, fetched = of_newcomer(swarm, "fetching"), of_newcomer(swarm, "fetched")
    began, ended = asked[-1].time, fetched[-1].time
    size = asked[-1].fields["size"]
    allowed = min(asked[-1].fields["holders"] * HOME["up"], HOME["down"])
    megabits = 8e-6 * size
    holders = {peer.name: peer.peer_id for peer in swarm.peers[1:5]}
    carried = [
        round(8e-6 * (then - now) / (at - earlier))
        for (earlier, now), (at, then) in pairwise(samples)
        if began - 1 < at < ended + 1
    ]
    names = {peer: name for name, peer in holders.items()}
    return {
        "bytes": size, "holders": asked[-1].fields["holders"], "seconds": round(ended - began, 2),
        "mbit_per_second": round(megabits / (ended - began), 2), "lines_allow": allowed,
        "share": round(megabits / (ended - began) / allowed, 3),
        "dropped": [
            (names.get(event.fields["peer"]), event.fields["reason"], round(event.time - began, 2))
            for event in of_newcomer(swarm, "holder_dropped")
        ],
        "newcomer_gets_mbit_each_second": str(carried),
    }  # fmt: skip
