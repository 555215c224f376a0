"""One process that holds several adjacent stages: what its peers share, and how it shows itself."""

import asyncio
import io
import json
import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm import TINY_MODEL, tiny_manifest
from two_peers import two_peers

from peers.compute.executor import FORWARD, UPDATE, InlineCompute, ThreadCompute
from peers.compute.memory_budget import all_needs, graphs_that_fit_together, together
from peers.compute.shared_executor import SharedCompute
from peers.compute.siblings import Siblings
from peers.config.peer_file import ConfigError, check_typed
from peers.config.run_file import check_wish
from peers.config.sibling_file import sibling_file
from peers.config.yaml_lines import Typed
from peers.errors import UserError
from peers.lab.world.virtual_time import run
from peers.runtime.control_server import Control
from peers.runtime.control_siblings import answers_of_all
from peers.telemetry.console import JsonReport, LineReport, SiblingReport, Status
from peers.telemetry.metrics import Metrics
from peers.telemetry.sibling_metrics import text_of_all
from peers.telemetry.snapshot import Happened, PeerRow, SwarmSnapshot
from peers.telemetry.snapshot import together as one_snapshot
from peers.tools.doctor import stage_memory as doctor
from peers.worker.stage_moves import named
from protocols.errors import PeerGone
from protocols.framing.same_process import Near
from protocols.framing.send_queue import Ear
from protocols.messages.table import Bye, ManifestIs
from protocols.messages.terms import Terms
from swarmnet.placement.policy import MoveRules, View, choose_stage, choose_stages
from swarmnet.resources.memory_estimate import DAEMON_BYTES

MANIFEST = tiny_manifest((1, 2, 1, 1), model=replace(TINY_MODEL, layers=5))
GIB = 1 << 30
CPU = torch.device("cpu")


def rules(stages):
    return MoveRules((1.0,) * stages)


# -- which stages -------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.integers(1, 9), st.integers())
def test_the_stages_are_adjacent_and_hold_one_of_the_poorest_that_a_window_can_hold(capacities, count, seed):
    count = min(count, len(capacities))
    chosen = choose_stages(View(tuple(capacities)), rules(len(capacities)), count, Random(seed))
    assert len(chosen) == count
    assert 0 <= chosen.start < chosen.stop <= len(capacities)
    assert min(capacities[stage] for stage in chosen) <= min(capacities) * 1.05


def test_among_windows_with_the_poorest_stage_the_poorer_neighbour_decides():
    assert choose_stages(View((9.0, 1.0, 5.0, 3.0)), rules(4), 2, Random(0)) == range(1, 3)
    assert choose_stages(View((3.0, 1.0, 5.0, 3.0)), rules(4), 2, Random(0)) == range(2)


def test_for_one_stage_it_is_the_newcomers_rule():
    for seed in range(20):
        view = View((2.0, 1.0, 1.02, 4.0))
        assert choose_stages(view, rules(4), 1, Random(seed))[0] == choose_stage(view, rules(4), Random(seed))


@pytest.mark.parametrize(("wish", "stages", "words"), [
    ("auto", 5, "stages: 5, but the run has 4; set stages to 4 or less"),
    (4, 1, "stage: 4, but the run has 0 to 3; set stage to 3 or less, or to auto"),
    (3, 2, "would be stages 3 to 4, but the run has 0 to 3; set stage to 2 or less"),
])  # fmt: skip
def test_more_stages_than_the_run_has_are_refused_with_what_would_be_right(wish, stages, words):
    with pytest.raises(UserError, match=re.escape(words)):
        check_wish(wish, stages, MANIFEST)
    check_wish(2, 2, MANIFEST)


def test_stages_are_named_for_people():
    assert [named(range(2, stop)) for stop in (3, 4, 5)] == ["2", "2 and 3", "2 to 4"]


# -- the peer file ------------------------------------------------------------------------------------


def config(tmp_path, **keys):
    (tmp_path / "run.json").touch()
    return check_typed(
        Typed("peer.yaml", {"run": "run.json", "state": "here", **keys}, {}), tmp_path, "p", {}
    )


