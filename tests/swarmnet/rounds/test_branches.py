"""Chains of settled sets, and the rule by which two histories become one again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.rounds.history import (
    KEPT_LINKS,
    REMEMBERED_ROUNDS,
    Chain,
    Earlier,
    Fork,
    SettledSet,
    first_difference,
    must_give_up_branch,
)

sets = st.builds(SettledSet, st.integers(0, 20), st.binary(min_size=8, max_size=8))


def chain_of(settled: list[SettledSet]) -> Chain:
    chain = Chain()
    for entry in settled:
        chain.append(entry)
    return chain


@given(st.lists(sets, max_size=20), st.lists(sets, max_size=20), st.lists(sets, max_size=20))
def test_equal_chain_values_mean_equal_histories(
    common: list[SettledSet], mine: list[SettledSet], theirs: list[SettledSet]
) -> None:
    left, right = chain_of(common + mine), chain_of(common + theirs)
    for round in range(-1, len(common)):
        assert left.at(round) == right.at(round)
    shared = min(left.round, right.round)
    fork = first_difference(left, 0, right.part(0, right.round))
    assert (fork is None) == (left.at(shared) == right.at(shared))
    if fork is not None:
        assert left.at(fork.round - 1) == right.at(fork.round - 1)
        assert left.at(fork.round) != right.at(fork.round)


settled_rounds = st.tuples(st.integers(0, 200), st.integers(0, 200))
supporters = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5))


@given(sets, sets, settled_rounds, supporters)
def test_exactly_one_of_two_sides_gives_up(
    left: SettledSet, right: SettledSet, settled: tuple[int, int], on: tuple[int, int, int]
) -> None:
    if left == right:
        return
    gives_up = must_give_up_branch(Fork(5, left, right), settled[0], settled[1], on[0], on[1], sum(on))
    other = must_give_up_branch(Fork(5, right, left), settled[1], settled[0], on[1], on[0], sum(on))
    assert gives_up != other


def test_a_lone_peer_with_a_history_of_its_own_never_overrules_its_group() -> None:
    fork = Fork(0, SettledSet(3, b"\xff" * 8), SettledSet(9, b"\x00" * 8))
    assert not must_give_up_branch(fork, 40, 1000, my_supporters=4, their_supporters=1, in_sight=5)
    back = Fork(0, fork.theirs, fork.mine)
    assert must_give_up_branch(back, 1000, 40, my_supporters=1, their_supporters=4, in_sight=5)


def test_a_long_chain_forgets_its_beginning_and_keeps_its_value() -> None:
    long, whole = Chain(), []
    for number in range(3 * KEPT_LINKS):
        entry = SettledSet(number % 5, number.to_bytes(8, "big"))
        long.append(entry)
        whole.append(entry)
    assert long.round == 3 * KEPT_LINKS - 1
    assert long.at(0) is None
    assert long.settled(long.round) == whole[-1]
    resumed = Chain(long.round - 3, long.at(long.round - 3) or b"")
    for entry in whole[-3:]:
        resumed.append(entry)
    assert resumed.value == long.value
    assert long.part(long.round - 1, long.round + 5) == whole[-2:]
    assert long.part(0, 5) == []


def test_what_an_earlier_life_knew_counts_if_it_leads_to_the_chains_value() -> None:
    whole = Chain()
    for number in range(REMEMBERED_ROUNDS + 50):
        whole.append(SettledSet(number % 5, number.to_bytes(8, "big")))
    at = whole.round - 3
    value, earlier = whole.at(at), whole.earlier(at)
    assert value is not None
    assert earlier is not None
    assert len(earlier.sets) == REMEMBERED_ROUNDS
    resumed = Chain(at, value, earlier)
    resumed.append(whole.part(at + 1, at + 1)[0])
    assert (resumed.round, resumed.start) == (at + 1, at)
    assert all(resumed.at(round) == whole.at(round) for round in range(at - REMEMBERED_ROUNDS, at + 2))
    assert resumed.at(at - REMEMBERED_ROUNDS - 1) is None
    assert resumed.earlier(at + 1) == whole.earlier(at + 1)
    for false in (
        Earlier(earlier.before, earlier.sets[1:]),
        Earlier(value, earlier.sets),
        Earlier(value[1:], ()),
    ):
        assert Chain(at, value, false).at(at - 1) is None
    assert whole.earlier(whole.round + 1) is None
