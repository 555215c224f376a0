"""Whoever joins where one of four holders lies ends with the honest state."""

from collections import Counter
from types import SimpleNamespace

import torch
from wan_liar import LIES, joins

from peers.snapshots import NOT_BEGUN, SNAPSHOTS_KEPT, Snapshots, Weights
from peers.state_path import StatePath
from protocols.identity import Identity
from swarmnet.identifiers import RunId
from swarmnet.manifest import Rounds


def test_ten_of_ten_joins_against_a_lying_holder_end_with_the_honest_digest():
    found = joins(10, seed=1)
    assert Counter(lie for lie, *_ in found) == dict.fromkeys(LIES, 2)
    assert [join for join in found if not join[1]] == []
    assert sum(refused for lie, _, refused, _ in found if lie == "wrong chunks") > 0


def test_a_snapshot_that_is_being_fetched_is_kept_while_newer_ones_are_made():
    snapshots = Snapshots(Identity.from_seed(b"holder"), RunId("0" * 64), 1, Rounds(snapshot_rounds=1))
    digests = []
    for round in range(6):
        snapshots.hold(Weights(torch.full((8,), round, dtype=torch.int32), round, b"c" * 32))
        digests.append(snapshots.held[0].root.digest)
        assert round < 1 or snapshots.find(digests[1]) is not None
    assert [snapshot.root.round for snapshot in snapshots.held] == [5, 4, 1]
    path = SimpleNamespace(snapshots=snapshots, settled_now=lambda: NOT_BEGUN)
    assert len(StatePath._state(path).roots) == SNAPSHOTS_KEPT, "of large ones three do not fit in a header"
