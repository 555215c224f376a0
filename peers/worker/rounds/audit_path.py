"""Audit the results of reducers (swarmnet/rounds/audits.py).

A peer requests the slices behind a result, sends its own slices on request, and passes on the proof that a
reducer's result is invalid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from peers.compute.executor import FORWARD, Compute
from peers.network.message_router import handles
from peers.network.orders.gatekeeper import LIAR
from peers.network.peer_links import PeerLinks
from peers.state.unnamed_file import store_unnamed
from peers.telemetry import log_events
from peers.worker.rounds.update_compute import UpdateWork
from peers.worker.rounds.upload_scheduler import UploadQueue
from protocols.errors import Malformed, WireError
from protocols.messages.table import Evidence, FraudProof, GetSlices
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, claimed, open_envelope
from protocols.signed.slices import head_bytes, open_slices
from swarmnet.identifiers import ContributionId, PeerId, RunId
from swarmnet.optimizer.method import ContributionError, ReducedMethod
from swarmnet.rounds import events
from swarmnet.rounds.audits import MAX_OF_RESULT, AuditQuery, Audits, Name, answer_seconds
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.result_table import Contributor, Table, tag_of

MIN_ON_DISK = 1 << 20
"""Evidence of at least this many bytes goes to disk; less stays in memory."""
Piece = tuple[Name, int]
"""The name of kept evidence, and the index of one body in it."""


@dataclass(frozen=True, slots=True)
class StoredProof:
    round: int | None
    """The round of the evidence; None for a proof, which is kept longer than the round."""
    bodies: Sequence[bytes | memoryview]


@dataclass(eq=False, kw_only=True)
class AuditPath:
    audits: Audits
    reduced: ReducedMethod
    work: UpdateWork
    rounds: GroupRounds
    compute: Compute
    neighbourhood: PeerLinks
    feed: Callable[[events.Event], None]
    log_event: log_events.LogEvent
    folder: Path | None
    """The folder for long evidence; None keeps it in memory."""
    kept: dict[Name, StoredProof] = field(default_factory=dict, init=False)
    """Evidence that this peer sends on request: its own and the newest proofs. It is kept as long as it is
    undecided whether own contributions settle."""
    _sent: Counter[tuple[PeerId, ContributionId]] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        queued = partial(self.neighbourhood.queued_bytes, lane="group")
        self.giving: UploadQueue[Piece] = UploadQueue(self._send, queued, self.neighbourhood.clock)

    # -- what this peer gives ---------------------------------------------------------------------------

    def keep(self, name: Name, round: int | None, bodies: Sequence[bytes]) -> None:
        size = sum(map(len, bodies))
        self.kept[name] = StoredProof(
            round, store_unnamed(bodies, self.folder) if size >= MIN_ON_DISK else bodies
        )

    def settled(self, round: int) -> None:
        before = round - self.rounds.offers.delay
        old = [name for name, kept in self.kept.items() if kept.round is not None and kept.round <= before]
        for name in old:
            del self.kept[name]
        results = {result for result, _ in old}
        for given in [given for given in self._sent if given[1] in results]:
            del self._sent[given]

    @handles(GetSlices)
    def _on_query(self, peer: PeerId, request: GetSlices, _body: bytes) -> None:
        name = (ContributionId(request.result), request.shard)
        kept = self.kept.get(name)
        if kept is None or self._sent[peer, name[0]] >= MAX_OF_RESULT:
            return
        self._sent[peer, name[0]] += 1
        self.giving.wanted(peer, ((name, place) for place in range(len(kept.bodies))))

    def _send(self, peer: PeerId, piece: Piece) -> None:
        name, place = piece
        kept = self.kept.get(name)
        if kept is not None:
            self.neighbourhood.post(peer, "group", Evidence(*name), kept.bodies[place])

    # -- what others have -------------------------------------------------------------------------------

    def look(self) -> None:
        """Once a second: give up overdue queries, and send proofs to neighbours that lack them."""
        for question in self.audits.overdue(self.neighbourhood.clock.time()):
            if not question.is_proof:
                self.failed(question, "unanswered")
        for peer, proof in self.to_tell():
            self._send_proof(peer, proof)

    def to_tell(self) -> Iterator[tuple[PeerId, AuditQuery]]:
        return self.audits.to_tell(self.rounds.neighbours)

    def left(self, peer: PeerId) -> None:
        self.audits.left(peer)
        self.giving.left(peer)

    def close(self) -> None:
        self.giving.close()

    def until(self) -> float:
        """Return the deadline of a query sent now, without the extra time that a slow link needs."""
        return self.neighbourhood.clock.time() + self.rounds.rules.contribution_timeout_seconds

    def ask(self, question: AuditQuery) -> bool:
        """Send a query. Returns whether it was sent."""
        if not self.audits.ask(question):
            return False
        if not self.neighbourhood.post(question.asked, "group", GetSlices(*question.name)):
            self.audits.end(question)
            return False
        return True

    @handles(Evidence)
    def _evidence(self, peer: PeerId, message: Evidence, body: bytes) -> None:
        question = self.audits.pending_query(peer, (ContributionId(message.result), message.shard))
        if question is None or question.is_whole:
            return  # It came too late.
        try:
            self.take(question, body)
        except (WireError, ContributionError) as error:
            self.audits.end(question)
            self.failed(question, "not_in_order", str(error))
            return
        if question.is_whole:
            question.until = float("inf")
            self.judge(question)

    def record_outcome(self, question: AuditQuery, outcome: str) -> None:
        self.audits.outcomes[outcome] += 1
        result, shard = question.name
        self.log_event(
            log_events.Audited(
                outcome, question.contributor, question.round, result.hex(), shard, question.asked
            )
        )

    def proven(self, question: AuditQuery, bodies: Sequence[bytes]) -> None:
        """Called when evidence proves an invalid result: keep the proof for peers that request it."""
        self.record_outcome(question, "lied")
        self.keep(question.name, None, bodies)
        for name in self.audits.proves(question):
            self.kept.pop(name, None)

    @handles(FraudProof)
    def _on_fraud_proof(self, peer: PeerId, message: FraudProof, _body: bytes) -> None:
        liar = PeerId(message.peer)
        if not self.audits.is_news(liar, message.round):
            if self.audits.knows(peer, liar, message.round):
                self._send_proof(peer, self.audits.proofs[liar])  # It need not send it again.
        elif liar != self.rounds.me and self._is_known(liar):
            question = self.about(message, peer)
            if question is not None:
                self.ask(question)

    def _is_known(self, peer: PeerId) -> bool:
        """Return whether a fraud proof against this peer matters: its contributions have weight here, or it
        was convicted of a later round."""
        return peer in self.audits.convicted or self.rounds.admission.has_weight(peer, self.rounds.current)

    def _send_proof(self, peer: PeerId, proof: AuditQuery) -> None:
        self.neighbourhood.post(peer, "group", FraudProof(proof.contributor, proof.round, *proof.name))

    # -- what the evidence is ---------------------------------------------------------------------------

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

    def about(self, message: FraudProof, asked: PeerId) -> AuditQuery | None:
        """Return the query to send to a peer that claims to have a proof; None if it cannot have one."""
        if message.shard >= len(self.reduced.slice_bytes):
            return None
        name = (ContributionId(message.result), message.shard)
        return self._question(name, message.round, PeerId(message.peer), asked)

    def _question(self, name: Name, round: int, contributor: PeerId, asked: PeerId) -> AuditQuery:
        return AuditQuery(name, round, contributor, asked, self.until())

    def take(self, question: AuditQuery, body: bytes) -> None:
        """Accept one body of the answer; in a proof the result comes first, then the slices.

        Raises WireError, ContributionError."""
        if body[1:2] == bytes([EnvelopeKind.CONTRIBUTION]):
            self._take_result(question, body)
        else:
            self._take_slice(question, body)

    def judge(self, question: AuditQuery) -> None:
        """Called when the answer is complete."""
        work = self.work
        outcome = partial(outcome_of, question, work.run_id, work.stage, self.reduced)
        self.compute.submit(FORWARD, outcome, partial(self._judged, question))

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
        """Called when a query got no answer, or one that proves nothing."""
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
