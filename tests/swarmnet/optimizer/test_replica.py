"""The replica: settled weights depend on the sets of contributions, not on when they came."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.model.fixed_point import to_floats, to_units
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.state_layout import with_zero_momentum
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.method import METHODS, method_of
from swarmnet.optimizer.replica import Replica, ReplicaError
from swarmnet.optimizer.step import dense
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync

ROUNDS = 4
PEERS = [PeerId(f"peer {index}") for index in range(4)]
LAYOUT = layout_of({"lm_head.weight": (40, 64), "model.norm.weight": (40,)})


@dataclass(frozen=True)
class Swarm:
    manifest: Manifest
    payloads: dict  # (round, peer) -> bytes

    def replica(self):
        method = method_of(self.manifest, LAYOUT)
        units = with_zero_momentum(torch.arange(LAYOUT.size, dtype=torch.int32), method.state)
        return Replica(layout=LAYOUT, method=method, units=units)


def swarm(**sync):
    manifest = Manifest("test", PeerId("owner"), sync=Sync(topk_per_chunk=256, warmup_rounds=2, **sync))
    generator = torch.Generator().manual_seed(0)
    payloads = {}
    for peer in PEERS:
        method = method_of(manifest, LAYOUT)
        for round in range(ROUNDS):
            gradient = torch.randn(LAYOUT.size, generator=generator)
            for start, stop in LAYOUT.padding:
                gradient[start:stop] = 0
            payloads[round, peer] = method.contribute(gradient, 1, round, peer)
    return Swarm(manifest, payloads)


SWARMS = [
    swarm(method=method, selection=selection, transform=transform)
    for method, selection, transform in [
        ("demo-sign", "group", "hadamard"),
        *((method, "top-k", "dct") for method in METHODS),
    ]
] + [swarm(method="sign-muon", weights="agreement")]  # fmt: skip


def in_order(swarm, dropped=frozenset()):
    """Digests of a replica that gets everything in time."""
    replica = swarm.replica()
    digests = []
    for round in range(ROUNDS):
        for peer in PEERS:
            if (round, peer) not in dropped:
                replica.add(round, peer, swarm.payloads[round, peer])
        replica.apply(round)
        digests.append(replica.settle(round))
    return digests, replica


@given(st.sampled_from(SWARMS), st.data())
def test_late_early_and_replaced_contributions_settle_to_the_same_bits(swarm, data):
    """Any order in which a round's contributions and its application come before its settlement."""
    every = sorted(swarm.payloads)
    dropped = frozenset(data.draw(st.lists(st.sampled_from(every), unique=True, max_size=5), label="drop"))
    replaced = data.draw(st.lists(st.sampled_from(every), unique=True, max_size=3), label="replaced")
    events = [("add", *key) for key in every if key not in dropped]
    events += [("apply", round, "") for round in range(ROUNDS)]
    # A wrong payload that is taken out again: the right one goes in at that place.
    events = [("replace", *event[1:]) if event[1:] in replaced else event for event in events]
    events = data.draw(st.permutations(events), label="events")
    replica = swarm.replica()
    left = {round: sum(event[1] == round for event in events) for round in range(ROUNDS)}
    digests = []
    for kind, round, peer in events:
        if kind == "apply":
            replica.apply(round)
        elif kind == "add":
            replica.add(round, peer, swarm.payloads[round, peer])
        else:
            other = swarm.payloads[(round + 1) % ROUNDS, PEERS[0]]
            replica.add(round, peer, other)
            replica.remove(round, peer)
            replica.add(round, peer, swarm.payloads[round, peer])
        left[round] -= 1
        while len(digests) < ROUNDS and left[len(digests)] == 0:
            digests.append(replica.settle(len(digests)))
    expected, straight = in_order(swarm, dropped)
    assert digests == expected
    assert torch.equal(replica.settled_units(), straight.settled_units())
    assert torch.equal(replica.live_floats(False), to_floats(replica.settled_units()[: LAYOUT.size]))


@pytest.mark.parametrize("swarm", SWARMS)
def test_a_late_contribution_corrects_the_live_weights_at_once(swarm):
    late, early = swarm.replica(), swarm.replica()
    for peer in PEERS:
        early.add(0, peer, swarm.payloads[0, peer])
    early.apply(0)
    for peer in PEERS[:2]:
        late.add(0, peer, swarm.payloads[0, peer])
    late.apply(0)
    assert not torch.equal(late.live_floats(False), early.live_floats(False))
    for peer in PEERS[2:]:
        late.add(0, peer, swarm.payloads[0, peer])
    assert torch.equal(late.live_floats(False), early.live_floats(False))


