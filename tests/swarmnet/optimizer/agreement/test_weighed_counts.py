"""Weights through reducers: sums, comparisons and weights follow from the slices, or do not count."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_cases import bent, correlated_votes, manifest, shapes_of

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.agreement.comparison import FULL_WEIGHT
from swarmnet.optimizer.agreement.ledger import PROBATION_ROUNDS
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.method import method_of
from swarmnet.optimizer.replica import Replica
from swarmnet.rounds.result_table import Contributor, tag_of

SHARDS, HONEST, LIARS = 3, 6, 2
LAYOUT = layout_of(shapes_of(1))
REDUCED = manifest(
    method="sign-muon", fragments=1, topology="sharded-reduce", shards=SHARDS, weights="agreement"
)
WHOLE = replace(REDUCED, sync=replace(REDUCED.sync, topology="all-gather"))
PEERS = [PeerId(f"peer {number}") for number in range(HONEST + LIARS)]
REDUCERS = [PeerId(f"reducer {number}") for number in range(SHARDS)]


def payloads_of(round, size):
    signs_CN, _ = correlated_votes(len(PEERS), 8 * size, seed=round)
    signs_CN[HONEST:] *= -1
    bits_CN = (signs_CN < 0).astype(np.uint8)
    return {
        peer: np.packbits(bits_N, bitorder="little").tobytes()
        for peer, bits_N in zip(PEERS, bits_CN, strict=True)
    }


def results_of(method, payloads):
    """A result of each reducer, which has one shard."""
    found = {}
    for shard, reducer in enumerate(REDUCERS):
        slices = {
            Contributor.of(peer, ContributionId(tag_of(peer)), 1): method.slices(payload)[shard]
            for peer, payload in payloads.items()
        }
        found[reducer] = method.reduce({shard: slices}), shard, slices
    return found


def replica_of(settings, units=None, settled_round=-1):
    method = method_of(settings, LAYOUT)
    if units is None:
        units = torch.zeros(method.state.size, dtype=torch.int32)
    return method, Replica(layout=LAYOUT, method=method, units=units, settled_round=settled_round)


def play(method, replica, rounds, replaced=lambda round, results: results):
    digests = []
    for round in rounds:
        results = results_of(method, payloads_of(round, method.payload_bytes))
        for reducer, result in replaced(round, {who: of[0] for who, of in results.items()}).items():
            replica.add(round, reducer, result)
        replica.apply(round)
        digests.append(replica.settle(round))
    return digests


ROUNDS = PROBATION_ROUNDS + 6


def test_liars_lose_their_votes_and_who_joins_continues_from_the_state():
    method, replica = replica_of(REDUCED)
    digests = play(method, replica, range(ROUNDS))
    tags = [tag_of(peer) for peer in PEERS]
    assert method.ledger.weights(99, tags) == [FULL_WEIGHT] * HONEST + [0] * LIARS
    other, half = replica_of(REDUCED)
    play(other, half, range(ROUNDS - 3))
    joined = replica_of(REDUCED, half.settled_units(), ROUNDS - 4)
    assert play(*joined, range(ROUNDS - 3, ROUNDS)) == digests[ROUNDS - 3 :]


def test_the_step_is_that_of_whole_contributions_with_the_same_weights():
    method, replica = replica_of(REDUCED)
    play(method, replica, range(ROUNDS))
    _, whole = replica_of(WHOLE, replica.settled_units(), ROUNDS - 1)
    payloads = payloads_of(ROUNDS, method.payload_bytes)
    for reducer, (result, _, _) in results_of(method, payloads).items():
        replica.add(ROUNDS, reducer, result)
    for peer, payload in payloads.items():
        whole.add(ROUNDS, peer, payload)
    before = whole.live_floats(False)
    for each in (replica, whole):
        each.apply(ROUNDS)
    # The ledger is the same after all rounds, but one weighs by that of LAG rounds before.
    assert torch.equal(replica.live_floats(False), whole.live_floats(False))
    assert not torch.equal(whole.live_floats(False), before)


def test_results_follow_from_slices_and_nothing_else_passes():
    method, replica = replica_of(REDUCED)
    play(method, replica, range(ROUNDS))
    auditor = method_of(REDUCED, LAYOUT)
    results = results_of(method, payloads_of(ROUNDS, method.payload_bytes))
    for result, shard, slices in results.values():
        assert auditor.follows(result, shard, slices), "an auditor may have another ledger"
        first = next(iter(slices))
        turned = slices | {first: bytes(255 ^ byte for byte in slices[first])}
        assert not auditor.follows(result, shard, turned)
        fewer = dict(list(slices.items())[1:])
        assert not auditor.follows(result, shard, fewer)


def test_results_with_weights_of_no_recent_ledger_do_not_count():
    method, replica = replica_of(REDUCED)
    play(method, replica, range(ROUNDS))
    stranger = method_of(REDUCED, LAYOUT)
    stranger.ledger.load(method.ledger.numbers())
    liars = [tag_of(peer) for peer in PEERS]
    turned = [0] * HONEST + [FULL_WEIGHT] * LIARS
    stranger.ledger.marks = lambda age, tags: [turned[liars.index(tag)] for tag in tags]
    before = replica.live_floats(False)
    for reducer, (result, _, _) in results_of(stranger, payloads_of(ROUNDS, method.payload_bytes)).items():
        replica.add(ROUNDS, reducer, result)
    replica.apply(ROUNDS)
    assert torch.equal(replica.live_floats(False), before)


def test_results_are_no_longer_than_with_equal_votes_but_for_a_few_bytes_of_each_contributor():
    equal = method_of(replace(REDUCED, sync=replace(REDUCED.sync, weights="equal")), LAYOUT)
    payloads = payloads_of(0, equal.payload_bytes)
    sizes = [
        sum(len(result) for result, _, _ in results_of(method, payloads).values())
        for method in (equal, method_of(REDUCED, LAYOUT))
    ]
    assert sizes[1] - sizes[0] == SHARDS * len(PEERS) * 5


@given(st.data())
def test_bytes_of_strangers_are_refused_or_valid(data):
    method, replica = replica_of(REDUCED)
    result, _, _ = results_of(method, payloads_of(0, method.payload_bytes))[REDUCERS[0]]
    changed = bent(result, data)
    with suppress(ContributionError):
        method.check(changed)
        replica.add(0, REDUCERS[0], changed)
        replica.apply(0)
        replica.settle(0)


def test_a_result_in_which_nobody_has_weight_is_valid_and_has_no_sums():
    method, replica = replica_of(REDUCED)
    method.ledger.marks = lambda age, tags: [0] * len(tags)
    results = results_of(method, payloads_of(0, method.payload_bytes))
    for reducer, (result, shard, slices) in results.items():
        assert method.follows(result, shard, slices)
        replica.add(0, reducer, result)
    before = replica.live_floats(False)
    replica.apply(0)
    replica.settle(0)
    assert torch.equal(replica.live_floats(False), before)
