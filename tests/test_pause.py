"""A paused peer as others see it, and the reasons of a pause."""

from random import Random

from swarm import Swarm, tiny_manifest

from peers.claims import Claims
from peers.roles.pausing import Pausing
from peers.virtual_time import run
from swarmnet.identifiers import PeerId
from swarmnet.membership import Membership

ME, A = PeerId("me"), PeerId("a")


def recorded(membership, sequence):
    return membership.recorded(A, 1, "worker", ("/x",), sequence, b"record", 0.0)


def test_a_peer_that_rests_is_not_dialled_until_it_signs_that_it_is_back():
    membership = Membership(ME, 1, Random(1))
    recorded(membership, 1)
    membership.rests(A, 2)
    assert membership.to_dial(100.0) == []
    assert not recorded(membership, 1), "older than its pause"
    assert recorded(membership, 3)
    assert membership.to_dial(100.0) == [A]


def test_an_old_word_of_a_pause_does_not_end_a_link():
    membership = Membership(ME, 1, Random(1))
    recorded(membership, 5)
    membership.linked(A, 0.0)
    membership.rests(A, 4)
    membership.rests(A, 6)  # Its Bye is on the way: that ends the link.
    assert membership.peers[A].linked


def test_a_peer_is_paused_while_any_reason_stands():
    pausing = Pausing()
    pausing.pause("user")
    pausing.pause("owner", "the owner says: wait")
    pausing.resume("user")
    pausing.resume("schedule")
    assert pausing.texts == {"owner": "the owner says: wait"}
    pausing.resume("owner")
    assert not pausing


def test_in_a_swarm_the_others_go_on_without_a_paused_peer_and_it_counts_again_when_it_is_back():
    swarm = Swarm(tiny_manifest(stages=(1, 2)))

    async def story():
        swarm.open()
        first, second = swarm.start("a", stage=0), swarm.start("b", stage=0)
        last = swarm.start("c", stage=1)
        await swarm.until(lambda: swarm.committed(0) > 20, 60.0)
        second.worker.leave(2.5, "pausing")
        await swarm.until(lambda: second.task.done(), 5.0)
        for member in (first, last):
            others = member.worker.neighbourhood
            assert second.peer not in others.membership.peers
            assert others.departures["paused"] == 1
            paused = second.worker.presence.record(0, Claims("paused"))
            assert others.learn(paused) == second.peer
            assert second.peer not in others.membership.peers, "known to rest: not dialled"
        before = swarm.committed(0)
        await swarm.until(lambda: swarm.committed(0) > before + 20, 60.0)
        await swarm.close()

    run(story())
