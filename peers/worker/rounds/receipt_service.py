"""Receipts between the peers of a stage: signed for others, accepted from others, kept on this peer's disk.

After every `snapshot_interval` settled rounds a peer counts the settled contributions of each contributor. It
signs that count and sends it to the contributor as a receipt. `swarmnet credit` adds up what is kept here.

Strangers may send receipts too. A receipt is checked only where it can be owed, and its signature is verified
last. A thread writes the file once a second: a crash loses the last second, a normal exit nothing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.config.run_file import SignedManifest
from peers.network.message_router import handles
from peers.network.peer_links import PeerLinks
from peers.telemetry import log_events
from protocols.errors import Backlog, Malformed, WireError
from protocols.messages.table import ReceiptMessage
from protocols.signed.envelope import claimed
from protocols.signed.identity import Identity
from protocols.signed.peer_record import MAX_RECEIPTS
from protocols.signed.records import ANNOUNCE_SECONDS
from protocols.signed.signed_receipts import open_receipt, seal_receipt
from swarmnet.identifiers import PeerId
from swarmnet.rounds.receipt_rules import (
    BLOCKS_BACK,
    BLOCKS_KEPT,
    SIGNERS_KEPT,
    ContributionCounter,
    CreditedBlock,
    ReceiptBook,
    SettledContributors,
)

if TYPE_CHECKING:
    from peers.worker.rounds.operations import RoundSettled

FILE_NAME = "receipts.jsonl"
MAX_UNDUE, MAX_UNDUE_PEERS = 32, 1024
"""Limit on unexpected receipts of one peer in a block, and on the peers for which they are counted. An honest
peer may deliver receipts of some blocks at once, a few for each stage that it served."""
MAKERS_OWED, RECEIPTS_OWED = 1024, BLOCKS_BACK
"""Receipts that wait until their contributor is linked: for this many contributors, this many each. The
contributor still accepts that many."""
EARLY_SIGNERS = 64
"""Peers whose receipts wait here until our own link to them is open, a moment after theirs. This is more than
a peer has neighbours in its group; a receipt has 248 bytes at most."""
WRITE_SECONDS = 1.0
"""Interval between writes, as for the event log: a crash loses this much."""
LINES_WAITING = 1024
"""Lines that may wait for a stalled disk: 200 blocks of four signers and the own count, hours of a run.
Beyond that the whole file is rewritten once that is possible."""
LINES_ADDED = 4096
"""After this many added lines (800 blocks) the file is rewritten without superseded and old lines, so it has
10 MB at most."""
RECENT_SECONDS = 2 * ANNOUNCE_SECONDS
"""Age up to which receipts go into this peer's record, so that each stands in two records."""
_MAX_LINES = 2 * BLOCKS_KEPT * SIGNERS_KEPT
"""A longer file was not written by this program; a line has about 400 bytes."""


