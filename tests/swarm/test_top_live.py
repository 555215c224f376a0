"""`swarmnet top` on what lives: a worker's own picture, the socket it is asked over, and the directory."""

import asyncio
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import ProcessCollector
from rich.console import Console
from swarm import OWNER, TINY_MODEL, Swarm, sign, tiny_manifest

from peers.lab.world.virtual_time import run
from peers.network.discovery.record_reader import QUIET_SECONDS, look
from peers.runtime.control_server import Control
from peers.runtime.control_socket import LONGEST_ANSWER_BYTES
from peers.telemetry.event_fold import Story
from peers.telemetry.event_log import Line
from peers.telemetry.picture import as_json, from_json
from peers.tools.top import show
from peers.tools.top.from_directory import Watch
from peers.tools.top.live import swarm as watch_swarm
from peers.worker.picture_of_worker import picture_of, view
from protocols.errors import Unreachable
from protocols.signed.identity import Identity
from protocols.signed.orders import seal_order
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import open_record, seal_record
from swarmnet.identifiers import RunId
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import NO_ORDER, Order


@pytest.fixture(scope="module")
def lived():
    """Pictures of a, of stage 0, before and after the only peer of stage 1 crashes; records."""
    seen = {}

    async def story():
        swarm.open()
        tale = Story("a")
        member = swarm.start("a", 0, in_flight=2)
        hears_too(member.worker, tale)
        swarm.start("b", 1)
        await swarm.until(lambda: swarm.committed(0) >= 20, 60.0)
        seen["before"] = view(member.worker, tale, "attic", idle=0.25)
        directory = member.worker.presence.directory
        seen["records"] = await look(directory, swarm.signed.run_id, len(swarm.signed.manifest.stages))
        await swarm.crash("b")
        await swarm.until(lambda: swarm.of("waiting", "a"), 30.0)
        seen["after"] = view(member.worker, tale, "attic")
        await swarm.close()

    swarm = Swarm(tiny_manifest((1, 2)))
    run(story())
    return swarm, seen


def hears_too(worker, tale):
    """What the event log does in a process: the story hears every event."""
    for part in (worker, worker.presence):
        plain = part.note

        def note(event, plain=plain):
            plain(event)
            tale.take(Line(time.time(), 0.0, event))

        part.note = note


def test_a_worker_shows_itself_its_neighbours_its_loss_and_what_it_counts(lived):
    swarm, seen = lived
    picture = from_json(seen["before"])
    assert (picture.run, picture.state, picture.stages) == (swarm.signed.manifest.name, "training", 2)
    own, other = picture.peers
    assert own.here
    assert (own.name, own.stage, own.state) == ("attic", 0, "training")
    assert (other.stage, other.state, other.here) == (1, "training", False)
    assert other.can_do > 0
    assert picture.loss == pytest.approx(picture.losses[-1], abs=0.5)
    assert picture.tokens > 0
    assert picture.sent["activation"] > picture.sent["control"] > 0
    assert picture.received["gradient"] > 0
    assert picture.microbatches["committed"] >= 20
    assert sum(picture.rounds.values()) == picture.round
    assert picture.lag == 0
    assert picture.idle_share == 0.25
    assert picture.gradient_norm > 0
    resident = next(
        sample.value for family in ProcessCollector(registry=None).collect() for sample in family.samples
        if sample.name == "process_resident_memory_bytes"
    )  # fmt: skip
    assert picture.memory_bytes == pytest.approx(resident, rel=0.5), "what /metrics calls resident"


def test_a_peer_that_is_lost_is_seen_as_gone_with_its_code(lived):
    _, seen = lived
    picture = from_json(seen["after"])
    assert [seen.state for seen in picture.peers] == ["training", "gone"]
    codes = [event.code for event in picture.events]
    assert {"connection_lost", "stage_missing"} <= set(codes)


def test_before_there_is_a_worker_the_role_says_what_it_is_at():
    picture = picture_of(None, Story(), "attic", "paused")
    assert (picture.source, picture.state, picture.peers) == ("peer attic", "paused", ())


# -- the directory ------------------------------------------------------------------------------------------


def test_the_directory_shows_everybody_with_what_they_claim(lived):
    swarm, seen = lived
    now = max(signed.sequence for signed in seen["records"].values()) / 1e6
    picture = Watch(swarm.signed.manifest).take(seen["records"], now)
    assert [peer.stage for peer in picture.peers] == [0, 1]
    assert picture.stages == 2
    assert picture.waits_for == ()


RUN = RunId("ab" * 32)


def record(identity, now, **fields):
    claims = {
        "stage": 0, "role": "worker", "addresses": [], "round": 3, "tokens_per_second": 900.0, "version": "1",
        "state": "training", "loss": 3.0, "tokens": 1000, "name": "attic", **fields,
    }  # fmt: skip
    return open_record(seal_record(identity, RUN, PeerRecord(identity.peer_id, **claims), now), RUN)


