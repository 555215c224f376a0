"""Peers that step by themselves: what they tell of it, what stays with them, and what a set makes of it."""

from dataclasses import replace

import pytest
import torch
from method_cases import PEERS, gradient_of, manifest, moved_by, replica_of, shapes_of, stepped
from torch.optim import AdamW, Muon

from swarmnet.model.fixed_point import UNIT, to_floats, to_units
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.delta_codecs.delta_codec import LARGEST_EXPONENT
from swarmnet.optimizer.local_steps import inner_optimizer
from swarmnet.optimizer.local_steps.inner_optimizer import InnerOptimizer
from swarmnet.optimizer.local_steps.local_steps import LocalSteps
from swarmnet.optimizer.method import method_of
from swarmnet.optimizer.polar_factor import orthogonal
from swarmnet.optimizer.step import dense
from swarmnet.optimizer.tiling import plane_of

RATE = 2.0**-7
PARTS = 4
LAYOUT = layout_of(shapes_of(2))
RUN = manifest(method="local-steps", learning_rate=RATE, decay_rounds=10**9, fragments=PARTS)


def spoken_of(method, payload, round):
    """bool [layout.size]: which numbers the payload of `round` is about."""
    tally = method.tally(round)
    tally.add(PEERS[0], payload)
    return dense(tally.step(), LAYOUT) != 0


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_own_steps_are_those_of_the_optimizers_that_everybody_knows(name):
    layout = layout_of(shapes_of(1))
    inner, moved = InnerOptimizer(name, layout, 0.95), torch.zeros(layout.size)
    gains = dict.fromkeys(layout.block_ranges(), 0.5)
    leaves = {entry.name: torch.zeros(entry.shape, requires_grad=True) for entry in layout.entries}
    matrices = [leaf for key, leaf in leaves.items() if name == "muon" and "proj" in key]
    others = [leaf for leaf in leaves.values() if all(leaf is not matrix for matrix in matrices)]
    known = [AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)]
    if matrices:
        known.append(Muon(matrices, lr=RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    for number in range(4):
        gradient = gradient_of(layout, number)
        inner.step(moved, gradient, gains, RATE)
        for entry in layout.entries:
            part = gradient[entry.offset : entry.offset + entry.size].view(entry.shape)
            leaves[entry.name].grad = 0.5 * part
        for optimizer in known:
            optimizer.step()
    for entry in layout.entries:
        mine = moved[entry.offset : entry.offset + entry.size].view(entry.shape)
        theirs = leaves[entry.name].detach()
        # Theirs computes Muon's iteration in bf16, with three digits; ours keeps its moments so.
        close = 0.03 if any(leaves[entry.name] is matrix for matrix in matrices) else 3e-3
        assert float((mine - theirs).norm() / theirs.norm()) < close, entry.name


@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16])
def test_a_table_that_moves_in_pieces_has_the_same_bits_as_a_whole_one(number, monkeypatch):
    def moved_in(pieces):
        monkeypatch.setattr(inner_optimizer, "PIECE_NUMBERS", pieces)
        inner, moved = InnerOptimizer("adamw", LAYOUT, 0.95), torch.zeros(LAYOUT.size)
        for round in range(3):
            inner.step(moved, gradient_of(LAYOUT, round).to(number), gains, RATE)
        return moved

    gains = dict.fromkeys(LAYOUT.block_ranges(), 0.7)
    largest = max(entry.size for entry in LAYOUT.entries)
    assert largest > 1000
    assert torch.equal(moved_in(1000), moved_in(largest))


def test_the_orthogonal_matrix_has_singular_values_near_one():
    for shape in [(24, 24), (24, 80), (80, 24)]:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        sizes = torch.linalg.svdvals(orthogonal(drawn))
        assert float(sizes.min()) > 0.5
        assert float(sizes.max()) < 1.3
        one, nothing = orthogonal(drawn), torch.zeros(shape)
        several = orthogonal(torch.stack([drawn, 100 * drawn, nothing]))
        assert torch.allclose(several, torch.stack([one, one, nothing]), atol=1e-4)


def test_what_was_not_sent_works_on_in_the_peers_own_weights():
    method = stepped(RUN, LAYOUT)
    replica = replica_of(method, LAYOUT)
    before = replica.live_floats(ahead=False)
    payload = method.own.encode_delta(0, PEERS[0])
    assert torch.allclose(replica.live_floats(ahead=False), before, atol=UNIT), "what is on its way counts in"
    replica.add(0, PEERS[0], payload)
    replica.apply(0)
    after = replica.live_floats(ahead=False)
    assert torch.allclose(after, before, atol=UNIT), "alone, a round only moves from the own to the settled"
    settled = to_floats(replica.settled_units())
    replica.settle(0)
    assert not torch.equal(to_floats(replica.settled_units()), settled)
    assert torch.allclose(replica.live_floats(ahead=False), before, atol=UNIT)


