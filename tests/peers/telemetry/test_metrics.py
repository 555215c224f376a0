"""Names and labels of the metrics, and what a scrape answers."""

import math
import re
import socket
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from swarm import tiny_manifest
from watched import Watched, moved

from peers.compute.gpu import GpuWatch, nvml_of
from peers.config.errors import UserError
from peers.lab.world.virtual_time import run
from peers.runtime.http_server import Exporter
from peers.stageless.observer.swarm_metrics import SHOWN
from peers.telemetry.metric_kinds import Declared
from peers.telemetry.metrics import KINDS, ROLES, PeerMetrics, declared_metrics, of_role
from peers.telemetry.reasons import REFUSALS
from protocols import errors
from protocols.messages import table as messages

UNITS = ("_seconds", "_bytes", "_info", "_ratio", "_microbatches", "_tasks", "_nodes", "_peers", "_rounds",
         "_celsius", "_watts", "_operations_per_second", "_tokens_per_second",
         "_bytes_per_second")  # fmt: skip
UNITLESS = {
    # 1 or 0: is it so?
    **dict.fromkeys(("state", "network_reachable", "dht_split_suspected", "dht_bootstraps_lost", "swarm_held",
                     "swarm_bootstrap_up"), "1 (if|for|while) .*"),
    # A privacy loss.
    "text_spent_epsilon": "Epsilon, .*",
    # Which one.
    "stage": "Index of .*",
    **dict.fromkeys(("round", "round_settled", "swarm_round", "archive_round"), ".*[Rr]ound.*, number.*"),
    # How many, where the name's last word is not what is counted.
    "stages_missing": "Stages without .*",
    "round_lag": "Rounds behind .*",
    "swarm_peer_versions": "Peers by .*",
    "swarm_experts_min_replicas": "Peers .*",
    # Of the model: nats per token, which Prometheus has no word for, a rate without a unit, and norms.
    **dict.fromkeys(
        ("train_loss", "swarm_loss", "swarm_eval_loss"),
        "Loss.*, nats per token.*",
    ),
    "train_learning_rate": "Learning rate of .*",
    **dict.fromkeys(("train_gradient_norm", "train_momentum_norm"), "2-norm of .*"),
}  # fmt: skip
"""Gauges without a unit, and how their help begins. A name ends in its base unit where there is one, is what
Prometheus asks for; truth values, ordinals and numbers of things have none. A number of things that its name
ends in and its help begins with (`stages`: "Stages of the run.") needs no line here."""


def everything():
    return declared_metrics()


def shown_of_the_swarm():
    return [shown.declared for shown in SHOWN]


def counts_things(name, help):
    """Whether the name ends in a plural that is the first or second word of its help."""
    last = name.rpartition("_")[2]
    return re.search("[^s]s$", last) is not None and last in help.lower().split()[:2]


def wrong_with(metric):
    """What the name and the help of a metric lack, in sentences."""
    name = metric.name.removeprefix("swarmnet_")
    if name == metric.name or not re.fullmatch(r"[a-z]+(_[a-z]+)*", name):
        yield "name is not swarmnet_ and lower-case words with underscores: declare it with `Declare`"
    if (metric.kind == "counter") != name.endswith("_total"):
        yield "name ends in _total if it is a counter, and only then: Prometheus reads it so"
    if metric.kind != "counter" and not name.endswith(UNITS):
        if not (metric.kind == "gauge" and (name in UNITLESS or counts_things(name, metric.help))):
            yield (
                f"name ends in no unit: add one ({', '.join(UNITS)}), or, for a gauge that counts things, "
                "let the name end in them and the help begin with them (text_epochs: 'Epochs ...'), or "
                "list it in UNITLESS of test_metrics.py"
            )
        elif not re.fullmatch(UNITLESS.get(name, ".*"), metric.help):
            yield f"help is not {UNITLESS[name]!r}, as UNITLESS of test_metrics.py has it"
    if not metric.help.endswith("."):
        yield "help is no sentence: end it with a full stop"
    for word in ("seconds", "bytes"):
        of_it = name.removesuffix("_total").endswith(f"_{word}") and "timestamp" not in name
        if of_it and word not in metric.help.lower():
            yield f"help does not say {word}, the unit that the name ends in"


