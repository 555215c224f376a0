"""What an observer makes of the owner's orders: whose they are, what holds the run, and where it is shown."""

import json
from dataclasses import replace

import pytest
from observed import NOON
from swarm import OWNER, TINY_MODEL, sign, tiny_manifest

from peers.stageless.observer.order_reader import SHOWN_ENTRIES, Orders
from peers.stageless.observer.page_json import SHOWN_SOURCES, Board
from peers.stageless.observer.sightings import PeerObservations
from peers.stageless.observer.snapshot_of_records import snapshot_of
from peers.stageless.observer.swarm_metrics import SwarmMetrics
from peers.telemetry.snapshot import OwnerOrdersView, Pause
from protocols.errors import Unreachable
from protocols.signed.identity import Identity
from protocols.signed.opinions import OpinionDocument, seal_opinion
from protocols.signed.orders import seal_order
from swarmnet.run import owner_orders
from swarmnet.run.mixtures import MixtureChange
from swarmnet.run.owner_orders import NO_ORDER, Ban, OwnerOrders, Withdrawal
from swarmnet.run.rates import RateChange
from swarmnet.run.schema import Data, TextSource

SIGNED = sign(tiny_manifest((1, 1, 1)))
STRANGER = Identity.from_seed(b"stranger")
WHY = "a look at the data"


class Directory:
    """What an observer asks of one. `order` None: none was given; an error: it does not answer."""

    def __init__(self):
        self.order, self.time, self.asked, self.objections = None, NOON, [], []

    def now(self):
        return self.time

    async def get_order(self, run_id, owner, deadline_seconds):
        self.asked.append((run_id, owner, deadline_seconds))
        if isinstance(self.order, Exception):
            raise self.order
        return self.order

    async def opinions(self, run_id, kind, deadline_seconds):
        return self.objections


class Reading:
    """Looks of one observer at what an owner gives."""

    def __init__(self):
        self.directory, self.notes, self.happened = Directory(), [], []
        note = lambda event: self.notes.append((event.name, event.fields))  # noqa: E731 - the event log
        self.orders = Orders(SIGNED, note, self.happened.append)

    async def of(self, *given, owner=OWNER):
        """These orders are given, a second apart, before the next look."""
        for order in given:
            self.directory.time += 1.0
            sealed = replace(order, sequence=int(self.directory.time * 1e6))
            self.directory.order = seal_order(owner, SIGNED.run_id, sealed)
        self.directory.time += 5.0
        await self.orders.look(self.directory)
        return self.orders.ordered


PAUSED = owner_orders.pause(NO_ORDER, WHY)


async def test_a_pause_is_known_with_its_reason_and_its_time_whatever_is_ordered_after_it():
    reading = Reading()
    assert reading.orders.ordered.held is None
    nothing = await reading.of()
    assert (nothing.held, nothing.given_at, nothing.asked_at) == (False, None, NOON + 5)
    assert (await reading.of(PAUSED)).pause == Pause(NOON + 6, WHY)
    banned = await reading.of(owner_orders.ban(PAUSED, STRANGER.peer_id, "noise"))
    assert (banned.held, banned.order.reason, banned.pause) == (True, "noise", Pause(NOON + 6, WHY))
    resumed = await reading.of(owner_orders.resume(banned.order, "on it goes"))
    assert (resumed.held, resumed.pause, resumed.order.reason) == (False, None, "on it goes")
    again = await reading.of(owner_orders.pause(resumed.order, "noise again"))
    assert again.pause.reason == "noise again"


async def test_a_pause_that_was_taken_back_and_given_again_between_two_looks_is_the_new_one():
    reading = Reading()
    await reading.of(PAUSED)
    twice = await reading.of(
        owner_orders.resume(PAUSED, "mended"), owner_orders.pause(NO_ORDER, "not mended")
    )
    assert twice.pause == Pause(twice.given_at, "not mended")


async def test_each_newer_order_is_an_event_in_the_words_of_a_peer_and_of_bounded_length():
    reading = Reading()
    await reading.of(PAUSED)
    await reading.of()
    await reading.of(owner_orders.ban(NO_ORDER, STRANGER.peer_id, "noise"))
    await reading.of(OwnerOrders(bans=tuple(Ban(f"peer-{number}", "") for number in range(300))))
    first, second, third = (event.text for event in reading.happened)
    assert first == f"the newest order: the run is paused ({WHY})"
    assert second.startswith("new order: the run goes on; 12D3")
    assert len(third) <= 200


async def test_what_cannot_be_known_of_a_pause_is_not_made_up():
    came_late = await Reading().of(owner_orders.ban(PAUSED, STRANGER.peer_id, "noise"))
    assert (came_late.held, came_late.pause, came_late.order.reason) == (True, None, "noise")
    reading = Reading()
    await reading.of(OwnerOrders(reason="a checkpoint", checkpoint=1))
    both = await reading.of(PAUSED, owner_orders.ban(PAUSED, STRANGER.peer_id, "noise"))
    assert (both.held, both.pause) == (True, None)


async def test_a_directory_that_does_not_answer_is_noted_and_changes_nothing():
    reading = Reading()
    before = await reading.of(PAUSED)
    reading.directory.order = Unreachable("the directory did not answer within 10 s")
    assert await reading.of() == before
    assert reading.notes[-1] == (
        "look_up_failed",
        {"what": "order", "code": "unreachable", "reason": "the directory did not answer within 10 s"},
    )
    reading.directory.order = None
    lost = await reading.of()
    assert lost.order == before.order, "one that the directory has lost still holds"
    assert lost.asked_at > before.asked_at
    assert {asked[1] for asked in reading.directory.asked} == {SIGNED.manifest.owner}
    assert all(0 < asked[2] <= 10.0 for asked in reading.directory.asked)


