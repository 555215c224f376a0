"""A linked key that repeats its requests gets few answers; after a lost link it is answered again."""

from collections import Counter

import pytest
from hostile import Liar
from swarm import Swarm, tiny_manifest

from peers.lab.world.virtual_time import run
from peers.worker.rounds.wire_events import read_reference
from protocols.messages.table import Announce, GetChain, GetContributions, GetIds
from swarmnet.membership.request_budget import BURST
from swarmnet.rounds.fetch_scheduler import MAX_ASKS

TIMES = 100


class Asker(Liar):
    """Remembers which contributions are there, and how many bytes of each kind come."""

    def __init__(self, swarm):
        super().__init__(swarm, 0, "asker")
        self.bytes, self.ids = Counter(), {}

    def received(self, peer, lane, message, body, wire_bytes):
        super().received(peer, lane, message, body, wire_bytes)
        self.bytes[type(message).__name__] += wire_bytes
        if isinstance(message, Announce):
            self.ids |= {read_reference(each).id: None for each in message.references}


@pytest.fixture(scope="module")
def heard():
    """How many answers of each kind came to TIMES requests in a second; `again`: of bodies, by a new link."""
    swarm, found = Swarm(tiny_manifest((2, 1)), stub=True), {}

    async def story():
        swarm.open()
        for name, stage in (("a", 0), ("b", 0), ("c", 1)):
            swarm.start(name, stage)
        await swarm.until(lambda: swarm.committed(0) > 100, 120.0)
        asker, target = Asker(swarm), swarm.members["a"].peer

        def is_linked():
            return asker.identity.peer_id in swarm.members["a"].worker.services.links.linked(0)

        await swarm.network.directory(asker.identity.peer_id).announce(
            swarm.signed.run_id, 0, asker.record, 5.0
        )
        newest = swarm.rounds()["a"][1]
        rounds = list(range(max(0, newest - 10), newest + 1))
        await asker.say(target, GetIds(rounds))
        await swarm.during(1.0)
        ids = list(asker.ids)[:8]
        found["ids"] = len(ids)
        await asker.say(target, GetContributions(ids))
        await swarm.during(0.3)
        for link in asker._links.values():
            link.close()
        await swarm.until(lambda: not is_linked(), 10.0)
        asker.heard.clear()
        await asker.say(target, GetIds(rounds[:1]))
        await swarm.until(is_linked, 30.0)
        await asker.say(target, GetContributions(ids))
        await swarm.during(1.0)
        found["again"] = asker.heard["Contribution"]
        for message, answer in (
            (GetContributions(ids), "Contribution"),
            (GetIds(rounds[:1]), "Announce"),
            (GetChain(newest - 3), "ChainResponse"),
        ):
            asker.heard.clear()
            for _ in range(TIMES):
                await asker.say(target, message)
                await swarm.during(0.01)
            found[answer] = asker.heard[answer]
        await swarm.close()

    run(story())
    return found


def test_each_body_is_given_a_few_times(heard):
    assert heard["ids"] > 0
    assert heard["Contribution"] <= MAX_ASKS * heard["ids"]


def test_ids_and_chains_are_told_a_few_times(heard):
    assert 0 < heard["ChainResponse"] <= BURST + 2
    assert heard["Announce"] <= 4 * BURST  # New contributions of honest peers are announced besides.


def test_a_retry_after_a_lost_link_is_answered(heard):
    assert heard["again"] == heard["ids"]
