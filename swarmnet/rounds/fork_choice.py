"""A group's histories as one peer sees them: who shares its own, who is ahead, and which of two stands.

The machine is part of `GroupRounds`, which shares rounds only with allies: neighbours of the same history.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from swarmnet.identifiers import PeerId
from swarmnet.membership.machine import SILENT_SECONDS
from swarmnet.rounds.contribution_sets import PARTING_SECONDS, NeighbourView, kept_rounds
from swarmnet.rounds.events import (
    AskChain,
    ChainArrived,
    ChainAsked,
    Effect,
    HistorySigned,
    ProgressArrived,
    Resynchronise,
    SendChain,
    SignHistory,
)
from swarmnet.rounds.history import (
    KEPT_LINKS,
    START,
    Chain,
    Fork,
    SettledSet,
    first_difference,
    is_majority,
    link,
    theirs_stands,
)
from swarmnet.run.manifest import Rounds

LISTEN_SECONDS = 3.0
"""How long a peer that took up a history waits to hear all its neighbours before it gives it up again: three
times what they are silent for at most."""
OUT_OF_REACH_SECONDS = 2.0
"""A neighbour that knows of us tells sets from our round on; it hears of us at least once a second."""


SIGNING_SECONDS = 5.0
"""When histories have been apart for so long peers sign which one they are on. Honest ones are one again
within three seconds of hearing each other, or fetch the state, and say nothing meanwhile."""
SIGNED_SECONDS = 2 * SIGNING_SECONDS
"""... and who has signed none, or two, is on neither (docs/decisions/0038-signed-histories.md)."""
MOST_AHEAD = 8
"""Rounds after the own newest of which it is kept what others have signed."""


class Signed:
    """What a peer has put its name to: the newest round of this peer's history, and of any other."""

    def __init__(self) -> None:
        self._ahead: dict[int, set[bytes]] = {}
        self.ours = self.others = -1

    def take(self, round: int, value: bytes, chain: Chain) -> None:
        if chain.round < round <= chain.round + MOST_AHEAD:
            values = self._ahead.setdefault(round, set())
            if len(values) < 2:  # Of two one is of another history, whatever settles here.
                values.add(value)
        elif chain.at(round) == value:
            self.ours = max(self.ours, round)
        elif chain.at(round) is not None:
            self.others = max(self.others, round)

    def settled(self, chain: Chain) -> None:
        """A round of this peer's own."""
        for value in self._ahead.pop(chain.round, set()):
            self.take(chain.round, value, chain)


class Following:
    """How long a peer that stood still follows those who went on meanwhile."""

    def __init__(self, rules: Rounds) -> None:
        self._rules = rules
        self.until = float("-inf")
        self._last = -1
        """The round after which taking up another does not prolong it: others keep no more sets."""

    def begin(self, seconds: float, settled: int, now: float) -> bool:
        """Whether others may have settled without this peer, which was away for `seconds`."""
        if seconds < min(self._rules.settle_seconds, SILENT_SECONDS + PARTING_SECONDS):
            return False
        self.until, self._last = now + self._rules.settle_seconds, settled + kept_rounds(self._rules)
        return True

    def took_up(self, round: int, now: float) -> None:
        """Somebody else's set: there may be more of them."""
        if now < self.until and round <= self._last:
            self.until = now + self._rules.settle_seconds


