"""Groups of experts through reducers: what a set of results does is what its contributions would do, rounded
to four bits, to what is shared by all and to each expert by its holders."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_cases import PEERS, bent, gradient_of, moved_by
from model_sizes import model_shape

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.model.flat_layout import expert_of, layout_of
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.optimizer.delta_codecs.delta_codec import sum_of
from swarmnet.optimizer.local_steps.expert_steps import ExpertShardSteps
from swarmnet.optimizer.local_steps.group_trainers import BALANCE_ROUNDS
from swarmnet.optimizer.local_steps.reduced_experts import ReducedExperts
from swarmnet.optimizer.local_steps.reduced_steps import QuantizedMean
from swarmnet.optimizer.method import ContributionError, method_of
from swarmnet.optimizer.replica import Replica
from swarmnet.optimizer.step import dense
from swarmnet.optimizer.tiling import plane_of, rows_of
from swarmnet.rounds.result_table import (
    MAX_CONTRIBUTORS,
    Contributor,
    Table,
    head_of,
    longest_head,
    tag_of,
)
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Experts, Sync

SHAPE = model_shape(
    width=32,
    layers=2,
    heads=2,
    kv_heads=2,
    inner=48,
    qk_norm=True,
    experts=Experts(num_experts=6, top_k=2, groups=3),
)
SHARDS = 3
RUN = Manifest(
    "experts", PEERS[0], stages=(2,), model=SHAPE,
    sync=Sync(method="local-steps", warmup_rounds=1, topology="sharded-reduce", shards=SHARDS),
)  # fmt: skip
LAYOUT = layout_of(parameter_shapes(SHAPE, whole(SHAPE)))
REDUCERS = [PeerId(f"reducer {number}") for number in range(4)]
GROUPS = dict(zip(PEERS, (0, 1, 1, 0, 1), strict=False))
"""Nobody trains group 2."""


def method(group=0, run=RUN):
    made = method_of(run, LAYOUT)
    assert isinstance(made, ReducedExperts)
    made.held.hold(group)
    return made


def told(peer, round=0, run=RUN, group=None):
    made = method(GROUPS[peer] if group is None else group, run)
    return made.contribute(made.held.of(gradient_of(LAYOUT, PEERS.index(peer))), 7, round, peer)


def as_contributor(peer):
    return Contributor.of(peer, ContributionId(tag_of(peer)), 100)


def cut(payloads, shards=range(SHARDS), run=RUN):
    """Slices by shard and contributor."""
    made = method(run=run)
    slices = {peer: made.slices(payload) for peer, payload in payloads.items()}
    return {shard: {as_contributor(peer): of[shard] for peer, of in slices.items()} for shard in shards}


def step_of(results, round=0, run=RUN, group=0):
    tally = method(group, run).tally(round)
    for reducer, result in results.items():
        tally.add(reducer, result)
    return dense(tally.step(), LAYOUT)


def directly(payloads, round=0, run=RUN):
    """int32 [layout.size]: the mean of those who speak of it as everybody would find it who heard them all,
    told in the numbers of results."""
    plain = ExpertShardSteps(run, LAYOUT, torch.device("cpu"))
    flat = torch.zeros(LAYOUT.size, dtype=torch.int32)
    said = {plane: [] for plane in range(len(LAYOUT.planes))}
    for payload in payloads.values():
        group, shared, experts = plain.cut(payload)
        for numbers, moves in (
            (plain.numbers_of(None), plain.shared.moves_of(shared)),
            (plain.numbers_of(group), plain.of_group.moves_of(experts)),
        ):
            for number, of_plane in zip(numbers, moves, strict=True):
                said[number].append(of_plane)
    for number, moves in said.items():
        if moves:
            plane = LAYOUT.planes[number]
            for rows in (rows_of(plane, shard, SHARDS) for shard in range(SHARDS)):
                mean = QuantizedMean.of(sum_of([one.rows(rows) for one in moves]), len(moves)).units()
                plane_of(flat, plane)[rows, plain.columns(plane, round)] = mean.to(torch.int32)
    of_padding = torch.ones(LAYOUT.size, dtype=torch.bool)
    for entry in LAYOUT.entries:
        of_padding[entry.place] = False
    return flat.masked_fill_(of_padding, 0)


def of_expert(flat, number):
    return torch.cat([flat[entry.place] for entry in LAYOUT.entries if expert_of(entry.name) == number])


PAYLOADS = {peer: told(peer) for peer in PEERS}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["local-steps", "sparta"])
def test_the_step_is_to_the_bit_the_mean_of_those_who_speak_of_it_in_the_numbers_of_results(count, name):
    run = replace(RUN, sync=replace(RUN.sync, method=name))
    payloads = {peer: told(peer, 3, run) for peer in PEERS[:count]}
    found = step_of({REDUCERS[0]: method(run=run).reduce(cut(payloads, run=run))}, 3, run)
    assert torch.equal(found, directly(payloads, 3, run))
    assert found.any()


def test_experts_without_a_holder_stay_as_they_are_and_each_other_moves_by_its_holders_alone():
    both = step_of({REDUCERS[0]: method().reduce(cut(PAYLOADS))})
    for expert in (4, 5):
        assert not of_expert(both, expert).any()
    alone = {peer: payload for peer, payload in PAYLOADS.items() if GROUPS[peer] == 0}
    of_first = step_of({REDUCERS[0]: method().reduce(cut(alone))})
    for expert in (0, 1):
        assert torch.equal(of_expert(both, expert), of_expert(of_first, expert))
    assert not torch.equal(both[LAYOUT.entries[0].place], of_first[LAYOUT.entries[0].place])


@pytest.mark.parametrize("split", [((0, 1, 2),), ((0,), (1, 2)), ((2,), (0,), (1,))])
def test_the_step_is_the_same_however_shards_are_split_among_results_and_whoever_reads_them(split):
    whole_round = step_of({REDUCERS[0]: method().reduce(cut(PAYLOADS))})
    results = {who: method(1).reduce(cut(PAYLOADS, of)) for who, of in zip(REDUCERS, split, strict=False)}
    for group, order in enumerate(permutations(results)):
        assert torch.equal(step_of({who: results[who] for who in order}, group=group % 3), whole_round)


def test_of_results_that_share_nobody_each_counts_for_as_many_as_speak_of_an_expert():
    first = {peer: PAYLOADS[peer] for peer in PEERS[:2]}
    second = {peer: PAYLOADS[peer] for peer in PEERS[2:]}
    made = [method().reduce(cut(part)) for part in (first, second)]
    both = step_of(dict(zip(REDUCERS, made, strict=False)))
    alone = [step_of({REDUCERS[0]: result}) for result in made]
    for expert, weights in ((0, (1, 1)), (2, (1, 2))):  # Group 0: one each; group 1: one and two.
        sums = sum(of_expert(step, expert).long() * w for step, w in zip(alone, weights, strict=True))
        count = sum(weights)
        expected = torch.div(2 * sums + count, 2 * count, rounding_mode="floor")
        assert torch.equal(of_expert(both, expert).long(), expected)


def test_a_result_is_a_function_of_the_slices_and_can_be_made_again_shard_by_shard():
    slices = cut(PAYLOADS)
    result = method().reduce(slices)
    backwards = {shard: dict(reversed(of.items())) for shard, of in reversed(slices.items())}
    assert method(2).reduce(backwards) == result
    for shard, held in slices.items():
        assert method(1).follows(result, shard, held)
        first = next(iter(held))
        assert not method().follows(result, shard, {one: data for one, data in held.items() if one != first})
        other = bytes([2]) + held[first][1:]
        assert not method().follows(result, shard, {**held, first: other}), "it spoke of another group"
        nowhere = bytes([3]) + held[first][1:]
        assert not method().follows(result, shard, {**held, first: nowhere}), "a group that there is not"


def test_whoever_says_another_group_in_each_slice_is_no_proof_against_an_honest_reducer():
    slices, liar = cut(PAYLOADS), as_contributor(PEERS[0])
    for shard, held in slices.items():
        held[liar] = bytes([shard]) + held[liar][1:]
    made = method()
    result = made.reduce(slices)
    made.check(result)
    assert all(made.follows(result, shard, held) for shard, held in slices.items())
    assert made.holding_in(result)[tag_of(PEERS[0]).hex()] == 0, "that of the first shard"


def test_by_their_results_peers_know_who_trains_what_and_spread_over_the_groups():
    methods = {peer: method(0) for peer in PEERS}
    went = []
    for round in range(4 * BALANCE_ROUNDS):
        payloads = {
            peer: made.contribute(made.held.of(gradient_of(LAYOUT, round)), 7, round, peer)
            for peer, made in methods.items()
        }
        results = {
            who: method().reduce(cut(payloads, [shard])) for shard, who in enumerate(REDUCERS[:SHARDS])
        }
        for made in methods.values():
            tally = made.tally(round)
            for who, result in results.items():
                tally.add(who, result)
            made.own.applied(round)
        went.append([peer for peer, made in methods.items() if made.held.goes_over(round + 1, peer)])
    assert max(map(len, went)) == 1, "one at a time"
    assert sorted(made.held.group for made in methods.values()) == [0, 0, 1, 1, 2]
    assert sorted(methods[PEERS[0]].held.holders()) == [1, 2, 2]
    tally = methods[PEERS[0]].tally(99)
    tally.add(REDUCERS[0], method().reduce(cut(PAYLOADS)))
    tally.remove(REDUCERS[0])
    assert methods[PEERS[0]].held.trainers.groups_in(99) == {}


def test_replicas_that_hear_of_a_result_late_are_equal_to_those_that_heard_in_time():
    results = {who: method().reduce(cut(PAYLOADS, [shard])) for shard, who in enumerate(REDUCERS[:SHARDS])}
    digests = []
    for late in (None, *results):
        replica = Replica(layout=LAYOUT, method=method(1), units=torch.zeros(LAYOUT.size, dtype=torch.int32))
        for who, result in results.items():
            if who != late:
                replica.add(0, who, result)
        replica.apply(0)
        if late is not None:
            replica.add(0, late, results[late])
        digests.append(replica.settle(0))
    assert len(set(digests)) == 1


def test_shards_that_come_back_are_in_the_own_weights_again_unless_their_experts_were_given_up():
    made, peer = method(1), PEERS[1]
    payload = made.contribute(made.held.of(gradient_of(LAYOUT, 1)), 7, 0, peer)
    made.own.applied(0)
    before = moved_by(made, LAYOUT)
    made.give_back(payload, 0, peer, (0, 2))
    changed = moved_by(made, LAYOUT) != before
    for number in (*made.held.numbers_of(None), *made.held.numbers_of(1)):
        plane = LAYOUT.planes[number]
        for shard in range(SHARDS):
            rows = rows_of(plane, shard, SHARDS)
            if rows.start < rows.stop and plane.chunk > 32:
                assert bool(plane_of(changed, plane)[rows].any()) == (shard != 1)
    gone = method(1)
    payload = gone.contribute(gone.held.of(gradient_of(LAYOUT, 1)), 7, 0, peer)
    gone.held.hold(0)
    gone.give_back(payload, 0, peer, (0, 1, 2))
    assert not any(of_expert(moved_by(gone, LAYOUT), expert).any() for expert in range(6))


def test_the_longest_result_is_that_of_all_groups_and_the_most_contributors():
    made = method()
    slices = made.slices(PAYLOADS[PEERS[0]])
    many = [Contributor(number.to_bytes(8, "big"), bytes(16), 1) for number in range(6)]
    of_all = {
        shard: {one: bytes([number % 3]) + slices[shard][1:] for number, one in enumerate(many)}
        for shard in range(SHARDS)
    }
    size = len(made.reduce(of_all)) - longest_head(SHARDS, 6) - SHARDS * 6
    assert size == made.longest_result - longest_head(SHARDS) - SHARDS * MAX_CONTRIBUTORS


@given(st.data())
def test_sums_that_a_liar_has_signed_are_refused_by_the_check_and_by_the_tally_alike(data):
    made = method()
    honest = made.reduce(cut({peer: PAYLOADS[peer] for peer in PEERS[:3]}))
    table, start = made.head(honest)
    sums = bent(honest[start:], data)
    result = head_of(table, sums) + sums
    tally = made.tally(0)
    try:
        made.check(result)
    except ContributionError:
        with pytest.raises(ContributionError):
            tally.add(REDUCERS[0], result)
        assert not dense(tally.step(), LAYOUT).any()
        return
    tally.add(REDUCERS[0], result)
    tally.step()


def test_a_table_of_groups_that_is_cut_short_or_names_what_there_is_not_is_refused():
    made = method()
    honest = made.reduce(cut(PAYLOADS, [0]))
    table, start = made.head(honest)
    sums = honest[start:]
    for wrong in (b"\x03" + sums[1:], sums[:3], b"", sums[:-1], sums + b"\0"):
        with pytest.raises(ContributionError):
            made.check(head_of(table, wrong) + wrong)
    with pytest.raises(ContributionError):
        made.check_slice(0, b"\x03" + made.slices(PAYLOADS[PEERS[0]])[0][1:])
    assert isinstance(table, Table)
