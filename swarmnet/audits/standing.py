"""Whose contributions count where work is audited: who has been there from the beginning, and whoever's work
others have found to agree; as long as they go on finding it.

A fold over what settled, so that all who have the same sets come to the same: who contributed, and the
findings that peers signed beside their own contributions. That somebody lied is a matter of proofs
(convictions.py). That somebody's work *agrees* is a word, and nobody needs to be accused who says nothing:

- Who was in the first sets counts (a *founder*). Anybody else counts for nothing until auditors that all know
  (draw.py) have found `sync.fee` rounds of it to agree, two of them if there are two who compute as it does.
- Standing is for a *term*. Who has not been found to agree in it, for whatever reason, is a newcomer again;
  before it is over, such auditors are drawn for each of its windows. So is who has other settings than those
  it was let in with, and of whom more than half of those who could judge have asked in vain.
- Whoever computes like nobody who counts is a *stranger*. It is let in after STRANGERS fees of rounds that it
  could show, strangers are at most one for two whose work can be looked into, and who is away for a term
  makes room. What they say of others counts for nothing.
- Where half of a set or more computes like nobody else, audits are blind: nobody loses its standing, and as
  many strangers are let in as come. Nor does anybody's term end where those of half of a set are over: it is
  audits that fail then.

Changes hold from `window` + 1 rounds on after the set that brings them about. Whoever comes later learns from
sets who is in them, and the newest changes from what most of their makers repeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

from swarmnet.audits.commitment import MOST_CHANGES, Change, Commitment, Found, Kind, Word
from swarmnet.audits.draw import auditors_of, is_turn
from swarmnet.identifiers import PeerId
from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.rounds.result_table import tag_of
from swarmnet.run.manifest import Manifest

FEWEST = 2
"""Auditors that must have found somebody to agree, where there are as many: one may be its friend."""
STRANGERS = 4
"""Fees."""
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
    settings: bytes = b""
    """With which it was let in; empty: not known yet."""
    since: int = -1
    """When its term began, if it has not been found to agree since."""
    agreed: dict[bytes, int] = field(default_factory=dict)
    """Of one that counts: who has found it to agree, last up to which round."""
    unanswered: dict[bytes, frozenset[int]] = field(default_factory=dict)
    """Whom it did not answer, in which of the windows since it was found to agree."""
    paid: dict[int, tuple[int, frozenset[bytes]]] = field(default_factory=dict)
    """Of a newcomer's window, by its last round: its rounds, and who has found them to agree."""
    shown: dict[int, int] = field(default_factory=dict)
    """Likewise, of those that nobody could judge."""

    def at(self, round: int) -> Kind:
        return self.kind if round >= self.first else self.before

    def becomes(self, kind: Kind, first: int) -> None:
        self.before, self.kind, self.first, self.since = self.at(first - 1), kind, first, first
        for words in (self.agreed, self.unanswered, self.paid, self.shown):
            words.clear()

    def agreed_until(self, auditors: int) -> int:
        """As so many of them say."""
        rounds = sorted(self.agreed.values(), reverse=True)
        return max(self.since, rounds[auditors - 1]) if len(rounds) >= auditors else self.since


@dataclass(frozen=True, slots=True)
class _Lot:
    """From what auditors are drawn: a settled set."""

    chain: bytes
    settings: Mapping[bytes, bytes]
    """Of those in it whose words count."""


