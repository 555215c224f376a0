"""A swarm whose text is read in epochs: every shard comes, is counted, and whoever waits for one goes on."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from swarm import TextProcess, exchange_alone, tiny_manifest
from watched import Watched

from peers.config.peer_file import PeerFile
from peers.lab.world.virtual_time import run
from peers.network.discovery.record_reader import opened
from peers.telemetry.log_events import ShardRead
from peers.tools.owner.run_facts import from_directory
from peers.worker.pipeline.text_reader import TextReader
from protocols.memory.transport import MemoryNetwork
from swarmnet.run.schema import Data, TextSource

pytestmark = pytest.mark.swarm
SHARDS = 3
DATA = Data((TextSource("books", "books"),), seq_len=16, micro_batch_size=2, sampling="epoch")


def test_every_shard_is_trained_on_once_an_epoch_and_everybody_can_see_how_far_it_is(tmp_path, monkeypatch):
    async def later(work, *arguments):
        """In the place of asyncio.to_thread, which a virtual clock does not wait for."""
        await asyncio.sleep(0.1)
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", later)
    monkeypatch.setattr("peers.data.shards.MIN_SHARD_BYTES", 1)
    for number in range(SHARDS):
        (tmp_path / f"{number}.txt").write_bytes(bytes([65 + number]) * 10 * 16)
    swarm, read, waited = Watched(tiny_manifest(data=DATA)), [], []

    async def story():
        swarm.open()
        config = PeerFile(run="ab" * 32, state=tmp_path / "state", data_paths={"books": str(tmp_path)})
        process = TextProcess(config)
        process.log.record = lambda event: isinstance(event, ShardRead) and read.append(event)

        def pump():
            waited.append(text.coverage())
            if "a" in swarm.members and (services := swarm.members["a"].worker.services) is not None:
                services.pipeline_service.pump()

        text = TextReader(
            process=process,
            signed=swarm.signed,
            exchange=exchange_alone(process, swarm.signed),
            opened=pump,
            ended=lambda _: None,
        )
        await text.open(frozenset())
        swarm.text = text
        for name, stage in {"a": 0, "b": 1, "c": 2}.items():
            swarm.start(name, stage, in_flight=2)
        await swarm.until(lambda: len(swarm.rounds()) == 3, 30.0)
        await swarm.until(lambda: len(read) >= 2 * SHARDS, 120.0)
        for each in swarm.observers.values():
            each.look()
        metrics = swarm.metrics["a"].text().decode()
        assert f"swarmnet_text_shards {SHARDS}.0" in metrics
        assert "swarmnet_text_epochs 1.0" in metrics
        assert "text_epochs" not in swarm.metrics["b"].text().decode().replace("# ", "")
        sealed = swarm.members["a"].worker.served.make_record()
        (found,) = opened([sealed], swarm.signed.run_id)
        assert (found.record.text_shards, found.record.text_shards_read) == (SHARDS, 2 * SHARDS)
        network = MemoryNetwork()
        network.transport(found.peer)
        await network.directory(found.peer).announce(swarm.signed.run_id, 0, sealed, 1.0)
        facts = await from_directory(swarm.signed, network.directory("reader"))
        assert facts.read == ((SHARDS, 2 * SHARDS),)
        await text.close()
        await swarm.stop_watching()
        await swarm.close()

    run(story())
    assert Counter(one.epoch for one in read) == {0: SHARDS, 1: SHARDS}
    assert len({one.shard for one in read[:SHARDS]}) == SHARDS
    assert len(waited) >= SHARDS
