"""Asks reducers for the slices behind their results, gives its own, and hands on the proof that one has lied
(swarmnet/rounds/audits.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from peers.compute.executor import FORWARD, Compute
from peers.network.neighbourhood import Neighbourhood
from peers.network.orders.gatekeeper import LIAR
from peers.state.unnamed_file import laid_down
from peers.telemetry import events as noted
from peers.worker.rounds.update_compute import UpdateWork
from peers.worker.rounds.upload_scheduler import Giving
from protocols.errors import Malformed, WireError
from protocols.messages.table import AskSlices, Evidence, Lied, Message
from protocols.signed.envelope import ENVELOPE_BYTES, Kind, claimed, open_envelope
from protocols.signed.slices import head_bytes, open_slices
from swarmnet.identifiers import ContributionId, PeerId, RunId
from swarmnet.optimizer.method import ContributionError, Reduced
from swarmnet.rounds import events
from swarmnet.rounds.audits import MOST_OF_RESULT, Audits, Name, Question, answer_seconds
from swarmnet.rounds.machine import GroupRounds
from swarmnet.rounds.result_table import Contributor, Table, tag_of

LEAST_ON_DISK = 1 << 20
"""Bytes of the slices of a shard; less stays in memory."""
Piece = tuple[Name, int]
"""Of what is kept of a shard, the how manieth body."""


@dataclass(frozen=True, slots=True)
class Kept:
    round: int | None
    """None: of a proof, kept longer than the round."""
    bodies: Sequence[bytes | memoryview]


class AuditPath:
    def __init__(
        self,
        audits: Audits,
        reduced: Reduced,
        work: UpdateWork,
        rounds: GroupRounds,
        compute: Compute,
        neighbourhood: Neighbourhood,
        feed: Callable[[events.Event], None],
        note: noted.Note,
        folder: Path | None,
    ) -> None:
        """`folder`: where long answers lie; None: in memory."""
        self.audits, self.reduced, self.rounds = audits, reduced, rounds
        self.judge = partial(outcome_of, run_id=work.run_id, stage=work.stage, reduced=reduced)
        self.compute, self.neighbourhood, self.clock = compute, neighbourhood, neighbourhood.clock
        self.me = neighbourhood.transport.peer
        self.feed, self.note, self.folder = feed, note, folder
        self.kept: dict[Name, Kept] = {}
        """What this peer gives to whoever asks: of own results, and of the newest proofs."""
        self._given: Counter[tuple[PeerId, ContributionId]] = Counter()
        queued = partial(neighbourhood.queued_bytes, lane="group")
        self.giving: Giving[Piece] = Giving(self._send, queued, self.clock)

    # -- what this peer has added up itself -------------------------------------------------------------

    def keep(self, name: Name, round: int | None, bodies: Sequence[bytes]) -> None:
        size = sum(map(len, bodies))
        self.kept[name] = Kept(round, laid_down(bodies, self.folder) if size >= LEAST_ON_DISK else bodies)

    def settled(self, round: int) -> None:
        """As long as it is open what becomes of own contributions, slices are kept."""
        before = round - self.rounds.offers.delay
        old = [name for name, kept in self.kept.items() if kept.round is not None and kept.round <= before]
        for name in old:
            del self.kept[name]
        results = {result for result, _ in old}
        for given in [given for given in self._given if given[1] in results]:
            del self._given[given]

    def _asked(self, peer: PeerId, name: Name) -> None:
        kept = self.kept.get(name)
        if kept is None or self._given[peer, name[0]] >= MOST_OF_RESULT:
            return
        self._given[peer, name[0]] += 1
        self.giving.wanted(peer, ((name, place) for place in range(len(kept.bodies))))

    def _send(self, peer: PeerId, piece: Piece) -> None:
        name, place = piece
        kept = self.kept.get(name)
        if kept is not None:
            self.neighbourhood.post(peer, "group", Evidence(*name), kept.bodies[place])

    # -- what others have ------------------------------------------------------------------------------

    def came(self, reference: events.Reference, result: bytes, table: Table) -> None:
        """Somebody's result of an open round, checked."""
        reducing = self.rounds.reducing
        if reducing is None or not self.rounds.in_step:
            return
        for shard in self.audits.drawn(reference.id, table, len(reducing.members)):
            question = self._question((reference.id, shard), reference.round, reference.peer, reference.peer)
            question.result, question.contributors = result, table.shards[shard]
            question.until += answer_seconds(len(table.shards[shard]), self._body_bytes(shard))
            self._ask(question)

    def look(self) -> None:
        """Once a second: what has not been answered, and who is to be told of whom."""
        for question in self.audits.overdue(self.clock.time()):
            if not question.is_proof:
                self._failed(question, "unanswered")
        for peer, proof in self.audits.to_tell(self.rounds.neighbours):
            self._tell(peer, proof)

    def left(self, peer: PeerId) -> None:
        self.audits.left(peer)
        self.giving.left(peer)

    def close(self) -> None:
        self.giving.close()

    def message(self, peer: PeerId, message: Message, body: bytes) -> None:
        """Of a member of the group; of others nothing."""
        if not self.rounds.maker_counts(peer, self.rounds.current):
            return
        match message:
            case AskSlices(result, shard):
                self._asked(peer, (ContributionId(result), shard))
            case Evidence(result, shard):
                self._evidence(peer, (ContributionId(result), shard), body)
            case Lied():
                self._lied(peer, message)

    def _question(self, name: Name, round: int, maker: PeerId, asked: PeerId) -> Question:
        return Question(name, round, maker, asked, self.clock.time() + self.rounds.rules.deadline_seconds)

    def _ask(self, question: Question) -> None:
        if self.audits.ask(question) and not self.neighbourhood.post(
            question.asked, "group", AskSlices(*question.name)
        ):
            self.audits.end(question)

    def _evidence(self, peer: PeerId, name: Name, body: bytes) -> None:
        question = self.audits.asked(peer, name)
        if question is None or question.is_whole:
            return  # It came too late.
        try:
            if body[1:2] == bytes([Kind.CONTRIBUTION]):
                self._begin(question, body)
            else:
                self._add(question, body)
        except (WireError, ContributionError) as error:
            self.audits.end(question)
            self._failed(question, "not_in_order", str(error))
            return
        if question.is_whole:
            question.until = float("inf")
            self.compute.submit(FORWARD, partial(self.judge, question), partial(self._judged, question))

    def _begin(self, question: Question, result: bytes) -> None:
        """A proof comes with the result. Raises WireError, ContributionError."""
        if question.result:
            return
        table, _ = self.reduced.head(result[ENVELOPE_BYTES:])
        contributors, shard = table.shards.get(question.name[1], frozenset()), question.name[1]
        if not contributors:
            raise Malformed("a proof about a shard that is not in the result")
        question.result, question.contributors = result, contributors
        question.until += answer_seconds(len(contributors), self._body_bytes(shard))

    def _add(self, question: Question, body: bytes) -> None:
        """One slice; its signature is verified with the others'. Raises WireError."""
        if not question.result:
            return  # What comes first is lost, and with it the rest.
        tag = tag_of(claimed(body)[0])
        named = [one for one in question.contributors if one.peer == tag]
        if not named or len(body) != self._body_bytes(question.name[1]):
            raise Malformed("a slice that the result's table does not name, or none of the run's")
        question.slices.setdefault(named[0], body)

    def _body_bytes(self, shard: int) -> int:
        return head_bytes(len(self.reduced.slice_bytes)) + self.reduced.slice_bytes[shard]

    def _judged(self, question: Question, found: tuple[str, str], _seconds: float) -> None:
        outcome, reason = found
        self.audits.end(question)
        if outcome == "lied":
            self._convict(question)
        elif outcome != "agrees" or question.is_proof:
            self._failed(question, "not_in_order", reason or "slices that give the sums prove no lie")
        else:
            self._note(question, outcome)

    def _failed(self, question: Question, outcome: str, reason: str = "") -> None:
        """No slices, or such that prove nothing."""
        if question.is_proof:
            self.audits.proves_nothing(question)
            self.neighbourhood.part_from(question.asked, "malformed", reason)
        else:
            self._note(question, outcome)
            self.feed(events.Unanswered(question.maker, self.rounds.current))

    def _note(self, question: Question, outcome: str) -> None:
        self.audits.outcomes[outcome] += 1
        result, shard = question.name
        self.note(noted.Audited(outcome, question.maker, question.round, result.hex(), shard, question.asked))

    def _convict(self, question: Question) -> None:
        liar = question.maker
        if not self.audits.is_news(liar, question.round):
            return
        self._note(question, "lied")
        bodies = [question.result, *(question.slices[one] for one in sorted(question.slices))]
        self.keep(question.name, None, bodies)
        question.result, question.slices = b"", {}
        for name in self.audits.proves(question):
            self.kept.pop(name, None)
        self.feed(events.Convicted(liar, self.audits.convicted[liar]))
        reason = f"the sums of its result for round {question.round} do not follow from the signed slices"
        self.neighbourhood.part_from(liar, LIAR, reason)
        self.look()

    def _lied(self, peer: PeerId, message: Lied) -> None:
        liar = PeerId(message.peer)
        if not self.audits.is_news(liar, message.round):
            if self.audits.knows(peer, liar, message.round):
                self._tell(peer, self.audits.proofs[liar])  # It need not say it again.
        elif liar != self.me and self._is_known(liar):
            name = (ContributionId(message.result), message.shard)
            if message.shard < len(self.reduced.slice_bytes):
                self._ask(self._question(name, message.round, liar, peer))

    def _is_known(self, peer: PeerId) -> bool:
        """Whether it could do harm here, or could until a later lie was proven."""
        return peer in self.audits.convicted or self.rounds.maker_counts(peer, self.rounds.current)

    def _tell(self, peer: PeerId, proof: Question) -> None:
        self.neighbourhood.post(peer, "group", Lied(proof.maker, proof.round, *proof.name))


def outcome_of(question: Question, run_id: RunId, stage: int, reduced: Reduced) -> tuple[str, str]:
    """`agrees`, `lied` or `not_in_order`, and why; of a question that is answered whole. A function of signed
    bytes. In the compute thread."""
    identity, shard = question.name
    payload = question.result[ENVELOPE_BYTES:]
    try:
        table, length = reduced.head(payload)
        head = open_envelope(question.result[: ENVELOPE_BYTES + length], run_id, Kind.CONTRIBUTION, length)
        named = (question.maker, stage, question.round, identity)
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
