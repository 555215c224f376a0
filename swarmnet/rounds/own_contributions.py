"""Tracks each contribution of this peer until its outcome is known: it was settled, or its values return to
the momentum.

A contribution may miss its round's set: it came too late, or a smaller id of an earlier process of this peer
won. The branch that holds it may also be given up. Some rounds after its round has settled, this peer looks
whether the settled set includes it. If not, it is *returned*: its values are added to the momentum again,
once. A set that this peer has not settled itself is requested from *same-branch peers*, the neighbours whose
history of sets agrees with this peer's. If no peer remembers it, the contribution is returned.

With reducers (peers that sum one shard of all contributions each), sets consist of their sums, the *results*.
A *table* in each lists whose values it contains. A contribution may then be settled in some of its *parts*
(shards) only, and the values of the others are returned. A peer that fetches the state anew makes a new
`GroupRounds` and keeps this object.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.contribution_sets import RoundSet
from swarmnet.rounds.events import (
    Effect,
    FetchGroupState,
    Reference,
    RequestContributions,
    RequestIds,
    RestoreToMomentum,
    Sets,
)
from swarmnet.rounds.fork_choice import ForkChoice
from swarmnet.rounds.history import Chain, Earlier
from swarmnet.rounds.result_table import Draw, Table, counting, tag_of
from swarmnet.run.schema import Rounds

ASK_SECONDS = 1.0
"""Pause between two requests for the set of one round."""
MAX_ASKS = 30
"""Requests for a set before it counts as forgotten. The first peer that is met may know few sets."""
EACH_ASKS = 3
"""Requests that each peer met after those still gets: the one that knows may have been away (simulated)."""
AWAY_SECONDS = 90.0
"""No contribution is returned this long after a peer that may hold it went away or was on another branch. It
covers a partition of a minute and its healing: the winning branch may have settled it (simulated)."""
LONGEST_WAIT_SECONDS = 600.0
"""Longest delay until a contribution is decided, however many peers leave and join meanwhile."""
HEARD_SECONDS = 2.0
"""A same-branch peer last heard this short a time before may have received a contribution. Such peers are
heard once a second."""
MAX_TAKEN = 4096
"""Own settled contributions that are remembered, in case their branch is given up."""
MAX_PEERS = 4096
"""Peers of which it is remembered when their branch last agreed with this peer's."""
DOUBTED_ROUNDS = 128
"""Rounds before the last known agreement that are checked again when the first round of a fork is unknown."""
LEARNED_ROUNDS = 64
"""Newest sets before a fetched state that are requested. Another peer may meet this one first after a
partition, and ask whether its contributions to them were settled (simulated)."""
LEARN_ASKS = 10
"""Requests for each of these sets."""
MAX_GIVEN_UP = 4
"""Branches given up by this peer that it remembers. Another peer may have adopted one and continue it, and no
other peer may know its sets (simulated)."""
MAX_REFERENCES = 16384
"""References of settled sets that are remembered to answer requests: about 2 MB."""
MAX_TABLES = 1024
"""Tables of newest results that are remembered. Own contributions are decided long before."""
WHOLE = (0,)
"""Parts of a contribution in runs without reducers: it is settled as a whole."""


@dataclass(frozen=True, slots=True)
class RestartState:
    """What one process of a peer passes to the next about the rounds up to its checkpoint."""

    sets: Sets = field(default_factory=dict)
    """The newest settled sets that it knows."""
    earlier: Earlier | None = None
    """Counts and digests of sets, which reach farther back."""


NOTHING_PAST = RestartState()


