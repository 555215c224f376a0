"""The rounds of one group, as one peer sees them: when to contribute, apply, correct and settle.

A round is the *set* of contributions made for it, by contributors that have weight (contributors.py). If a
peer made two, every peer picks the smaller id. The life of a round:

    current  --enough tokens, time up, or others continue-->  closed: own contribution made and announced
    closed   --expected contributions are in, or deadline-->  applied: its step is in the live weights
    applied  --`window` later rounds applied-->               sealed: this peer makes nothing more for it
    sealed   --the whole group sealed the same set-->         settled: final

Until a round is settled, a late contribution still enters its set and corrects the weights. A settled set
cannot grow, unless a peer was silent for `finality_timeout_seconds` (docs/consistency.md). Contributions are
announced and then fetched. Each peer reports digests of its sets to its neighbours in a regular message,
Progress. They show whether the group has sealed the same set (settlement.py), or an announcement was lost. A
peer that is behind adopts the settled sets of *same-branch peers*: neighbours with the same settled history.
No IO: `handle(event, now)` returns what the caller must do, in order. All times are in seconds on its clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from swarmnet.identifiers import PeerId
from swarmnet.membership.overlay import hops, links
from swarmnet.rounds import events
from swarmnet.rounds.contribution_sets import (
    NeighbourView,
    RoundSet,
    are_reported,
    kept_rounds,
    list_open_sets,
    set_digest,
)
from swarmnet.rounds.contributors import HasWeight, SetAdmission
from swarmnet.rounds.fetch_scheduler import SHARE_SLACK, FetchScheduler
from swarmnet.rounds.fork_choice import ForkChoice
from swarmnet.rounds.gossip import CALM_SECONDS, URGENT_SECONDS, Gossip
from swarmnet.rounds.history import START, Chain, Earlier, SettledSet
from swarmnet.rounds.open_round import CurrentRound
from swarmnet.rounds.own_contributions import OwnContributions
from swarmnet.rounds.reducing import ReductionSchedule
from swarmnet.rounds.result_table import Draw, Table
from swarmnet.rounds.settlement import FinalityRules
from swarmnet.run.rates import Rates, factor_of, factors
from swarmnet.run.schema import Rounds

CONTRIBUTED_ROUNDS = 64
"""Rounds for which Progress says whether this peer contributed."""


class GroupRounds:
    """The rounds of a group as a sans-IO state machine. `applied` is the last applied round; -1 if none.

    `rounds` holds the set of each open (not settled) round. `pending` are rounds whose own contribution is
    being made. In runs with *reducers*, a draw gives each shard of the weights to a peer that sums all
    contributions there (their *slices*). Sets then consist of such results. `reducing` is None without."""

    def __init__(
        self,
        *,
        rules: Rounds,
        me: PeerId,
        settled: int,
        now: float,
        chain_value: bytes = START,
        offers: OwnContributions | None = None,
        earlier: Earlier | None = None,
        has_weight: HasWeight = lambda contributor, round: True,
        rates: Rates = (),
        draw: Draw | None = None,
        is_member: Callable[[PeerId], bool] = lambda peer: True,
    ) -> None:
        """Continue after round `settled`, where the chain of settled sets has `chain_value`. `offers` and
        `earlier` come from an earlier state of this peer. `rates`: ordered so far; `draw`: of reducers, if
        there are any; `is_member`: whether a peer belongs to the group (results may name others)."""
        self.rules = rules
        self.rates = rates
        self.last: int | None = None
        """After this round this peer closes none on its own; None: the run does not end."""
        self.me = me
        self.histories = ForkChoice(
            rules=rules, chain=Chain(settled, chain_value, earlier), neighbours={}, now=now
        )
        self.agreement = FinalityRules(rules, self.same_branch_peers, joins=True)
        self.applied = settled
        self.open_round = CurrentRound(
            rules=rules, me=me, number=settled + 1, same_branch_peers=self.same_branch_peers, now=now
        )
        self.contributed: set[int] = set()
        self.pending: set[int] = set()
        self.rounds: dict[int, RoundSet] = {}
        self.history: dict[int, RoundSet] = {}
        """The last settled rounds."""
        self.pulls = FetchScheduler(me, self.same_branch_peers)
        self.admission = SetAdmission(
            me=me,
            has_weight=has_weight,
            is_member=is_member,
            rounds=self.rounds,
            neighbours=self.neighbours,
            open_round=self.open_round,
        )
        self.offers = offers or OwnContributions(rules, draw)
        self.rolled_back: dict[PeerId, int] = {}
        """Peers whose contributions the owner takes out, and the first round that was open then."""
        self.reducing: ReductionSchedule | None = None
        if draw is not None:
            self.reducing = ReductionSchedule(
                rules=rules, draw=draw, me=me, same_branch_peers=self.same_branch_peers, chain=self.chain
            )
        self.gossip = Gossip(now)
        self._due = now
        self._effects: list[events.Effect] = []

    @property
    def neighbours(self) -> Mapping[PeerId, NeighbourView]:
        """What this peer knows of each neighbour."""
        return self.histories.neighbours

    @property
    def same_branch_peers(self) -> Mapping[PeerId, NeighbourView]:
        """The neighbours on this peer's branch."""
        return self.histories.same_branch_peers

    @property
    def chain(self) -> Chain:
        """The chain of settled sets."""
        return self.histories.chain

    @property
    def settled(self) -> int:
        """The last settled round; -1 if none."""
        return self.histories.chain.round

    @property
    def current(self) -> int:
        """The round that accumulates gradients."""
        return self.open_round.number

    @property
    def past_last(self) -> bool:
        """True if all rounds that the run's owner wanted are closed here."""
        return self.last is not None and self.current > self.last

    @property
    def is_over(self) -> bool:
        """True if all rounds that the owner wanted are closed here, and all closed rounds are settled."""
        return self.past_last and self.settled == self.current - 1

    @property
    def in_step(self) -> bool:
        """True unless half of the peers in sight have settled a round that is not applied here. One neighbour
        is enough while this peer follows others. A peer that joins must have heard its neighbours first."""
        return not (self.agreement.joins or self._is_behind())

    def _is_behind(self) -> bool:
        views = self.same_branch_peers.values()
        return self.agreement.are_ahead((view, view.settled > self.applied) for view in views)

    def handle(self, event: events.Event, now: float) -> list[events.Effect]:
        """Handle an event. Returns what must be done, in order."""
        self._effects = []
        match event:
            case events.GradientAccumulated(tokens):
                is_first = self.open_round.tokens == 0  # A round without tokens has no deadline.
                self.open_round.tokens += tokens
                self.gossip.committed(self.open_round.tokens, self.open_round.share)
                self._due = min(self._due, self.gossip.next_deadline())
                if not (is_first or self.open_round.full(now)) and now < self._due:
                    return []  # The usual case: nothing below can change yet.
            case events.Contributed(round, reference, table):
                self._record_table(reference, table)
                self._handle_own_contribution(round, reference, now)
            case _ if isinstance(event, events.OfReducers):
                self._handle_reducer_event(event, now)
            case events.ProgressArrived():
                self._handle_progress(event, now)
            case events.ChainArrived() | events.ChainAsked() | events.ChainSigned():
                self._effects += self.histories.handle_chain_event(event, now)
            case events.Announced():
                self._handle_announcement(event, now)
            case events.ContributionArrived(peer, reference, table):
                self._record_table(reference, table)
                self._handle_arrival(peer, reference, now)
            case events.IdsAsked(peer, rounds):
                self._send_ids(peer, rounds)
            case events.NeighbourJoined(peer):
                self.histories.joined(peer, now)
                self.gossip.at_once(now)
            case events.NeighbourLeft(peer, released):
                self.histories.left(peer, released, now)
                if released:  # It is alive, but no longer a neighbour.
                    self.offers.released(peer)
                self.pulls.left(peer, now)
                self.admission.waiting.left(peer)
            case events.GroupSizeChanged(peers, members, classes):
                self._set_group_size(max(1, peers))
                if self.reducing is not None:
                    self.reducing.members = members | {self.me}
                    self.reducing.classes = classes
                    self.pulls.helpers = self.reducing.helpers
            case events.RatesOrdered(rates):
                self._adopt_rates(rates, now)
            case events.RollbackOrdered(peers):
                self._roll_back(peers, now)
            case events.VotesWeighed(votes):
                self.open_round.weigh(votes)
            case events.EndOrdered(last):
                self.last = last
            case events.ProcessSuspended(seconds):
                self.on_stall(seconds, now)
            case events.LeaveGroup():
                self.open_round.must_close = self.open_round.tokens > 0 and not self.past_last
                if self.open_round.must_close and self._knows_draw():
                    self._close(now)
        self._advance(now)
        self._due = self._next_due()
        return self._effects

    def next_deadline(self) -> float:
        """Return when to call `handle` with `TimePassed` if nothing else happens."""
        return self._due

    def _next_due(self) -> float:
        """Return the earliest time at which something is due without another event."""
        times = [self.gossip.next_deadline(), self.pulls.next_deadline(), self.offers.next_deadline()]
        if self.reducing is not None:
            times.append(self.reducing.next_deadline())
        if self.open_round.has_tokens() and self._may_close():
            times.append(self.open_round.next_deadline())
        for number in (self.applied + 1, self.settled + 1):  # The rounds to apply and to settle next.
            state = self.rounds.get(number)
            if state is not None and number not in self.pending:
                times.append(self.agreement.patience_ends(number, state, number <= self.applied))
        if self.agreement.follows:
            times.append(self.histories.suspension.until)
        return min(*times, *self.histories.awaited.values())

    def handed_over(self) -> bool:
        """Return whether this peer may leave without losing a contribution. For each open round with one of
        its own, some neighbour must report the same set as is held here. With reducers, their results must
        also include all slices of this peer. Without neighbours it need not wait for reports."""
        if self.open_round.must_close or self.pending:  # A contribution is still to be made, or being made.
            return False
        reported_sets = [view.sets for view in self.neighbours.values()]
        is_summed = self.reducing is None or self.offers.are_held(self.rounds)
        return not reported_sets or (are_reported(self.me, self.rounds, reported_sets) and is_summed)

    def takes(self, reference: events.Reference) -> bool:
        """Return whether this contribution would enter a set now: it is news and has weight."""
        return self._is_news(reference) and self.admission.may_enter(reference)

    def expects(self, round: int, contributor: PeerId) -> bool:
        """Return whether a contribution of `contributor` could enter that set, before one is verified."""
        return self.admission.expects(round, contributor)

    def takes_slices(self, peer: PeerId, round: int) -> bool:
        """Return whether slices of `peer` for `round` are accepted. Memory allows one round ahead at most."""
        if self.reducing is None or not self.settled < round <= self.current + 1:
            return False
        return self.admission.has_weight(peer, round) and self.reducing.takes(peer, round)

    def _set_group_size(self, peers: int) -> None:
        """Derive what depends on the number of peers in the group, this one included."""
        self.agreement = replace(self.agreement, hops=hops(peers))
        self.pulls.fair_share = SHARE_SLACK * peers / links(peers)
        self.open_round.peers = peers
        self.open_round.all_in_sight = self.agreement.hops == 1
        self.histories.all_in_sight = self.open_round.all_in_sight

    def on_stall(self, seconds: float, now: float) -> None:
        """Follow the peers that continued while this process was suspended for `seconds`: settle nothing
        alone for a while. If the suspension was short, do nothing."""
        if not self.histories.suspension.begin(seconds, self.settled, now):
            return
        self._set_following(True)
        for state in [state for state in self.rounds.values() if state.sealed]:
            state.sealed_at = now  # The timeout after which it settles starts again.

    def _set_following(self, follows: bool) -> None:
        self.agreement = replace(self.agreement, follows=follows)
        self.histories.follows = follows

    def _handle_own_contribution(self, round: int, reference: events.Reference | None, now: float) -> None:
        """Add the completed own contribution to its set and announce it; None: none could be made. If the
        round was sealed meanwhile, it is dropped. Without reducers, its values return to the momentum."""
        self.pending.discard(round)
        self.gossip.changed(URGENT_SECONDS)
        if reference is None or self._is_sealed(round):
            self.contributed.discard(round)
            if reference is not None and self.reducing is None:
                self._effects.append(events.RestoreToMomentum(round, reference.id))
            return
        if self.reducing is None:
            self.offers.made(round, reference.id, now)
        self._add_to_set(reference)
        self._effects.append(events.SendAnnounce(tuple(self.neighbours), (reference,)))

    def _handle_progress(self, event: events.ProgressArrived, now: float) -> None:
        """Record a neighbour's report. If the neighbour is on the same branch, close the rounds that enough
        neighbours have left, and record where its sets differ from this peer's."""
        neighbour = self.neighbours.get(event.peer)
        if neighbour is None:
            return
        is_ahead = event.settled > max(neighbour.settled, self.settled)
        self._effects += self.histories.progress(event, now)
        if neighbour.relation == "same":
            self.offers.agree(event.peer, min(self.settled, event.settled), now)
            if is_ahead:
                self.gossip.changed(URGENT_SECONDS)
            self._close_left_rounds(now)
            neighbour.compare(self.rounds, now)
            self.gossip.compared(neighbour)

    def _handle_announcement(self, event: events.Announced, now: float) -> None:
        """Fetch what a same-branch peer announces and this peer lacks. For settled rounds (`complete`) it
        announces the whole set. If this peer must adopt that set, it adopts the factor of its learning rate
        too, and removes the contributions that are not in it."""
        peer, references, complete = event.peer, event.references, event.complete
        if peer not in self.same_branch_peers:
            return
        self.gossip.knows(peer, references)
        self.offers.accept_sets(complete, references)
        for number in sorted(self.rounds.keys() & complete):
            adopted = self.agreement.adopted_digest(number, self.rounds[number], now)
            settled = {reference.id for reference in references if reference.round == number}
            # A digest covers ids and factor: one of the owner's factors gives `adopted`, or the sets differ.
            factor = next((f for f in factors(self.rates) if set_digest(settled, f) == adopted), None)
            if factor is None:
                continue
            self._set_rate_factor(number, factor)
            for contributor in self.rounds[number].keep_only(settled):
                self._effects.append(events.RemoveContribution(number, contributor))
            for reference in references:
                if reference.round == number:
                    self.admission.accepted_by_half.add(reference)
        missing = [reference for reference in references if self._is_news(reference)]
        for reference in missing:
            if not self.admission.may_enter(reference):
                self.admission.wait(peer, reference, self.agreement)
        self._effects += self.pulls.offered(peer, filter(self.takes, missing), now)
        self._fetch_waiting(missing, now)

    def _handle_arrival(self, peer: PeerId, reference: events.Reference, now: float) -> None:
        """Add a verified contribution that `peer` sent, and announce it to neighbours that may lack it."""
        announcers = self.pulls.arrived(reference, peer, now)  # Ends its download.
        if not self.takes(reference):
            return
        self._add_to_set(reference)
        holders = (peer, reference.peer, *announcers)
        views = self.same_branch_peers.items()
        lacking = (key for key, view in views if key not in holders and view.settled < reference.round)
        self.gossip.relay(reference, lacking, now)

    def _send_ids(self, peer: PeerId, rounds: Iterable[int]) -> None:
        """Announce to `peer` what this peer holds of these rounds."""
        references, complete = self.offers.answer(rounds, self.rounds, self.settled)
        if references or complete:
            self._effects.append(events.SendAnnounce((peer,), references, complete))

    def _is_news(self, reference: events.Reference) -> bool:
        """Return whether a contribution is for an open round, at most `window` rounds ahead, and would change
        its set: the same peer has none there, or one with a greater id."""
        if not self.settled < reference.round <= self.current + self.rules.window:
            return False
        state = self.rounds.get(reference.round)
        held = state.held.get(reference.peer) if state else None
        return held is None or reference.id < held.id

    def _fetch_waiting(self, references: Iterable[events.Reference], now: float) -> None:
        """Fetch waiting contributions that have weight by now."""
        for reference in references:
            if self.takes(reference):
                for holder in self.admission.waiting.end(reference.id):
                    self._effects += self.pulls.offered(holder, (reference,), now)

    def _add_to_set(self, reference: events.Reference) -> None:
        """Add a contribution to its round's set. It replaces another one of the same peer."""
        state = self._set_of(reference.round)
        if reference.peer in state.held:
            self._effects.append(events.RemoveContribution(reference.round, reference.peer))
        state.add(reference)
        self._effects.append(events.AddContribution(reference))
        self.gossip.changed(CALM_SECONDS)

    def _set_of(self, number: int) -> RoundSet:
        """Return the set of an open round, which is created if it is new."""
        if number not in self.rounds:
            self.rounds[number] = RoundSet()
            self._set_rate_factor(number, factor_of(self.rates, number))
        return self.rounds[number]

    def _set_rate_factor(self, number: int, factor: int) -> None:
        """Set the factor of a round's learning rate."""
        state = self.rounds[number]
        if state.factor != factor:
            state.rate(factor)
            self._effects.append(events.RateRound(number, factor))
            self.gossip.changed(URGENT_SECONDS)

    def _adopt_rates(self, rates: Rates, now: float) -> None:
        """Adopt the owner's learning rates for open rounds, except those whose set the group has settled."""
        self.rates = rates
        for number, state in self.rounds.items():
            factor = factor_of(rates, number)
            if factor == state.factor or self.agreement.adopted_digest(number, state, now) == state.digest:
                continue
            self._set_rate_factor(number, factor)
            if state.sealed:
                state.sealed_at = now  # The timeout starts again, so that other peers receive the order.

    def _convict(self, peer: PeerId, first: int, now: float) -> None:
        """Remove a faulty peer's contributions from round `first` on, except from sets that are settled."""
        self.admission.convicted[peer] = first
        for number, state in self.rounds.items():
            is_settled_set = self.agreement.adopted_digest(number, state, now) == state.digest
            if number < first or (peer in state.held and is_settled_set):
                continue
            self.admission.accepted_by_half.withdraw(peer, number)
            if peer in state.held:
                state.remove(peer)
                self._effects.append(events.RemoveContribution(number, peer))
                if state.sealed:
                    state.sealed_at = now  # The timeout starts again, so that other peers receive the proof.
        self.gossip.changed(URGENT_SECONDS)

    def _roll_back(self, peers: frozenset[PeerId], now: float) -> None:
        """Take the contributions of `peers` out of the open rounds, like those of faulty peers. The order
        reaches peers at different times; those that settled a round before keep its set, and the group adopts
        one of both."""
        for peer in peers - self.rolled_back.keys():
            self.rolled_back[peer] = self.settled + 1
            if self.admission.convicted.get(peer, self.settled + 2) > self.settled + 1:
                self._convict(peer, self.settled + 1, now)
        for peer in self.rolled_back.keys() - peers:
            first = self.rolled_back.pop(peer)
            if self.admission.convicted.get(peer) == first:
                del self.admission.convicted[peer]

    def _is_sealed(self, number: int) -> bool:
        """Return whether it is too late to contribute: sealed or settled, here or by half in sight."""
        if number <= self.settled or (number in self.rounds and self.rounds[number].sealed):
            return True
        return self.agreement.are_ahead((v, v.has_sealed(number)) for v in self.same_branch_peers.values())

    def _close_left_rounds(self, now: float) -> None:
        """Close the rounds that enough neighbours have left, but stay within `kept_rounds` of the settled."""
        while self._knows_draw() and self.current < self.settled + 1 + kept_rounds(self.rules):
            state = self.rounds.get(self.current)
            if not self.open_round.is_left(self.agreement, state is not None and bool(state.held), now):
                return
            self._close(now)

    def _close(self, now: float) -> None:
        """Close the current round, contribute what was gathered unless the round is sealed, and begin the
        next. A reducer also publishes results of rounds to which it contributes nothing."""
        number = self.current
        self._set_of(number).closed_at = now
        contributes = self.open_round.tokens > 0 and not self._is_sealed(number)
        reducers = self.reducing.reducers(number) if self.reducing is not None else ()
        if reducers and not contributes:
            self._effects.append(events.SendEmptyNotice(number, tuple(sorted(set(reducers) - {self.me}))))
        if contributes:
            self._effects.append(events.MakeContribution(number, self.open_round.tokens, reducers))
            self.open_round.tokens = 0
        if self.reducing is not None:
            contributes = not self._is_sealed(number) and self.reducing.close(number, contributes, now)
        if contributes:  # With reducers: or publishes a result.
            self.pending.add(number)
            self.contributed.add(number)
        self.open_round.go_on(now)
        self.contributed = {recent for recent in self.contributed if recent > number - CONTRIBUTED_ROUNDS}
        self.gossip.at_once(now)

    def _handle_reducer_event(self, event: events.OfReducers, now: float) -> None:
        """Handle an event about slices, results or a faulty peer."""
        match event:
            case events.Convicted(peer, first):
                self._convict(peer, first, now)
            case events.SlicesSent(round, identity, reducers):
                self.offers.made(round, identity, now, frozenset(reducers) - {self.me})
            case events.ResultRead(identity, table):
                self.offers.read(identity, table)
            case events.UnknownPeersNamed(peer, reference, strangers):
                self.pulls.arrived(reference, peer, now)  # Ends its download.
                self.admission.waiting.record_unknown_in_result(peer, reference, strangers)
        if self.reducing is not None:
            self.reducing.take(event, self.settled, self.current, now)

    def _record_table(self, reference: events.Reference | None, table: Table | None) -> None:
        """Record the table of a reducer's result: whose slices it sums."""
        if reference is not None and table is not None:
            self.offers.read(reference.id, table)
            if self.reducing is not None:
                self.reducing.read(reference.peer, reference.round, table)

    def _advance(self, now: float) -> None:
        """Do all that is due at `now`: close, apply, seal, settle, request, announce. Adds to `_effects`."""
        if self.agreement.follows and now >= self.histories.suspension.until:
            self._set_following(False)
        if self.agreement.joins and self.histories.all_reported(now) and not self._is_behind():
            self.agreement = replace(self.agreement, joins=False)
            self.gossip.changed(URGENT_SECONDS)
        self._close_if_due(now)
        if self.reducing is not None:
            self._effects += self.reducing.asks(self.current, now)
            self._effects += [events.Reduce(round) for round in self.reducing.due(now)]
        self.histories.forget_awaited(now)
        self._raise_set_levels()
        applied_before = self.applied
        while self._may_apply(self.applied + 1, now):
            self.applied += 1
            state = self.rounds[self.applied]
            self._effects.append(events.ApplyRound(self.applied, tuple(state.held), now - state.closed_at))
            to_seal = self.rounds.get(self.applied - self.rules.window)
            if to_seal is not None:
                to_seal.seal(now)
            self.gossip.changed(URGENT_SECONDS)
        if self.past_last:  # No later round follows that could seal these.
            for number in range(self.settled + 1, self.applied + 1):
                self.rounds[number].seal(now)
        if self.applied > applied_before or self.past_last:
            self._raise_set_levels()
        while self._may_settle(self.settled + 1, now):
            self._settle(self.settled + 1, now)
            self._close_if_due(now)  # The draw of its reducers may need this round.
        self._effects += self.offers.decide(self.settled, tuple(self.same_branch_peers), now)
        self._fetch_waiting(self.admission.waiting.due(now), now)
        self._effects += self.pulls.again(now, self.takes)
        self._effects += self.gossip.id_requests(self.neighbours, self.pulls.under_way, now)
        self._effects += self.gossip.relays(self.same_branch_peers, self.settled, now)
        self._send_progress(now)

    def _settle(self, number: int, now: float) -> None:
        """Settle a round with the set that is held here, and forget what only its open state needed."""
        state = self.rounds.pop(number)
        self.history[number] = state
        self.histories.settle(SettledSet(len(state.held), state.digest))  # Extends the chain.
        state.seal(now)
        self.histories.suspension.took_up(number, now)  # While it follows others, there may be more to adopt.
        self.history.pop(number - kept_rounds(self.rules), None)
        self.pulls.forget_until(number, now)
        self.admission.forget_until(number)
        if self.reducing is not None:
            self.reducing.forget_until(number)
        references = tuple(reference for _, reference in sorted(state.held.items()))
        self.offers.settled(number, references)
        self.open_round.settled(self.offers.contributor_tags(state))
        self._effects.append(events.SettleRound(number, references, self.chain.value))
        self.gossip.changed(URGENT_SECONDS)

    def _knows_draw(self) -> bool:  # Whether reducers of the current round are known, or there are none.
        return self.reducing is None or self.reducing.knows(self.current)

    def _close_if_due(self, now: float) -> None:
        is_due = self.open_round.full(now) and self._may_close()
        if is_due or (self.open_round.must_close and self._knows_draw()):
            self._close(now)

    def _may_close(self) -> bool:
        close_enough = self.current <= self.settled + kept_rounds(self.rules)
        return self.in_step and close_enough and not self.past_last and self._knows_draw()

    def _may_apply(self, number: int, now: float) -> bool:
        state = self.rounds.get(number)
        if state is None or number >= self.current or number in self.pending:
            return False
        return self.agreement.may_apply(number, state, now)

    def _may_settle(self, number: int, now: float) -> bool:
        state = self.rounds.get(number)
        if state is None or number > self.applied or number in self.pending:
            return False
        return self.agreement.may_settle(number, state, now)

    def _raise_set_levels(self) -> None:
        """Raise what this peer reports about closed rounds whose own contribution and downloads are done."""
        for number, state in self.rounds.items():
            ready = number < self.current and number not in self.pending and not self.pulls.of_round(number)
            if ready and self.agreement.raise_levels(number, state, bool(self.histories.awaited)):
                self.gossip.changed(URGENT_SECONDS)

    def _send_progress(self, now: float) -> None:
        """Send Progress to all neighbours if it is due."""
        if not self.gossip.should_send(self.open_round.tokens, now) or not self.neighbours:
            return
        anchor_round, chain_value = self.histories.anchor()
        progress = events.SendProgress(
            tuple(self.neighbours),
            self.current,
            self.open_round.tokens,
            tuple(sorted(self.contributed)),
            self.settled,
            self.in_step,
            anchor_round,
            chain_value,
            list_open_sets(self.history | self.rounds, anchor_round, self.current),
        )
        self._effects.append(progress)
