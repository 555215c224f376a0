"""Carry out what the `GroupRounds` state machine decides: make, check, keep, fetch and apply contributions.

Everything that touches weights, momentum or gradients runs in the compute thread, in the order in which the
state machine decided it. Everything else runs on the event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from peers.compute.executor import UPDATE, Compute
from peers.network.message_router import MessageRouter, handles
from peers.network.peer_links import PeerLinks
from peers.runtime.timer import Timer
from peers.state.snapshot_store import RoundProgress, Weights
from peers.state.unnamed_file import store_unnamed
from peers.telemetry import log_events
from peers.worker.rounds.audit_path import AuditPath
from peers.worker.rounds.reducer_path import ReducerPath
from peers.worker.rounds.stored import Stored, opened_contribution
from peers.worker.rounds.update_compute import (
    ContributionReady,
    DecodeContribution,
    Done,
    ExpertChange,
    Operation,
    RoundSettled,
    SlicedContribution,
    UpdateWork,
)
from peers.worker.rounds.upload_scheduler import UploadQueue
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
from protocols.signed.envelope import ENVELOPE_BYTES, claimed
from protocols.signed.grants import Reduction, contributors_of, require_grants
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.membership.request_budget import RequestBudget
from swarmnet.optimizer.method import ContributionError
from swarmnet.optimizer.replica import NOT_HASHED
from swarmnet.rounds import events
from swarmnet.rounds.audits import Audits
from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.rounds.contributors import HasWeight
from swarmnet.rounds.fetch_scheduler import MAX_ASKS
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.history import START, SettledSet
from swarmnet.rounds.own_contributions import ASK_SECONDS, OwnContributions, RestartState
from swarmnet.rounds.result_table import Table, tag_of
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import Rates

MAX_OVERSHOOT = 4
"""Limit on the tokens counted for a round, as a multiple of its target. A delayed round gathers more than its
target; a false claim adds no more than this."""
MIN_ON_DISK = 1 << 20
"""A round's set of at least this many bytes goes to disk. The sets of a small model stay in memory: 40 rounds
take 40 MiB."""
MAX_HEADS = 4096
"""Result heads kept: hours of rounds; about 300 bytes each in a small group, 12 KB in one of 512."""


class RoundService:
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
        resynchronise: Callable[[events.FetchGroupState], None],
        log_event: log_events.LogEvent,
        rates: Rates = (),
        folder: Path | None = None,
        audits: Audits | None = None,
    ) -> None:
        """Continue with `weights`, which are loaded in `work.replica`, and with `offers`, this peer's earlier
        contributions.

        `has_weight` decides whose contributions are accepted. `resynchronise` is called when only fetching
        the whole state helps. `rates` are the owner's learning-rate orders. `folder` holds long bodies of
        settled rounds; None keeps them in memory. `audits` draws which results are audited, where there are
        reducers."""
        self.folder = folder
        self.manifest = manifest
        self.work = work
        self.compute = compute
        self.neighbourhood = neighbourhood
        self.resynchronise = resynchronise
        self.log_event = log_event
        self.clock = neighbourhood.clock
        self.me = neighbourhood.transport.peer
        draw = work.method.reduced.draw if work.method.reduced is not None else None
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
            draw=draw,
            is_member=self._is_member,
        )
        self.stored: dict[ContributionId, Stored] = {}
        self.outcomes: dict[str, int] = {}
        """Number of received contributions by outcome, for the metrics."""
        self.counts = work.counts
        self.settled: Callable[[RoundSettled], None] = lambda settled: None
        """Called with every settled round, on the event loop."""
        self.made: Callable[[int, int], None] = lambda round, tokens: None
        """Called with the round and tokens of every own contribution."""
        self.took_up: Callable[[ExpertChange], None] = lambda took_up: None
        """Called when the assignment of experts has changed."""
        self.sign_history: Callable[[Sequence[PeerId]], None] = lambda forked: None
        """Called with the peers on another branch while there are two."""
        self.digest = b""
        """Digest of the newest settled weights."""
        self._began = weights.settled_round
        self.tokens = weights.tokens
        work.tokens = self.tokens
        """Tokens in all settled rounds, of all peers; None if the count before `weights` is unknown."""
        queued = partial(neighbourhood.queued_bytes, lane="group")
        self.giving = UploadQueue(self._send, queued, self.clock)
        rare = manifest.rounds.max_seconds
        self._bodies: RequestBudget[tuple[PeerId, ContributionId]] = RequestBudget(rare, MAX_ASKS)
        self._ids: RequestBudget[tuple[PeerId, int]] = RequestBudget(ASK_SECONDS)
        self._chains: RequestBudget[PeerId] = RequestBudget(ASK_SECONDS)
        self.heads: OrderedDict[ContributionId, bytes] = OrderedDict()
        """Heads of results, for peers that were away and ask whether they are included; kept longer than the
        bodies."""
        self.reducers = self._reducers(audits) if audits is not None else None
        self._timer = Timer(lambda: self.feed(events.TimePassed()), self.clock)

    def _reducers(self, audits: Audits) -> ReducerPath | None:
        """Return the reducer's part of this service; None if the method has no reducers."""
        reduced, work, around = self.work.method.reduced, self.work, self.neighbourhood
        if reduced is None:
            return None
        auditing = AuditPath(
            audits=audits,
            reduced=reduced,
            work=work,
            rounds=self.rounds,
            compute=self.compute,
            neighbourhood=around,
            feed=self.feed,
            log_event=self.log_event,
            folder=self.folder,
        )
        return ReducerPath(
            reduced=reduced,
            work=work,
            rounds=self.rounds,
            neighbourhood=around,
            audits=auditing,
            feed=self.feed,
            refuse=self._refused,
            count=self._count,
            log_event=self.log_event,
        )

    def _is_member(self, peer: PeerId) -> bool:
        return peer == self.me or self.neighbourhood.membership.is_member(peer)

    def start(self) -> None:
        self.work.publish()
        if self.reducers is not None:
            for liar, first in self.reducers.audits.audits.convicted.items():
                self.feed(events.Convicted(liar, first))
        self.feed(events.TimePassed())

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
        self.giving.close()
        if self.reducers is not None:
            self.reducers.audits.close()

    def take_over(self, old: RoundService) -> None:
        """Take over what other peers may still request from `old`, and its knowledge of a stall."""
        self.heads = old.heads
        if old.rounds.agreement.follows:
            self.rounds.on_stall(float("inf"), self.clock.time())
        if self.reducers is not None and old.reducers is not None:
            self.reducers.audits.kept = old.reducers.audits.kept

    # -- the machine ----------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        """Feed an event to the rounds and carry out their effects."""
        if self.work.closed:
            return
        operations: list[Operation] = []
        for effect in self.rounds.handle(event, self.clock.time()):
            self._carry_out(effect, operations)
        if operations:
            self.compute.submit(UPDATE, partial(self.work.run, operations), self._worked)
        self._timer.arm(self.rounds.next_deadline())

    def _carry_out(self, effect: events.Effect, operations: list[Operation]) -> None:
        """Do what the rounds machine requested: send a message, log an event, or append to `operations`,
        which the compute thread runs in order."""
        post = self.neighbourhood.post
        match effect:
            case events.MakeContribution() | events.RemoveContribution() | events.RateRound():
                operations.append(effect)
            case events.SendEmptyNotice(round, reducers):
                self._reduces.say_nothing(round, reducers)
            case events.Reduce(round):
                operations.append(self._reduces.add_up(round))
            case events.RestoreToMomentum(round, identity):
                self._count("contribution_returned")
                self.log_event(
                    log_events.ContributionReturned(
                        code="contribution_returned", round=round, id=identity.hex()
                    )
                )
                operations.append(effect)
            case events.AddContribution(reference):
                payload = self.stored[reference.id].payload
                operations.append(DecodeContribution(reference.round, reference.peer, payload))
            case events.ApplyRound(round, _, waited):
                operations.append(effect)
                outcome = self.counts.applied(effect, self.rounds, self.clock.time())
                if self.work.method.reduced is not None:
                    self.counts.contributors = len(self.rounds.offers.contributors(self._references(round)))
                count, waited = self.counts.contributors, round_off(waited)
                self.log_event(
                    log_events.Applied(round=round, code=outcome, contributors=count, waited=waited)
                )
            case events.SettleRound(round, references):
                self._count_tokens(references)
                operations.append(
                    replace(effect, tokens=self.tokens, contributors=self._contributors(references))
                )
                self._move_to_disk(references)
                self._forget_bodies(round - kept_rounds(self.manifest.rounds))
                if self.reducers is not None:
                    self.reducers.settled(round)
                    self.reducers.audits.settled(round)
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
                for contributor in {reference.peer for reference in references} - {self.me}:
                    self.neighbourhood.introduce(contributor, peers)
                for message in write_announces(references, complete):
                    for peer in peers:
                        post(peer, "group", message)
            case events.RequestContributions(peer, ids):
                post(peer, "group", GetContributions(list(ids)))
            case events.RequestIds(peer, asked):
                post(peer, "group", GetIds(list(asked)))
            case events.SignChain(forked):
                self.sign_history(forked)
            case events.FetchGroupState(peers, reason, fork_round):
                code = "behind" if fork_round is None else "forked"
                self.log_event(log_events.Resync(code, peers, reason, fork_round))
                self.resynchronise(effect)

    def _worked(self, results: list[Done], _seconds: float) -> None:
        """Handle the results of operations on the event loop. Called when the compute thread has finished
        them."""
        for result in results:
            if isinstance(result, SlicedContribution):
                self._was_cut(result)
            elif isinstance(result, ExpertChange):
                self.log_event(log_events.ExpertsReassigned(result.round, result.group, result.holders))
                self.took_up(result)
            elif isinstance(result, ContributionReady) and result.is_result:
                self._was_added_up(result)
            elif isinstance(result, ContributionReady):
                reference = None
                if result.id is not None:
                    reference = events.Reference(result.round, self.me, result.id, len(result.data))
                    self._store(reference, result.data, result.tokens)
                    if self.work.closed:  # Made while the state was fetched: no peer will see it.
                        self.rounds.offers.made(result.round, result.id, self.clock.time())
                    self.log_event(
                        log_events.ContributionMade(
                            round=result.round, id=reference.id.hex(), tokens=result.tokens
                        )
                    )
                    self.made(result.round, result.tokens)
                else:
                    self.log_event(
                        log_events.NotFinite(code="not_finite", round=result.round, tokens=result.tokens)
                    )
                self.feed(events.Contributed(result.round, reference))
            else:
                self.digest = result.digest
                ids = [reference.id.hex() for reference in result.references]
                told = "" if result.digest == NOT_HASHED else result.digest.hex()
                self.log_event(log_events.Settled(result.round, told, ids, result.tokens))
                if not self.work.closed:  # No statement is signed on a branch that was abandoned meanwhile.
                    self.settled(result)

    @property
    def _reduces(self) -> ReducerPath:
        assert self.reducers is not None, "in a run without reducers the rounds know of none"
        return self.reducers

    def _was_cut(self, cut: SlicedContribution) -> None:
        """Send the own contribution's slices to their reducers."""
        if cut.id is None:
            self.log_event(log_events.NotFinite("not_finite", cut.round, cut.tokens))
        else:
            self.log_event(log_events.ContributionMade(cut.round, cut.id.hex(), cut.tokens))
            self.made(cut.round, cut.tokens)
            if self.work.closed:  # Made while the state was fetched: no peer will see it.
                self.rounds.offers.made(cut.round, cut.id, self.clock.time())
                return
        self._reduces.was_cut(cut)

    def _was_added_up(self, made: ContributionReady) -> None:
        """Store and announce the result that this peer has reduced."""
        reference = None
        if made.id is not None:
            reference = events.Reference(made.round, self.me, made.id, len(made.data))
            self._store(reference, made.data, made.tokens, made.signed)
        self._reduces.was_added_up(made)
        self.feed(events.Contributed(made.round, reference, made.table))

    # -- messages -------------------------------------------------------------------------------------

    def register(self, router: MessageRouter) -> None:
        """Handle messages of the neighbours in the rounds from now on, and messages about slices of any
        peer."""
        router.add(self, accepts=lambda peer: peer in self.rounds.neighbours)
        if self.reducers is not None:
            self.reducers.register(router)
        else:
            for part in (ReducerPath, AuditPath):
                router.refuse(part, self._refuse_slices)

    def _refuse_slices(self, peer: PeerId) -> None:
        reason = "a message about slices, but this run has no reducers (sync.topology: all-gather)"
        self._refused(peer, "malformed", reason)

    @handles(Progress)
    def _progress(self, peer: PeerId, progress: Progress, _body: bytes) -> None:
        self.feed(read_progress(peer, progress))

    @handles(Announce)
    def _announced(self, peer: PeerId, announce: Announce, _body: bytes) -> None:
        known = tuple(read_reference(reference) for reference in announce.references)
        if not all(map(self._has_size, known)):  # Peers wait longer for large ones.
            self._refused(peer, "malformed", "contributions of other sizes than the run's")
        else:
            self.feed(events.Announced(peer, known, tuple(announce.complete)))

    @handles(GetContributions)
    def _get_contributions(self, peer: PeerId, request: GetContributions, _body: bytes) -> None:
        wanted = (ContributionId(identity) for identity in request.ids[:REFERENCES_PER_MESSAGE])
        kept = (identity for identity in wanted if identity in self.stored or identity in self.heads)
        self.giving.wanted(peer, kept)

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
        if size * len(message.counts) != len(message.digests) or len(message.before) != len(START):
            self._refused(peer, "malformed", "a chain whose lengths do not fit")
            return
        sets = tuple(
            SettledSet(max(0, count), message.digests[index * size : (index + 1) * size])
            for index, count in enumerate(message.counts)
        )
        self.feed(events.ChainArrived(peer, message.first, message.before, sets))

    def committed(self, tokens: int) -> None:
        if not self.work.optimizer_warmup_steps:
            self.feed(events.GradientAccumulated(tokens))

    def ordered(self, rates: Rates) -> None:
        """Called when the owner has changed the learning rate."""
        if rates != self.rounds.rates:
            self.feed(events.RatesOrdered(rates))

    def end_at(self, last: int | None) -> None:
        """Make no round after `last`."""
        if last != self.rounds.last:
            self.feed(events.EndOrdered(last))

    def leave(self) -> None:
        """Close the current round, so that the tokens gathered so far become a last contribution."""
        self.feed(events.LeaveGroup())

    def handed_over(self) -> bool:
        """Return whether every unsettled own contribution is held by a neighbour, or there is no
        neighbour."""
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
        self.giving.left(peer)
        if self.reducers is not None:
            self.reducers.audits.left(peer)
        self.feed(events.NeighbourLeft(peer, released))

    def counted(self, peers: int) -> None:
        """Called with the number of known peers of the group, including this one."""
        reducing = self.rounds.reducing
        if reducing is None:
            if peers != self.rounds.open_round.peers:
                self.feed(events.GroupSizeChanged(peers))
            return
        membership = self.neighbourhood.membership
        members = frozenset(membership.live(self.work.stage)) | {self.me}
        if peers != self.rounds.open_round.peers or members != reducing.members:
            self.feed(events.GroupSizeChanged(peers, members))
        if self.rounds.agreement.hops > 1:  # Otherwise all are linked anyway.
            membership.reduces(reducing.soon(self.rounds.current, membership.candidates()))
        for peer in self.neighbourhood.linked(self.work.stage):
            if membership.shares_rounds(peer) and peer not in self.rounds.neighbours:
                self.joined(peer)
            elif peer in self.rounds.neighbours and not membership.shares_rounds(peer):
                self.left(peer, released=True)  # From now on its link carries only slices.
        self._reduces.audits.look()

    def _send(self, peer: PeerId, identity: ContributionId) -> None:
        """Send a contribution that this neighbour requested, unless it was dropped after it settled."""
        stored = self.stored.get(identity)
        body = stored.data if stored is not None else self.heads.get(identity)
        if body is not None and self._bodies.spend((peer, identity), self.clock.time()):
            self.neighbourhood.post(peer, "group", Contribution(), body)

    @handles(Contribution)
    def _take(self, peer: PeerId, _message: Contribution, body: bytes) -> None:
        """Accept a contribution from any sender: the contributor's signature counts, not the sender. One that
        would not count is not verified. Raises BadSignature."""
        try:
            contributor, _, round = claimed(body)
            if round > self.rounds.settled and not self.rounds.expects(round, contributor):
                self._count("not_counted")
                return
            opened = opened_contribution(body, self.work)
        except BadSignature as error:
            self._count(error.code)
            raise  # A peer that relays it should have verified it: its link ends.
        except WireError as error:
            self._refused(peer, error.code, str(error))
            return
        reference, table = opened.reference, opened.table
        if table is not None and self.rounds.offers.wants(reference.id):  # Is the own contribution in it?
            self.feed(events.ResultRead(reference.id, table))
            return
        if reference.id in self.stored and not self.rounds.takes(reference):
            self._count("repeated")  # It may have left the set since, and belong to it after all.
            return
        if not self.rounds.takes(reference):
            self._count("late" if reference.round <= self.rounds.settled else "not_taken")
            return
        stored = Stored(reference, body, opened.tokens)
        try:
            if table is not None and not self._may_name(peer, reference, table):
                self._count("not_counted")
                return
            self.work.method.check(stored.payload)
        except BadSignature as error:
            self._count(error.code)
            raise
        except (WireError, ContributionError) as error:
            self._refused(peer, getattr(error, "code", "malformed"), str(error))
            return
        self._store(reference, body, opened.tokens, opened.signed)
        self._count("accepted")
        self.log_event(
            log_events.ContributionAccepted(
                round=reference.round, id=reference.id.hex(), contributor=reference.peer
            )
        )
        self.feed(events.ContributionArrived(peer, reference, table))
        if table is not None:
            self._reduces.audits.came(reference, body, table)

    def _may_name(self, peer: PeerId, reference: events.Reference, table: Table) -> bool:
        """Return whether all contributors of a result belong to the group; otherwise it may wait for them.
        Raises as `require_grants`."""
        strangers = tuple(one for one in contributors_of(table) if not self._is_member(one))
        if strangers:
            self.feed(events.UnknownPeersNamed(peer, reference, strangers))
        if strangers and not self.rounds.takes(reference):
            return False
        require_grants(table, Reduction(self.work.run_id, self.work.stage, reference.round, reference.peer))
        return True

    def _has_size(self, reference: events.Reference) -> bool:
        size, reduced = reference.size - ENVELOPE_BYTES, self.work.method.reduced
        if reduced is not None:
            return 0 < size <= reduced.longest_result
        return size == self.work.method.payload_bytes

    def _references(self, round: int) -> Sequence[events.Reference]:
        state = self.rounds.rounds.get(round)
        return tuple(state.held.values()) if state is not None else ()

    def _contributors(self, references: Sequence[events.Reference]) -> tuple[PeerId, ...]:
        """Return the peers that contributed to a set, as far as they are known."""
        if self.work.method.reduced is None:
            return tuple(reference.peer for reference in references)
        tags, known = self.rounds.offers.contributors(references), (self.me, *self.neighbourhood.known())
        return tuple(peer for peer in known if tag_of(peer) in tags)

    def _store(self, reference: events.Reference, data: bytes, tokens: int, signed: int = 0) -> None:
        """Store a contribution. `signed` is the length of a result's head in bytes."""
        self.stored[reference.id] = Stored(reference, data, tokens)
        if self.reducers is not None:
            self.heads[reference.id] = data[:signed]
            while len(self.heads) > MAX_HEADS:
                self.heads.popitem(last=False)

    def _count_tokens(self, settled: Sequence[events.Reference]) -> None:
        """Add the tokens of a settled set. It is a function of the set, so peers that started with the same
        count agree."""
        if self.tokens is not None:
            each = sum(self.stored[reference.id].tokens for reference in settled)
            usual = max(self.manifest.rounds.global_batch_tokens, self.manifest.microbatch_tokens)
            self.tokens += min(each, MAX_OVERSHOOT * usual)

    def _move_to_disk(self, settled: Sequence[events.Reference]) -> None:
        """Move long bodies of a settled round to disk. Many rounds are kept for peers that are behind."""
        if sum(reference.size for reference in settled) < MIN_ON_DISK:
            return
        stored = [self.stored[reference.id] for reference in settled]
        views = store_unnamed([each.data for each in stored], self.folder)
        for each, view in zip(stored, views, strict=True):
            self.stored[each.reference.id] = replace(each, data=view)

    def _forget_bodies(self, until: int) -> None:
        for identity in [i for i, stored in self.stored.items() if stored.reference.round <= until]:
            del self.stored[identity]

    def _refused(self, peer: PeerId, code: str, reason: str) -> None:
        self._count(code)
        self.neighbourhood.refused(peer, code, reason)

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


def round_off(seconds: float) -> float:
    return round(seconds, 4)
