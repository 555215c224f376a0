"""DiLoCo, Streaming DiLoCo, SparseLoCo and partitioned averaging: what becomes of what peers moved."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from method_cases import PEERS, gradient_of, manifest, moved_by, replica_of, shapes_of, stepped

from swarmnet.model.fixed_point import UNIT, to_floats
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.state_layout import MOMENTUM, state_of, with_zero_momentum
from swarmnet.optimizer.replica import Replica, ReplicaError
from swarmnet.optimizer.step import dense
from swarmnet.optimizer.tiling import empty_padding
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.manifest_check import check
from swarmnet.run.sync_methods import PRESETS

LAYOUT = layout_of(shapes_of(1))
ONE_STEP = 2.0**-7


def run(method, **sync):
    return manifest(method=method, learning_rate=ONE_STEP, decay_rounds=10**9, **sync)


def mean_told(method, payloads, round=0):
    """What the group's weights move by, from rest."""
    tally = method.tally(round)
    for peer, payload in payloads.items():
        tally.add(peer, payload)
    return to_floats(dense(tally.step(), LAYOUT))


@pytest.mark.parametrize("name", ["diloco", "sparse-loco"])
def test_after_a_round_a_peer_goes_on_from_where_the_group_is(name):
    method = stepped(run(name), LAYOUT)
    before = moved_by(method, LAYOUT)
    replica = replica_of(method, LAYOUT)
    payload = method.own.encode_delta(0, PEERS[0])
    assert torch.equal(moved_by(method, LAYOUT), before), "until then it goes on from where it was"
    method.own.step(gradient_of(LAYOUT, 77), 7, 1)
    since = moved_by(method, LAYOUT) - before
    replica.add(0, PEERS[0], payload)
    replica.apply(0)
    group = mean_told(method, {PEERS[0]: payload})
    assert torch.allclose(replica.live_floats(ahead=False), group + since, atol=2 * UNIT)


def test_sparse_loco_tells_the_rest_later_and_loses_nothing_of_it():
    method = stepped(run("sparse-loco", error_feedback_decay=1.0), LAYOUT)
    moved, told = moved_by(method, LAYOUT), torch.zeros(LAYOUT.size)
    gone = []
    for round in range(12):
        told += mean_told(method, {PEERS[0]: method.own.encode_delta(round, PEERS[0])}, round)
        gone.append(float((moved - told).norm()))
        assert method.momentum_norm == pytest.approx(gone[-1], rel=1e-3)
    assert gone == sorted(gone, reverse=True)
    assert gone[-1] < 0.8 * gone[0]


def test_what_waits_fades():
    method = stepped(run("sparse-loco", error_feedback_decay=0.5), LAYOUT)
    sizes = []
    for round in range(4):
        method.own.encode_delta(round, PEERS[0])
        sizes.append(method.momentum_norm)
    assert all(later < 0.55 * earlier for earlier, later in pairwise(sizes[1:]))


def test_diloco_steps_by_nesterovs_momentum_of_the_means():
    settings = run("diloco")
    methods = {peer: stepped(settings, LAYOUT, number) for number, peer in enumerate(PEERS[:3])}
    replica, known = replica_of(stepped(settings, LAYOUT), LAYOUT), torch.zeros(LAYOUT.size)
    expected = torch.zeros(LAYOUT.size)
    for round in range(4):
        moved = torch.stack([moved_by(each, LAYOUT, applied=round - 1) for each in methods.values()]).mean(0)
        for peer, method in methods.items():
            replica.add(round, peer, method.own.encode_delta(round, peer))
            method.own.step(gradient_of(LAYOUT, 50 + round), 7, round)
        replica.apply(round)
        replica.settle(round)
        known = 0.9 * known + moved
        expected += 0.7 * (moved + 0.9 * known)
    error = to_floats(replica.settled_units()[: LAYOUT.size]) - expected
    assert float(error.norm() / expected.norm()) < 0.02, "but for eight bits"


