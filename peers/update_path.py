"""Carries out what `GroupRounds` decides: makes, checks, keeps, pulls and applies contributions.

Everything that touches weights, momentum or gradients runs in the compute thread, in the order in which the
machine decided it; everything else runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from peers.compute import UPDATE, Compute
from peers.neighbourhood import Neighbourhood
from peers.timer import Timer
from protocols.envelope import ENVELOPE_BYTES, Kind, open_envelope, seal
from protocols.errors import Malformed, WireError
from protocols.identity import Identity
from protocols.messages import Announce, AskIds, Contribution, Message, OpenRound, Progress, Want
from protocols.messages import Reference as WireReference
from swarmnet import round_events as rounds_
from swarmnet.identifiers import ContributionId, PeerId, RunId
from swarmnet.manifest import Manifest
from swarmnet.method import ContributionError, GradientError, Method
from swarmnet.replica import Replica
from swarmnet.round_events import (
    AddContribution,
    Announced,
    ApplyRound,
    Committed,
    Contributed,
    ContributionArrived,
    Event,
    IdsAsked,
    Leave,
    MakeContribution,
    NeighbourJoined,
    NeighbourLeft,
    OpenSet,
    ProgressArrived,
    Reference,
    RemoveContribution,
    Resynchronise,
    SendAnnounce,
    SendProgress,
    SettleRound,
    Tick,
)
from swarmnet.round_sets import kept_rounds
from swarmnet.rounds import GroupRounds
from swarmnet.stage import StageCompute

REFERENCES_PER_MESSAGE = 256
"""A reference takes about 90 bytes; a message header holds 64 KiB."""


class Gathered(Protocol):
    """Whose gradient a contribution takes (the data path)."""

    gathered_tokens: int


@dataclass(frozen=True, slots=True)
class _Stored:
    reference: Reference
    data: bytes
    """The envelope with the payload, as it travels."""

    @property
    def payload(self) -> bytes:
        return self.data[ENVELOPE_BYTES:]


@dataclass(frozen=True, slots=True)
class _Add:
    round: int
    peer: PeerId
    payload: bytes


@dataclass(frozen=True, slots=True)
class Made:
    """A contribution from the compute thread; empty if the gradient was not finite."""

    round: int
    data: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Settled:
    round: int
    digest: bytes
    references: tuple[Reference, ...]


Operation = MakeContribution | _Add | RemoveContribution | ApplyRound | SettleRound


class UpdatePath:
    def __init__(
        self,
        manifest: Manifest,
        run_id: RunId,
        stage: int,
        identity: Identity,
        compute: Compute,
        stage_compute: StageCompute,
        method: Method,
        replica: Replica,
        neighbourhood: Neighbourhood,
        gathered: Gathered,
        settled: Callable[[Settled], None],
        resynchronise: Callable[[str], None],
        note: Callable[..., None],
    ) -> None:
        """`settled` is called in the compute thread, right after a round settled; `resynchronise(reason)`
        on the event loop when only the whole state can help."""
        self.manifest = manifest
        self.run_id = run_id
        self.stage = stage
        self.identity = identity
        self.compute = compute
        self.stage_compute = stage_compute
        self.method = method
        self.replica = replica
        self.neighbourhood = neighbourhood
        self.gathered = gathered
        self.settled = settled
        self.resynchronise = resynchronise
        self.note = note
        self.loop = asyncio.get_running_loop()
        self.me = neighbourhood.transport.peer
        self.rounds = GroupRounds(manifest.rounds, self.me, replica.settled_round, self.loop.time())
        self.stored: dict[ContributionId, _Stored] = {}
        self.outcomes: dict[str, int] = {}
        """What became of contributions that came in, for the metrics."""
        self.accepted_by: set[PeerId] = set()
        """Neighbours that have pulled a contribution of ours."""
        self._ahead = False
        """Weights are published moved ahead by the own momentum; compute thread only."""
        self._closed = False
        self._timer = Timer(lambda: self.feed(Tick()))

    def start(self) -> None:
        self.stage_compute.publish(self.replica.live_floats(ahead=False))
        self.feed(Tick())

    def close(self) -> None:
        self._closed = True
        self._timer.close()

    # -- the machine ----------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Give the rounds an event and do what they say."""
        if self._closed:
            return
        operations: list[Operation] = []
        for effect in self.rounds.handle(event, self.loop.time()):
            self._carry_out(effect, operations)
        if operations:
            self.compute.submit(UPDATE, partial(self._work, operations), self._worked)
        self._timer.arm(self.rounds.next_deadline())

    def _carry_out(self, effect: rounds_.Effect, operations: list[Operation]) -> None:
        post = self.neighbourhood.post
        match effect:
            case MakeContribution() | RemoveContribution():
                operations.append(effect)
            case AddContribution(reference):
                payload = self.stored[reference.id].payload
                operations.append(_Add(reference.round, reference.peer, payload))
            case ApplyRound(round, contributors, waited):
                operations.append(effect)
                self.note("applied", round=round, contributors=len(contributors), waited=round_off(waited))
            case SettleRound(round, _):
                operations.append(effect)
                self._forget_bodies(round - kept_rounds(self.manifest.rounds))
            case SendProgress(peers, round, tokens, contributed, settled, in_step, sets):
                wire_sets = [OpenRound(s.round, s.sealed, s.count, s.digest) for s in sets]
                progress = Progress(round, tokens, list(contributed), settled, in_step, wire_sets)
                for peer in peers:
                    post(peer, "group", progress)
            case SendAnnounce(peers, references, complete):
                for message in _announces(references, complete):
                    for peer in peers:
                        post(peer, "group", message)
            case rounds_.Want(peer, ids):
                post(peer, "group", Want(list(ids)))
            case rounds_.AskIds(peer, asked):
                post(peer, "group", AskIds(list(asked)))
            case Resynchronise(peer, reason):
                self.note("resynchronise", peer=peer, reason=reason)
                self.resynchronise(reason)

    # -- compute: in the compute thread, in order -----------------------------------------------------

    def _work(self, operations: list[Operation]) -> list[Made | Settled]:
        results: list[Made | Settled] = []
        stale = False
        for operation in operations:
            match operation:
                case MakeContribution(round, _):
                    results.append(self._make(round))
                    self._ahead = self.manifest.sync.lookahead
                    stale |= self._ahead
                case _Add(round, peer, payload):
                    self.replica.add(round, peer, payload)
                    stale |= round <= self.replica.applied_round
                case RemoveContribution(round, peer):
                    self.replica.remove(round, peer)
                    stale |= round <= self.replica.applied_round
                case ApplyRound(round, _, _):
                    self.replica.apply(round)
                    self._ahead, stale = False, True
                case SettleRound(round, references):
                    result = Settled(round, self.replica.settle(round), references)
                    self.settled(result)
                    results.append(result)
        if stale:
            self.stage_compute.publish(self.replica.live_floats(self._ahead))
        return results

    def _make(self, round: int) -> Made:
        gradient = self.stage_compute.take_gradient()
        tokens, self.gathered.gathered_tokens = self.gathered.gathered_tokens, 0
        try:
            payload = self.method.contribute(gradient, max(1, tokens), round, self.me)
        except GradientError:
            return Made(round, b"", tokens)
        data = seal(self.identity, self.run_id, Kind.CONTRIBUTION, self.stage, round, round, payload)
        return Made(round, data, tokens)

    def _worked(self, results: list[Made | Settled], _seconds: float) -> None:
        for result in results:
            if isinstance(result, Made):
                reference = None
                if result.data:
                    reference = self._store(self._open(result.data), result.data)
                    self.note("made", round=result.round, id=reference.id, tokens=result.tokens)
                else:
                    self.note("not_finite", round=result.round, tokens=result.tokens)
                self.feed(Contributed(result.round, reference))
            else:
                ids = [reference.id.hex() for reference in result.references]
                self.note("settled", round=result.round, digest=result.digest, ids=ids)

    # -- messages -------------------------------------------------------------------------------------

    def message(self, peer: PeerId, message: Message, body: bytes) -> None:
        match message:
            case Progress():
                self.feed(_progress(peer, message))
            case Announce(references, complete):
                known = tuple(_reference(reference) for reference in references)
                self.feed(Announced(peer, known, tuple(complete)))
            case Want(ids):
                self._give(peer, ids)
            case AskIds(asked):
                self.feed(IdsAsked(peer, tuple(asked[:REFERENCES_PER_MESSAGE])))
            case Contribution():
                self._take(peer, body)

    def committed(self, tokens: int) -> None:
        self.feed(Committed(tokens))

    def leave(self) -> None:
        """Close the round under way, so that what was gathered becomes a last contribution."""
        self.feed(Leave())

    def handed_over(self) -> bool:
        """Whether every contribution of ours that is not settled is held by some neighbour, or none is
        there to hold it."""
        return self.rounds.handed_over()

    def joined(self, peer: PeerId) -> None:
        self.feed(NeighbourJoined(peer))

    def left(self, peer: PeerId) -> None:
        self.feed(NeighbourLeft(peer))

    def _give(self, peer: PeerId, ids: list[bytes]) -> None:
        for identity in ids[:REFERENCES_PER_MESSAGE]:
            stored = self.stored.get(ContributionId(identity))
            if stored is None:
                continue
            self.neighbourhood.post(peer, "group", Contribution(), stored.data)
            if stored.reference.peer == self.me and peer not in self.accepted_by:
                self.accepted_by.add(peer)
                self.note("first_pull", peer=peer, round=stored.reference.round)

    def _take(self, peer: PeerId, body: bytes) -> None:
        """A contribution from anybody: verified by its maker's signature, not by who sent it."""
        try:
            reference = self._open(body)
        except WireError as error:
            self._refused(peer, error.code, str(error))
            return
        if reference.id in self.stored:
            self._count("repeated")
            return
        try:
            self.method.check(body[ENVELOPE_BYTES:])
        except ContributionError as error:
            self._refused(peer, "malformed", str(error))
            return
        if reference.round <= self.rounds.settled:
            self._count("late")
            return
        self._store(reference, body)
        self._count("accepted")
        self.note("took", round=reference.round, id=reference.id, maker=reference.peer)
        self.feed(ContributionArrived(peer, reference))

    def _open(self, data: bytes) -> Reference:
        envelope = open_envelope(data, self.run_id, Kind.CONTRIBUTION, self.method.payload_bytes)
        if envelope.stage != self.stage:
            raise Malformed(f"a contribution to stage {envelope.stage}, this group holds {self.stage}")
        return Reference(envelope.round, envelope.sender, envelope.id, len(data))

    def _store(self, reference: Reference, data: bytes) -> Reference:
        self.stored[reference.id] = _Stored(reference, data)
        return reference

    def _forget_bodies(self, until: int) -> None:
        for identity in [i for i, stored in self.stored.items() if stored.reference.round <= until]:
            del self.stored[identity]

    def _refused(self, peer: PeerId, code: str, reason: str) -> None:
        self._count(code)
        self.neighbourhood.refused(peer, code, reason)

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


