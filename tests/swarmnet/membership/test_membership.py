"""Who is there, on hand-set time: records are hints, beats are proof, silence is suspicion."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.membership.membership import (
    FIRST_REDIAL_SECONDS,
    FORGET_SECONDS,
    FORGOTTEN_AT_ONCE,
    LONGEST_REDIAL_SECONDS,
    MAX_PEERS,
    SILENT_SECONDS,
    Membership,
)

ME, A, B = PeerId("me"), PeerId("a"), PeerId("b")


def members(stage: int = 1) -> Membership:
    return Membership(me=ME, stage=stage, chance=Random(1))


def record(membership: Membership, peer: PeerId, stage: int = 1, sequence: int = 1, now: float = 0.0) -> bool:
    return membership.recorded(peer, stage, "worker", ("/x",), sequence, b"record of " + peer.encode(), now)


def test_only_newer_records_of_others_are_news():
    membership = members()
    assert record(membership, A, stage=1, sequence=5)
    assert not record(membership, A, stage=2, sequence=5)
    assert not record(membership, A, stage=2, sequence=4)
    assert not record(membership, ME, sequence=9)
    assert membership.peers[A].stage == 1
    assert record(membership, A, stage=2, sequence=6)
    assert membership.peers[A].stage == 2


def test_a_peer_is_dialled_once_and_is_live_when_it_is_linked_and_ready():
    membership = members()
    record(membership, A, stage=2)
    assert membership.to_dial(0.0) == [A]
    membership.dialing(A, True)
    assert membership.to_dial(0.0) == []
    membership.linked(A, 1.0)
    membership.dialing(A, False)
    assert membership.to_dial(1.0) == []
    assert membership.live(2) == []
    membership.beat(A, 2, True, 7, 0.1, 1.5)
    assert membership.live(2) == [A]
    assert (membership.peers[A].round, membership.peers[A].service_seconds) == (7, 0.1)
    membership.unlinked(A, 2.0)
    assert membership.live(2) == []


def test_only_the_own_group_and_the_stages_beside_it_are_dialled():
    membership = members(stage=2)
    for stage in range(-1, 6):
        record(membership, PeerId(f"peer{stage}"), stage=stage)
    assert membership.to_dial(0.0) == ["peer1", "peer2", "peer3"]
    first = members(stage=0)
    record(first, A, stage=-1)
    assert first.to_dial(0.0) == [], "a bootstrap holds no stage"


def test_a_failed_dial_is_tried_again_with_growing_patience_and_a_heartbeat_ends_that():
    membership, now, pauses = members(), 0.0, []
    record(membership, A)
    for _ in range(8):
        membership.unlinked(A, now)
        pauses.append(membership.peers[A].dial_at - now)
        assert membership.to_dial(now) == []
        now = membership.peers[A].dial_at
        assert membership.to_dial(now) == [A]
    assert 0.8 * FIRST_REDIAL_SECONDS <= pauses[0] <= 1.2 * FIRST_REDIAL_SECONDS
    assert pauses[2] > 2 * pauses[0]
    assert max(pauses) <= 1.2 * LONGEST_REDIAL_SECONDS
    membership.linked(A, now)
    membership.unlinked(A, now)
    assert membership.peers[A].dial_at - now >= 0.8 * LONGEST_REDIAL_SECONDS, "it ended the link at once"
    membership.linked(A, now)
    membership.beat(A, 1, True, 0, 0.1, now)
    membership.unlinked(A, now)
    assert membership.peers[A].dial_at - now <= 1.2 * FIRST_REDIAL_SECONDS


def test_silence_is_noticed_and_anything_heard_ends_it():
    membership = members()
    record(membership, A)
    membership.linked(A, 0.0)
    assert membership.silent(SILENT_SECONDS - 0.1) == []
    assert membership.silent(SILENT_SECONDS) == [A]
    membership.on_heartbeat(A, SILENT_SECONDS)
    assert membership.silent(SILENT_SECONDS) == []
    membership.unlinked(A, 5.0)
    assert membership.silent(100.0) == []


def test_who_said_bye_comes_back_only_with_a_newer_record():
    membership = members()
    record(membership, A, sequence=5)
    membership.left(A)
    assert A not in membership.peers
    assert not record(membership, A, sequence=5), "the directory still holds it"
    assert record(membership, A, sequence=6)


def test_at_first_hand_an_older_record_counts_for_a_peer_in_another_stage_and_told_by_others_no_more():
    membership = members()
    record(membership, A, stage=1, sequence=500)
    assert not record(membership, A, stage=2, sequence=5)
    assert first_hand(membership, A, stage=2, sequence=5), "its clock was ahead when it signed the other"
    assert not record(membership, A, stage=1, sequence=500), "neighbours and the directory keep that for long"
    assert not first_hand(membership, A, stage=2, sequence=4)
    assert membership.peers[A].stage == 2
    membership.left(A)
    assert not record(membership, A, stage=1, sequence=500)
    assert first_hand(membership, A, stage=0, sequence=7), "it is back"
    assert not record(membership, A, stage=1, sequence=500)
    assert record(membership, A, stage=1, sequence=501)


def first_hand(membership: Membership, peer: PeerId, stage: int, sequence: int) -> bool:
    return membership.recorded(peer, stage, "worker", ("/x",), sequence, b"greeting", 0.0, peer)


def test_events_about_peers_that_are_not_known_change_nothing():
    membership = members()
    membership.left(A)
    membership.on_heartbeat(A, 1.0)
    membership.beat(A, 1, True, 1, 0.1, 1.0)
    membership.unlinked(A, 1.0)
    membership.dialing(A, True)
    assert membership.peers == {}


def test_old_records_are_forgotten_unless_the_peer_is_linked():
    membership = members()
    record(membership, A)
    record(membership, B)
    membership.linked(B, 1.0)
    membership.forget_old(FORGET_SECONDS - 1)
    assert membership.peers.keys() == {A, B}
    membership.forget_old(FORGET_SECONDS)
    assert membership.peers.keys() == {B}


def test_names_without_end_push_out_only_each_other():
    membership = members()
    record(membership, A)
    membership.linked(A, 0.0)
    for number in range(MAX_PEERS + 50):
        record(membership, PeerId(f"sybil{number}"), stage=5, now=1.0 + number)
    assert MAX_PEERS - FORGOTTEN_AT_ONCE <= len(membership.peers) <= MAX_PEERS
    assert A in membership.peers
    assert PeerId("sybil10") not in membership.peers
    for number in range(MAX_PEERS + 50):
        membership.left(PeerId(f"sybil{number}"))
        record(membership, PeerId(f"other{number}"), stage=5)
        membership.left(PeerId(f"other{number}"))
    assert len(membership._left) <= MAX_PEERS


def test_of_more_keys_than_are_kept_those_of_the_crowded_network_are_forgotten_first():
    membership = members()
    honest = [PeerId(f"honest{number}") for number in range(8)]
    for number, peer in enumerate(honest):
        membership.recorded(peer, 1, "worker", (f"/ip4/9.9.{number}.1/tcp/1",), 1, b"", 0.0)
    for number in range(2 * MAX_PEERS):
        address = f"/ip4/8.8.8.{number % 250}/tcp/{number}"
        membership.recorded(PeerId(f"sybil{number}"), 1, "worker", (address,), 1, b"", 1.0 + number)
    assert all(peer in membership.peers for peer in honest)
    assert len(membership.peers) <= MAX_PEERS


def test_newcomers_are_told_of_those_heard_last_first():
    membership = members()
    for number in range(5):
        record(membership, PeerId(f"p{number}"))
        membership.linked(PeerId(f"p{number}"), float(number))
    record(membership, A)
    membership.on_heartbeat(A, 9.0)
    assert len(membership.records(9)) == 5, "of the one that only greets nothing is told"
    assert membership.records(2) == [b"record of p4", b"record of p3"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["recorded", "linked", "unlinked", "heard", "beat", "left", "dialing", "dialled"]
            ),
            st.sampled_from([A, B]), st.integers(0, 3), st.floats(0, 5),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_in_any_order_of_events_the_lists_agree(happenings):
    membership, now = members(), 0.0
    for sequence, (what, peer, stage, passed) in enumerate(happenings):
        now += passed
        if what == "recorded":
            record(membership, peer, stage, sequence, now)
        elif what == "linked" and peer in membership.peers:
            membership.linked(peer, now)
        elif what == "unlinked":
            membership.unlinked(peer, now)
        elif what == "heard":
            membership.on_heartbeat(peer, now)
        elif what == "beat":
            membership.beat(peer, stage, True, 1, 0.1, now)
        elif what == "left":
            membership.left(peer)
        else:
            membership.dialing(peer, what == "dialing")
        linked = {peer for peer, known in membership.peers.items() if known.linked}
        assert set(membership.to_dial(now)).isdisjoint(linked)
        assert set(membership.silent(now)) <= linked
        assert {peer for at in range(4) for peer in membership.live(at)} <= linked
