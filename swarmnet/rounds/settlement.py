"""Decides when a round may be applied and when it settles, from the Progress of neighbours on the same
branch.

Progress is the message in which a peer reports its sets. A peer *seals* a round when it makes no more
contributions for it. *Peers in sight* are this peer and the neighbours on its branch.

No peer sees a large group whole. Facts about the whole group therefore travel as *levels*, one hop with each
Progress. A peer is at level 1 when a fact holds for itself, and at k + 1 when all its neighbours report k or
more. The fact then holds for all peers within k hops. With `hops` hops to the farthest peer, level `hops` + 1
covers the group (a wave algorithm: Tel, "Introduction to Distributed Algorithms", chapter 6). It is 2 in a
fully linked group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarmnet.identifiers import PeerId
from swarmnet.rounds.contribution_sets import NeighbourView, RoundSet
from swarmnet.run.schema import Rounds


@dataclass(frozen=True, slots=True)
class FinalityRules:
    """The rules of agreement with `same_branch_peers`, the neighbours on the same branch. All times are
    in seconds."""

    rules: Rounds
    same_branch_peers: Mapping[PeerId, NeighbourView]
    hops: int = 1
    """Number of hops from here to the farthest peer of the group."""
    follows: bool = False
    """True for a while after this peer was suspended (group_rounds.py). It then believes any peer that
    continued meanwhile, and settles nothing on its own."""
    joins: bool = False
    """True until this peer has caught up with its group. Neighbours that are catching up too then have no say
    against those that are ahead: two newcomers would outvote the only peer that has trained."""

    def are_ahead(self, reports: Iterable[tuple[NeighbourView, bool]]) -> bool:
        """Return whether this peer believes the neighbours that report to be ahead: half of those that count
        and this peer, or any one while it `follows`. `reports`: each neighbour that counts, and whether it
        reports so."""
        saying = [says for view, says in reports if says or view.in_step or not self.joins]
        return any(saying) if self.follows else self.is_half(saying)

    def is_half(self, saying: Iterable[bool]) -> bool:
        """Return whether the neighbours that report something are at least half of these and this peer.
        `saying`: for each neighbour that counts, whether it reports so. A single one may report anything."""
        said = tuple(saying)
        return 2 * sum(said) >= 1 + len(said)

    def adopted_digest(self, number: int, state: RoundSet, now: float) -> bytes | None:
        """Return the digest of the set that this peer must adopt for a round; None if it settles the round by
        its own set.

        If neighbours have settled the round, it is the set that most of them settled. They are believed at
        once if they are half of the peers in sight, or if this peer `follows`. Fewer could be one faulty
        peer. They are believed only between one and two timeouts after this peer sealed the round, and while
        no other set has more holders."""
        if not self._settled_by_some(number):
            return None
        best = self._digest_settled_most(number, state)
        if self._settled_by_enough(number):
            return best
        timeout_at = state.sealed_at + self.rules.finality_timeout_seconds
        is_in_time = timeout_at <= now < timeout_at + self.rules.finality_timeout_seconds
        return best if is_in_time and self._has_most_holders(best, number, state) else None

    def _settled_by_some(self, number: int) -> bool:
        """Return whether any neighbour has settled the round."""
        return any(view.settled >= number for view in self.same_branch_peers.values())

    def _settled_by_enough(self, number: int) -> bool:
        """Return whether the neighbours that have settled the round are believed at once."""
        return self.are_ahead((view, view.settled >= number) for view in self.same_branch_peers.values())

    def _digest_settled_most(self, number: int, state: RoundSet) -> bytes:
        """Return the most frequent digest among neighbours that have settled the round; of equally frequent
        ones the one with most holders in sight, then the largest. Returns b"" if none reports one."""
        settled_views = [view for view in self.same_branch_peers.values() if view.settled >= number]
        named = Counter(view.sets[number].digest for view in settled_views if number in view.sets)
        holders = self._count_holders(number, state)
        return max(named, key=lambda digest: (named[digest], holders[digest], digest), default=b"")

    def _count_holders(self, number: int, state: RoundSet) -> Counter[bytes]:
        """Return for the digest of each set of a round how many peers in sight hold that set."""
        views = self.same_branch_peers.values()
        return Counter([state.digest, *(view.sets[number].digest for view in views if number in view.sets)])

    def _has_most_holders(self, digest: bytes, number: int, state: RoundSet) -> bool:
        """Return whether no other set of the round is held by more peers in sight than the one with `digest`.
        It need not be this peer's own: a faulty peer may have sent a contribution to this peer alone."""
        holders = self._count_holders(number, state)
        return holders[digest] == max(holders.values())

    def raise_levels(self, number: int, state: RoundSet, departed: bool) -> bool:
        """Raise the levels `gathered` and `sealed` of a closed round. Returns whether one rose; none falls.

        Called when the own contribution is made and nothing of the round is being downloaded. `departed`:
        a neighbour was lost a short time ago. It may hold what others lack, so `sealed` must wait."""
        before = state.gathered, state.sealed
        if state.gathered <= self.hops:
            state.gathered = max(state.gathered, self.gathered(number, state))
        if 0 < state.sealed <= self.hops and not departed:
            state.sealed = max(state.sealed, self.sealed(number, state))
        return before != (state.gathered, state.sealed)

    def gathered(self, number: int, state: RoundSet) -> int:
        """Return the level of "has closed the round and made its contribution". At level k + 1, all
        contributions that were made within k hops are held here. Neighbours that are catching up, or have
        settled the round, do not hold the level down."""
        level = self.hops + 1
        for peer, view in self.same_branch_peers.items():
            if not view.in_step or view.settled >= number:
                continue
            entry = view.sets.get(number)
            their_level = entry.gathered if entry is not None else 0
            makes_none = view.round > number and number not in view.contributed
            # It may not report this round yet. It has nothing more to add if it makes no contribution, or if
            # its contribution is held here.
            if not their_level and (makes_none or peer in state.held):
                their_level = 1
            level = min(level, their_level + 1)
        return level

    def sealed(self, number: int, state: RoundSet) -> int:
        """Return the level of "has sealed this very set". At level k + 1, all peers within k hops had sealed
        it when last heard, and none of them makes more for it. Called when this peer has sealed the set."""
        level, another_is_settled = self.hops + 1, False
        sealed_by = 1  # This peer.
        for view in self.same_branch_peers.values():
            entry = view.sets.get(number)
            agrees = entry is not None and entry.digest == state.digest
            their_level = entry.sealed if entry is not None and agrees else 0
            if their_level > 0:
                sealed_by += 1
            if view.in_step and view.settled >= number and not agrees:
                another_is_settled = True
            elif view.in_step:
                level = min(level, their_level + 1)
        # A peer that settled another set keeps it. It does not hold up a set that most peers in sight sealed.
        most_sealed_this = 2 * sealed_by > 1 + len(self.same_branch_peers)
        return level if most_sealed_this or not another_is_settled else 1

    def may_apply(self, number: int, state: RoundSet, now: float) -> bool:
        """Return whether a closed round may be applied. If there is a set that this peer must adopt, it must
        hold it; otherwise it needs all expected contributions, or the deadline must have passed."""
        adopted = self.adopted_digest(number, state, now)
        if adopted is not None:
            return adopted == state.digest
        return state.gathered > self.hops or now >= state.closed_at + self.rules.contribution_timeout_seconds

    def may_settle(self, number: int, state: RoundSet, now: float) -> bool:
        """Return whether an applied round may settle.

        If neighbours have settled it with a set that this peer must adopt, this peer must hold that set.
        Otherwise it must have sealed the round. All peers within `hops` hops must have sealed the same set
        too, unless the timeout is over. Peers that are catching up (not `in_step`) do not hold it up, unless
        they are half of the peers in sight. While this peer `follows`, it settles only an adopted set."""
        adopted = self.adopted_digest(number, state, now)
        if adopted is not None:
            return adopted == state.digest
        if not state.sealed or self.follows:
            return False
        if now >= self._own_set_settles_at(number, state):
            return True
        if self.is_half(not view.in_step for view in self.same_branch_peers.values()):
            return False
        return state.sealed > self.hops  # `sealed` is a level: it covers the whole group.

    def patience_ends(self, number: int, state: RoundSet, applied: bool) -> float:
        """Return the time at which the round is applied without any further message, or settles if it is
        already `applied`. It is infinite if the round waits for a set that half of the peers in sight have
        settled. It is also infinite for an applied round while this peer `follows`."""
        if self._settled_by_enough(number):
            return float("inf")
        if not applied:
            return state.closed_at + self.rules.contribution_timeout_seconds
        if self.follows:
            return float("inf")
        settles_at = self._own_set_settles_at(number, state)
        if settles_at > state.sealed_at + self.rules.finality_timeout_seconds:
            return settles_at  # This is the doubled timeout already.
        if not self._settled_by_some(number):
            return settles_at
        best = self._digest_settled_most(number, state)
        may_be_adopted = self._has_most_holders(best, number, state)
        # After the timeout, a set that some neighbours settled may be adopted during one more timeout.
        return settles_at + self.rules.finality_timeout_seconds if may_be_adopted else settles_at

    def _own_set_settles_at(self, number: int, state: RoundSet) -> float:
        """Return when a round that is sealed here settles with this peer's own set.

        If more than half of the peers in sight have sealed one other set, their branch wins (history.py).
        This peer then waits twice as long, to adopt what they settle."""
        entries = [view.sets[number] for view in self.same_branch_peers.values() if number in view.sets]
        in_sight = 1 + len(self.same_branch_peers)
        others = Counter(entry.digest for entry in entries if entry.sealed and entry.digest != state.digest)
        is_outvoted = 2 * max(others.values(), default=0) > in_sight
        timeouts = 2 if is_outvoted else 1
        return state.sealed_at + timeouts * self.rules.finality_timeout_seconds
