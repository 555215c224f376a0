"""When a round may be applied and when it settles, given what the neighbours of our history say of it.

Nobody sees a large group whole, so what all must know travels as *levels*, one hop with each Progress. A
peer is at level 1 when something holds for itself, and at k + 1 when all its neighbours say that they are at
k or more: then it holds for everybody within k hops. With `hops` hops to the farthest peer, level `hops` + 1
speaks for all (a wave algorithm: Tel, "Introduction to Distributed Algorithms", chapter 6); in a fully linked
group that is 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarmnet.identifiers import PeerId
from swarmnet.rounds.contribution_sets import NeighbourView, RoundSet
from swarmnet.run.manifest import Rounds


@dataclass(frozen=True, slots=True)
class Agreement:
    """`allies`: the neighbours whose history is ours. Times in seconds on the caller's clock."""

    rules: Rounds
    allies: Mapping[PeerId, NeighbourView]
    hops: int = 1
    """From here to the farthest peer of the group."""
    follows: bool = False
    """This peer stood still (machine.py): who went on meanwhile is believed however few they are, and
    nothing settles here by itself."""

    def are_ahead(self, saying: Iterable[bool]) -> bool:
        """Whether those allies who say that they are farther than this peer are believed."""
        return any(saying) if self.follows else self.is_half(saying)

    def is_half(self, saying: Iterable[bool]) -> bool:
        """Whether those allies who say so are at least half of those in sight, this peer included: one may
        claim what it likes."""
        return 2 * sum(saying) >= 1 + len(self.allies)

    def standing(self, number: int, state: RoundSet, now: float) -> bytes | None:
        """The digest of the set to take up, that of the allies who have settled the round; None: nobody has,
        or this peer settles it by itself. Of several the one that most of them name.

        Half of those in sight are believed at once. Fewer could be one liar, who would then decide alone what
        everybody settles: unless this peer `follows`, they are believed when patience has run out here, too,
        for as long again, and unless another set is held by more in sight.
        """
        if not self._settled_by_some(number):
            return None
        best = self._named_most(number, state)
        if self._settled_by_enough(number):
            return best
        over = state.sealed_at + self.rules.settle_seconds
        in_time = over <= now < over + self.rules.settle_seconds
        return best if in_time and self._outweighs(best, number, state) else None

    def _settled_by_some(self, number: int) -> bool:
        return any(view.settled >= number for view in self.allies.values())

    def _settled_by_enough(self, number: int) -> bool:
        return self.are_ahead(view.settled >= number for view in self.allies.values())

    def _named_most(self, number: int, state: RoundSet) -> bytes:
        """By the allies who have settled the round; empty where they tell no set of it any more."""
        told = [view.sets.get(number) for view in self.allies.values() if view.settled >= number]
        named, held = Counter(entry.digest for entry in told if entry is not None), self._held(number, state)
        return max(named, key=lambda digest: (named[digest], held[digest], digest), default=b"")

    def _held(self, number: int, state: RoundSet) -> Counter[bytes]:
        """By how many in sight each set of a round is held, this peer among them."""
        told = [view.sets.get(number) for view in self.allies.values()]
        return Counter([state.digest, *(entry.digest for entry in told if entry is not None)])

    def _outweighs(self, digest: bytes, number: int, state: RoundSet) -> bool:
        """Whether no other set of the round is held by more in sight. Not only the own one: somebody may have
        given this peer alone what makes its set differ from that of all the others."""
        held = self._held(number, state)
        return held[digest] == max(held.values())

    def raise_levels(self, number: int, state: RoundSet, parted: bool) -> bool:
        """Of a closed round, the own contribution to which is made and of which nothing is being pulled; a
        level that was reached stays. `parted`: a lost ally may hold what others lack. True: they rose."""
        before = state.gathered, state.sealed
        if state.gathered <= self.hops:
            state.gathered = max(state.gathered, self.gathered(number, state))
        if 0 < state.sealed <= self.hops and not parted:
            state.sealed = max(state.sealed, self.sealed(number, state))
        return before != (state.gathered, state.sealed)

    def gathered(self, number: int, state: RoundSet) -> int:
        """The level of "has closed the round, and what it makes for it is made" around this peer, whose own
        is made and who pulls nothing: at level k + 1 all that was made within k hops is held here."""
        everywhere = level = self.hops + 1
        for peer, view in self.allies.items():
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
        """The level of "has sealed this very set" around this peer, who has: at level k + 1 everybody within
        k hops had it so when last heard, and nobody there makes more for it."""
        level, with_us, others = self.hops + 1, 1, False
        for view in self.allies.values():
            entry = view.sets.get(number)
            agrees = entry is not None and entry.digest == state.digest
            theirs = entry.sealed if entry is not None and agrees else 0
            with_us += theirs > 0
            if view.in_step and view.settled >= number and not agrees:
                others = True
            elif view.in_step:
                level = min(level, theirs + 1)
        # Who has settled another set changes no more. Against most of those in sight it does not stand.
        return 1 if others and 2 * with_us <= 1 + len(self.allies) else level

    def may_apply(self, number: int, state: RoundSet, now: float) -> bool:
        """A closed round: every contribution that is expected is in, or its deadline has passed."""
        standing = self.standing(number, state, now)
        if standing is not None:
            return standing == state.digest
        return state.gathered > self.hops or now >= state.closed_at + self.rules.deadline_seconds

    def may_settle(self, number: int, state: RoundSet, now: float) -> bool:
        """An applied round: all have sealed the same set, or were silent for too long. Who is catching up is
        not waited for, unless that is half of the group: it would be left behind for good."""
        standing = self.standing(number, state, now)
        if standing is not None:
            return standing == state.digest
        if not state.sealed or self.follows:
            return False
        if now >= self._own_patience_ends(number, state):
            return True
        if self.is_half(not view.in_step for view in self.allies.values()):
            return False
        return state.sealed > self.hops

    def patience_ends(self, number: int, state: RoundSet, applied: bool) -> float:
        """When time alone will let the round be applied, or settle if it is `applied`; infinite: never, it
        waits for the set that half of the group has settled, or `follows`."""
        if self._settled_by_enough(number):
            return float("inf")
        if not applied:
            return state.closed_at + self.rules.deadline_seconds
        if self.follows:
            return float("inf")
        over = self._own_patience_ends(number, state)
        if over > state.sealed_at + self.rules.settle_seconds:
            return over
        believed = self._settled_by_some(number) and self._outweighs(
            self._named_most(number, state), number, state
        )
        return over + self.rules.settle_seconds if believed else over

    def _own_patience_ends(self, number: int, state: RoundSet) -> float:
        """When a round that is sealed here settles with the own set. Where more than half of those in sight
        have sealed one other set, theirs is the history that stands (history.py): for as long again this
        peer waits to take up what they settle."""
        told = [view.sets.get(number) for view in self.allies.values()]
        mine, most = state.digest, 1 + len(self.allies)
        others = [
            entry.digest for entry in told if entry is not None and entry.sealed and entry.digest != mine
        ]
        outvoted = 2 * len(others) > most and 2 * max(Counter(others).values()) > most
        return state.sealed_at + self.rules.settle_seconds * (2 if outvoted else 1)