class Histories:
    """`chain` is the own history, `neighbours` the caller's views, filled in here from Progress."""

    def __init__(
        self, rules: Rounds, chain: Chain, neighbours: dict[PeerId, NeighbourView], now: float
    ) -> None:
        self.listens_until = now + LISTEN_SECONDS
        self.rules = rules
        self.chain = chain
        self.neighbours = neighbours
        self.allies: dict[PeerId, NeighbourView] = {}
        """The neighbours whose history is ours."""
        self.all_in_sight = True
        """Whether the whole group is linked to this peer."""
        self.follows = False
        """As in Agreement."""
        self._signed: dict[PeerId, Signed] = {}
        self._last_signed = -1
        """The round up to which this peer has been asked to sign."""

    def left(self, peer: PeerId) -> NeighbourView | None:
        """A neighbour is gone: what was known of it."""
        self.allies.pop(peer, None)
        self._signed.pop(peer, None)
        return self.neighbours.pop(peer, None)

    def settle(self, mine: SettledSet) -> None:
        """The next round of ours. Allies that have settled another set for it are on another history: who
        catches up and may still take up either must not go on with the sets of both."""
        self.chain.append(mine)
        number = self.chain.round
        for signed in self._signed.values():
            signed.settled(self.chain)
        for peer, view in list(self.allies.items()):
            entry = view.sets.get(number)
            if entry is None or view.settled < number:
                continue
            theirs = SettledSet(entry.count, entry.digest)
            if theirs != mine:
                # Who was far ahead may have parted from us long before this set: it is asked.
                parted_here = view.links.get(number - 1) == self.chain.at(number - 1)
                view.relation, view.fork = "forked", Fork(number, mine, theirs) if parted_here else None
                view.compare_anew()
                del self.allies[peer]

    def progress(self, event: ProgressArrived, now: float) -> list[Effect]:
        """Take in a neighbour's Progress; ask or resynchronise where the histories differ."""
        view = self.neighbours[event.peer]
        if event.round != view.round:
            view.tokens_before = view.tokens if event.round == view.round + 1 else 0
        view.round, view.tokens = event.round, event.tokens
        view.contributed, view.in_step = event.contributed, event.in_step
        view.settled = event.settled
        view.sets = {entry.round: entry for entry in event.sets}
        view.relate(self.chain, event.anchor_round, event.anchor)
        if view.relation == "same":
            self.allies[event.peer] = view
        else:
            self.allies.pop(event.peer, None)
        view.forked_since = min(view.forked_since, now) if view.relation == "forked" else float("inf")
        reached = event.anchor_round <= self.chain.round
        view.out_of_reach_since = float("inf") if reached else min(view.out_of_reach_since, now)
        if self._out_of_reach(view, now) and (effects := self._far_behind(view.settled, now)):
            return effects
        if view.relation == "forked":
            view.compare_anew()
            return [*self._sign(view, now), *self._fork(event.peer, view, now)]
        return []

    def told(self, event: ChainArrived | ChainAsked | HistorySigned, now: float) -> list[Effect]:
        """What neighbours say or ask of histories besides Progress."""
        match event:
            case ChainArrived(peer, first, before, sets):
                return self.chain_arrived(peer, first, before, sets, now)
            case ChainAsked(peer, last):
                return self.tell_chain(peer, last)
            case HistorySigned(peer, round, value):  # By whichever way it came.
                if peer in self.neighbours:
                    self._signed.setdefault(peer, Signed()).take(round, value, self.chain)
                return []

    def chain_arrived(
        self, peer: PeerId, first: int, before: bytes, sets: tuple[SettledSet, ...], now: float
    ) -> list[Effect]:
        """The neighbour's older sets, asked for because the fork lies before what Progress tells, or because
        this peer does not know them."""
        self.chain.learn(first, before, sets)
        view = self.neighbours.get(peer)
        if view is None or view.relation != "forked" or first < 0:
            return []
        start = max(first, self.chain.base + 1)
        view.fork = first_difference(self.chain, start, sets[start - first :])
        mine, theirs = self.chain.at(start - 1), before
        for entry in sets[: start - first]:
            theirs = link(theirs, entry)
        if mine is not None and mine != theirs:
            # They parted before what both still know: the chains' values there stand for the sets.
            view.fork = Fork(start, SettledSet(0, mine), SettledSet(0, theirs), exact=False)
        return self._fork(peer, view, now) if view.fork is not None else []

    def tell_chain(self, peer: PeerId, last: int) -> list[Effect]:
        """Our settled sets up to `last`, as many as are kept."""
        last = min(last, self.chain.round)
        first = max(self.chain.base + 1, last + 1 - KEPT_LINKS)
        before = self.chain.at(first - 1)
        if before is None or last < first:
            return []
        return [SendChain(peer, first, before, tuple(self.chain.part(first, last)))]

    def anchor(self) -> tuple[int, bytes]:
        """After which round our Progress tells sets: early enough for the slowest neighbour that can still
        catch up by them."""
        slowest = min((view.settled for view in self.neighbours.values()), default=self.chain.round)
        oldest = max(self.chain.start, self.chain.base, self.chain.round - kept_rounds(self.rules))
        anchor = max(oldest, min(self.chain.round, slowest))
        return anchor, self.chain.at(anchor) or START

    def _out_of_reach(self, view: NeighbourView, now: float) -> bool:
        """Whether the neighbour has forgotten the sets that we lack, or, started again from its disk, never
        had them. For a moment it may only not know how far we are."""
        forgotten = view.settled - kept_rounds(self.rules) > self.chain.round
        return forgotten or now >= view.out_of_reach_since + OUT_OF_REACH_SECONDS

    def heard(self, now: float) -> bool:
        """Whether all neighbours have said where they stand. Those who have had time enough are not waited
        for: newcomers say nothing until they have the weights, and others never may."""
        return all(
            view.round >= 0 or now >= view.linked_at + LISTEN_SECONDS for view in self.neighbours.values()
        )

    def _has_history(self, view: NeighbourView, now: float) -> bool:
        """Whether a neighbour counts where histories are weighed. Newcomers tell nothing until they have the
        weights, for which they wait that these histories become one."""
        return view.round >= 0 or now < view.linked_at + LISTEN_SECONDS

    def _far_behind(self, settled: int, now: float) -> list[Effect]:
        """The sets that we lack are not there: fetch the state, unless hardly anybody is so far."""
        ahead = [peer for peer, view in self.neighbours.items() if self._out_of_reach(view, now)]
        weighed = sum(self._has_history(view, now) for view in self.neighbours.values())
        if 2 * len(ahead) < 1 + weighed and not self.follows:
            return []
        reason = f"{len(ahead)} neighbours are at round {settled}, this peer at {self.chain.round}"
        return [Resynchronise(tuple(ahead), reason)]

    def _fork(self, peer: PeerId, view: NeighbourView, now: float) -> list[Effect]:
        """Two histories: find where they part, and give ours up if the rule says so."""
        fork = view.fork
        if fork is None:
            return [AskChain(peer, min(self.chain.round, view.settled))]
        unheard = any(their.relation == "unknown" for their in self.neighbours.values())
        if unheard and now < self.listens_until:
            return []  # Who just took up this history would give it up again before its allies are heard.
        others = {
            other: their.fork
            for other, their in self.neighbours.items()
            if their.relation == "forked" and (their.fork == fork or their.is_with(view, fork.round))
        }
        fork = next((other for other in others.values() if other is not None and other.exact), fork)
        # Who has not come as far as the fork is on neither side: both would count it as theirs.
        mine = sum(their.settled >= fork.round for their in self.allies.values())
        forked = sum(their.relation == "forked" for their in self.neighbours.values())
        in_sight, most = 1 + mine + forked, max(1 + mine, len(others))
        undecided = len(self.allies) - mine
        if undecided and 2 * most <= in_sight + undecided and now < view.forked_since + LISTEN_SECONDS:
            return []  # They may be on our side already, and the other side hears it before us.
        ours, theirs = 1 + mine, len(others)
        if now >= view.forked_since + SIGNED_SECONDS:
            ours, theirs = self._names_below(fork.round)
            others = {other: of for other, of in others.items() if self._side(other, fork.round) == "theirs"}
        if view.settled < self.chain.start:
            # It hears of no fork yet, only that this peer is far ahead, and comes if half of its group is.
            if not is_majority(theirs, in_sight, self.all_in_sight):
                return []
        elif not theirs_stands(
            fork, self.chain.round, view.settled, ours, theirs, in_sight, self.all_in_sight
        ):
            return []
        if not others:
            return []
        reason = f"{len(others)} neighbours have another history since round {fork.round}, and it stands"
        return [Resynchronise(tuple(others), reason, fork.round, fork.exact)]

    def _sign(self, view: NeighbourView, now: float) -> list[Effect]:
        """Again with each round that settles, as long as there are two histories."""
        if now < view.forked_since + SIGNING_SECONDS or self._last_signed == self.chain.round:
            return []
        self._last_signed = self.chain.round
        return [SignHistory(tuple(peer for peer, of in self.neighbours.items() if of.relation == "forked"))]

    def _side(self, peer: PeerId, fork_round: int) -> Literal["ours", "theirs", "neither"]:
        """By what it has put its name to, whatever it tells this peer: who tells each side that it is on
        theirs would keep both from giving way."""
        signed = self._signed.get(peer, Signed())
        is_ours, is_theirs = signed.ours >= fork_round, signed.others >= fork_round
        if is_ours == is_theirs:
            return "neither"
        return "ours" if is_ours else "theirs"

    def _names_below(self, fork_round: int) -> tuple[int, int]:
        """How many have signed the own history alone, this peer included, and how many another alone."""
        sides = Counter(self._side(peer, fork_round) for peer in self.neighbours)
        return 1 + sides["ours"], sides["theirs"]
