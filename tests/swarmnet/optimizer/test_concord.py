"""What the metrics say of contributions: norms of the gradient, and what the others think of one's votes."""

import pytest
import torch

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.method import METHODS, method_of
from swarmnet.optimizer.replica import Replica
from swarmnet.optimizer.vote_agreement import VoteAgreement, vote_agreement
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync

ME, OTHER, THIRD = PeerId("me"), PeerId("other"), PeerId("third")
LAYOUT = layout_of({"one": (64, 64), "two": (100, 50), "gain": (64,)})


def manifest(**changes):
    return Manifest("m", PeerId("owner"), sync=Sync(**changes))


def gradient(seed):
    values = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed))
    for start, stop in LAYOUT.padding:
        values[start:stop] = 0
    return values


def test_votes_are_shared_outvoted_or_alone():
    votes = torch.tensor([1, 1, -1, -1, 1, -1, 0], dtype=torch.int16)
    sums = torch.tensor([3, -1, -2, 2, 1, 0, 5], dtype=torch.int16)
    #  others:           2, -2, -1,  3, 0, 1, 5
    assert vote_agreement(votes, sums) == VoteAgreement(agreed=2, opposed=3, alone=2)
    assert VoteAgreement(1, 2, 3) + VoteAgreement(10, 20, 30) == VoteAgreement(11, 22, 33)


def applied(seeds, round=0, **changes):
    """A replica of ME's whose round holds a contribution of each peer's gradient; and ME's method."""
    run = manifest(selection="top-k", **changes)
    methods = {peer: method_of(run, LAYOUT) for peer in seeds}
    replica = Replica(layout=LAYOUT, method=methods[ME], units=torch.zeros(LAYOUT.size, dtype=torch.int32))
    for peer, seed in seeds.items():
        replica.add(round, peer, methods[peer].contribute(gradient(seed), 1, round, peer))
    replica.apply(round)
    return replica, methods[ME]


def votes_in(method):
    """Number of votes in a contribution."""
    planes = zip(method._layout.planes, method._selections, strict=True)
    return sum(plane.chunks * selection.kept for plane, selection in planes)


def test_who_has_the_same_gradient_agrees_on_everything_and_who_has_the_opposite_one_on_nothing():
    replica, method = applied({ME: 1, OTHER: 1})
    assert replica.vote_agreement(0, ME) == VoteAgreement(votes_in(method), 0, 0)
    run = manifest(selection="top-k")
    mine, theirs = method_of(run, LAYOUT), method_of(run, LAYOUT)
    replica = Replica(layout=LAYOUT, method=mine, units=torch.zeros(LAYOUT.size, dtype=torch.int32))
    replica.add(0, ME, mine.contribute(gradient(1), 1, 0, ME))
    replica.add(0, OTHER, theirs.contribute(-gradient(1), 1, 0, OTHER))
    replica.apply(0)
    assert replica.vote_agreement(0, ME) == VoteAgreement(0, votes_in(mine), 0)


def test_noise_is_opposed_as_often_as_agreed_with_and_who_is_alone_is_alone():
    replica, _ = applied({ME: 1, OTHER: 2, THIRD: 3})
    found = replica.vote_agreement(0, ME)
    assert abs(found.agreed - found.opposed) < 4 * (found.agreed + found.opposed) ** 0.5
    replica, method = applied({ME: 1})
    assert replica.vote_agreement(0, ME) == VoteAgreement(0, 0, votes_in(method))


def test_nothing_is_said_of_a_round_without_own_votes_or_of_one_long_ago():
    run = manifest(selection="top-k")
    mine, theirs = method_of(run, LAYOUT), method_of(run, LAYOUT)
    replica = Replica(layout=LAYOUT, method=mine, units=torch.zeros(LAYOUT.size, dtype=torch.int32))
    replica.add(0, OTHER, theirs.contribute(gradient(1), 1, 0, OTHER))
    assert replica.vote_agreement(0, ME) is None
    replica.add(0, ME, mine.contribute(gradient(1), 1, 0, ME))
    mine.contribute(gradient(2), 1, 1, ME)
    assert replica.vote_agreement(0, ME) is None
    assert replica.vote_agreement(7, ME) is None


def test_the_float_baseline_has_no_votes():
    replica, _ = applied({ME: 1, OTHER: 1}, method="demo")
    assert replica.vote_agreement(0, ME) is None


@pytest.mark.parametrize("method", METHODS)
def test_the_gradients_norm_is_that_of_the_mean_over_the_tokens_however_much_is_clipped(method):
    made = method_of(manifest(method=method, max_grad_norm=1e-3), LAYOUT)
    assert made.gradient_norm is None
    assert not made.momentum_norm, "nothing is unsent"
    made.contribute(gradient(1), 8, 0, ME)
    assert made.gradient_norm == pytest.approx(float(gradient(1).norm()) / 8)
    made.contribute(100 * gradient(1), 8, 1, ME)
    assert made.gradient_norm == pytest.approx(float(gradient(1).norm()) * 12.5)


def test_the_momentums_norm_is_what_was_not_sent():
    run = manifest(selection="top-k", topk_per_chunk=32, momentum=0.0, max_grad_norm=1e9)
    made = method_of(run, LAYOUT)
    made.contribute(gradient(1), 1, 0, ME)
    sent = torch.cat([own.values.flatten() for own in made.sent(0)])
    left = float(gradient(1).square().sum() - sent.square().sum()) ** 0.5
    assert made.momentum_norm == pytest.approx(left, rel=1e-4)
