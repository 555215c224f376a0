"""Peers that each train a group of experts: what a round does to whom, and who goes over to another group."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import PEERS, bent, gradient_of, moved_by
from model_sizes import model_shape

from swarmnet.model.flat_layout import expert_of, layout_of, some_planes
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.optimizer.delta_codecs.delta_codec import LARGEST_EXPONENT
from swarmnet.optimizer.local_steps.group_trainers import BALANCE_ROUNDS, ExpertAssignment
from swarmnet.optimizer.local_steps.local_steps import LocalSteps
from swarmnet.optimizer.method import ContributionError, GradientError, method_of
from swarmnet.optimizer.replica import Replica
from swarmnet.optimizer.step import dense
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import Experts, Sync

SHAPE = model_shape(
    width=32,
    layers=2,
    heads=2,
    kv_heads=2,
    inner=48,
    qk_norm=True,
    experts=Experts(num_experts=4, top_k=2, groups=2),
)
RUN = Manifest(
    "experts", PEERS[0], stages=(2,), model=SHAPE, sync=Sync(method="local-steps", warmup_rounds=1)
)  # fmt: skip
LAYOUT = layout_of(parameter_shapes(SHAPE, whole(SHAPE)))


def method(group=0, run=RUN):
    made = method_of(run, LAYOUT)
    made.held.hold(group)
    return made


def told(group, peer, round=0, seed=0, run=RUN):
    made = method(group, run)
    return made.contribute(made.of(gradient_of(LAYOUT, seed)), 7, round, peer)


def of_expert(flat, number):
    return torch.cat([flat[entry.place] for entry in LAYOUT.entries if expert_of(entry.name) == number])


def applied(payloads, run=RUN):
    """int32 [layout.size]: what a round of these does, by peer."""
    tally = method(run=run).tally(0)
    for peer, payload in payloads.items():
        tally.add(peer, payload)
    return dense(tally.step(), LAYOUT)


def test_experts_are_a_stretch_of_the_flat_vector_each_and_the_planes_of_some_are_a_layout_of_their_own():
    last = [number for number, plane in enumerate(LAYOUT.planes) if plane.expert == 3]
    part = some_planes(LAYOUT, last)
    assert [plane.expert for plane in LAYOUT.planes][-4:] == [0, 1, 2, 3]
    assert {expert_of(entry.name) for entry in part.entries} == {3}
    assert part == layout_of({entry.name: entry.shape for entry in part.entries})


def test_a_peer_trains_what_is_shared_and_its_group_and_nothing_else():
    made = method(group=1)
    made.step(made.of(gradient_of(LAYOUT, 1)), 7, 0)
    moved = moved_by(made, LAYOUT)
    assert {expert: bool(of_expert(moved, expert).any()) for expert in range(4)} == {
        0: False, 1: False, 2: True, 3: True,
    }  # fmt: skip
    shared = torch.cat([moved[entry.place] for entry in LAYOUT.entries if expert_of(entry.name) is None])
    assert shared.any()


def test_experts_may_be_stepped_by_less_than_what_is_shared():
    half = replace(RUN, sync=replace(RUN.sync, expert_lr_scale=0.5))
    whole, less = method(group=1), method(group=1, run=half)
    for made in (whole, less):
        made.step(made.of(gradient_of(LAYOUT, 1)), 7, 0)
    expected, found = moved_by(whole, LAYOUT), moved_by(less, LAYOUT)
    for entry in LAYOUT.entries:
        share = 1.0 if expert_of(entry.name) is None else 0.5
        torch.testing.assert_close(found[entry.place], share * expected[entry.place])


def test_an_expert_moves_by_the_mean_of_its_holders_and_what_is_shared_by_that_of_all():
    alone, two, three = (told(group, peer, seed=number) for number, (group, peer) in
                         enumerate(zip((0, 1, 1), PEERS, strict=False)))  # fmt: skip
    round = applied(dict(zip(PEERS, (alone, two, three), strict=False)))
    first, others = applied({PEERS[0]: alone}), applied({PEERS[1]: two, PEERS[2]: three})
    for expert in (0, 1):
        assert torch.equal(of_expert(round, expert), of_expert(first, expert)), "as if it were alone"
    for expert in (2, 3):
        assert torch.equal(of_expert(round, expert), of_expert(others, expert))
    embedding = LAYOUT.entries[0].place
    assert not torch.equal(round[embedding], first[embedding])
    assert not torch.equal(round[embedding], others[embedding])


def louder(payload):
    """The same contribution, which says 1,024 times as much of its group's experts."""
    held = method().held
    group, shared, experts = held.cut(payload)
    loud = (
        replace(moves, exponents=(moves.exponents + 10).clamp(max=LARGEST_EXPONENT))
        for moves in held.of_group.moves_of(experts)
    )
    return bytes([group]) + bytes(shared) + b"".join(moves.written() for moves in loud)


