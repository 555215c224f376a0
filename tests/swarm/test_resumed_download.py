"""A newcomer that is killed in the middle of its download comes back: whole workers in memory, on a virtual
clock, with a state of random weights in 64 chunks, at lines that take seconds for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from swarm import COST_SECONDS, Member, Swarm, shared_rounds, tiny_manifest

from peers.lab.world.virtual_time import run
from protocols.memory.transport import Conditions
from swarmnet.run.manifest import Rounds

STATE_BYTES, CHUNK_BYTES = 1 << 17, 2048
THIN = Conditions(latency_seconds=0.02, bytes_per_second=16_000)
WIDE = Conditions(latency_seconds=0.02)
SNAPSHOT_ROUNDS = 8
RULES = Rounds(
    global_batch_tokens=512, max_seconds=5.0, contribution_timeout_seconds=1.0, finality_timeout_seconds=3.0,
    snapshot_interval=SNAPSHOT_ROUNDS,
)  # fmt: skip
OTHERS = ("a", "b", "c")
COSTS = [cost * factor for cost, factor in zip(COST_SECONDS, (1, 4, 4, 1), strict=True)]
"""Slow peers make rounds of a quarter of the microbatches, in the same time: nothing here is about them."""


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch):
    monkeypatch.setattr("swarmnet.snapshots.fetch.SMALLEST_CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr("peers.lab.world.stub_stage.SIZE", STATE_BYTES // 4)


def play(story: Callable[[Swarm], Awaitable[None]]) -> Swarm:
    """Three peers that have settled more rounds than contributions are kept for, then the story."""
    swarm = Swarm(tiny_manifest((3,), rounds=RULES), stub=True)

    async def whole() -> None:
        swarm.open()
        for name in OTHERS:
            swarm.start(name, 0, in_flight=2, compute=COSTS.__getitem__)
        await swarm.until(lambda: settled(swarm) >= 4 * SNAPSHOT_ROUNDS, 60.0)
        await story(swarm)
        await swarm.close()

    run(whole())
    assert shared_rounds(swarm) > 0
    return swarm


def settled(swarm: Swarm) -> int:
    rounds = swarm.rounds()
    return min(rounds[name][1] if name in rounds else -1 for name in OTHERS)


def newest(swarm: Swarm) -> int:
    return min(swarm.members[name].worker.snapshots.newest_round() for name in OTHERS)


def comes(swarm: Swarm, folder: Path | None) -> Member:
    member = swarm.start("d", 0, checkpoints=folder, in_flight=2, compute=COSTS.__getitem__)
    lines(swarm, THIN)
    return member


def lines(swarm: Swarm, conditions: Conditions) -> None:
    """To the newcomer."""
    for name in OTHERS:
        swarm.network.set(swarm.members[name].peer, swarm.members["d"].peer, conditions)


async def killed_at(swarm: Swarm, folder: Path | None, share: float) -> tuple[int, int]:
    """The newcomer fetches so much of the state, and dies; of which round, and how many bytes it got."""
    member = comes(swarm, folder)
    before = len(swarm.of("fetching", "d"))
    await swarm.until(lambda: len(swarm.of("fetching", "d")) > before, 20.0)
    states = member.worker.states
    await swarm.until(lambda: states.fetched_bytes >= share * STATE_BYTES, 60.0)
    assert states.fetched_bytes < STATE_BYTES
    await swarm.crash("d")
    return swarm.of("fetching", "d")[-1].fields["round"], states.fetched_bytes - states.kept_bytes


async def in_step(swarm: Swarm) -> None:
    """The newcomer fetches the state, and what the group has settled since then at better lines."""
    await swarm.until(lambda: swarm.of("fetched", "d"), 60.0)
    lines(swarm, WIDE)
    await swarm.until(lambda: swarm.of("in_step", "d"), 60.0)


def received(member: Member) -> int:
    """What came over the lines of snapshots, framing included."""
    return member.worker.neighbourhood.traffic.received["snapshot"]


def chunks_in(folder: Path) -> int:
    return len(list((folder / "download").iterdir()))


@pytest.mark.parametrize(
    "share", [0.6, *(pytest.param(share, marks=pytest.mark.soak) for share in (0.1, 0.95))]
)
def test_a_newcomer_that_is_killed_in_its_download_comes_back_and_fetches_only_the_rest(tmp_path, share):
    async def story(swarm: Swarm) -> None:
        round, first = await killed_at(swarm, tmp_path, share)
        assert chunks_in(tmp_path) * CHUNK_BYTES == first, "what has come is on disk"
        member = comes(swarm, tmp_path)
        await in_step(swarm)
        began, (fetched,) = swarm.of("fetching", "d")[-1].fields, swarm.of("fetched", "d")
        assert (began["round"], began["kept"]) == (round, first)
        assert fetched.fields["round"] == round
        assert fetched.fields["bytes"] == STATE_BYTES - first
        assert member.worker.states.fetched_bytes == STATE_BYTES, "for the metrics it is whole"
        assert STATE_BYTES - first < received(member)
        if share > 0.5:  # With the roots of all holders, and what two of them were asked for at the end.
            assert received(member) < STATE_BYTES
        assert not (tmp_path / "download").exists(), "nothing is left of it"
        told = [text for event, text in member.said if event == "weights"]
        assert "of it on disk" in told[0]
        await swarm.until(lambda: swarm.rounds()["d"][1] > round + 2 * SNAPSHOT_ROUNDS, 60.0)

    swarm = play(story)
    digests = swarm.digests(0)
    assert len(digests["d"].keys() & digests["a"].keys()) > SNAPSHOT_ROUNDS


def test_where_all_holders_fail_it_goes_on_when_they_are_back(tmp_path):
    async def story(swarm: Swarm) -> None:
        member = comes(swarm, tmp_path)
        await swarm.until(lambda: swarm.of("fetching", "d"), 20.0)
        await swarm.until(lambda: member.worker.states.fetched_bytes > STATE_BYTES // 2, 60.0)
        first = member.worker.states.fetched_bytes
        swarm.network.partition([member.peer], [swarm.members[name].peer for name in OTHERS])
        await swarm.until(lambda: "no_weights" in dict(member.said), 20.0)
        swarm.network.heal()
        await in_step(swarm)
        again = swarm.of("fetching", "d")[-1].fields
        assert again["kept"] >= first
        assert swarm.of("fetched", "d")[-1].fields["bytes"] == STATE_BYTES - again["kept"]

    play(story)


@pytest.mark.parametrize(("share", "goes_on"), [(0.7, True), (0.2, False)])
def test_where_a_newer_state_is_offered_meanwhile_an_older_one_is_gone_on_with_if_half_of_it_is_here(
    tmp_path, share, goes_on
):
    async def story(swarm: Swarm) -> None:
        round, first = await killed_at(swarm, tmp_path, share)
        await swarm.until(lambda: newest(swarm) > round, 30.0)
        assert newest(swarm) == round + SNAPSHOT_ROUNDS, "its older one is the other that holders still name"
        comes(swarm, tmp_path)
        await in_step(swarm)
        (fetched,) = swarm.of("fetched", "d")
        if goes_on:
            assert fetched.fields == {"round": round, "bytes": STATE_BYTES - first}
        else:
            assert fetched.fields == {"round": round + SNAPSHOT_ROUNDS, "bytes": STATE_BYTES}
        assert not swarm.of("resync", "d")
        assert not (tmp_path / "download").exists()

    play(story)


def test_a_state_that_nobody_holds_any_more_is_not_waited_for(tmp_path):
    async def story(swarm: Swarm) -> None:
        round, _ = await killed_at(swarm, tmp_path, 0.9)
        await swarm.until(lambda: newest(swarm) > round + SNAPSHOT_ROUNDS, 60.0)
        comes(swarm, tmp_path)
        await in_step(swarm)
        assert swarm.of("fetched", "d")[-1].fields["round"] > round + SNAPSHOT_ROUNDS
        assert not (tmp_path / "download").exists()

    play(story)


def test_a_newcomer_told_to_leave_in_its_download_goes_at_once_and_comes_back_for_the_rest(tmp_path):
    async def story(swarm: Swarm) -> None:
        worker = comes(swarm, tmp_path).worker
        await swarm.until(lambda: swarm.of("fetching", "d"), 20.0)
        await swarm.until(lambda: worker.states.fetched_bytes >= STATE_BYTES // 2, 60.0)
        told_at = swarm.loop.time()
        await swarm.leave("d")
        assert swarm.loop.time() - told_at < 1.0, "the lines would take seconds for the other half"
        here = chunks_in(tmp_path) * CHUNK_BYTES
        assert STATE_BYTES // 2 <= here < STATE_BYTES
        assert not list(tmp_path.glob("*.safetensors")), "it had no weights yet"
        await worker.transport.close()
        comes(swarm, tmp_path)
        await in_step(swarm)
        assert swarm.of("fetching", "d")[-1].fields["kept"] == here

    play(story)
