"""Weights in a replica: they are exact when a round settles, however its contributions came."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.state_layout import with_zero_momentum
from swarmnet.optimizer.agreement.ledger import LAG
from swarmnet.optimizer.method import method_of
from swarmnet.optimizer.replica import Replica
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync

LAYOUT = layout_of({"lm_head.weight": (40, 64), "model.norm.weight": (40,)})
HONEST, LIARS, ROUNDS = 6, 2, 12
PEERS = [PeerId(f"peer {number}") for number in range(HONEST + LIARS)]
SETTINGS = {
    weights: Manifest("test", PeerId("owner"), sync=Sync(method="sign-muon", fragments=1, weights=weights))
    for weights in ("agreement", "equal")
}


def payloads():
    """Contributions by (round, peer): honest ones have 3 in 10 bits wrong, those of liars are turned."""
    size, generator, made = (
        method_of(SETTINGS["agreement"], LAYOUT).payload_bytes,
        np.random.default_rng(0),
        {},
    )
    for round in range(ROUNDS):
        right = generator.integers(0, 2, 8 * size, np.uint8)
        for number, peer in enumerate(PEERS):
            bits = right ^ (generator.random(8 * size) < 0.3) ^ (number >= HONEST)
            made[round, peer] = np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()
    return made


PAYLOADS = payloads()


def replica(weights="agreement", units=None, settled_round=-1):
    method = method_of(SETTINGS[weights], LAYOUT)
    if units is None:
        units = with_zero_momentum(torch.arange(LAYOUT.size, dtype=torch.int32), method.state)
    return Replica(layout=LAYOUT, method=method, units=units, settled_round=settled_round)


def chain(round):
    return round.to_bytes(12, "big")


def settle_in_order(made, rounds, sets=PAYLOADS):
    """Play rounds in which everything is in time, and return the digests."""
    digests = []
    for round in rounds:
        for peer in PEERS:
            if (round, peer) in sets:
                made.add(round, peer, sets[round, peer])
        made.apply(round)
        digests.append(made.settle(round, chain=chain(round)))
    return digests


STRAIGHT = replica()
DIGESTS = settle_in_order(STRAIGHT, range(ROUNDS))


def test_liars_lose_their_votes_and_the_steps_are_those_of_the_honest_peers():
    alone = {key: payload for key, payload in PAYLOADS.items() if key[1] in PEERS[:HONEST]}
    weighed, honest = replica(units=STRAIGHT.settled_units(), settled_round=ROUNDS - 1), replica("equal")
    for peer in PEERS:
        weighed.add(ROUNDS, peer, PAYLOADS[0, peer])
        if (0, peer) in alone:
            honest.add(0, peer, PAYLOADS[0, peer])
    before = weighed.live_floats(False)
    weighed.apply(ROUNDS)
    honest.apply(0)
    step = (weighed.live_floats(False) - before).sign()
    expected = (honest.live_floats(False) - to_floats(torch.arange(LAYOUT.size, dtype=torch.int32))).sign()
    assert torch.equal(step, expected)
    assert step.count_nonzero() > LAYOUT.parameters / 2


@given(st.data())
def test_weights_do_not_depend_on_when_contributions_came(data):
    """Contributions come before or after their round is applied, up to `window` rounds late, and rounds
    settle late. The settled state and its digest are the same, the live weights in the end too."""
    made = replica()
    digests, late = [], []
    window = data.draw(st.integers(0, LAG + 2), label="window")
    for round in range(ROUNDS):
        for peer in PEERS:
            delay = data.draw(st.sampled_from([0, 0, 0, 1, 2]), label="delay")
            late.append((round + min(delay, window), round, peer))
        for due in [each for each in late if each[0] <= round]:
            late.remove(due)
            made.add(*due[1:], PAYLOADS[due[1:]])
        made.apply(round)
        if round >= window:
            digests.append(made.settle(round - window, chain=chain(round - window)))
    for due in late:
        made.add(*due[1:], PAYLOADS[due[1:]])
    for round in range(len(digests), ROUNDS):
        digests.append(made.settle(round, chain=chain(round)))
    assert digests == DIGESTS
    assert torch.equal(made.settled_units(), STRAIGHT.settled_units())
    assert torch.equal(made.live_floats(False), STRAIGHT.live_floats(False))


@pytest.mark.parametrize("joined", [3, 9])
def test_a_newcomer_continues_from_the_settled_state_alone(joined):
    until = replica()
    settle_in_order(until, range(joined))
    newcomer = replica(units=until.settled_units(), settled_round=joined - 1)
    assert settle_in_order(newcomer, range(joined, ROUNDS)) == DIGESTS[joined:]


def test_a_fork_that_is_given_up_leaves_nothing_in_the_ledger():
    """One side of a fork lacks the honest peers 0 and 1 from round 5 on. It replaces its state."""
    side = {key: payload for key, payload in PAYLOADS.items() if key[0] < 5 or key[1] not in PEERS[:2]}
    other, ours = replica(), replica()
    assert settle_in_order(other, range(9), side)[8] != DIGESTS[8]
    settle_in_order(ours, range(9))
    back = replica(units=ours.settled_units(), settled_round=8)
    assert settle_in_order(back, range(9, ROUNDS)) == DIGESTS[9:]


def test_open_rounds_are_weighed_again_when_another_round_settles():
    made = replica()
    for round in range(ROUNDS):
        for peer in PEERS:
            made.add(round, peer, PAYLOADS[round, peer])
        made.apply(round)
    live = made.live_floats(False)
    for round in range(ROUNDS):
        made.settle(round, chain=chain(round))
    assert made.corrections
    assert not torch.equal(made.live_floats(False), live)
    assert made.digest() == DIGESTS[-1]


def test_a_late_contribution_without_weight_corrects_nothing_and_is_recorded():
    newcomer, votes = PeerId("newcomer"), PAYLOADS[1, PEERS[0]]
    late, in_time = (replica(units=STRAIGHT.settled_units(), settled_round=ROUNDS - 1) for _ in range(2))
    in_time.add(ROUNDS, newcomer, votes)
    for made in (late, in_time):
        for peer in PEERS[:-1]:
            made.add(ROUNDS, peer, PAYLOADS[0, peer])
        made.apply(ROUNDS)
    live = late.live_floats(False)
    late.add(ROUNDS, newcomer, votes)
    assert late.corrections == 0
    late.add(ROUNDS, PEERS[-1], PAYLOADS[0, PEERS[-1]])
    late.remove(ROUNDS, PEERS[-1])
    assert torch.equal(late.live_floats(False), live)
    assert torch.equal(in_time.live_floats(False), live)
    assert late.settle(ROUNDS, chain=chain(ROUNDS)) == in_time.settle(ROUNDS, chain=chain(ROUNDS))


def test_votes_that_count_in_full_make_the_step_of_equal_votes():
    steps = []
    for settings in SETTINGS.values():
        tally = method_of(settings, LAYOUT).tally(0)
        for peer in PEERS:
            tally.add(peer, PAYLOADS[0, peer])
        steps.append(tally.step().signs)
    assert torch.equal(*steps)


def test_a_peers_agreement_with_the_others_leaves_its_own_vote_out():
    made = method_of(SETTINGS["agreement"], LAYOUT)
    payload = made.contribute(torch.ones(LAYOUT.size), 1, 0, PEERS[0])
    tally = made.tally(0)
    tally.add(PEERS[0], payload)
    assert tally.vote_agreement(PEERS[0]).alone == 8 * made.payload_bytes
