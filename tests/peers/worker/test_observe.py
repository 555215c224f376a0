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
from peers.telemetry.counters import Growth, by_code
from peers.telemetry.metrics import PeerMetrics
from protocols.errors import Unreachable
from protocols.framing.frames import wire_bytes
from protocols.messages.table import Contribution, encode
from protocols.signed.envelope import ENVELOPE_BYTES
from swarmnet.membership.dht_partition import MISSED_LOOKS
from swarmnet.rounds.contribution_sets import NeighbourView

pytestmark = pytest.mark.swarm

OF_THE_PROCESS = {"peer_info", "daemon_restarts_total", "event_loop_late_seconds_total"}
"""Set by the peer process itself: tests/peers/cli/test_bad_input.py looks at a real one."""
OF_FAULTS = {"train_nonfinite_total", "refused_total", "round_lag",
             "network_clock_offset_seconds", "microbatches_dropped_total", "stages_missing",
             "dht_split_suspected", "dht_bootstraps_lost", "audits_total", "avoided_peers"}  # fmt: skip
"""A swarm in which nobody lies or breaks has none; each is made to move below."""
OF_VISITORS = {"inference_requests_total"}


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
    await swarm.members["b"].worker.context.transport.close()
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
    declared = {
        metric.name.removeprefix("swarmnet_") for metric in (*PeerMetrics().shared, *PeerMetrics().own)
    }
    elsewhere = OF_THE_PROCESS | OF_FAULTS | OF_VISITORS
    assert declared - names == elsewhere


@pytest.mark.parametrize(
    ("metric", "labels", "peers"),
    [
        ("microbatch_duration_seconds", "forward", "ab"),
        ("microbatch_duration_seconds", "forward backward", "cdg"),
        ("microbatch_duration_seconds", "backward", "ef"),
        ("microbatches_total", "committed", "abcdefg"),
        ("departures_total", "connection_lost left", "a"),
        ("state", "training", "adefg"),
        ("stage_peers", "", "abdefg"),
        ("disk_free_bytes", "", "b"),
        ("credit_contributions", "", "adef"),
        ("network_sent_bytes_total", "activation contribution update snapshot control", "abcdg"),
        ("network_sent_bytes_total", "gradient contribution update snapshot control", "cdefg"),
        ("network_received_bytes_total", "gradient contribution update snapshot control", "abcdg"),
        ("network_received_bytes_total", "activation contribution update snapshot control", "cdefg"),
        ("peers", "active gone", "abdefg"),
        ("dht_operations_total", "get ok", "abcdefg"),
        ("dht_operations_total", "put ok", "abcdefg"),
        ("network_reachable", "unknown", "abcdefg"),
        ("train_gradient_norm", "", "abdefg"),
        ("train_momentum_norm", "", "abdefg"),
        ("votes_total", "agreed opposed alone", "abdefg"),
        ("compute_busy_seconds_total", "", "abcdefg"),
        ("compute_idle_seconds_total", "answers", "abcdg"),
        ("compute_idle_seconds_total", "microbatches", "ef"),
        ("rounds_total", "completed", "abcdefg"),
        ("rounds_total", "replayed", "g"),
        ("rounds_total", "deadline", "e"),
        ("updates_total", "accepted", "abcdefg"),
        ("checkpoint_interval_seconds", "", "b"),
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
        assert worker.services.pipeline_service.ledger.tokens >= metrics.training.tokens._value.get() > 0
        swarm.observers[name].look()
        assert metrics.training.tokens._value.get() == worker.services.pipeline_service.ledger.tokens
        assert (
            metrics.microbatches.ended("committed")._value.get()
            == worker.services.pipeline_service.ledger.committed
        )
        for kind, count in worker.services.links.traffic.sent.items():
            assert metrics.network.sent(kind)._value.get() == count


def test_the_bytes_of_contributions_on_the_wire_are_the_computed_ones(watched):
    swarm, _ = watched
    for name in "adefg":
        worker = swarm.members[name].worker
        envelope = ENVELOPE_BYTES + worker.services.part.method.payload_bytes
        each = wire_bytes(len(encode(Contribution())), envelope)
        sent = worker.services.links.traffic.sent["contribution"]
        assert sent > 5 * each
        assert sent % each == 0


@on_virtual_clock
async def test_faults_have_series_of_their_own():
    text = []
    swarm = Watched(tiny_manifest((3,)))
    swarm.open()
    worker = swarm.start("a", 0).worker
    await swarm.until(lambda: swarm.committed(0) > 3, 30.0)
    worker.services.pipeline_service.ledger.drop("not_finite")
    worker.services.round_service.counts.not_finite += 2
    worker.services.pipeline_service.missing.now = (2,)
    worker.services.pipeline_service.ledger.rerouted["deadline"] = 7
    worker.services.links.traffic.departures["made up"] += 1
    worker.services.inference.outcomes.update({"done": 2, "made up": 1})
    worker.services.audits.outcomes["lied"] += 1
    for _ in range(MISSED_LOOKS):
        worker.services.looking.split.looked(["x", "y"], ["y"])
    for code in ("malformed", "made up by a stranger", "made up by another"):
        worker.services.links.traffic.refused[code] += 4
    ahead = worker.services.round_service.rounds.current + 5
    worker.services.round_service.rounds.neighbours["somebody"] = NeighbourView(round=ahead)
    swarm.observers["a"].look()
    del worker.services.round_service.rounds.neighbours["somebody"]
    text.extend(swarm.metrics["a"].text().decode().splitlines())
    await swarm.stop_watching()
    await swarm.close()
    for line in (
        'train_nonfinite_total{where="microbatch"} 1.0',
        'train_nonfinite_total{where="contribution"} 2.0',
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
        "dht_split_suspected 1.0",
        'audits_total{outcome="lied"} 1.0',
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

    counted, metrics = CountedDirectory(Down()), PeerMetrics(process=False)
    asyncio.run(story())
    directory = seen(
        measured_offset=-2.5, refusals=Counter({"bad_signature": 2, "whatever": 3}),
        sent_bytes=70,
    )  # fmt: skip
    observer = DirectoryObserver(counted, directory, metrics)
    observer.look()
    directory.sent_bytes, directory.received_bytes = 100, 30
    directory.measured_offset = None  # Just now nobody tells it.
    observer.look()
    assert moved(metrics) == {
        "dht_operations_total bootstrap failed", "dht_operations_total bootstrap ok",
        "dht_operations_total get empty", "network_clock_offset_seconds",
        "refused_total bad_signature", "refused_total other",
        "network_sent_bytes_total directory", "network_received_bytes_total directory",
        "network_reachable unknown",
    }  # fmt: skip
    assert b'sent_bytes_total{kind="directory"} 100.0' in metrics.text()
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