def test_a_loud_holder_is_bounded_by_the_other_holders_of_its_group_and_alone_by_none():
    honest, liar = told(0, PEERS[0], seed=1), louder(told(0, PEERS[1], seed=2))
    others = {peer: told(1, peer, seed=3) for peer in PEERS[2:4]}
    usual = of_expert(applied({PEERS[0]: honest}), 0).abs().max()
    beside = of_expert(applied({PEERS[0]: honest, PEERS[1]: liar} | others), 0).abs().max()
    alone = of_expert(applied({PEERS[1]: liar} | others), 0).abs().max()
    assert beside <= 1.5 * usual
    assert alone > 100 * usual


def test_experts_that_nobody_holds_stay_as_they_are():
    round = applied({peer: told(1, peer, seed=number) for number, peer in enumerate(PEERS)})
    assert not of_expert(round, 0).any()
    assert of_expert(round, 2).any()


@pytest.mark.parametrize("name", ["local-steps", "diloco", "streaming-diloco", "sparse-loco", "sparta"])
def test_only_the_set_counts_whatever_the_order_and_who_came_in_between(name):
    run = replace(RUN, sync=replace(RUN.sync, method=name))
    payloads = {peer: told(number % 2, peer, seed=number, run=run) for number, peer in enumerate(PEERS[:3])}
    expected = applied(payloads, run)
    for order in permutations(payloads):
        assert torch.equal(applied({peer: payloads[peer] for peer in order}, run), expected)
    tally = method(group=1, run=run).tally(0)
    for peer in PEERS[:4]:
        tally.add(peer, payloads.get(peer) or told(1, peer, seed=9, run=run))
    tally.remove(PEERS[3])
    assert torch.equal(dense(tally.step(), LAYOUT), expected), "read by a peer that holds the other group"


def test_what_is_shared_comes_out_as_of_peers_that_train_everything():
    plain = LocalSteps(RUN, LAYOUT, torch.device("cpu"))
    tally = plain.tally(0)
    tally.add(PEERS[0], plain.contribute(gradient_of(LAYOUT, 0), 7, 0, PEERS[0]))
    shared = LAYOUT.entries[0].place
    assert torch.equal(dense(tally.step(), LAYOUT)[shared], applied({PEERS[0]: told(0, PEERS[0])})[shared])


def test_the_own_weights_hold_what_was_moved_until_the_round_is_applied_and_then_what_the_group_made_of_it():
    made = method(group=1)
    replica = Replica(layout=LAYOUT, method=made, units=torch.zeros(LAYOUT.size, dtype=torch.int32))
    payload = made.contribute(made.of(gradient_of(LAYOUT, 0)), 7, 0, PEERS[0])
    before = replica.live_floats(ahead=False)
    replica.add(0, PEERS[0], payload)
    replica.apply(0)
    torch.testing.assert_close(replica.live_floats(ahead=False), before, rtol=0, atol=1e-6)


