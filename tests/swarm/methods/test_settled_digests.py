"""What thirteen seeded swarms settle stays the same to the bit, whatever is rebuilt around the mathematics.

There is one for each way to train. A run's id seeds its draws and changes with every key that a manifest
gains or loses, so each swarm has an id that follows from its name. This prints name -> digest, as JSON:

    OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE PYTHONPATH=.:tests/support \
        .venv/bin/python tests/swarm/methods/test_settled_digests.py [NAME ...]
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from swarm import (
    COST_SECONDS,
    Swarm,
    expert_manifest,
    nothing_is_committed_twice,
    shared_rounds,
    tiny_manifest,
)

from peers.compute.executor import FORWARD
from peers.lab.world.virtual_time import run
from protocols.memory.transport import Conditions
from swarmnet.identifiers import RunId
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Paths, Sync

ROOT = Path(__file__).parents[3]
PORTABLE = {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
"""The same sums on every x86 processor; torch and MKL read this when they are loaded."""
SETTLED = {
    "demo-sign, skipping": "2299975dfb5cf4ef649d5b81a13a91183f7b84be6a113d6d0a8c73015c4052ec",
    "demo": "c3492ddc4bf52b091bd80c7ae6aa9d3714d54d6378b46f67a69c70d4a1967919",
    "low-rank": "30ab2dc8484ed9d41a1182bc1891015f009819e4435b2ae9c3d67245998ea6dc",
    "hybrid": "4ba94f70e8100ab7ac5824885643d53cc418f1e1fff96f4529b1d29a809ebcfd",
    "sign-muon": "a498617f01c546f3ba9a939fdfcd7f7adeb72923a2204ae46ccb90c7d1c867c9",
    "sign-muon, sharded": "a570702ff7902ebb64ef667d248fb71da694a52625f2b530ea1e6327539f46ff",
    "local-steps": "04e93013b5da31f4bf07c24b18d5e2fb01ef25c194794bbdda5c068701ee20e6",
    "local-steps, sharded": "74b798fe401541c705d4cac9a2a4776c2cffcad5047b6374d314c76991adf8cd",
    "diloco": "4314747d2963a0c698ae25e0246de6516316429d69fce858dd6d60d5c0b0b12f",
    "streaming-diloco": "3496cf8159d51bb48e5af4a2c7a005f5d6f4f7444447359ad2401da59510762b",
    "sparse-loco": "abea9dc3fddf8674ecbe0639b9bdc13bc5de9a54e1305d276330d82cf32c0dbb",
    "sparta": "79701382a33474f679c59486cb902a850694c5ac8436d12503052f88ccbdbd66",
    "experts in groups": "0815b74a1cbf97bc487f8942759915658f3487f8fdc12d9554cc8ca842439fc5",
}
"""Name of the swarm -> SHA-256 of what it settles, with the pinned torch. They are those of commit 3656230,
except that of the reducers, where f23dd37 changed which results count and who is drawn, and sign-muon's."""
FORMER_NAMES = {
    "demo-sign, skipping": "demo-votes, skipping",
    "demo": "demo-float",
    "sparta": "partitioned",
}
"""Name of the swarm -> the name that its run id still follows from, so that its draws stay the same."""
SETTLED_ROUNDS = 4
PEERS = 3
"""Of a single stage. Of several stages the first has two and each other one, so that no route is drawn."""
FIRST_SECONDS = 10.0
"""No microbatch is computed before: how peers find one another is not to decide what they contribute."""


def of_method(method: str, stages: tuple[int, ...] = (3,), **keys: object) -> Manifest:
    manifest = tiny_manifest(stages)
    sync = replace(Sync(method=method, **keys), warmup_rounds=1, decay_rounds=1000, inner_batch_tokens=64)
    return replace(manifest, sync=sync, rounds=replace(manifest.rounds, global_batch_tokens=256))


