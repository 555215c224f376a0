"""A run's owner at a terminal, and peers that are processes: another learning rate, and the run's end."""

from __future__ import annotations

import asyncio
import re
import shlex

import pytest
from archive_scene import order, owned, tokens

from peers.config.run_file import load_signed
from peers.tools.model.export import load_shape

pytestmark = [pytest.mark.loopback, pytest.mark.soak, pytest.mark.timeout(900)]

TOLD = 2
"""Exit code of whom a person has to help."""


def command_of(peer) -> str:
    """What a peer prints to export the model of the run that has ended, after `swarmnet`; empty: not yet."""
    found = re.findall(r"the run has ended.* `swarmnet ([^`]*)`", "\n".join(peer.said))
    return found[0] if found else ""


async def test_a_run_gets_another_rate_and_an_end_and_whoever_comes_later_is_told(tmp_path):
    async with owned(tmp_path, "ending") as (scene, worker):
        workers = [await scene.peer(f"worker-{stage}", {**worker, "stage": stage}) for stage in (0, 1)]
        await scene.until(lambda: min(tokens(scene)) > 0 and len(scene.settled(workers[0])) > 4, "all train")

        run_id, bootstrap = load_signed(tmp_path / "run.json").run_id, scene.peers[0].addresses[0]
        where = ["--run", run_id, "--bootstrap", bootstrap, "--no-score"]
        said = await scene.swarmnet("export", "--hf", tmp_path / "taken", *where)
        taken = int(re.search(rf"run {run_id}, round (\d+)", said)[1])
        assert 3 <= taken <= max(scene.settled(workers[0]))
        assert load_shape(tmp_path / "taken").num_hidden_layers == 2

        before = max(scene.settled(workers[0]))
        said = await order(scene, "rate", "0.5")
        ordered = int(re.search(r"from   round (\d+): the run is at round", said)[1])
        assert ordered > max(scene.settled(workers[0]))
        assert f"the learning rate is 0.5 times the manifest's from round {ordered} on" in said
        with pytest.raises(AssertionError, match="round 0 is past: the run is at round"):
            await order(scene, "end", "--from-round", "0")
        now = max(scene.settled(workers[0]))
        last = now + 40 + 4 * (now - before)  # An order takes as long again, and has to come around.
        assert f"round {last} is the last one" in await order(scene, "end", "--from-round", last + 1)
        await scene.until(lambda: all(map(command_of, workers)), "both tell that the run has ended")
        words = shlex.split(command_of(workers[0]).replace("FOLDER", str(tmp_path / "model")))
        await scene.swarmnet(*words, "--no-score")
        assert load_shape(tmp_path / "model").num_hidden_layers == 2
        async with asyncio.timeout(300.0):
            assert [await peer.process.wait() for peer in workers] == [0, 0]
        assert max(scene.settled(workers[0])) == last
        for peer in workers:
            assert any("the run has ended at round" in line and "export" in line for line in peer.said)
            scene.peers.remove(peer)

        with pytest.raises(AssertionError, match="stage 0 of 0 to 1 cannot be fetched"):
            await scene.swarmnet("export", "--hf", tmp_path / "gone", *where)
        assert not (tmp_path / "gone").exists()

        late = await scene.peer("late", {**worker, "stage": 0})
        async with asyncio.timeout(240.0):
            assert await late.process.wait() == TOLD
        assert any(f"this run has ended at round {last}" in line for line in late.said)
        scene.peers.remove(late)
