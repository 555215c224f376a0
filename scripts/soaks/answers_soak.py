"""How alike the answers of honest peers are, in swarms of one process on a virtual clock.

Peers of a stage have different weights, because each computes ahead with its own votes that have not settled,
and because rounds settle between two computations. Prints a row for each case: the number of comparisons, the
smallest cosines and largest ratios of norms, and how many peers were avoided, which must be none.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from math import inf
from pathlib import Path

from swarm import Swarm, local_steps, tiny_manifest

from peers.lab.world.virtual_time import run
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync

PEERS = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1, "f": 2, "g": 2, "h": 2}
BF16 = Computing(dtype="bf16")
CASES = {
    "demo-sign": ("demo-sign", "bf16", 8e-3),
    "demo-sign, ten times the rate": ("demo-sign", "bf16", 8e-2),
    "demo-sign, int4-tiles": ("demo-sign", "int4-tiles", 8e-3),
    "sign-muon": ("sign-muon", "bf16", 8e-3),
    "sign-muon, twice the rate": ("sign-muon", "bf16", 1.6e-2),
    "local-steps": ("local-steps", "bf16", 1e-2),
}


def manifest_of(method: str, codec: str, rate: float) -> Manifest:
    sync = local_steps("all-gather", 16)
    if method != "local-steps":
        sync = Sync(method=method, warmup_rounds=1, decay_rounds=1000)
    sync = replace(sync, learning_rate=rate)
    return tiny_manifest(compared_fraction=0.5, activation_codec=codec, sync=sync)


Pairs = dict[str, list[tuple[float, float]]]


def measure(manifest: Manifest, dtype: str, seconds: float) -> tuple[Pairs, int]:
    """Return cosines and ratios of the comparisons by what was compared, and how many peers were avoided.
    With `mixed`, half of the peers compute in bfloat16."""
    swarm = Swarm(manifest)

    async def story() -> None:
        swarm.open()
        for number, (name, stage) in enumerate(PEERS.items()):
            is_bf16 = dtype == "bf16" or (dtype == "mixed" and number % 2)
            swarm.start(name, stage, in_flight=4, computing=BF16 if is_bf16 else PLAIN)
        await swarm.during(seconds)
        await swarm.close()

    run(story())
    found: Pairs = {"gradient": [], "hidden": []}
    for note in swarm.of("answers_compared"):
        found[note.fields["what"]].append(tuple(note.fields["likeness"]))
    return found, sum(note.fields["code"] == "differs" for note in swarm.of("refused"))


def committed(fraction: float, seconds: float, uplink: float) -> int:
    """Return the microbatches of twelve peers in three stages, whose compute only takes time."""
    swarm = Swarm(tiny_manifest(compared_fraction=fraction), stub=True)

    async def story() -> None:
        swarm.open()
        for number in range(12):
            member = swarm.start(f"peer {number}", number % 3, in_flight=16)
            swarm.network.transports[member.peer].uplink.bytes_per_second = uplink
        await swarm.during(seconds)
        await swarm.close()

    run(story())
    return swarm.committed(0)


UPLINKS = (52e3, 56e3, 60e3, 64e3, 68e3, 72e3)
"""Bytes per second of a peer. Single runs scatter by up to a fifth, so their sum is compared."""


def price(seconds: float) -> None:
    """Print the share of microbatches that comparisons cost, where compute is scarce and where upload is."""
    for name, uplinks in (("compute", (inf,)), ("upload", UPLINKS)):
        without, *compared = (
            sum(committed(fraction, seconds, uplink) for uplink in uplinks) for fraction in (0.0, 0.02, 0.1)
        )
        for fraction, count in zip((0.02, 0.1), compared, strict=True):
            ratio = count / without
            print(f"{name} scarce: {without:,} microbatches; {fraction:.0%} compared: {ratio:.4f} of them")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual seconds of each case")
    parser.add_argument("--case", choices=CASES, action="append", help="only these; all by default")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "mixed"), action="append")
    parser.add_argument("--json", type=Path, help="write all cosines and ratios to this file")
    parser.add_argument("--price", action="store_true", help="only measure what comparisons cost")
    given = parser.parse_args()
    if given.price:
        price(given.seconds)
        return
    kept = {}
    print("| case | dtype | what | comparisons | least cosine | 1st percentile | largest ratio | avoided |")
    print("|---|---|---|---:|---:|---:|---:|---:|", flush=True)
    for case in given.case or CASES:
        for dtype in given.dtype or ("fp32", "bf16", "mixed"):
            found, avoided = measure(manifest_of(*CASES[case]), dtype, given.seconds)
            for what, pairs in found.items():
                cosines = sorted(cosine for cosine, _ in pairs)
                ratio = max((ratio for _, ratio in pairs), default=1.0)
                least, low = (cosines[0], cosines[len(cosines) // 100]) if cosines else (1.0, 1.0)
                print(
                    f"| {case} | {dtype} | {what} | {len(pairs):,} | {least:.3f} | {low:.3f} | {ratio:.2f} "
                    f"| {avoided} |",
                    flush=True,
                )
            kept[f"{case}/{dtype}"] = found
            if given.json is not None:
                given.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
