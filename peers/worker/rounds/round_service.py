"""Carry out what the `GroupRounds` state machine decides: make, check, keep, fetch and apply contributions.

Everything that touches weights, momentum or gradients runs in the compute thread, in the order in which the
state machine decided it. Everything else runs on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from peers.compute.executor import UPDATE, Compute
from peers.network.message_router import MessageRouter, handles
from peers.network.peer_links import PeerLinks
from peers.runtime.timer import Timer
from peers.state.snapshot_store import RoundProgress, Weights
from peers.telemetry import log_events
from peers.worker.rounds.exchange import exchange_for
from peers.worker.rounds.operations import (
    ContributionReady,
    DecodeContribution,
    Done,
    ExpertChange,
    Operation,
    RoundSettled,
    SlicedContribution,
)
from peers.worker.rounds.stored import ContributionStore, Stored
from peers.worker.rounds.update_compute import UpdateWork
from peers.worker.rounds.wire_events import (
    REFERENCES_PER_MESSAGE,
    read_progress,
    read_reference,
    write_announces,
    write_progress,
)
from protocols.errors import BadSignature, WireError
from protocols.messages.table import (
    Announce,
    ChainResponse,
    Contribution,
    GetChain,
    GetContributions,
    GetIds,
    Progress,
)
from protocols.signed.envelope import claimed
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.membership.request_budget import RequestBudget
from swarmnet.optimizer.agreement.ledger import votes_of
from swarmnet.optimizer.local_steps.group_trainers import ExpertAssignment
from swarmnet.optimizer.method import ContributionError
from swarmnet.optimizer.replica import NOT_HASHED
from swarmnet.rounds import events
from swarmnet.rounds.audits import Audits
from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.rounds.contributors import HasWeight
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.history import SettledSet
from swarmnet.rounds.own_contributions import ASK_SECONDS, OwnContributions, RestartState
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import Rates

MAX_OVERSHOOT = 4
"""Limit on the tokens counted for a round, as a multiple of its target. A delayed round gathers more than its
target; a false claim adds no more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundObservers:
    """What the rest of a worker does about its rounds. All are called on the event loop."""

    settled: Callable[[RoundSettled], None]
    """Called with every settled round."""
    made: Callable[[int, int], None]
    """Called with the round and tokens of every own contribution."""
    experts_changed: Callable[[ExpertChange], None]
    """Called when the assignment of experts has changed."""
    sign_history: Callable[[Sequence[PeerId]], None]
    """Called with the peers on another branch while there are two."""
    resynchronise: Callable[[events.FetchGroupState], None]
    """Called when only fetching the whole state helps."""


