"""What records say of the votes and the answers of other peers. All of it are claims, as records are.

A peer's weight is the median of the reports of its stage. Only a peer of a neighbouring stage can compare
its answers, so only these verdicts are shown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from peers.telemetry.console import counted
from peers.telemetry.event import short
from peers.telemetry.snapshot import AnswerVerdict, PeerRow
from protocols.signed.peer_record import PeerRecord
from swarmnet.identifiers import PeerId
from swarmnet.optimizer.agreement.weight_report import (
    FULL_WEIGHT,
    NEWCOMER,
    WeightReport,
    open_report,
    short_tag,
)
from swarmnet.rounds.result_table import tag_key, tag_of

SHOWN_VERDICTS = 4
"""Verdicts about one peer in a snapshot; the others are counted."""
SHOWN_DOUBTS = 12
"""Sentences in a snapshot; the others are counted."""
LOW_WEIGHT = 0.5
"""A peer whose votes weigh less is named."""


@dataclass(frozen=True, slots=True)
class Judgements:
    """What the records of present peers say of others."""

    reports: Mapping[int, Mapping[PeerId, WeightReport]]
    """Stage -> peer -> its report on the weights of votes."""
    verdicts: Mapping[PeerId, tuple[tuple[PeerRecord, int, int], ...]]
    """Peer -> who avoided it, comparisons that differed, and comparisons."""

    @classmethod
    def of(cls, records: Iterable[PeerRecord]) -> Judgements:
        """Return what these records say."""
        reports: dict[int, dict[PeerId, WeightReport]] = defaultdict(dict)
        verdicts: dict[PeerId, list[tuple[PeerRecord, int, int]]] = defaultdict(list)
        for record in records:
            report = open_report(record.vote_weights)
            if report is not None and record.stage >= 0:
                reports[record.stage][PeerId(record.peer)] = report
            for peer, differed, compared in record.avoids:
                verdicts[PeerId(peer)].append((record, differed, compared))
        return cls(reports, {peer: tuple(found) for peer, found in verdicts.items()})

    def judged(self, row: PeerRow) -> PeerRow:
        """Return the row with what others say of this peer."""
        verdicts = [
            AnswerVerdict(
                by=record.peer,
                what="gradients" if record.stage < row.stage else "hidden states",
                differed=differed,
                compared=compared,
            )
            for record, differed, compared in self.verdicts.get(PeerId(row.peer), ())
            if record.stage >= 0 and abs(record.stage - row.stage) == 1
        ]
        mark = self._mark(row)
        return replace(
            row,
            vote_weight=None if mark is None else 0.0 if mark == NEWCOMER else round(mark / FULL_WEIGHT, 2),
            is_new_voter=mark == NEWCOMER,
            avoided_by=len(verdicts),
            verdicts=tuple(verdicts[:SHOWN_VERDICTS]),
        )

    def _mark(self, row: PeerRow) -> int | None:
        """Return the peer's weight or `NEWCOMER`: the median of the reports; None without one."""
        name = short_tag(tag_key(tag_of(PeerId(row.peer))))
        marks = [
            report.marks.get(name, NEWCOMER) if report.marks else FULL_WEIGHT
            for report in self.reports.get(row.stage, {}).values()
            if report.is_complete or name in report.marks
        ]
        return median_low(marks) if marks and row.role == "worker" else None

    def dissenters(self) -> dict[int, tuple[int, list[PeerId]]]:
        """Return, for each stage whose reports on one round differ, that round and the peers that report
        other weights than most. Of equal numbers, the peers with the larger ids differ."""
        found: dict[int, tuple[int, list[PeerId]]] = {}
        for stage, reports in self.reports.items():
            rounds: dict[int, dict[PeerId, WeightReport]] = defaultdict(dict)
            for peer, report in sorted(reports.items()):
                rounds[report.round][peer] = report
            for number, same in rounds.items():
                contents = Counter(tuple(sorted(report.marks.items())) for report in same.values())
                usual = contents.most_common(1)[0][0]
                others = [peer for peer, one in same.items() if tuple(sorted(one.marks.items())) != usual]
                if len(others) > len(found.get(stage, (0, []))[1]):
                    found[stage] = number, others
        return found


def doubts(rows: Iterable[PeerRow], judgements: Judgements, run_id: str) -> tuple[str, ...]:
    """Return what records say against present peers, as sentences. The last one says how to ban a peer."""
    said = []
    for stage, (number, others) in sorted(judgements.dissenters().items()):
        names = ", ".join(map(short, others[:SHOWN_VERDICTS]))
        said.append(
            f"stage {stage}: {counted(len(others), 'peer')} ({names}) and the others report different "
            f"weights of votes after round {number}: a fork, or a false report."
        )
    doubted = [row for row in rows if row.state != "gone"]
    doubted.sort(key=lambda row: (-row.avoided_by, row.vote_weight or 0.0, row.peer))
    for row in doubted:
        reasons = _reasons(row)
        if reasons:
            name = f"{row.name} " if row.name else ""
            said.append(f"{name}({row.peer}, stage {row.stage}): {'; '.join(reasons)}.")
    if not said:
        return ()
    more = len(said) - SHOWN_DOUBTS
    rest = (f"and {counted(more, 'sentence')} more.",) if more > 0 else ()
    advice = f"These are claims. The owner can ban a peer: swarmnet order ban {run_id} PEER"
    return (*said[:SHOWN_DOUBTS], *rest, advice)


def _reasons(row: PeerRow) -> list[str]:
    """Return what records say against one peer."""
    reasons = []
    if row.vote_weight is not None and row.vote_weight < LOW_WEIGHT and not row.is_new_voter:
        weight = f"{row.vote_weight:.0%}"
        reasons.append(f"its votes weigh {weight}, because they disagree with others' or repeat them")
    if row.avoided_by:
        each = [
            f"{short(one.by)}: {one.what} differed in {one.differed} of {one.compared} comparisons"
            for one in row.verdicts
        ]
        more = row.avoided_by - len(each)
        each += [f"and {more} more"] * (more > 0)
        reasons.append(f"avoided by {counted(row.avoided_by, 'peer')} ({', '.join(each)})")
    return reasons
