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
    "demo": "57ecb88ba112a1ca445122009ff19bbea5cb765451a2825200163b47170d6d61",
    "low-rank": "a8e8aadf5c5225bbc3cea851ab872886d4718b95c0e8408a8d24e135044b51bc",
    "hybrid": "05601250c45c447d7a9b0d51c2d9a33062a5dde028b32890b5ef2e7052cc67e5",
    "sign-muon": "a498617f01c546f3ba9a939fdfcd7f7adeb72923a2204ae46ccb90c7d1c867c9",
    "sign-muon, sharded": "a3828f0bec628369031114d22c2c946b48fa092e18ecbcf89ff075c558e144ee",
    "local-steps": "f7bf4aca09d4c7c509318520abe797cba8596f7d17fd780b0f7860d9e76576bf",
    "local-steps, sharded": "ed53b6c15ac6034c474e4d6231091c8a10e3c10dbcf61a330d5f9a543377084f",
    "diloco": "de0e538e57d8405f71f5f6d809b5b10310f526ee30d184e7f778b41c1cb14c37",
    "streaming-diloco": "221d47e8d9b58d4bf5b395fcb049ccaf373d98a63787323859f1dfabf01f5e1b",
    "sparse-loco": "d7bdf0e52d4215d661e20793f2314251a069b9471b010885e11ed68aba1470dc",
    "sparta": "d4a9b52425aa7dd4e0c9af91248ae022f5906b99be7477d2acac18fabd685832",
    "experts in groups": "1e6627e502bec50f1a967878bb26645cf96a3cf9487f46ef164738332e05f148",
}
"""Name of the swarm -> SHA-256 of what it settles, with the pinned torch. They were those of commit 3656230,
except that of the reducers, where f23dd37 changed which results count and who is drawn, and sign-muon's.
ac5b498 and 7ce1314 changed when contributions are added and rounds close; without them all are as before."""
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
