"""What time others say it is: a correction of minutes, with one voice for each network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm import OWNER, sign, tiny_manifest

from peers.network.orders.gatekeeper import Gatekeeper
from protocols.dht.swarm_time import MAX_OFFSET_SECONDS, ClockVote, agreed_offset, changed, correction, middle
from protocols.signed.identity import Identity
from protocols.signed.invites import seal_invite

offsets = st.floats(-1e9, 1e9)


@given(st.dictionaries(st.text(max_size=3), st.tuples(offsets, st.sampled_from(["", "a", "b", "c"]))))
def test_whatever_is_said_the_clock_is_corrected_by_minutes_at_most(said):
    heard = agreed_offset({peer: offset for peer, (offset, _) in said.items()},
                 {peer: network for peer, (_, network) in said.items()})  # fmt: skip
    assert heard.offset is None or abs(correction(heard.offset)) <= MAX_OFFSET_SECONDS
    assert heard.implausible_offset is None or abs(heard.implausible_offset) > MAX_OFFSET_SECONDS
    assert heard.voices <= 3
    assert bool(heard.refusal) == (heard.offset is None and heard.implausible_offset is not None)


def test_a_crowd_in_one_network_has_one_voice():
    crowd = {f"liar {number}": 299.0 for number in range(100)}
    ranges = dict.fromkeys(crowd, "198.51.100.0/24") | {"a": "192.0.2.0/24", "b": "203.0.113.0/24"}
    assert agreed_offset({**crowd, "a": 1.0, "b": 2.0}, ranges).offset == 2.0
    assert agreed_offset(crowd, {}).voices == 0, "nor have those that nobody is connected to"


def test_a_lie_of_days_is_not_believed_beside_one_who_is_right():
    said = {"liar": 1e6, "other liar": 1e6, "honest": 60.0}
    heard = agreed_offset(said, {peer: peer for peer in said})
    assert (heard.offset, heard.refusal) == (60.0, "")


def test_of_two_the_one_nearer_to_the_own_clock_is_believed():
    assert middle([250.0, -2.0]) == middle([-2.0, 250.0]) == -2.0
    assert middle([1.0, 2.0, 300.0]) == 2.0


def test_a_clock_that_is_wrong_by_days_is_named_with_what_to_do():
    refusal = ClockVote(None, -86_400.0, 2).refusal
    assert "86400 s ahead of" in refusal
    assert "timedatectl" in refusal
    assert "name other bootstraps" in refusal
    assert "again" in changed(0.4)


@pytest.mark.parametrize(
    ("ends_in", "told_ahead", "comes_in"),
    [(5.0, MAX_OFFSET_SECONDS, True), (5.0, 0.0, True), (-MAX_OFFSET_SECONDS - 1, 0.0, False)],
)
def test_no_invite_ends_before_the_own_clock_says_so_whatever_others_say(ends_in, told_ahead, comes_in):
    signed, guest, clock = sign(tiny_manifest(access="invite")), Identity.from_seed(b"guest"), 1e9
    invite = seal_invite(OWNER, signed.run_id, guest.peer_id, clock + ends_in, clock - 100)

    class Book:
        def __init__(self):
            self.signed = signed
            self.order = type("Order", (), {"banned": lambda self, peer: None, "revoked": ()})()

    keeper = Gatekeeper(Book(), b"", lambda: clock + told_ahead)
    assert (keeper.refusal(guest.peer_id, invite) is None) == comes_in