def test_names_have_the_prefix_and_their_unit_and_a_meaning():
    declared = (*everything(), *shown_of_the_swarm())
    wrong = [f"{metric.name}: {problem}" for metric in declared for problem in wrong_with(metric)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "kind", "help", "problem"),
    [
        ("contribution_size", "gauge", "Size of it.", "name ends in no unit: add one"),
        ("contribution_votes", "gauge", "How many votes it has.", "name ends in no unit: add one"),
        ("contribution_votes", "histogram", "Votes in it.", "name ends in no unit: add one"),
        ("newest_loss", "gauge", "Loss of the newest.", "name ends in no unit: add one"),
        ("contribution_votes", "counter", "Votes in it.", "name ends in _total"),
        ("contribution_bytes", "gauge", "How large it is.", "help does not say bytes"),
        ("contribution_bytes", "gauge", "Bytes of it", "help is no sentence"),
        ("contribution_votes", "gauge", "Votes in it.", None),
    ],
)
def test_a_name_against_the_rules_is_told_what_to_do(name, kind, help, problem):
    found = list(wrong_with(Declared(f"swarmnet_{name}", kind, (), help)))
    assert [problem in sentence for sentence in found] == ([True] if problem else [])


def test_a_name_that_may_do_without_a_unit_is_one_that_there_is_and_has_none():
    helps = {m.name.removeprefix("swarmnet_"): m.help for m in (*everything(), *shown_of_the_swarm())}
    assert UNITLESS.keys() <= helps.keys()
    assert not [name for name in UNITLESS if name.endswith(UNITS) or counts_things(name, helps[name])]


def test_one_peer_fills_the_metrics_of_all_that_it_counts(tmp_path):
    """A wrong attribute in peers/worker/watch/sampler.py fails here in a second; in
    tests/peers/worker/test_observe.py all of this, and whatever else is declared, happens to a swarm."""
    swarm = Watched(tiny_manifest((3,)))

    async def story():
        swarm.open()
        worker = swarm.start("a", 0, checkpoints=tmp_path / "a", checkpoint_seconds=1.0).worker
        await swarm.until(lambda: swarm.of("saved", "a"), 60.0)
        traffic, ledger = worker.services.links.traffic, worker.services.pipeline_service.ledger
        for counts in (traffic.sent, traffic.received):
            counts["control"] += 1
        traffic.refused["malformed"] += 1
        traffic.departures["left"] += 1
        ledger.rerouted["deadline"] = 1
        ledger.drop("not_finite")
        worker.services.inference.outcomes["done"] += 1
        swarm.observers["a"].peak = 1e12
        swarm.observers["a"].log_event()
        await swarm.stop_watching()
        await swarm.close()

    run(story())
    assert moved(swarm.metrics["a"]) >= {
        "train_tokens_total", "train_loss", "train_gradient_norm", "train_flops_utilization_ratio",
        "votes_total alone", "rounds_total alone", "round_settled", "disk_free_bytes",
        "network_sent_bytes_total control", "network_received_bytes_total control",
        "refused_total malformed", "departures_total left", "microbatches_rerouted_total deadline",
        "microbatches_dropped_total not_finite", "inference_requests_total done",
    }  # fmt: skip


def test_no_label_is_a_peer_and_all_are_bounded_but_those_the_peer_says_of_itself():
    """The stages of an archive are those of the run's manifest."""
    for metric in everything():
        for label in metric.labels:
            of_an_archive = label.name == "stage" and metric.name.startswith("swarmnet_archive_")
            assert label.values or of_an_archive or metric.name == "swarmnet_peer_info"
            assert label.name != "peer" or metric.name == "swarmnet_peer_info"


@pytest.mark.parametrize("role", ["bootstrap", "observer", "archivist"])
def test_a_role_has_no_series_that_it_cannot_move(role):
    """A worker's zeros of a bootstrap spoil averages."""
    series = [line for line in of_role(role).text().decode().splitlines() if not line.startswith("#")]
    assert len(series) < 60, "593 once, of which 88 % were 0"
    worker = {metric.name for metric in of_role("worker").own}
    assert not worker & {metric.name for metric in (*of_role(role).shared, *of_role(role).own)}
    own = {metric.name for metric in of_role(role).own}
    assert bool(own) == (role in ROLES)
    assert not own & {line.split("{")[0] for line in of_role("worker").text().decode().splitlines()}


def test_bytes_and_refusals_are_counted_by_the_words_of_the_wire():
    kinds = {cls.kind for cls in vars(messages).values()
             if isinstance(cls, type) and issubclass(cls, messages.Message)}  # fmt: skip
    assert kinds <= set(KINDS)
    codes = {cls.code for cls in vars(errors).values()
             if isinstance(cls, type) and issubclass(cls, errors.WireError)}  # fmt: skip
    assert codes - {"wire", "gone", "unreachable"} <= set(REFUSALS)


def test_the_text_is_what_prometheus_reads_and_holds_no_created_series():
    metrics = PeerMetrics()
    metrics.network.sent("activation").inc(5)
    metrics.rounds.round.set(7)
    families = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    sent = {sample.labels["kind"]: sample.value for sample in families["swarmnet_network_sent_bytes"].samples}
    assert sent == {**dict.fromkeys(KINDS, 0.0), "activation": 5.0}
    assert families["swarmnet_round"].samples[0].value == 7
    assert "process_cpu_seconds" in families
    assert not [name for name in families if name.endswith("_created")]


