"""Local steps through reducers: slices, what is added up of them, and what a set of results makes of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_cases import PEERS, bent, manifest, replica_of, shapes_of, stepped

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.model.fixed_point import UNIT, to_floats, to_units
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.delta_codecs.delta_codec import LARGEST_EXPONENT, sum_of
from swarmnet.optimizer.local_steps.local_steps import LocalSteps
from swarmnet.optimizer.local_steps.reduced_steps import MOST, QuantizedMean, ReducedSteps
from swarmnet.optimizer.method import ContributionError, add_own, method_of
from swarmnet.optimizer.replica import Replica
from swarmnet.optimizer.step import dense
from swarmnet.rounds.result_table import Contributor, Table, head_of, tag_of

PARTS = 4
SHARDS = 3
RUN = manifest(
    method="local-steps", topology="sharded-reduce", shards=SHARDS, learning_rate=2.0**-7, decay_rounds=10**9,
    fragments=PARTS,
)  # fmt: skip
LAYOUT = layout_of(shapes_of(2))
TINY = layout_of({"model.norm.weight": (3,), "lm_head.weight": (2, 5)})
"""Fewer chunks than shards: some of these have nothing to say."""
WIDE = replace(RUN, sync=replace(RUN.sync, fragments=64))
"""One number of the smallest chunks, so that an odd number of four bits is left over."""
REDUCERS = [PeerId(f"reducer {number}") for number in range(4)]


def as_contributor(peer, tokens=100):
    return Contributor.of(peer, ContributionId(tag_of(peer)), tokens)


def told_by(count=3, layout=LAYOUT, run=RUN, round=0):
    """Payloads by peer."""
    peers = PEERS[:count]
    return {peer: stepped(run, layout, n).own.encode_delta(round, peer) for n, peer in enumerate(peers)}


def cut(method, payloads, shards=None):
    """Slices by shard and contributor."""
    found = {}
    for peer, payload in payloads.items():
        for shard, data in enumerate(method.slices(payload)):
            if shards is None or shard in shards:
                found.setdefault(shard, {})[as_contributor(peer)] = data
    return found


def step_of(method, results, round=0):
    tally = method.tally(round)
    for peer, result in results.items():
        tally.add(peer, result)
    return dense(tally.step(), method.layout)


def exact_mean(layout, run, payloads, round=0):
    """float64 [layout.size]: of what was told, no louder than the median allows, in units; in the padding,
    too, where it is nothing to the weights."""
    plain = method_of(run, layout).own
    flat = torch.zeros(layout.size, dtype=torch.float64)
    moves = [list(plain.moves_of(payload)) for payload in payloads.values()]
    for number, plane in enumerate(layout.planes):
        mean_CM = sum_of([of[number] for of in moves]).double() / len(moves)
        plain.part(flat, plane, round).copy_(mean_CM)
    return flat


def real_ones(layout):
    """bool [layout.size]: all that is no padding."""
    found = torch.ones(layout.size, dtype=torch.bool)
    for start, stop in layout.padding:
        found[start:stop] = False
    return found


def test_a_manifest_that_says_sharded_gets_this_method_and_no_other_does():
    assert isinstance(method_of(RUN, LAYOUT), ReducedSteps)
    plain = method_of(replace(RUN, sync=replace(RUN.sync, topology="all-gather")), LAYOUT)
    assert isinstance(plain, LocalSteps)
    assert plain.reduced is None
    assert method_of(RUN, LAYOUT).reduced is not None


@pytest.mark.parametrize(("layout", "run"), [(LAYOUT, RUN), (LAYOUT, WIDE), (TINY, RUN), (TINY, WIDE)])
def test_slices_say_together_what_the_contribution_says(layout, run):
    method = stepped(run, layout)
    payload = method.own.encode_delta(0, PEERS[0])
    slices = method.slices(payload)
    assert [len(data) for data in slices] == list(method.slice_bytes)
    for shard, data in enumerate(slices):
        method.check_slice(shard, data)
    whole = list(method.own.moves_of(payload))
    parts = [list(method.own.moves_of(data, method._whole.rows(shard))) for shard, data in enumerate(slices)]
    for plane, of_plane in enumerate(whole):
        for field in ("negative", "exponents"):
            joined = torch.cat([getattr(part[plane], field) for part in parts])
            assert torch.equal(joined, getattr(of_plane, field))


def test_each_chunk_is_in_one_shard_and_shards_are_equally_large_but_for_one_chunk():
    method = method_of(RUN, LAYOUT)
    rows = [method._whole.rows(shard) for shard in range(SHARDS)]
    for plane, counts in zip(LAYOUT.planes, zip(*rows, strict=True), strict=True):
        assert sum(counts) == plane.chunks
        assert max(counts) - min(counts) <= 1


def test_what_a_result_says_of_each_shard_follows_from_its_slices_and_from_no_others():
    method, payloads = method_of(RUN, LAYOUT), told_by(4)
    slices = cut(method, payloads)
    result = method.reduce(slices)
    _, start = method.head(result)
    for shard, held in slices.items():
        assert method.follows(result, shard, dict(reversed(held.items())))
        some = dict(list(held.items())[1:])
        assert not method.follows(result, shard, some), "one is left out"
        first = next(iter(held))
        assert not method.follows(result, shard, {**held, first: held[first] + b"."}), "no slice"
        ends = start + sum(method._whole.number_bytes[other] for other in range(shard + 1))
        bent = bytearray(result)
        bent[ends - 1] ^= 0x10
        again = head_of(method.head(result)[0], bytes(bent[start:])) + bytes(bent[start:])
        assert [method.follows(again, other, slices[other]) for other in slices] == [
            other != shard for other in slices
        ]


def test_a_result_is_a_function_of_the_slices_whatever_the_order_of_their_arrival():
    method, payloads = method_of(RUN, LAYOUT), told_by(4)
    results = set()
    for order in permutations(payloads):
        slices = cut(method, {peer: payloads[peer] for peer in order})
        results.add(method.reduce(slices))
        results.add(method.reduce(dict(reversed(slices.items()))))
    assert len(results) == 1
    (result,) = results
    method.check(result)
    assert len(result) <= method.longest_result
    assert method.table(result).contributors == tuple(sorted(map(as_contributor, payloads)))


def test_shards_of_which_nothing_came_are_in_no_table():
    method = method_of(RUN, LAYOUT)
    slices = cut(method, told_by(2), shards=(1,))
    result = method.reduce({0: {}, **slices})
    table = method.table(result)
    assert set(table.shards) == {1}
    assert table.tokens(SHARDS) == 200 // SHARDS
    assert method.head(result)[0] == table
    head = result[: method.head(result)[1]]
    assert method.head(head)[0] == table, "also without its sums"
    with pytest.raises(ContributionError, match="do not match the hash in the head"):
        method.check(head)


@pytest.mark.parametrize(("layout", "run"), [(LAYOUT, RUN), (LAYOUT, WIDE), (TINY, RUN), (TINY, WIDE)])
def test_of_one_contributor_the_step_is_its_own_move(layout, run):
    """To the unit: its sizes are powers of two, and the grain of their mean is one that divides them."""
    method, payloads = method_of(run, layout), told_by(1, layout, run)
    result = method.reduce(cut(method, payloads))
    exact = exact_mean(layout, run, payloads) * real_ones(layout)
    assert torch.equal(step_of(method, {REDUCERS[0]: result}).double(), exact)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("round", [0, 5])
def test_a_step_is_as_near_to_the_mean_as_four_bits_go(count, round):
    """With a step of the numbers s, a number is within s/2 of the mean where that is at most 7.5 s, and 7 s
    beyond. s is the smallest power of two that is a third of the chunk's mean size m or more: so below
    max(1, 2/3 m), and a number is off by m/3 or half a unit at most wherever nothing is cut off."""
    method, payloads = method_of(RUN, LAYOUT), told_by(count, round=round)
    result = method.reduce(cut(method, payloads))
    step, exact = step_of(method, {REDUCERS[0]: result}, round), exact_mean(LAYOUT, RUN, payloads, round)
    for plane in LAYOUT.planes:
        mean_CM = method.own.part(exact, plane, round)
        said_CM = method.own.part(step, plane, round).double()
        size_C1 = mean_CM.abs().mean(dim=1, keepdim=True)
        grain_C1 = torch.exp2(torch.ceil(torch.log2(size_C1.clamp(min=1e-9) / 3)).clamp(min=0))
        real_CM = method.own.part(real_ones(LAYOUT), plane, round)
        inside = (mean_CM.abs() <= 7.5 * grain_C1) & real_CM
        outside = ~inside & real_CM
        assert ((said_CM - mean_CM).abs() <= grain_C1 / 2)[inside].all()
        assert torch.equal(said_CM[outside], (7 * grain_C1 * mean_CM.sign())[outside])
        assert (grain_C1 <= (2 / 3 * size_C1).clamp(min=1.0)).all()
        off, whole = (said_CM - mean_CM)[real_CM], mean_CM[real_CM]
        assert float(off.norm()) <= float(whole.norm()) / 3, "also with what is cut off"


SUMS = st.lists(st.integers(-(2**22), 2**22), min_size=5, max_size=5)


@given(st.lists(SUMS, max_size=4), st.integers(1, 700))
def test_numbers_are_read_as_they_were_written_and_as_near_as_they_can_be(sums, count):
    """Odd widths and no chunk at all too."""
    sum_CM = torch.tensor(sums, dtype=torch.int32).reshape(len(sums), 5)
    numbers = QuantizedMean.of(sum_CM, count)
    written = numbers.written()
    assert len(written) == len(sums) + -(-5 * len(sums) // 2)
    read = QuantizedMean.read(memoryview(written), len(sums), 5, torch.device("cpu"))
    assert torch.equal(read.units(), numbers.units())
    mean_CM, grain_C1 = sum_CM.double() / count, torch.exp2(numbers.exponents.double())
    inside = mean_CM.abs() <= (MOST + 0.5) * grain_C1
    assert ((numbers.units() - mean_CM).abs() <= grain_C1 / 2)[inside].all()
    assert (numbers.levels.abs() == MOST)[~inside].all()


@pytest.mark.parametrize("split", [[(0, 1, 2)], [(0,), (1,), (2,)], [(2, 0), (1,)]])
def test_the_step_is_the_same_however_shards_are_split_among_results(split):
    method, payloads = method_of(RUN, LAYOUT), told_by(3)
    whole = step_of(method, {REDUCERS[0]: method.reduce(cut(method, payloads))})
    results = {
        reducer: method.reduce(cut(method, payloads, shards))
        for reducer, shards in zip(REDUCERS, split, strict=False)
    }
    for order in permutations(results):
        assert torch.equal(step_of(method, {peer: results[peer] for peer in order}), whole)
    assert whole.any()


def test_results_of_one_shard_that_share_nobody_count_by_how_many_they_speak_for():
    """Peers saw different members, so two have reduced the same shards, one of them for two: the mean of
    three, off by half of the larger grain and half a unit at most."""
    method, payloads = method_of(RUN, LAYOUT), told_by(3)
    first = {peer: payloads[peer] for peer in PEERS[:2]}
    second = {PEERS[2]: payloads[PEERS[2]]}
    results = {
        REDUCERS[0]: method.reduce(cut(method, first)), REDUCERS[1]: method.reduce(cut(method, second))
    }  # fmt: skip
    alone = [step_of(method, {peer: result}).double() for peer, result in results.items()]
    together = step_of(method, results).double()
    assert float((together - (2 * alone[0] + alone[1]) / 3).abs().max()) <= 0.5


def test_of_equally_large_results_that_share_a_contributor_only_one_counts():
    method, payloads = method_of(RUN, LAYOUT), told_by(3)
    results = {
        REDUCERS[0]: method.reduce(cut(method, {peer: payloads[peer] for peer in PEERS[:2]}, (0,))),
        REDUCERS[1]: method.reduce(cut(method, {peer: payloads[peer] for peer in PEERS[1:3]}, (0,))),
    }
    winner = min(results, key=lambda contributor: method.draw.rank(0, 0, contributor))
    assert torch.equal(step_of(method, results), step_of(method, {winner: results[winner]}))


def test_one_that_is_loud_is_heard_no_louder_than_twice_the_others():
    method, payloads = method_of(RUN, LAYOUT), told_by(5)
    honest = method.reduce(cut(method, {peer: payloads[peer] for peer in PEERS[:4]}))
    start, shouted = 0, bytearray(payloads[PEERS[4]])
    for plane in LAYOUT.planes:
        shouted[start : start + plane.chunks] = bytes([LARGEST_EXPONENT]) * plane.chunks
        start += method.own.bytes_of([plane.chunks if other is plane else 0 for other in LAYOUT.planes])
    with_it = method.reduce(cut(method, {**payloads, PEERS[4]: bytes(shouted)}))
    largest = [int(step_of(method, {REDUCERS[0]: result}).abs().max()) for result in (honest, with_it)]
    # A grain is a power of two, and twice as large at the most where the mean size is less than doubled.
    assert largest[1] <= 2 * 2 * largest[0]


def test_a_round_without_results_or_with_few_shards_moves_only_what_it_speaks_of():
    method, payloads = method_of(RUN, LAYOUT), told_by(2)
    assert not dense(method.tally(0).step(), LAYOUT).any()
    some = step_of(method, {REDUCERS[0]: method.reduce(cut(method, payloads, (1,)))})
    whole = step_of(method, {REDUCERS[0]: method.reduce(cut(method, payloads))})
    assert some.any()
    assert torch.equal(some[some != 0], whole[some != 0])
    assert int((some != 0).sum()) < int((whole != 0).sum())
    for start, stop in LAYOUT.padding:
        assert not whole[start:stop].any()


def test_results_come_and_go_and_only_the_set_counts():
    method, payloads = method_of(RUN, LAYOUT), told_by(3)
    results = {
        reducer: method.reduce(cut(method, payloads, (shard,))) for shard, reducer in enumerate(REDUCERS[:3])
    }
    tally = method.tally(0)
    for peer, result in results.items():
        tally.add(peer, result)
    whole = dense(tally.step(), LAYOUT)
    tally.remove(REDUCERS[1])
    without = {peer: result for peer, result in results.items() if peer != REDUCERS[1]}
    assert torch.equal(dense(tally.step(), LAYOUT), step_of(method, without))
    with pytest.raises(KeyError):
        tally.remove(REDUCERS[1])
    tally.add(REDUCERS[1], results[REDUCERS[1]])
    assert torch.equal(dense(tally.step(), LAYOUT), whole)
    with pytest.raises(ValueError, match="already"):
        tally.add(REDUCERS[1], results[REDUCERS[1]])
    assert torch.equal(dense(tally.step(factor=500), LAYOUT), whole), "the factor had its say before"


SMALL = layout_of({"lm_head.weight": (64, 64), "model.norm.weight": (60,)})
FROM = {layout: told_by(2, layout, WIDE) for layout in (SMALL, TINY)}


@pytest.mark.parametrize("layout", [SMALL, TINY], ids=["small", "tiny"])
@given(st.data())
def test_bent_results_are_refused_by_the_check_and_by_the_tally_alike(layout, data):
    method, payloads = method_of(WIDE, layout), FROM[layout]
    result = bent(method.reduce(cut(method, payloads)), data)
    tally = method.tally(0)
    try:
        method.check(result)
    except ContributionError:
        with pytest.raises(ContributionError):
            tally.add(REDUCERS[0], result)
        assert not dense(tally.step(), layout).any()
        return
    tally.add(REDUCERS[0], result)
    dense(tally.step(), layout)


def resigned(result, method, change):
    """A result whose sums are changed and whose head names them."""
    table, start = method.head(result)
    sums = change(result[start:])
    return head_of(table, sums) + sums


@given(st.data())
def test_sums_that_a_liar_has_signed_are_refused_or_are_numbers_of_the_method(data):
    method, payloads = method_of(WIDE, SMALL), FROM[SMALL]
    honest = method.reduce(cut(method, payloads))
    result = resigned(honest, method, lambda sums: bent(sums, data))
    try:
        method.check(result)
    except ContributionError:
        return
    for _, spoken in method.shard_means(result):
        for numbers in (of_plane.numbers for of_plane in spoken):
            assert int(numbers.levels.abs().max() if numbers.levels.numel() else 0) <= MOST
            assert int(numbers.exponents.max() if numbers.exponents.numel() else 0) <= LARGEST_EXPONENT
    assert int(step_of(method, {REDUCERS[0]: result}).abs().max()) <= MOST << LARGEST_EXPONENT


def test_each_thing_that_no_honest_reducer_says_is_refused():
    method, payloads = method_of(WIDE, TINY), FROM[TINY]
    honest = method.reduce(cut(method, payloads))
    rows = [method._whole.rows(shard) for shard in sorted(method.table(honest).shards)]
    assert [0, 0] in rows, "a shard without any chunk"
    first = bytes([LARGEST_EXPONENT + 1])
    with pytest.raises(ContributionError, match="above 20"):
        method.check(resigned(honest, method, lambda sums: first + sums[1:]))
    with pytest.raises(ContributionError, match="unused four-bit code"):
        method.check(resigned(honest, method, lambda sums: sums[:-1] + b"\0"))
    for change in (lambda sums: sums[:-1], lambda sums: sums + b"\0", lambda sums: b""):
        with pytest.raises(ContributionError, match="its table requires"):
            method.check(resigned(honest, method, change))
    with pytest.raises(ContributionError, match="too few"):
        method.check(b"")


def test_four_bits_past_the_end_are_zero():
    numbers = QuantizedMean.of(torch.tensor([[5, -3, 2]], dtype=torch.int32), 1)
    written = bytearray(numbers.written())
    written[-1] |= 0x10
    with pytest.raises(ContributionError, match="past the end"):
        QuantizedMean.read(memoryview(written), 1, 3, torch.device("cpu"))


@given(st.integers(0, SHARDS - 1), st.data())
def test_bent_slices_are_refused_or_can_be_added_up(shard, data):
    method, payloads = method_of(WIDE, SMALL), FROM[SMALL]
    slices = cut(method, payloads)
    honest = slices[shard][as_contributor(PEERS[0])]
    changed = bent(honest, data) if honest else data.draw(st.binary(max_size=3))
    try:
        method.check_slice(shard, changed)
    except ContributionError:
        return
    slices[shard][as_contributor(PEERS[0])] = changed
    method.check(method.reduce(slices))


def test_tiny_layouts_go_through_all_of_it_though_some_shards_have_nothing_to_say():
    """Until the weights: two peers tell, two reduce a part each, and one's replica settles it."""
    for run in (RUN, WIDE, replace(RUN, sync=replace(RUN.sync, shards=64))):
        methods = {peer: stepped(run, TINY, number) for number, peer in enumerate(PEERS[:2])}
        method = methods[PEERS[0]]
        half = range(run.sync.shards // 2)
        other_half = range(run.sync.shards // 2, run.sync.shards)
        replica = Replica(layout=TINY, method=method, units=torch.zeros(TINY.size, dtype=torch.int32))
        for round in range(run.sync.local_steps.fragments):
            payloads = {peer: of.own.encode_delta(round, peer) for peer, of in methods.items()}
            for reducer, shards in zip(REDUCERS, (half, other_half), strict=False):
                result = method.reduce(cut(method, payloads, shards))
                assert len(result) <= method.longest_result
                replica.add(round, reducer, result)
            replica.apply(round)
            replica.settle(round)
        moved = replica.settled_units()
        assert int((moved != 0).sum()) > 6, "most of the thirteen weights have moved"
        assert not moved[~real_ones(TINY)].any()


def own_moves(method, applied):
    own = torch.zeros(LAYOUT.size)
    add_own(method.own, own, LAYOUT, applied)
    return own


def test_shards_that_come_back_are_in_the_own_weights_again_and_the_others_are_not():
    method = stepped(RUN, LAYOUT)
    before = own_moves(method, -1)
    payload = method.own.encode_delta(0, PEERS[0])
    gone = own_moves(method, 0)
    method.give_back(payload, 0, PEERS[0], (0, 2))
    after = own_moves(method, 0)
    for plane in LAYOUT.planes:
        parts = [method.own.part(flat, plane, 0) for flat in (before, gone, after)]
        for shard in range(SHARDS):
            rows = slice(plane.chunks * shard // SHARDS, plane.chunks * (shard + 1) // SHARDS)
            then, without, now = (part[rows] for part in parts)
            assert torch.allclose(now, without if shard == 1 else then, atol=UNIT)
    method.give_back(payload, 0, PEERS[0], (1,))
    assert torch.allclose(own_moves(method, 0), before, atol=UNIT)


def test_what_came_back_in_all_its_shards_is_what_comes_back_at_once():
    by_shard, at_once = stepped(RUN, LAYOUT), stepped(RUN, LAYOUT)
    payload = by_shard.own.encode_delta(0, PEERS[0])
    assert at_once.own.encode_delta(0, PEERS[0]) == payload
    for shard in range(SHARDS):
        by_shard.give_back(payload, 0, PEERS[0], (shard,))
    at_once.give_back(payload, 0, PEERS[0])
    assert torch.equal(own_moves(by_shard, 0), own_moves(at_once, 0))


def test_replicas_that_hear_of_a_result_late_are_equal_to_those_that_heard_in_time():
    method = method_of(RUN, LAYOUT)
    rounds = {
        round: {
            REDUCERS[0]: method.reduce(cut(method, payloads, (0, 1))),
            REDUCERS[1]: method.reduce(cut(method, payloads, (2,))),
        }
        for round, payloads in ((round, told_by(2, round=round)) for round in range(3))
    }
    early, late = (replica_of(stepped(RUN, LAYOUT, 7 + n), LAYOUT) for n in range(2))
    for round, results in rounds.items():
        for peer, result in results.items():
            early.add(round, peer, result)
            if peer != REDUCERS[1]:
                late.add(round, peer, result)
        early.apply(round)
        late.apply(round)
    for round, results in rounds.items():
        late.add(round, REDUCERS[1], results[REDUCERS[1]])
    assert [early.settle(round) for round in rounds] == [late.settle(round) for round in rounds]
    assert torch.equal(early.settled_units(), late.settled_units())
    assert torch.equal(to_units(to_floats(early.settled_units())), early.settled_units())


def test_an_empty_sum_is_told_as_nothing():
    numbers = QuantizedMean.of(torch.zeros(2, 3, dtype=torch.int32), 3)
    assert not numbers.units().any()
    assert not numbers.exponents.any()


def test_the_longest_result_is_that_of_all_shards_and_the_most_contributors():
    method, payloads = method_of(RUN, LAYOUT), told_by(2)
    result = method.reduce(cut(method, payloads))
    table, start = method.head(result)
    crowd = [Contributor(bytes(6) + n.to_bytes(2, "big"), bytes(8), 1) for n in range(1024)]
    largest = Table(dict.fromkeys(table.shards, frozenset(crowd)))
    sums = result[start:]
    assert len(head_of(largest, sums) + sums) == method.longest_result
