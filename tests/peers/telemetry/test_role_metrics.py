"""What archivists and relays show of their own work: every number is one that they know."""

from __future__ import annotations

from dataclasses import replace

from archived import MANIFEST, SLOW, STAGE, Desk, archived, trained
from prometheus_client.parser import text_string_to_metric_families
from relayed import ASKER, CIRCUIT, CONNECT, DOOR, HIDDEN, OTHER, RESERVE, Relay, accepts
from swarm import Swarm

from peers.config.errors import UserError
from peers.lab.world.virtual_time import run
from peers.network.dht_sampler import RelayObserver
from peers.stageless.archivist.archivist import Policy
from peers.stageless.archivist.archivist_links import LinkContext
from peers.stageless.archivist.sampler import ArchiveObserver
from peers.state.archive_store import FolderStore
from peers.state.snapshot_service import NoState, SnapshotService
from peers.telemetry.metrics import PeerMetrics
from peers.telemetry.reasons import ARCHIVING, RELAYING
from protocols.errors import PeerGone, Unreachable
from protocols.messages.table import Chunk, Heartbeat
from protocols.reachability import circuit_relay, relay_service
from protocols.signed.records import RECORD_SECONDS


def shown(metrics: PeerMetrics, prefix: str) -> dict[str, float]:
    """Samples by what stands behind the prefix, with the values of their labels, by the labels' names."""
    return {
        " ".join([sample.name.removeprefix(f"swarmnet_{prefix}_"), *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name.startswith(f"swarmnet_{prefix}_")
    }


def refusing(fault: Exception):
    async def refuses(*_, **__):
        raise fault

    return refuses


def raising(fault: Exception):
    def raises(*_, **__):
        raise fault

    return raises


# -- relays -------------------------------------------------------------------------------------------


def test_a_relay_counts_what_it_refuses_by_each_of_the_reasons(monkeypatch):
    async def scenario():
        relay = Relay()
        refused = relay.service.refused
        assert await relay.status(ASKER, CONNECT) == circuit_relay.NO_RESERVATION
        assert await relay.status(HIDDEN, RESERVE, CIRCUIT) == circuit_relay.REFUSED
        assert await relay.status(ASKER, {1: 9}) == circuit_relay.MALFORMED
        assert await relay.status(HIDDEN, RESERVE) == circuit_relay.OK
        assert await relay.status(ASKER, CONNECT) == circuit_relay.CONNECTION_FAILED
        expected = ["no_slot", "relayed", "malformed", "not_reached"]
        for limit, code in {"SLOTS_PER_RANGE": "address_full", "SLOTS": "slots_full"}.items():
            monkeypatch.setattr(relay_service, limit, 1)
            assert await relay.status(OTHER, RESERVE) == circuit_relay.REFUSED
            expected.append(code)
        assert await relay.status(HIDDEN, RESERVE, DOOR) == circuit_relay.OK, "who has one keeps it"
        relay.reached[HIDDEN], _ = accepts()
        answer, (_, writer) = await relay.asked(ASKER, CONNECT)
        assert answer[5] == circuit_relay.OK
        table, limits = relay.service.table, relay.service.table.limits
        for limit, code in {
            "most_of_peer": "peer_full", "most": "circuits_full", "most_of_range": "range_full"
        }.items():  # fmt: skip
            table.limits = replace(limits, **{limit: 1})
            assert await relay.status(ASKER, CONNECT) == circuit_relay.LIMIT_EXCEEDED
            expected.append(code)
        assert dict(refused) == dict.fromkeys(expected, 1)
        for limit, code in {"STREAMS_PER_PEER": "peer_full", "STREAMS": "streams_full"}.items():
            before = refused[code]
            with monkeypatch.context() as patched:
                patched.setattr(relay_service, limit, 1)
                assert await relay.opened(ASKER)[0].read() == b""
            assert refused[code] == before + 1
        writer.close()
        await relay.end()
        assert refused.keys() == RELAYING.keys()

    run(scenario())


def test_what_relays_carry_is_shown_from_one_p2pd_to_the_next():
    metrics = PeerMetrics("bootstrap", process=False)

    async def carried(size: int) -> None:
        relay = Relay()
        observer = RelayObserver(relay.service, metrics)
        observer.look()
        relay.reached[HIDDEN], ends = accepts()
        await relay.status(HIDDEN, RESERVE)
        await relay.status(OTHER, CONNECT, CIRCUIT)
        _, (reader, writer) = await relay.asked(ASKER, CONNECT)
        writer.write(bytes(size))
        (there, back), _ = ends[0]
        await there.readexactly(size)
        back.write(b"yes")
        await reader.readexactly(3)
        observer.look()
        assert shown(metrics, "relay")["circuits"] == 1
        observer.end()
        writer.close()
        await relay.end()

    before = shown(metrics, "relay")
    assert set(before.values()) == {0.0}
    refusals = {f"refused_total {code}" for code in RELAYING}
    assert before.keys() == {"circuits", "carried_bytes_total"} | refusals
    for size in (50_000, 300_000):
        run(carried(size))
    assert shown(metrics, "relay") == {
        **before, "carried_bytes_total": 350_006, "refused_total relayed": 2,
    }  # fmt: skip


# -- archivists -----------------------------------------------------------------------------------------

SUCCEEDED = "last_success_timestamp_seconds"


def test_only_an_archivist_has_series_of_stages_and_it_has_all_of_them_before_it_looks(tmp_path):
    async def story():
        swarm = Swarm(MANIFEST, seed=1)
        swarm.open()
        archivist, _, _ = await archived(swarm, str(tmp_path), Policy(seconds=30.0))
        observer = ArchiveObserver(archivist, metrics)
        observer.look()
        archivist.circle.close()

    metrics = PeerMetrics("archivist", process=False)
    assert shown(metrics, "archive") == {"interval_seconds": 0.0}
    run(story())
    series = {"interval_seconds": 30.0}
    for stage in "01":
        series[f"round {stage}"] = -1.0
        for name in (SUCCEEDED, "size_bytes", "served_bytes_total"):
            series[f"{name} {stage}"] = 0.0
        series |= {f"failures_total {code} {stage}": 0.0 for code in ARCHIVING}
    assert shown(metrics, "archive") == series


def test_an_archivist_shows_what_its_archive_holds_and_when_it_last_was_up_to_date(tmp_path):
    metrics = PeerMetrics("archivist", process=False)

    def of(name: str) -> list[float]:
        found = shown(metrics, "archive")
        return [found[f"{name} {stage}"] for stage in (0, 1)]

    async def story():
        swarm = Swarm(MANIFEST, seed=1)
        await trained(swarm, {"a": 0, "c": 1}, 4, compute=SLOW)
        archivist, archive, _ = await archived(swarm, str(tmp_path), Policy(newest=2))
        observer = ArchiveObserver(archivist, metrics)
        for rounds in (10, 16, 22):
            await archivist.once()
            observer.look()
            await swarm.until(lambda rounds=rounds: min(s for _, s in swarm.rounds().values()) > rounds, 60.0)
        kept = [archive.newest(stage) for stage in (0, 1)]
        assert of("round") == [entries[0].round for entries in kept]
        files = [sum(path.stat().st_size for path in tmp_path.glob(f"stage-{stage}-*")) for stage in (0, 1)]
        assert of("size_bytes") == files
        archivist.circle.close()
        await swarm.close()

    run(story())


def test_a_look_at_a_stage_succeeds_that_finds_nothing_newer_and_fails_where_nobody_is(tmp_path):
    async def story():
        swarm = Swarm(MANIFEST, seed=1)
        await trained(swarm, {"a": 0, "c": 1}, 4, compute=SLOW)
        archivist, archive, _ = await archived(swarm, str(tmp_path), Policy())
        await archivist.once()
        await swarm.crash("c")
        await swarm.during(RECORD_SECONDS)  # The directory forgets it, and stage 0 stands still.
        await archivist.once()
        (newest, *_), before = archive.newest(0), dict(archivist.succeeded)
        await swarm.during(60.0)
        await archivist.once()
        assert archive.newest(0)[0] == newest
        assert archivist.succeeded[0] >= before[0] + 60.0
        assert archivist.succeeded[1] == before[1]
        assert archivist.failures == {(1, "no_peer"): 2}
        archivist.circle.close()
        await swarm.close()

    run(story())


def test_why_a_stage_was_not_archived_is_counted_by_each_of_the_reasons(tmp_path, monkeypatch):
    metrics = PeerMetrics("archivist", process=False)

    def failures() -> dict[str, float]:
        found = shown(metrics, "archive").items()
        return {name.removeprefix("failures_total "): count for name, count in found
                if name.startswith("failures_total") and count}  # fmt: skip

    async def story():
        swarm = Swarm(MANIFEST, seed=1)
        await trained(swarm, {"a": 0, "c": 1}, 4, compute=SLOW)
        archivist, _, _ = await archived(swarm, str(tmp_path), Policy())
        observer, circle = ArchiveObserver(archivist, metrics), archivist.circle

        async def nobody(*_):
            return {}

        faults = {
            "no_peer": (circle.directory, "look_up", nobody),
            "directory_silent": (circle.directory, "look_up", refusing(Unreachable("no answer"))),
            "not_reached": (circle.transport, "open", refusing(PeerGone("not reached"))),
            "no_agreement": (SnapshotService, "fetch", refusing(NoState("they agree on none"))),
            "not_signed": (LinkContext, "signed", lambda *_: {}),
            "deadline": ("peers.stageless.archivist.archivist", "FETCH_SECONDS", 0.0),
            "index_full": ("peers.state.archive", "INDEX_LIMIT", 9),
            "not_written": (FolderStore, "write", raising(UserError("no room"))),
            "not_given_back": (FolderStore, "read", lambda *_: None),
        }
        assert faults.keys() == ARCHIVING.keys()
        expected: dict[str, float] = {}
        for code, (where, name, fault) in faults.items():
            with monkeypatch.context() as broken:
                if isinstance(where, str):
                    broken.setattr(f"{where}.{name}", fault)
                else:
                    broken.setattr(where, name, fault)
                await archivist.once()
            observer.look()
            expected |= {f"{code} {stage}": 1.0 for stage in (0, 1)}
            assert failures() == expected, code
            assert archivist.succeeded == {}
        await archivist.once()
        observer.look()
        assert failures() == expected
        assert archivist.succeeded.keys() == {0, 1}
        circle.close()
        await swarm.close()

    run(story())


async def test_weights_that_newcomers_get_over_links_and_carriers_are_counted_and_words_are_not(tmp_path):
    desk = Desk(str(tmp_path))
    desk.put(3)
    peer = await desk.greeted("e")
    desk.serving.post(peer, Chunk(b"digest", 0), bytes(1000))
    desk.serving.post(peer, Heartbeat(0, -1, 0.0, -1, False, 0, 0.0, 0, True))
    desk.serving.gave(STAGE, 500)
    desk.serving.gave(0, 70)
    assert dict(desk.serving.served_bytes) == {STAGE: 1500, 0: 70}
    desk.serving.lost(peer)
    desk.serving.post(peer, Chunk(b"digest", 1), bytes(1000))
    assert desk.serving.served_bytes[STAGE] == 1500, "it has gone"
    desk.serving.close()
