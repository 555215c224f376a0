"""An observer beside a swarm in memory: it sees who trains, dies, freezes, is cut off, leaves and pauses."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from swarm import OWNER, Swarm, tiny_manifest

from peers.lab.world.virtual_time import run
from peers.network.discovery.announcer import RecordAnnouncer
from peers.network.discovery.claimed_tokens import Contributions
from peers.network.discovery.claims import Claims
from peers.stageless.observer import crawler
from peers.stageless.observer.crawler import Crawl, walk_seconds
from peers.stageless.observer.order_reader import Orders
from peers.stageless.observer.sightings import PeerObservations
from peers.stageless.observer.snapshot_of_records import snapshot_of
from protocols.signed.identity import Identity
from protocols.signed.orders import seal_order
from protocols.signed.peer_record import NO_STAGE
from protocols.signed.records import RECORD_SECONDS
from swarmnet.run.owner_orders import OwnerOrders

EYE = Identity.from_seed(b"the observer")
PROMISED_SECONDS = 15.0
SLOW_SECONDS = 1.0
"""Every piece of computing takes so long of the virtual clock: minutes pass without much work."""


class Watched:
    """A swarm of two stages of two peers each, and an observer in the same world."""

    def __init__(self):
        self.swarm = Swarm(tiny_manifest((1, 1)), stub=True)
        self.notes = []

    @asynccontextmanager
    async def training(self):
        swarm = self.swarm
        swarm.open()
        for name, stage in (("a", 0), ("b", 0), ("c", 1), ("d", 1)):
            swarm.start(name, stage, compute=lambda _: SLOW_SECONDS)
        swarm.network.transport(EYE.peer_id)
        of_run = Contributions(swarm.signed.run_id, swarm.signed.manifest.rounds.snapshot_interval)
        self.sightings = PeerObservations(2, contributions=of_run)
        self.directory = swarm.network.directory(EYE.peer_id)
        note = lambda event: self.notes.append((event.name, event.fields))  # noqa: E731 - the event log
        self.orders = Orders(swarm.signed, note, self.sightings.events.append)
        self.walk = Crawl(
            run=swarm.signed.run_id,
            me=EYE.peer_id,
            directory=self.directory,
            sightings=self.sightings,
            orders=self.orders,
            bootstraps=(),
            log_event=note,
        )
        walking = asyncio.create_task(self.walk.run())
        try:
            await swarm.until(lambda: self.states() == {"training": 4}, 60.0)
            # Only a peer that has answered here is missed soon.
            await swarm.until(lambda: all(peer.answers for peer in self.sightings.peers.values()), 15.0)
            yield swarm
        finally:
            walking.cancel()
            await asyncio.gather(walking, return_exceptions=True)
        await swarm.close()

    def picture(self):
        return snapshot_of(self.sightings, self.swarm.signed, self.directory.now(), self.orders.ordered)

    async def order(self, order):
        """Into the directory, as the owner does; peers find it there within a minute."""
        run_id = self.swarm.signed.run_id
        await self.directory.put_order(run_id, seal_order(OWNER, run_id, order).data, 5.0)

    def states(self):
        states = [row.state for row in self.picture().rows]
        return {state: states.count(state) for state in states}

    def peers(self):
        return [stage.peers for stage in self.picture().stages]


@pytest.mark.parametrize(
    ("how", "code"), [("crash", "not_reached"), ("freeze", "silent"), ("partition", "silent")]
)
def test_a_stage_thins_within_fifteen_seconds_of_a_peers_end(how, code):
    watched = Watched()

    async def story():
        async with watched.training() as swarm:
            victim = swarm.members["c"].peer
            assert watched.peers() == [2, 2]
            began = swarm.loop.time()
            if how == "crash":
                await swarm.crash("c")
            elif how == "freeze":
                swarm.network.freeze(victim)
            else:
                swarm.network.partition([EYE.peer_id], [victim])
            await swarm.until(lambda: watched.peers() == [2, 1], PROMISED_SECONDS)
            assert watched.picture().weakest == 1
            assert watched.sightings.departures == {code: 1}
            assert [fields["code"] for event, fields in watched.notes if event == "departed"] == [code]
            if how == "freeze":
                swarm.network.thaw(victim)
                await swarm.until(lambda: watched.peers() == [2, 2], 60.0)
            swarm.network.heal()
            assert swarm.loop.time() > began

    run(story())


def test_who_leaves_says_so_and_its_work_stays_counted():
    watched = Watched()

    def confirmed():
        return [entry[2] for entry in watched.picture().contributors]

    async def story():
        async with watched.training() as swarm:
            await swarm.until(lambda: len(confirmed()) == 4 and min(confirmed()) > 0, 240.0)
            await swarm.until(lambda: swarm.committed(0) > 4, 60.0)
            await swarm.until(lambda: watched.picture().tokens > 0, 45.0)
            counted = watched.picture().tokens
            assert watched.picture().loss is not None
            await swarm.leave("b")
            await swarm.until(lambda: watched.peers() == [1, 2], PROMISED_SECONDS)
            swarm.network.crash(swarm.members["b"].peer)  # The process ends after the worker.
            await swarm.until(lambda: watched.sightings.departures == {"left": 1}, PROMISED_SECONDS)
            assert watched.picture().tokens >= counted

    run(story())


def test_a_polite_leave_between_two_walks_is_no_loss(monkeypatch):
    monkeypatch.setattr(crawler, "SHORTEST_WALK_SECONDS", 60.0)
    watched = Watched()

    async def story():
        async with watched.training() as swarm:
            await swarm.until(lambda: all(known.answers for known in watched.sightings.peers.values()), 60.0)
            await swarm.leave("b")
            swarm.network.crash(swarm.members["b"].peer)  # The process ends after the worker.
            await swarm.until(lambda: watched.peers() == [1, 2], PROMISED_SECONDS)
            assert watched.sightings.departures == {"left": 1}
            assert watched.picture().away == {"left": 1}

    run(story())


def test_peers_without_a_stage_and_paused_ones_are_shown_as_what_they_are():
    watched = Watched()

    async def story():
        async with watched.training() as swarm:
            sleeper = Identity.from_seed(b"sleeper")
            transport = swarm.network.transport(sleeper.peer_id)
            directory = swarm.network.directory(sleeper.peer_id)
            presence = RecordAnnouncer(
                signed=swarm.signed,
                identity=sleeper,
                transport=transport,
                directory=directory,
                version="0",
                log_event=lambda *_, **__: None,
            )
            claims = Claims("paused", "attic")
            announcing = asyncio.create_task(
                presence.announce_forever(NO_STAGE, lambda: presence.record(NO_STAGE, claims))
            )
            await swarm.until(lambda: watched.states() == {"training": 4, "paused": 1}, 30.0)
            assert watched.peers() == [2, 2]
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)

    run(story())


def test_a_run_that_its_owner_holds_looks_held_and_not_broken():
    watched = Watched()

    async def story():
        async with watched.training() as swarm:
            await swarm.until(lambda: watched.picture().tokens > 0 and watched.orders.ordered.asked_at, 60.0)
            assert watched.picture().ordered.held is False
            now = watched.directory.now()
            await watched.order(OwnerOrders(int(now * 1e6), "a look at the data", paused=True))
            await swarm.until(lambda: watched.picture().ordered.held, 2 * walk_seconds(4))
            pause = watched.picture().ordered.pause
            assert (pause.since, pause.reason) == (pytest.approx(now), "a look at the data")
            before = watched.picture()
            await swarm.until(lambda: watched.states() == {"paused_by_owner": 4}, 100.0)
            held = watched.picture()
            assert watched.peers() == [2, 2], "who is held holds its stage"
            assert held.weakest is not None
            assert held.loss is not None
            assert held.tokens >= before.tokens
            assert held.round >= before.round
            assert all(stage.tokens_per_second > 0 for stage in held.stages)
            await watched.order(OwnerOrders(int(watched.directory.now() * 1e6), "on it goes"))
            await swarm.until(lambda: watched.picture().ordered.held is False, 2 * walk_seconds(4))
            await swarm.until(lambda: watched.states() == {"training": 4}, 100.0)

    run(story())


def test_a_change_of_state_is_announced_at_once_and_otherwise_the_directory_is_left_in_peace():
    watched = Watched()

    async def story():
        async with watched.training() as swarm:
            announced = []
            directory = swarm.members["a"].worker.context.presence.directory
            announce = directory.announce

            async def counted(*arguments):
                announced.append(swarm.loop.time())
                return await announce(*arguments)

            directory.announce = counted
            await swarm.during(80.0)
            assert len(announced) <= 5 + 2, "five early ones, then one each 30 s"
            began = swarm.loop.time()
            swarm.members["a"].worker.leave()
            await swarm.until(lambda: announced and announced[-1] >= began, 1.0)
            await swarm.leave("a")

    run(story())


def test_walks_are_rarer_in_a_large_run_and_never_rarer_than_records_live():
    assert walk_seconds(6) == 5.0
    assert walk_seconds(1000) == 20.0
    assert walk_seconds(10**6) <= RECORD_SECONDS / 2
