"""Whose contributions count where work is audited: who has been there from the beginning, and whoever's work
others have found to agree; as long as they go on finding it.

A fold over what settled, so that all who have the same sets come to the same: who contributed, and the
findings that peers signed beside their own contributions. That somebody lied is a matter of proofs
(convictions.py). That somebody's work *agrees* is a word, and nobody needs to be accused who says nothing:

- Who was in the first sets counts (a *founder*). Anybody else counts for nothing until auditors that all know
  (draw.py) have found `sync.fee` rounds of it to agree, two of them if there are two.
- Standing is for a *term*. Who has not been found to agree in it, for whatever reason, is a newcomer again;
  before it is over, such auditors are drawn for each of its windows. So is who more than half of those in a
  set have asked in vain.
- Who computes with the same settings finds that it agrees, to the bit. Who has others finds *how alike* it
  is, and that is decided on the mean over SEVERAL windows, never on one: of a newcomer over all that its
  drawn auditors say, each window as the kindest of them has it; of one that counts over what each auditor
  says, for itself. If it is ENOUGH, it is found to agree; if not, that auditor is one that asked in vain, and
  the peer is *doubted*: auditors are drawn as if its term were nearly over, those of its own kind first.
- Nobody's term ends where those of half of a set are over: it is audits that fail then.

Changes hold from `window` + 1 rounds on after the set that brings them about. Whoever comes later learns from
sets who is in them, and the newest changes from what most of their makers repeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import mean

from swarmnet.audits.commitment import MOST_CHANGES, WHOLLY_ALIKE, Change, Commitment, Found, Kind, Word
from swarmnet.audits.draw import AUDITORS, auditors_of, is_turn
from swarmnet.identifiers import PeerId
from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.rounds.result_table import tag_of
from swarmnet.run.manifest import Manifest

FEWEST = 2
"""Auditors that must have found somebody to agree, where there are as many: one may be its friend."""
SEVERAL = 3
"""Windows: one of an honest peer alone falls below ENOUGH now and then."""
ENOUGH = 970
"""Thousandths: three windows of an honest peer have 975 at least in other numbers, and of lies 952 at most,
but for one that knows this (docs/benchmarks/audits.md)."""
KIN_SHARE = 3
"""One in so many must compute as somebody does for its auditors to be drawn among them: two friends could say
that they compute like nobody else, and let in whom they like."""
IN_A_ROW = 3
"""Windows that an auditor must have asked for in vain: lines that lose messages lose one in five."""
MOST_KNOWN = 4096
"""Newcomers that are remembered, as many as membership knows."""


@dataclass(frozen=True, slots=True)
class Terms:
    """In rounds."""

    fee: int
    lag: int
    founding: int
    """Of a run: who is in one of its first sets is a founder."""
    due: int
    """So long after it was found to agree a peer is looked into with certainty ..."""
    term: int
    """... and so long after it, it counts no more."""
    kept: int
    """So long what settled is kept, without which nothing can be computed again."""

    @staticmethod
    def of(manifest: Manifest) -> Terms:
        sync, rounds = manifest.sync, manifest.rounds
        between, kept = sync.afresh_rounds / sync.audits, kept_rounds(rounds)
        due, term = ceil(3 * between), ceil(4 * between) + 2 * kept
        return Terms(sync.fee, rounds.window + 1, rounds.snapshot_rounds, due, term, kept)


@dataclass(slots=True)
class _Record:
    """Of one peer."""

    kind: Kind = Kind.NONE
    first: int = -1
    """The round from which on it is of that kind ..."""
    before: Kind = Kind.NONE
    """... and what it was until then."""
    since: int = -1
    """When its term began, if it has not been found to agree since."""
    agreed: dict[bytes, int] = field(default_factory=dict)
    """Of one that counts: who has found it to agree, last up to which round."""
    unanswered: dict[bytes, frozenset[int]] = field(default_factory=dict)
    """Whom it did not answer, in which of the windows since it was found to agree."""
    compared: dict[bytes, dict[int, int]] = field(default_factory=dict)
    """How alike auditors have found its windows, SEVERAL of which are needed ..."""
    unlike: dict[bytes, int] = field(default_factory=dict)
    """... and who has not found these alike enough, last up to which round ..."""
    doubted: dict[bytes, int] = field(default_factory=dict)
    """... and first: the same one raises no other doubt."""
    paid: dict[int, dict[bytes, Found]] = field(default_factory=dict)
    """Of a newcomer's window, by its last round: what was found, by whom."""

    def at(self, round: int) -> Kind:
        return self.kind if round >= self.first else self.before

    def becomes(self, kind: Kind, first: int) -> None:
        self.before, self.kind, self.first, self.since = self.at(first - 1), kind, first, first
        for words in (self.agreed, self.unanswered, self.compared, self.unlike, self.doubted, self.paid):
            words.clear()

    def agreed_until(self, auditors: int) -> int:
        """As so many of them say."""
        rounds = sorted(self.agreed.values(), reverse=True)
        return max(self.since, rounds[auditors - 1]) if len(rounds) >= auditors else self.since

    def hear(self, auditor: bytes, found: Found) -> None:
        """Of one that counts."""
        if found.word is Word.AGREES:
            self._agrees(auditor, found.round)
        elif found.word is Word.UNANSWERED and found.round > self.agreed.get(auditor, -1):
            windows = sorted(self.unanswered.get(auditor, frozenset()) | {found.round})
            self.unanswered[auditor] = frozenset(windows[-IN_A_ROW:])
        elif found.word is Word.ALIKE:
            compared = self.compared.setdefault(auditor, {})
            compared[found.round] = found.likeness
            if len(compared) >= SEVERAL:
                del self.compared[auditor]
                self._was_compared(auditor, max(compared), mean(compared.values()))

    def _agrees(self, auditor: bytes, round: int) -> None:
        self.agreed[auditor] = max(round, self.agreed.get(auditor, -1))
        self.unanswered.pop(auditor, None)
        self.unlike.pop(auditor, None)

    def _was_compared(self, auditor: bytes, round: int, likeness: float) -> None:
        if likeness >= ENOUGH:
            self._agrees(auditor, round)
        else:
            self.unlike[auditor] = round
            self.doubted.setdefault(auditor, round)

    @property
    def asked_in_vain(self) -> set[bytes]:
        """By whom."""
        silent = {peer for peer, windows in self.unanswered.items() if len(windows) >= IN_A_ROW}
        return silent | self.unlike.keys()

    @property
    def is_doubted(self) -> bool:
        """And has not been found to agree since."""
        return max(self.doubted.values(), default=-1) > self.agreed_until(FEWEST)

    def has_paid(self, fee: int, auditors: int) -> bool:
        """So many rounds, to so many."""
        best = [max(found.values(), key=_alike) for found in self.paid.values()]
        said = (each for found in self.paid.values() for each in found.items())
        content = {auditor for auditor, found in said if _alike(found) >= ENOUGH}
        is_several = len(best) >= SEVERAL or all(each.word is Word.AGREES for each in best)
        return (
            sum(each.rounds for each in best) >= fee
            and len(content) >= auditors
            and is_several
            and mean(map(_alike, best)) >= ENOUGH
        )


