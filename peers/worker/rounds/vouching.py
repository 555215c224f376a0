"""What one peer says of others' work, and asks of them for its own, where newcomers pay by work that is found
to agree (`sync.fee`, swarmnet/audits/standing.py). Part of WorkAuditPath, which looks into it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from swarmnet.audits.commitment import MOST_FINDINGS, Change, Commitment, Found, Word
from swarmnet.audits.standing import SEVERAL, Standings, Terms
from swarmnet.identifiers import PeerId
from swarmnet.rounds.result_table import tag_of

NEWCOMERS_REST = 4.0
"""Times as long as it took to compute a newcomer's window again this peer looks into none: a crowd of them
takes a fifth of its time, and of an honest one some windows wait."""
MOST_WAITING = 64
"""Newcomers whose windows wait, the newest of each; and liars among them that are looked into no more."""
MOST_OWED = 64
"""Peers whose turn it is, or that are followed, the newest window of each."""
FOLLOWED = 2 * SEVERAL
"""Windows at most: of some nothing comes."""


class Wanted(IntEnum):
    """What it takes to look into a window, behind its commitments and what was carried into it: the `shard`
    of what is asked for."""

    NOTHING = 0
    ONWARD = 1
    """What was carried into the next window, by who has other settings."""
    ALL = 2
    """And what a newcomer contributed, of which no set holds anything."""


@dataclass(frozen=True, slots=True)
class Window:
    """To be looked into."""

    peer: PeerId
    name: bytes
    """Of its last commitment ..."""
    round: int
    """... and of what round that is."""
    wanted: Wanted = Wanted.NOTHING
    goes_on: bool = True
    """The next window is known to go on from it, so that what was carried over can be looked into."""


@dataclass(slots=True)
class _Following:
    words: int = SEVERAL
    """That are still to be said of it ..."""
    windows: int = FOLLOWED
    """... and windows after this to be looked into for that, at most."""


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
        self._followed: OrderedDict[PeerId, _Following] = OrderedDict()
        """Who has other settings: one window of it says nothing."""
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

    def found(self, window: Window, rounds: int, word: Word, likeness: int = 0) -> None:
        key = tag_of(window.peer), window.round
        self._found[key] = Found(*key, min(rounds, 255), word, likeness)
        followed = self._followed.get(window.peer)
        if followed is not None and word is Word.ALIKE:
            followed.words -= 1

    @property
    def findings(self) -> tuple[Found, ...]:
        """For its next contribution: the oldest that nobody has heard."""
        return tuple(self._found.values())[:MOST_FINDINGS]

    # -- what it looks into -----------------------------------------------------------------------------

    def is_over(self, window: Window, round: int, settings: bytes) -> None:
        """A window of one that counts, as the set of that round has it. `settings`: its own."""
        if (followed := self._followed.get(window.peer)) is not None:
            followed.windows -= 1
            if followed.words > 0:
                _put(self._owed, window, MOST_OWED)
            if followed.words <= 0 or followed.windows <= 0:
                del self._followed[window.peer]
        peer, last = tag_of(window.peer), window.round
        if self.standings.is_due(window.peer, round) and self.standings.is_turn(peer, last):
            drawn = self.standings.auditors(peer, last, settings)
            if self.standings.is_doubted(window.peer):
                drawn += self.standings.exact_auditors(peer, last, settings)
            if tag_of(self.me) in drawn:
                self.looks_into(window)

    def looks_into(self, window: Window) -> None:
        """It was drawn; if it is of one that has other settings, so are some windows after it."""
        _put(self._owed, window, MOST_OWED)
        if window.wanted and window.peer not in self._followed:
            self._followed[window.peer] = _Following()
            if len(self._followed) > MOST_OWED:
                self._followed.popitem(last=False)

    def asks(self, window: Window, round: int, settings: bytes) -> None:
        """A newcomer wants this peer to look."""
        if self.standings.counts(window.peer, round) or window.peer in self._liars:
            return
        if window.round >= round:
            _put(self._early, window, MOST_WAITING)
            return
        of_all, of_kind = (
            tag_of(self.me) in self.standings.auditors(tag_of(window.peer), window.round, of)
            for of in (None, settings)
        )
        if of_all or of_kind:  # With what settings it computes is not known yet.
            wanted = Wanted.ALL if of_all else Wanted.NOTHING
            _put(self._newcomers, replace(window, wanted=wanted), MOST_WAITING)

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
        """To look into an own window, as tags."""
        return frozenset(self.standings.auditors(tag_of(self.me), last, settings))


def _put(waits: OrderedDict[PeerId, Window], window: Window, most: int) -> None:
    """The newest of each peer, behind the others."""
    waits.pop(window.peer, None)
    waits[window.peer] = window
    if len(waits) > most:
        waits.popitem(last=False)
