"""Request the evidence behind results of reducers, send this peer's own, and pass fraud proofs from neighbour
to neighbour. audit_path.py defines what the evidence is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from peers.compute.executor import Compute
from peers.network.message_router import handles
from peers.network.peer_links import PeerLinks
from peers.state.unnamed_file import store_unnamed
from peers.telemetry import log_events
from peers.worker.rounds.upload_scheduler import UploadQueue
from protocols.errors import WireError
from protocols.messages.table import Evidence, FraudProof, GetSlices
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.optimizer.method import ContributionError
from swarmnet.rounds import events
from swarmnet.rounds.audits import MAX_OF_RESULT, AuditQuery, Audits, Name
from swarmnet.rounds.group_rounds import GroupRounds

MIN_ON_DISK = 1 << 20
"""Evidence of at least this many bytes goes to disk; less stays in memory."""
Piece = tuple[Name, int]
"""The name of kept evidence, and the index of one body in it."""
Asked = TypeVar("Asked", bound=AuditQuery)


@dataclass(frozen=True, slots=True)
class StoredProof:
    round: int | None
    """The round of the evidence; None for a proof, which is kept longer than the round."""
    bodies: Sequence[bytes | memoryview]


class Proofs(ABC, Generic[Asked]):
    def __init__(
        self,
        *,
        audits: Audits,
        rounds: GroupRounds,
        compute: Compute,
        neighbourhood: PeerLinks,
        feed: Callable[[events.Event], None],
        log_event: log_events.LogEvent,
        folder: Path | None,
        kept_rounds: int,
    ) -> None:
        """`folder` is where long evidence is stored; None keeps it in memory. Evidence is dropped after
        `kept_rounds` settled rounds."""
        self.audits = audits
        self.rounds = rounds
        self.compute = compute
        self.neighbourhood = neighbourhood
        self.clock = neighbourhood.clock
        self.me = neighbourhood.transport.peer
        self.feed = feed
        self.log_event = log_event
        self.folder = folder
        self.kept_rounds = kept_rounds
        self.kept: dict[Name, StoredProof] = {}
        """Evidence that this peer sends on request: its own and the newest proofs."""
        self._sent: Counter[tuple[PeerId, ContributionId]] = Counter()
        queued = partial(neighbourhood.queued_bytes, lane="group")
        self.giving: UploadQueue[Piece] = UploadQueue(self._send, queued, self.clock)

    # -- what this peer gives ---------------------------------------------------------------------------

    def keep(self, name: Name, round: int | None, bodies: Sequence[bytes]) -> None:
        size = sum(map(len, bodies))
        self.kept[name] = StoredProof(
            round, store_unnamed(bodies, self.folder) if size >= MIN_ON_DISK else bodies
        )

    def settled(self, round: int) -> None:
        before = round - self.kept_rounds
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
        for question in self.audits.overdue(self.clock.time()):
            if not question.is_proof:
                self.failed(self.own(question), "unanswered")
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
        return self.clock.time() + self.rounds.rules.contribution_timeout_seconds

    def ask(self, question: Asked) -> bool:
        """Send a query. Returns whether it was sent."""
        if not self.audits.ask(question):
            return False
        if not self.neighbourhood.post(question.asked, "group", GetSlices(*question.name)):
            self.audits.end(question)
            return False
        return True

    @handles(Evidence)
    def _evidence(self, peer: PeerId, message: Evidence, body: bytes) -> None:
        found = self.audits.pending_query(peer, (ContributionId(message.result), message.shard))
        if found is None or found.is_whole:
            return  # It came too late.
        question = self.own(found)
        try:
            self.take(question, body)
        except (WireError, ContributionError) as error:
            self.audits.end(question)
            self.failed(question, "not_in_order", str(error))
            return
        if question.is_whole:
            question.until = float("inf")
            self.judge(question)

    @abstractmethod
    def own(self, question: AuditQuery) -> Asked:
        """Return the query in this class's own type; all open queries were made here."""

    @abstractmethod
    def take(self, question: Asked, body: bytes) -> None:
        """Accept one body of the answer. Raises WireError, ContributionError."""

    @abstractmethod
    def judge(self, question: Asked) -> None:
        """Called when the answer is complete."""

    @abstractmethod
    def failed(self, question: Asked, outcome: str, reason: str = "") -> None:
        """Called when a query got no answer, or one that proves nothing."""

    @abstractmethod
    def about(self, message: FraudProof, asked: PeerId) -> Asked | None:
        """Return the query to send to a peer that claims to have a proof; None if it cannot have one."""

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
        elif liar != self.me and self._is_known(liar):
            question = self.about(message, peer)
            if question is not None:
                self.ask(question)

    def _is_known(self, peer: PeerId) -> bool:
        """Return whether a fraud proof against this peer matters: its contributions have weight here, or it
        was convicted of a later round."""
        return peer in self.audits.convicted or self.rounds.has_weight(peer, self.rounds.current)

    def _send_proof(self, peer: PeerId, proof: AuditQuery) -> None:
        self.neighbourhood.post(peer, "group", FraudProof(proof.contributor, proof.round, *proof.name))
