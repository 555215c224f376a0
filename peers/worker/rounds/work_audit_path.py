"""Looks into windows of others' work, gives what it takes to look into the own ones, and hands on the proof
that somebody has lied (swarmnet/audits/).

What is asked for is a window, by the name of its last commitment: the signed commitments come in one body,
and what was carried into it in pieces no longer than a contribution; to who has other settings also what was
carried out of it, and what a newcomer contributed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from peers.compute.executor import FORWARD, UPDATE, Compute
from peers.network.neighbourhood import Neighbourhood
from peers.network.orders.gatekeeper import IDLER
from peers.runtime.timer import Timer
from peers.telemetry import events as noted
from peers.worker.rounds.proofs import Proofs
from peers.worker.rounds.replays import Auditor, DrawnText, PastRound, Settled, advance, replaying
from peers.worker.rounds.update_compute import Made, UpdateWork
from peers.worker.rounds.vouching import Vouching, Wanted, Window
from protocols.errors import Malformed
from protocols.messages.table import Lied, Worked
from protocols.signed.commitments import cut, joined, open_commitment
from swarmnet.audits.commitment import Commitment, Kind, Word, read_alike
from swarmnet.audits.convictions import Convictions
from swarmnet.audits.draw import is_drawn
from swarmnet.audits.standing import ENOUGH, SEVERAL, Terms
from swarmnet.audits.verdict import NOTHING, Evidence, Finding, at_sight
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds import events
from swarmnet.rounds.audits import MOST_CONVICTED, Audits, Name, Question, answer_seconds, chance
from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.rounds.machine import GroupRounds
from swarmnet.rounds.result_table import tag_of
from swarmnet.run.manifest import Manifest

REST = 1.0
"""Times as long as a piece of a replay took this peer does nothing but its own work before the next, unless
it checks a proof: half of its time at most is an auditor's. A microbatch waits for one piece at most."""


@dataclass(slots=True)
class WorkQuestion(Question):
    window: tuple[Commitment, ...] = ()
    after: Commitment | None = None
    heads: bytes = b""
    """As they came, all of these."""
    wanted: tuple[int, int, int] = (0, 0, 0)
    """Bytes of what was carried into the window, into the next, and contributed in it, as asked for."""
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    """Of what a contribution says."""
    goes_on: bool = False
    """As of a `Window`."""
    seconds: float = 0.0
    """That computing it took."""

    @property
    def is_whole(self) -> bool:
        return bool(self.window) and sum(map(len, self.pieces)) >= sum(self.wanted)

    @property
    def about(self) -> Window:
        return Window(self.maker, self.name[0], self.round)

    @property
    def evidence(self) -> Evidence:
        into, onward, moves = self.given
        told = {hashlib.sha256(each).digest(): each for each in pieces_of(moves, self.size)}
        return Evidence(self.maker, self.window, into, self.after, told, onward)

    @property
    def given(self) -> tuple[bytes, bytes, bytes]:
        """As `wanted`."""
        data, (into, onward, moves) = b"".join(self.pieces), self.wanted
        return data[:into], data[into : into + onward], data[into + onward :][:moves]


@dataclass(frozen=True, slots=True)
class _Own:
    """What this peer has signed."""

    commitment: Commitment
    head: bytes
    carried: bytes
    moves: bytes
    """What it contributed, where that counts for nothing."""


@dataclass(frozen=True, slots=True)
class Means:
    """With what a peer audits."""

    auditor: Auditor
    carried_bytes: int
    """That are carried into a window, if anything is."""
    past: Callable[[], Mapping[int, PastRound]]


def pieces_of(data: bytes, size: int) -> list[bytes]:
    """As long as what a contribution says."""
    return [data[start : start + size] for start in range(0, len(data), size)]


STANDINGS = {Kind.NONE: "none", Kind.JUDGED: "judged"}
"""As the log calls them."""


