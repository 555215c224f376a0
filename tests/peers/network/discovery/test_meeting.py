"""A newcomer decides where to start from once it knows who of its group is there."""

from random import Random

import pytest

from peers.network.discovery.discovery import met
from swarmnet.identifiers import PeerId
from swarmnet.membership.machine import Membership


def membership(**peers):
    """`peers`: name -> "linked", "ready" (linked, and takes part), "silent" (did not answer), "dialing"."""
    known = Membership(PeerId("me"), 1, Random(1))
    for name, how in peers.items():
        peer = PeerId(name)
        known.recorded(peer, 0 if name.startswith("above") else 1, "worker", (), 1, b"record", 0.0)
        if how in ("linked", "ready"):
            known.linked(peer, 0.0)
            known.beat(peer, known.peers[peer].stage, how == "ready", 5, 0.1, 0.0)
        elif how == "silent":
            known.unlinked(peer, 0.0)
        known.dialing(peer, how == "dialing")
    return known


CROWD = {f"key {number}": "dialing" for number in range(100)}
"""Of whom records tell, and who never answer."""


@pytest.mark.parametrize(("ready", "expected"), [(4, False), (5, True)])
def test_a_crowd_that_never_answers_is_not_waited_for_where_enough_take_part(ready, expected):
    assert met(membership(**{f"p{number}": "ready" for number in range(ready)}, **CROWD)) == expected


def test_a_crowd_that_is_linked_and_takes_no_part_is_nobody_to_learn_from():
    linked = {f"false {number}": "linked" for number in range(20)}
    assert not met(membership(**linked, **CROWD))


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ({}, False),
        ({"above": "ready"}, False),
        ({"a": "linked", "b": "linked"}, True),
        ({"a": "ready", "dead": "silent"}, True),
        ({"a": "ready", "unknown": "dialing"}, False),
        ({"a": "ready", "not_tried": "?"}, False),
        ({"a": "linked", "b": "silent"}, False),
        ({"a": "silent", "b": "silent"}, False),
    ],
)
def test_the_silent_are_waited_for_only_where_nobody_trains(peers, expected):
    assert met(membership(**peers)) == expected
