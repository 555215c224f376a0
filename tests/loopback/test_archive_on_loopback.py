"""Showing 6: published, trained, archived, everything killed; a new swarm starts from the archive alone."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from archive_scene import RUN, Scene
from processes import publish_run

from peers.state.archive import Archive
from peers.state.archive_store import open_store
from peers.tools.owner.run_facts import from_archive
from peers.tools.owner.training_report import summary

pytestmark = [pytest.mark.loopback, pytest.mark.soak, pytest.mark.timeout(600)]


def newest(archive: Path) -> dict[int, int]:
    """Stage -> newest archived round."""
    index = archive / "archive.json"
    rounds: dict[int, int] = {}
    for one in json.loads(index.read_text())["checkpoints"] if index.exists() else ():
        rounds[one["stage"]] = max(one["round"], rounds.get(one["stage"], -1))
    return rounds


async def the_owner_acts(scene: Scene, run_id: str, bootstrap: str) -> None:
    """The run is in the registry, an order reaches it, and whoever has only its id gets a report."""
    run, key = scene.folder / "run.json", scene.folder / "owner.key"
    assert run_id in await scene.swarmnet("registry", "list", "--bootstrap", bootstrap)
    told = await scene.swarmnet(
        "order", "withdraw", run, "ab" * 32, "--reason", "its author asked", "--key", key,
        "--bootstrap", bootstrap,
    )  # fmt: skip
    assert "sent   to " in told
    assert "sent   to 0" not in told
    report = json.loads(await scene.swarmnet("report", run_id, "--bootstrap", bootstrap, "--json"))
    peers = "3 peers (stage 0: 1, stage 1: 1, without a stage: 1)"
    assert f"what {peers} reported in signed records" in report["from"]
    assert_named(report)
    workers = {peer.peer_id for peer in scene.peers if peer.name.startswith("old-")}
    assert {one["peer"] for one in report["contributors"]} <= workers
    assert {one["signed"] for one in report["contributors"]} <= {None}


def assert_named(report: dict[str, Any]) -> None:
    """Its sources and what was withdrawn."""
    assert [source["name"] for source in report["sources"]] == ["first", "second"]
    assert report["processing"]["withdrawn_documents"] == [
        {"document": "ab" * 32, "reason": "its author asked"}
    ]


def the_report_names_everything(place: Path) -> None:
    archive = Archive(open_store(str(place)))
    report = summary(from_archive(archive, archive.open(), time.time()))
    assert_named(report)
    assert report["compute"]["tokens"] > 0
    assert {one["signed"] > 0 for one in report["contributors"]} == {True}


async def test_a_run_outlives_all_its_peers_in_an_archive(tmp_path):
    for name in ("first", "second"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} text. " * 3000)
    signed, _ = publish_run(tmp_path, RUN)
    text = {name: f"{name}.txt" for name in ("first", "second")}
    scene, archive = Scene(tmp_path), tmp_path / "archive"
    try:
        boot = await scene.peer("boot", {"role": "bootstrap", "run": "run.json"})
        await boot.until_listening()
        keys = {
            "run": "run.json",
            "bootstrap": boot.addresses,
            "data_paths": text,
            "in_flight": 2,
            "slots": 8,
        }
        for stage in (0, 1):
            await scene.peer(f"old-{stage}", {**keys, "stage": stage})
        keeper = {"role": "archivist", "archive": str(archive), "archiving": {"seconds": 1.0}}
        await scene.peer("archivist", {**keys, **keeper})
        await scene.until(
            lambda: len(newest(archive)) == 2 and min(newest(archive).values()) >= 7, "both archived"
        )
        await the_owner_acts(scene, signed.run_id, boot.addresses[0])
        await scene.until(lambda: (archive / "order.bin").exists(), "the order is archived")
        for peer in scene.peers:
            peer.kill()
        at = newest(archive)

        second = await scene.peer("boot-2", {"role": "bootstrap"})
        await second.until_listening()
        alone = {"run": str(archive / "run.json"), "bootstrap": second.addresses, "archive": str(archive)}
        fresh = [await scene.peer(f"new-{stage}", {**keys, **alone, "stage": stage}) for stage in (0, 1)]
        await scene.until(
            lambda: all(scene.settled(peer)[-1:] > [at[stage] + 4] for stage, peer in enumerate(fresh)),
            "the new swarm settles later rounds",
        )
        for stage, peer in enumerate(fresh):
            assert scene.settled(peer)[0] > at[stage], "it began where the archive ends, not at the seed"
        the_report_names_everything(archive)
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers if peer.alive))