@dataclass(slots=True)
class ReceiptsFile:
    """The content of the file."""

    book: ReceiptBook
    lines: dict[tuple[int, int], dict[PeerId, str]] = field(default_factory=dict)
    """Lines as in `book`: by stage and block, then by signer."""
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens of own contributions, by stage and block, as this peer counted them."""
    made: dict[tuple[int, int], int] = field(default_factory=dict)
    """Own contributions, by stage and block, in the order in which the blocks were counted."""
    older_tokens: int = 0
    """Tokens of own contributions of older blocks, which `tokens` no longer has."""
    first_seconds: float | None = None
    """Swarm time at which the first receipt was signed; None without receipts."""
    unusable: int = 0
    """Number of lines that are no receipt for this peer."""


def read(path: Path, signed: SignedManifest, me: PeerId) -> ReceiptsFile:
    """Read the file and verify every receipt again. A missing file counts as empty. Raises UserError."""
    kept = ReceiptsFile(ReceiptBook(signed.manifest.rounds.snapshot_interval))
    for line in _lines(path):
        try:
            _take_line(kept, line, signed, me)
        except (WireError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            kept.unusable += 1
    return kept


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for _, line in zip(range(_MAX_LINES), file, strict=False):
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _take_line(kept: ReceiptsFile, line: str, signed: SignedManifest, me: PeerId) -> None:
    """Add one line. Raises WireError, ValueError, KeyError, TypeError, OverflowError or RecursionError if it
    is invalid."""
    content = json.loads(line)
    if "older" in content:
        kept.book.older += int(content["older"])
        kept.older_tokens += int(content.get("tokens", 0))
        return
    if "own" in content:
        _count(kept, CreditedBlock(*(int(content[name]) for name in ("stage", "own", "made", "tokens"))))
        return
    take(kept, base64.b64decode(content["receipt"]), signed, me)


def _count(kept: ReceiptsFile, counted: CreditedBlock) -> None:
    key = (counted.stage, counted.block)
    kept.made[key] = kept.made.get(key, 0) + counted.contributions
    kept.tokens[key] = kept.tokens.get(key, 0) + counted.tokens


def take(
    kept: ReceiptsFile, data: bytes, signed: SignedManifest, me: PeerId, sender: PeerId | None = None
) -> str:
    """Add a receipt; returns its line for the file, or an empty string if it is not new. Raises WireError."""
    rounds = signed.manifest.rounds.snapshot_interval
    receipt, at = open_receipt(data, signed.run_id, rounds)
    if receipt.contributor != me or (sender is not None and receipt.signer != sender):
        raise Malformed("a receipt for another contributor, or by another signer than its sender")
    if not kept.book.take(receipt):
        return ""
    line = json.dumps(
        {
            "stage": receipt.stage,
            "first": receipt.first,
            "last": receipt.last,
            "contributions": receipt.contributions,
            "signer": receipt.signer,
            "time": at,
            "receipt": base64.b64encode(data).decode(),
        }
    )
    kept.lines.setdefault((receipt.stage, receipt.first // rounds), {})[receipt.signer] = line
    if len(kept.lines) > len(kept.book.blocks):
        for gone in kept.lines.keys() - kept.book.blocks.keys():
            del kept.lines[gone]
    kept.first_seconds = at if kept.first_seconds is None else min(at, kept.first_seconds)
    return line


@dataclass(eq=False, kw_only=True)
class Receipts:
    """The receipts of one worker: those it signs and those it gets. `path` None keeps nothing on disk; `now`
    returns the swarm's time in seconds."""

    identity: Identity
    signed: SignedManifest
    stage: int
    path: Path | None
    neighbourhood: PeerLinks
    now: Callable[[], float]
    log_event: log_events.LogEvent

    def __post_init__(self) -> None:
        rounds = self.signed.manifest.rounds.snapshot_interval
        self.contributors = SettledContributors(self.identity.peer_id, self.stage, rounds)
        self.kept = (
            read(self.path, self.signed, self.identity.peer_id)
            if self.path is not None
            else ReceiptsFile(ReceiptBook(rounds))
        )
        if self.kept.unusable:
            self.log_event(log_events.ReceiptsUnusable(lines=self.kept.unusable))
        self.own = ContributionCounter(self.stage, rounds, self.kept.made)
        self.made = self.own.made
        self._owed: OrderedDict[PeerId, list[bytes]] = OrderedDict()
        self._early: OrderedDict[PeerId, list[ReceiptMessage]] = OrderedDict()
        self._undue: Counter[PeerId] = Counter()
        self._lines: list[str] = []
        """Lines that are not on disk yet."""
        self._added = 0
        """Lines added to the file since it was last rewritten."""
        self._news = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        if self.path is not None and self.path.exists():
            _write_anew(self.path, *_content(self.kept))

    # -- signed for others ----------------------------------------------------------------------------

    def settled(self, settled: RoundSettled) -> None:
        """Called when a round has settled here: sign the receipts that are due at the end of a block."""
        if (settled.round + 1) % self.own.block_rounds == 0:
            self._undue.clear()
        contributors = settled.contributors
        self._write_down(self.own.settled(settled.round, self.identity.peer_id in contributors))
        for receipt in self.contributors.settled(settled.round, contributors):
            data = seal_receipt(self.identity, self.signed.run_id, receipt, self.now())
            if not self.neighbourhood.post(receipt.contributor, "group", ReceiptMessage(data)):
                self._owe(receipt.contributor, data)

    def _write_down(self, counts: Iterable[CreditedBlock]) -> None:
        for counted in counts:
            _count(self.kept, counted)
            self._append(_own_line(counted))

    def _owe(self, contributor: PeerId, data: bytes) -> None:
        owed = self._owed.setdefault(contributor, [])
        owed.append(data)
        del owed[:-RECEIPTS_OWED]
        while len(self._owed) > MAKERS_OWED:
            self._owed.popitem(last=False)

    def linked(self, peer: PeerId) -> None:
        """Called when a peer can be sent to: send the receipts owed to it; check those it sent early."""
        for data in self._owed.pop(peer, ()):
            self.neighbourhood.post(peer, "group", ReceiptMessage(data))
        for message in self._early.pop(peer, ()):
            with contextlib.suppress(Backlog):  # Its next message ends its link.
                self.message(peer, message, b"")

    # -- taken from others ----------------------------------------------------------------------------

    @handles(ReceiptMessage)
    def message(self, peer: PeerId, message: ReceiptMessage, _body: bytes = b"") -> None:
        """Accept a receipt from its signer. An unexpected one is only counted, since an honest one may come
        late. Raises Backlog if a peer sends more of them than can be owed."""
        known, line = self.neighbourhood.known().get(peer), ""
        try:
            if known is None or not self._is_due(peer, known.stage, message.receipt, known.linked):
                self._not_due(peer)
            elif known.linked:
                line = take(self.kept, message.receipt, self.signed, self.identity.peer_id, peer)
            else:
                self._keep_early(peer, message)
        except Backlog:
            raise
        except WireError as error:
            self.neighbourhood.refused(peer, error.code, str(error))
        if line:
            self.log_event(
                log_events.ReceiptArrived(signer=peer, accepted=self.kept.book.total().contributions)
            )
            self._append(line)

    def _not_due(self, peer: PeerId) -> None:
        self.neighbourhood.traffic.refused["not_due"] += 1
        if len(self._undue) >= MAX_UNDUE_PEERS:
            self._undue.clear()
        self._undue[peer] += 1
        if self._undue[peer] > MAX_UNDUE:
            raise Backlog(f"more than {MAX_UNDUE} receipts that are not owed to this peer")

    def _is_due(self, peer: PeerId, stage_of_peer: int, data: bytes, linked: bool) -> bool:
        """Return whether a receipt is worth verifying: signed by a peer of the same stage, for a block that
        is still accepted. Raises Malformed."""
        sender, stage, round = claimed(data)
        if sender != peer:
            raise Malformed("a receipt by another signer than its sender")
        if stage != stage_of_peer or not self.own.takes(stage, round):
            return False
        if not self.kept.book.has_place(peer, stage, round):
            return False
        return not linked or self.own.may_check(peer, stage, round)

    def _keep_early(self, peer: PeerId, message: ReceiptMessage) -> None:
        """Keep a receipt until our own link to its signer is open (again)."""
        early = self._early.setdefault(peer, [])
        early.append(message)
        del early[:-RECEIPTS_OWED]
        while len(self._early) > EARLY_SIGNERS:
            self._early.popitem(last=False)

    def newest(self) -> tuple[bytes, ...]:
        """Return receipts for this peer's record: one of each of the newest blocks, oldest first. All but the
        newest must be recent."""
        found: list[bytes] = []
        for held in islice(reversed(self.kept.lines.values()), MAX_RECEIPTS):
            best = max(map(json.loads, held.values()), key=lambda line: line["contributions"])
            if found and best["time"] < self.now() - RECENT_SECONDS:
                break
            found.append(base64.b64decode(best["receipt"]))
        return tuple(reversed(found))

    # -- on disk --------------------------------------------------------------------------------------

    def _append(self, line: str) -> None:
        if self.path is None:
            return
        if len(self._lines) >= LINES_WAITING:
            self._lines = []
            self._added = LINES_ADDED
        self._lines.append(line)
        self._news.set()

    async def keep_forever(self) -> None:
        """Write new lines once a second, until cancelled."""
        while True:
            await self._news.wait()
            await asyncio.sleep(WRITE_SECONDS)
            self._news.clear()
            self._writing = asyncio.create_task(self._write())
            await asyncio.shield(self._writing)

    async def close(self) -> None:
        """Write the remaining lines. Called after `keep_forever` was cancelled."""
        self._write_down(self.own.rest())
        if self._writing is not None:
            await self._writing
        await self._write()

    async def _write(self) -> None:
        """Write the waiting lines. A full disk does not stop training and loses no receipt: the file is
        rewritten once there is space."""
        lines = self._lines
        self._lines = []
        if self.path is None or not lines:
            return
        self._added += len(lines)
        try:
            if self._added > LINES_ADDED:
                self._added = 0
                await asyncio.to_thread(_write_anew, self.path, *_content(self.kept))
            else:
                await asyncio.to_thread(_append_to, self.path, lines)
        except (OSError, UserError) as error:
            self._added = LINES_ADDED
            self.log_event(log_events.ReceiptNotKept(reason=str(error)))


