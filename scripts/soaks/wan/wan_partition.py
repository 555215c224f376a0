"""`scripts/soak wan partition`: 50/50 for a minute, then healed: seconds until every stage has one digest."""

import asyncio
import time

import wan
from wan_swarm import WanSwarm

from peers.lab.processes import chaos_report
from peers.lab.processes.chaos import ChaosOptions


async def partition(folder, arguments):
    """Half of every stage on each side."""
    with wan.Wan(seed=2) as net:
        options = ChaosOptions(peers=8, stages=2)
        swarm = WanSwarm(options, folder / "swarm", net, "1M", {"in_flight": 4, "slots": 16},
                         {"rounds": {"global_batch_tokens": 4096}})  # fmt: skip
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
