"""Real processes: one peer holds two stages, and trains with two others that hold one each."""

import asyncio
import contextlib
import os
import signal
import urllib.request

import pytest
from processes import QUIET, times, until

from peers.config.run_file import publish
from peers.config.sibling_file import sibling_folder
from peers.lab.processes.processes import start
from peers.runtime.control_client import ask
from peers.telemetry.event_log import read
from protocols.signed.identity import load_or_create

RUN = """
name: small
seed: 1
stages: [1, 1]
model: {layers: 2, width: 32, heads: 2, key_value_heads: 2, head_width: 16, feed_forward: 64}
data: {sequence_tokens: 64, microbatch_sequences: 2}
rounds: {target_tokens: 1024, settle_seconds: 2, snapshot_rounds: 4}
"""


@contextlib.asynccontextmanager
async def swarm(folder):
    """One process that holds both stages, and one for each stage besides."""
    (folder / "run.yaml").write_text(RUN)
    publish(folder / "run.yaml", load_or_create(folder / "owner.key"), folder / "run.json")
    keys = {**QUIET, "run": "run.json", "work_share": 0.3, "drain_seconds": 2}
    both = await start(folder, "both", {**keys, "stages": 2, "metrics": {"listen": "127.0.0.1:0"}})
    peers = [both]
    try:
        await both.until_listening()
        joins = {**keys, "bootstrap": both.addresses[:1]}
        peers += [await start(folder, f"single{stage}", {**joins, "stage": stage}) for stage in (0, 1)]
        yield peers
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in peers))


def digests(state):
    """Round -> digest of what was settled."""
    events = read(state / "events.jsonl") if (state / "events.jsonl").exists() else ()
    return {event.fields["round"]: event.fields["digest"] for event in events if event.name == "settled"}


def agree(one, other):
    """How many rounds both have settled; AssertionError if not with equal digests."""
    ours, theirs = digests(one), digests(other)
    both = ours.keys() & theirs.keys()
    assert all(ours[round] == theirs[round] for round in both)
    return len(both)


async def asked(peer, do):
    return await asyncio.to_thread(ask, peer.state, {"do": do}, 30.0)


def page(peer, path):
    (said,) = [text for text in peer.said if text.startswith("metrics at")]
    url = said.removeprefix("metrics at ").removesuffix("/metrics")
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        return answer.read().decode()


@pytest.mark.loopback
@pytest.mark.slow
async def test_one_process_holds_two_stages_trains_with_others_pauses_and_leaves(tmp_path):
    async with swarm(tmp_path) as (both, first, last):
        second = sibling_folder(both.state, 1)
        for held, single in ((both.state, first.state), (second, last.state)):
            await until(lambda held=held, single=single: agree(held, single) > 2, "both settle the same")

        told = await asked(both, "status")
        assert [seen["stage"] for seen in told["peers"] if seen["here"]] == [0]
        assert [seen["stage"] for seen in told["others"][0]["peers"] if seen["here"]] == [1]
        mine = await asked(both, "me")
        assert mine["peer"] != mine["others"][0]["peer"], "each stage has an identity"
        text = await asyncio.to_thread(page, both, "/metrics")
        assert 'swarmnet_state{stage="0",state="training"} 1.0' in text
        assert 'swarmnet_state{stage="1",state="training"} 1.0' in text
        assert text.count("\nprocess_resident_memory_bytes ") == 1
        assert await asyncio.to_thread(page, both, "/readyz") == "ok\n"

        await asked(both, "pause")
        paused = await asked(both, "me")
        assert [one["state"] for one in (paused, *paused["others"])] == ["paused (user)"] * 2
        await asked(both, "resume")
        for state in (both.state, second):
            await until(lambda state=state: len(times(state, "in_step")) > 1, "both stages are back")

        stages = (both.state, second)
        before = [len(times(state, "in_step")) for state in stages]
        os.kill(both.p2pd, signal.SIGKILL)
        await until(lambda: any(times(state, "p2pd_ended") for state in stages), "it notices")
        await until(
            lambda: [len(times(state, "in_step")) for state in stages] != before, "it is back in step"
        )
        for state, steps in zip(stages, before, strict=True):
            back = len(times(state, "in_step")) > steps
            assert back == bool(times(state, "p2pd_ended")), "the other stage never was away"
        await asked(both, "leave")
        await asyncio.wait_for(both.process.wait(), 60.0)
        assert both.process.returncode == 0
        for state in (both.state, second):
            assert list((state / "checkpoints").iterdir()), "each stage is on disk"
            assert times(state, "stopped")