def test_a_sibling_has_its_own_folder_key_and_port_and_the_first_is_as_typed(tmp_path):
    keys = {
        "listen": ["/ip4/0.0.0.0/tcp/31330", "/ip4/0.0.0.0/udp/0/quic"],
        "stages": 3,
        "announce": ["/dns4/home.example/tcp/4000"],
        "limits": {"hours": "22:00-08:00", "only_when_plugged_in": True, "memory": "8GiB"},
    }
    typed = config(tmp_path, **keys)
    first, third = sibling_file(typed, 0), sibling_file(typed, 2)
    assert first == typed.model_copy(update={"moves": False})
    assert not first.may_move
    assert third.state == tmp_path / "here" / "sibling-2"
    assert third.identity == third.state / "identity.key"
    assert third.listen == ("/ip4/0.0.0.0/tcp/31332", "/ip4/0.0.0.0/udp/0/quic")
    assert third.announce == ("/dns4/home.example/tcp/4002",)
    assert (third.limits.hours, third.limits.memory) == (None, 8 * GIB), "the first keeps the hours for all"
    assert first.limits.only_when_plugged_in
    assert not third.limits.only_when_plugged_in
    with pytest.raises(ConfigError, match="65536 is none"):
        sibling_file(config(tmp_path, listen=["/ip4/0.0.0.0/tcp/65535"], stages=2), 1)


@pytest.mark.parametrize("keys", [
    {"stages": 0}, {"stages": 9}, {"stages": "2"}, {"stages": True}, {"stages": 2, "moves": True},
    {"stages": 2, "role": "observer"}, {"stages": 2, "role": "bootstrap"},
])  # fmt: skip
def test_what_cannot_be_is_refused_where_it_was_typed(tmp_path, keys):
    with pytest.raises(ConfigError, match="stages"):
        config(tmp_path, **keys)


# -- memory -------------------------------------------------------------------------------------------


def test_memory_counts_the_weights_of_all_stages_the_programs_once_and_a_p2pd_each():
    every = all_needs(MANIFEST, CPU, 64 << 20)
    both = together(every, range(2))
    assert both.weights == every[0].weights + every[1].weights
    assert both.process == every[0].process + DAEMON_BYTES
    on_gpu = together(all_needs(MANIFEST, torch.device("cuda"), 64 << 20), range(2))
    assert on_gpu.process == 0, "programs lie in the machine's memory"
    assert graphs_that_fit_together(every, range(2), both.least, True) == 1
    with pytest.raises(UserError, match=r"stages 0 to 1 together need .*try `stages: 1`, or a larger limits"):
        graphs_that_fit_together(every, range(2), both.least - 1, True)


def test_the_doctor_judges_all_stages_together():
    needs = together(all_needs(MANIFEST, doctor.CPU, 0), range(2)).least
    assert doctor.judge(MANIFEST, 0, doctor.Memory(needs), 0, 2).level == "ok"
    assert doctor.judge(MANIFEST, 0, doctor.Memory(needs - 1), 0, 2).level == "fail"
    assert doctor.judge(MANIFEST, 3, doctor.Memory(64 * GIB), 0, 2).level == "fail"
    assert doctor.judge(MANIFEST, None, doctor.Memory(64 * GIB), 0, 5).level == "fail"
    assert doctor.judge(MANIFEST, None, doctor.Memory(64 * GIB), 0, 4).level == "ok"


# -- one compute --------------------------------------------------------------------------------------


def test_shares_work_in_one_order_and_what_waits_of_a_closed_one_is_dropped():
    done = []

    async def story():
        shared = SharedCompute(lambda: InlineCompute(lambda priority: 1.0))
        one, other = shared.share(), shared.share()
        for number in range(3):
            one.submit(FORWARD, lambda number=number: number, lambda what, _: done.append(("one", what)))
            other.submit(UPDATE, lambda number=number: number, lambda what, _: done.append(("other", what)))
        assert (one.queued, other.queued) == (3, 3)
        await asyncio.sleep(3.5)
        assert done == [("other", 0), ("other", 1), ("other", 2)]
        await one.close()
        assert shared.compute is not None
        other.submit(FORWARD, lambda: 9, lambda what, _: done.append(("other", what)))
        await asyncio.sleep(10.0)
        await other.close()
        assert shared.compute is None
        again = shared.share()
        assert again.failed is not other.failed, "after a pause of all it is a new one"
        await again.close()

    run(story())
    assert done[3:] == [("other", 9)]


