"""Audit the results of reducers (swarmnet/rounds/audits.py).

A peer requests the slices behind a result, sends its own slices on request, and passes on the proof that a
reducer's result is invalid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from peers.compute.executor import FORWARD, Compute
from peers.network.orders.gatekeeper import LIAR
from peers.network.peer_links import PeerLinks
from peers.telemetry import events as noted
from peers.worker.rounds.proofs import Proofs
from peers.worker.rounds.update_compute import UpdateWork
from protocols.errors import Malformed, WireError
from protocols.messages.table import FraudProof
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, claimed, open_envelope
from protocols.signed.slices import head_bytes, open_slices
from swarmnet.identifiers import ContributionId, PeerId, RunId
from swarmnet.optimizer.method import ContributionError, ReducedMethod
from swarmnet.rounds import events
from swarmnet.rounds.audits import AuditQuery, Audits, Name, answer_seconds
from swarmnet.rounds.machine import GroupRounds
from swarmnet.rounds.result_table import Contributor, Table, tag_of


class AuditPath(Proofs[AuditQuery]):
    def __init__(
        self,
        audits: Audits,
        reduced: ReducedMethod,
        work: UpdateWork,
        rounds: GroupRounds,
        compute: Compute,
        neighbourhood: PeerLinks,
        feed: Callable[[events.Event], None],
        log_event: noted.LogEvent,
        folder: Path | None,
    ) -> None:
        """Slices are kept for as long as it is undecided whether own contributions settle."""
        delay = rounds.offers.delay
        super().__init__(audits, rounds, compute, neighbourhood, feed, log_event, folder, delay)
        self.reduced = reduced
        self.outcome = partial(outcome_of, run_id=work.run_id, stage=work.stage, reduced=reduced)

    def came(self, reference: events.Reference, result: bytes, table: Table) -> None:
        """Called with a checked result of an open round: request the slices of the shards that are drawn for
        an audit, among those in which the result may count."""
        reducing = self.rounds.reducing
        if reducing is None or not self.rounds.in_step:
            return
        countable = reducing.countable(reference.round, table)
        for shard in self.audits.drawn(reference.id, countable, len(reducing.members)):
            question = self._question((reference.id, shard), reference.round, reference.peer, reference.peer)
            question.result, question.contributors = result, table.shards[shard]
            question.until += answer_seconds(len(table.shards[shard]), self._body_bytes(shard))
            self.ask(question)

    def own(self, question: AuditQuery) -> AuditQuery:
        return question

    def about(self, message: FraudProof, asked: PeerId) -> AuditQuery | None:
        if message.shard >= len(self.reduced.slice_bytes):
            return None
        name = (ContributionId(message.result), message.shard)
        return self._question(name, message.round, PeerId(message.peer), asked)

    def _question(self, name: Name, round: int, contributor: PeerId, asked: PeerId) -> AuditQuery:
        return AuditQuery(name, round, contributor, asked, self.until())

    def take(self, question: AuditQuery, body: bytes) -> None:
        """Implements `Proofs.take`: in a proof the result comes first, then the slices."""
        if body[1:2] == bytes([EnvelopeKind.CONTRIBUTION]):
            self._take_result(question, body)
        else:
            self._take_slice(question, body)

    def judge(self, question: AuditQuery) -> None:
        self.compute.submit(FORWARD, partial(self.outcome, question), partial(self._judged, question))

    def _take_result(self, question: AuditQuery, result: bytes) -> None:
        """Accept the result that a proof begins with. Raises WireError, ContributionError."""
        if question.result:
            return
        table, _ = self.reduced.head(result[ENVELOPE_BYTES:])
        contributors, shard = table.shards.get(question.name[1], frozenset()), question.name[1]
        if not contributors:
            raise Malformed("a proof about a shard that is not in the result")
        question.result, question.contributors = result, contributors
        question.until += answer_seconds(len(contributors), self._body_bytes(shard))

    def _take_slice(self, question: AuditQuery, body: bytes) -> None:
        """Accept one slice; its signature is verified later together with the others. Raises WireError."""
        if not question.result:
            return  # The first body is lost, and the others are useless without it.
        tag = tag_of(claimed(body)[0])
        named = [one for one in question.contributors if one.peer == tag]
        if not named or len(body) != self._body_bytes(question.name[1]):
            raise Malformed("a slice that the result's table does not name, or none of the run's")
        question.slices.setdefault(named[0], body)

    def _body_bytes(self, shard: int) -> int:
        return head_bytes(len(self.reduced.slice_bytes)) + self.reduced.slice_bytes[shard]

    def _judged(self, question: AuditQuery, found: tuple[str, str], _seconds: float) -> None:
        outcome, reason = found
        self.audits.end(question)
        if outcome == "lied":
            self._convict(question)
        elif outcome != "agrees" or question.is_proof:
            self.failed(question, "not_in_order", reason or "slices that give the sums prove no fraud")
        else:
            self.record_outcome(question, outcome)

    def failed(self, question: AuditQuery, outcome: str, reason: str = "") -> None:
        """Implements `Proofs.failed`."""
        if question.is_proof:
            self.audits.record_invalid_proof(question)
            self.neighbourhood.part_from(question.asked, "malformed", reason)
        else:
            self.record_outcome(question, outcome)
            self.feed(events.Unanswered(question.contributor, self.rounds.current))

    def _convict(self, question: AuditQuery) -> None:
        liar = question.contributor
        if not self.audits.is_news(liar, question.round):
            return
        self.proven(question, [question.result, *(question.slices[one] for one in sorted(question.slices))])
        question.result, question.slices = b"", {}
        self.feed(events.Convicted(liar, self.audits.convicted[liar]))
        reason = f"the sums of its result for round {question.round} do not follow from the signed slices"
        self.neighbourhood.part_from(liar, LIAR, reason)
        self.look()


def outcome_of(question: AuditQuery, run_id: RunId, stage: int, reduced: ReducedMethod) -> tuple[str, str]:
    """Judge a query whose evidence is complete; a pure function of signed bytes. Runs in the compute thread.

    Returns `agrees`, `lied` (the sums do not follow from the slices) or `not_in_order` (evidence that proves
    nothing), and the reason for the last."""
    identity, shard = question.name
    payload = question.result[ENVELOPE_BYTES:]
    try:
        table, length = reduced.head(payload)
        head = open_envelope(
            question.result[: ENVELOPE_BYTES + length], run_id, EnvelopeKind.CONTRIBUTION, length
        )
        named = (question.contributor, stage, question.round, identity)
        if (head.sender, head.stage, head.round, head.id) != named:
            raise Malformed("another result than was named")
        found: dict[Contributor, bytes] = {}
        for body in question.slices.values():
            slices = open_slices(body, run_id, [shard], reduced.slice_bytes)
            if (slices.stage, slices.round) != (stage, question.round):
                raise Malformed("a slice of another round, or another stage")
            found[Contributor.of(slices.sender, slices.id, slices.tokens)] = slices.data[shard]
        if found.keys() != table.shards.get(shard):
            raise Malformed("other slices than the result's table names")
        return ("agrees" if reduced.follows(payload, shard, found) else "lied"), ""
    except (WireError, ContributionError) as error:
        return "not_in_order", str(error)