class WorkAuditPath(Proofs[WorkQuestion]):
    def __init__(
        self,
        audits: Audits,
        manifest: Manifest,
        work: UpdateWork,
        rounds: GroupRounds,
        compute: Compute,
        neighbourhood: Neighbourhood,
        feed: Callable[[events.Event], None],
        note: noted.Note,
        folder: Path | None,
        means: Means,
        known: frozenset[PeerId],
    ) -> None:
        """`known`: who was in sets that settled before."""
        kept = kept_rounds(manifest.rounds)
        super().__init__(audits, rounds, compute, neighbourhood, feed, note, folder, kept)
        self.manifest, self.work, self.means = manifest, work, means
        self.convictions = Convictions(manifest.rounds.window)
        self.last: dict[PeerId, Commitment] = {}
        """Of everybody, the newest that is in a settled set."""
        self._told: OrderedDict[bytes, _Own] = OrderedDict()
        """By name."""
        self.vouching = self._vouching(known)
        """None: everybody counts who has not been found to lie."""
        self._asked_for: set[bytes] = set()
        """Own windows that others were asked to look into, by name."""
        self._drawn: Window | None = None
        """The newest window that waits for its turn: what older ones take would be forgotten before others
        could check what is found."""
        self._looks_into: WorkQuestion | None = None
        """The own question that is under way."""
        self._to_replay: deque[WorkQuestion] = deque()
        self._judges: WorkQuestion | None = None
        self._replay: Generator[None, None, Finding] | None = None
        self._judged: set[Name] = set()
        """What others have offered as proofs, and is none here."""
        self._timer = Timer(self._next_piece, self.clock)

    def _vouching(self, known: frozenset[PeerId]) -> Vouching | None:
        if not self.manifest.sync.fee:
            return None
        return Vouching(Terms.of(self.manifest), self.rounds.settled, known, self.me)

    def counts(self, peer: PeerId, round: int) -> bool:
        """Whether its contribution to that round does, if it has not been found to lie."""
        return self.vouching is None or self.vouching.standings.counts(peer, round)

    def take_over(self, old: WorkAuditPath) -> None:
        """Of another history, maybe: most of those who counted there do here."""
        if self.vouching is not None and old.vouching is not None:
            known = old.vouching.standings.members(old.rounds.settled)
            self.vouching.standings.know(known, self.rounds.settled)

    def close(self) -> None:
        super().close()
        self._timer.close()
        self._replay = None
        under_way = [self._judges] if self._judges is not None else []
        for question in (*under_way, *self._to_replay):
            self.audits.end(question)

    # -- what settles -----------------------------------------------------------------------------------

    def came(self, round: int, chain: bytes, contributions: Mapping[PeerId, Commitment]) -> None:
        """They have settled."""
        self.settled(round)
        for peer in self.convictions.settled(round, contributions):
            self._convicted(peer)
        if self.vouching is not None:
            self._stand(self.vouching, round, chain, contributions)
        self._say()
        peers = 1 + len(self.rounds.neighbours)
        turns = {peer: chance(self.audits.secret, chain + peer.encode()) for peer in contributions}
        for peer in sorted(turns, key=turns.__getitem__):  # Of those that are drawn the last stays.
            commitment, last = contributions[peer], self.last.get(peer)
            self.last[peer] = commitment
            if last is not None and peer != self.me and last.begun != commitment.begun:
                self._draw(peer, last, commitment.before == last.name, peers, round)
        old = [name for name, own in self._told.items() if own.commitment.round <= round - self.kept_rounds]
        for name in old:
            del self._told[name]
            self._asked_for.discard(name)
        self._look_into_next()

    def _draw(self, peer: PeerId, last: Commitment, goes_on: bool, peers: int, round: int) -> None:
        """A window of a peer is over: whether this one looks into it."""
        is_exact, share = last.settings == self._settings, self.manifest.sync.audits
        if not self._may_judge(round) or not (is_exact or self._may_compare(last)):
            return
        wanted = Wanted.NOTHING if is_exact else Wanted.ONWARD
        window = Window(peer, last.name, last.round, wanted, goes_on)
        if self.vouching is not None:
            self.vouching.is_over(window, round, last.settings)
        if is_exact and is_drawn(self.audits.secret, last, share, peers):
            self._drawn = window
        elif self.vouching is not None and is_drawn(self.audits.secret, last, share / SEVERAL, peers):
            self.vouching.looks_into(window)
        self._look_into_next()

    def _may_compare(self, last: Commitment) -> bool:
        """Whether this peer, which has other settings, can say how alike it is, and somebody would listen."""
        return self.vouching is not None and read_alike(last.settings, self._settings)

    @property
    def _settings(self) -> bytes:
        return self.work.log.settings if self.work.log is not None else b""

    def _may_judge(self, round: int) -> bool:
        """Whether this peer can, and anybody would listen."""
        if self.work.log is None or self.means.auditor.make_part is None or not self.rounds.in_step:
            return False
        return self.vouching is None or self.vouching.standings.judges(self.me, round)

    def _stand(
        self, vouching: Vouching, round: int, chain: bytes, contributions: Mapping[PeerId, Commitment]
    ) -> None:
        """What a set changes in who counts."""
        first = self.convictions.first
        said = {peer: of for peer, of in contributions.items() if round < first.get(peer, round + 1)}
        for change in vouching.settled(round, chain, said, self._settings):
            self.note(noted.Stands(STANDINGS[change.kind], change.peer.hex(), change.first))
            if change.kind is not Kind.NONE:
                continue
            held = {peer for state in self.rounds.rounds.values() for peer in state.held}
            for peer in [peer for peer in sorted(held | {self.me}) if tag_of(peer) == change.peer]:
                self.feed(events.Convicted(peer, change.first))
        if not vouching.standings.counts(self.me, round):
            self._ask_for_own(vouching, round)

    def _ask_for_own(self, vouching: Vouching, round: int) -> None:
        """As a newcomer: that those look into its windows whose turn it is."""
        for after in [own.commitment for own in self._told.values()]:
            name, is_first = after.before, after.begun == after.round <= round
            if not is_first or name in self._asked_for or name not in self._told:
                continue
            last = self._told[name].commitment
            asked = vouching.whom_to_ask(last.round, last.settings)
            if asked:
                self._asked_for.add(name)
            for peer in [peer for peer in self.rounds.neighbours if tag_of(peer) in asked]:
                self.neighbourhood.post(peer, "group", Worked(last.round, name))

    def _convicted(self, peer: PeerId) -> None:
        """By a settled set."""
        first = self.convictions.first[peer]
        self.feed(events.Convicted(peer, first))
        if peer != self.me:
            reason = f"its contributions do not follow from its work: from round {first} on it is out"
            self.neighbourhood.part_from(peer, IDLER, reason)

    def _say(self) -> None:
        if self.work.log is not None:
            self.work.log.accused = self.convictions.accused(tuple(self.audits.proofs))
            if self.vouching is not None:
                self.work.log.findings = self.vouching.findings
                self.work.log.changes = self.vouching.standings.changes

    # -- what this peer gives ---------------------------------------------------------------------------

    def made(self, made: Made) -> None:
        """An own contribution."""
        assert made.commitment is not None
        is_settled = self.counts(self.me, made.round)
        moves = b"" if is_settled else made.data[made.signed :]
        own = _Own(made.commitment, made.data[: made.signed], made.carried, moves)
        self._told[own.commitment.name] = own

    def _asked(self, peer: PeerId, name: Name) -> None:
        if name not in self.kept and name[0] in self._told and name[1] <= max(Wanted):
            self._keep_own(name)
        super()._asked(peer, name)

    def _keep_own(self, name: Name) -> None:
        """What it takes to look into an own window."""
        window, wanted = [self._told[name[0]]], name[1]
        last = window[0]
        while window[0].commitment.round != window[0].commitment.begun:
            if window[0].commitment.before not in self._told:
                break
            window.insert(0, self._told[window[0].commitment.before])
        after = [each for each in self._told.values() if each.commitment.before == name[0]]
        size = self.work.method.payload_bytes
        pieces = pieces_of(last.carried, size)
        if wanted >= Wanted.ONWARD:
            pieces += [piece for each in after for piece in pieces_of(each.carried, size)]
        if wanted >= Wanted.ALL:
            pieces += [each.moves for each in window if each.moves]
        heads = joined(each.head for each in (*window, *after))
        self.keep(name, last.commitment.round, [heads, *pieces])


    # -- what others have -------------------------------------------------------------------------------

    def look(self) -> None:
        super().look()
        self._judge_next()
        self._look_into_next()

    def to_tell(self) -> Iterator[tuple[PeerId, Question]]:
        """Not any more once it is settled, or when nobody can compute it again."""
        oldest = self.rounds.settled - self.kept_rounds
        for peer, proof in super().to_tell():
            if proof.maker not in self.convictions.first and proof.round > oldest and peer != proof.maker:
                yield peer, proof

    def _look_into_next(self) -> None:
        """One after the other."""
        for window in self._waiting():
            peer = window.peer
            name = ContributionId(window.name), int(window.wanted)
            question = self._question(name, window.round, peer, peer)
            question.goes_on = window.goes_on
            if peer not in self.convictions.first and self.ask(question):
                self._looks_into = question

    def _waiting(self) -> Iterator[Window]:
        """What is to be looked into, until something is."""
        if self._looks_into is not None:
            return
        vouching, oldest = self.vouching, self.rounds.settled - self.kept_rounds // 2
        for window in vouching.next(self.clock.time()) if vouching is not None else ():
            if window.round > oldest:  # Else what it takes is forgotten before it is done.
                yield window
            if self._looks_into is not None:
                return
        if self._drawn is not None and self._looks_into is None:
            window, self._drawn = self._drawn, None
            yield window

    def left(self, peer: PeerId) -> None:
        super().left(peer)
        if self._looks_into is not None and not self._looks_into.is_whole and self._looks_into.asked == peer:
            self._looks_into = None

    def hears(self, peer: PeerId) -> bool:
        """See `Proofs.hears`: newcomers give what it takes to look into their work."""
        member = self.neighbourhood.membership.is_member(peer)
        return self.vouching is not None and member and peer not in self.convictions.first

    def worked(self, peer: PeerId, round: int, name: ContributionId) -> None:
        """See `Proofs.worked`."""
        if self.vouching is not None and self._may_judge(self.rounds.settled):
            self.vouching.asks(Window(peer, name, round), self.rounds.settled, self._settings)
            self._look_into_next()

    def own(self, question: Question) -> WorkQuestion:
        assert isinstance(question, WorkQuestion), "no other is asked where work is audited"
        return question

    def about(self, message: Lied, asked: PeerId) -> WorkQuestion | None:
        """See `Proofs.about`."""
        name = (ContributionId(message.result), message.shard)
        if name in self._judged or message.shard or self.means.auditor.make_part is None:
            return None
        if PeerId(message.peer) in self.convictions.first:
            return None
        return self._question(name, message.round, PeerId(message.peer), asked)

    def _question(self, name: Name, round: int, maker: PeerId, asked: PeerId) -> WorkQuestion:
        size = self.work.method.payload_bytes
        pieces = (1 + self.means.carried_bytes // size) * (1 + name[1])
        until = self.until() + answer_seconds(1 + pieces, size)
        return WorkQuestion(name, round, maker, asked, until, size=size)

    def take(self, question: WorkQuestion, body: bytes) -> None:
        """See `Proofs.take`: the commitments, then what was carried."""
        if question.window:
            if not body:
                raise Malformed("a piece of nothing")
            question.pieces.append(body)
            return
        heads = cut(body)
        if len(heads) > self.manifest.sync.afresh_rounds + 1:
            raise Malformed("more commitments than a window has, and the next one")
        opened = [open_commitment(head, self.work.run_id) for head in heads]
        named = [place for place, each in enumerate(opened) if each.commitment.name == question.name[0]]
        if len(named) != 1 or any(
            (each.sender, each.stage) != (question.maker, self.work.stage) for each in opened
        ):
            raise Malformed("not the window that was asked for")
        commitments = [each.commitment for each in opened]
        window, rest = tuple(commitments[: named[0] + 1]), commitments[named[0] + 1 :]
        question.window, question.heads = window, body
        question.after = rest[0] if rest and rest[0].before == window[-1].name else None
        if question.goes_on and question.after is None:
            raise Malformed("a window without the commitment that goes on from it")
        if self._can_judge(question):
            question.wanted = self._wanted(question)

    def _wanted(self, question: WorkQuestion) -> tuple[int, int, int]:
        window, after, wanted = question.window, question.after, question.name[1]
        into = self.means.carried_bytes if window[0].carried != NOTHING else 0
        goes_on = wanted >= Wanted.ONWARD and after is not None and after.carried != NOTHING
        uncounted = sum(not self.counts(question.maker, each.round) for each in window)
        return (
            into,
            self.means.carried_bytes if goes_on else 0,
            uncounted * self.work.method.payload_bytes if wanted >= Wanted.ALL else 0,
        )

    def _can_judge(self, question: WorkQuestion) -> bool:
        """Exactly where it is a proof, somehow where not."""
        if question.is_proof:
            return all(commitment.settings == self._settings for commitment in question.window)
        return all(read_alike(commitment.settings, self._settings) for commitment in question.window)

    def judge(self, question: WorkQuestion) -> None:
        """A proof goes before: as long as it is not checked a liar counts, and what it takes is forgotten."""
        if not self._can_judge(question):
            seen = at_sight(question.evidence, self.manifest.sync.afresh_rounds)
            self._found(question, seen or Finding("inconclusive", question.round, "not with its settings"))
            return
        if not question.is_proof:
            self._to_replay.append(question)
        else:
            self._to_replay.appendleft(question)
            if self._judges is not None and not self._judges.is_proof:
                self._give_up()
        self._judge_next()

    def _give_up(self) -> None:
        """The replay of an own question: others are drawn."""
        assert self._judges is not None
        self.audits.end(self._judges)
        self._judges = self._replay = self._looks_into = None

    def _judge_next(self) -> None:
        text = self.means.auditor.text()
        if self._judges is not None or not self._to_replay or text is None:
            return
        self._judges = self._to_replay.popleft()
        begin = partial(self._begin, self._judges, dict(self.means.past()), text)
        self.compute.submit(UPDATE, self._settled_units, begin)

    def _settled_units(self) -> tuple[Tensor, int]:
        """In the compute thread, in the order of all that settles."""
        return self.work.replica.settled_units(), self.work.replica.settled_round

    def _begin(
        self, question: WorkQuestion, rounds: Mapping[int, PastRound], text: DrawnText,
        units: tuple[Tensor, int], _seconds: float,
    ) -> None:  # fmt: skip
        assert self.means.auditor.make_part is not None
        assert self.work.log is not None
        if question is not self._judges:
            return  # It was given up meanwhile.
        settled = Settled(*units, rounds, text)
        settings = self.work.log.settings
        self._replay = replaying(
            question.evidence, settings, self.manifest, self.means.auditor.make_part, settled
        )
        self._next_piece()

    def _next_piece(self) -> None:
        if self._replay is not None:
            replay = self._replay
            self.compute.submit(FORWARD, partial(advance, replay), partial(self._advanced, replay))

    def _advanced(
        self, replay: Generator[None, None, Finding], found: Finding | None, seconds: float
    ) -> None:
        question = self._judges
        if replay is not self._replay or question is None:
            return  # It was given up meanwhile.
        question.seconds += seconds
        if found is None:
            rest = 0.0 if question.is_proof else REST
            self._timer.arm(self.clock.time() + rest * seconds)
            return
        self._judges = self._replay = None
        self._found(question, found)
        self._judge_next()
        self._look_into_next()

    def _found(self, question: WorkQuestion, found: Finding) -> None:
        verdict = found.verdict
        self.audits.end(question)
        if question is self._looks_into:
            self._looks_into = None
        if self.vouching is not None and not question.is_proof:
            self._vouch(self.vouching, question, found)
        if verdict == "lied":
            self._lied_about(question)
        elif question.is_proof:
            if len(self._judged) >= MOST_CONVICTED:
                self._judged.clear()
            self._judged.add(question.name)
            self.failed(question, "false_proof" if verdict == "agrees" else verdict)
        else:
            is_unlike = verdict == "alike" and found.likeness < ENOUGH
            self.noted(question, "unlike" if is_unlike else verdict)

    def failed(self, question: WorkQuestion, outcome: str, reason: str = "") -> None:
        """See `Proofs.failed`. Who says that somebody lied who did not loses its voice, no more: its computer
        may be at fault."""
        self.noted(question, outcome)
        if question.is_proof and outcome != "inconclusive":
            self.audits.proves_nothing(question)
        elif self.vouching is not None and not question.is_proof:
            self.vouching.found(question.about, 1, Word.UNANSWERED)
            self._say()
        if question is self._looks_into:
            self._looks_into = None

    def _vouch(self, vouching: Vouching, question: WorkQuestion, found: Finding) -> None:
        """Tell of what was found with the next contribution."""
        vouching.looked(question.about, self.rounds.settled, question.seconds, self.clock.time())
        if found.verdict == "agrees":
            vouching.found(question.about, len(question.window), Word.AGREES)
        elif found.verdict == "alike":
            vouching.found(question.about, len(question.window), Word.ALIKE, found.likeness)
        self._say()

    def _lied_about(self, question: WorkQuestion) -> None:
        if self.vouching is not None and not self.counts(question.maker, self.rounds.current):
            self.vouching.lied(question.maker)
            self.noted(question, "lied")
            return
        if not self.audits.is_news(question.maker, question.round):
            return
        into, _, _ = question.given
        question.name = question.name[0], 0  # By which a proof goes around, whatever was asked for.
        self.proven(question, [question.heads, *pieces_of(into, question.size)])
        question.heads, question.pieces, question.window, question.after = b"", [], (), None
        self._say()
        super().look()
