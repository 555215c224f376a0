"""Tracks which neighbours are on this peer's branch and which are ahead, and decides which branch of a fork
wins.

Neighbours report in messages called Progress which sets they have settled, and a *chain value* for the round
after which the list begins (their *anchor*). *Same-branch peers* are the neighbours whose chain agrees with
this peer's. During a long fork, peers also sign their chain values, so that no peer can support both sides.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from swarmnet.identifiers import PeerId
from swarmnet.lineage import era_of
from swarmnet.membership.membership import SILENT_SECONDS
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
    must_give_up_branch,
)
from swarmnet.run.schema import Rounds

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
    """What one neighbour has signed. `ours` is the newest round with a signed value of this peer's branch,
    and `others` the newest one with a value of another branch; -1 if there is none."""

    def __init__(self) -> None:
        self._ahead: dict[int, set[bytes]] = {}
        """Round that has not settled here -> the values that were signed for it."""
        self.ours = -1
        self.others = self.ours

    def take(self, round: int, value: bytes, chain: Chain) -> None:
        """Record a signed chain value after `round`. `chain` is this peer's own, which shows the branch.

        A value for one of the next `MAX_AHEAD` rounds is kept until that round settles here. Values for other
        rounds that this peer does not know are ignored."""
        if chain.round < round <= chain.round + MAX_AHEAD:
            values = self._ahead.setdefault(round, set())
            if len(values) < 2:  # One of two belongs to another branch in any case.
                values.add(value)
        elif chain.at(round) == value:
            self.ours = max(self.ours, round)
        elif chain.at(round) is not None:
            self.others = max(self.others, round)

    def settled(self, chain: Chain) -> None:
        """Record, now that a round has settled here, the values that were signed for it before."""
        for value in self._ahead.pop(chain.round, set()):
            self.take(chain.round, value, chain)


class SuspensionFollower:
    """Decides how long a peer that was suspended *follows*: it adopts the sets of peers that continued
    meanwhile, and settles none on its own. It follows until the time `until`."""

    def __init__(self, rules: Rounds) -> None:
        self._rules = rules
        self.until = float("-inf")
        self._last_extending_round = -1
        """Adopting a set of a later round does not extend the time: other peers kept sets up to this one."""

    def begin(self, seconds: float, settled: int, now: float) -> bool:
        """Begin to follow after a suspension of `seconds`. `settled`: the last round that is settled here.
        Returns False if the suspension was too short for other peers to settle a round without this one."""
        if seconds < min(self._rules.finality_timeout_seconds, SILENT_SECONDS + DEPARTURE_GRACE_SECONDS):
            return False
        self.until = now + self._rules.finality_timeout_seconds
        self._last_extending_round = settled + kept_rounds(self._rules)
        return True

    def took_up(self, round: int, now: float) -> None:
        """Extend the time after `round` settled here while following: there may be more to adopt."""
        if now < self.until and round <= self._last_extending_round:
            self.until = now + self._rules.finality_timeout_seconds


class ForkChoice:
    """The chain of this peer, and the relation of each neighbour's chain to it. `neighbours` holds the
    caller's views, which this class fills in from Progress."""

    def __init__(
        self, *, rules: Rounds, chain: Chain, neighbours: dict[PeerId, NeighbourView], now: float
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
        """The same as `FinalityRules.follows`: True for a while after this peer was suspended."""
        self.suspension = SuspensionFollower(rules)
        self.awaited: dict[PeerId, float] = {}
        """Neighbours that are new or were lost, and until when each delays settling unless it is heard."""
        self._signed: dict[PeerId, Signed] = {}
        self._last_signed = -1
        """The round up to which this peer has signed."""

    def joined(self, peer: PeerId, now: float) -> None:
        """Add a neighbour unless it is one already. Settling waits until it is heard."""
        if peer not in self.neighbours:
            self.neighbours[peer] = NeighbourView(linked_at=now)
            self.awaited[peer] = now + self.rules.finality_timeout_seconds

    def left(self, peer: PeerId, released: bool, now: float) -> None:
        """Remove a neighbour that left. Unless it was `released`, settling waits a moment for its return."""
        self.same_branch_peers.pop(peer, None)
        self._signed.pop(peer, None)
        view = self.neighbours.pop(peer, None)
        if view is not None and view.relation == "same" and not released:
            self.awaited[peer] = now + DEPARTURE_GRACE_SECONDS

    def forget_awaited(self, now: float) -> None:
        """Forget the neighbours for which settling need not wait any longer."""
        self.awaited = {peer: until for peer, until in self.awaited.items() if until > now}

    def settle(self, mine: SettledSet) -> None:
        """Settle the next round with the set `mine`.

        Same-branch peers that have settled another set for it become peers of another branch at once.
        Otherwise a peer that is catching up could mix the sets of both branches."""
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
                # A peer far ahead may have forked in an older round. Its older sets are then requested.
                forked_here = view.links.get(number - 1) == self.chain.at(number - 1)
                view.relation = "forked"
                view.fork = Fork(number, mine, theirs) if forked_here else None
                view.compare_anew()
                del self.same_branch_peers[peer]

    def progress(self, event: ProgressArrived, now: float) -> list[Effect]:
        """Update a neighbour's view from its Progress. Returns what to request or sign because of a fork. If
        this peer is too far behind to catch up by sets, returns the effect of fetching the group's state. A
        neighbour of another era does not count: only orders decide between eras (swarmnet/lineage.py)."""
        view = self.neighbours[event.peer]
        if era_of(event.anchor) != era_of(self.chain.value):
            self.awaited.pop(event.peer, None)
            return []
        if event.round != view.round:
            began_next = event.round == view.round + 1
            view.tokens_before = view.tokens if began_next else 0
        view.round, view.tokens = event.round, event.tokens
        view.contributed, view.in_step = event.contributed, event.in_step
        view.settled = event.settled
        view.sets = {entry.round: entry for entry in event.sets}
        view.relate(self.chain, event.anchor_round, event.anchor)
        if view.relation == "same":
            self.same_branch_peers[event.peer] = view
            self.awaited.pop(event.peer, None)
        else:
            self.same_branch_peers.pop(event.peer, None)
        # Both times begin when their condition becomes true, and are infinite while it is false.
        view.forked_since = min(view.forked_since, now) if view.relation == "forked" else float("inf")
        lists_next_round = event.anchor_round <= self.chain.round
        view.out_of_reach_since = float("inf") if lists_next_round else min(view.out_of_reach_since, now)
        if self._lacks_sets_for_us(view, now):
            effects = self._fetch_if_far_behind(view.settled, now)
            if effects:
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
        """Handle a message about chains. Older sets of a neighbour are compared with this peer's, to find
        where their branches fork; a request for sets is answered; a signed chain value is recorded."""
        match event:
            case ChainArrived(peer, first, before, sets):
                return self.chain_arrived(peer, first, before, sets, now)
            case ChainAsked(peer, last):
                return self.answer_chain_request(peer, last)
            case ChainSigned(peer, round, value):  # Direct or relayed.
                if peer in self.neighbours:
                    self._signed.setdefault(peer, Signed()).take(round, value, self.chain)
                return []

    def chain_arrived(
        self, peer: PeerId, first: int, before: bytes, sets: tuple[SettledSet, ...], now: float
    ) -> list[Effect]:
        """Handle a neighbour's sets of the rounds from `first` on; `before` is its chain value before them.

        They were requested because the fork lies before the sets in its Progress, or because this peer does
        not know these rounds. If they show where the neighbour's branch forks, returns what to do about the
        fork (`_fork`)."""
        self.chain.learn(first, before, sets)
        view = self.neighbours.get(peer)
        if view is None or view.relation != "forked" or first < 0:
            return []
        start = max(first, self.chain.base + 1)  # The first round whose sets both peers know.
        view.fork = first_difference(self.chain, start, sets[start - first :])
        my_value, their_value = self.chain.at(start - 1), before
        for entry in sets[: start - first]:
            their_value = link(their_value, entry)  # The neighbour's chain value one round further.
        if my_value is not None and my_value != their_value:
            # The fork lies before the rounds that both know: use the chain values there in place of sets.
            view.fork = Fork(start, SettledSet(0, my_value), SettledSet(0, their_value), exact=False)
        return self._fork(peer, view, now) if view.fork is not None else []

    def answer_chain_request(self, peer: PeerId, last: int) -> list[Effect]:
        """Return the response to a request for this peer's settled sets up to round `last`: the newest
        `KEPT_LINKS` of them that are known. Empty if none of them is known."""
        last = min(last, self.chain.round)
        first = max(self.chain.base + 1, last + 1 - KEPT_LINKS)
        before = self.chain.at(first - 1)
        if before is None or last < first:
            return []
        return [SendChain(peer, first, before, tuple(self.chain.part(first, last)))]

    def anchor(self) -> tuple[int, bytes]:
        """Return the round after which this peer's Progress lists its sets, and the chain value there. The
        list then includes what the slowest neighbour needs next, unless that is no longer kept."""
        slowest = min((view.settled for view in self.neighbours.values()), default=self.chain.round)
        oldest = max(self.chain.start, self.chain.base, self.chain.round - kept_rounds(self.rules))
        anchor = max(oldest, min(self.chain.round, slowest))
        return anchor, self.chain.at(anchor) or START

    def _lacks_sets_for_us(self, view: NeighbourView, now: float) -> bool:
        """Return whether the neighbour no longer has the sets that this peer needs next. It has forgotten
        them, or it restarted from its disk without them. Its Progress may also omit them for a moment, before
        it knows how far this peer is. Omission counts only after `OUT_OF_REACH_SECONDS`."""
        has_forgotten = view.settled - kept_rounds(self.rules) > self.chain.round
        return has_forgotten or now >= view.out_of_reach_since + OUT_OF_REACH_SECONDS

    def all_reported(self, now: float) -> bool:
        """Return whether each neighbour has sent Progress, or was linked for `LISTEN_SECONDS` without it.
        Newcomers send none until they have the weights, and other peers may never do so."""
        return all(
            view.round >= 0 or now >= view.linked_at + LISTEN_SECONDS for view in self.neighbours.values()
        )

    def _is_weighed(self, view: NeighbourView, now: float) -> bool:
        """Return whether a neighbour counts when branches are compared. Newcomers send no Progress until they
        have the weights, and they wait for the fork to end before they fetch them."""
        return view.round >= 0 or now < view.linked_at + LISTEN_SECONDS

    def _fetch_if_far_behind(self, settled: int, now: float) -> list[Effect]:
        """Return the effect of fetching the group's state, or none. At least half of the peers in sight must
        be so far ahead that they no longer have the sets that this peer needs next. One is enough while this
        peer `follows`. `settled`: the newest settled round of such a neighbour, for the reason."""
        ahead = [peer for peer, view in self.neighbours.items() if self._lacks_sets_for_us(view, now)]
        in_sight = 1 + sum(self._is_weighed(view, now) for view in self.neighbours.values())
        if 2 * len(ahead) < in_sight and not self.follows:
            return []
        reason = f"{len(ahead)} neighbours are at round {settled}, this peer at {self.chain.round}"
        return [FetchGroupState(tuple(ahead), reason)]

    def _fork(self, peer: PeerId, view: NeighbourView, now: float) -> list[Effect]:
        """Decide between this branch and the one of `peer`. Returns a request for its older sets if the
        fork's first round is unknown. Returns the effect of fetching the state of that branch if it wins: it
        has the majority, is ahead, or has the larger set (history.py). Returns none if this branch wins, or
        if it is too early to decide. After a long fork, only peers that signed one branch count."""
        fork = view.fork
        if fork is None:
            return [RequestChain(peer, min(self.chain.round, view.settled))]
        has_unknown = any(their.relation == "unknown" for their in self.neighbours.values())
        if has_unknown and now < self.listens_until:
            return []  # A peer that has just switched to this branch must hear the others on it first.
        others = {  # The neighbours on the other branch, and where each one's branch forks.
            other: their.fork
            for other, their in self.neighbours.items()
            if their.relation == "forked" and (their.fork == fork or their.is_with(view, fork.round))
        }
        # The views of some of them may show the fork's first round exactly.
        fork = next((known for known in others.values() if known is not None and known.exact), fork)
        # A peer that has not reached the fork is on neither side: both sides would count it.
        reached_fork = sum(their.settled >= fork.round for their in self.same_branch_peers.values())
        undecided = len(self.same_branch_peers) - reached_fork
        forked = sum(their.relation == "forked" for their in self.neighbours.values())
        ours, theirs = 1 + reached_fork, len(others)
        in_sight = ours + forked
        has_majority = 2 * max(ours, theirs) > in_sight + undecided
        if undecided and not has_majority and now < view.forked_since + LISTEN_SECONDS:
            return []  # The undecided may still settle on either branch, and that side may know it first.
        if now >= view.forked_since + SIGNED_SECONDS:
            ours, theirs = self._count_signers(fork.round)
            signers = [other for other in others if self._signed_side(other, fork.round) == "theirs"]
            others = {other: others[other] for other in signers}
        if view.settled < self.chain.start:
            # This peer started from a state that is ahead of that neighbour: only a majority makes it switch.
            if not is_majority(theirs, in_sight, self.all_in_sight):
                return []
        elif not must_give_up_branch(
            fork, self.chain.round, view.settled, ours, theirs, in_sight, self.all_in_sight
        ):
            return []
        if not others:
            return []
        reason = f"{len(others)} neighbours have another branch since round {fork.round}, and it wins"
        return [FetchGroupState(tuple(others), reason, fork.round, fork.exact)]

    def _sign(self, view: NeighbourView, now: float) -> list[Effect]:
        """Return the effect of signing this peer's newest chain value. It is signed once for each round that
        settles, from `SIGNING_SECONDS` after the fork was noticed."""
        if now < view.forked_since + SIGNING_SECONDS or self._last_signed == self.chain.round:
            return []
        self._last_signed = self.chain.round
        return [SignChain(tuple(peer for peer, of in self.neighbours.items() if of.relation == "forked"))]

    def _signed_side(self, peer: PeerId, fork_round: int) -> Literal["ours", "theirs", "neither"]:
        """Return the side of a fork that a neighbour has signed; "neither" if it has signed both or none.

        Its Progress does not matter. A peer could report to each side that side's chain, and neither side
        would then give up its branch."""
        signed = self._signed.get(peer, Signed())
        is_ours, is_theirs = signed.ours >= fork_round, signed.others >= fork_round
        if is_ours == is_theirs:
            return "neither"
        return "ours" if is_ours else "theirs"

    def _count_signers(self, fork_round: int) -> tuple[int, int]:
        """Return how many peers signed only this branch, this peer included, and how many only another."""
        sides = Counter(self._signed_side(peer, fork_round) for peer in self.neighbours)
        return 1 + sides["ours"], sides["theirs"]
