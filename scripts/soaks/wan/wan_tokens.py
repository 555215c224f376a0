"""`scripts/soak wan tokens`: tokens/s of 6 peers in 2 stages on the WAN, right after the same on loopback.

`whole`: 8 peers that hold the whole model each and step by themselves; only contributions travel.
"""

import asyncio
import json
import os
import time
from statistics import fmean, median

import wan
from wan_swarm import MODELS, WanSwarm, events, sent_megabits

from peers.config.peer_file import PeerFile
from peers.lab.processes import chaos_report
from peers.lab.processes.chaos import ChaosOptions

SHARDS = 16
STEP_TOKENS = 16384
"""Of an own step: 32 microbatches. More often, eight peers on two cores would measure these cores."""


async def measure_tokens(folder, net, arguments):
    options = ChaosOptions(peers=arguments.peers, stages=arguments.stages)
    defaults = {name: PeerFile.model_fields[name].default for name in ("in_flight", "slots")}
    keys = {"in_flight": arguments.in_flight or defaults["in_flight"], "slots": defaults["slots"]}
    run = {"rounds": {"global_batch_tokens": arguments.global_batch_tokens}}
    if arguments.seq_len:
        run["data"] = {"seq_len": arguments.seq_len}
    if arguments.boundary:
        layers = MODELS[arguments.model]["num_hidden_layers"]
        after = list(range(layers // arguments.stages, layers, layers // arguments.stages))
        run["model"] = {"boundary": {"kind": "token-anchored", "width": arguments.boundary, "after": after}}
    if arguments.sign_muon:
        run["sync"] = {"method": "sign-muon", "fragments": arguments.parts}
    elif arguments.stages == 1 or arguments.local_steps:  # Peers step by themselves between rounds.
        run["sync"] = {
            "method": "local-steps",
            "fragments": arguments.parts,
            "inner_batch_tokens": STEP_TOKENS,
        }
        run["rounds"] |= {"max_seconds": 120.0, "deadline_seconds": 60.0, "finality_timeout_seconds": 60.0}
    if arguments.sharded:
        run["sync"] |= {"topology": "sharded-reduce", "shards": SHARDS}
    swarm = WanSwarm(options, folder, net, arguments.model, keys, run)
    swarm.quic, swarm.paced, swarm.subflows = arguments.quic, arguments.paced, arguments.subflows
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
    origins = {f"peer-{place}" for place, stage in enumerate(swarm.stages(), start=1) if stage == 0}
    first = [
        event
        for name, event in events(folder, "committed")
        if name in origins and began < event.time <= ended
    ]
    applied = [event for _, event in events(folder, "applied") if began < event.time <= ended]
    seconds = ended - began
    found = {
        "tokens_per_second": round(sum(event.fields["tokens"] for event in first) / seconds),
        **(answers(first) if arguments.stages > 1 else {}),
        "round_seconds": round(arguments.peers * seconds / max(1, len(applied)), 3),
        "contributors_at_first": round(fmean(event.fields["contributors"] for event in applied), 2),
        "round_waited_seconds": round(median(event.fields["waited"] for event in applied), 3),
        **contributions(folder),
        "rerouted": sum(1 for _, event in events(folder, "rerouted") if began < event.time <= ended),
        "contribution_bytes_got_per_one_taken": got_per_taken(folder),
        "queue_full": sum(1 for _, event in events(folder, "post_failed") if began < event.time <= ended),
        "unequal_digests": chaos_report.digests(chaos_report.read(folder))[1],
        "load": os.getloadavg()[0],
    }
    if net:
        sent = sent_megabits(swarm, before, after)
        found["subflows"] = newest_subflows(folder)
        found["uplink_mbit"] = {name: round(megabits / seconds, 2) for name, megabits in sent.items()}
        found["router_cpu_share"] = round((after["cpu_seconds"] - before["cpu_seconds"]) / seconds, 3)
    return found


def answers(first):
    """What a microbatch waited for, from when it was sent to its gradient."""
    mean = {name: fmean(event.fields[name] for event in first)
            for name in ("answered", "below", "queued", "under_way")}  # fmt: skip
    network = mean["answered"] - mean["below"] - mean["queued"]
    return {
        "in_flight": round(mean["under_way"], 1),
        "answer_seconds": {
            "whole": round(mean["answered"], 3),
            "compute": round(mean["below"], 3),
            "waits_for_compute": round(mean["queued"], 3),
            "network": round(network, 3),
        },
        "network_share_of_answer": round(network / mean["answered"], 3),
    }


def newest_subflows(folder):
    """Of every peer: subflows opened, attempts that failed, messages repeated."""
    newest = {name: event.fields["subflows"] for name, event in events(folder, "traffic")}
    return {name: [found["opened"], found["failed"], found["repeated"]] for name, found in newest.items()}


def contributions(folder):
    """Return how many contributions settled rounds have, and when the last came after a round closed."""
    closed, last = {}, {}
    for name, event in events(folder, "applied"):
        closed.setdefault((name, event.fields["round"]), event.time - event.fields["waited"])
    for name, event in events(folder, "contribution_accepted"):
        last[name, event.fields["round"]] = event.time
    settled = [
        ((name, event.fields["round"]), len(event.fields["ids"])) for name, event in events(folder, "settled")
    ]
    delays = [last[key] - closed[key] for key, _ in settled if key in last and key in closed]
    return {
        "contributors_settled": round(fmean(count for _, count in settled), 2) if settled else None,
        "last_contribution_seconds": round(median(delays), 1) if delays else None,
    }


def got_per_taken(folder):
    """Over the whole life of the peers; more than a contribution's size if some came twice."""
    newest = {name: event.fields["received"] for name, event in events(folder, "traffic")}
    got = sum(received.get("contribution", 0) for received in newest.values())
    return round(got / max(1, sum(1 for _ in events(folder, "contribution_accepted"))))


async def tokens(folder, arguments):
    loop = None
    if not arguments.only_wan:
        loop = await measure_tokens(folder / "loopback", None, arguments)
        print("loopback", json.dumps(loop), flush=True)
    with wan.Wan(seed=1) as net:
        far = await measure_tokens(folder / "wan", net, arguments)
    print("wan     ", json.dumps(far), flush=True)
    ratio = round(far["tokens_per_second"] / loop["tokens_per_second"], 3) if loop else None
    return {"model": arguments.model, "loopback": loop, "wan": far, "ratio": ratio}
