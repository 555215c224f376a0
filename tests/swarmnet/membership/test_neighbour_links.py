"""Which links a peer keeps in a large group, on hand-set time."""

from __future__ import annotations

from random import Random

import pytest

from swarmnet.identifiers import PeerId
from swarmnet.membership.membership import GONE_FAILURES, MAX_ADJACENT, RELEASE_SECONDS, Membership
from swarmnet.membership.overlay import (
    FULL_GROUP,
    HELPER_LINKS,
    RINGS,
    choose_helpers,
    choose_neighbours,
    hops,
    size_by_neighbours,
)
from swarmnet.membership.peer_info import HELPER_ROLE

ME = PeerId("me")


def group(count: int, stage: int = 1, of: int = 1) -> Membership:
    """`count` other peers of stage `of` are known to a peer of `stage`."""
    membership = Membership(me=ME, stage=stage, chance=Random(1))
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
    neighbours = choose_neighbours(ME, large.peers)
    assert neighbours < large.wanted()
    assert len(large.wanted()) <= 2 * RINGS + MAX_ADJACENT, "whoever leads into the group will do"
    large.linked(min(neighbours), 0.0)
    assert large.wanted() == neighbours
    assert len(neighbours) <= 2 * RINGS


def test_of_a_large_stage_next_to_ours_some_are_dialled():
    assert len(group(100, of=2).to_dial(0.0)) == MAX_ADJACENT
    assert len(group(20, of=0).to_dial(0.0)) == 20
    assert group(20, stage=1, of=3).to_dial(0.0) == []


def test_who_reaches_us_is_reached_back_though_we_did_not_choose_it():
    membership = group(100)
    other = next(peer for peer in membership.peers if peer not in membership.wanted())
    assert not membership.needs(other)
    membership.keeps_us(other, True)
    assert membership.needs(other)
    assert other in membership.to_dial(0.0)


def test_the_place_of_a_neighbour_that_is_not_reached_is_taken_by_another():
    membership = group(100)
    gone = min(membership.wanted())
    for attempt in range(GONE_FAILURES):
        assert gone in membership.wanted()
        membership.unlinked(gone, float(attempt))
    assert gone not in membership.wanted()
    assert gone in membership.to_dial(100.0), "it is tried again: it may only have been cut off"
    membership.linked(gone, 101.0)
    assert gone in membership.wanted()


def test_a_link_that_neither_side_needs_is_released_after_a_while():
    membership = group(5)
    early = PeerId("peer 0")
    membership.linked(early, 0.0)
    number = 5
    while early in membership.wanted():
        membership.linked(meet(membership, f"peer {number}"), 0.0)
        membership.keeps_us(PeerId(f"peer {number}"), True)
        number += 1
    for peer in membership.peers:  # As with each beat.
        membership.keeps_us(peer, True)
    known = membership.peers[early]
    membership.keeps_us(early, True)
    assert membership.surplus(10.0) == []
    membership.keeps_us(early, False)
    assert membership.surplus(20.0) == []
    assert membership.surplus(20.0 + RELEASE_SECONDS / 2) == []
    membership.keeps_us(early, True)
    assert membership.surplus(20.0 + RELEASE_SECONDS) == [], "it was needed again"
    membership.keeps_us(early, False)
    assert membership.surplus(40.0) == []
    assert membership.surplus(40.0 + RELEASE_SECONDS) == [early]
    membership.released(early)
    assert not known.linked
    assert early not in membership.to_dial(100.0), "it is there, only not a neighbour"


def linked_group(count: int, stage: int = 1) -> Membership:
    """All neighbours of a group stand."""
    membership = group(count, of=stage)
    chosen = choose_neighbours(ME, membership.peers) if stage == membership.stage else membership.wanted()
    for peer in chosen:
        membership.linked(peer, 0.0)
    assert membership.to_dial(0.0) == []
    return membership


@pytest.mark.parametrize("count", [4, 12, 60, 500])
def test_records_of_peers_that_do_not_exist_displace_no_neighbour(count: int):
    membership = linked_group(count)
    neighbours = set(membership.wanted())
    for number in range(2000):
        meet(membership, f"nobody {number}")
    membership.begin_dials(1.0)
    assert neighbours < membership.wanted(), "they are tried, too"
    assert membership.surplus(20.0) == membership.surplus(20.0 + RELEASE_SECONDS) == []


def test_nor_the_linked_ones_of_the_stages_next_to_ours():
    membership = linked_group(40, stage=2)
    linked = set(membership.wanted())
    assert len(linked) == MAX_ADJACENT
    for number in range(2000):
        meet(membership, f"nobody {number}", 2)
    assert linked < membership.wanted()


@pytest.mark.parametrize("told_first", [True, False])
def test_a_newcomer_among_such_records_finds_those_that_a_peer_it_has_reached_tells_of(told_first: bool):
    membership = group(2000)
    honest = meet(membership, "first")
    told = [PeerId(f"friend {number}") for number in range(5)]
    for happening in ("told", "linked") if told_first else ("linked", "told"):
        if happening == "linked":
            membership.linked(honest, 0.0)
        for peer in told if happening == "told" else ():
            membership.recorded(peer, 1, "worker", ("/x",), 1, b"record", 0.0, honest)
    assert {honest, *told} < membership.wanted()


def test_keys_that_only_greet_displace_nobody():
    membership = linked_group(60)
    neighbours = set(membership.wanted())
    for number in range(2000):
        membership.on_heartbeat(meet(membership, f"greeter {number}"), 1.0)
    assert neighbours < membership.wanted()
    assert membership.group_size() < 6 * 60