def skipping() -> Manifest:
    """Four stages, of which a microbatch may leave one out."""
    manifest = of_method("demo-sign", (1, 1, 1, 1))
    return replace(manifest, model=replace(manifest.model, num_hidden_layers=4), paths=Paths(skip_ratio=0.25))


def experts() -> Manifest:
    """Each peer trains half of the experts, which are merged every second round."""
    manifest = expert_manifest(num_experts=4, top_k=2, groups=2, merge_rounds=2, merge_nearest=2)
    return replace(manifest, stages=(3,), rounds=replace(manifest.rounds, global_batch_tokens=256))


SWARMS: dict[str, Callable[[], Manifest]] = {
    "demo-sign, skipping": skipping,
    "demo": lambda: of_method("demo", transform="dct", selection="top-k", chunking="tiled"),
    "low-rank": lambda: of_method("low-rank"),
    "hybrid": lambda: of_method("hybrid"),
    "sign-muon": lambda: of_method("sign-muon", (2, 1), fragments=2),
    "sign-muon, sharded": lambda: of_method("sign-muon", topology="sharded-reduce", shards=4),
    "local-steps": lambda: of_method("local-steps"),
    "local-steps, sharded": lambda: of_method("local-steps", topology="sharded-reduce", shards=4),
    "diloco": lambda: of_method("diloco"),
    "streaming-diloco": lambda: of_method("streaming-diloco"),
    "sparse-loco": lambda: of_method("sparse-loco"),
    "sparta": lambda: of_method("sparta"),
    "experts in groups": experts,
}


@contextmanager
def injected(run_id: RunId) -> Iterator[None]:
    """Every manifest has this id meanwhile."""
    own, Manifest.run_id = Manifest.run_id, lambda _: run_id  # type: ignore[method-assign]
    try:
        yield
    finally:
        Manifest.run_id = own  # type: ignore[method-assign]


def digest_of(name: str) -> str:
    """Play one swarm. Returns SHA-256, in hexadecimal, over what each stage settles in its first rounds."""
    manifest = SWARMS[name]()
    with injected(RunId(hashlib.sha256(FORMER_NAMES.get(name, name).encode()).hexdigest())):
        swarm = Swarm(manifest, conditions=Conditions(latency_seconds=0.001))
        run(_whole(swarm))
    nothing_is_committed_twice(swarm)
    shared_rounds(swarm)
    settled = hashlib.sha256()
    for stage in range(len(manifest.stages)):
        digests = next(iter(swarm.digests(stage).values()))
        settled.update(b"".join(digests[round] for round in range(SETTLED_ROUNDS)))
    return settled.hexdigest()


async def _whole(swarm: Swarm) -> None:
    swarm.open()
    stages = range(len(swarm.signed.manifest.stages))
    places = [0, *stages] if len(stages) > 1 else [0] * PEERS
    for number, stage in enumerate(places):
        swarm.start(f"peer {number}", stage, in_flight=2, compute=_cost(swarm, number))
    names = len(swarm.members)

    def done() -> bool:
        rounds = swarm.rounds()
        return len(rounds) == names and all(settled >= SETTLED_ROUNDS for _, settled in rounds.values())

    await swarm.until(done, 120.0)
    await swarm.close()


def _cost(swarm: Swarm, number: int) -> Callable[[int], float]:
    """Return the seconds that each kind of work takes. No two peers are equally fast."""

    def seconds(kind: int) -> float:
        waits = max(0.0, FIRST_SECONDS - swarm.loop.time()) if kind == FORWARD else 0.0
        return waits + COST_SECONDS[kind] * (1 + number / 7)

    return seconds


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirteen_seeded_swarms_settle_what_they_settled_before():
    """In a process of its own, because torch and MKL read their switches when they are loaded."""
    path = f"{ROOT}:{ROOT / 'tests' / 'support'}"
    done = subprocess.run(
        [sys.executable, __file__], env={**os.environ, **PORTABLE, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == SETTLED


if __name__ == "__main__":
    print(json.dumps({name: digest_of(name) for name in sys.argv[1:] or SWARMS}, indent=4))
