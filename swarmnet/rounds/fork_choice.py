"""Tracks which neighbours are on this peer's branch and which are ahead, and decides which branch of a fork
wins.

Part of `GroupRounds`, which shares open rounds only with *allies*: neighbours on the same branch.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from swarmnet.identifiers import PeerId
from swarmnet.membership.machine import SILENT_SECONDS
from swarmnet.rounds.contribution_sets import DEPARTURE_GRACE_SECONDS, NeighbourView, kept_rounds
from swarmnet.rounds.events import (
    ChainArrived,
    ChainAsked,
    ChainSigned,
    Effect,
    FetchGroupState,
    ProgressArrived,
    RequestChain,
    SendChain,
    SignChain,
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
"""How long a peer that has switched branches waits to hear all its neighbours before it may switch again:
three times the longest normal silence."""
OUT_OF_REACH_SECONDS = 2.0
"""A neighbour that knows this peer sends the sets from this peer's round on. It hears of this peer at least
once a second, so after this time it does not have them."""


SIGNING_SECONDS = 5.0
"""Peers sign which branch they are on when branches have been apart for this long. Honest peers are one again
within three seconds of hearing each other, or fetch the state, and sign nothing meanwhile."""
SIGNED_SECONDS = 2 * SIGNING_SECONDS
"""After this long a peer that has signed no branch, or two, counts for neither
(docs/decisions/0038-signed-histories.md)."""
MAX_AHEAD = 8
"""Signed chain values are kept for this many rounds after this peer's newest."""


class Signed:
    """The newest rounds for which a peer has signed this peer's branch, and another branch."""

    def __init__(self) -> None:
        self._ahead: dict[int, set[bytes]] = {}
        self.ours = self.others = -1

    def take(self, round: int, value: bytes, chain: Chain) -> None:
        """Record a signed chain value after `round`. `chain`: the one of this peer."""
        if chain.round < round <= chain.round + MAX_AHEAD:
            values = self._ahead.setdefault(round, set())
            if len(values) < 2:  # One of two belongs to another branch in any case.
                values.add(value)
        elif chain.at(round) == value:
            self.ours = max(self.ours, round)
        elif chain.at(round) is not None:
            self.others = max(self.others, round)

    def settled(self, chain: Chain) -> None:
        """Judge the values that were signed for the round that has just settled here."""
        for value in self._ahead.pop(chain.round, set()):
            self.take(chain.round, value, chain)


class Following:
    """Decides how long a peer that was suspended follows the peers that continued meanwhile."""

    def __init__(self, rules: Rounds) -> None:
        self._rules = rules
        self.until = float("-inf")
        self._last = -1
        """Adopting a set of a later round does not extend the time, because other peers keep no more sets."""

    def begin(self, seconds: float, settled: int, now: float) -> bool:
        """Begin to follow. Returns False if the suspension was too short for others to settle without it."""
        if seconds < min(self._rules.finality_timeout_seconds, SILENT_SECONDS + DEPARTURE_GRACE_SECONDS):
            return False
        self.until, self._last = (
            now + self._rules.finality_timeout_seconds,
            settled + kept_rounds(self._rules),
        )
        return True

    def took_up(self, round: int, now: float) -> None:
        """Extend the time after a set was adopted from other peers, as there may be more."""
        if now < self.until and round <= self._last:
            self.until = now + self._rules.finality_timeout_seconds


