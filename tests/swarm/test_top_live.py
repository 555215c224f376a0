"""`swarmnet top` on what lives: a worker's own snapshot, the socket it is asked over, and the directory."""

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
from peers.runtime.control_server import Control
from peers.runtime.control_socket import LONGEST_ANSWER_BYTES
from peers.telemetry.event_fold import PeerTimeline
from peers.telemetry.event_log import LogLine
from peers.telemetry.snapshot import as_json, from_json
from peers.tools.top import run_screen as show
from peers.tools.top.live import snapshots
from peers.tools.top.live import swarm as watch_swarm
from peers.worker.watch.snapshot_of_worker import snapshot_of
from protocols.errors import Unreachable
from protocols.signed.identity import Identity
from protocols.signed.orders import seal_order
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import seal_record
from swarmnet.run.owner_orders import OwnerOrders


@pytest.fixture(scope="module")
def lived():
    """Snapshots of a, of stage 0, before and after the only peer of stage 1 crashes."""
    seen = {"story": PeerTimeline()}

    async def story():
        swarm.open()
        member = swarm.start("a", 0, in_flight=2)
        swarm.start("b", 1)
        await swarm.until(lambda: swarm.committed(0) >= 20, 60.0)
        seen["before"] = snapshot_of(member.worker, "attic", idle_share=0.25)
        await swarm.crash("b")
        await swarm.until(lambda: swarm.of("waiting", "a"), 30.0)
        seen["after"] = snapshot_of(member.worker, "attic")
        await swarm.close()

    def hear(note):
        """What the event log of `a` does in a process."""
        if note.name == "a":
            seen["story"].take(LogLine(time.time(), 0.0, note.what))

    swarm = Swarm(tiny_manifest((1, 2)))
    swarm.on_note = hear
    run(story())
    return swarm, seen


def test_a_worker_shows_itself_its_neighbours_its_loss_and_what_it_counts(lived):
    swarm, seen = lived
    shown = from_json(as_json(seen["before"]))
    assert (shown.run, shown.state) == (swarm.signed.manifest.name, "training")
    assert [stage.peers for stage in shown.stages] == [1, 1]
    own, other = shown.rows
    assert own.here
    assert (own.name, own.stage, own.state) == ("attic", 0, "training")
    assert (other.stage, other.state, other.here) == (1, "training", False)
    assert other.can_do > 0
    assert shown.loss == pytest.approx(seen["story"].losses.points[-1][1], abs=0.5)
    assert shown.tokens > 0
    assert shown.sent["activation"] > shown.sent["control"] > 0
    assert shown.received["gradient"] > 0
    assert shown.microbatches["committed"] >= 20
    assert sum(shown.rounds.values()) == shown.round
    assert shown.lag == 0
    assert shown.idle_share == 0.25
    assert shown.gradient_norm > 0
    resident = next(
        sample.value for family in ProcessCollector(registry=None).collect() for sample in family.samples
        if sample.name == "process_resident_memory_bytes"
    )  # fmt: skip
    assert shown.memory_bytes == pytest.approx(resident, rel=0.5), "what /metrics calls resident"


def test_a_peer_that_is_lost_is_seen_as_gone_with_its_code(lived):
    _, seen = lived
    assert [row.state for row in seen["after"].rows] == ["training", "gone"]
    codes = [event.code for event in seen["story"].events]
    assert {"connection_lost", "stage_missing"} <= set(codes)


# -- the directory ------------------------------------------------------------------------------------------


class Looks:
    """Looks of `top --run` at a directory that the test fills."""

    def __init__(self, manifest):
        self.signed = sign(manifest)
        self.now_seconds, self.sealed = 1_700_000_000.0, {}
        self._snapshots = snapshots(SimpleNamespace(signed=self.signed, directory=self))

    def now(self):
        return self.now_seconds

    async def look_up(self, _run, stage, _deadline):
        return {peer: data for peer, (held, data) in self.sealed.items() if held == stage}

    async def get_order(self, *_):
        return None

    async def opinions(self, *_):
        return []

    def announces(self, identity, stage, **fields):
        claims = {"tokens_per_second": 900.0, "version": "1", "state": "training", "addresses": [], **fields}
        record = PeerRecord(identity.peer_id, stage, "worker", **claims)
        self.sealed[identity.peer_id] = stage, seal_record(identity, self.signed.run_id, record, self.now())

    async def after(self, seconds):
        self.now_seconds += seconds
        return await anext(self._snapshots)


