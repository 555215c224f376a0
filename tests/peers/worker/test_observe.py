"""What a peer's counters become: every series that a swarm must move does move, and health is told."""

import asyncio
from collections import Counter

import pytest
from clocks import on_virtual_clock
from swarm import tiny_manifest
from watched import Watched, moved, seen

from peers.lab.world.virtual_time import run
from peers.network.counted_directory import CountedDirectory
from peers.network.dht_sampler import DirectoryObserver
from peers.telemetry.counters import CODED, Growth, by_code
from peers.telemetry.metrics import Metrics
from protocols.errors import PeerGone, Unreachable
from protocols.framing.frames import wire_bytes
from protocols.messages.table import Contribution, encode
from protocols.signed.envelope import ENVELOPE_BYTES
from swarmnet.membership.dht_partition import MISSED_LOOKS
from swarmnet.rounds.contribution_sets import NeighbourView

pytestmark = pytest.mark.swarm

OF_THE_PROCESS = {"build_info", "peer_info", "daemon_restarts_total", "stage_moves_total", "paused",
                  "event_loop_lag_seconds", "network_connections"}  # fmt: skip
"""Set by the peer process itself: tests/peers/cli/test_bad_input.py looks at a real one."""
OF_FAULTS = {"train_nonfinite_total", "refused_total", "state_chunks_refused_total", "round_lag",
             "network_clock_offset_seconds", "microbatches_dropped_total", "stages_missing",
             "dht_split_suspected", "dht_bootstraps_lost", "audits_total"}  # fmt: skip
"""A swarm in which nobody lies or breaks has none; each is made to move below."""
OF_SLOW_LINES = {"network_subflows", "network_messages_repeated_total"}
"""A line in memory carries all that there is."""
OF_OTHER_ROLES = {
    "archive_round", "archive_newest_timestamp_seconds", "archive_last_success_timestamp_seconds",
    "archive_size_bytes", "archive_checkpoints", "archive_failures_total", "archive_served_bytes_total",
    "archive_interval_seconds", "relay_circuits", "relay_refused_total", "relay_carried_bytes_total",
}  # fmt: skip
"""Of archivists and of bootstraps: tests/peers/telemetry/test_role_metrics.py."""
OF_EXPERTS = {"experts_tokens_total"}
"""Of runs with experts: tests/swarm/methods/test_experts_in_swarm.py."""
OF_VISITORS = {"inference_requests_total", "inference_compute_seconds_total"}


async def lively(swarm, folder):
    """Six peers; one dies, one joins, one is frozen for a while, one comes back from its disk."""
    for name, stage in {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 2}.items():
        keeps = {"checkpoints": folder / name, "checkpoint_seconds": 3.0} if name == "b" else {}
        swarm.start(name, stage, in_flight=4, **keeps)

    def settled():
        return min((settled for _, settled in swarm.rounds().values()), default=-1)

    await swarm.until(lambda: settled() >= 20, 60.0)
    await swarm.crash("c")
    swarm.start("g", 1)
    await swarm.until(lambda: swarm.of("in_step", "g"), 30.0)
    swarm.network.freeze(swarm.members["f"].peer)
    await swarm.during(3.0)
    swarm.network.thaw(swarm.members["f"].peer)
    await swarm.until(lambda: swarm.of("saved", "b"), 30.0)
    await swarm.leave("b")
    await swarm.members["b"].worker.transport.close()
    swarm.start("b", 0, checkpoints=folder / "b", checkpoint_seconds=300.0)
    await swarm.until(lambda: len(swarm.of("in_step", "b")) > 1, 30.0)
    await swarm.during(10.0)
    await swarm.stop_watching()
    await swarm.close()


