"""Names and labels of the metrics, and what a scrape answers."""

import re
import socket
import urllib.error
import urllib.request

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from peers.errors import UserError
from peers.http import Exporter
from peers.metrics import KINDS, Metrics
from peers.observe import look_at_gpu
from peers.reasons import REFUSALS
from protocols import errors, messages

UNITS = ("_seconds", "_bytes", "_info", "_ratio", "_microbatches", "_tasks", "_nodes", "_peers")
COUNTS = ("stage", "ready", "round", "round_settled", "round_lag", "round_contributors", "peers",
          "train_loss", "train_learning_rate", "stages", "state", "paused", "stages_missing",
    "credit_contributions", "credit_tokens",
          "network_subflows")  # fmt: skip
"""Gauges that are an index, a number of things, or what their help says."""


def everything():
    metrics = Metrics(process=False)
    metrics.watch_gpu()
    return metrics.declared


def test_names_have_the_prefix_and_their_unit_and_a_meaning():
    for metric in everything():
        name = metric.name.removeprefix("swarmnet_")
        assert name != metric.name
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert (metric.kind == "counter") == name.endswith("_total"), name
        assert metric.kind == "counter" or name.endswith(UNITS) or name in COUNTS, name
        assert metric.help.endswith(".")
        for word in ("seconds", "bytes"):
            if name.removesuffix("_total").endswith(f"_{word}") and "timestamp" not in name:
                assert word in metric.help.lower(), name


def test_no_label_is_a_peer_and_all_are_bounded_but_those_the_peer_says_of_itself():
    for metric in everything():
        for label in metric.labels:
            assert label.values or metric.name in ("swarmnet_peer_info", "swarmnet_build_info")
            assert label.name != "peer" or metric.name == "swarmnet_peer_info"


def test_bytes_and_refusals_are_counted_by_the_words_of_the_wire():
    kinds = {cls.kind for cls in vars(messages).values()
             if isinstance(cls, type) and issubclass(cls, messages.Message)}  # fmt: skip
    assert kinds <= set(KINDS)
    codes = {cls.code for cls in vars(errors).values()
             if isinstance(cls, type) and issubclass(cls, errors.WireError)}  # fmt: skip
    assert codes - {"wire", "gone", "unreachable"} <= set(REFUSALS)


def test_the_text_is_what_prometheus_reads_and_holds_no_created_series():
    metrics = Metrics()
    metrics.network.sent("activation").inc(5)
    metrics.training.step_seconds("forward").observe(0.2)
    metrics.rounds.round.set(7)
    families = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    sent = {sample.labels["kind"]: sample.value for sample in families["swarmnet_network_sent_bytes"].samples}
    assert sent == {**dict.fromkeys(KINDS, 0.0), "activation": 5.0}
    assert families["swarmnet_round"].samples[0].value == 7
    assert "process_cpu_seconds" in families
    assert not [name for name in families if name.endswith("_created")]


def test_strangers_cannot_add_series():
    metrics = Metrics(process=False)
    before = len(metrics.text().splitlines())
    for number in range(100):
        metrics.network.refused(f"made up {number}").inc()
    assert len(metrics.text().splitlines()) == before
    assert b'swarmnet_refused_total{code="other"} 100.0' in metrics.text()


def test_a_wrong_number_of_labels_is_a_mistake_in_the_program():
    with pytest.raises(TypeError, match="operation"):
        Metrics(process=False).network.directory("get")


def test_a_gpu_has_series_only_where_a_peer_computes_on_one(monkeypatch):
    metrics = Metrics(process=False)
    assert b"swarmnet_gpu" not in metrics.text()
    metrics.watch_gpu()
    metrics.watch_gpu()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, 10 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 << 30)
    look_at_gpu(metrics.gpu)
    shown = {
        family.name.removeprefix("swarmnet_gpu_memory_"): family.samples[0].value
        for family in text_string_to_metric_families(metrics.text().decode())
        if family.name.startswith("swarmnet_gpu_")
    }
    assert shown == {"used_bytes": 7 << 30, "total_bytes": 10 << 30, "reserved_bytes": 5 << 30}


def test_two_peers_in_one_process_count_apart():
    one, other = Metrics(process=False), Metrics(process=False)
    one.training.tokens.inc(3)
    assert b"swarmnet_train_tokens_total 0.0" in other.text()


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture
def exporter():
    state = {"ready": "joining: fetching the weights"}
    metrics = Metrics(process=False)
    with Exporter(("127.0.0.1", 0), metrics.text, lambda: None, lambda: state["ready"]) as running:
        yield running, state


def test_metrics_health_and_readiness_are_served(exporter):
    running, state = exporter
    status, kind, text = get(f"{running.url}/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    assert "swarmnet_round 0.0" in text
    assert get(f"{running.url}/healthz")[0] == 200
    assert get(f"{running.url}/readyz")[::2] == (503, "joining: fetching the weights\n")
    state["ready"] = None
    assert get(f"{running.url}/readyz?verbose=1")[::2] == (200, "ok\n")
    assert get(f"{running.url}/etc/passwd")[0] == 404


def test_port_0_takes_a_free_port_and_says_which(exporter):
    running, _ = exporter
    assert running.address[0] == "127.0.0.1"
    assert running.address[1] > 0


def test_an_occupied_port_is_named_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=f"127.0.0.1 port {port}: address already in use; choose another port"
        ):
            Exporter(("127.0.0.1", port), bytes, lambda: None, lambda: None)


def test_closing_frees_the_port_at_once_and_twice_is_no_error():
    running = Exporter(("127.0.0.1", 0), bytes, lambda: None, lambda: None)
    port = running.address[1]
    running.close()
    running.close()
    Exporter(("127.0.0.1", port), bytes, lambda: None, lambda: None).close()


def test_a_client_that_hangs_up_does_no_harm(exporter, capfd):
    running, _ = exporter
    with socket.create_connection(running.address) as client:
        client.sendall(b"GET /metr")
    assert get(f"{running.url}/healthz")[0] == 200
    assert capfd.readouterr().err == ""