def test_the_rest_shrinks_from_round_to_round_when_nothing_more_is_moved():
    method = stepped(RUN, LAYOUT)
    sizes = [float(moved_by(method, LAYOUT).norm())]
    for round in range(3 * PARTS):
        method.own.encode_delta(round, PEERS[0])
        sizes.append(float(moved_by(method, LAYOUT, applied=round).norm()))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.5 * sizes[0]


def test_each_number_is_spoken_of_once_in_a_cycle_and_by_all_peers_at_once():
    one, other = stepped(RUN, LAYOUT, 1), stepped(RUN, LAYOUT, 2)
    for first in (0, PARTS, 5 * PARTS):
        times = torch.zeros(LAYOUT.size, dtype=torch.int32)
        for round in range(first, first + PARTS):
            mine = spoken_of(one, one.own.encode_delta(round, PEERS[0]), round)
            assert torch.equal(mine, spoken_of(other, other.own.encode_delta(round, PEERS[1]), round))
            times += mine
        for start, stop in LAYOUT.padding:
            assert not times[start:stop].any()
            times[start:stop] = 1
        assert (times == 1).all()


def test_the_order_of_parts_differs_between_cycles():
    method = stepped(RUN, LAYOUT)
    orders = set()
    for cycle in range(16):
        rounds = range(cycle * PARTS, (cycle + 1) * PARTS)
        spoken = [
            spoken_of(method, method.own.encode_delta(round, PEERS[0]), round)[:PARTS] for round in rounds
        ]
        orders.add(tuple(int(part.nonzero()[0]) for part in spoken))
    assert len(orders) > 4


def test_a_step_is_the_mean_of_what_was_told():
    methods = {peer: stepped(RUN, LAYOUT, number) for number, peer in enumerate(PEERS[:3])}
    payloads = {peer: method.own.encode_delta(0, peer) for peer, method in methods.items()}
    tally = methods[PEERS[0]].tally(0)
    alone = []
    for peer, payload in payloads.items():
        tally.add(peer, payload)
        single = methods[peer].tally(0)
        single.add(peer, payload)
        alone.append(dense(single.step(), LAYOUT))
    mean = torch.stack(alone).double().mean(dim=0)
    assert float((dense(tally.step(), LAYOUT) - mean).abs().max()) <= 0.5


def test_the_step_is_the_mean_times_the_outer_rate_also_where_a_contribution_was_late():
    plain = replace(RUN, sync=replace(RUN.sync, fragments=1))
    larger = replace(plain, sync=replace(plain.sync, outer_lr=1.4))
    peers = {peer: stepped(plain, LAYOUT, number) for number, peer in enumerate(PEERS[:3])}
    payloads = {peer: each.own.encode_delta(0, peer) for peer, each in peers.items()}
    mean, grown = (replica_of(method_of(run, LAYOUT), LAYOUT) for run in (plain, larger))
    late = replica_of(method_of(larger, LAYOUT), LAYOUT)
    for peer, payload in payloads.items():
        mean.add(0, peer, payload)
        grown.add(0, peer, payload)
    late.apply(0)
    for peer in reversed(PEERS[:3]):
        late.add(0, peer, payloads[peer])
    mean.apply(0)
    grown.apply(0)
    assert grown.settle(0) == late.settle(0) != mean.settle(0)
    expected = 1.4 * mean.settled_units().double()
    assert float((grown.settled_units() - expected).abs().max()) <= 0.5 * 1.4 + 0.5


def test_what_a_peer_tells_points_where_it_moved():
    method = stepped(RUN, LAYOUT)
    moved = moved_by(method, LAYOUT)
    tally = method.tally(0)
    tally.add(PEERS[0], method.own.encode_delta(0, PEERS[0]))
    told = to_floats(dense(tally.step(), LAYOUT))
    spoken = told != 0
    assert (torch.sign(told[spoken]) == torch.sign(moved[spoken])).float().mean() > 0.999
    assert 0.5 < float(told.abs().sum() / moved[spoken].abs().sum()) < 2.0


def test_nobody_is_much_louder_than_the_others():
    """One of five says the largest exponent everywhere: the step is at most twice an honest one."""
    methods = {peer: stepped(RUN, LAYOUT, number) for number, peer in enumerate(PEERS)}
    payloads = {peer: method.own.encode_delta(0, peer) for peer, method in methods.items()}
    honest = methods[PEERS[0]].tally(0)
    for peer in PEERS[:4]:
        honest.add(peer, payloads[peer])
    largest = int(dense(honest.step(), LAYOUT).abs().max())
    honest.add(PEERS[4], loud(payloads[PEERS[4]]))
    assert int(dense(honest.step(), LAYOUT).abs().max()) <= 2 * largest