async def at_once(work, *arguments):
    """In the place of asyncio.to_thread: a virtual clock does not wait for threads."""
    return work(*arguments)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The swarm after its story; and each peer's series that moved."""
    swarm = Watched(tiny_manifest())

    async def story():
        swarm.open()
        await lively(swarm, tmp_path_factory.mktemp("states"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "to_thread", at_once)
        run(story())
    return swarm, {name: moved(metrics) for name, metrics in swarm.metrics.items()}


def test_every_declared_series_moves_in_a_swarm_to_which_things_happen(watched):
    _, series = watched
    names = {one.split()[0] for of_peer in series.values() for one in of_peer}
    declared = {metric.name.removeprefix("swarmnet_") for metric in Metrics(process=False).declared}
    elsewhere = OF_THE_PROCESS | OF_FAULTS | OF_SLOW_LINES | OF_VISITORS | OF_OTHER_ROLES | OF_EXPERTS
    assert declared - names == elsewhere


@pytest.mark.parametrize(
    ("metric", "labels", "peers"),
    [
        ("train_step_duration_seconds", "forward backward encode apply", "abcdg"),
        ("train_step_duration_seconds", "last encode apply", "ef"),
        ("microbatch_duration_seconds", "forward", "ab"),
        ("microbatch_duration_seconds", "forward backward", "cdg"),
        ("microbatch_duration_seconds", "backward", "ef"),
        ("microbatches_total", "committed", "abcdefg"),
        ("microbatches_total", "rerouted", "d"),
        ("departures_total", "connection_lost left", "a"),
        ("state", "training", "adefg"),
        ("stage_peers", "", "abdefg"),
        ("disk_free_bytes", "", "b"),
        ("credit_contributions", "", "adef"),
        ("credit_peers", "", "adef"),
        ("credit_tokens", "", "adef"),
        ("network_sent_bytes_total", "activation contribution update snapshot control", "abcdg"),
        ("network_sent_bytes_total", "gradient contribution update snapshot control", "cdefg"),
        ("network_received_bytes_total", "gradient contribution update snapshot control", "abcdg"),
        ("network_received_bytes_total", "activation contribution update snapshot control", "cdefg"),
        ("peers", "active gone", "abdefg"),
        ("dht_operations_total", "get ok", "abcdefg"),
        ("dht_operations_total", "put ok", "abcdefg"),
        ("dht_operation_duration_seconds", "get put", "abcdefg"),
        ("round_wait_seconds", "", "abdefg"),
        ("network_reachable", "unknown", "abcdefg"),
        ("train_gradient_norm", "", "abdefg"),
        ("train_momentum_norm", "", "abdefg"),
        ("train_floating_point_operations_total", "", "abcdefg"),
        ("train_staleness_rounds", "", "abcdefg"),
        ("votes_total", "agreed opposed alone", "abdefg"),
        ("compute_busy_seconds_total", "", "abcdefg"),
        ("compute_idle_seconds_total", "answers", "abcdg"),
        ("compute_idle_seconds_total", "microbatches", "ef"),
        ("codec_input_bytes_total", "activation contribution", "abcdg"),
        ("codec_output_bytes_total", "gradient contribution", "cdefg"),
        ("rounds_total", "completed", "abcdefg"),
        ("rounds_total", "replayed", "g"),
        ("rounds_total", "deadline", "e"),
        ("round_corrections_total", "", "bg"),
        ("updates_total", "accepted", "abcdefg"),
        ("checkpoint_duration_seconds", "save load", "b"),
        ("checkpoint_interval_seconds", "", "b"),
        ("checkpoint_duration_seconds", "fetch", "g"),
        ("state_fetched_bytes", "", "g"),
    ],
)
def test_the_series_move_at_the_peers_to_which_it_happened(watched, metric, labels, peers):
    _, series = watched
    pairs = [labels] if metric == "dht_operations_total" else labels.split() or [""]
    wanted = {f"{metric} {label}".strip() for label in pairs}
    missing = {name: wanted - series[name] for name in peers if wanted - series[name]}
    assert missing == {}


def test_the_metrics_agree_with_the_ledgers_and_the_traffic(watched):
    swarm, _ = watched
    for name in "adefg":
        worker, metrics = swarm.members[name].worker, swarm.metrics[name]
        assert worker.data.ledger.tokens >= metrics.training.tokens._value.get() > 0
        swarm.observers[name].look()
        assert metrics.training.tokens._value.get() == worker.data.ledger.tokens
        assert metrics.microbatches.ended("committed")._value.get() == worker.data.ledger.committed
        for kind, count in worker.neighbourhood.traffic.sent.items():
            assert metrics.network.sent(kind)._value.get() == count


def test_what_the_codecs_made_is_what_was_made_of_it_and_what_was_sent(watched):
    swarm, _ = watched
    manifest = swarm.signed.manifest
    assert manifest.hidden_codec == "bf16"
    for name in "adefg":
        worker, codecs = swarm.members[name].worker, swarm.metrics[name].codecs
        swarm.observers[name].look()
        made = {kind: codecs.output(kind)._value.get() for kind in CODED}
        given = {kind: codecs.input(kind)._value.get() for kind in CODED}
        assert made["activation"] * 2 == given["activation"]
        assert made["gradient"] * 2 == given["gradient"]
        assert made["contribution"] % worker.part.method.payload_bytes == 0
        assert given["contribution"] // made["contribution"] == (
            4 * worker.part.layout.size // worker.part.method.payload_bytes
        )
        assert (made["activation"] == 0) == (worker.stage == 2), "the last stage sends none down"
        assert (made["gradient"] == 0) == (worker.stage == 0), "and the first one none up"


