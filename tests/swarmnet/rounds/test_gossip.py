"""What is told unasked, and when: on hand-set time."""

from __future__ import annotations

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.events import Reference, SendAnnounce
from swarmnet.rounds.gossip import (
    CALM_SECONDS,
    QUIET_SECONDS,
    RELAY_SECONDS,
    SHARE_PARTS,
    URGENT_SECONDS,
    Gossip,
)

A, B = PeerId("a"), PeerId("b")


def reference(number: int, round: int = 5) -> Reference:
    return Reference(round, PeerId(f"maker {number}"), ContributionId(bytes([number] * 16)), 100)


def told() -> Gossip:
    """Progress was told at 10.0."""
    gossip = Gossip(0.0)
    assert gossip.should_send(0, 10.0)
    return gossip


def test_progress_is_repeated_when_nothing_changes():
    gossip = told()
    assert not gossip.should_send(0, 10.9)
    assert gossip.next_deadline() == 10.0 + QUIET_SECONDS
    assert gossip.should_send(0, 10.0 + QUIET_SECONDS)


def test_what_others_wait_for_is_told_soon_and_what_they_know_already_later():
    gossip = told()
    gossip.changed(CALM_SECONDS)
    assert gossip.next_deadline() == 10.0 + CALM_SECONDS
    gossip.changed(URGENT_SECONDS)
    gossip.changed(CALM_SECONDS)
    assert gossip.next_deadline() == 10.0 + URGENT_SECONDS, "the sooner counts"
    assert gossip.should_send(0, 10.0 + URGENT_SECONDS)
    assert gossip.next_deadline() == 10.0 + URGENT_SECONDS + QUIET_SECONDS


def test_a_change_long_after_the_last_time_is_told_at_once():
    gossip = told()
    gossip.changed(URGENT_SECONDS)
    assert gossip.should_send(0, 10.8)
    gossip.at_once(10.81)
    assert gossip.should_send(0, 10.81)


def test_tokens_are_told_when_they_grew_by_a_part_of_the_share():
    gossip = told()
    part = 3200 // SHARE_PARTS
    gossip.committed(part - 1, 3200)
    assert not gossip.should_send(part - 1, 10.5)
    gossip.committed(part, 3200)
    assert gossip.should_send(part, 10.5)
    gossip.committed(part + 5, 3200)
    assert not gossip.should_send(part + 5, 11.0)


def test_contributions_of_others_are_announced_in_bundles_to_those_who_may_lack_them():
    gossip = told()
    gossip.relay(reference(1), [A, B], 20.0)
    gossip.relay(reference(2), [A], 20.01)
    assert gossip.relays([A, B], 0, 20.01) == []
    gossip.knows(B, [reference(1)])
    assert gossip.relays([A, B], 0, 20.0 + RELAY_SECONDS) == [
        SendAnnounce((A,), (reference(1), reference(2)))
    ]
    assert gossip.relays([A, B], 0, 30.0) == [], "once"


def test_nothing_is_announced_to_who_is_no_ally_any_more_nor_of_settled_rounds():
    gossip = told()
    gossip.relay(reference(1, round=5), [A, B], 20.0)
    gossip.relay(reference(2, round=6), [A, B], 20.0)
    assert gossip.relays([B], 5, 21.0) == [SendAnnounce((B,), (reference(2, round=6),))]
