"""The rounds of one group, as one peer sees them: when to contribute, apply, correct and settle.

A round is the *set* of contributions made for it, at most one per peer (of two different ones by the same
peer the smaller id counts, so that everybody picks the same). Its life on a peer:

    current  --enough tokens, time up, or others went on-->  closed: own contribution made and announced
    closed   --expected contributions in, or deadline-->      applied: its step is in the live weights
    applied  --`window` later rounds applied-->               sealed: this peer makes nothing more for it
    sealed   --every live neighbour sealed the same set-->    settled: final

Between closed and settled a late contribution still enters and corrects. New contributions enter the group
only through peers that have not sealed the round, and a round settles where all neighbours have sealed and
name the same set: so no settled set can still grow, unless a neighbour was silent for `settle_seconds`
(docs/consistency.md). Contributions travel by announce and pull; whatever an announcement missed is found
by comparing the digests of sets that every Progress carries. A peer that is behind (newcomer, thawed) needs
nothing else to catch up: it adopts the settled sets of its neighbours, round by round.

No IO: `handle(event, now)` returns what the caller must do, in that order; `next_deadline()` says when to
come with a Tick. Times in seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarmnet.agreement import Agreement
from swarmnet.branches import START, Chain, SettledSet
from swarmnet.histories import Histories
from swarmnet.identifiers import PeerId
from swarmnet.manifest import Rounds
from swarmnet.offers import Offers
from swarmnet.pulls import Pulls
from swarmnet.round_events import (
    AddContribution,
    Announced,
    ApplyRound,
    AskIds,
    ChainArrived,
    ChainAsked,
    Committed,
    Contributed,
    ContributionArrived,
    Effect,
    Event,
    GiveBack,
    IdsAsked,
    Leave,
    MakeContribution,
    NeighbourJoined,
    NeighbourLeft,
    OpenSet,
    ProgressArrived,
    Reference,
    RemoveContribution,
    SendAnnounce,
    SendProgress,
    SettleRound,
    Tick,
)
from swarmnet.round_sets import PARTING_SECONDS, NeighbourView, RoundSet, kept_rounds

PROGRESS_SECONDS = 0.05
"""At most this often the own token count is told to the neighbours; a commit takes about as long."""
QUIET_PROGRESS_SECONDS = 1.0
"""Progress is repeated this often even when nothing changed: it is the anti-entropy."""
CONTRIBUTED_ROUNDS = 64
"""So far back a peer tells to which rounds it contributed."""


class GroupRounds:
    """The machine. `settled` is the last settled round (-1: none), `current` takes gradients."""

    def __init__(
        self, rules: Rounds, me: PeerId, settled: int, now: float, chain_value: bytes = START,
        offers: Offers | None = None,
    ) -> None:  # fmt: skip
        """Goes on after round `settled`, up to which the chain of settled sets has `chain_value`, with what
        this peer had offered before."""
        self.rules = rules
        self.me = me
        self.neighbours: dict[PeerId, NeighbourView] = {}
        self.histories = Histories(rules, Chain(settled, chain_value), self.neighbours, now)
        self.applied = settled
        self.current = settled + 1
        self.tokens = 0
        self.opened_at = now
        self.contributed: set[int] = set()
        self.pending: set[int] = set()
        """Rounds for which MakeContribution was returned and Contributed has not come back."""
        self.rounds: dict[int, RoundSet] = {}
        """Not settled; with `history`, the last settled ones, there is one dict per state of a round."""
        self.history: dict[int, RoundSet] = {}
        self.parted: dict[PeerId, float] = {}
        """Lost allies, and until when they hold up settling unless they are heard again."""
        self.pulls = Pulls()
        self.offers = offers or Offers(rules)
        self.dropped_late = 0
        """Contributions that came, or were made here, after their round had settled or been sealed."""
        self._left_at = float("inf")
        self._progress_at, self._progress_dirty = now, True
        self._effects: list[Effect] = []

    @property
    def chain(self) -> Chain:
        """The settled sets."""
        return self.histories.chain

    @property
    def settled(self) -> int:
        """The last settled round; -1: none."""
        return self.chain.round

    @property
    def in_step(self) -> bool:
        """Whether what the neighbours of our history have settled is applied here. One may claim what it
        likes: only half of the group or more can say that this peer is behind."""
        return not self._agreement().is_half(view.settled > self.applied for view in self._allies().values())

    def _allies(self) -> dict[PeerId, NeighbourView]:
        return self.histories.allies()

    def _agreement(self) -> Agreement:
        return Agreement(self.rules, self._allies())

    # -- in and out -----------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take an event; return what must be done, in order."""
        self._effects = []
        match event:
            case Committed(tokens):
                self.tokens += tokens
                self._progress_dirty = True
            case Contributed(round, reference):
                self._contributed(round, reference)
            case ProgressArrived():
                self._progress(event, now)
            case ChainArrived(peer, first, before, sets):
                self._effects += self.histories.chain_arrived(peer, first, before, sets, now)
            case ChainAsked(peer, last):
                self._effects += self.histories.tell_chain(peer, last)
            case Announced(peer, references, complete):
                self._announced(peer, references, complete, now)
            case ContributionArrived(peer, reference):
                self._arrived(peer, reference, now)
            case IdsAsked(peer, rounds):
                self._tell_ids(peer, rounds)
            case NeighbourJoined(peer):
                if peer not in self.neighbours:  # Nothing settles against those who were not heard yet.
                    self.neighbours[peer] = NeighbourView()
                    self.parted[peer] = now + self.rules.settle_seconds
                self._progress_at = now - QUIET_PROGRESS_SECONDS
            case NeighbourLeft(peer):
                view = self.neighbours.pop(peer, None)
                if view is not None and view.relation == "same":
                    self.parted[peer] = now + PARTING_SECONDS
                self.pulls.left(peer, now)
            case Leave():
                if self.tokens:
                    self._close(now)
            case Tick():
                pass
        self._advance(now)
        return self._effects

    def next_deadline(self) -> float:
        """When to call `handle` with Tick if nothing else happens."""
        times = [self._progress_due(), self.pulls.next_deadline(), self.offers.next_deadline()]
        if self._tokens_of_group() and self._may_close():
            times.append(self.opened_at + self.rules.longest_seconds)
        for number in (self.applied + 1, self.settled + 1):
            state = self.rounds.get(number)
            if state is not None and number not in self.pending:
                times.append(self._agreement().patience_ends(number, state, number <= self.applied))
        times += self.parted.values()
        times += [view.next_deadline() for view in self.neighbours.values()]
        return min(times)

    def handed_over(self) -> bool:
        """Whether the own contributions that are not settled are in a set that some neighbour names too."""
        mine = [number for number, state in self.rounds.items() if self.me in state.held]
        return not self.pending and all(
            not self.neighbours
            or any(
                number in view.sets and view.sets[number].digest == self.rounds[number].digest
                for view in self.neighbours.values()
            )
            for number in mine
        )

    def takes(self, reference: Reference) -> bool:
        """Whether this contribution would enter a set now: of an open round that is not far ahead, and
        with a smaller id than the one of the same maker that is held."""
        return self.settled < reference.round <= self.current + self.rules.window and self._counts(reference)

    # -- events ---------------------------------------------------------------------------------------

    def _contributed(self, round: int, reference: Reference | None) -> None:
        """The own contribution is ready. A round sealed meanwhile takes none: it would split the sets."""
        self.pending.discard(round)
        self._progress_dirty = True
        if reference is None or self._is_sealed(round):
            self.contributed.discard(round)
            if reference is not None:
                self.dropped_late += 1
                self._effects.append(GiveBack(round, reference.id))
            return
        self.offers.made(round, reference.id)
        self._hold(reference)
        self._effects.append(SendAnnounce(tuple(self.neighbours), (reference,)))

    def _progress(self, event: ProgressArrived, now: float) -> None:
        neighbour = self.neighbours.get(event.peer)
        if neighbour is None:
            return
        news = event.settled > max(neighbour.settled, self.settled)
        self._effects += self.histories.progress(event, now)
        if neighbour.relation == "same":
            self.parted.pop(event.peer, None)
            self.offers.agree(event.peer, min(self.settled, event.settled))
            self._progress_dirty |= news
            self._follow(now)
            neighbour.compare(self.rounds, now)

    def _announced(
        self, peer: PeerId, references: tuple[Reference, ...], complete: tuple[int, ...], now: float
    ) -> None:
        if peer not in self._allies():
            return
        missing = [reference for reference in references if self.takes(reference)]
        self._effects += self.pulls.offered(peer, missing, now)
        self.offers.told(complete, references)
        for number in complete:
            state = self.rounds.get(number)
            if state is None:
                continue
            settled = {reference.peer for reference in references if reference.round == number}
            for maker in [maker for maker in state.held if maker not in settled]:
                del state.held[maker]
                state.update_digest()
                self.dropped_late += 1
                self._effects.append(RemoveContribution(number, maker))

    def _arrived(self, peer: PeerId, reference: Reference, now: float) -> None:
        """A contribution, verified and checked by the caller. From anybody, asked for or not."""
        self.pulls.arrived(reference.id)
        if reference.round <= self.settled:
            self.dropped_late += 1
            return
        if reference.round > self.current + self.rules.window or not self._counts(reference):
            return
        self._hold(reference)
        others = tuple(
            other
            for other, neighbour in self._allies().items()
            if other not in (peer, reference.peer) and neighbour.settled < reference.round
        )
        if others:
            self._effects.append(SendAnnounce(others, (reference,)))

    def _tell_ids(self, peer: PeerId, rounds: Iterable[int]) -> None:
        references, complete = self.offers.answer(rounds, self.rounds, self.settled)
        if references or complete:
            self._effects.append(SendAnnounce((peer,), references, complete))

    # -- what follows from the state ------------------------------------------------------------------

    def _counts(self, reference: Reference) -> bool:
        """Whether this contribution is news: none of this peer is held, or one with a larger id."""
        state = self.rounds.get(reference.round)
        held = state.held.get(reference.peer) if state else None
        return held is None or reference.id < held.id

    def _hold(self, reference: Reference) -> None:
        state = self.rounds.setdefault(reference.round, RoundSet())
        if reference.peer in state.held:
            self._effects.append(RemoveContribution(reference.round, reference.peer))
        state.held[reference.peer] = reference
        state.update_digest()
        self._effects.append(AddContribution(reference))
        self._progress_dirty = True

    def _is_sealed(self, number: int) -> bool:
        """Whether nothing new may be made for a round: sealed or settled here or at a neighbour."""
        state = self.rounds.get(number)
        if number <= self.settled or (state is not None and state.sealed):
            return True
        return any(
            view.settled >= number or (number in view.sets and view.sets[number].sealed)
            for view in self._allies().values()
        )

    def _follow(self, now: float) -> None:
        """Close rounds that half of the group has left, or somebody if half of the tokens are there or some
        time ago: one peer must not drive the others through empty rounds, nor leave the idle behind."""
        rounds = [view.round for view in self._allies().values()]
        while self.current < self.settled + 1 + kept_rounds(self.rules):
            left = [round > self.current for round in rounds]
            self._left_at = min(self._left_at, now) if any(left) else float("inf")
            enough = 2 * self._tokens_of_group() >= self.rules.target_tokens
            late = now >= self._left_at + self.rules.deadline_seconds
            if not (self._agreement().is_half(left) or (any(left) and (enough or late))):
                return
            self._close(now)

    def _close(self, now: float) -> None:
        number = self.current
        self.rounds.setdefault(number, RoundSet()).closed_at = now
        self.current, self.opened_at, self._left_at = number + 1, now, float("inf")
        if self.tokens and not self._is_sealed(number):
            self.contributed.add(number)
            self.pending.add(number)
            self._effects.append(MakeContribution(number, self.tokens))
            self.tokens = 0  # What is too late for this round stays, and counts in the next one.
        self.contributed = {recent for recent in self.contributed if recent > number - CONTRIBUTED_ROUNDS}
        for neighbour in self.neighbours.values():
            if neighbour.round < self.current:
                neighbour.tokens = 0
        self._progress_at = now - QUIET_PROGRESS_SECONDS

    def _advance(self, now: float) -> None:
        if self._full(now):
            self._close(now)
        while self._may_apply(self.applied + 1, now):
            self.applied += 1
            state = self.rounds[self.applied]
            self._effects.append(ApplyRound(self.applied, tuple(state.held), now - state.closed_at))
            old = self.rounds.get(self.applied - self.rules.window)
            if old is not None and not old.sealed:
                old.sealed, old.sealed_at = True, now
            self._progress_dirty = True
        self.parted = {peer: until for peer, until in self.parted.items() if until > now}
        while self._may_settle(self.settled + 1, now):
            self._settle(self.settled + 1)
        self._effects += self.offers.decide(self.settled, tuple(self._allies()), now)
        self._effects += self.pulls.again(now)
        self._effects += [
            AskIds(peer, due) for peer, view in self.neighbours.items() if (due := view.due(now))
        ]
        self._tell_progress(now)

    def _settle(self, number: int) -> None:
        state = self.history[number] = self.rounds.pop(number)
        self.chain.append(SettledSet(len(state.held), state.digest))
        state.sealed = True
        self.history.pop(number - kept_rounds(self.rules), None)
        self.pulls.forget_until(number)
        references = tuple(reference for _, reference in sorted(state.held.items()))
        self.offers.settled(number, references)
        self._effects.append(SettleRound(number, references, self.chain.value))
        self._progress_dirty = True

    def _tokens_of_group(self) -> int:
        return self.tokens + sum(view.tokens_for(self.current) for view in self._allies().values())

    def _may_close(self) -> bool:
        return self.in_step and self.current <= self.settled + kept_rounds(self.rules)

    def _full(self, now: float) -> bool:
        """Whether the group has the round's tokens, or its time is up."""
        tokens = self._tokens_of_group()
        if not tokens or not self._may_close():
            return False
        return tokens >= self.rules.target_tokens or now >= self.opened_at + self.rules.longest_seconds

    def _may_apply(self, number: int, now: float) -> bool:
        state = self.rounds.get(number)
        if state is None or number >= self.current or number in self.pending:
            return False
        return self._agreement().may_apply(number, state, self.pulls.of_round(number), now)

    def _may_settle(self, number: int, now: float) -> bool:
        state = self.rounds.get(number)
        if state is None or number > self.applied or number in self.pending:
            return False
        pulling = self.pulls.of_round(number) or any(until > now for until in self.parted.values())
        return self._agreement().may_settle(number, state, pulling, now)

    def _progress_due(self) -> float:
        return self._progress_at + (PROGRESS_SECONDS if self._progress_dirty else QUIET_PROGRESS_SECONDS)

    def _tell_progress(self, now: float) -> None:
        if now < self._progress_due():
            return
        self._progress_at, self._progress_dirty = now, False
        if not self.neighbours:
            return
        anchor, value = self.histories.anchor()
        sets = tuple(
            OpenSet(number, state.sealed, len(state.held), state.digest)
            for rounds in (self.history, self.rounds)
            for number, state in rounds.items()
            if anchor < number < self.current
        )
        self._effects.append(
            SendProgress(
                tuple(self.neighbours), self.current, self.tokens, tuple(sorted(self.contributed)),
                self.settled, self.in_step, anchor, value, sets,
            )
        )  # fmt: skip