def test_weights_that_change_under_a_microbatch_make_its_gradient_stale_by_so_many_rounds(watched):
    swarm, _ = watched
    for name in "adefg":
        swarm.observers[name].look()  # While the swarm closed, some more were done.
        samples = {sample.name.rpartition("_")[2]: sample.value for family in swarm.metrics[name].training
                   .staleness.collect() for sample in family.samples
                   if not sample.name.endswith("bucket")}  # fmt: skip
        committed = swarm.members[name].worker.data.ledger.committed
        assert samples["count"] == committed
        if swarm.members[name].worker.stage == 2:
            assert samples["sum"] == 0, "the last stage goes forward and backward at once"
        else:
            assert 0 < samples["sum"] < 2 * committed


def test_the_bytes_of_contributions_on_the_wire_are_the_computed_ones(watched):
    swarm, _ = watched
    for name in "adefg":
        worker = swarm.members[name].worker
        envelope = ENVELOPE_BYTES + worker.part.method.payload_bytes
        each = wire_bytes(len(encode(Contribution())), envelope)
        sent = worker.neighbourhood.traffic.sent["contribution"]
        assert sent > 5 * each
        assert sent % each == 0


@on_virtual_clock
async def test_faults_have_series_of_their_own():
    text = []
    swarm = Watched(tiny_manifest((3,)))
    swarm.open()
    worker = swarm.start("a", 0).worker
    await swarm.until(lambda: swarm.committed(0) > 3, 30.0)
    worker.data.ledger.drop("not_finite")
    worker.update.counts.not_finite += 2
    worker.states.chunks_refused += 3
    worker.data.missing = (2,)
    worker.data.ledger.rerouted["deadline"] = 7
    worker.neighbourhood.departures["made up"] += 1
    worker.inference.outcomes.update({"done": 2, "made up": 1})
    worker.inference.seconds += 0.5
    worker.audits.outcomes["lied"] += 1
    for _ in range(MISSED_LOOKS):
        worker.looking.split.looked(["x", "y"], ["y"])
    worker.neighbourhood.transport.subflows.update(open=2, repeated=3)
    for code in ("malformed", "made up by a stranger", "made up by another"):
        worker.neighbourhood.traffic.refused[code] += 4
    ahead = worker.update.rounds.current + 5
    worker.update.rounds.neighbours["somebody"] = NeighbourView(round=ahead)
    swarm.observers["a"].look()
    del worker.update.rounds.neighbours["somebody"]
    text.extend(swarm.metrics["a"].text().decode().splitlines())
    await swarm.stop_watching()
    await swarm.close()
    for line in (
        'train_nonfinite_total{where="microbatch"} 1.0',
        'train_nonfinite_total{where="contribution"} 2.0',
        'microbatches_total{outcome="dropped"} 1.0',
        "state_chunks_refused_total 3.0",
        "round_lag 5.0",
        'refused_total{code="malformed"} 4.0',
        'refused_total{code="other"} 8.0',
        "stages_missing 1.0",
        'microbatches_rerouted_total{reason="deadline"} 7.0',
        'microbatches_dropped_total{reason="not_finite"} 1.0',
        'updates_total{outcome="not_finite"} 2.0',
        'departures_total{reason="other"} 1.0',
        'inference_requests_total{outcome="done"} 2.0',
        'inference_requests_total{outcome="other"} 1.0',
        "inference_compute_seconds_total 0.5",
        "network_subflows 2.0",
        "network_messages_repeated_total 3.0",
        "dht_split_suspected 1.0",
        'audits_total{outcome="lied"} 1.0',
        'round_phase{phase="gathering"} 1.0',
        'round_phase{phase="waiting"} 0.0',
        'round_phase{phase="none"} 0.0',
    ):
        assert f"swarmnet_{line}" in text