def test_strangers_cannot_add_series():
    metrics = PeerMetrics(process=False)
    before = len(metrics.text().splitlines())
    for number in range(100):
        metrics.network.refused(f"made up {number}").inc()
    assert len(metrics.text().splitlines()) == before
    assert b'swarmnet_refused_total{code="other"} 100.0' in metrics.text()


def test_a_wrong_number_of_labels_is_a_mistake_in_the_program():
    with pytest.raises(TypeError, match="operation"):
        PeerMetrics(process=False).network.directory("get")


class Library:
    """As much of NVIDIA's library as is asked, for a GPU that does not tell its power."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0

    def __init__(self):
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
        self.nvmlDeviceGetUtilizationRates = lambda device: SimpleNamespace(gpu=40, memory=90)
        self.nvmlDeviceGetTemperature = lambda device, sensor: 71

    def nvmlDeviceGetPowerUsage(self, device):  # noqa: N802 - the library's name
        raise self.NVMLError("Not Supported")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as torch tells of it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 10 << 30))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"), raising=False
    )
    return torch.device("cuda")


def shown_of_gpu(metrics):
    return {
        family.name.removeprefix("swarmnet_gpu_"): family.samples[0].value
        for family in text_string_to_metric_families(metrics.text().decode())
        if family.name.startswith("swarmnet_gpu_")
    }


MEMORY = {"memory_used_ratio": 0.7}


def test_without_nvidias_library_a_gpu_has_the_series_that_torch_knows_and_no_others(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    metrics = PeerMetrics(process=False)
    assert shown_of_gpu(metrics) == {}
    watch = GpuWatch(metrics, gpu, nvml_of(gpu))
    watch.look()
    watch.look()
    assert shown_of_gpu(metrics) == MEMORY


def test_what_nvidias_library_tells_is_shown_and_what_it_does_not_tell_has_no_series(gpu, monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    metrics = PeerMetrics(process=False)
    watch = GpuWatch(metrics, gpu, nvml_of(gpu))
    watch.look()
    assert shown_of_gpu(metrics) == {**MEMORY, "utilization_ratio": 0.4, "temperature_celsius": 71.0}
    library.nvmlDeviceGetPowerUsage = lambda device: 219_500
    watch.look()
    assert shown_of_gpu(metrics)["power_watts"] == 219.5
    assert 0 < watch.joules < 219.5 * 60, "watts, by the seconds since it was looked at before"
    del library.nvmlDeviceGetPowerUsage
    watch.look()
    assert math.isnan(shown_of_gpu(metrics)["power_watts"]), "no longer told is not the last value for ever"


def test_a_gpu_that_the_library_does_not_know_is_no_error(gpu, monkeypatch):
    library = Library()

    def unknown(uuid):
        raise library.NVMLError("Not Found")

    library.nvmlDeviceGetHandleByUUID = unknown
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert nvml_of(gpu) is None


def test_two_peers_in_one_process_count_apart():
    one, other = PeerMetrics(process=False), PeerMetrics(process=False)
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
    metrics = PeerMetrics(process=False)
    with Exporter(
        address=("127.0.0.1", 0), metrics=metrics.text, healthy=lambda: None, ready=lambda: state["ready"]
    ) as running:
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


def test_where_nobody_chose_a_port_the_first_free_one_of_others_will_do():
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as second:
        port, also_taken = (each.getsockname()[1] for each in (taken, second))
        others = (also_taken, *range(port + 1, port + 200))
        with Exporter(
            address=("127.0.0.1", port),
            metrics=bytes,
            healthy=lambda: None,
            ready=lambda: None,
            others=others,
        ) as running:
            assert port < running.address[1] < port + 200


def test_an_occupied_port_is_named_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=f"127.0.0.1 port {port}: address already in use; choose another port"
        ):
            Exporter(address=("127.0.0.1", port), metrics=bytes, healthy=lambda: None, ready=lambda: None)


def test_closing_frees_the_port_at_once_and_twice_is_no_error():
    running = Exporter(address=("127.0.0.1", 0), metrics=bytes, healthy=lambda: None, ready=lambda: None)
    port = running.address[1]
    running.close()
    running.close()
    Exporter(address=("127.0.0.1", port), metrics=bytes, healthy=lambda: None, ready=lambda: None).close()


def test_a_client_that_hangs_up_does_no_harm(exporter, capfd):
    running, _ = exporter
    with socket.create_connection(running.address) as client:
        client.sendall(b"GET /metr")
    assert get(f"{running.url}/healthz")[0] == 200
    assert capfd.readouterr().err == ""
