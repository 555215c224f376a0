"""What one peer says of others' work, and asks of them for its own, where newcomers pay by work that is found
to agree (`sync.fee`, swarmnet/audits/standing.py). Part of WorkAuditPath, which looks into it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from swarmnet.audits.commitment import MOST_FINDINGS, Change, Commitment, Found, Word
from swarmnet.audits.standing import Standings, Terms
from swarmnet.identifiers import PeerId
from swarmnet.rounds.result_table import tag_of

NEWCOMERS_REST = 4.0
"""Times as long as it took to compute a newcomer's window again this peer looks into none: a crowd of them
takes a fifth of its time, and of an honest one some windows wait."""
MOST_WAITING = 64
"""Newcomers whose windows wait, the newest of each; and liars among them that are looked into no more."""
MOST_OWED = 64
"""Peers whose turn it is, the newest window of each."""


@dataclass(frozen=True, slots=True)
class Window:
    """To be looked into."""

    peer: PeerId
    name: bytes
    """Of its last commitment ..."""
    round: int
    """... and of what round that is."""


class Vouching:
    def __init__(self, terms: Terms, settled: int, known: frozenset[PeerId], me: PeerId) -> None:
        """`known`: who was in sets before round `settled`."""
        self.standings, self.me = Standings(terms, settled, map(tag_of, known)), me
        self._found: OrderedDict[tuple[bytes, int], Found] = OrderedDict()
        """What no settled set has of this peer yet."""
        self._owed: OrderedDict[PeerId, Window] = OrderedDict()
        self._newcomers: OrderedDict[PeerId, Window] = OrderedDict()
        self._early: OrderedDict[PeerId, Window] = OrderedDict()
        """What auditors are drawn from has not settled here yet."""
        self._liars: deque[PeerId] = deque(maxlen=MOST_WAITING)
        self._newcomers_at = 0.0
        """None of theirs before."""

    def settled(
        self, round: int, chain: bytes, said: Mapping[PeerId, Commitment], settings: bytes
    ) -> list[Change]:
        """See `Standings.settled`."""
        if self.me in said:
            for found in said[self.me].findings:
                self._found.pop((found.peer, found.round), None)
        changes = self.standings.settled(round, chain, said)
        for window in [window for window in self._early.values() if window.round < round]:
            self.asks(self._early.pop(window.peer), round, settings)
        return changes

    # -- what it says -----------------------------------------------------------------------------------

    def found(self, window: Window, rounds: int, word: Word) -> None:
        key = tag_of(window.peer), window.round
        self._found[key] = Found(*key, min(rounds, 255), word)

    @property
    def findings(self) -> tuple[Found, ...]:
        """For its next contribution: the oldest that nobody has heard."""
        return tuple(self._found.values())[:MOST_FINDINGS]

    # -- what it looks into -----------------------------------------------------------------------------

    def is_over(self, window: Window, round: int, settings: bytes) -> None:
        """A window of one that counts, as the set of that round has it."""
        peer, last = tag_of(window.peer), window.round
        if not (self.standings.is_due(window.peer, round) and self.standings.is_turn(peer, last)):
            return
        if tag_of(self.me) in self.standings.auditors(peer, last, settings):
            _put(self._owed, window, MOST_OWED)

    def asks(self, window: Window, round: int, settings: bytes) -> None:
        """A newcomer wants this peer to look."""
        if self.standings.counts(window.peer, round) or window.peer in self._liars:
            return
        drawn = (self.standings.auditors(tag_of(window.peer), window.round, of) for of in (settings, None))
        waits = self._newcomers
        if window.round >= round:
            waits = self._early
        elif not any(tag_of(self.me) in those for those in drawn):
            return
        _put(waits, window, MOST_WAITING)

    def next(self, now: float) -> Iterator[Window]:
        """What waits: newcomers, who have a share of the time and no more, then whose term is over first."""
        while self._newcomers and now >= self._newcomers_at:
            yield self._newcomers.popitem(last=False)[1]
        while self._owed:
            yield self._owed.pop(min(self._owed, key=self.standings.agreed_until))

    def looked(self, window: Window, round: int, seconds: float, now: float) -> None:
        """That is what it took to compute."""
        if not self.standings.counts(window.peer, round):
            self._newcomers_at = now + NEWCOMERS_REST * seconds

    def lied(self, peer: PeerId) -> None:
        """One that does not count: nobody needs a proof."""
        self._liars.append(peer)

    def whom_to_ask(self, last: int, settings: bytes) -> frozenset[bytes]:
        """To look into an own window, as tags: who can judge it, else who can see that there is one."""
        me = tag_of(self.me)
        able = self.standings.auditors(me, last, settings)
        return frozenset(able or self.standings.auditors(me, last, None))


def _put(waits: OrderedDict[PeerId, Window], window: Window, most: int) -> None:
    """The newest of each peer, behind the others."""
    waits.pop(window.peer, None)
    waits[window.peer] = window
    if len(waits) > most:
        waits.popitem(last=False)