def test_a_late_contribution_corrects_what_the_momentum_made_of_later_rounds():
    settings = run("diloco")
    methods = {peer: stepped(settings, LAYOUT, number) for number, peer in enumerate(PEERS[:3])}
    early, late = replica_of(stepped(settings, LAYOUT), LAYOUT), replica_of(stepped(settings, LAYOUT), LAYOUT)
    waits = {}
    for round in range(3):
        for peer, method in methods.items():
            method.own.step(gradient_of(LAYOUT, 50 + round), 7, round)
            payload = method.own.encode_delta(round, peer)
            early.add(round, peer, payload)
            if (round, peer) == (0, PEERS[1]):
                waits[round] = payload
            else:
                late.add(round, peer, payload)
        early.apply(round)
        late.apply(round)
    assert not torch.equal(early.live_floats(False), late.live_floats(False))
    late.add(0, PEERS[1], waits[0])
    assert torch.equal(early.live_floats(False), late.live_floats(False))
    assert [early.settle(round) for round in range(3)] == [late.settle(round) for round in range(3)]


def test_a_momentum_is_part_of_what_is_settled_and_a_replica_begins_with_all_of_it():
    method = stepped(run("diloco"), LAYOUT)
    replica = replica_of(method, LAYOUT)
    still = replica.digest()
    replica.add(0, PEERS[0], method.own.encode_delta(0, PEERS[0]))
    replica.apply(0)
    assert replica.settle(0) != still
    state = replica.settled_units()
    assert state.shape == (2 * LAYOUT.size,)
    assert state[LAYOUT.size :].any()
    with pytest.raises(ReplicaError, match="int32"):
        Replica(layout=LAYOUT, method=method, units=state[: LAYOUT.size])
    forgot = Replica(
        layout=LAYOUT,
        method=method,
        units=with_zero_momentum(state[: LAYOUT.size], method.state),
        settled_round=0,
    )
    assert forgot.digest() != replica.digest()
    for start, stop in method.state.padding:
        assert not state[start:stop].any()


def test_a_state_without_momentum_lies_as_the_weights_do():
    settings = run("diloco", outer_momentum=0.0)
    assert state_of(LAYOUT, settings.sync) is LAYOUT
    doubled = state_of(LAYOUT, run("diloco").sync)
    assert [entry.name.removeprefix(MOMENTUM) for entry in doubled.entries[len(LAYOUT.entries) :]] == [
        entry.name for entry in LAYOUT.entries
    ]
    assert {plane.stop for plane in doubled.planes} >= {LAYOUT.size, doubled.size}


def test_streaming_of_one_part_in_eight_bits_is_diloco():
    diloco = stepped(run("diloco"), LAYOUT)
    streaming = stepped(run("streaming-diloco", fragments=1, delta_codec="int8", outer_lr=0.7), LAYOUT)
    payload = diloco.own.encode_delta(0, PEERS[0])
    assert streaming.own.encode_delta(0, PEERS[0]) == payload
    assert torch.equal(mean_told(diloco, {PEERS[0]: payload}), mean_told(streaming, {PEERS[0]: payload}))


def test_streamings_parts_have_their_turns_at_equal_distances():
    method = stepped(run("streaming-diloco"), LAYOUT)
    places, plane = torch.arange(LAYOUT.size), LAYOUT.planes[0]
    turns = [int(method.own.part(places, plane, round)[0, 0]) for round in range(12)]
    assert sorted(turns[:4]) == [0, 1, 2, 3]
    assert turns == 3 * turns[:4]