def _content(kept: ReceiptsFile) -> tuple[tuple[int, int], list[CreditedBlock], list[str]]:
    """Return what to keep: contributions and own tokens of older blocks, own counts, receipt lines. Own
    counts beyond BLOCKS_KEPT become a sum."""
    for old in list(kept.made)[:-BLOCKS_KEPT]:
        kept.older_tokens += kept.tokens.pop(old)
        del kept.made[old]
    own = [CreditedBlock(*key, made, kept.tokens[key]) for key, made in kept.made.items()]
    return (
        (kept.book.older, kept.older_tokens),
        own,
        [line for held in kept.lines.values() for line in held.values()],
    )


def _write_anew(
    path: Path, older: tuple[int, int], own: Iterable[CreditedBlock], lines: Iterable[str]
) -> None:
    """Write the whole file. `older`: contributions and own tokens of older blocks. Raises UserError."""
    first = [json.dumps(dict(zip(("older", "tokens"), older, strict=True)))] if any(older) else []
    counts = (_own_line(counted) for counted in own)
    write_atomically(path, "".join(f"{line}\n" for line in (*first, *counts, *lines)).encode())


def _append_to(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def _own_line(counted: CreditedBlock) -> str:
    return json.dumps(
        {
            "stage": counted.stage,
            "own": counted.block,
            "made": counted.contributions,
            "tokens": counted.tokens,
        }
    )


def own_tokens(kept: ReceiptsFile, stage: int | None = None) -> int:
    """Return the tokens of own contributions that have settled, in a stage or (None) in all, by this peer's
    own count, confirmed or not. Those of older blocks count only in all stages together."""
    if stage is None:
        return kept.older_tokens + sum(kept.tokens.values())
    return sum(tokens for (at, _), tokens in kept.tokens.items() if at == stage)


def confirmed_tokens(kept: ReceiptsFile) -> int:
    """Return the tokens of own contributions in the blocks that others confirmed, by this peer's own
    count."""
    return sum(kept.tokens.get(key, 0) for key in kept.book.blocks)


def summary(kept: ReceiptsFile) -> dict[str, Any]:
    """Return plain data for `swarmnet credit`."""
    total = kept.book.total()
    return {
        "accepted": total.contributions,
        "tokens": confirmed_tokens(kept),
        "signers": total.signers,
        "receipts": total.receipts,
        "blocks": total.blocks,
        "since": kept.first_seconds,
        "unusable": kept.unusable,
        "made": sum(kept.made.values()),
    }