def test_the_directory_is_counted_and_its_clock_shown():
    class Down:
        async def bootstrap(self, multiaddrs, deadline_seconds):
            if not multiaddrs:
                raise Unreachable("none was given")
            return len(multiaddrs)

        async def get_manifest(self, run_id, deadline_seconds):
            return None

    async def story():
        with pytest.raises(Unreachable):
            await counted.bootstrap([], 1.0)
        assert await counted.bootstrap(["/ip4/1.2.3.4/tcp/1"], 1.0) == 1
        assert await counted.get_manifest("ab" * 32, 1.0) is None

    circuit = "/ip4/1.2.3.4/tcp/5/p2p/12D3KooWrelay/p2p-circuit"
    ends = ["/ip4/9.9.9.9/tcp/4001"] * 5 + [circuit] * 2
    answers = [PeerGone("p2pd does not answer"), [(f"peer {end}", end) for end in ends]]

    async def connections(deadline_seconds):
        answer = answers.pop()
        if isinstance(answer, PeerGone):
            raise answer
        return answer

    counted, metrics = CountedDirectory(Down()), Metrics(process=False)
    asyncio.run(story())
    directory = seen(
        measured_offset=-2.5, known_nodes=9, refusals=Counter({"bad_signature": 2, "whatever": 3}),
        sent_bytes=70,
    )  # fmt: skip
    observer = DirectoryObserver(counted, directory, metrics, connections)
    observer.look()
    directory.sent_bytes, directory.received_bytes = 100, 30
    directory.measured_offset = None  # Just now nobody tells it.
    observer.look()
    asyncio.run(observer.look_at_connections())
    asyncio.run(observer.look_at_connections())
    assert moved(metrics) == {
        "dht_operations_total bootstrap failed", "dht_operations_total bootstrap ok",
        "dht_operations_total get empty", "dht_nodes", "network_clock_offset_seconds",
        "refused_total bad_signature", "refused_total other",
        "dht_operation_duration_seconds bootstrap", "dht_operation_duration_seconds get",
        "network_sent_bytes_total directory", "network_received_bytes_total directory",
        "network_connections direct", "network_connections relayed",
        "network_reachable unknown", "round_phase none",
    }  # fmt: skip
    assert b'sent_bytes_total{kind="directory"} 100.0' in metrics.text()
    assert b'network_connections{path="relayed"} 2.0' in metrics.text()
    assert b'refused_total{code="other"} 3.0' in metrics.text()
    assert b"clock_offset_seconds -2.5" in metrics.text(), "as measured, also where it is not gone by yet"


def test_growth_is_what_came_since_and_a_counter_that_began_again_counts_whole():
    growth = Growth()
    assert [growth.of("x", count) for count in (3, 5, 5, 2)] == [3, 2, 0, 2]
    assert growth.of("x", 7, "other label") == 7
    growth.forget("x")
    assert growth.of("x", 2) == 2


def test_codes_that_strangers_make_up_are_one_code():
    assert by_code({"malformed": 1, "aa": 2, "bb": 3}) == {"malformed": 1, "other": 5}
