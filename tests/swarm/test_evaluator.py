"""The evaluator: scores what peers hold on held-out text, and says so everywhere."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
from holders import Holders
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from swarm import FOUR, TEXT, tiny_manifest

from peers.config.peer_file import load
from peers.errors import ConfigError
from peers.lab.world.virtual_time import run
from peers.network.discovery.announcer import Presence
from peers.observer.picture import draw
from peers.observer.sightings import Sightings
from peers.telemetry.event_log import EventLog, read
from peers.telemetry.metrics import Metrics
from peers.telemetry.picture import from_json
from peers.telemetry.said import Remark
from peers.tools.model.evaluate import bits_per_byte
from peers.tools.model.evaluator import EvaluatorRole
from peers.tools.top import screen
from peers.tools.top.from_directory import Watch
from protocols.signed.identity import Identity
from protocols.signed.records import open_record
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import whole

ME = Identity.from_seed(b"evaluator")


def process_of(folder, log):
    """As a peer file would make it."""
    file = folder / "eval.yaml"
    file.write_text(f"role: evaluator\nrun: {'ab' * 32}\nstate: {folder}\n")
    said = []

    def say(topic, text, **_):
        tell(Remark(text, topic))

    def tell(event):
        said.append(event.text)
        log.record(event)

    return SimpleNamespace(
        config=load(file), identity=ME, metrics=Metrics(process=False), log=log, say=say, tell=tell,
        said=said, control=SimpleNamespace(answers={}),
        report=SimpleNamespace(say=say, status=lambda status: None),
    )  # fmt: skip


def series(metrics):
    families = text_string_to_metric_families(metrics.text().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_one_score_is_the_same_in_metrics_top_the_event_log_the_record_and_the_observer(tmp_path):
    async def story():
        holders = Holders(tiny_manifest(), FOUR, (4,))
        network = SimpleNamespace(
            transport=holders.network.transport(ME.peer_id), directory=holders.network.directory(ME.peer_id)
        )
        signed, model = holders.signed, holders.signed.manifest.model
        with EventLog(tmp_path / "events.jsonl", lambda: 1e9, lambda: 0.0) as log:
            role = EvaluatorRole(process_of(tmp_path, log))
            assert role.not_ready() == "has no score yet"
            role.signed = signed
            async with holders.visitor() as client:
                await role._once(client, TEXT)
        weights = holders.weights({0: {4}, 1: {4}, 2: {4}})
        local = bits_per_byte(lambda t: forward(weights, model, whole(model), t), TEXT, window=16, batch=2)
        assert role.newest == local
        told = series(role.process.metrics)
        assert told["swarmnet_eval_loss"] == local.loss
        assert told["swarmnet_eval_round"] == 4
        (event,) = [event for event in read(tmp_path / "events.jsonl") if event.name == "evaluated"]
        assert event.fields["loss"] == local.loss
        assert event.fields["bits_per_byte"] == local.bits_per_byte
        answer = json.loads(json.dumps(await role.process.control.answers["status"]({})))
        assert from_json(answer).eval_loss == local.loss
        presence = Presence(signed, ME, network.transport, network.directory, "1", lambda _: None)
        record = open_record(role._record(presence), signed.run_id)
        assert record.record.loss == local.loss
        watched = Watch(signed.manifest).take({ME.peer_id: record}, record.sequence / 1e6)
        assert (watched.eval_loss, watched.loss) == (local.loss, None), "it is no training loss"
        stream = io.StringIO()
        Console(file=stream, width=80).print(screen.frame(watched, Console(file=stream, width=80)))
        assert f"held-out {local.loss:.3f}" in stream.getvalue()
        sightings = Sightings(3)
        sightings.recorded(record, record.sequence / 1e6)
        seen = draw(sightings, signed, record.sequence / 1e6)
        assert (seen.eval_loss, seen.loss) == (local.loss, None)
        assert seen.states["evaluator", "serving"] == 1

    run(story())


def test_a_swarm_that_does_not_answer_is_said_and_leaves_the_score_before(tmp_path):
    async def story():
        holders = Holders(tiny_manifest(), FOUR, (4,))
        with EventLog(tmp_path / "events.jsonl", lambda: 1e9, lambda: 0.0) as log:
            role = EvaluatorRole(process_of(tmp_path, log))
            async with holders.visitor() as client:
                await role._once(client, TEXT)
                first = role.newest
                await role._once(client, TEXT)
                before = role.newest
                holders.crash("a")
                await role._once(client, TEXT)
            assert role.newest is before is not first is not None
            assert any("no score this time, after 0 of 45 windows" in text for text in role.process.said)

    run(story())


def test_who_evaluates_needs_a_run_and_its_keys_are_checked(tmp_path):
    file = tmp_path / "e.yaml"
    file.write_text("role: evaluator\n")
    with pytest.raises(ConfigError, match="an evaluator needs the run to score"):
        load(file)
    file.write_text(f"role: evaluator\nrun: {'ab' * 32}\nevaluating: {{seconds: 30, text: held.txt}}\n")
    found = load(file).evaluating
    assert (found.seconds, found.text) == (30.0, tmp_path / "held.txt")