async def test_only_the_owners_newest_order_counts():
    reading = Reading()
    before = await reading.of(PAUSED)
    paused = reading.directory.order
    assert (await reading.of(OwnerOrders(), owner=STRANGER)).order == before.order
    resumed = await reading.of(owner_orders.resume(PAUSED, ""))
    reading.directory.order = paused
    assert (await reading.of()).order == resumed.order


async def test_more_objections_are_an_event_until_their_documents_are_withdrawn():
    reading = Reading()

    def objection(document):
        made = OpinionDocument(document, "mine")
        return seal_opinion(Identity.generate(), SIGNED.run_id, made, reading.directory.time)

    reading.directory.objections = [objection("ab" * 32), objection("ab" * 32), objection("a place")]
    await reading.of()
    await reading.of()
    assert [(event.code, event.text) for event in reading.happened] == [
        ("objection", "2 documents of the text objected to: swarmnet registry objections RUN")
    ]
    await reading.of(owner_orders.withdraw(NO_ORDER, "ab" * 32, "its author asked"))
    assert [event.code for event in reading.happened] == ["objection", "order"]
    reading.directory.objections.append(objection("another"))
    await reading.of()
    assert [event.code for event in reading.happened] == ["objection", "order", "objection"]


# -- shown ------------------------------------------------------------------------------------------------


def board(ordered, signed=SIGNED):
    made = Board(signed, "swarmnet join RUN --bootstrap A", "0.1.0")
    made.show(snapshot_of(PeerObservations(len(signed.manifest.stages)), signed, NOON, ordered))
    return made


def answer(ordered, signed=SIGNED):
    return json.loads(board(ordered, signed).answer(""))


def test_the_answer_tells_what_is_ordered_and_why():
    order = OwnerOrders(
        int(NOON * 1e6), "noise", True, 2, (Ban("one", "spam"), Ban("two", "noise")),
        (Withdrawal("ab" * 32, "its author asked"),), ("cd" * 16,), rates=(RateChange(40, 500),), ends=79,
        mixtures=(MixtureChange(50, (("web", 2000), ("books", 500))),),
    )  # fmt: skip
    assert answer(OwnerOrdersView(order, NOON + 1, Pause(NOON - 9, WHY)))["ordered"] == {
        "asked_at": NOON + 1, "given_at": NOON, "reason": "noise",
        "held": True, "held_since": NOON - 9, "held_reason": WHY, "checkpoints": 2,
        "banned": 2, "withdrawn": 1, "revoked": 1, "rates": [{"from_round": 40, "factor": 0.5}], "ends": 79,
        "mixtures": [{"from_round": 50, "weights": {"web": 2.0, "books": 0.5}}],
        "bans": [
            {"peer": "two", "reason": "noise", "by": "owner"},
            {"peer": "one", "reason": "spam", "by": "owner"},
        ],
        "withdrawals": [{"document": "ab" * 32, "reason": "its author asked"}],
    }  # fmt: skip
    unasked = answer(OwnerOrdersView())["ordered"]
    assert (unasked["asked_at"], unasked["given_at"], unasked["held"], unasked["bans"]) == (
        0,
        None,
        False,
        [],
    )


def test_an_order_of_any_length_makes_a_bounded_answer():
    bans = tuple(Ban(f"peer-{number}", "\U0001f40b" * 200) for number in range(400))
    withdrawn = tuple(Withdrawal(f"{number:064x}", '"' * 200) for number in range(400))
    told = answer(OwnerOrdersView(OwnerOrders(1, "why", bans=bans, withdrawn=withdrawn), NOON))["ordered"]
    assert (told["banned"], len(told["bans"]), told["bans"][0]["peer"]) == (400, SHOWN_ENTRIES, "peer-399")
    assert (told["withdrawn"], len(told["withdrawals"])) == (400, SHOWN_ENTRIES)
    assert len(json.dumps(told, ensure_ascii=False).encode()) < 40_000


def test_the_answer_tells_who_may_take_part_and_what_is_trained_on():
    texts = tuple(TextSource(f"text-{number}", "a.txt", "MIT", "a page") for number in range(25))
    manifest = tiny_manifest((1, 1, 1), model=TINY_MODEL, access="invite", contact="owner@example.org")
    signed = sign(replace(manifest, data=Data(texts, seq_len=16, micro_batch_size=2)))
    told = answer(OwnerOrdersView(), signed)["run"]
    assert (told["access"], told["contact"]) == ("invite", "owner@example.org")
    assert told["sources"][0] == {"name": "text-0", "licence": "MIT", "origin": "a page"}
    assert (len(told["sources"]), told["more_sources"]) == (SHOWN_SOURCES, 5)
    usual = answer(OwnerOrdersView())["run"]
    assert (usual["access"], usual["more_sources"]) == ("open", 0)
    assert usual["sources"][0]["licence"] == "PSF-2.0"


@pytest.mark.parametrize(
    ("ordered", "held"),
    [
        (OwnerOrdersView(), None),
        (OwnerOrdersView(asked_at=NOON), "0.0"),
        (OwnerOrdersView(replace(PAUSED, sequence=int(NOON * 1e6)), NOON), "1.0"),
    ],
)
def test_the_metrics_have_no_series_of_what_is_not_known(ordered, held):
    text = SwarmMetrics(lambda: board(ordered).snapshot).text().decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines.get(f'swarmnet_swarm_held{{run="{SIGNED.run_id}"}}') == held