async def test_looks_are_compared_who_came_went_moved_and_how_fast_it_trains():
    looks, one, other = Looks(tiny_manifest((1, 2))), Identity.generate(), Identity.generate()
    looks.announces(one, 0, loss=3.0, tokens=1000, round=3, name="attic")
    first = await looks.after(0.0)
    assert (first.loss, first.tokens, first.tokens_per_second) == (3.0, 1000, None)
    assert first.waits_for == (1,)
    looks.now_seconds += 30.0
    looks.announces(one, 0, loss=2.0, tokens=4000, round=9, name="attic")
    looks.announces(other, 1, loss=3.0, tokens=1000, round=8, name="loft")
    second = await looks.after(0.0)
    assert second.tokens_per_second == pytest.approx(100.0)
    assert (second.round, second.lag) == (9, 0), "each stage has rounds of its own"
    assert second.loss == pytest.approx(2.5)
    assert second.losses == (3.0, 2.5)
    assert [(event.code, event.text) for event in second.events] == [
        ("came", "loft of stage 1: announces itself")
    ]
    del looks.sealed[one.peer_id]
    looks.now_seconds += 1.0
    looks.announces(other, 0, round=8, name="loft")
    await looks.after(0.0)
    last = await looks.after(46.0)
    assert [event.code for event in last.events] == ["came", "moved", "silent", "silent"]
    assert [row.state for row in last.rows] == ["gone", "gone"], "their records are old"
    assert last.events[1].text == "loft of stage 1: it went to another stage"


class Told:
    """A directory of one peer that is held, and of the owner's order, unless it is silent about that."""

    def __init__(self, signed, order):
        self.order, self.one, self.run_id = order, Identity.generate(), signed.run_id

    def now(self):
        return 1_700_000_000.0

    async def look_up(self, run_id, stage, _deadline):
        content = PeerRecord(self.one.peer_id, 0, "worker", [], 3, 900.0, "1", state="paused_by_owner")
        sealed = seal_record(self.one, run_id, content, self.now())
        return {self.one.peer_id: sealed} if stage == 0 else {}

    async def get_order(self, *_):
        if self.order is None:
            raise Unreachable("the directory did not answer within 10 s")
        return seal_order(OWNER, self.run_id, self.order)

    async def opinions(self, *_):
        return []


@pytest.mark.parametrize(
    ("order", "headline"),
    [
        (OwnerOrders(sequence=7, reason="a look at the data", paused=True), "as peers say   paused_by_owner"),
        (OwnerOrders(sequence=7), "as peers say"),
        (None, "as peers say"),
    ],
)
async def test_the_directory_is_asked_for_the_owners_order_and_need_not_answer(order, headline, capsys):
    signed = sign(tiny_manifest((1,), model=replace(TINY_MODEL, num_hidden_layers=1)))
    found = SimpleNamespace(signed=signed, directory=Told(signed, order))
    await asyncio.wait_for(watch_swarm(Console(width=80), found), 20.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rpartition(" ")[0].rstrip().endswith(headline)
    why = [line for line in lines if "the newest order: the run is paused (a l" in line]
    assert len(why) == bool(order and order.paused)


# -- over the socket ----------------------------------------------------------------------------------------


async def test_without_a_terminal_one_frame_of_the_running_peer_is_printed(tmp_path, capsys, lived):
    _, seen = lived

    async def status(_request):
        return as_json(seen["before"])

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


def test_watching_a_peer_loads_neither_torch_nor_the_network():
    heavy = "{'torch', 'hivemind'} & set(sys.modules)"
    code = f"import sys, peers.cli.top, peers.tools.top.run_screen; print(sorted({heavy}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_the_snapshot_is_small_enough_for_the_socket(lived):
    _, seen = lived
    assert len(str(as_json(seen["before"]))) < LONGEST_ANSWER_BYTES / 20
