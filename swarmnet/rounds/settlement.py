"""Decides when a round may be applied and when it settles, from the Progress of neighbours on the same
branch.

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
from swarmnet.run.manifest import Rounds


@dataclass(frozen=True, slots=True)
class FinalityRules:
    """The rules of agreement with `same_branch_peers`, the neighbours on the same branch. All times are
    in seconds."""

    rules: Rounds
    same_branch_peers: Mapping[PeerId, NeighbourView]
    hops: int = 1
    """Number of hops from here to the farthest peer of the group."""
    follows: bool = False
    """True for a while after this peer was suspended (machine.py). It then believes any peer that continued
    meanwhile, and settles nothing on its own."""

    def are_ahead(self, saying: Iterable[bool]) -> bool:
        """Return whether neighbours that report to be ahead are believed. `saying`: one flag for each."""
        return any(saying) if self.follows else self.is_half(saying)

    def is_half(self, saying: Iterable[bool]) -> bool:
        """Return whether the neighbours that report something are at least half of the peers in sight, this
        one included. A single one may report anything."""
        return 2 * sum(saying) >= 1 + len(self.same_branch_peers)

    def adopted_digest(self, number: int, state: RoundSet, now: float) -> bytes | None:
        """Return the digest of the set that this peer must adopt for a round; None if it settles the round by
        its own set.

        If neighbours have settled the round, it is the set that most of them name. They are believed at once
        if they are half of the peers in sight. Fewer could be one faulty peer, which would then decide for
        all. Unless this peer `follows`, it believes them only after its own timeout, for as long again, and
        while no other set has more holders."""
        if not self._settled_by_some(number):
            return None
        best = self._named_most(number, state)
        if self._settled_by_enough(number):
            return best
        over = state.sealed_at + self.rules.finality_timeout_seconds
        in_time = over <= now < over + self.rules.finality_timeout_seconds
        return best if in_time and self._outweighs(best, number, state) else None

    def _settled_by_some(self, number: int) -> bool:
        """Return whether any neighbour has settled the round."""
        return any(view.settled >= number for view in self.same_branch_peers.values())

    def _settled_by_enough(self, number: int) -> bool:
        """Return whether the neighbours that have settled the round are believed at once."""
        return self.are_ahead(view.settled >= number for view in self.same_branch_peers.values())

    def _named_most(self, number: int, state: RoundSet) -> bytes:
        """Return the most frequent digest among neighbours that have settled the round; b"" if none reports
        one."""
        told = [view.sets.get(number) for view in self.same_branch_peers.values() if view.settled >= number]
        named, held = Counter(entry.digest for entry in told if entry is not None), self._held(number, state)
        return max(named, key=lambda digest: (named[digest], held[digest], digest), default=b"")

    def _held(self, number: int, state: RoundSet) -> Counter[bytes]:
        """Return how many peers in sight hold each set of a round, this peer included."""
        told = [view.sets.get(number) for view in self.same_branch_peers.values()]
        return Counter([state.digest, *(entry.digest for entry in told if entry is not None)])

    def _outweighs(self, digest: bytes, number: int, state: RoundSet) -> bool:
        """Return whether no other set of the round is held by more peers in sight. This peer's own set may be
        the odd one: a faulty peer may have sent something to it alone."""
        held = self._held(number, state)
        return held[digest] == max(held.values())

    def raise_levels(self, number: int, state: RoundSet, departed: bool) -> bool:
        """Raise the levels of a closed round. Returns whether they rose; a level never falls here.

        Called when the own contribution is made and nothing of the round is being downloaded. `departed`: a
        lost neighbour may hold what others lack, so `sealed` must wait."""
        before = state.gathered, state.sealed
        if state.gathered <= self.hops:
            state.gathered = max(state.gathered, self.gathered(number, state))
        if 0 < state.sealed <= self.hops and not departed:
            state.sealed = max(state.sealed, self.sealed(number, state))
        return before != (state.gathered, state.sealed)

    def gathered(self, number: int, state: RoundSet) -> int:
        """Return the level of "has closed the round and made its contribution". At level k + 1, all
        contributions that were made within k hops are held here."""
        everywhere = level = self.hops + 1
        for peer, view in self.same_branch_peers.items():
            if not view.in_step or view.settled >= number:
                continue
            entry = view.sets.get(number)
            theirs = entry.gathered if entry is not None else 0
            makes_none = view.round > number and number not in view.contributed
            if not theirs and (makes_none or peer in state.held):
                theirs = 1
            level = min(level, theirs + 1)
        return min(level, everywhere)

    def sealed(self, number: int, state: RoundSet) -> int:
        """Return the level of "has sealed this very set". At level k + 1, all peers within k hops had sealed
        it when last heard, and none of them makes more for it. Called when this peer has sealed the set."""
        level, with_us, others = self.hops + 1, 1, False
        for view in self.same_branch_peers.values():
            entry = view.sets.get(number)
            agrees = entry is not None and entry.digest == state.digest
            theirs = entry.sealed if entry is not None and agrees else 0
            with_us += theirs > 0
            if view.in_step and view.settled >= number and not agrees:
                others = True
            elif view.in_step:
                level = min(level, theirs + 1)
        # A peer that settled another set keeps it. It does not hold up a set that most peers in sight sealed.
        return 1 if others and 2 * with_us <= 1 + len(self.same_branch_peers) else level

    def may_apply(self, number: int, state: RoundSet, now: float) -> bool:
        """Return whether a closed round may be applied: this peer holds the set that it must adopt, or all
        expected contributions, or the deadline has passed."""
        adopted = self.adopted_digest(number, state, now)
        if adopted is not None:
            return adopted == state.digest
        return state.gathered > self.hops or now >= state.closed_at + self.rules.contribution_timeout_seconds

    def may_settle(self, number: int, state: RoundSet, now: float) -> bool:
        """Return whether an applied round may settle.

        If neighbours have settled it with a set that this peer must adopt, it may settle once this peer holds
        that set. Otherwise this peer must have sealed the round, and all peers within `hops` hops must have
        sealed the same set, or the timeout is over. Peers that are catching up (not `in_step`) do not hold it
        up, unless they are half of the peers in sight. While this peer `follows`, it settles only an adopted
        set."""
        adopted = self.adopted_digest(number, state, now)
        if adopted is not None:
            return adopted == state.digest
        if not state.sealed or self.follows:
            return False
        if now >= self._own_patience_ends(number, state):
            return True
        if self.is_half(not view.in_step for view in self.same_branch_peers.values()):
            return False
        return state.sealed > self.hops  # `sealed` is a level: it covers the whole group.

    def patience_ends(self, number: int, state: RoundSet, applied: bool) -> float:
        """Return when time alone lets the round be applied, or settle if it is already `applied`. It is
        infinite if the round waits for a set that half has settled, or if this peer `follows`."""
        if self._settled_by_enough(number):
            return float("inf")
        if not applied:
            return state.closed_at + self.rules.contribution_timeout_seconds
        if self.follows:
            return float("inf")
        over = self._own_patience_ends(number, state)
        if over > state.sealed_at + self.rules.finality_timeout_seconds:
            return over
        believed = self._settled_by_some(number) and self._outweighs(
            self._named_most(number, state), number, state
        )
        return over + self.rules.finality_timeout_seconds if believed else over

    def _own_patience_ends(self, number: int, state: RoundSet) -> float:
        """Return when a round that is sealed here settles with this peer's own set.

        If more than half of the peers in sight have sealed one other set, their branch wins (history.py).
        This peer then waits twice as long, to adopt what they settle."""
        told = [view.sets.get(number) for view in self.same_branch_peers.values()]
        mine, most = state.digest, 1 + len(self.same_branch_peers)
        others = [
            entry.digest for entry in told if entry is not None and entry.sealed and entry.digest != mine
        ]
        outvoted = 2 * len(others) > most and 2 * max(Counter(others).values()) > most
        return state.sealed_at + self.rules.finality_timeout_seconds * (2 if outvoted else 1)
