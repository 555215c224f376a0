"""Real workers in memory: the weights of a stage are on one disk, or damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clocks import on_virtual_clock
from swarm import Swarm, tiny_manifest

from peers.worker.watch.snapshot_of_worker import snapshot_of

MANIFEST = tiny_manifest((2, 1))


def settled(swarm: Swarm) -> int:
    """The oldest of the newest settled rounds of those who live."""
    rounds = [round for _, round in swarm.rounds().values()]
    return min(rounds, default=-1) if len(rounds) == len(swarm.living()) else -1


def peer(swarm: Swarm, name: str, stage: int | None, **settings: object) -> None:
    swarm.start(name, stage, checkpoints=settings.pop("folder") / name, **settings)


def stuck_at(swarm: Swarm, name: str) -> str:
    return " ".join(snapshot_of(swarm.members[name].worker).warnings)


async def left_and_waited_for(swarm: Swarm, folder, back) -> int:
    """`a` alone holds stage 0 and leaves; two without weights take it; `a` comes back to `back`."""
    swarm.open()
    peer(swarm, "a", 0, folder=folder)
    peer(swarm, "c", 1, folder=folder)
    await swarm.until(lambda: settled(swarm) >= 10, 60.0)
    await swarm.leave("a")
    await swarm.members["a"].worker.context.transport.close()
    for name in ("n", "m"):
        peer(swarm, name, None, folder=folder)
    await swarm.during(15.0)
    assert {swarm.members[name].worker.stage for name in ("n", "m")} == {0}
    for name in ("n", "m", "c"):
        assert "tage 0 is stuck" in stuck_at(swarm, name)
        assert f"swarmnet join {swarm.signed.run_id[:16]} --stage 0" in stuck_at(swarm, name)
    at = swarm.rounds()["c"][1]
    peer(swarm, "a", back, folder=folder, moves=True)
    return at


@on_virtual_clock
async def test_the_only_holder_of_a_stage_goes_back_to_it_though_newcomers_wait_there(tmp_path):
    swarm = Swarm(MANIFEST, stub=True)
    at = await left_and_waited_for(swarm, tmp_path, None)
    await swarm.until(lambda: settled(swarm) >= at + 4, 30.0)
    assert not any(stuck_at(swarm, name) for name in swarm.living())
    await swarm.close()


@on_virtual_clock
async def test_a_stage_that_is_lost_before_its_first_snapshot_begins_from_the_seed(tmp_path):
    """The other stage has settled the rounds of a snapshot, which says nothing of the lost one."""
    rounds = replace(MANIFEST.rounds, snapshot_interval=8)
    swarm = Swarm(replace(MANIFEST, rounds=rounds), stub=True)
    swarm.open()
    peer(swarm, "a", 0, folder=tmp_path)
    peer(swarm, "c", 1, folder=tmp_path)
    await swarm.until(lambda: settled(swarm) >= rounds.snapshot_interval, 60.0)
    await swarm.crash("a")
    at = swarm.rounds()["c"][1]
    assert rounds.snapshot_interval <= at < rounds.rounds_from_seed
    await swarm.during(60.0)  # Until the record of `c` says so.
    peer(swarm, "n", 0, folder=tmp_path)
    await swarm.until(lambda: settled(swarm) >= at + 4, 150.0)
    await swarm.close()


@on_virtual_clock
async def test_a_holder_that_was_sent_elsewhere_moves_back(tmp_path):
    swarm = Swarm(MANIFEST, 1, stub=True)
    at = await left_and_waited_for(swarm, tmp_path, 1)
    await swarm.until(lambda: settled(swarm) >= at + 4, 90.0)
    assert swarm.members["a"].worker.stage == 0
    await swarm.close()


@pytest.mark.parametrize("allow_reinit", [False, True])
@on_virtual_clock
async def test_a_peer_whose_checkpoints_are_all_damaged_waits_for_weights(tmp_path, allow_reinit):
    swarm = Swarm(MANIFEST, stub=True)
    swarm.open()
    peer(swarm, "a", 0, folder=tmp_path)
    peer(swarm, "b", 0, folder=tmp_path)
    peer(swarm, "c", 1, folder=tmp_path)
    await swarm.until(lambda: settled(swarm) >= 10, 60.0)
    await swarm.leave("a", "b", "c")
    for name in "abc":
        await swarm.members[name].worker.context.transport.close()
    await swarm.during(130.0)
    [file] = (tmp_path / "a").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    later = file.replace(file.with_name("stage-0-round-00002247.safetensors"))
    (tmp_path / "a" / "stage-0-round-00002246.safetensors").write_bytes(b"")
    peer(swarm, "a", 0, folder=tmp_path, allow_reinit=allow_reinit, checkpoint_seconds=2.0)
    await swarm.during(70.0)
    worker = swarm.members["a"].worker
    assert (worker.has_weights()) == allow_reinit
    if not allow_reinit:
        assert "round 2247" in worker.elsewhere.why
        assert "allow_reinit=true" in worker.elsewhere.why
        peer(swarm, "b", 0, folder=tmp_path)
    peer(swarm, "c", 1, folder=tmp_path)
    await swarm.until(lambda: settled(swarm) >= 20, 90.0)
    assert worker.elsewhere.why == ""
    await swarm.during(10.0)
    await swarm.close()
    assert later.stat().st_size == 100
    assert (tmp_path / "a" / "stage-0-round-00002246.safetensors").stat().st_size == 0
    assert len(list((tmp_path / "a").glob("stage-0-*.safetensors"))) == 4, "two usable ones besides"
