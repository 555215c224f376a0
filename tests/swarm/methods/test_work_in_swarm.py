"""What the workers of a swarm commit to, computed again from what settled."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from swarm import Swarm, corpus, tiny_manifest

from peers.lab.bench.work.audits import Auditor, SettledWork
from peers.lab.world.virtual_time import run
from peers.worker.rounds.update_compute import Add, Made, UpdateWork
from protocols.signed.envelope import ENVELOPE_BYTES
from swarmnet.audits.verdict import Evidence
from swarmnet.audits.windows import ends_window
from swarmnet.rounds.events import SettleRound
from swarmnet.rounds.history import START
from swarmnet.run.manifest import Sync

EVERY = 3


class Witness:
    """Sees all that passes through the compute threads of a swarm."""

    def __init__(self, known: SettledWork, monkeypatch) -> None:
        self.known = known
        self.commitments = defaultdict(dict)
        self.carried = defaultdict(dict)
        self.payloads, self.settled = {}, {}
        self._real = UpdateWork.run
        monkeypatch.setattr(UpdateWork, "run", self._run_of())

    def _run_of(self):
        def run(work, operations):
            results = []
            for operation in operations:  # One by one: a window may end with the first of them.
                carried = work.log.carried
                results += (done := self._real(work, [operation]))
                self._saw(work, operation, done, carried)
            return results

        return run

    def _saw(self, work, operation, done, carried) -> None:
        match operation:
            case Add(round, peer, payload):
                self.payloads[round, peer] = payload
            case SettleRound(round, references, chain) if round not in self.settled:
                self.settled[round] = {each.peer: self.payloads[round, each.peer] for each in references}
                self.known.settled(round, work.replica.settled_units(), self.settled[round], chain)
        for made in done:
            if isinstance(made, Made) and made.commitment is not None:
                me, commitment = work.identity.peer_id, made.commitment
                self.commitments[me][made.round] = commitment
                self.carried[me].setdefault(commitment.begun, carried)
                self.payloads[made.round, me] = made.data[ENVELOPE_BYTES:]

    def windows(self):
        for peer, of_peer in self.commitments.items():
            for begun in sorted({each.begun for each in of_peer.values()}):
                window = tuple(of_peer[at] for at in sorted(of_peer) if of_peer[at].begun == begun)
                after = [of_peer[at] for at in sorted(of_peer) if at > window[-1].round]
                if after and ends_window(window[-1].round, peer, EVERY):
                    linked = after[0] if after[0].before == window[-1].name else None
                    yield Evidence(peer, window, self.carried[peer][begun], linked)


def test_what_workers_commit_to_in_a_swarm_follows_from_what_settled(monkeypatch):
    sync = Sync(
        method="local-steps", learning_rate=1e-2, warmup_rounds=1, decay_rounds=1000, step_tokens=64,
        afresh_rounds=EVERY,
    )  # fmt: skip
    manifest = replace(tiny_manifest(stages=(3,)), sync=sync)
    swarm = Swarm(manifest)
    known = SettledWork(manifest, corpus())
    witness = Witness(known, monkeypatch)

    async def story():
        swarm.open()
        for name in ("a", "b", "c"):
            swarm.start(name, 0, in_flight=2)
        await swarm.until(lambda: min((done for _, done in swarm.rounds().values()), default=0) >= 11, 120.0)
        await swarm.close()

    run(story())
    first = swarm.members["a"].worker.part
    known.settled(-1, first.first_units(), {}, START)
    auditor, verdicts = Auditor(manifest, known), Counter()
    for evidence in witness.windows():
        finding = auditor.judge(evidence)
        verdicts[finding.verdict] += 1
        assert finding.verdict != "lied", (finding, evidence)
    assert verdicts["agrees"] >= 6, verdicts