def test_partitioned_averaging_is_the_mean_of_the_peers_weights():
    settings = run("sparta")
    methods = {peer: stepped(settings, LAYOUT, number) for number, peer in enumerate(PEERS[:3])}
    stood = torch.stack([moved_by(method, LAYOUT) for method in methods.values()])
    payloads = {peer: method.own.encode_delta(0, peer) for peer, method in methods.items()}
    group = mean_told(methods[PEERS[0]], payloads)
    part, mean, first = torch.zeros(LAYOUT.size, dtype=torch.bool), stood.mean(dim=0), methods[PEERS[0]]
    for plane in LAYOUT.planes:
        first.part(part, plane, 0).fill_(True)
        # A value that is twice as large as the largest of the usual peer is clipped, chunk by chunk.
        values_PCM = torch.stack([first.part(each, plane, 0) for each in stood])
        limit_C1 = 2 * values_PCM.abs().amax(dim=2).median(dim=0).values[:, None]
        first.part(mean, plane, 0).copy_(values_PCM.clamp(-limit_C1, limit_C1).mean(dim=0))
    empty_padding(part, LAYOUT)
    assert int(part.sum()) == pytest.approx(LAYOUT.parameters / 16, rel=0.05)
    close = float(stood.abs().max()) / 100
    for number, method in enumerate(methods.values()):
        stands = group + moved_by(method, LAYOUT, applied=0)
        assert torch.allclose(stands[part], mean[part], atol=close), "of this part all are equal"
        assert torch.equal(stands[~part], stood[number][~part]), "and of the others each is where it was"


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.residual != "drop"])
def test_a_contribution_that_comes_back_is_in_the_own_weights_again(name):
    method = stepped(run(name), LAYOUT)
    payload = method.own.encode_delta(0, PEERS[0])
    without, told = moved_by(method, LAYOUT, applied=0), torch.zeros(LAYOUT.size)
    for plane, moves in zip(LAYOUT.planes, method.moves_of(payload), strict=True):
        method.part(told, plane, 0).copy_(moves.units() * UNIT)
    empty_padding(told, LAYOUT)
    method.give_back(payload, 0, PEERS[0])
    assert told.any()
    assert torch.allclose(moved_by(method, LAYOUT, applied=0) - without, told, atol=UNIT)


@pytest.mark.parametrize("name", ["diloco", "local-steps"])
def test_without_a_residual_a_peer_begins_each_round_at_the_settled_weights(name):
    method = stepped(run(name, residual="drop", fragments=1), LAYOUT)
    replica = replica_of(method, LAYOUT)
    payload = method.own.encode_delta(0, PEERS[0])
    assert moved_by(method, LAYOUT).any(), "until the round is applied, a peer is ahead by its own steps"
    replica.apply(0)
    assert torch.equal(replica.live_floats(ahead=False), to_floats(replica.settled_units()[: LAYOUT.size]))
    method.give_back(payload, 0, PEERS[0])
    assert not moved_by(method, LAYOUT, applied=0).any(), "what the group did not take is dropped"


def test_each_method_is_as_its_authors_have_it_but_for_what_the_run_says():
    assert run("diloco").sync.local_steps == PRESETS["diloco"]
    assert run("demo-sign").sync.local_steps is None
    mine = run("sparse-loco", inner_optimizer="muon", fragments=2, residual="local").sync.local_steps
    assert mine == replace(PRESETS["sparse-loco"], inner_optimizer="muon", fragments=2, residual="local")
    assert run("streaming-diloco", outer_lr=0.5).sync.local_steps.outer_thousandths == (500, 900)
    assert run("streaming-diloco").sync.local_steps.outer_thousandths == (400, 900)


@pytest.mark.parametrize(
    ("sync", "reason"),
    [
        ({"method": "local-steps", "outer_momentum": 0.5}, "is for diloco and streaming-diloco"),
        ({"method": "demo", "outer_lr": 0.5}, "local-step methods only"),
        ({"method": "diloco", "outer_momentum": 1.0}, r"must lie in \[0, 0.99\]"),
        ({"method": "diloco", "outer_lr": -0.7}, "must lie in 0.001 to 2"),
        ({"method": "demo-sign", "delta_codec": "sign"}, "local-step methods only"),
        ({"method": "sparse-loco", "sparse_topk": 63}, "power of two"),
        ({"method": "sparse-loco", "topology": "sharded-reduce"}, "set sync.delta_codec"),
        ({"method": "demo", "topology": "sharded-reduce"}, "local-steps, diloco"),
        ({"method": "sparse-loco", "error_feedback_decay": 1.5}, "error_feedback_decay"),
    ],
)
def test_what_contradicts_a_method_is_said(sync, reason):
    with pytest.raises(ManifestError, match=reason):
        check(manifest(**sync))


def test_a_run_that_names_none_of_this_keeps_its_id():
    known = Manifest("test", PEERS[0]).canonical()
    for key in (b"outer", b"sent", b"rest", b"parts", b"inner", b"error-feedback", b"sparse"):
        assert key not in known