def _alike(found: Found) -> int:
    return WHOLLY_ALIKE if found.word is Word.AGREES else found.likeness


@dataclass(frozen=True, slots=True)
class _Lot:
    """From what auditors are drawn: a settled set."""

    chain: bytes
    settings: Mapping[bytes, bytes]
    """Of those in it whose words count."""

    def kin(self, peer: bytes, settings: bytes | None) -> list[bytes]:
        """Who has these, but for the peer itself."""
        return [member for member, of in self.settings.items() if of == settings and member != peer]


class Standings:
    """Of one group, in one history."""

    def __init__(self, terms: Terms, settled: int, known: Iterable[bytes] = ()) -> None:
        """Goes on after that round; -1: from the run's beginning. `known`: tags of who was in sets before."""
        self.terms = terms
        self._founding = terms.founding if settled < 0 else settled + 1 - terms.lag
        """Before that round all who contribute are founders; all count for `lag` rounds more."""
        self._records: dict[bytes, _Record] = {}
        self._lots: dict[int, _Lot] = {}
        self._changes: dict[bytes, Change] = {}
        self.know(known, settled)

    def know(self, peers: Iterable[bytes], settled: int) -> None:
        for peer in peers:
            self._records.setdefault(peer, _Record(Kind.JUDGED, since=settled))

    def counts(self, peer: PeerId, round: int) -> bool:
        """Whether its contribution to that round does. As long as nobody is known, everybody's."""
        if round < self._founding + self.terms.lag or not self._records:
            return True
        return self._kind(tag_of(peer), round) is not Kind.NONE

    def judges(self, peer: PeerId, round: int) -> bool:
        """Whether what it says of others counts there."""
        return self._kind(tag_of(peer), round) is Kind.JUDGED

    def is_due(self, peer: PeerId, round: int) -> bool:
        """Whether it has not been found to agree for long, or is doubted: it is looked into with
        certainty."""
        return self._kind(tag_of(peer), round) is not Kind.NONE and (
            round - self.agreed_until(peer) > self.terms.due or self.is_doubted(peer)
        )

    def is_doubted(self, peer: PeerId) -> bool:
        """Whether somebody with other settings has not found its work alike enough, and nobody has found it
        to agree since."""
        record = self._records.get(tag_of(peer))
        return record is not None and record.is_doubted

    def agreed_until(self, peer: PeerId) -> int:
        """The round of one that counts up to which auditors have found it to agree."""
        record = self._records.get(tag_of(peer))
        return record.agreed_until(FEWEST) if record is not None else -1

    def auditors(self, peer: bytes, last: int, settings: bytes | None) -> tuple[bytes, ...]:
        """Who looks into the window of somebody that ends with round `last`, as tags: of those who compute
        with `settings`, if there are enough; None: of all. From the set of the round after it."""
        lot = self._lots.get(last + 1)
        if lot is None:
            return ()
        kin = lot.kin(peer, settings)
        is_enough = len(kin) >= AUDITORS and KIN_SHARE * len(kin) >= len(lot.settings)
        return auditors_of(peer, lot.chain, kin if is_enough else lot.settings)

    def exact_auditors(self, peer: bytes, last: int, settings: bytes) -> tuple[bytes, ...]:
        """Likewise, of those who compute with `settings` alone, if there is one at all."""
        lot = self._lots.get(last + 1)
        return auditors_of(peer, lot.chain, lot.kin(peer, settings)) if lot is not None else ()

    def is_turn(self, peer: bytes, last: int) -> bool:
        """Whether it is due with the window that ends with round `last`, if it is."""
        lot = self._lots.get(last + 1)
        return lot is not None and is_turn(peer, lot.chain)

    @property
    def changes(self) -> tuple[Change, ...]:
        """That this peer repeats."""
        return tuple(self._changes.values())[-MOST_CHANGES:]

    def members(self, round: int) -> frozenset[bytes]:
        """Tags of those that count there."""
        return frozenset(peer for peer, of in self._records.items() if of.at(round) is not Kind.NONE)

    def settled(self, round: int, chain: bytes, said: Mapping[PeerId, Commitment]) -> list[Change]:
        """What is new by it. `said`: by all in the set who have not been convicted."""
        tagged = {tag_of(peer): of for peer, of in said.items()}
        self._meet(round, tagged)
        members = {peer: of for peer, of in tagged.items() if self._kind(peer, round) is Kind.JUDGED}
        self._lots[round] = _Lot(chain, {peer: of.settings for peer, of in members.items()})
        for peer, of in members.items():
            for found in of.findings:
                if found.peer != peer and found.round < round:
                    self._hear(peer, of.settings, found)
        changes = self._learned(round, tagged)
        if round >= self._founding:
            changes += self._judged(round, members)
        for change in changes:
            self._changes.pop(change.peer, None)
            self._changes[change.peer] = change
        self._forget(round - self.terms.kept)
        return changes

    def _kind(self, peer: bytes, round: int) -> Kind:
        record = self._records.get(peer)
        return Kind.NONE if record is None else record.at(round)

    def _meet(self, round: int, said: Iterable[bytes]) -> None:
        """Who is in a set counted there: as a founder, or as others know."""
        is_founding = round < self._founding
        for peer in said:
            record = self._records.get(peer)
            if record is None and (is_founding or round >= self._founding + self.terms.lag):
                record = self._records[peer] = _Record(Kind.JUDGED, since=round)
            elif record is not None and round >= record.first and record.kind is Kind.NONE:
                record.becomes(Kind.JUDGED, round)  # Half of the group has let it in.
            if record is not None and is_founding:
                record.since = max(record.since, round)

    def _hear(self, auditor: bytes, settings: bytes, found: Found) -> None:
        record = self._records.get(found.peer) or self._newcomer(found.peer)
        if record.kind is not Kind.NONE:
            record.hear(auditor, found)
        elif found.word is not Word.UNANSWERED and self._is_drawn(auditor, settings, found):
            record.paid.setdefault(found.round, {})[auditor] = found
            if len(record.paid) > max(self.terms.fee, SEVERAL):
                del record.paid[min(record.paid)]

    def _is_drawn(self, auditor: bytes, settings: bytes, found: Found) -> bool:
        """Of a newcomer's kind nobody knows more than that who says it agrees is of it."""
        of_all = self.auditors(found.peer, found.round, None)
        return auditor in of_all or (
            found.word is Word.AGREES and auditor in self.auditors(found.peer, found.round, settings)
        )

    def _newcomer(self, peer: bytes) -> _Record:
        if len(self._records) >= MOST_KNOWN:
            newcomers = (tag for tag, record in self._records.items() if record.kind is Kind.NONE)
            if (oldest := next(newcomers, None)) is not None:
                del self._records[oldest]
        record = self._records[peer] = _Record()
        return record

    def _learned(self, round: int, said: Mapping[bytes, Commitment]) -> list[Change]:
        """What most who count say, and this peer has not come to itself."""
        makers = [of for peer, of in said.items() if self._kind(peer, round) is not Kind.NONE]
        named = Counter(change for of in makers for change in set(of.changes))
        found = [change for change, count in named.items() if 2 * count > len(makers)]
        learned = []
        for change in sorted(found, key=lambda change: (change.first, change.peer)):
            record = self._records.get(change.peer) or self._newcomer(change.peer)
            if change.first > max(record.first, round - self.terms.kept):
                record.becomes(change.kind, change.first)
                learned.append(change)
        return learned

    def _judged(self, round: int, members: Mapping[bytes, Commitment]) -> list[Change]:
        overdue = sum(self._is_overdue(peer, round, members) for peer in members)
        ends_terms, changes, accusers = 2 * overdue < len(members), [], _accusers(members)
        for peer in sorted(self._records):
            record = self._records[peer]
            if round < record.first:
                continue
            kind = record.kind
            if kind is Kind.NONE:
                if record.has_paid(self.terms.fee, _fewest(peer, members)):
                    kind = Kind.JUDGED
            elif _is_most(record.asked_in_vain | accusers.get(peer, set()), peer, members) or (
                ends_terms and self._is_overdue(peer, round, members)
            ):
                kind = Kind.NONE
            if kind is not record.kind:
                changes.append(Change(peer, round + self.terms.lag, kind))
                record.becomes(kind, round + self.terms.lag)
        return changes

    def _is_overdue(self, peer: bytes, round: int, members: Mapping[bytes, Commitment]) -> bool:
        return round - self._records[peer].agreed_until(_fewest(peer, members)) > self.terms.term

    def _forget(self, until: int) -> None:
        self._lots.pop(until, None)
        for peer in [peer for peer, change in self._changes.items() if change.first < until]:
            del self._changes[peer]
            record = self._records.get(peer)
            if record is not None and record.kind is Kind.NONE and not record.paid:
                del self._records[peer]


def _fewest(peer: bytes, members: Mapping[bytes, Commitment]) -> int:
    """Auditors of it that are needed."""
    return max(1, min(FEWEST, len(members) - (peer in members)))


def _is_most(in_vain: set[bytes], peer: bytes, members: Mapping[bytes, Commitment]) -> bool:
    """Of the others in a set."""
    found = len(in_vain & (members.keys() - {peer}))
    return found >= FEWEST and 2 * found > len(members) - (peer in members)


def _accusers(members: Mapping[bytes, Commitment]) -> dict[bytes, set[bytes]]:
    """By whom they have a proof of that it lied."""
    found: dict[bytes, set[bytes]] = {}
    for auditor, of in members.items():
        for each in of.accused:
            found.setdefault(tag_of(each.peer), set()).add(auditor)
    return found
