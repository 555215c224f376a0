"""Peers of one group that compute in other numbers, or keep less of a microbatch, settle the same."""

from __future__ import annotations

from swarm import Swarm, nothing_is_committed_twice, shared_rounds, tiny_manifest

from peers.lab.world.virtual_time import run
from swarmnet.model.computing.choices import Computing
from swarmnet.run.schema import Rounds, Sync

ROUNDS = 30
"""Of 200, with two stages and six peers, docs/benchmarks/memory.md tells."""
MIXED = {
    "a": Computing(),
    "b": Computing(dtype="bf16", optimizer_state="cpu"),
    "c": Computing(dtype="bf16", activation_checkpointing="layer"),
    "d": Computing(dtype="fp16"),
}


def played(computings, rounds=ROUNDS, seed=0):
    swarm = Swarm(
        tiny_manifest(
            (3,),
            rounds=Rounds(
                global_batch_tokens=64,
                max_seconds=5.0,
                contribution_timeout_seconds=1.0,
                finality_timeout_seconds=3.0,
                snapshot_interval=50,
            ),
            sync=Sync(method="local-steps", warmup_rounds=1, decay_rounds=1000, learning_rate=8e-3),
        ),
        seed,
    )

    def settled():
        """The oldest of the newest settled rounds."""
        told = swarm.rounds().values()
        return min(settled for _, settled in told) if len(told) == len(computings) else -1

    async def story():
        swarm.open()
        for name, computing in computings.items():
            swarm.start(name, 0, computing=computing)
        await swarm.until(lambda: settled() >= rounds, 600.0)
        await swarm.close()

    run(story())
    return swarm


def last_loss(swarm):
    losses = swarm.losses(0)[-50:]
    return sum(losses) / len(losses)


def test_peers_that_compute_in_other_numbers_settle_the_same_weights_and_learn():
    mixed = played(MIXED)
    nothing_is_committed_twice(mixed)
    assert shared_rounds(mixed) >= ROUNDS
    contributors = {note.fields["contributor"] for note in mixed.of("contribution_accepted")}
    assert contributors == {member.peer for member in mixed.members.values()}, "all of them contribute"
    assert last_loss(mixed) < 4.5 < sum(mixed.losses(0)[:10]) / 10