def _progress(peer: PeerId, message: Progress) -> ProgressArrived:
    sets = tuple(OpenSet(s.round, s.sealed, s.count, s.digest) for s in message.sets)
    return ProgressArrived(
        peer, message.round, max(0, message.tokens), frozenset(message.contributed), message.settled,
        message.in_step, sets,
    )  # fmt: skip


def _reference(reference: WireReference) -> Reference:
    return Reference(
        reference.round, PeerId(reference.peer), ContributionId(reference.id), reference.size
    )


def _announces(references: tuple[Reference, ...], complete: tuple[int, ...]) -> list[Announce]:
    """Split so that each fits in a header, a round that is `complete` never in two."""
    messages: list[Announce] = []
    by_round: dict[int, list[WireReference]] = {number: [] for number in complete}
    for reference in references:
        wire = WireReference(reference.round, reference.peer, reference.id, reference.size)
        by_round.setdefault(reference.round, []).append(wire)
    told: list[WireReference] = []
    whole: list[int] = []
    for number, of_round in by_round.items():
        if told and len(told) + len(of_round) > REFERENCES_PER_MESSAGE:
            messages.append(Announce(told, whole))
            told, whole = [], []
        told = told + of_round
        whole = whole + ([number] if number in complete else [])
    messages.append(Announce(told, whole))
    return messages


def round_off(seconds: float) -> float:
    return round(seconds, 4)
