"""An observer that evaluates: it scores what peers hold on held-out text, and says so everywhere."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace

import pytest
from holders import Holders
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from swarm import FOUR, TEXT, announcer, tiny_manifest

from peers.cli.run import create_role
from peers.config.errors import ConfigError
from peers.config.peer_file import load
from peers.lab.world.virtual_time import run
from peers.stageless.observer.role import ObserverRole
from peers.stageless.observer.sightings import PeerObservations
from peers.stageless.observer.snapshot_of_records import snapshot_of
from peers.telemetry.event_log import EventLog, read
from peers.telemetry.log_events import TextNotice
from peers.telemetry.metrics import PeerMetrics
from peers.tools.model.evaluate import bits_per_byte
from peers.tools.model.evaluator import SwarmEvaluator
from peers.tools.top import screen
from protocols.signed.identity import Identity
from protocols.signed.peer_record import NO_STAGE
from protocols.signed.records import open_record
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import whole

ME = Identity.from_seed(b"evaluator")


def process_of(folder, log, more=""):
    """As a peer file would make it."""
    file = folder / "eval.yaml"
    keys = f"evaluating: {{seconds: 600{more}}}\n"
    file.write_text(f"role: observer\nrun: {'ab' * 32}\nstate: {folder}\n{keys}")
    said = []

    def say(topic, text, **_):
        tell(TextNotice(text, topic))

    def tell(event):
        said.append(event.text)
        log.record(event)

    return SimpleNamespace(
        config=load(file), identity=ME, metrics=PeerMetrics(process=False), log=log, notify=say,
        notify_event=tell,
        said=said, control=SimpleNamespace(answers={}),
        report=SimpleNamespace(notify=say, status=lambda status: None),
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
        with EventLog(path=tmp_path / "events.jsonl", clock=lambda: 1e9, monotonic=lambda: 0.0) as log:
            role = SwarmEvaluator(process_of(tmp_path, log))
            assert role.loss is None
            async with holders.visitor() as client:
                await role._once(client, TEXT)
        weights = holders.weights({0: {4}, 1: {4}, 2: {4}})
        local = bits_per_byte(lambda t: forward(weights, model, whole(model), t), TEXT, window=16, batch=2)
        assert role.newest == local
        assert role.round == 4
        (event,) = [event for event in read(tmp_path / "events.jsonl") if event.name == "evaluated"]
        assert event.fields["loss"] == local.loss
        assert event.fields["bits_per_byte"] == local.bits_per_byte
        presence = announcer(signed, ME, network.transport, network.directory)
        claims = ObserverRole(role.process, role).claims()
        record = open_record(presence.record(NO_STAGE, claims), signed.run_id)
        assert record.record.loss == local.loss
        sightings = PeerObservations(3)
        sightings.recorded(record, record.sequence / 1e6)
        seen = snapshot_of(sightings, signed, record.sequence / 1e6)
        assert (seen.eval_loss, seen.loss) == (local.loss, None), "it is no training loss"
        assert seen.states["observer"]["serving"] == 1
        stream = io.StringIO()
        Console(file=stream, width=80).print(screen.frame(seen, Console(file=stream, width=80)))
        assert f"held-out {local.loss:.3f}" in stream.getvalue()
        alone = snapshot_of(PeerObservations(3), signed, record.sequence / 1e6, own_eval_loss=role.loss)
        assert alone.eval_loss == local.loss, "on its own page, too"

    run(story())


def test_a_swarm_that_does_not_answer_is_said_and_leaves_the_score_before(tmp_path):
    async def story():
        holders = Holders(tiny_manifest(), FOUR, (4,))
        with EventLog(path=tmp_path / "events.jsonl", clock=lambda: 1e9, monotonic=lambda: 0.0) as log:
            role = SwarmEvaluator(process_of(tmp_path, log))
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


def test_a_failed_score_is_tried_again_within_a_minute_and_the_next_comes_in_ten(tmp_path):
    async def story():
        with EventLog(path=tmp_path / "events.jsonl", clock=lambda: 1e9, monotonic=lambda: 0.0) as log:
            role, began, times = (
                SwarmEvaluator(process_of(tmp_path, log)),
                asyncio.get_running_loop().time,
                [],
            )

            async def once(_client, _text):
                times.append(began())
                return len(times) > 2

            role._once = once
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(900.0):
                    await role._evaluate_forever(None, TEXT, lambda: None)
        assert [round(time - times[0]) for time in times] == [0, 60, 120, 720]

    run(story())


def test_the_model_continues_the_prompt_after_a_score_and_a_failure_keeps_the_text_before(tmp_path):
    async def story():
        holders = Holders(tiny_manifest(), FOUR, (4,))
        with EventLog(path=tmp_path / "events.jsonl", clock=lambda: 1e9, monotonic=lambda: 0.0) as log:
            role = SwarmEvaluator(process_of(tmp_path, log, ", prompt: Once upon"))
            async with holders.visitor() as client:
                await role._once(client, TEXT)
                _, made = role.answer
                holders.crash("a")
                await role._continue_prompt(client, "Once upon")
            assert role.answer[1] is made
            assert any("no continuation of the prompt this time" in text for text in role.process.said)
        assert (made.prompt, made.round) == ("Once upon", 4)
        assert 0 < len(made.continuation) <= 64
        (event,) = [event for event in read(tmp_path / "events.jsonl") if event.name == "prompt_continued"]
        assert event.fields["continuation"] == made.continuation

    run(story())


@pytest.mark.parametrize(("keys", "refused"), [
    ("role: archivist\nevaluating: {seconds: 30}\n", "an archivist does not evaluate"),
    ("role: observer\nevaluating: {text: held.txt}\n", "evaluating.text needs it"),
    ("role: observer\nevaluating: {prompt: Once}\n", "evaluating.prompt needs it"),
])  # fmt: skip
def test_only_an_observer_evaluates_and_its_keys_are_checked(tmp_path, keys, refused):
    file = tmp_path / "e.yaml"
    file.write_text(f"{keys}run: {'ab' * 32}\n")
    with pytest.raises(ConfigError, match=refused):
        load(file)
    file.write_text(f"role: observer\nrun: {'ab' * 32}\nevaluating: {{seconds: 30, text: held.txt}}\n")
    found = load(file).evaluating
    assert (found.seconds, found.text) == (30.0, tmp_path / "held.txt")


def test_an_observer_does_not_evaluate_unless_its_file_says_so(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("peers.stageless.observer.role.ObserverRole", lambda process, *evaluators: evaluators)
    monkeypatch.setattr("peers.tools.model.evaluator.SwarmEvaluator", lambda process: "evaluator")
    for keys in ("", "evaluating: {seconds: 600}\n"):
        (tmp_path / "o.yaml").write_text(f"role: observer\nrun: {'ab' * 32}\n{keys}")
        made.append(create_role(SimpleNamespace(config=load(tmp_path / "o.yaml"))))
    assert made == [(), ("evaluator",)]