def test_each_stage_says_what_a_microbatch_takes_in_all_of_them():
    async def story():
        shared = SharedCompute(lambda: InlineCompute(lambda priority: 1.0))
        one, other = shared.share(), shared.share()
        assert one.occupied(0.2) == pytest.approx(0.2)
        assert other.occupied(0.3) == pytest.approx(0.5)
        assert one.occupied(0.1) == pytest.approx(0.4)
        assert one.stretched(0.025) == pytest.approx(0.1), "a quarter of its work, a quarter of what all take"
        assert other.occupied(0.3) == pytest.approx(0.4), "a part changes no sum"
        await other.close()
        assert one.occupied(0.1) == pytest.approx(0.1)
        await one.close()

    run(story())


async def test_on_a_thread_the_last_share_ends_it_and_a_failure_is_everybodys():
    shared = SharedCompute(lambda: ThreadCompute())
    one, other = shared.share(), shared.share()
    one.submit(FORWARD, lambda: 1 // 0, lambda _what, _seconds: None)
    async with asyncio.timeout(20.0):
        assert isinstance(await other.failed, ZeroDivisionError)
        await asyncio.gather(one.close(), other.close())
    assert shared.compute is None


# -- links within the process -------------------------------------------------------------------------


class Heard:
    def __init__(self):
        self.messages, self.ended, self.refusals = [], [], []

    def received(self, peer, lane, message, body, wire_bytes):
        self.messages.append((peer, lane, message, bytes(body), wire_bytes))

    def lost(self, peer, lane, reason):
        self.ended.append((peer, reason))

    def refused(self, peer, code, reason):
        self.refusals.append((peer, code))


def near():
    found, a, b = Near(), Heard(), Heard()
    found.enter("a", Ear(a))
    found.enter("b", Ear(b, Terms({})))
    return found, a, b


async def test_what_is_posted_arrives_from_who_posted_it_and_counts_as_no_traffic():
    found, a, b = near()
    link = found.open("a", "b", "group", 1 << 24)
    assert link.post(Bye("hello")) == 0
    await link.drained(0, 1.0)
    assert b.messages == [("a", "group", Bye("hello"), b"", 0)]
    assert a.messages == []
    link.close()
    await asyncio.sleep(0)
    assert (a.ended, b.ended) == ([], [("a", "closed by the other side")])


async def test_a_peer_that_leaves_ends_the_links_of_both_sides_and_is_not_held_any_more():
    found, a, b = near()
    there = found.open("a", "b", "data", 1 << 24)
    back = found.open("b", "a", "data", 1 << 24)
    found.leave("b", "p2pd died")
    await asyncio.sleep(0)
    assert a.ended == [("b", "p2pd died")] * 2
    assert b.ended == []
    assert there.closed
    assert back.closed
    assert not found.holds("b")
    with pytest.raises(PeerGone):
        there.post(Bye("late"))


async def test_bounds_hold_among_siblings_too():
    found, a, b = near()
    link = found.open("a", "b", "group", 1 << 24)
    link.post(ManifestIs(), b"longer than the receiver takes")
    await asyncio.sleep(0.01)
    assert [peer for peer, _ in b.refusals] == ["a"]
    assert link.closed
    assert [peer for peer, _ in a.ended] == ["b"]


@pytest.mark.loopback
async def test_real_transports_of_one_process_reach_each_other_without_the_network(tmp_path):
    async with two_peers(tmp_path) as (sender, taker, heard):
        sender.near = taker.near = Near()
        ended = Heard()
        sender.listen(ended)
        taker.listen(heard)
        link = await sender.open(taker.peer, "group", 10.0)  # Without an address.
        assert link.post(Bye("hello")) == 0
        await link.drained(0, 10.0)
        assert heard.messages[0][1] == Bye("hello")
        await taker.close()
        await asyncio.sleep(0)
        assert [peer for peer, _ in ended.ended] == [taker.peer]
        with pytest.raises(PeerGone):
            await sender.open(taker.peer, "group", 2.0)


# -- what the process says ----------------------------------------------------------------------------


def test_series_have_their_stage_once_that_is_known_and_the_process_its_own_once():
    several = [Metrics(), Metrics(process=False)]
    several[1].training.tokens.inc(64)
    before, after = text_of_all(several, None).decode(), text_of_all(several, range(2, 4)).decode()
    assert 'stage="' not in before
    assert "swarmnet_train_tokens_total 0.0" in before
    assert 'swarmnet_train_tokens_total{stage="2"} 0.0' in after
    assert 'swarmnet_train_tokens_total{stage="3"} 64.0' in after
    series = Counter(line.rpartition(" ")[0] for line in after.splitlines() if not line.startswith("#"))
    assert max(series.values()) == 1
    helps = Counter(line for line in after.splitlines() if line.startswith("# HELP"))
    assert max(helps.values()) == 1


async def test_commands_reach_all_and_the_answers_become_one(tmp_path):
    async def paused(seconds):
        return {"paused": {"user": "asked"}, "seconds": seconds, "bytes_before": 900, "bytes": 800 - seconds}

    async def me(name):
        return {"peer": name}

    async def failing(_request):
        raise UserError("there is nothing to save yet")

    controls = [Control(tmp_path), Control(tmp_path)]
    for seconds, (name, control) in enumerate(zip("ab", controls, strict=True)):
        control.answers.update(
            pause=lambda _, seconds=seconds: paused(seconds), me=lambda _, name=name: me(name)
        )
    controls[0].answers["checkpoint"] = lambda _: me("a")
    controls[1].answers["checkpoint"] = failing
    answers = answers_of_all(controls)
    assert await answers["me"]({}) == {"peer": "a", "others": [{"peer": "b"}]}
    assert await answers["pause"]({}) == await paused(1)
    with pytest.raises(UserError, match="nothing to save"):
        await answers["checkpoint"]({})


def test_hours_and_idleness_pause_all_of_them():
    class Paused:
        def __init__(self):
            self.texts = {}

        def pause(self, reason, text=""):
            self.texts[reason] = text

        def resume(self, reason):
            del self.texts[reason]

    siblings = Siblings(2)
    siblings.roles += [Paused(), Paused()]
    siblings.pause("schedule", "at night")
    assert [role.texts for role in siblings.roles] == [{"schedule": "at night"}] * 2
    siblings.resume("schedule")
    assert [role.texts for role in siblings.roles] == [{}, {}]


def test_lines_say_of_which_stage_they_are():
    stream = io.StringIO()
    lines = LineReport(stream)
    first, second = SiblingReport(lines, 0), SiblingReport(lines, 1)
    second.say("joined", "joined the swarm")
    for report, stage in ((first, 2), (second, 3)):
        report.status(Status("training", stage=stage, stages=4, round=1))
    first.status(Status("training", stage=2, stages=4, round=1))
    second.say("trains", "in step")
    shown = stream.getvalue().splitlines()
    assert shown[0] == "joined the swarm"
    assert [line.split("  ")[1] for line in shown[1:3]] == ["stage 2 of 0-3", "stage 3 of 0-3"]
    assert shown[3:] == ["stage 3: in step"]
    stream = io.StringIO()
    SiblingReport(JsonReport(stream, lambda: 0.0), 1).status(Status("training", stage=3))
    assert json.loads(stream.getvalue())["sibling"] == 1


def test_top_shows_one_snapshot_with_all_that_are_here():
    def snapshot(stage, other):
        own = PeerRow(f"p{stage}", stage, "training", here=True)
        seen = PeerRow(f"p{other}", other, "known")
        happened = Happened(float(other), "joined", "hello")
        return SwarmSnapshot("peer p", 1.0, rows=(own, seen), sent={"gradient": 1}, events=(happened,))

    shown = one_snapshot([snapshot(0, 1), snapshot(1, 0)])
    assert [(seen.peer, seen.here) for seen in shown.rows] == [("p0", True), ("p1", True)]
    assert shown.sent == {"gradient": 2}
    assert [event.who for event in shown.events] == ["stage 1", "stage 0"]
    assert one_snapshot([snapshot(0, 1)]) == snapshot(0, 1)
