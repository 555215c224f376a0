"""A registry of five runs in different states with two curators, played by typed commands."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from archive_scene import RUN, Scene

from peers.config.run_file import publish
from protocols.signed.identity import load_or_create

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(600)]

LAST_ROUND = 3
DOCUMENT = "ef" * 32


@dataclass
class Play:
    """The scene and what the persons of the play type."""

    scene: Scene
    folder: Path

    @property
    def bootstrap(self) -> tuple[str, str]:
        return "--bootstrap", self.scene.peers[0].addresses[0]

    def run_file(self, name: str) -> Path:
        """A run file in this folder."""
        source = {"name": "first", "path": "first.txt", "licence": "CC0-1.0"}
        run = {**RUN, "name": name, "stages": [2], "license": "apache-2.0"}
        run["data"] = {**RUN["data"], "sources": [source]}
        file = self.folder / f"{name}.yaml"
        file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in run.items()))
        return file

    def published(self, name: str) -> str:
        signed, _ = publish(
            self.run_file(name), load_or_create(self.folder / "owner.key"), self.folder / f"{name}.run.json"
        )
        return signed.run_id

    async def worker(self, name: str):
        keys = {"run": f"{name}.run.json", "bootstrap": self.scene.peers[0].addresses}
        return await self.scene.peer(name, {**keys, "data_paths": {"first": "first.txt"}})

    async def typed(self, *words: object) -> str:
        return await self.scene.swarmnet(*words, *self.bootstrap)

    async def order(self, what: str, name: str, *more: object) -> str:
        path = self.folder / f"{name}.run.json"
        return await self.typed("order", what, path, *more, "--key", self.folder / "owner.key")

    async def listed(self, *options: object) -> dict[str, dict[str, object]]:
        """The rows of `registry list` by name."""
        rows = json.loads(await self.typed("registry", "list", "--json", *options))
        return {row["name"]: row for row in rows}

    async def until_listed(self, states: dict[str, str], counted: str = "") -> dict[str, dict[str, object]]:
        """Return the rows once each run has its state, and the run `counted` has tokens: they come with a
        peer's next record, up to 30 s after a round settles."""
        async with asyncio.timeout(180.0):
            while True:
                rows = await self.listed()
                is_counted = not counted or rows[counted]["tokens"]
                if is_counted and {name: row["state"] for name, row in rows.items()} == states:
                    return rows
                await asyncio.sleep(1.0)


async def test_five_runs_two_curators_and_an_objection(tmp_path):
    (tmp_path / "first.txt").write_text("the first text. " * 3000)
    scene = Scene(tmp_path)
    play = Play(scene, tmp_path)
    ids = {name: play.published(name) for name in ("idle", "training", "paused", "ended")}
    try:
        boot = await scene.peer("boot", {"role": "bootstrap", "run": "idle.run.json"})
        await boot.until_listening()
        said = await play.typed("propose", play.run_file("proposed"), "--key", tmp_path / "owner.key")
        assert "the run is paused" in said
        ids["proposed"] = said.split("run    ")[1].split()[0]
        for name in ("training", "paused", "ended"):
            await play.worker(name)
        await scene.until(
            lambda: min((scene.settled(peer) or [-1])[-1] for peer in scene.peers[1:]) >= 0, "all settle"
        )
        await play.order("pause", "paused")
        await play.order("pause", "ended")  # It makes many rounds while a command starts.
        newest = scene.settled(scene.peers[3])[-1]
        await play.order("end", "ended", "--from-round", newest + LAST_ROUND + 20)
        await play.order("resume", "ended")
        states = {name: name for name in ("proposed", "idle", "training", "paused", "ended")}
        rows = await play.until_listed(states)
        assert {row["run"] for row in rows.values()} == set(ids.values())
        assert [rows[name]["peers"] for name in ("proposed", "idle", "training")] == [0, 0, 1]
        assert rows["proposed"]["tokens"] == 0
        assert {row["licence"] for row in rows.values()} == {"apache-2.0"}
        assert len({row["parameters"] for row in rows.values()}) == 1

        # Two curators endorse; a user trusts one, or both, or a stranger.
        curators = {name: load_or_create(tmp_path / f"{name}.key") for name in ("anna", "ben", "stranger")}

        async def endorse(who: str, name: str, *more: object) -> None:
            await play.typed("registry", "endorse", ids[name], "--key", tmp_path / f"{who}.key", *more)

        await endorse("anna", "proposed", "--reason", "I have read its text")
        await endorse("anna", "training")
        await endorse("ben", "training")
        await endorse("ben", "ended")
        await endorse("stranger", "idle")
        anna, ben = (("--trust", curators[name].peer_id) for name in ("anna", "ben"))
        assert set(await play.listed("--endorsed", *anna)) == {"proposed", "training"}
        both = await play.listed("--endorsed", *anna, *ben)
        assert set(both) == {"proposed", "training", "ended"}
        assert {one["curator"] for one in both["training"]["endorsements"]} == {
            curators[name].peer_id for name in ("anna", "ben")
        }
        (endorsement,) = both["proposed"]["endorsements"]
        assert endorsement["text"] == "I have read its text"
        await endorse("anna", "training", "--withdraw")
        assert set(await play.listed("--endorsed", *anna)) == {"proposed"}
        with pytest.raises(AssertionError, match="--endorsed needs curators whom you trust"):
            await play.listed("--endorsed")
        (tmp_path / "states" / "swarmnet" / "curators.txt").write_text(f"{curators['ben'].peer_id} Ben\n")
        line = await play.typed("registry", "list", "--endorsed")
        assert "endorsed by Ben" in line
        assert ids["proposed"] not in line

        # The owner resumes the proposal, and a peer trains it.
        await play.order("resume", "proposed")
        await play.worker("proposed")
        await play.until_listed({**states, "proposed": "training"}, counted="training")

        # Third persons object to a document, and the owner withdraws it.
        for _ in range(2):
            await play.typed("registry", "object", ids["training"], DOCUMENT, "--reason", "it is mine")
        await play.typed("registry", "object", ids["training"], "chapter 2", "--reason", "a name in it")
        said = await play.typed("registry", "objections", ids["training"])
        assert f"{DOCUMENT}  2 keys, in the text: it is mine" in said
        assert "chapter 2  1 keys" in said
        assert "2 documents of the text objected to" in await play.typed("top", "--run", ids["training"])
        await play.order("withdraw", "training", DOCUMENT)
        assert f"{DOCUMENT}  2 keys, withdrawn" in await play.typed("registry", "objections", ids["training"])
        report = await play.typed("report", ids["training"])
        assert "Objections of third persons: 3 in force, to 2 documents, of which 1 withdrawn" in report
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers))
