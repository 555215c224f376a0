"""One run, its numbers side by side: `top`, /metrics, records, the observer and the report say the same.

Run as a program (`PYTHONPATH=tests/support python tests/swarm/test_numbers.py`), it prints them as a table.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client.parser import text_string_to_metric_families
from swarm import sign, tiny_manifest
from watched import Watched

from peers.lab.world.virtual_time import run
from peers.stageless.observer.sightings import PeerObservations
from peers.stageless.observer.snapshot_of_records import snapshot_of
from peers.state.checkpoint_file import files, read
from peers.telemetry.snapshot import SwarmSnapshot
from peers.tools.owner.run_facts import from_directory
from peers.tools.owner.training_report import as_markdown, summary
from protocols.memory.transport import MemoryNetwork
from protocols.signed.identity import Identity
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import open_record, seal_record
from swarmnet.run.schema import Rounds

PEERS = {"a": 0, "b": 0, "c": 1, "d": 2}
PEAK = 5e9


def series(metrics) -> dict[str, float]:
    return {
        sample.name.removeprefix("swarmnet_"): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if not sample.labels
    }


def in_settled_sets(swarm, stage: int, newest: int = 1 << 62) -> int:
    """What the makers noted, of the contributions that the settled rounds of a stage hold, to the newest."""
    made = {note.fields["id"]: note.fields["tokens"] for note in swarm.of("contribution_made")}
    sets = {
        note.fields["round"]: note.fields["ids"]
        for note in swarm.of("settled")
        if swarm.members[note.name].worker.stage == stage and note.fields["round"] <= newest
    }
    return sum(made[identity] for ids in sets.values() for identity in ids)


class Looked:
    """All that can be asked, at one moment."""

    def __init__(self, swarm: Watched) -> None:
        self.tops: dict[str, SwarmSnapshot] = {}
        self.metrics: dict[str, dict[str, float]] = {}
        for name in swarm.living():
            observer = swarm.observers[name]
            observer.look()
            self.metrics[name] = series(swarm.metrics[name])
            self.tops[name] = observer.snapshot
        signed, now = swarm.signed, swarm.members["a"].worker.context.presence.directory.now()
        self.sealed = {name: swarm.members[name].worker.served.make_record() for name in swarm.living()}
        self.records = {name: open_record(data, signed.run_id) for name, data in self.sealed.items()}
        by_peer = {found.peer: found for found in self.records.values()}
        sightings = PeerObservations(len(signed.manifest.stages))
        for found in by_peer.values():
            sightings.recorded(found, now)
        self.directory = snapshot_of(sightings, signed, now)

    async def report(self, swarm: Watched) -> dict[str, float]:
        network, signed = MemoryNetwork(), swarm.signed
        await asyncio.sleep(0)
        for name, data in self.sealed.items():
            peer = swarm.members[name].peer
            network.transport(peer)
            stage = swarm.members[name].worker.stage
            await network.directory(peer).announce(signed.run_id, stage, data, 1.0)
        told = summary(await from_directory(signed, network.directory("reader")))
        compute: dict[str, float] = told["compute"]
        return compute


async def trained(swarm: Watched, folder: Path, rounds: int) -> None:
    for name, stage in PEERS.items():
        swarm.start(name, stage, in_flight=2, checkpoints=folder / name, checkpoint_seconds=3.0)
        swarm.observers[name].peak = PEAK
    await swarm.until(lambda: len(swarm.rounds()) == len(PEERS), 30.0)
    await swarm.until(lambda: min(settled for _, settled in swarm.rounds().values()) >= rounds, 120.0)


def test_every_place_says_the_same_tokens_loss_rounds_and_utilisation(tmp_path):
    async def story():
        swarm.open()
        await trained(swarm, tmp_path, 12)
        seen = Looked(swarm)
        report = await seen.report(swarm)
        for name in PEERS:
            top, metrics, record = seen.tops[name], seen.metrics[name], seen.records[name].record
            assert top.finalized_tokens == metrics["finalized_tokens"] == record.finalized_tokens
            assert top.tokens == metrics["train_tokens_total"] == record.tokens
            assert top.loss == metrics["train_loss"] == record.loss
            assert top.settled == metrics["round_settled"] == record.settled
            assert top.utilization == metrics["train_flops_utilization_ratio"]
            assert top.utilization > 0
            assert sum(top.sent.values()) == record.sent_bytes
        assert seen.tops["a"].finalized_tokens == in_settled_sets(swarm, 0) > 0
        told = {
            seen.directory.finalized_tokens, report["tokens"],
            min(seen.tops["a"].finalized_tokens, seen.tops["b"].finalized_tokens),
        }  # fmt: skip
        assert len(told) == 1, told
        assert seen.directory.settled == report["settled_rounds"] - 1
        await swarm.stop_watching()
        await swarm.close()

    swarm = Watched(tiny_manifest())
    run(story())


def test_the_tokens_of_a_report_are_those_of_the_event_logs_where_time_closes_rounds(tmp_path):
    async def story():
        swarm.open()
        await trained(swarm, tmp_path, 3)
        seen = Looked(swarm)
        report = await seen.report(swarm)
        settled = {note.fields["round"]: note.fields["tokens"] for note in swarm.of("settled", "a")}
        assert report["tokens"] == settled[report["settled_rounds"] - 1] > 0
        newest = max(settled)
        assert settled[newest] == in_settled_sets(swarm, 0, newest)
        assert (
            10 * report["tokens"]
            < report["settled_rounds"] * swarm.signed.manifest.rounds.global_batch_tokens
        )
        await swarm.stop_watching()
        await swarm.close()

    swarm = Watched(
        tiny_manifest(rounds=Rounds(1_000_000, 0.2, 0.2, finality_timeout_seconds=0.5, snapshot_interval=4))
    )
    run(story())


def test_of_stages_that_are_apart_every_place_names_the_first_ones_round_and_one_loss():
    """Each stage closes its own rounds, and records are of different moments."""
    signed = sign(tiny_manifest())
    claims = [(0, 600, 1.0, 4_000), (0, 604, 2.0, 3_000), (1, 590, 6.0, 6_900), (2, 700, 7.0, 7_100)]

    async def asked():
        network, found, sightings = MemoryNetwork(), {}, PeerObservations(len(signed.manifest.stages))
        now = network.directory("reader").now()
        for stage, settled, loss, tokens in claims:
            identity = Identity.generate()
            record = PeerRecord(
                identity.peer_id, stage, "worker", [], settled + 5, 900.0, "1", state="training", loss=loss,
                settled=settled, tokens=tokens, finalized_tokens=settled * 100,
            )  # fmt: skip
            data = seal_record(identity, signed.run_id, record, now)
            found[identity.peer_id] = open_record(data, signed.run_id)
            sightings.recorded(found[identity.peer_id], now)
            network.transport(identity.peer_id)
            await network.directory(identity.peer_id).announce(signed.run_id, stage, data, 1.0)
        told = snapshot_of(sightings, signed, now)
        facts = await from_directory(signed, network.directory("reader"))
        report = summary(facts)["compute"]
        assert told.settled == report["settled_rounds"] - 1 == 600
        assert told.finalized_tokens == report["tokens"] == 60_000
        assert told.loss == 4.0
        assert told.round == 609
        assert told.tokens == 7_100
        text = as_markdown(facts)
        assert "settled by all stages up to round 590" in text
        assert "- Tokens: 60,000 in 601 settled rounds of the first stage" in text

    run(asked())


def test_tokens_in_all_go_on_over_a_crash_of_everybody_and_a_newcomer_has_them(tmp_path):
    async def story():
        swarm.open()
        await trained(swarm, tmp_path, 12)
        await swarm.until(lambda: all(files(tmp_path / name, stage) for name, stage in PEERS.items()), 30.0)
        for name in PEERS:
            await swarm.crash(name)
        await swarm.stop_watching()
        settled = min(note.fields["round"] for note in swarm.of("settled")[-4:])
        await trained(swarm, tmp_path, settled + 8)
        swarm.start("e", 0, in_flight=2)
        await swarm.until(lambda: swarm.of("in_step", "e"), 30.0)
        await swarm.until(lambda: min(s for _, s in swarm.rounds().values()) > settled + 16, 60.0)
        updates = {name: swarm.members[name].worker.services.round_service for name in ("a", "b", "e")}
        by_round = {}
        for note in swarm.of("settled", "a", "b", "e"):
            by_round.setdefault(note.fields["round"], set()).add(note.fields["tokens"])
        assert all(len(told) == 1 for told in by_round.values()), "a function of the sets"
        assert updates["e"].tokens == in_settled_sets(swarm, 0) or updates["e"].rounds.settled < max(by_round)
        assert max(by_round[max(by_round)]) == in_settled_sets(swarm, 0)
        since_start = seen_tokens(swarm)
        assert max(by_round[max(by_round)]) > since_start, "the first life counts too"
        held = read(files(tmp_path / "a", 0)[0])
        assert by_round[held.round] == {held.tokens}
        await swarm.stop_watching()
        await swarm.close()

    def seen_tokens(swarm):
        return sum(
            swarm.members[name].worker.services.pipeline_service.ledger.tokens for name in ("a", "b", "e")
        )

    swarm = Watched(tiny_manifest(), seed=3, stub=True)
    run(story())


def test_rounds_that_were_closed_by_time_count_what_they_held_and_not_their_target(tmp_path):
    async def story():
        swarm.open()
        await trained(swarm, tmp_path, 3)
        tokens = swarm.members["a"].worker.services.round_service.tokens
        rounds = swarm.members["a"].worker.services.round_service.rounds.settled + 1
        assert tokens == in_settled_sets(swarm, 0)
        assert tokens < rounds * swarm.signed.manifest.rounds.global_batch_tokens
        await swarm.stop_watching()
        await swarm.close()

    rounds = Rounds(
        global_batch_tokens=1 << 20,
        max_seconds=2.0,
        contribution_timeout_seconds=1.0,
        finality_timeout_seconds=3.0,
        snapshot_interval=4,
    )
    swarm = Watched(tiny_manifest(rounds=rounds), stub=True)
    run(story())


def table(swarm: Watched, seen: Looked, report: dict[str, float]) -> list[str]:
    """Of the peer `a`, of stage 0."""
    top, metrics, record = seen.tops["a"], seen.metrics["a"], seen.records["a"].record

    def row(what: str, *cells: object) -> str:
        shown = ("-" if cell is None else f"{cell:,.4g}" if isinstance(cell, float) and cell < 1e3
                 else f"{cell:,.0f}" for cell in cells)  # fmt: skip
        return f"{what:<22}" + "".join(f"{cell:>14}" for cell in shown)

    return [
        f"{'':<22}" + "".join(f"{place:>14}" for place in
                              ("top", "/metrics", "record", "observer", "report")),
        row("tokens in all", top.finalized_tokens, metrics["finalized_tokens"], record.finalized_tokens,
            seen.directory.finalized_tokens, report["tokens"]),
        row("tokens since start", top.tokens, metrics["train_tokens_total"], record.tokens,
            seen.directory.tokens, None),
        row("settled round", top.settled, metrics["round_settled"], record.settled, seen.directory.settled,
            report["settled_rounds"] - 1),
        row("loss", top.loss, metrics["train_loss"], record.loss, seen.directory.loss, None),
        row("utilisation", top.utilization, metrics["train_flops_utilization_ratio"], *[None] * 3),
    ]  # fmt: skip


if __name__ == "__main__":

    async def shown() -> None:
        swarm.open()
        with TemporaryDirectory() as folder:
            await trained(swarm, Path(folder), 20)
            seen = Looked(swarm)
            print("\n".join(table(swarm, seen, await seen.report(swarm))))
            await swarm.stop_watching()
            await swarm.close()

    swarm = Watched(tiny_manifest())
    run(shown())
