"""Whoever joins where one of four holders lies ends with the honest state."""

from collections import Counter
from types import SimpleNamespace

import torch
from clocks import on_virtual_clock
from swarm import Swarm, shared_rounds, tiny_manifest
from wan_liar import LIES, joins

from peers.state.snapshot_service import SnapshotService
from peers.state.snapshot_store import NOT_BEGUN, SNAPSHOTS_KEPT, Snapshots, Weights
from protocols.signed.identity import Identity
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import seal_record
from swarmnet.identifiers import RunId
from swarmnet.membership.overlay import choose_neighbours
from swarmnet.run.schema import Rounds


def test_joins_against_a_lying_holder_end_with_the_honest_digest_whatever_the_lie():
    found = joins(len(LIES), seed=1)
    assert Counter(lie for lie, *_ in found) == dict.fromkeys(LIES, 1)
    assert [join for join in found if not join[1]] == []
    assert sum(refused for lie, _, refused, _ in found if lie == "wrong chunks") > 0


def test_a_snapshot_that_is_being_fetched_is_kept_while_newer_ones_are_made():
    snapshots = Snapshots(
        identity=Identity.from_seed(b"holder"),
        run_id=RunId("0" * 64),
        stage=1,
        rules=Rounds(snapshot_interval=1),
    )
    digests = []
    for round in range(6):
        snapshots.hold(Weights(torch.full((8,), round, dtype=torch.int32), round, b"c" * 32))
        digests.append(snapshots.held[0].root.digest)
        assert round < 1 or snapshots.find(digests[1]) is not None
    assert [snapshot.root.round for snapshot in snapshots.held] == [5, 4, 1]
    path = SimpleNamespace(snapshots=snapshots, progress=lambda: NOT_BEGUN)
    assert len(SnapshotService._make_offer(path).roots) == SNAPSHOTS_KEPT, (
        "of large ones three do not fit in a header"
    )


class Mute:
    """Takes links and messages, and says nothing: as libp2p does for a process that is stopped."""

    def received(self, *arguments):
        pass

    lost = refused = received


@on_virtual_clock
async def test_a_newcomer_whose_neighbours_are_all_mute_begins_no_second_history():
    """Their records are more than a peer's neighbours are, and those who train are none of these."""
    swarm = Swarm(tiny_manifest(stages=(1, 2)), stub=True)
    swarm.open()
    for name, stage in {"a": 0, "b": 1, "c": 1}.items():
        swarm.start(name, stage, in_flight=1)
    await swarm.until(lambda: swarm.rounds().get("b", (0, -1))[1] >= 24, 120.0)
    newcomer = Identity.from_seed(b"newcomer").peer_id
    honest = [swarm.members[name].peer for name in "bc"]
    run_id, mute, number = swarm.signed.run_id, [], 0
    while len(mute) < 30 or set(honest) & choose_neighbours(newcomer, [*honest, *mute]):
        identity = Identity.from_seed(f"mute {number}".encode())
        number += 1
        mute.append(identity.peer_id)
        swarm.network.transport(identity.peer_id).listen(Mute())
        record = PeerRecord(identity.peer_id, 1, "worker", [f"/memory/{identity.peer_id}"], 0, 0.0, "")
        directory = swarm.network.directory(identity.peer_id)
        await directory.announce(run_id, 1, seal_record(identity, run_id, record, directory.now()), 5.0)
    swarm.start("newcomer", 1)
    await swarm.until(lambda: swarm.of("settled", "newcomer"), 120.0)
    assert swarm.of("fetched", "newcomer")
    await swarm.close()
    assert shared_rounds(swarm) > 0
