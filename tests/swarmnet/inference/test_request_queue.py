"""Who gets a place among the requests that wait, and whose turn it is."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.inference.request_queue import Client, RequestQueue

PLACES, BYTES = 16, 1000


def client(number: int, range: str = "", is_first: bool = False) -> Client:
    return Client(PeerId(f"key {number}"), range or f"range {number}", is_first)


def queue() -> RequestQueue[int]:
    return RequestQueue(PLACES, BYTES, Random(1))


def served_among(greedy: list[Client], honest: Client, seconds: float) -> Counter[PeerId]:
    """Each greedy client fills up to four places whenever 50 ms have passed, until it is declined, as it then
    would be again. The honest one asks once, 0.2 s after it was declined or served. One request a tenth of a
    second is served."""
    waiting, served = queue(), Counter[PeerId]()
    for tick in range(int(seconds / 0.05)):
        now = 0.05 * tick
        for each in greedy:
            for _ in range(4 - waiting.count(each.peer)):
                if not waiting.add(each, 0, 1, now)[0]:
                    break
        if tick % 4 == 0 and not waiting.count(honest.peer):
            waiting.add(honest, 0, 1, now)
        if tick % 2 == 0:
            served[waiting.pop(now).client.peer] += 1
    return served


@pytest.mark.parametrize(
    ("honest", "least"),
    [
        (client(99), 100),
        (client(99, "crowd"), 0),
        (client(99, "crowd", is_first=True), 100),
    ],
    ids=["another network", "the same network", "a member"],
)
def test_many_keys_of_one_network_share_what_one_client_gets(honest, least):
    served = served_among([client(number, "crowd") for number in range(18)], honest, 60.0)
    assert served[honest.peer] >= least


@pytest.mark.parametrize("keys", [4, 18, 60])
def test_where_each_has_a_network_of_its_own_a_draw_gives_all_the_same(keys):
    served = served_among([client(number) for number in range(keys)], client(99), 120.0)
    assert served[client(99).peer] > 0.3 * served.total() / (keys + 1)


def test_members_make_others_give_way_and_come_first():
    waiting = queue()
    for number in range(PLACES):
        waiting.add(client(number), number, 1, 0.0)
    has_place, removed = waiting.add(client(99, is_first=True), 99, 1, 0.0)
    assert has_place
    assert len(removed) == 1
    assert waiting.pop(0.0).item == 99


ASKS = st.tuples(st.integers(0, 30), st.integers(0, 6), st.booleans(), st.integers(0, 400), st.booleans())


@given(st.lists(ASKS, max_size=120))
def test_places_and_bytes_are_kept_and_nothing_is_lost(asks):
    waiting, there, now = queue(), Counter[int](), 0.0
    for number, (key, network, is_first, size, pops) in enumerate(asks):
        now += 0.1
        has_place, removed = waiting.add(client(key, f"r{network}", is_first), number, size, now)
        there.update([number] if has_place else [])
        there.subtract(each.item for each in removed)
        if pops and len(waiting):
            there[waiting.pop(now).item] -= 1
        assert len(waiting) == there.total() <= PLACES
    left = [waiting.pop(now) for _ in range(len(waiting))]
    assert sum(each.size for each in left) <= BYTES
    assert {each.item for each in left} == {number for number, count in there.items() if count}