def test_what_comes_back_is_told_again_and_what_was_told_of_experts_given_up_is_not():
    made = method(group=1)
    payload = made.contribute(made.of(gradient_of(LAYOUT, 0)), 7, 0, PEERS[0])
    made.give_back(payload, 0, PEERS[0])
    assert of_expert(moved_by(made, LAYOUT), 2).any()
    made.hold(0)
    made.give_back(payload, 0, PEERS[0])
    moved = moved_by(made, LAYOUT)
    assert not any(of_expert(moved, expert).any() for expert in range(4))


def played(methods, round):
    """All peers tell, and all see the round applied."""
    payloads = {}
    for peer, made in methods.items():
        payloads[peer] = made.contribute(made.of(gradient_of(LAYOUT, round)), 7, round, peer)
    for made in methods.values():
        tally = made.tally(round)
        for peer, payload in payloads.items():
            tally.add(peer, payload)
        made.applied(round)


def test_peers_spread_over_the_groups_one_at_a_time_and_then_stay():
    methods = {peer: method(group=0) for peer in PEERS}
    moved = []
    for round in range(4 * BALANCE_ROUNDS):
        played(methods, round)
        moved.append([peer for peer, made in methods.items() if made.goes_over(round + 1, peer)])
    assert max(map(len, moved)) == 1
    assert sum(map(len, moved)) == 2
    assert methods[PEERS[0]].holders() == [3, 2]


def test_a_group_whose_only_holder_left_is_taken_up():
    methods = {peer: method(group=int(number == 0)) for number, peer in enumerate(PEERS[:4])}
    played(methods, 0)
    del methods[PEERS[0]]
    for round in range(1, 2 * BALANCE_ROUNDS):
        played(methods, round)
        for peer, made in methods.items():
            made.goes_over(round + 1, peer)
    assert sorted(made.group for made in methods.values()) == [0, 0, 1]


def test_peers_that_contribute_by_turns_spread_over_the_groups_as_well():
    methods = {peer: method(group=0) for peer in PEERS[:2]}
    for round in range(2 * BALANCE_ROUNDS):
        teller = PEERS[round % 2]
        payload = methods[teller].contribute(methods[teller].of(gradient_of(LAYOUT, round)), 7, round, teller)
        for peer, made in methods.items():
            made.tally(round).add(teller, payload)
            made.applied(round)
            made.goes_over(round + 1, peer)
    assert sorted(made.group for made in methods.values()) == [0, 1]


def test_a_peer_begins_with_a_group_of_its_own_draw_once():
    made = method_of(RUN, LAYOUT)
    assert made.begins(PEERS[1])
    drawn = made.group
    made.hold(1 - drawn)
    assert not made.begins(PEERS[1])
    assert made.group == 1 - drawn


@pytest.mark.parametrize(
    ("held_by_others", "drawn", "expected"),
    [([0, 0], 0, 1), ([0, 0], 1, 1), ([1], 1, 0), ([0, 1], 0, 0), ([0, 1], 1, 1), ([], 1, 1)],
)
def test_a_newcomer_takes_up_what_the_fewest_train_and_else_what_it_drew(held_by_others, drawn, expected):
    methods = dict(zip(PEERS, (method(group=group) for group in held_by_others), strict=False))
    newcomer = method(group=drawn)
    if methods:
        payloads = {
            peer: made.contribute(made.of(gradient_of(LAYOUT, 0)), 7, 0, peer)
            for peer, made in methods.items()
        }
        tally = newcomer.tally(0)
        for peer, payload in payloads.items():
            tally.add(peer, payload)
        assert not newcomer.knows_holders, "the round may be an old one"
        newcomer.applied(0)
    assert newcomer.knows_holders == bool(methods)
    assert newcomer.joins() == (expected != drawn)
    assert newcomer.group == expected


def test_a_gradient_of_another_size_or_that_is_not_finite_changes_nothing():
    made = method(group=1)
    with pytest.raises(GradientError, match="shape"):
        made.step(gradient_of(LAYOUT, 0), 7, 0)
    broken = made.of(gradient_of(LAYOUT, 0))
    broken[-1] = float("nan")
    with pytest.raises(GradientError, match="not finite"):
        made.step(broken, 7, 0)
    assert not moved_by(made, LAYOUT).any()