@pytest.mark.parametrize("swarm", SWARMS)
def test_open_rounds_are_in_the_live_weights_and_not_in_the_settled_ones(swarm):
    replica = swarm.replica()
    before = replica.settled_units()
    for round in (0, 1):
        replica.add(round, PEERS[0], swarm.payloads[round, PEERS[0]])
        replica.apply(round)
    assert torch.equal(replica.settled_units(), before)
    assert not torch.equal(replica.live_floats(False), to_floats(before[: LAYOUT.size]))
    assert replica.applied_round == 1
    replica.settle(0)
    assert replica.settled_round == 0
    assert not torch.equal(replica.settled_units(), before)


def test_a_round_without_contributions_is_a_step_of_zero():
    replica = SWARMS[0].replica()
    before = replica.settled_units()
    replica.apply(0)
    digest = replica.settle(0)
    assert torch.equal(replica.settled_units(), before)
    expected = hashlib.sha256((0).to_bytes(8, "little") + np.arange(LAYOUT.size, dtype="<i4").tobytes())
    assert digest == expected.digest()


def test_the_digest_names_the_round_as_well_as_the_weights():
    replica = SWARMS[0].replica()
    start = replica.digest()
    replica.apply(0)
    assert replica.settle(0) != start


@pytest.mark.parametrize("swarm", SWARMS)
def test_a_replica_can_start_from_a_snapshot(swarm):
    digests, _ = in_order(swarm)
    first = swarm.replica()
    for round in (0, 1):
        for peer in PEERS:
            first.add(round, peer, swarm.payloads[round, peer])
        first.apply(round)
        first.settle(round)
    joined = Replica(
        layout=LAYOUT, method=method_of(swarm.manifest, LAYOUT), units=first.settled_units(), settled_round=1
    )
    assert joined.digest() == digests[1]
    for round in range(2, ROUNDS):
        for peer in PEERS:
            joined.add(round, peer, swarm.payloads[round, peer])
        joined.apply(round)
        assert joined.settle(round) == digests[round]


def test_misuse_is_refused_and_says_what_is_next():
    swarm = SWARMS[0]
    replica = swarm.replica()
    with pytest.raises(ReplicaError, match="before it is applied"):
        replica.settle(0)
    with pytest.raises(ReplicaError, match="0 is next"):
        replica.settle(1)
    replica.apply(0)
    with pytest.raises(ReplicaError, match="applied already"):
        replica.apply(0)
    replica.settle(0)
    with pytest.raises(ReplicaError, match="settled"):
        replica.add(0, PEERS[0], swarm.payloads[0, PEERS[0]])
    with pytest.raises(ReplicaError, match="settled"):
        replica.apply(0)
    with pytest.raises(ReplicaError, match="int32"):
        Replica(layout=LAYOUT, method=method_of(swarm.manifest, LAYOUT), units=torch.zeros(LAYOUT.size))


def test_a_refused_contribution_changes_nothing():
    swarm = SWARMS[0]
    replica = swarm.replica()
    replica.apply(0)
    before = replica.live_floats(False)
    with pytest.raises(ContributionError):
        replica.add(0, PEERS[0], b"nothing")
    assert torch.equal(replica.live_floats(False), before)
    replica.add(0, PEERS[0], swarm.payloads[0, PEERS[0]])
    with pytest.raises(KeyError):
        replica.remove(0, PEERS[1])


def test_ahead_moves_the_live_weights_by_the_own_momentum_until_the_round_is_applied():
    swarm = SWARMS[0]
    method = method_of(swarm.manifest, LAYOUT)
    replica = Replica(layout=LAYOUT, method=method, units=torch.zeros(LAYOUT.size, dtype=torch.int32))
    gradient = torch.zeros(LAYOUT.size)
    gradient[: 40 * 64] = torch.randn(40 * 64, generator=torch.Generator().manual_seed(3))
    payload = method.contribute(gradient, 1, 0, PEERS[0])
    assert not replica.live_floats(False).any()
    ahead = replica.live_floats(True)
    assert torch.equal(ahead, to_floats(dense(method.lookahead(0), LAYOUT)))
    moved = ahead[: 40 * 64]
    assert float((torch.sign(moved) == -torch.sign(gradient[: 40 * 64])).float().mean()) > 0.99
    replica.add(0, PEERS[0], payload)
    replica.apply(0)
    live = to_units(replica.live_floats(False))
    assert live.any()
    assert torch.equal(replica.live_floats(True), to_floats(live + dense(method.lookahead(1), LAYOUT)))
