"""Workers that ask for places ahead of bodies: nothing goes in vain or stays booked; liars gain nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from io import StringIO
from typing import TypeVar

from hostile import BODIES, Liar, messages
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console
from swarm import TINY_MODEL, Swarm, nothing_is_committed_twice, tiny_manifest

from peers.lab.bench.paths_in_peers import Finding, TopologyRow, measure, render
from peers.lab.bench.topologies import draw
from peers.lab.world.virtual_time import run
from peers.worker.pipeline.reservation_client import NoReservations
from protocols.memory.conditions import Conditions
from protocols.messages.reservation_messages import Booked, CostToGo
from protocols.messages.table import (
    GetState,
    Heartbeat,
    Lane,
    Message,
    Path,
    Prospect,
    ReservationReply,
    ReservationRequest,
)
from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId
from swarmnet.run.path_rules import begin, visit
from swarmnet.run.schema import Paths

Kind = TypeVar("Kind", bound=Swarm)
PEERS = {"a": 0, "a2": 0, "b": 1, "b2": 1, "c": 2, "c2": 2, "d": 3}
MANIFEST = tiny_manifest((1, 1, 1, 1), model=replace(TINY_MODEL, num_hidden_layers=4), paths=Paths(0.25))
NAMES = [Identity.from_seed(name.encode()).peer_id for name in (*PEERS, "liar")]


def play(story: Callable[[Swarm], Awaitable[None]], manifest=MANIFEST) -> Swarm:
    """Two origins, 20 ms from everybody; nothing is learnt."""
    swarm = Swarm(manifest, 0, Conditions(0.02), stub=True)
    played(swarm, story, slots=2)
    return swarm


def played(swarm: Kind, story: Callable[[Kind], Awaitable[None]], slots: int) -> None:
    """The story begins when all PEERS are at work."""

    async def whole() -> None:
        swarm.open()
        for name, stage in PEERS.items():
            swarm.start(name, stage, in_flight=3, slots=slots)
        await swarm.until(lambda: swarm.committed(0) >= 30, 60.0)
        await story(swarm)
        await swarm.close()

    run(whole())
    nothing_is_committed_twice(swarm)


def ahead(swarm: Swarm, name: str):
    return swarm.members[name].worker.services.pipeline_service.reservations


async def quiet(swarm: Swarm) -> None:
    """No origin starts anything more, and what was under way is done."""
    for name in swarm.living():
        swarm.members[name].worker.services.pipeline_service.origin.text = None
    await swarm.during(30.0)
    for name in swarm.living():
        ways = ahead(swarm, name)
        assert (ways.places.held, ways.scouting.quests, ways._held) == ({}, {}, {}), name
        assert ways.pipeline.under_way == 0


def test_hardly_a_body_is_refused_for_want_of_room_and_nothing_stays_booked():
    async def story(swarm: Swarm) -> None:
        await swarm.until(lambda: swarm.committed(0) >= 200, 120.0)
        assert all(ahead(swarm, name).scouting.asked > 20 for name in ("a", "a2", "b", "c"))
        ledgers = [swarm.members[name].worker.services.pipeline_service.ledger for name in swarm.living()]
        # A place may be taken between the answer and the body: 0 or 1 of 200 in each of eight seeds.
        assert sum(ledger.rerouted.get("busy", 0) for ledger in ledgers) <= 1
        await quiet(swarm)

    play(story)


def test_nothing_stays_booked_by_or_with_peers_that_die_or_leave():
    async def story(swarm: Swarm) -> None:
        await swarm.crash("c")
        await swarm.during(2.0)
        await swarm.crash("a2")
        await swarm.during(2.0)
        await swarm.leave("b2")
        await swarm.until(lambda: swarm.committed(0) >= 150, 60.0)
        await quiet(swarm)

    play(story)


def test_a_frozen_peer_costs_its_microbatches_a_while_and_leaves_no_booking_behind():
    async def story(swarm: Swarm) -> None:
        swarm.network.freeze(swarm.members["b"].peer)
        await swarm.during(15.0)
        swarm.network.thaw(swarm.members["b"].peer)
        done = swarm.committed(0)
        await swarm.until(lambda: swarm.committed(0) >= done + 50, 60.0)
        await quiet(swarm)

    play(story)


def question(liar: Liar, number: int, stage: int = 1, firm: bool = True) -> ReservationRequest:
    rules = MANIFEST.path_rules()
    return ReservationRequest(
        liar.transport.peer, number, 1, 0.1, 0.1, firm, Path.of(visit(begin(rules), stage, rules))
    )


def test_who_asks_for_places_and_never_comes_gets_its_share_once_and_then_none():
    async def story(swarm: Swarm) -> None:
        liar = Liar(swarm, 0)
        b = swarm.members["b"].peer
        await swarm.during(3.0)
        for number in range(100):
            await liar.say(b, question(liar, number), lane="data")
        await swarm.during(1.0)
        places = ahead(swarm, "b").places
        mine = [place for place in places.held.values() if place.asker == liar.transport.peer]
        assert len(mine) == places.most // 2
        done = swarm.committed(0)
        await swarm.during(5.5)
        assert swarm.committed(0) > done + 15, "the others go on meanwhile"
        await liar.say(b, question(liar, 500), lane="data")
        await swarm.during(0.5)
        answers = [message for message in liar.messages if isinstance(message, ReservationReply)]
        assert [answer.taken for answer in answers if answer.counter == 500] == [False]
        await liar.transport.close()
        await swarm.during(5.0)
        await quiet(swarm)

    play(story)


def test_an_illegal_question_is_refused_and_one_for_a_stage_behind_as_well():
    async def story(swarm: Swarm) -> None:
        liar, b = Liar(swarm, 0), swarm.members["b"].peer
        await swarm.during(3.0)
        honest = question(liar, 1)
        for path in (Path((0, 2, 1), 1), Path((0, 1), 0), Path((0, 1), 9), Path((0, 2), 1), Path()):
            await liar.say(b, ReservationRequest(honest.origin, 1, 1, 0.1, 0.1, True, path), lane="data")
        await swarm.during(1.0)
        assert not any(place.asker == liar.transport.peer for place in ahead(swarm, "b").places.held.values())
        assert "ReservationReply" not in liar.heard
        refused = [note.fields["code"] for note in swarm.of("refused", "b")]
        assert refused == ["illegal_path"] * 5
        await liar.transport.close()

    play(story)


class Promiser(Liar):
    """Costs nothing, says yes at once, and swallows what comes."""

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        super().received(peer, lane, message, body, wire_bytes)
        if isinstance(message, ReservationRequest) and (peer, "data") in self._links:
            yes = ReservationReply(message.origin, message.counter, message.question, True, 0.0)
            self._links[peer, "data"].post(yes, b"")


def test_who_promises_at_once_and_answers_nothing_is_given_no_more_than_it_has_earned():
    async def story(swarm: Swarm) -> None:
        began = swarm.committed(0)
        await swarm.during(10.0)
        honest = swarm.committed(0) - began
        liar, began, most = Promiser(swarm, 1), swarm.committed(0), 0
        costs = [CostToGo(1, 0.0), CostToGo(2, 0.0)]
        for number in range(100):
            for name in ("a", "a2"):
                peer = swarm.members[name].peer
                await liar.say(peer, Heartbeat(number, -1, 0.0, 1, True, 64, 0.0, 0, True))
                await liar.say(peer, Prospect(1000, 0.0, 0.0, [Booked(0.0, 0.0)], costs), lane="data")
                jobs = swarm.members[name].worker.services.pipeline_service.pipeline.jobs.values()
                most = max(most, sum(job.next == liar.transport.peer for job in jobs))
            await swarm.during(0.1)
        assert liar.heard["Act"] > 0, "it was tried"
        assert most == 1
        assert swarm.committed(0) - began > 2 / 3 * honest, "it may hold one of three"
        await liar.transport.close()
        await swarm.during(10.0)
        await quiet(swarm)

    play(story)


@settings(
    max_examples=3, deadline=None, suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)  # fmt: skip
@given(
    st.sampled_from([0, 1, 2, 3]),
    st.lists(
        st.tuples(st.sampled_from(["group", "data"]), messages(NAMES), BODIES), min_size=20, max_size=40
    ),
)
def test_any_messages_leave_a_swarm_that_skips_as_it_was(stage, said):
    async def story(swarm: Swarm) -> None:
        liar = Liar(swarm, stage)
        await swarm.during(1.0)
        for lane, message, body in said:
            for name in ("a", "b", "c"):
                await liar.say(swarm.members[name].peer, message, body, lane)
            await swarm.during(0.02)
        for name in ("a", "b", "c"):
            ways = ahead(swarm, name)
            assert len(ways.places.held) <= ways.places.most + ways.pipeline.slots + ways.places.most
            assert len(ways.scouting.quests) <= len(ways.places.held) + len(ways.pipeline.jobs)
            assert len(ways._held) <= len(ways.pipeline.jobs)
            assert len(ways.scouting.seen) <= len(PEERS) + 1
        await liar.transport.close()
        done = swarm.committed(0)
        await swarm.until(lambda: swarm.committed(0) >= done + 20, 60.0)

    play(story)


def test_in_a_run_that_skips_nothing_nobody_asks_or_tells_and_a_question_is_refused():
    async def story(swarm: Swarm) -> None:
        liar, b = Liar(swarm, 0), swarm.members["b"].peer
        await liar.say(b, GetState())
        await swarm.during(3.0)
        assert liar.heard["Heartbeat"]
        assert not {"Prospect", "ReservationRequest", "ReservationReply", "HoldTime"} & set(liar.heard)
        await liar.say(b, question(liar, 1), lane="data")
        await swarm.during(1.0)
        assert [note.fields["code"] for note in swarm.of("refused", "b")] == ["malformed"]
        assert type(ahead(swarm, "b")) is NoReservations
        await liar.transport.close()

    play(story, replace(MANIFEST, paths=Paths()))


def test_the_table_shows_what_each_rule_took_and_what_was_told():
    told = {
        "ReservationRequest": 120,
        "refused": 5,
        "bytes of ReservationRequest": 12_000,
        "bytes of Prospect": 88_000,
    }
    ahead = Finding(22.0, (100, 50, 100), 100, told, 3)
    router = Finding(27.5, (80, 70, 80), 80, {"re-routed: busy": 33}, 3)
    row = TopologyRow(4, 3, router, ahead)
    console = Console(width=200, record=True, file=StringIO())
    console.print(render([row], "alone"))
    line = next(line for line in console.export_text().splitlines() if "22.0" in line)
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    assert cells == [
        "4", "3", "27.5", "22.0", "-20.0%", "33", "120", "5", "1", "100 50 100", "80 70 80"
    ]  # fmt: skip


def test_around_the_world_it_is_well_below_what_the_router_takes_by_itself():
    topology = draw(0, 2, (3, 2, 2, 2))
    found = {rule: measure(topology, rule, warm=25.0, watched=50.0) for rule in ("ahead", "router")}
    assert found["ahead"].seconds < 0.95 * found["router"].seconds, found
    assert found["ahead"].most_held <= 2
