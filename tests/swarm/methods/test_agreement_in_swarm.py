"""Votes weighed by agreement: all peers settle the same weights, also newcomers and peers that restart."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from swarm import COST_SECONDS, TINY_MODEL, Swarm, shared_rounds, tiny_manifest

from peers.compute.executor import BACKWARD, FORWARD
from peers.lab.world.virtual_time import run
from peers.telemetry.snapshot import SwarmSnapshot
from peers.tools.top.live import snapshots
from peers.worker.worker import Worker
from protocols.signed.records import ANNOUNCE_SECONDS
from swarmnet.identifiers import PeerId
from swarmnet.optimizer.agreement.comparison import FULL_WEIGHT
from swarmnet.optimizer.agreement.ledger import AgreementLedger
from swarmnet.rounds.result_table import tag_of
from swarmnet.run.schema import Data, Sync

HONEST = ["a", "b", "c", "d", "e", "f"]
TINY = tiny_manifest(
    (1,),
    data=Data(seq_len=8, micro_batch_size=1),
    model=replace(TINY_MODEL, hidden_size=16, num_hidden_layers=1, intermediate_size=16),
    sync=Sync(method="sign-muon", fragments=1, learning_rate=8e-3, warmup_rounds=1, weights="agreement"),
)
MANIFEST = replace(TINY, rounds=replace(TINY.rounds, global_batch_tokens=128))


def slow(kind: int) -> float:
    """Seconds of compute: the swarm only passes the time while records grow old."""
    return COST_SECONDS[kind] * (10 if kind in (BACKWARD, FORWARD) else 1)


def replica_of(worker: Worker):
    assert worker.services is not None
    return worker.services.round_service.work.replica


def weights_of(worker: Worker, peers: list[PeerId]) -> list[int]:
    """The weights in the ledger that a peer has settled."""
    replica = replica_of(worker)
    ledger = AgreementLedger()
    ledger.load(replica.settled_units()[replica.size :].numpy())
    return ledger.weights(99, [tag_of(peer) for peer in peers])


def lie(worker: Worker) -> None:
    """Let a peer contribute the opposite of its votes from now on."""
    assert worker.services is not None
    method = worker.services.part.method
    contribute = method.contribute
    method.contribute = lambda *of: bytes(byte ^ 255 for byte in contribute(*of))


def test_a_liar_loses_its_votes_and_newcomers_and_restarted_peers_agree_on_it(tmp_path):
    swarm = Swarm(MANIFEST)

    def settled() -> int:
        return min((settled for _, settled in swarm.rounds().values()), default=-1)

    async def story() -> None:
        swarm.open()
        workers = {
            name: swarm.start(name, 0, in_flight=1, compute=slow, checkpoints=tmp_path / name)
            for name in HONEST
        }
        liar = swarm.start("liar", 0, in_flight=1, compute=slow)
        await swarm.until(lambda: liar.worker.services is not None, 20.0)
        lie(liar.worker)
        await swarm.until(lambda: settled() >= 8, 90.0)
        peers = [workers[name].peer for name in HONEST]
        assert weights_of(workers["a"].worker, [*peers, liar.peer]) == [FULL_WEIGHT] * 6 + [0]
        await swarm.during(ANNOUNCE_SECONDS)
        found = SimpleNamespace(signed=swarm.signed, directory=swarm.network.directory(PeerId("visitor")))
        shown.append(await anext(snapshots(found)))

        newcomer = swarm.start("newcomer", 0, in_flight=1, compute=slow)
        await swarm.crash("b")
        workers["b"] = swarm.start("b", 0, in_flight=1, compute=slow, checkpoints=tmp_path / "b")
        later = settled() + 6
        await swarm.until(lambda: len(swarm.rounds()) == 8 and settled() > later, 90.0)
        assert weights_of(newcomer.worker, [*peers, liar.peer]) == [FULL_WEIGHT] * 6 + [0]
        await swarm.close()

    shown: list[SwarmSnapshot] = []
    run(story())
    assert shared_rounds(swarm) > 12
    seen = shown[0]
    liar = swarm.members["liar"].peer
    assert {row.vote_weight for row in seen.rows if row.peer != liar} == {1.0}
    assert [row.vote_weight for row in seen.rows if row.peer == liar] == [0.0]
    assert not any(row.is_new_voter for row in seen.rows)
    assert liar in seen.doubts[0]
    assert "its votes weigh 0%" in seen.doubts[0]
    assert (len(seen.doubts), seen.weight_conflicts) == (2, {}), "one sentence, and how to ban"
