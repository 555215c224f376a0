"""A newcomer decides where to start from once it knows who of its group is there."""

import asyncio
from random import Random
from types import SimpleNamespace

import pytest

from peers.network.discovery.discovery import RECORD_LOOKS, PeerDiscovery, met
from swarmnet.identifiers import PeerId
from swarmnet.membership.membership import Membership


def membership(**peers):
    """`peers`: name -> "linked", "ready" (linked, and takes part), "silent" (did not answer), "dialing"."""
    known = Membership(me=PeerId("me"), stage=1, chance=Random(1))
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


class SlowDirectory:
    """`RecordAnnouncer` whose look-ups end when the test says so."""

    def __init__(self):
        self.answer = asyncio.Event()

    async def look_up(self, stage):
        await self.answer.wait()
        return {}


async def test_two_looks_at_a_slow_directory_end_though_both_drop_the_same_stage():
    """A starting peer looks for its group while the regular look-ups have begun."""
    presence = SlowDirectory()
    links = SimpleNamespace(
        membership=Membership(me=PeerId("me"), stage=0, chance=Random(1)),
        learn_found=lambda records: None,
        known=dict,
    )
    discovery = PeerDiscovery(presence=presence, neighbourhood=links, stages=4, notify=lambda *_: None)
    looks = [asyncio.create_task(discovery.look()) for _ in range(RECORD_LOOKS + 2)]
    await asyncio.sleep(0)
    presence.answer.set()
    await asyncio.wait_for(asyncio.gather(*looks), 5.0)
