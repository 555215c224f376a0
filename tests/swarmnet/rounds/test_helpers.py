"""How reducers are drawn by uplink and role, and how peers fetch results where helpers only reduce."""

from __future__ import annotations

import hashlib
from collections import Counter
from math import ceil, inf, sqrt

import pytest

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.membership.overlay import choose_some
from swarmnet.rounds.events import GroupSizeChanged, Reference, RequestContributions
from swarmnet.rounds.fetch_scheduler import HELPER_SECONDS, FetchScheduler
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.history import Chain
from swarmnet.rounds.reducing import ReductionSchedule
from swarmnet.rounds.result_table import (
    UPLINK_LEVELS,
    WORKERS_SHARD,
    Contributor,
    Draw,
    ReducerClass,
    Table,
    class_of,
    counting,
)
from swarmnet.run.schema import Rounds

PEERS = [PeerId(f"peer {number}") for number in range(12)]
HELPERS = [PeerId(f"helper {number}") for number in range(3)]
ME, A, B = (PeerId(name) for name in ("me", "a", "b"))
SHARDS = 16
DRAW = Draw(b"run", 1, SHARDS, 2)
VALUE = b"of the chain"
HELPS = ReducerClass(is_helper=True)
OF_HELPERS = dict.fromkeys(HELPERS, HELPS)


def reference(number: int, peer: PeerId = B) -> Reference:
    return Reference(0, peer, ContributionId(b"%016d" % number), 100)


def drawn(classes: dict[PeerId, ReducerClass], blocks: int) -> Counter[PeerId]:
    """How many shards of these blocks each peer reduces."""
    return Counter(peer for round in range(blocks) for peer in DRAW.reducers(round, PEERS, VALUE, classes))


@pytest.mark.parametrize("level", range(len(UPLINK_LEVELS) + 1))
def test_equal_lines_draw_as_by_the_smallest_hash_alone(level: int):
    smallest = tuple(
        min(
            PEERS,
            key=lambda peer: hashlib.sha256(b"run" + VALUE + f"\n3\n{shard}\n{peer}".encode()).digest(),
        )
        for shard in range(SHARDS)
    )
    assert DRAW.reducers(3, PEERS, VALUE, dict.fromkeys(PEERS, ReducerClass(level))) == smallest
    assert DRAW.reducers(3, PEERS, VALUE) == smallest


@pytest.mark.parametrize("level", range(1, len(UPLINK_LEVELS) + 1))
def test_each_level_doubles_the_chance_and_the_highest_is_a_bound(level: int):
    """A peer of weight w among n others has w / (w + n) of the shards, within five deviations."""
    blocks, weight = 60, 2**level
    count = drawn({PEERS[0]: ReducerClass(level)}, blocks)[PEERS[0]]
    share, shards = weight / (weight + len(PEERS) - 1), SHARDS * blocks
    assert abs(count - shards * share) <= ceil(5 * sqrt(shards * share * (1 - share)))
    assert weight <= 8


def test_a_claimed_upload_gives_a_level_and_no_claim_the_lowest():
    assert [class_of(up, inf, False).level for up in (0, 4_999_999, 5_000_000, 2e7, 8e7, 2**62)] == [
        0, 0, 1, 2, 3, 3
    ]  # fmt: skip
    assert class_of(0, inf, True) == HELPS


def test_what_others_measured_bounds_a_claim_and_raises_none():
    assert [class_of(2**62, up, False).level for up in (1, 4_999_999, 5_000_000, 2e7, inf)] == [0, 0, 1, 2, 3]
    assert class_of(5e6, 2**62, False).level == 1
    assert class_of(2**62, 5e6, True) == ReducerClass(1, is_helper=True)
    assert class_of(2**62, 4_999_999, True) == ReducerClass(0), "all would wait for it in each round"


def test_who_goes_changes_only_its_own_shards_whatever_the_levels():
    classes = {peer: ReducerClass(number % 4) for number, peer in enumerate(PEERS)}
    for gone in PEERS:
        others = [peer for peer in PEERS if peer != gone]
        before, after = (DRAW.reducers(0, of, VALUE, classes) for of in (PEERS, others))
        assert all(now == then for now, then in zip(after, before, strict=True) if then != gone)