def test_looks_are_compared_who_came_went_moved_and_how_fast_it_trains():
    manifest, one, other = tiny_manifest((1, 2)), Identity.generate(), Identity.generate()
    watch, now = Watch(manifest), 1_700_000_000.0
    a, b = one.peer_id, other.peer_id
    first = watch.take({a: record(one, now)}, now)
    assert (first.loss, first.tokens, first.tokens_per_second) == (3.0, 1000, None)
    assert first.waits_for == (1,)
    later = now + 30
    loft = {"stage": 1, "round": 8, "name": "loft"}
    records = {a: record(one, later, tokens=4000, round=9, loss=2.0), b: record(other, later, **loft)}
    second = watch.take(records, later)
    assert second.tokens_per_second == pytest.approx(100.0)
    assert (second.round, second.lag) == (9, 0), "each stage has rounds of its own"
    assert second.loss == pytest.approx(2.5)
    assert [(event.code, event.text) for event in second.events] == [
        ("record_new", "loft announces itself for stage 1")
    ]
    last = watch.take({b: record(other, later + 1, stage=0, name="loft")}, later + QUIET_SECONDS + 2)
    assert [event.code for event in last.events] == ["record_new", "moved", "record_gone"]
    assert last.peers[0].state == "quiet", "its record is old"


def test_a_state_of_a_newer_version_is_shown_as_it_is():
    manifest, one = tiny_manifest((1, 2)), Identity.generate()
    picture = Watch(manifest).take({one.peer_id: record(one, 1e9, state="dreaming", loss=None)}, 1e9)
    assert picture.peers[0].state == "dreaming"
    assert picture.loss is None


def test_a_run_that_its_owner_holds_says_so_in_the_headline_and_why_among_the_events():
    manifest, one, now = tiny_manifest((1,)), Identity.generate(), 1_700_000_000.0
    watch, paused = Watch(manifest), owner_orders.pause(Order(sequence=7), "a look at the data")
    records = {one.peer_id: record(one, now, state="held", round=12)}
    held = watch.take(records, now, paused)
    assert (held.state, held.round, held.waits_for) == ("held", 12, ())
    assert [(event.code, event.text) for event in held.events] == [
        ("order", "by the owner's newest order: the run is paused (a look at the data)")
    ]
    assert watch.take(records, now + 5, paused).events == held.events, "told once"
    resumed = Order(sequence=8, bans=(owner_orders.Ban(one.peer_id, "noise"),))
    after = watch.take(records, now + 10, resumed)
    assert after.state == ""
    assert after.events[-1].text.startswith("the owner orders: the run goes on; 12D3")
    many = Order(sequence=9, bans=tuple(owner_orders.Ban(f"peer-{number}", "") for number in range(300)))
    assert len(watch.take(records, now + 15, many).events[-1].text) <= 200
    assert watch.take(records, now + 20, NO_ORDER).events[-1].text.startswith("the owner orders: peer-0")


class Told:
    """A directory of one peer that is held, and of the owner's order, unless it is silent about that."""

    def __init__(self, signed, order):
        self.order, self.one, self.run_id = order, Identity.generate(), signed.run_id

    def now(self):
        return 1_700_000_000.0

    async def look_up(self, run_id, stage, _deadline):
        content = record(self.one, self.now(), state="held").record
        sealed = seal_record(self.one, run_id, content, self.now())
        return {self.one.peer_id: sealed} if stage == 0 else {}

    async def get_order(self, *_):
        if self.order is None:
            raise Unreachable("the directory did not answer within 10 s")
        return seal_order(OWNER, self.run_id, self.order)


@pytest.mark.parametrize(
    ("order", "headline"),
    [
        (Order(sequence=7, reason="a look at the data", paused=True), "as peers say   held"),
        (Order(sequence=7), "as peers say"),
        (None, "as peers say"),
    ],
)
async def test_the_directory_is_asked_for_the_owners_order_and_need_not_answer(order, headline, capsys):
    signed = sign(tiny_manifest((1,), model=replace(TINY_MODEL, layers=1)))
    found = SimpleNamespace(signed=signed, directory=Told(signed, order))
    await asyncio.wait_for(watch_swarm(Console(width=80), found), 20.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rpartition(" ")[0].rstrip().endswith(headline)
    why = [line for line in lines if "by the owner's newest order: the run is paused (a l" in line]
    assert len(why) == bool(order and order.paused)


# -- over the socket ----------------------------------------------------------------------------------------


async def test_without_a_terminal_one_frame_of_the_running_peer_is_printed(tmp_path, capsys, lived):
    _, seen = lived

    async def status(_request):
        return seen["before"]

    control = Control(tmp_path)
    control.answers["status"] = status
    await control.start()
    try:
        await asyncio.wait_for(asyncio.to_thread(show.peer, Console(width=80), tmp_path), 20.0)
    finally:
        await control.close()
    text = capsys.readouterr().out
    assert "peer attic" in text
    assert "(here)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_watching_a_peer_or_a_log_loads_neither_torch_nor_the_network():
    heavy = "{'torch', 'hivemind'} & set(sys.modules)"
    code = f"import sys, peers.cli.top, peers.tools.top.show; print(sorted({heavy}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_the_picture_is_small_enough_for_the_socket(lived):
    _, seen = lived
    picture = from_json(seen["before"])
    assert len(str(as_json(picture))) < LONGEST_ANSWER_BYTES / 20