class RoundService:
    has_weights: Literal[True] = True
    """Tells this class from `NoRounds`."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        work: UpdateWork,
        compute: Compute,
        neighbourhood: PeerLinks,
        weights: Weights,
        offers: OwnContributions,
        has_weight: HasWeight,
        observers: RoundObservers,
        audits: Audits,
        log_event: log_events.LogEvent,
        rates: Rates = (),
        folder: Path | None = None,
    ) -> None:
        """Continue with `weights`, which are loaded in `work.replica`, and with `offers`, this peer's earlier
        contributions.

        `has_weight` decides whose contributions are accepted. `rates` are the owner's learning-rate orders.
        `folder` holds long bodies of settled rounds; None keeps them in memory. `audits` draws which results
        are audited, where there are reducers."""
        self.manifest = manifest
        self.work = work
        self.compute = compute
        self.neighbourhood = neighbourhood
        self.observers = observers
        self.log_event = log_event
        self.clock = neighbourhood.clock
        self.me = neighbourhood.transport.peer
        self.rounds = GroupRounds(
            rules=manifest.rounds,
            me=self.me,
            settled=weights.settled_round,
            now=self.clock.time(),
            chain_value=weights.chain,
            offers=offers,
            earlier=weights.past.earlier,
            has_weight=has_weight,
            rates=rates,
            draw=offers.draw,
            is_member=self._is_member,
        )
        self.outcomes: dict[str, int] = {}
        """Number of received contributions by outcome, for the metrics."""
        self.counts = work.counts
        self._began = weights.settled_round
        self.digest = b""
        """Digest of the newest settled weights."""
        self.tokens = weights.tokens
        """Tokens in all settled rounds, of all peers; None if the count before `weights` is unknown."""
        work.tokens = weights.tokens
        self._ids: RequestBudget[tuple[PeerId, int]] = RequestBudget(ASK_SECONDS)
        self._chains: RequestBudget[PeerId] = RequestBudget(ASK_SECONDS)
        self.store = ContributionStore(neighbourhood, folder, manifest.rounds.max_seconds)
        self.exchange = exchange_for(
            audits=audits,
            work=work,
            rounds=self.rounds,
            compute=compute,
            neighbourhood=neighbourhood,
            feed=self.feed,
            refuse=self._refused,
            count=self._count,
            leave=partial(self.left, released=True),
            is_member=self._is_member,
            log_event=log_event,
            folder=folder,
        )
        self._operations: deque[Operation] = deque()
        """Operations that the compute thread has not taken yet."""
        self._has_submitted = False
        """Whether the compute thread is going to take them."""
        self._timer = Timer(lambda: self.feed(events.TimePassed()), self.clock)

    def _is_member(self, peer: PeerId) -> bool:
        return peer == self.me or self.neighbourhood.membership.is_member(peer)

    def held_experts(self) -> ExpertAssignment | None:
        """Return the experts that this peer holds and trains; None if the method divides none."""
        return self.work.method.held.holding if self.work.method.held is not None else None

    def report_uploads(self) -> bytes:
        """Return what this peer's next record reports of the uploads of others."""
        return self.exchange.report_uploads()

    def start(self) -> None:
        self.work.publish()
        self.exchange.start()
        self.feed(events.VotesWeighed(votes_of(self.work.method)))

    def settled_weights(self) -> Weights:
        """Return the settled weights as they are now. Called in the compute thread."""
        replica = self.work.replica
        chain = self.rounds.chain.at(replica.settled_round)
        assert chain is not None, "the chain runs ahead of the replica, never behind"
        return Weights(replica.settled_units().cpu(), replica.settled_round, chain, tokens=self.work.tokens)

    def progress(self) -> RoundProgress:
        """Return the progress of this peer, as reported to peers that need a snapshot."""
        return RoundProgress(self.rounds.current, self.rounds.settled, self.digest, self._began)

    def past(self, until: int) -> RestartState:
        """Return what is known of the rounds up to `until`, for a later process or service."""
        return RestartState(self.rounds.offers.known(until), self.rounds.chain.earlier(until))

    def note_undecided(self) -> None:
        """Log, at the end, the own contributions that are still undecided."""
        if ids := [identity.hex() for identity in self.rounds.offers.open]:
            self.log_event(log_events.Undecided(ids=ids))

    def close(self) -> None:
        self.work.closed = True
        self._timer.close()
        self.store.uploads.close()
        self.exchange.close()

    def take_over(self, old: RoundService) -> None:
        """Take over what other peers may still request from `old`, and its knowledge of a stall."""
        self.store.heads = old.store.heads
        if old.rounds.agreement.follows:
            self.rounds.on_stall(float("inf"), self.clock.time())
        self.exchange.take_over(old.exchange)

    # -- the machine ----------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        """Feed an event to the rounds and carry out their effects."""
        if self.work.closed:
            return
        operations: list[Operation] = []
        for effect in self.rounds.handle(event, self.clock.time()):
            self._carry_out(effect, operations)
        self._operations.extend(operations)
        if operations and not self._has_submitted:
            self._has_submitted = True
            self.compute.submit(UPDATE, self._run_operations, self._worked)
        self._timer.arm(self.rounds.next_deadline())

    def _run_operations(self) -> list[Done]:
        """Run all operations that have arrived, in the compute thread: weights are published once for all
        contributions that came during a microbatch."""
        self._has_submitted = False  # Before the loop, so that no later operation is left behind.
        operations = []
        while self._operations:
            operations.append(self._operations.popleft())
        return self.work.run(operations)

    def _carry_out(self, effect: events.Effect, operations: list[Operation]) -> None:
        """Do what the rounds machine requested: send a message, log an event, or append to `operations`,
        which the compute thread runs in order."""
        post = self.neighbourhood.post
        match effect:
            case events.MakeContribution() | events.RemoveContribution() | events.RateRound():
                operations.append(effect)
            case events.SendEmptyNotice() | events.Reduce():
                operations += self.exchange.carry_out(effect)
            case events.RestoreToMomentum(round, identity):
                self._count("contribution_returned")
                self.log_event(
                    log_events.ContributionReturned(
                        code="contribution_returned", round=round, id=identity.hex()
                    )
                )
                operations.append(effect)
            case events.AddContribution(reference):
                payload = self.store.stored[reference.id].payload
                operations.append(DecodeContribution(reference.round, reference.peer, payload))
            case events.ApplyRound(round, _, waited):
                operations.append(effect)
                count = self.exchange.count_contributors(effect)
                outcome = self.counts.applied(effect, count, self.rounds, self.clock.time())
                waited = round_off(waited)
                self.log_event(
                    log_events.Applied(round=round, code=outcome, contributors=count, waited=waited)
                )
            case events.SettleRound(round, references):
                self._count_tokens(references)
                contributors = self.exchange.contributors(references)
                operations.append(replace(effect, tokens=self.tokens, contributors=contributors))
                self.store.move_to_disk(references)
                self.store.forget_bodies(round - kept_rounds(self.manifest.rounds))
                self.exchange.settled(round)
            case events.SendProgress():
                progress = write_progress(effect)
                for peer in effect.peers:
                    post(peer, "group", progress)
            case events.SendChain(peer, first, before, sets):
                digests = b"".join(entry.digest for entry in sets)
                post(peer, "group", ChainResponse(first, before, [entry.count for entry in sets], digests))
            case events.RequestChain(peer, last):
                post(peer, "group", GetChain(last))
            case events.SendAnnounce(peers, references, complete):
                self.neighbourhood.introduce({reference.peer for reference in references} - {self.me}, peers)
                for message in write_announces(references, complete):
                    for peer in peers:
                        post(peer, "group", message)
            case events.RequestContributions(peer, ids):
                post(peer, "group", GetContributions(list(ids)))
            case events.RequestIds(peer, asked):
                post(peer, "group", GetIds(list(asked)))
            case events.SignChain(forked):
                self.observers.sign_history(forked)
            case events.FetchGroupState(peers, reason, fork_round):
                code = "behind" if fork_round is None else "forked"
                self.log_event(log_events.Resync(code, peers, reason, fork_round))
                self.observers.resynchronise(effect)

    def _worked(self, results: list[Done], _seconds: float) -> None:
        """Handle the results of operations on the event loop. Called when they are finished."""
        for result in results:
            match result:
                case SlicedContribution():
                    self._was_cut(result)
                case ContributionReady():
                    self._was_made(result)
                case ExpertChange(round, _, group, holders):
                    self.log_event(log_events.ExpertsReassigned(round, group, holders))
                    self.observers.experts_changed(result)
                case RoundSettled():
                    self._has_settled(result)

    def _was_made(self, made: ContributionReady) -> None:
        """Store and announce the own contribution, or the result that this peer has reduced."""
        reference = None
        if made.id is not None:
            reference = events.Reference(made.round, self.me, made.id, len(made.data))
            self.store.keep(Stored(reference, made.data, made.tokens), made.signed)
        if made.is_result:
            self.exchange.was_added_up(made)
        else:
            self._log_made(made)
        self.feed(events.Contributed(made.round, reference, made.table))

    def _was_cut(self, cut: SlicedContribution) -> None:
        """Send the own contribution's slices to their reducers."""
        self._log_made(cut)
        if cut.id is None or not self.work.closed:
            self.exchange.was_cut(cut)

    def _log_made(self, made: ContributionReady | SlicedContribution) -> None:
        if made.id is None:
            if made.tokens:
                self.log_event(log_events.NotFinite("not_finite", made.round, made.tokens))
            return
        if self.work.closed:  # Made while the state was fetched: no peer will see it.
            self.rounds.offers.made(made.round, made.id, self.clock.time())
        self.log_event(log_events.ContributionMade(made.round, made.id.hex(), made.tokens))
        self.observers.made(made.round, made.tokens)

    def _has_settled(self, settled: RoundSettled) -> None:
        self.digest = settled.digest
        ids = [reference.id.hex() for reference in settled.references]
        digest = "" if settled.digest == NOT_HASHED else settled.digest.hex()
        self.log_event(log_events.Settled(settled.round, digest, ids, settled.tokens))
        if not self.work.closed:  # No statement is signed on a branch that was abandoned meanwhile.
            with_weight = self.rounds.open_round.with_weight(settled.contributors)
            self.neighbourhood.membership.worked(with_weight)
            self.observers.settled(settled)
            if settled.votes:
                self.feed(events.VotesWeighed(settled.votes))

    # -- messages -------------------------------------------------------------------------------------

    def register(self, router: MessageRouter) -> None:
        """Handle messages of neighbours in the rounds from now on, and those about slices of any peer."""
        router.add(self, accepts=lambda peer: peer in self.rounds.neighbours)
        self.exchange.register(router)

    @handles(Progress)
    def _progress(self, peer: PeerId, progress: Progress, _body: bytes) -> None:
        self.feed(read_progress(peer, progress))

    @handles(Announce)
    def _announced(self, peer: PeerId, announce: Announce, _body: bytes) -> None:
        known = tuple(read_reference(reference) for reference in announce.references)
        if not all(map(self.exchange.has_size, known)):  # Peers wait longer for large ones.
            self._refused(peer, "malformed", "contributions of other sizes than the run's")
        else:
            self.feed(events.Announced(peer, known, tuple(announce.complete)))

    @handles(GetContributions)
    def _get_contributions(self, peer: PeerId, request: GetContributions, _body: bytes) -> None:
        wanted = (ContributionId(identity) for identity in request.ids[:REFERENCES_PER_MESSAGE])
        self.store.requested(peer, wanted)

    @handles(GetChain)
    def _get_chain(self, peer: PeerId, request: GetChain, _body: bytes) -> None:
        if self._chains.spend(peer, self.clock.time()):
            self.feed(events.ChainAsked(peer, request.last))

    @handles(GetIds)
    def _get_ids(self, peer: PeerId, request: GetIds, _body: bytes) -> None:
        rounds = dict.fromkeys(request.rounds[:REFERENCES_PER_MESSAGE])
        told = tuple(each for each in rounds if self._tells_ids(peer, each))
        self.feed(events.IdsAsked(peer, told))

    def _tells_ids(self, peer: PeerId, round: int) -> bool:
        """Return whether to answer a request for a round's ids. An honest peer requests a round's set from
        one other peer once in ASK_SECONDS, and without an answer it considers its contribution lost. The
        budget matches that."""
        rounds = self.rounds
        if not (rounds.offers.remembers(round) or round in rounds.rounds):
            return False  # There is no answer, and each key costs memory.
        return self._ids.spend((peer, round), self.clock.time())

    @handles(ChainResponse)
    def _chain(self, peer: PeerId, message: ChainResponse, _body: bytes) -> None:
        size = len(message.digests) // max(1, len(message.counts))
        if size * len(message.counts) != len(message.digests) or len(message.before) != len(
            self.rounds.chain.value
        ):
            self._refused(peer, "malformed", "a chain whose lengths do not fit")
            return
        sets = tuple(
            SettledSet(max(0, count), message.digests[index * size : (index + 1) * size])
            for index, count in enumerate(message.counts)
        )
        self.feed(events.ChainArrived(peer, message.first, message.before, sets))

    def committed(self, tokens: int) -> None:
        if not self.work.source.warmup_steps:
            self.feed(events.GradientAccumulated(tokens))

    def ordered(self, rates: Rates) -> None:
        """Called when the owner has changed the learning rate."""
        if rates != self.rounds.rates:
            self.feed(events.RatesOrdered(rates))

    def roll_back(self, peers: frozenset[PeerId]) -> None:
        """Take these peers' contributions out of all open rounds; they replace those of earlier orders."""
        if peers != self.rounds.rolled_back.keys():
            self.feed(events.RollbackOrdered(peers))

    def end_at(self, last: int | None) -> None:
        """Make no round after `last`."""
        if last != self.rounds.last:
            self.feed(events.EndOrdered(last))

    def leave(self) -> None:
        """Close the current round, so that the tokens gathered so far become a last contribution."""
        self.feed(events.LeaveGroup())

    def handed_over(self) -> bool:
        """Return whether every unsettled own contribution is held by a neighbour, or there is none."""
        return self.rounds.handed_over()

    def linked(self, peer: PeerId) -> None:
        """Called when a peer of the same stage is linked."""
        if self.neighbourhood.membership.shares_rounds(peer):
            self.joined(peer)

    def joined(self, peer: PeerId) -> None:
        """Add a neighbour in the rounds."""
        self.feed(events.NeighbourJoined(peer))

    def left(self, peer: PeerId, released: bool) -> None:
        """Remove a neighbour. `released` means that it is still linked, only no longer as a neighbour."""
        self.store.uploads.left(peer)
        self.exchange.left(peer)
        self.feed(events.NeighbourLeft(peer, released))

    def counted(self, peers: int) -> None:
        """Called with the number of known peers of the group, including this one."""
        self.exchange.counted(peers)

    @handles(Contribution)
    def _take(self, peer: PeerId, _message: Contribution, body: bytes) -> None:
        """Accept a contribution from any sender: the contributor's signature counts, not the sender. One that
        would not count is not verified. Raises BadSignature."""
        try:
            contributor, _, round = claimed(body)
            if round > self.rounds.settled and not self.rounds.expects(round, contributor):
                self._count("not_counted")
                return
            opened = self.exchange.open(body)
        except BadSignature as error:
            self._count(error.code)
            raise  # A peer that relays it should have verified it: its link ends.
        except WireError as error:
            self._refused(peer, error.code, str(error))
            return
        reference = opened.reference
        if self.exchange.reads(opened):  # Is the own contribution in it?
            return
        if reference.id in self.store.stored and not self.rounds.takes(reference):
            self._count("repeated")  # It may have left the set since, and belong to it after all.
            return
        if not self.rounds.takes(reference):
            self._count("late" if reference.round <= self.rounds.settled else "not_taken")
            return
        stored = Stored(reference, body, opened.tokens)
        try:
            if not self.exchange.may_enter(peer, opened):
                self._count("not_counted")
                return
            self.work.method.check(stored.payload)
        except BadSignature as error:
            self._count(error.code)
            raise
        except (WireError, ContributionError) as error:
            self._refused(peer, getattr(error, "code", "malformed"), str(error))
            return
        self.store.keep(stored, opened.signed)
        self._count("accepted")
        self.log_event(
            log_events.ContributionAccepted(
                round=reference.round, id=reference.id.hex(), contributor=reference.peer
            )
        )
        self.feed(events.ContributionArrived(peer, reference, opened.table))
        self.exchange.accepted(opened, body)

    def _count_tokens(self, settled: Sequence[events.Reference]) -> None:
        """Add the tokens of a settled set. It is a function of the set, so peers that started with the same
        count agree."""
        if self.tokens is not None:
            each = self.store.count_tokens(settled)
            usual = max(self.manifest.rounds.global_batch_tokens, self.manifest.microbatch_tokens)
            self.tokens += min(each, MAX_OVERSHOOT * usual)

    def _refused(self, peer: PeerId, code: str, reason: str) -> None:
        self._count(code)
        self.neighbourhood.refused(peer, code, reason)

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


def round_off(seconds: float) -> float:
    return round(seconds, 4)