@dataclass(frozen=True, slots=True)
class _Sight:
    """What those of a set whose words count can look into."""

    members: Mapping[bytes, Commitment]
    kinds: Counter[bytes]
    sighted: int
    """So many in it have somebody who computes as they do ..."""
    unsighted: int
    """... and so many others count."""
    overdue: int
    """Of those in it so many terms are over."""

    @property
    def is_blind(self) -> bool:
        return self.sighted <= self.unsighted

    @property
    def ends_terms(self) -> bool:
        return 2 * self.overdue < len(self.members)

    def judges(self, peer: bytes, settings: bytes) -> int:
        of = self.members.get(peer)
        return self.kinds[settings] - (of is not None and of.settings == settings)


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
        """Whether it has not been found to agree for long: it is looked into with certainty."""
        return self._kind(tag_of(peer), round) is not Kind.NONE and (
            round - self.agreed_until(peer) > self.terms.due
        )

    def agreed_until(self, peer: PeerId) -> int:
        """The round of one that counts up to which auditors have found it to agree."""
        record = self._records.get(tag_of(peer))
        return record.agreed_until(FEWEST) if record is not None else -1

    def auditors(self, peer: bytes, last: int, settings: bytes | None) -> tuple[bytes, ...]:
        """Who looks into the window of somebody that ends with round `last`, as tags: of those who compute
        with `settings`; None: of all. From the set of the round after it."""
        lot = self._lots.get(last + 1)
        if lot is None:
            return ()
        those = (member for member, of in lot.settings.items() if settings in (None, of))
        return auditors_of(peer, lot.chain, those)

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
                self._hear(peer, of.settings, found)
        changes = self._learned(round, tagged)
        if round >= self._founding:
            changes += self._judged(round, tagged, members)
        for change in changes:
            self._changes.pop(change.peer, None)
            self._changes[change.peer] = change
        self._forget(round - self.terms.kept)
        return changes

    def _kind(self, peer: bytes, round: int) -> Kind:
        record = self._records.get(peer)
        return Kind.NONE if record is None else record.at(round)

    def _meet(self, round: int, said: Mapping[bytes, Commitment]) -> None:
        """Who is in a set counted there: as a founder, or as others know."""
        is_founding = round < self._founding
        for peer, of in said.items():
            record = self._records.get(peer)
            if record is None and (is_founding or round >= self._founding + self.terms.lag):
                record = self._records[peer] = _Record(Kind.JUDGED, since=round)
            elif record is not None and round >= record.first and record.kind is Kind.NONE:
                record.becomes(Kind.JUDGED, round)  # Half of the group has let it in.
                record.settings = b""
            if record is None:
                continue
            if is_founding or not record.settings:
                record.settings, record.since = of.settings, max(record.since, round)
            if record.kind is Kind.STRANGER:
                record.since = max(record.since, round)

    def _hear(self, auditor: bytes, settings: bytes, found: Found) -> None:
        if found.peer == auditor:
            return
        record = self._records.get(found.peer) or self._newcomer(found.peer)
        if record.kind is Kind.NONE:
            self._hear_of_newcomer(auditor, settings, found, record)
        elif found.word is Word.AGREES:
            record.agreed[auditor] = max(found.round, record.agreed.get(auditor, -1))
            record.unanswered.pop(auditor, None)
        elif found.word is Word.UNANSWERED and found.round > record.agreed.get(auditor, -1):
            windows = sorted(record.unanswered.get(auditor, frozenset()) | {found.round})
            record.unanswered[auditor] = frozenset(windows[-IN_A_ROW:])

    def _hear_of_newcomer(self, auditor: bytes, settings: bytes, found: Found, record: _Record) -> None:
        agrees = found.word is Word.AGREES
        if auditor not in self.auditors(found.peer, found.round, settings if agrees else None):
            return
        if agrees:
            if record.settings != settings:
                record.settings = settings
                record.paid.clear()
            rounds, by = record.paid.get(found.round, (found.rounds, frozenset()))
            record.paid[found.round] = rounds, by | {auditor}
        elif found.word is Word.FOREIGN:
            record.shown[found.round] = found.rounds
        for of_window, most in ((record.paid, self.terms.fee), (record.shown, STRANGERS * self.terms.fee)):
            if len(of_window) > most:
                del of_window[min(of_window)]

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
                record.settings = b""
                learned.append(change)
        return learned

    def _judged(
        self, round: int, said: Mapping[bytes, Commitment], members: Mapping[bytes, Commitment]
    ) -> list[Change]:
        sight, changes = self._sight(round, said, members), []
        strangers = sum(record.kind is Kind.STRANGER for record in self._records.values())
        alone = len(members) - sight.sighted
        room = MOST_KNOWN if sight.is_blind else sight.sighted // 2 - alone - strangers
        for peer in sorted(self._records):
            record = self._records[peer]
            if round < record.first:
                continue
            kind = record.kind
            if kind is Kind.NONE:
                kind = self._let_in(peer, record, sight, room)
                room -= kind is Kind.STRANGER
            elif not sight.is_blind and self._is_over(peer, record, round, said.get(peer), sight):
                kind = Kind.NONE
            if kind is not record.kind:
                changes.append(Change(peer, round + self.terms.lag, kind))
                record.becomes(kind, round + self.terms.lag)
                record.settings = record.settings if kind is Kind.JUDGED else b""
        return changes

    def _sight(
        self, round: int, said: Mapping[bytes, Commitment], members: Mapping[bytes, Commitment]
    ) -> _Sight:
        kinds = Counter(of.settings for of in members.values())
        judges = {peer: kinds[of.settings] - 1 for peer, of in members.items()}
        sighted = [peer for peer, others in judges.items() if others]
        counting = sum(self._kind(peer, round) is not Kind.NONE for peer in said)
        overdue = sum(self._is_overdue(self._records[peer], round, judges[peer]) for peer in sighted)
        return _Sight(members, kinds, len(sighted), counting - len(sighted), overdue)

    def _let_in(self, peer: bytes, record: _Record, sight: _Sight, room: int) -> Kind:
        auditors = frozenset[bytes]().union(*(by for _, by in record.paid.values()))
        enough = max(1, min(FEWEST, sight.judges(peer, record.settings)))
        if sum(rounds for rounds, _ in record.paid.values()) >= self.terms.fee and len(auditors) >= enough:
            return Kind.JUDGED
        if room > 0 and sum(record.shown.values()) >= STRANGERS * self.terms.fee:
            return Kind.STRANGER
        return Kind.NONE

    def _is_over(
        self, peer: bytes, record: _Record, round: int, said: Commitment | None, sight: _Sight
    ) -> bool:
        """Its standing."""
        if said is not None and said.settings != record.settings:
            return True
        judges = sight.judges(peer, record.settings)
        if not judges:
            return record.kind is Kind.STRANGER and round - record.since > self.terms.term
        in_vain = [auditor for auditor, windows in record.unanswered.items() if len(windows) >= IN_A_ROW]
        like_it = (sight.members.get(auditor) for auditor in in_vain)
        silent = sum(of is not None and of.settings == record.settings for of in like_it)
        if silent >= FEWEST and 2 * silent > judges:
            return True
        return sight.ends_terms and self._is_overdue(record, round, judges)

    def _is_overdue(self, record: _Record, round: int, judges: int) -> bool:
        return round - record.agreed_until(min(FEWEST, judges)) > self.terms.term

    def _forget(self, until: int) -> None:
        self._lots.pop(until, None)
        for peer in [peer for peer, change in self._changes.items() if change.first < until]:
            del self._changes[peer]
            record = self._records.get(peer)
            if record is not None and record.kind is Kind.NONE and not (record.paid or record.shown):
                del self._records[peer]
