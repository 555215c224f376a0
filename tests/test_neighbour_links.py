"""Which links a peer keeps in a large group, on hand-set time."""

from __future__ import annotations

from random import Random

from swarmnet.identifiers import PeerId
from swarmnet.membership import GONE_FAILURES, MOST_ADJACENT, RELEASE_SECONDS, Membership
from swarmnet.neighbours import FULL_GROUP, RINGS

ME = PeerId("me")


def group(count: int, stage: int = 1, of: int = 1) -> Membership:
    """`count` other peers of stage `of` are known to a peer of `stage`."""
    membership = Membership(ME, stage, Random(1))
    for number in range(count):
        meet(membership, f"peer {number}", of)
    return membership


def meet(membership: Membership, name: str, stage: int = 1) -> PeerId:
    peer = PeerId(name)
    membership.recorded(peer, stage, "worker", ("/x",), 1, b"record of " + name.encode(), 0.0)
    return peer


def test_a_small_group_is_dialled_whole_and_of_a_large_one_the_neighbours():
    assert len(group(FULL_GROUP - 1).to_dial(0.0)) == FULL_GROUP - 1
    large = group(100)
    assert set(large.to_dial(0.0)) == large.wanted()
    assert len(large.wanted()) <= 2 * RINGS
    assert len(large.group()) == 101


def test_of_a_large_stage_next_to_ours_some_are_dialled():
    assert len(group(100, of=2).to_dial(0.0)) == MOST_ADJACENT
    assert len(group(20, of=0).to_dial(0.0)) == 20
    assert group(20, stage=1, of=3).to_dial(0.0) == []


def test_who_reaches_us_is_reached_back_though_we_did_not_choose_it():
    membership = group(100)
    other = next(peer for peer in membership.peers if peer not in membership.wanted())
    assert not membership.needs(other)
    membership.peers[other].wants_us = True
    assert membership.needs(other)
    assert other in membership.to_dial(0.0)


def test_the_place_of_a_neighbour_that_is_not_reached_is_taken_by_another():
    membership = group(100)
    gone = min(membership.wanted())
    for attempt in range(GONE_FAILURES):
        assert gone in membership.wanted()
        membership.unlinked(gone, float(attempt))
    assert gone not in membership.wanted()
    assert gone not in membership.group()
    assert gone in membership.to_dial(100.0), "it is tried again: it may only have been cut off"
    membership.linked(gone, 101.0)
    assert gone in membership.wanted()


def test_a_link_that_neither_side_needs_is_released_after_a_while():
    membership = group(5)
    early = PeerId("peer 0")
    membership.linked(early, 0.0)
    number = 5
    while early in membership.wanted():
        meet(membership, f"peer {number}")
        number += 1
    known = membership.peers[early]
    known.wants_us = True
    assert membership.surplus(10.0) == []
    known.wants_us = False
    assert membership.surplus(20.0) == []
    assert membership.surplus(20.0 + RELEASE_SECONDS / 2) == []
    known.wants_us = True
    assert membership.surplus(20.0 + RELEASE_SECONDS) == [], "it was needed again"
    known.wants_us = False
    assert membership.surplus(40.0) == []
    assert membership.surplus(40.0 + RELEASE_SECONDS) == [early]
    membership.released(early)
    assert not known.linked
    assert early in membership.group(), "it is there, only not a neighbour"
    assert early not in membership.to_dial(100.0)