@pytest.mark.parametrize("count", [4, 9, 10, 11, 12, 14, 20, 60, 500])
@pytest.mark.parametrize("false_records", [0, 3000])
def test_all_of_a_group_count_its_hops_alike_within_one(count: int, false_records: int):
    """Else levels (swarmnet/rounds/settlement.py) never add up, and every round waits for its patience."""
    peers = [PeerId(f"{Random(count + number).random()}") for number in range(1, 1 + count)]
    counted = []
    for me in peers[:60]:
        membership = Membership(me=me, stage=1, chance=Random(1))
        for number in range(count):
            membership.recorded(peers[number], 1, "worker", ("/x",), 1, b"record", 0.0)
        for peer in choose_neighbours(me, membership.peers):
            membership.linked(peer, 0.0)
        for number in range(false_records):
            meet(membership, f"nobody {number}")
        counted.append(membership.group_size())
        if false_records == 0 and count <= FULL_GROUP:
            assert counted[-1] == count
    assert max(map(hops, counted)) - min(map(hops, counted)) <= 1
    assert max(counted) < 12 * count


def test_what_the_neighbours_speak_for_allows_for_the_whole_group():
    chance = Random(7)
    for count in (12, 60, 500):
        enough = 0
        for _ in range(100):
            me, *others = (PeerId(f"{chance.random()}") for _ in range(count))
            enough += size_by_neighbours(me, choose_neighbours(me, others)) >= count
        assert enough >= 90, count


def large_group() -> tuple[Membership, list[PeerId]]:
    """A member of a group of 40 that has reached all the others; and those who stand beside it on no ring."""
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    group = [PeerId(f"peer {number}") for number in range(39)]
    for peer in group:
        membership.recorded(peer, 1, "worker", ("/x",), 1, b"record", 0.0)
        membership.linked(peer, 0.0)
    return membership, sorted(set(group) - choose_neighbours(membership.me, group))


def test_who_reduces_is_linked_to_wherever_it_stands():
    membership, far = large_group()
    assert not membership.wanted() & set(far)
    membership.reduces([far[0], far[1], PeerId("unknown"), membership.me])
    assert membership.wanted() & set(far) == {far[0], far[1]}
    membership.reduces([far[2]])
    assert membership.wanted() & set(far) == {far[2]}


def test_a_link_that_is_for_slices_alone_carries_no_gossip():
    membership, far = large_group()
    ring = sorted(set(membership.peers) - set(far))
    assert all(map(membership.shares_rounds, far)), "who links to us for its own reasons is a neighbour"
    membership.reduces([far[0], ring[0]])
    assert not membership.shares_rounds(far[0])
    assert membership.shares_rounds(ring[0]), "it stands beside us, too"
    assert membership.shares_rounds(far[1])
    membership.reduces([membership.me])
    assert all(map(membership.shares_rounds, ring))
    assert not any(map(membership.shares_rounds, far))


def with_helpers(me: str, helpers: int, is_helper: bool = False) -> Membership:
    """A member of a group of 40 workers and some helpers, all of which it has reached."""
    membership = Membership(me=PeerId(me), stage=1, chance=Random(1), is_helper=is_helper)
    names = {f"peer {number}": "worker" for number in range(40)}
    names |= {f"helper {number}": HELPER_ROLE for number in range(helpers)}
    for name, role in names.items():
        if name != me:
            membership.recorded(PeerId(name), 1, role, ("/x",), 1, b"record", 0.0, upload=len(name))
            membership.linked(PeerId(name), 0.0)
    membership.reduces([PeerId(name) for name in names if name.startswith("helper")])
    return membership


def test_rounds_are_shared_with_a_few_helpers_and_both_sides_know_with_which():
    helpers = {PeerId(f"helper {number}") for number in range(8)}
    ring = choose_neighbours(PeerId("peer 0"), with_helpers("peer 0", 8).peers)
    worker = with_helpers("peer 0", 8)
    chosen = {helper for helper in helpers if worker.shares_rounds(helper)}
    assert chosen - ring == choose_helpers(worker.me, helpers) - ring
    assert len(chosen - ring) <= HELPER_LINKS
    for helper in helpers:
        there = with_helpers(helper, 8, is_helper=True)
        assert there.shares_rounds(worker.me) == (helper in chosen)
        assert all(there.shares_rounds(other) for other in helpers - {helper}), "helpers know each other"


def test_helpers_take_part_in_rounds_and_get_no_microbatches():
    membership = with_helpers("peer 0", 2)
    for peer in membership.peers:
        membership.beat(peer, 1, True, 0, 0.1, 0.0)
    assert set(membership.active(1)) - set(membership.live(1)) == {"helper 0", "helper 1"}
    assert membership.peers[PeerId("helper 0")].upload == len("helper 0")


def test_in_a_group_that_is_linked_whole_all_are_neighbours_whoever_reduces():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    for peer in (PeerId("a"), PeerId("b")):
        membership.recorded(peer, 1, "worker", ("/x",), 1, b"record", 0.0)
        membership.linked(peer, 0.0)
    membership.reduces([PeerId("a"), membership.me])
    assert membership.shares_rounds(PeerId("a"))
    assert membership.shares_rounds(PeerId("b"))


def test_reducers_are_drawn_among_those_who_are_vouched_for():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    for name in ("reached", "told of", "only a record", "elsewhere"):
        peer = PeerId(name)
        stage = 2 if peer == "elsewhere" else 1
        membership.recorded(peer, stage, "worker", ("/x",), 1, b"record", 0.0)
    membership.linked(PeerId("reached"), 0.0)
    membership.recorded(PeerId("told of"), 1, "worker", ("/x",), 2, b"record", 0.0, PeerId("reached"))
    assert sorted(membership.candidates()) == ["reached", "told of"]