def loud(payload):
    """All its exponents the largest that there are."""
    bent, start = bytearray(payload), 0
    for plane in LAYOUT.planes:
        bent[start : start + plane.chunks] = bytes([LARGEST_EXPONENT]) * plane.chunks
        start += plane.chunks + -(-plane.chunks * (plane.chunk // PARTS) // 8)
    return bytes(bent)


def test_a_contribution_that_comes_back_is_in_the_own_weights_again():
    method = stepped(RUN, LAYOUT)
    before = moved_by(method, LAYOUT)
    payload = method.own.encode_delta(0, PEERS[0])
    assert not torch.allclose(moved_by(method, LAYOUT, applied=0), before, atol=10 * UNIT)
    method.give_back(payload, 0, PEERS[0])
    assert torch.allclose(moved_by(method, LAYOUT, applied=0), before, atol=UNIT)


def test_two_rounds_on_their_way_are_both_in_the_own_weights():
    method = stepped(RUN, LAYOUT)
    before = moved_by(method, LAYOUT)
    for round in (0, 1):
        method.own.encode_delta(round, PEERS[0])
    assert torch.allclose(moved_by(method, LAYOUT), before, atol=UNIT)
    assert not torch.allclose(moved_by(method, LAYOUT, applied=0), before, atol=10 * UNIT)


def test_a_shadow_step_moves_nothing_and_warms_the_moments():
    cold, warm = method_of(RUN, LAYOUT), method_of(RUN, LAYOUT)
    for number in range(8):
        warm.own.step(gradient_of(LAYOUT, 3) + gradient_of(LAYOUT, 50 + number), 1, 0, factor=0)
    assert not moved_by(warm, LAYOUT).any()
    for method in (cold, warm):
        method.own.step(gradient_of(LAYOUT, 99), 1, 0)
    matrix = next(entry for entry in LAYOUT.entries if "proj" in entry.name)
    place = slice(matrix.offset, matrix.offset + matrix.size)
    trend = -gradient_of(LAYOUT, 3)[place]
    along = [
        float(torch.cosine_similarity(moved_by(method, LAYOUT)[place], trend, dim=0))
        for method in (cold, warm)
    ]
    assert along[1] > along[0] + 0.3


def test_the_owners_rate_scales_own_steps_and_not_the_sum():
    whole, half = method_of(RUN, LAYOUT), method_of(RUN, LAYOUT)
    whole.own.step(gradient_of(LAYOUT, 0), 1, 0)
    half.own.step(gradient_of(LAYOUT, 0), 1, 0, factor=500)
    assert torch.allclose(moved_by(half, LAYOUT), 0.5 * moved_by(whole, LAYOUT))
    tally = whole.tally(0)
    tally.add(PEERS[0], whole.own.encode_delta(0, PEERS[0]))
    assert torch.equal(dense(tally.step(factor=500), LAYOUT), dense(tally.step(), LAYOUT))


def test_a_payload_is_one_bit_a_number_and_one_byte_a_chunk():
    method = LocalSteps(RUN, LAYOUT, torch.device("cpu"))
    numbers = sum(plane.chunks * plane.chunk // PARTS for plane in LAYOUT.planes)
    chunks = sum(plane.chunks for plane in LAYOUT.planes)
    assert numbers / 8 + chunks <= method.payload_bytes <= numbers / 8 + chunks + len(LAYOUT.planes)


def test_more_parts_than_a_small_chunk_has_numbers_are_as_many_as_it_has():
    layout = layout_of({"model.norm.weight": (60,), "lm_head.weight": (64, 64)})
    method = method_of(replace(RUN, sync=replace(RUN.sync, fragments=64)), layout)
    method.own.step(gradient_of(layout, 0), 1, 0)
    for round in range(64):
        assert len(method.own.encode_delta(round, PEERS[0])) == method.payload_bytes
    assert plane_of(torch.zeros(layout.size), layout.planes[-1]).shape[1] == 64


def test_replicas_that_hear_of_a_contribution_late_are_equal_to_those_that_heard_in_time():
    methods = {peer: stepped(RUN, LAYOUT, number) for number, peer in enumerate(PEERS[:3])}
    payloads = {
        round: {peer: m.own.encode_delta(round, peer) for peer, m in methods.items()} for round in range(3)
    }
    early, late = replica_of(stepped(RUN, LAYOUT, 7), LAYOUT), replica_of(stepped(RUN, LAYOUT, 8), LAYOUT)
    for round, told in payloads.items():
        for peer, payload in told.items():
            early.add(round, peer, payload)
            if peer != PEERS[1]:
                late.add(round, peer, payload)
        early.apply(round)
        late.apply(round)
    for round, told in payloads.items():
        late.add(round, PEERS[1], told[PEERS[1]])
    assert [early.settle(round) for round in payloads] == [late.settle(round) for round in payloads]
    assert torch.equal(early.settled_units(), late.settled_units())
    assert torch.equal(to_units(to_floats(early.settled_units())), early.settled_units())
