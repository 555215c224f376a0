"""A crowd of keys that greet, and what a peer gives them: on hand-set time."""

from __future__ import annotations

from random import Random

from swarmnet.identifiers import PeerId
from swarmnet.membership.guests import MAX_GUESTS, MAX_OF_RANGE, Guests
from swarmnet.membership.membership import MANY, MAX_ADJACENT, RELEASE_SECONDS, Membership
from swarmnet.membership.overlay import RINGS


def meet(membership: Membership, name: str, address: str, linked: bool = True) -> PeerId:
    peer = PeerId(name)
    membership.recorded(peer, 1, "worker", (address,), 1, b"record", 0.0)
    if linked:
        membership.linked(peer, 0.0)
    return peer


def crowd(membership: Membership, keys: int, networks: int) -> None:
    """They are there, and keep links to this peer."""
    for number in range(keys):
        peer = meet(membership, f"false {number}", f"/ip4/8.8.{number % networks}.1/tcp/{number + 1}", False)
        membership.keeps_us(peer, True)
        if peer in membership.to_dial(0.0):
            membership.linked(peer, 0.0)


def links_to(membership: Membership) -> int:
    return sum(known.linked for known in membership.peers.values())


def test_a_crowd_that_greets_from_one_network_gets_few_links():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    crowd(membership, 2000, networks=1)
    for now in (20.0, 20.0 + RELEASE_SECONDS):
        for peer in membership.surplus(now):
            membership.released(peer)
    assert len(membership.guests) <= MAX_OF_RANGE
    assert links_to(membership) <= MAX_OF_RANGE + 4 * 2 * RINGS + MAX_ADJACENT


def test_nor_does_one_from_as_many_networks_as_it_likes_get_more_than_there_are_places():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    crowd(membership, 2000, networks=200)
    for now in (20.0, 20.0 + RELEASE_SECONDS):
        for peer in membership.surplus(now):
            membership.released(peer)
    assert len(membership.guests) == MAX_GUESTS
    assert links_to(membership) <= MAX_GUESTS + 4 * 2 * RINGS + MAX_ADJACENT


def test_who_has_worked_stays_a_neighbour_among_any_number_that_were_reached():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    honest = [meet(membership, f"honest {number}", f"/dns/home{number}/tcp/1") for number in range(7)]
    membership.worked(honest)
    for number in range(2000):
        meet(membership, f"false {number}", "/ip4/8.8.8.8/tcp/1")
    assert set(honest) <= membership.wanted()
    assert not set(honest) & set(membership.surplus(20.0) + membership.surplus(20.0 + RELEASE_SECONDS))


def test_whom_a_full_table_forgets_has_not_worked():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    honest = meet(membership, "honest", "/dns/home/tcp/1")
    membership.worked([honest])
    membership.unlinked(honest, 1.0)
    for number in range(4200):
        membership.recorded(PeerId(f"false {number}"), 1, "worker", ("/x",), 1, b"record", 2.0)
        membership.on_heartbeat(PeerId(f"false {number}"), 3.0)
    assert honest in membership.peers


def test_a_newcomer_finds_a_place_where_a_crowd_has_taken_all():
    guests = Guests()
    for number in range(1000):
        guests.admit(PeerId(f"false {number}"), [f"8.8.{number % 8}.0/24"])
    assert len(guests) == MAX_GUESTS
    assert guests.admit(PeerId("newcomer"), ["9.9.9.0/24"])
    assert len(guests) == MAX_GUESTS
    assert PeerId("newcomer") in guests
    assert not guests.admit(PeerId("one more of them"), ["8.8.0.0/24"])
    guests.left(PeerId("newcomer"))
    assert guests.admit(PeerId("without a public address"), [])


def test_who_has_worked_needs_no_place():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    crowd(membership, 200, networks=8)
    held = len(membership.guests)
    worker = next(peer for peer in membership.peers if peer in membership.guests)
    membership.worked([worker])
    assert len(membership.guests) == held - 1
    assert membership.needs(worker)


def test_a_newcomer_whom_a_crowd_surrounds_tries_the_others_until_somebody_takes_part():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    for number in range(300):
        meet(membership, f"false {number}", f"/ip4/8.8.8.1/tcp/{number + 1}", linked=False)
    honest = meet(membership, "honest", "/ip4/8.8.8.2/tcp/1", linked=False)
    now, tried = 0.0, set()
    while not membership.peers[honest].linked and now < 60.0:
        for peer in membership.begin_dials(now):
            membership.linked(peer, now)
            membership.dialing(peer, False)
            tried.add(peer)
        now += 1.0
    assert membership.peers[honest].linked
    assert now < 30.0
    membership.beat(honest, 1, True, 5, 0.1, now)
    membership.begin_dials(now)
    assert honest in membership.wanted()
    assert len(membership.wanted()) <= 4 * 2 * RINGS, "it seeks no more"


def test_among_keys_from_few_networks_those_from_elsewhere_are_tried_first():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    for number in range(1000):
        address = f"/ip4/8.8.{number % 16}.{number // 16 + 1}/tcp/1"
        meet(membership, f"false {number}", address, linked=False)
    honest = [meet(membership, f"h {net}", f"/ip4/9.9.{net}.1/tcp/1", linked=False) for net in range(8)]
    assert membership.wanted() >= set(honest), "in the first choice"


def test_who_wants_a_link_where_all_places_are_taken_finds_none():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    crowd(membership, 2000, networks=200)
    late = meet(membership, "late", "/ip4/8.8.1.1/tcp/1", linked=False)
    assert not membership.finds_no_place(late), "it has not asked"
    membership.keeps_us(late, True)
    assert membership.finds_no_place(late)
    membership.worked([late])
    assert not membership.finds_no_place(late), "contributors need no place"
    other = PeerId("visitor")
    membership.recorded(other, -1, "archivist", (), 1, b"record", 0.0)
    membership.keeps_us(other, True)
    assert not membership.finds_no_place(other), "it visits"
    assert not membership.finds_no_place(PeerId("unknown"))


def test_a_guest_is_dialled_and_has_its_place():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    for number in range(20):
        meet(membership, f"peer {number}", f"/ip4/8.8.{number}.1/tcp/1")
    guest = meet(membership, "guest", "/ip4/9.9.9.9/tcp/1", linked=False)
    membership.keeps_us(guest, True)
    assert guest in membership.to_dial(0.0)
    assert not membership.finds_no_place(guest)


def test_messages_of_a_crowd_do_not_make_a_peer_choose_its_links_again_each_time():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    crowd(membership, MANY + 50, networks=16)
    chosen = membership.wanted()
    for number in range(MANY + 50):
        peer = PeerId(f"false {number}")
        address = f"/ip4/8.8.{number % 16}.1/tcp/{number + 1}"
        membership.recorded(peer, 1, "worker", (address,), 2, b"newer", 1.0, PeerId("false 0"))
        membership.beat(peer, 1, number % 2 == 0, 1, 0.1, 1.0)
        membership.linked(peer, 1.0)
        membership.unlinked(peer, 1.0)
    membership.recorded(PeerId("false 1"), 3, "worker", (), 3, b"moved", 1.0)
    assert membership.wanted() is chosen
    membership.begin_dials(1.0)
    assert PeerId("false 1") not in membership.wanted()