@dataclass(slots=True)
class _SetRequests:
    """Requests for the set of one round."""

    times: Counter[PeerId] = field(default_factory=Counter)
    """Requests to each neighbour."""
    at: float = float("-inf")
    """When the last one was sent."""
    is_over: bool = False
    """True when every same-branch peer was asked often enough and has had time to answer."""

    def next_of(self, same_branch_peers: Sequence[PeerId]) -> PeerId | None:
        """Return the peer to ask next, the one with the fewest requests; None if each was asked often enough:
        `MAX_ASKS` requests in all and `EACH_ASKS` to each."""
        branch_peer = min(same_branch_peers, key=self.times.__getitem__, default=None)
        if branch_peer is None:
            return None
        is_over = self.times.total() >= MAX_ASKS and self.times[branch_peer] >= EACH_ASKS
        return None if is_over else branch_peer


class OwnContributions:
    """The contributions of this peer, and the settled sets that decide them. One branch has at most one
    undecided contribution for each round."""

    def __init__(self, rules: Rounds, draw: Draw | None = None) -> None:
        """`draw`: the draw of reducers; None in runs without them."""
        self.draw = draw
        self._parts = WHOLE if draw is None else tuple(range(draw.shards))
        self._returned: dict[ContributionId, frozenset[int]] = {}
        """Parts that were returned already, of contributions in `open` and `taken`."""
        self._tables: OrderedDict[ContributionId, Table] = OrderedDict()
        self.delay = 2 * rules.window
        """Rounds from settling to deciding a contribution. Forks by short partitions are resolved by then."""
        self.open: OrderedDict[ContributionId, int] = OrderedDict()
        """Undecided contributions, and the round of each."""
        self.taken: OrderedDict[ContributionId, int] = OrderedDict()
        """Settled contributions, and the round of each."""
        self._sets: OrderedDict[int, tuple[Reference, ...]] = OrderedDict()
        """Settled sets of this branch by round, the oldest first."""
        self._reference_count = 0
        self._given_up: deque[tuple[Chain, Sets]] = deque(maxlen=MAX_GIVEN_UP)
        """Branches that were given up, and their sets that this peer settled."""
        self._asked: dict[int, _SetRequests] = {}
        self._rounds_to_learn: set[int] = set()
        """Rounds before a fetched state whose sets are still requested."""
        self._settled = -1
        """The newest settled round in the last call of `decide`."""
        self._doubted: set[ContributionId] = set()
        """Undecided contributions that count as settled if no peer remembers the set."""
        self._agreed: OrderedDict[PeerId, int] = OrderedDict()
        """Peer -> the last round at which it was known to be on this branch."""
        self._same_branch_at: OrderedDict[PeerId, float] = OrderedDict()
        """When each peer was last heard on this branch."""
        self._made_at: dict[ContributionId, float] = {}
        """When each contribution in `open` and `taken` was made."""
        self._reducers: dict[ContributionId, frozenset[PeerId]] = {}
        """The other peers that received slices of these contributions."""
        self._next_release = float("inf")
        """When the next contribution held back for an absent peer is decided; infinite if none is."""

    def agree(self, peer: PeerId, round: int, now: float) -> None:
        """Record that `peer` is on this branch up to `round`."""
        self._agreed[peer], self._same_branch_at[peer] = round, now
        self._same_branch_at.move_to_end(peer)
        if len(self._agreed) > MAX_PEERS:
            self._agreed.popitem(last=False)
        if len(self._same_branch_at) > MAX_PEERS:
            self._same_branch_at.popitem(last=False)

    def released(self, peer: PeerId) -> None:
        """Record that a peer on this branch is no longer a neighbour."""
        self._same_branch_at.pop(peer, None)

    def replaced(self, resync_request: FetchGroupState, own: ForkChoice, settled: int, chain: bytes) -> None:
        """Update the contributions after this peer replaced its state with a fetched one.

        The state is the one after round `settled`, with chain value `chain`. `own` is the branch until now,
        and `resync_request` names the first round of the fork from it, if known. If the state then lies on
        the own branch after all, contributions up to `settled` stay decided. Otherwise those after the fork
        become undecided again. The replaced sets are kept: this may be the last peer to know them.

        The peers that were asked may have switched to a third branch after the request. That branch may fork
        earlier than the request says, so its own fork counts, if a neighbour is on it."""
        replaced_sets = dict(self._sets)
        first = resync_request.fork_round
        if first is not None and settled >= first and own.chain.at(settled) == chain:
            self.undo(settled + 1)
        else:
            fork = own.fork_from(settled, chain)
            if fork is not None and first is not None and fork.round < first:
                resync_request = replace(resync_request, fork_round=fork.round, exact=fork.exact)
            self.give_up(resync_request, own.same_branch_peers)
        for given_up_chain, sets in self._given_up:  # The state may lie on a branch given up before.
            if given_up_chain.at(settled) == chain:
                self.restored({r: sets[r] for r in sets if r <= settled and r not in self._sets})
        self._given_up.append((own.chain, replaced_sets))

    def give_up(self, resync_request: FetchGroupState, same_branch_peers: Container[PeerId]) -> None:
        """Make contributions after the fork undecided, because a state of another branch has replaced this
        peer's.

        `same_branch_peers` stayed on this branch to its end. If the first round of the fork is unknown, it is
        assumed after the last agreement with another peer. Settled contributions to the `DOUBTED_ROUNDS`
        rounds before are then *doubted*: it is looked up again whether the set of their round includes them.
        If no peer remembers that set, they count as settled."""
        if resync_request.fork_round is not None and resync_request.exact:
            self.undo(resync_request.fork_round)
            return
        agreed_by_peer = {p: round for p, round in self._agreed.items() if p not in same_branch_peers}
        agreed_with_asked = [agreed_by_peer[p] for p in resync_request.peers if p in agreed_by_peer]
        agreed = min(agreed_by_peer.values(), default=-1)
        if agreed_with_asked:  # Peers on the branch that replaces this one.
            agreed = max(agreed_with_asked)
        self.undo(1 + agreed)
        # A peer that agreed may have switched branches since: look these sets up again.
        self._doubted.update(key for key, round in self.taken.items() if round > agreed - DOUBTED_ROUNDS)
        self._doubted.update(
            key for key, round in self.open.items() if round <= agreed and self._holds(round, key)
        )
        self.undo(1 + agreed - DOUBTED_ROUNDS)

    def jumped(self, settled: int) -> None:
        """Schedule requests for the unknown ones of the `LEARNED_ROUNDS` newest sets up to round `settled`.
        Called after the state of that round was fetched or read from disk."""
        first = max(0, settled + 1 - LEARNED_ROUNDS)
        self._rounds_to_learn = {round for round in range(first, settled + 1) if round not in self._sets}

    def restored(self, sets: Sets) -> None:
        """Restore settled sets from a checkpoint. If a whole group restarts, no other peer may know them."""
        for round in sorted(sets):
            self.settled(round, sets[round])

    def known(self, until: int) -> Sets:
        """Return the known ones of the `LEARNED_ROUNDS` newest settled sets up to round `until`, to store for
        a later process."""
        first = until + 1 - LEARNED_ROUNDS
        return {round: self._sets[round] for round in sorted(self._sets) if first <= round <= until}

    def remembers(self, round: int) -> bool:
        """Return whether the settled set of this round is known here, so that it can be sent to others."""
        return round in self._sets

    def made(
        self, round: int, identity: ContributionId, now: float, reducers: frozenset[PeerId] = frozenset()
    ) -> None:
        """Add an own contribution to a round. `reducers`: the other peers that its slices were sent to."""
        self.open[identity], self._made_at[identity] = round, now
        if reducers:
            self._reducers[identity] = reducers

    def read(self, identity: ContributionId, table: Table) -> None:
        """Remember the table of a result."""
        self._tables[identity] = table
        if len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)

    def wants(self, identity: ContributionId) -> bool:
        """Return whether this result's table is needed to decide an own contribution."""
        if self.draw is None or identity in self._tables:
            return False
        rounds = set(self.open.values())
        return any(entry.id == identity for round in rounds for entry in self._sets.get(round, ()))

    def is_held(self, identity: ContributionId, state: RoundSet) -> bool:
        """Return whether all parts of an own contribution are in an open round's set as held here."""
        return self._left_out(identity, tuple(state.held.values())) == ()

    def are_held(self, rounds: Mapping[int, RoundSet]) -> bool:
        """Return whether all own contributions to these open rounds are in their sets."""
        return all(self.is_held(key, rounds[round]) for key, round in self.open.items() if round in rounds)

    def contributors(self, references: Iterable[Reference]) -> frozenset[bytes]:
        """Return the tags (short hashes of ids, `tag_of`) of the contributors whose slices are in a set's
        results. Results whose tables are unknown are left out."""
        tags: set[bytes] = set()
        for reference in references:
            table = self._tables.get(reference.id)
            if table is not None:
                tags.update(contributor.peer for contributor in table.contributors)
        return frozenset(tags)

    def contributor_tags(self, state: RoundSet) -> frozenset[bytes]:
        """Return the tags of the peers that contributed to a set, as far as they are known."""
        if self.draw is None:
            return frozenset(map(tag_of, state.held))
        return self.contributors(state.held.values())

    def settled(self, round: int, references: tuple[Reference, ...]) -> None:
        """Record the settled set of a round on this branch. Beyond `MAX_REFERENCES` references in all, the
        oldest sets are forgotten."""
        self._forget_set(round)
        self._asked.pop(round, None)
        self._rounds_to_learn.discard(round)
        self._sets[round] = references
        self._reference_count += len(references)
        while self._reference_count > MAX_REFERENCES and len(self._sets) > 1:
            self._forget_set(next(iter(self._sets)))

    def accept_sets(self, complete: Iterable[int], references: Sequence[Reference]) -> None:
        """Record a same-branch peer's response. `complete` lists the rounds that are settled there, and
        `references` holds their sets. Rounds that were not requested are ignored."""
        for round in complete:
            if round in self._asked:
                self.settled(round, tuple(entry for entry in references if entry.round == round))

    def answer(
        self, asked: Iterable[int], open_sets: Mapping[int, RoundSet], settled: int
    ) -> tuple[tuple[Reference, ...], tuple[int, ...]]:
        """Return the response to a request for the sets of the rounds `asked`: references, and the rounds
        whose set is complete. These are settled and remembered here. For rounds in `open_sets`, the
        references are those held so far."""
        asked = tuple(asked)
        complete = tuple(round for round in asked if round <= settled and round in self._sets)
        references = [entry for round in complete for entry in self._sets[round]]
        for round in asked:
            if round in open_sets:
                references += open_sets[round].held.values()
        return tuple(references), complete

    def undo(self, round: int) -> None:
        """Make contributions to `round` and later ones undecided, and forget the sets and agreements: the
        branch is given up from there on."""
        for peer, agreed in self._agreed.items():
            self._agreed[peer] = min(agreed, round - 1)
        for later in [known for known in self._sets if known >= round]:
            self._forget_set(later)
        for identity, of_round in list(self.taken.items()):
            if of_round >= round:
                self.open[identity] = self.taken.pop(identity)
                self._asked.pop(of_round, None)

    def decide(self, settled: int, same_branch_peers: Sequence[PeerId], now: float) -> list[Effect]:
        """Decide the contributions whose rounds settled `delay` rounds ago. `settled`: the newest round.

        Returns requests for missing sets and results, and `RestoreToMomentum` for parts that are not in their
        round's set. A decision waits while a response may come. It also waits while a lost peer may hold the
        parts that are not in the set, and settle them on another branch."""
        self._settled = settled
        effects: list[Effect] = []
        rounds_to_request: dict[PeerId, set[int]] = {}
        self._next_release = float("inf")
        due = [(identity, round) for identity, round in self.open.items() if round + self.delay <= settled]
        if not due and not self._rounds_to_learn:
            return effects
        for identity, round in due:
            references = self._sets.get(round)
            left_out = None if references is None else self._left_out(identity, references)
            if left_out is None:  # The set, or the table of one of its results, is not known yet.
                branch_peer = self._peer_to_ask(round, same_branch_peers, now)
                if branch_peer is not None and references is None:
                    rounds_to_request.setdefault(branch_peer, set()).add(round)
                elif branch_peer is not None and references is not None:
                    unread = tuple(entry.id for entry in references if entry.id not in self._tables)
                    effects.append(RequestContributions(branch_peer, unread))
                if branch_peer is not None or not self._is_forgotten(identity, round, same_branch_peers, now):
                    continue
                # No peer remembers it.
                left_out = () if identity in self._doubted else self._parts
            elif references is not None:
                self._asked.pop(round, None)
            if left_out:
                until = self._held_back_until(identity, round, same_branch_peers)
                if until > now:
                    self._next_release = min(self._next_release, until)
                    continue
            effects += self._decide_contribution(identity, round, left_out)
        for round in list(self._rounds_to_learn):
            branch_peer = self._peer_to_ask(round, same_branch_peers, now)
            if branch_peer is not None:
                rounds_to_request.setdefault(branch_peer, set()).add(round)
            if self._asked[round].times.total() >= LEARN_ASKS:
                self._rounds_to_learn.discard(round)
        for branch_peer, rounds in rounds_to_request.items():
            effects.append(RequestIds(branch_peer, tuple(sorted(rounds))))
        return effects

    def next_deadline(self) -> float:
        """Return when to call `decide` again if nothing else happens: when a set is requested again, or when
        a contribution that waits for an absent peer is decided (`_next_release`)."""
        if not self._asked:
            return self._next_release
        due = {round for round in self.open.values() if round + self.delay <= self._settled}
        wanted = due | self._rounds_to_learn
        request_times = [entry.at + ASK_SECONDS for round, entry in self._asked.items() if round in wanted]
        return min([self._next_release, *request_times])

    def _absent_since(self, same_branch_peers: Container[PeerId], round: int) -> float:
        """Return when any absent peer was last heard on this branch; -inf if there is none. A peer is absent
        if it is no same-branch peer now, or has not settled `round`. It may have contributions to the round
        that no other peer has, and settle them after a partition (simulated)."""
        for peer, heard_at in reversed(self._same_branch_at.items()):  # The last one heard comes first.
            if peer not in same_branch_peers or self._agreed.get(peer, -1) < round:
                return heard_at
        return float("-inf")

    def _held_back_until(
        self, identity: ContributionId, round: int, same_branch_peers: Container[PeerId]
    ) -> float:
        """Return the time before which a contribution that its round's set leaves out must not be returned.

        A peer that is absent (`_absent_since`) may have received the contribution. If its branch wins later,
        returned values would count twice. Returns -inf if all such peers were lost before the contribution
        was made, and no reducer can hold it on another branch."""
        made_at = self._made_at[identity]
        away_since = self._absent_since(same_branch_peers, round)
        if away_since + HEARD_SECONDS < made_at:  # That peer cannot have received it, but a reducer may have.
            if not self._reducers_may_differ(identity, round):
                return float("-inf")
            away_since = made_at
        return min(away_since + AWAY_SECONDS, made_at + LONGEST_WAIT_SECONDS)

    def _reducers_may_differ(self, identity: ContributionId, round: int) -> bool:
        """Return whether a reducer of this contribution may have settled the round differently. Its result is
        not in the round's set, and it is not known to be on this branch there.

        A link may be cut in one direction only. Slices then reach a reducer that is not heard here, and it
        may sum them on a branch that wins in the end (simulated)."""
        contributors = {entry.peer for entry in self._sets.get(round, ())}
        others = self._reducers.get(identity, frozenset()) - contributors
        return any(self._agreed.get(reducer, -1) < round for reducer in others)

    def _decide_contribution(
        self, identity: ContributionId, round: int, left_out: tuple[int, ...]
    ) -> list[Effect]:
        """Decide a contribution: parts in `left_out` are not in its round's set, the others are. Returns
        `RestoreToMomentum` for the parts in `left_out` that were not returned before."""
        del self.open[identity]
        self._doubted.discard(identity)
        before = self._returned.get(identity, frozenset())
        returned = before.union(left_out)
        if len(returned) < len(self._parts):  # Some parts are settled, until their branch is given up.
            self._returned[identity] = returned
            self._remember_settled(identity, round)
        else:
            self._forget_own(identity)
        to_return = tuple(sorted(returned - before))
        if not to_return:
            return []
        shards = to_return if self.draw is not None else ()  # Empty: the whole contribution.
        return [RestoreToMomentum(round, identity, shards)]

    def _left_out(self, identity: ContributionId, references: Sequence[Reference]) -> tuple[int, ...] | None:
        """Return the parts of an own contribution that are not in a round's set, given by `references`. None
        if the table of one of its results is not known yet."""
        if self.draw is None:
            return () if any(entry.id == identity for entry in references) else WHOLE
        tables = {entry.peer: self._tables.get(entry.id) for entry in references}
        known = {contributor: table for contributor, table in tables.items() if table is not None}
        if len(known) < len(tables):
            return None
        round = references[0].round if references else 0
        counted = counting(known, self.draw, round)  # Shard -> the reducers whose results have weight.
        held = {
            shard
            for shard, contributors in counted.items()
            if any(shard in known[contributor].holding(identity) for contributor in contributors)
        }
        return tuple(part for part in self._parts if part not in held)

    def _forget_own(self, identity: ContributionId) -> None:
        self._made_at.pop(identity, None)
        self._reducers.pop(identity, None)
        self._returned.pop(identity, None)

    def _remember_settled(self, identity: ContributionId, round: int) -> None:
        """Remember a settled contribution, and forget the oldest ones beyond `MAX_TAKEN`."""
        self.taken[identity] = round
        if len(self.taken) > MAX_TAKEN:
            oldest, _ = self.taken.popitem(last=False)
            self._forget_own(oldest)

    def _peer_to_ask(self, round: int, same_branch_peers: Sequence[PeerId], now: float) -> PeerId | None:
        """Return the peer to ask for a round's set now, and count the request; None if no request is due yet
        or no peer is left to ask."""
        asked = self._asked.setdefault(round, _SetRequests())
        if now < asked.at + ASK_SECONDS:
            return None
        asked.at = now
        branch_peer = asked.next_of(same_branch_peers)
        asked.is_over = branch_peer is None and asked.times.total() >= MAX_ASKS
        if branch_peer is not None:
            asked.times[branch_peer] += 1
        return branch_peer

    def _is_forgotten(
        self, identity: ContributionId, round: int, same_branch_peers: Sequence[PeerId], now: float
    ) -> bool:
        """Return whether an own contribution need no longer wait for its round's set or results. All peers
        were asked often enough, or it was made `LONGEST_WAIT_SECONDS` ago."""
        asked = self._asked[round]
        if now >= self._made_at[identity] + LONGEST_WAIT_SECONDS:
            return True
        return asked.is_over and asked.next_of(same_branch_peers) is None

    def _holds(self, round: int, identity: ContributionId) -> bool:
        """Return whether a round's set is known and includes this contribution, or a part of it."""
        references = self._sets.get(round)
        left_out = None if references is None else self._left_out(identity, references)
        return left_out is not None and left_out != self._parts

    def _forget_set(self, round: int) -> None:
        """Forget the settled set of a round, if it is known."""
        self._reference_count -= len(self._sets.pop(round, ()))
