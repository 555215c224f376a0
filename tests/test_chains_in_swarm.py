"""Chains that the owner orders, in a whole swarm: followed while they can be, and never waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

from swarm import OWNER
from test_ahead import MANIFEST, PEERS, played
from test_orders_in_swarm import OwnedSwarm

from peers.creator.chaining import ANSWER_SECONDS, HopAsker
from peers.reaching import Reached
from protocols.identity import Identity
from protocols.memory_ways import Conditions
from swarmnet import orders
from swarmnet.chains import Chain, Told, places_of, plan
from swarmnet.identifiers import PeerId
from swarmnet.orders import NO_ORDER, Chains


class ChainedSwarm(OwnedSwarm):
    """Of two origins, where a microbatch visits stage 1 or 2, 20 ms from everybody."""

    async def keep_to(self, *names: tuple[str, ...], seconds: float = 600.0) -> None:
        chains: tuple[Chain, ...] = tuple(tuple(self.members[name].peer for name in chain) for chain in names)
        now = self.members["a"].worker.presence.directory.now()
        order = orders.chain(NO_ORDER, Chains(now + seconds, chains), now, "a quiet night")
        given = await self.give(order, "d")
        await self.until(lambda: self.knows(given), 2.0)
        await self.during(2.0)  # What was under way went as it had begun.

    async def ways(self, seconds: float) -> Counter[tuple[str, str]]:
        """Origin and peer of a middle stage -> microbatches that it has committed in the next seconds."""
        begun = len(self.notes)
        await self.during(seconds)
        names = {member.peer: name for name, member in self.members.items()}
        return Counter(
            (names[PeerId(note.fields["origin"])], note.name)
            for note in self.notes[begun:]
            if note.event == "committed" and PEERS[note.name] in (1, 2)
        )


def play(story: Callable[[ChainedSwarm], Awaitable[None]]) -> None:
    played(ChainedSwarm(MANIFEST, conditions=Conditions(0.02), stub=True), story, slots=4)


def test_microbatches_keep_to_the_chains_of_their_origins_for_as_long_as_was_ordered():
    async def story(swarm: ChainedSwarm) -> None:
        assert len(await swarm.ways(10.0)) > 4, "without chains they go everywhere"
        await swarm.keep_to(("a", "b", "d"), ("a2", "c", "d"), seconds=20.0)
        assert set(await swarm.ways(10.0)) == {("a", "b"), ("a2", "c")}
        await swarm.during(10.0)
        assert len(await swarm.ways(10.0)) > 4

    play(story)


def test_a_chain_that_breaks_is_left_at_once_and_taken_up_again():
    async def story(swarm: ChainedSwarm) -> None:
        await swarm.keep_to(("a", "b", "d"), ("a2", "c", "d"))
        await swarm.crash("b")
        before = await swarm.ways(10.0)
        assert {peer for origin, peer in before if origin == "a"} >= {"b2", "c2"}
        assert {peer for origin, peer in before if origin == "a2"} == {"c"}
        swarm.start("b", 1, in_flight=3, slots=4)
        await swarm.during(20.0)
        after = await swarm.ways(10.0)
        assert set(after) == {("a", "b"), ("a2", "c")}

    play(story)


def test_a_peer_that_answers_nothing_does_not_hold_up_who_has_a_chain_through_it():
    async def story(swarm: ChainedSwarm) -> None:
        await swarm.keep_to(("a", "b", "d"), ("a2", "c", "d"))
        usual = sum((await swarm.ways(10.0)).values())
        swarm.members["b"].worker.data.serving = False  # It refuses whatever comes.
        await swarm.during(5.0)
        found = await swarm.ways(10.0)
        assert sum(found.values()) > 0.8 * usual
        assert ("a", "b") not in found

    play(story)


def test_chains_through_peers_that_are_not_there_or_not_where_they_were_change_nothing():
    async def story(swarm: ChainedSwarm) -> None:
        await swarm.keep_to(("a", "d", "b"), ("a2", "a", "d"))
        assert len(await swarm.ways(10.0)) > 4

    play(story)


async def asked(swarm: ChainedSwarm) -> dict[PeerId, Told]:
    """What a visitor hears that asks everybody."""
    me = Identity.from_seed(b"visitor").peer_id
    network = swarm.network
    transport = network.transports.get(me) or network.transport(me)
    return dict(await HopAsker(Reached(swarm.signed, transport, network.directory(me)), OWNER).ask())


def test_what_peers_tell_of_their_hops_is_enough_to_plan_chains():
    async def story(swarm: ChainedSwarm) -> None:
        await swarm.during(20.0)
        told = await asked(swarm)
        names = {member.peer: name for name, member in swarm.members.items()}
        assert {names[peer]: one.stage for peer, one in told.items()} == PEERS
        for one in told.values():
            assert one.compute_seconds > 0
            assert all(0.01 <= seconds < 0.2 for seconds in one.hop_seconds.values())
        assert len(told[swarm.members["a"].peer].hop_seconds) == 4
        assert told[swarm.members["d"].peer].hop_seconds == {}
        made = plan(places_of(MANIFEST.path_rules(), told), Random(0))
        assert len(made) == 2
        assert len({peer for chain in made for peer in chain[1:-1]}) == 2

    play(story)


def test_who_does_not_answer_has_no_part_in_a_plan():
    async def story(swarm: ChainedSwarm) -> None:
        swarm.network.freeze(swarm.members["b"].peer)
        begun = swarm.loop.time()
        told = await asked(swarm)
        assert set(told) == {member.peer for name, member in swarm.members.items() if name != "b"}
        assert swarm.loop.time() - begun <= ANSWER_SECONDS + 1.0
        swarm.network.thaw(swarm.members["b"].peer)

    play(story)