@settings(deadline=None)  # A busy machine is no fault of the payload.
@given(st.data())
def test_a_hostile_payload_is_refused_or_counts_and_moves_by_bounded_numbers(data):
    honest = told(0, PEERS[0])
    group = bytes([data.draw(st.integers(0, 255))])
    payload = data.draw(st.sampled_from([bent(honest, data), group + honest[1:]]))
    tally = method(group=1).tally(0)
    try:
        tally.add(PEERS[1], payload)
    except ContributionError:
        assert not dense(tally.step(), LAYOUT).any(), "nothing was changed"
    else:
        assert len(payload) == len(honest)
        assert payload[0] < 2


@pytest.mark.parametrize(
    ("experts", "sync", "message"),
    [
        ({"groups": 3}, {}, "divide num_experts"),
        ({"groups": 0}, {}, "in 1 to 256"),
        ({"groups": 2}, {"method": "demo-sign"}, "needs a local-step method"),
        ({"groups": 2}, {"topology": "sharded-reduce", "delta_codec": "topk-2bit"}, "write all-gather"),
        ({"merge_rounds": 5, "merge_nearest": 4}, {}, "merge_nearest"),
        ({"merge_rounds": -1}, {}, "negative"),
        ({"groups": 2}, {"expert_lr_scale": 0.0}, "must lie above 0, up to 10"),
        ({"groups": 1}, {"expert_lr_scale": 0.5}, "has no effect where model.experts.groups is 1"),
    ],
)
def test_a_run_that_cannot_be_is_refused(experts, sync, message):
    run = replace(
        RUN, model=replace(SHAPE, experts=replace(SHAPE.experts, **experts)), sync=replace(RUN.sync, **sync)
    )
    with pytest.raises(ManifestError, match=message):
        check(run)


def test_who_trains_what_and_since_when_nobody_does_can_be_read():
    made = method(group=1)
    replica = Replica(layout=LAYOUT, method=made, units=torch.zeros(LAYOUT.size, dtype=torch.int32))
    assert made.holding == ExpertAssignment(1, (0, 0), (-1, -1), (0, 0)), "nothing has settled yet"

    def settled(round, *groups):
        for peer, group in zip(PEERS, groups, strict=False):
            replica.add(round, peer, told(group, peer, round=round))
        replica.apply(round)
        replica.live_floats(ahead=False)
        replica.settle(round)

    settled(0, 0, 1, 1)
    assert made.holding == ExpertAssignment(1, (1, 2), (0, 0), (0, 0))
    for round in range(1, 13):
        settled(round, 1, 1)
    assert made.holding == ExpertAssignment(1, (0, 2), (0, 12), (12, 0))
    made.hold(0)
    assert made.holding.group == 0


def test_whoever_came_later_says_nothing_of_what_was_trained_before_it_and_waits_since_then():
    made = method(group=1)
    replica = Replica(
        layout=LAYOUT, method=made, units=torch.zeros(LAYOUT.size, dtype=torch.int32), settled_round=40
    )
    for round in (41, 42):
        replica.add(round, PEERS[0], told(1, PEERS[0], round=round))
        replica.apply(round)
        replica.settle(round)
    assert made.holding.trained == (-1, 42)
    assert made.holding.stale_rounds == (2, 0)


def test_a_contribution_that_is_taken_out_before_its_round_settles_has_trained_nothing():
    made = method(group=1)
    replica = Replica(layout=LAYOUT, method=made, units=torch.zeros(LAYOUT.size, dtype=torch.int32))
    for number, peer in enumerate(PEERS[:2]):
        replica.add(0, peer, told(number, peer))
    replica.apply(0)
    replica.remove(0, PEERS[0])
    replica.settle(0)
    assert made.holding.trained == (-1, 0)
