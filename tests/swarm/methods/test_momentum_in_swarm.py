"""A peer that was killed continues with the momentum that it had kept on its disk."""

from __future__ import annotations

from swarm import Swarm, shared_rounds, tiny_manifest

from peers.lab.world.virtual_time import run
from peers.telemetry import log_events
from swarmnet.run.schema import Sync

THREE = {"a": 0, "b": 0, "c": 0}
SYNC = Sync(method="sign-muon", learning_rate=8e-3, warmup_rounds=1, decay_rounds=1000)


def test_a_restarted_peer_votes_by_its_momentum_from_before_and_stays_equal_with_the_others(tmp_path):
    swarm = Swarm(tiny_manifest((3,), sync=SYNC))

    def settled() -> int:
        return min((settled for _, settled in swarm.rounds().values()), default=-1)

    async def story() -> None:
        swarm.open()
        for name, stage in THREE.items():
            swarm.start(name, stage, in_flight=2, checkpoints=tmp_path / name, checkpoint_seconds=1.0)
        file = tmp_path / "a" / "stage-0-momentum.safetensors"
        await swarm.until(lambda: settled() >= 6 and file.exists(), 60.0)
        await swarm.crash("a")
        behind = settled() + 3
        await swarm.until(lambda: settled() >= behind, 60.0)
        back = swarm.start("a", 0, in_flight=2, checkpoints=tmp_path / "a")
        await swarm.until(lambda: swarm.of("momentum_restored", "a"), 30.0)
        (restored,) = (note.what for note in swarm.of("momentum_restored", "a"))
        assert isinstance(restored, log_events.MomentumRestored)
        assert 0 < restored.age < 40
        assert back.worker.services is not None
        assert back.worker.services.part.method.momentum.any()
        later = settled() + 5
        await swarm.until(lambda: settled() > later, 60.0)
        await swarm.crash("a")
        assert swarm.of("momentum_restored") == swarm.of("momentum_restored", "a"), "newcomers have none"
        file.write_bytes(file.read_bytes()[:-9])
        swarm.start("a", 0, in_flight=2, checkpoints=tmp_path / "a")
        await swarm.until(lambda: swarm.of("momentum_ignored", "a"), 30.0)
        later = settled() + 3
        await swarm.until(lambda: settled() > later, 60.0)
        await swarm.close()

    run(story())
    assert shared_rounds(swarm) > 10