def test_helpers_reduce_all_shards_but_one_and_without_them_workers_do():
    reducers = DRAW.reducers(0, [*PEERS, *HELPERS], VALUE, OF_HELPERS)
    assert reducers[WORKERS_SHARD] in PEERS
    assert set(reducers[WORKERS_SHARD + 1 :]) <= set(HELPERS)
    assert DRAW.reducers(0, PEERS, VALUE, OF_HELPERS) == DRAW.reducers(0, PEERS, VALUE)
    assert set(DRAW.reducers(0, HELPERS, VALUE, OF_HELPERS)) <= set(HELPERS), "no worker is left"


def test_a_helper_that_leaves_the_others_out_counts_nowhere_though_it_has_all_shards_but_one():
    of = [Contributor.of(peer, ContributionId(bytes([number]) * 16), 1) for number, peer in enumerate(PEERS)]
    alone = Table({shard: frozenset(of[:1]) for shard in range(SHARDS) if shard != WORKERS_SHARD})
    honest = Table({WORKERS_SHARD: frozenset(of)})
    counted = counting({HELPERS[0]: alone, PEERS[1]: honest}, DRAW, 0)
    assert counted == {shard: (PEERS[1],) if shard == WORKERS_SHARD else () for shard in range(SHARDS)}


def test_an_avoided_helper_is_replaced_by_another_and_the_last_one_by_workers():
    schedule = ReductionSchedule(
        rules=Rounds(), draw=Draw(b"run", 4, SHARDS, 2), me=ME, same_branch_peers={}, chain=Chain()
    )
    schedule.members, schedule.classes = frozenset((ME, A, *HELPERS[:2])), OF_HELPERS
    assert schedule.helpers == frozenset(HELPERS[:2])
    schedule.avoid(HELPERS[0], 0)
    assert set(schedule.reducers(0)) - {ME, A} == {HELPERS[1]}
    schedule.avoid(HELPERS[1], 0)
    assert set(schedule.reducers(0)) == {ME, A}


def test_results_are_fetched_from_helpers_and_from_others_only_if_those_are_late_or_gone():
    neighbours = {A, B, HELPERS[0]}
    pulls = FetchScheduler(ME, neighbours)
    pulls.helpers = frozenset(HELPERS)
    one, two = reference(1), reference(2, HELPERS[0])
    assert pulls.offered(B, [one], 0.0) == [], "not even from the reducer itself"
    assert pulls.offered(A, [two], 0.0) == []
    assert pulls.offered(HELPERS[0], [one, two], 0.3) == [RequestContributions(HELPERS[0], (one.id, two.id))]
    late = reference(3)
    pulls.offered(B, [late], 1.0)
    assert pulls.next_deadline() <= 1.0 + HELPER_SECONDS
    assert RequestContributions(B, (late.id,)) in pulls.again(1.0 + HELPER_SECONDS)
    neighbours.remove(HELPERS[0])
    gone = reference(4)
    assert pulls.offered(B, [gone], 5.0) == [RequestContributions(B, (gone.id,))]


def test_one_helper_fetches_from_a_worker_and_the_others_wait_for_it():
    neighbours = {*HELPERS, A}
    first = next(iter(choose_some(A, HELPERS, 1)))
    for me in HELPERS:
        pulls = FetchScheduler(me, neighbours - {me})
        pulls.helpers = frozenset(HELPERS)
        assert bool(pulls.offered(A, [reference(1, A)], 0.0)) == (me == first)
    alone = FetchScheduler(HELPERS[0], {A})
    alone.helpers = frozenset(HELPERS[:1])
    assert alone.offered(A, [reference(1, B)], 0.0), "it is the only one"


def test_rounds_learn_the_helpers_with_the_size_of_the_group():
    rounds = GroupRounds(rules=Rounds(), me=ME, settled=-1, now=0.0, draw=DRAW)
    rounds.handle(GroupSizeChanged(4, frozenset((A, B, HELPERS[0])), OF_HELPERS), 0.0)
    assert rounds.pulls.helpers == {HELPERS[0]}
    assert rounds.reducing is not None
    assert rounds.reducing.reducers(0)[1:] == (HELPERS[0],) * (SHARDS - 1)