class ForkChoice:
    """The chain of this peer, and the relation of each neighbour's chain to it. `neighbours` holds the
    caller's views, which this class fills in from Progress."""

    def __init__(
        self, rules: Rounds, chain: Chain, neighbours: dict[PeerId, NeighbourView], now: float
    ) -> None:
        self.listens_until = now + LISTEN_SECONDS
        self.rules = rules
        self.chain = chain
        self.neighbours = neighbours
        self.same_branch_peers: dict[PeerId, NeighbourView] = {}
        """The neighbours on the same branch."""
        self.all_in_sight = True
        """True if the whole group is linked to this peer."""
        self.follows = False
        """The same as `Agreement.follows`."""
        self._signed: dict[PeerId, Signed] = {}
        self._last_signed = -1
        """The round up to which this peer has signed."""

    def left(self, peer: PeerId) -> NeighbourView | None:
        """Remove a neighbour that left. Returns its view, if there was one."""
        self.same_branch_peers.pop(peer, None)
        self._signed.pop(peer, None)
        return self.neighbours.pop(peer, None)

    def settle(self, mine: SettledSet) -> None:
        """Settle the next round with the set `mine`.

        Allies that have settled another set for it are now on another branch. Otherwise a peer that is
        catching up could mix the sets of both."""
        self.chain.append(mine)
        number = self.chain.round
        for signed in self._signed.values():
            signed.settled(self.chain)
        for peer, view in list(self.same_branch_peers.items()):
            entry = view.sets.get(number)
            if entry is None or view.settled < number:
                continue
            theirs = SettledSet(entry.count, entry.digest)
            if theirs != mine:
                # A peer far ahead may have forked long before this set: its older sets are requested.
                parted_here = view.links.get(number - 1) == self.chain.at(number - 1)
                view.relation, view.fork = "forked", Fork(number, mine, theirs) if parted_here else None
                view.compare_anew()
                del self.same_branch_peers[peer]

    def progress(self, event: ProgressArrived, now: float) -> list[Effect]:
        """Update a neighbour's view from its Progress. Returns what to request, sign or fetch at a fork."""
        view = self.neighbours[event.peer]
        if event.round != view.round:
            view.tokens_before = view.tokens if event.round == view.round + 1 else 0
        view.round, view.tokens = event.round, event.tokens
        view.contributed, view.in_step = event.contributed, event.in_step
        view.settled = event.settled
        view.sets = {entry.round: entry for entry in event.sets}
        view.relate(self.chain, event.anchor_round, event.anchor)
        if view.relation == "same":
            self.same_branch_peers[event.peer] = view
        else:
            self.same_branch_peers.pop(event.peer, None)
        view.forked_since = min(view.forked_since, now) if view.relation == "forked" else float("inf")
        reached = event.anchor_round <= self.chain.round
        view.out_of_reach_since = float("inf") if reached else min(view.out_of_reach_since, now)
        if self._out_of_reach(view, now) and (effects := self._far_behind(view.settled, now)):
            return effects
        if view.relation == "forked":
            view.compare_anew()
            return [*self._sign(view, now), *self._fork(event.peer, view, now)]
        return []

    def fork_from(self, settled: int, value: bytes) -> Fork | None:
        """Return the fork from the branch whose chain value after round `settled` is `value`. Returns None if
        no neighbour is known to be on that branch, or if its first different round is not known."""
        on_branch = (view for view in self.neighbours.values() if view.links.get(settled) == value)
        return next((view.fork for view in on_branch if view.fork is not None), None)

    def handle_chain_event(self, event: ChainArrived | ChainAsked | ChainSigned, now: float) -> list[Effect]:
        """Handle other messages about chains."""
        match event:
            case ChainArrived(peer, first, before, sets):
                return self.chain_arrived(peer, first, before, sets, now)
            case ChainAsked(peer, last):
                return self.tell_chain(peer, last)
            case ChainSigned(peer, round, value):  # Direct or relayed.
                if peer in self.neighbours:
                    self._signed.setdefault(peer, Signed()).take(round, value, self.chain)
                return []

    def chain_arrived(
        self, peer: PeerId, first: int, before: bytes, sets: tuple[SettledSet, ...], now: float
    ) -> list[Effect]:
        """Handle a neighbour's older sets. They were requested because the fork lies before its Progress, or
        because this peer does not know these rounds."""
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
            # The fork lies before the rounds that both know: use the chain values there in place of sets.
            view.fork = Fork(start, SettledSet(0, mine), SettledSet(0, theirs), exact=False)
        return self._fork(peer, view, now) if view.fork is not None else []

    def tell_chain(self, peer: PeerId, last: int) -> list[Effect]:
        """Return the response to a request for this peer's settled sets up to `last`, as many as are kept."""
        last = min(last, self.chain.round)
        first = max(self.chain.base + 1, last + 1 - KEPT_LINKS)
        before = self.chain.at(first - 1)
        if before is None or last < first:
            return []
        return [SendChain(peer, first, before, tuple(self.chain.part(first, last)))]

    def anchor(self) -> tuple[int, bytes]:
        """Return the round after which this peer's Progress lists its sets, and the chain value there. It is
        early enough for the slowest neighbour that can still catch up by sets."""
        slowest = min((view.settled for view in self.neighbours.values()), default=self.chain.round)
        oldest = max(self.chain.start, self.chain.base, self.chain.round - kept_rounds(self.rules))
        anchor = max(oldest, min(self.chain.round, slowest))
        return anchor, self.chain.at(anchor) or START

    def _out_of_reach(self, view: NeighbourView, now: float) -> bool:
        """Return whether this peer lacks sets that the neighbour does not have: it has forgotten them, or it
        restarted from its disk without them. For a moment it may only not know how far this peer is."""
        forgotten = view.settled - kept_rounds(self.rules) > self.chain.round
        return forgotten or now >= view.out_of_reach_since + OUT_OF_REACH_SECONDS

    def all_reported(self, now: float) -> bool:
        """Return whether all neighbours have sent Progress or had enough time to. Newcomers send none until
        they have the weights, and other peers may never do so."""
        return all(
            view.round >= 0 or now >= view.linked_at + LISTEN_SECONDS for view in self.neighbours.values()
        )

    def _is_weighed(self, view: NeighbourView, now: float) -> bool:
        """Return whether a neighbour counts when branches are compared. Newcomers send no Progress until they
        have the weights, and they wait for the fork to end before they fetch them."""
        return view.round >= 0 or now < view.linked_at + LISTEN_SECONDS

    def _far_behind(self, settled: int, now: float) -> list[Effect]:
        """Return the effect of fetching the state, because neighbours lack the sets that this peer needs. It
        takes half of the peers in sight to be so far ahead."""
        ahead = [peer for peer, view in self.neighbours.items() if self._out_of_reach(view, now)]
        weighed = sum(self._is_weighed(view, now) for view in self.neighbours.values())
        if 2 * len(ahead) < 1 + weighed and not self.follows:
            return []
        reason = f"{len(ahead)} neighbours are at round {settled}, this peer at {self.chain.round}"
        return [FetchGroupState(tuple(ahead), reason)]

    def _fork(self, peer: PeerId, view: NeighbourView, now: float) -> list[Effect]:
        """Resolve a fork: find its first round, and give up this branch if the rule of history.py says so."""
        fork = view.fork
        if fork is None:
            return [RequestChain(peer, min(self.chain.round, view.settled))]
        unheard = any(their.relation == "unknown" for their in self.neighbours.values())
        if unheard and now < self.listens_until:
            return []  # A peer that just switched here must hear its allies first.
        others = {
            other: their.fork
            for other, their in self.neighbours.items()
            if their.relation == "forked" and (their.fork == fork or their.is_with(view, fork.round))
        }
        fork = next((other for other in others.values() if other is not None and other.exact), fork)
        # A peer that has not reached the fork is on neither side: both sides would count it.
        mine = sum(their.settled >= fork.round for their in self.same_branch_peers.values())
        forked = sum(their.relation == "forked" for their in self.neighbours.values())
        in_sight, most = 1 + mine + forked, max(1 + mine, len(others))
        undecided = len(self.same_branch_peers) - mine
        if undecided and 2 * most <= in_sight + undecided and now < view.forked_since + LISTEN_SECONDS:
            return []  # They may join this branch, and the other side may know it before this peer.
        ours, theirs = 1 + mine, len(others)
        if now >= view.forked_since + SIGNED_SECONDS:
            ours, theirs = self._names_below(fork.round)
            others = {other: of for other, of in others.items() if self._side(other, fork.round) == "theirs"}
        if view.settled < self.chain.start:
            # That neighbour sees only that this peer is far ahead. It switches if half of its group is.
            if not is_majority(theirs, in_sight, self.all_in_sight):
                return []
        elif not theirs_stands(
            fork, self.chain.round, view.settled, ours, theirs, in_sight, self.all_in_sight
        ):
            return []
        if not others:
            return []
        reason = f"{len(others)} neighbours have another history since round {fork.round}, and it stands"
        return [FetchGroupState(tuple(others), reason, fork.round, fork.exact)]

    def _sign(self, view: NeighbourView, now: float) -> list[Effect]:
        """Sign this peer's chain value after each round that settles during a fork."""
        if now < view.forked_since + SIGNING_SECONDS or self._last_signed == self.chain.round:
            return []
        self._last_signed = self.chain.round
        return [SignChain(tuple(peer for peer, of in self.neighbours.items() if of.relation == "forked"))]

    def _side(self, peer: PeerId, fork_round: int) -> Literal["ours", "theirs", "neither"]:
        """Return the side of a fork that a neighbour has signed. Its Progress does not matter: a peer that
        reports each side its own chain would keep both from giving way."""
        signed = self._signed.get(peer, Signed())
        is_ours, is_theirs = signed.ours >= fork_round, signed.others >= fork_round
        if is_ours == is_theirs:
            return "neither"
        return "ours" if is_ours else "theirs"

    def _names_below(self, fork_round: int) -> tuple[int, int]:
        """Return how many peers signed only this branch, this peer included, and how many only another."""
        sides = Counter(self._side(peer, fork_round) for peer in self.neighbours)
        return 1 + sides["ours"], sides["theirs"]
