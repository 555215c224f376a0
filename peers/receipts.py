"""Receipts between the peers of a stage: signed for others, taken from others, kept on the own disk.

After every `snapshot_rounds` settled rounds a peer signs, for each maker of contributions in them, how many
it has counted, and sends it to the maker. `swarmnet me` adds up what is kept here.
"""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.errors import UserError
from peers.files import write_atomically
from peers.neighbourhood import Neighbourhood
from peers.run_file import SignedManifest
from protocols.errors import Malformed, WireError
from protocols.identity import Identity
from protocols.messages import ReceiptIs
from protocols.receipts import open_receipt, seal_receipt
from swarmnet.identifiers import PeerId
from swarmnet.receipts import BLOCKS_KEPT, SIGNERS_KEPT, ReceiptBook, SettledMakers

if TYPE_CHECKING:
    from peers.update_work import Settled

FILE_NAME = "receipts.jsonl"
MAKERS_OWED, RECEIPTS_OWED = 1024, 4
"""Receipts that wait for their maker to be linked: for so many makers, so many each."""
_MOST_LINES = 2 * BLOCKS_KEPT * SIGNERS_KEPT
"""A longer file is not ours; a line has about 400 bytes."""


@dataclass(slots=True)
class Kept:
    """The file's content."""

    book: ReceiptBook
    lines: dict[tuple[int, int, PeerId], str] = field(default_factory=dict)
    """By stage, block and signer."""
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of the own contributions, by stage and block, as this peer counted them."""
    made: dict[tuple[int, int], int] = field(default_factory=dict)
    first_seconds: float | None = None
    """When the first receipt was signed, swarm time."""
    unusable: int = 0
    """Lines that are no receipt for this peer."""


def read(path: Path, signed: SignedManifest, me: PeerId) -> Kept:
    """What is kept; every receipt is verified again. A missing file is an empty one."""
    kept = Kept(ReceiptBook(signed.manifest.rounds.snapshot_rounds))
    for line in _lines(path):
        try:
            _take_line(kept, line, signed, me)
        except (WireError, ValueError, KeyError, TypeError):
            kept.unusable += 1
    return kept


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for _, line in zip(range(_MOST_LINES), file, strict=False):
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _take_line(kept: Kept, line: str, signed: SignedManifest, me: PeerId) -> None:
    """Raises WireError, ValueError, KeyError or TypeError for what is no receipt."""
    content = json.loads(line)
    if "older" in content:
        kept.book.older += int(content["older"])
        return
    if "own" in content:
        key = (int(content["stage"]), int(content["own"]))
        kept.made[key] = kept.made.get(key, 0) + int(content["made"])
        kept.tokens[key] = kept.tokens.get(key, 0) + int(content["tokens"])
        return
    take(kept, base64.b64decode(content["receipt"]), signed, me)


def take(kept: Kept, data: bytes, signed: SignedManifest, me: PeerId, sender: PeerId | None = None) -> str:
    """Add a receipt; its line for the file, or nothing if it is no news. Raises WireError."""
    rounds = signed.manifest.rounds.snapshot_rounds
    receipt, at = open_receipt(data, signed.run_id, rounds)
    if receipt.maker != me or (sender is not None and receipt.signer != sender):
        raise Malformed("a receipt for somebody else, or signed by somebody else")
    if not kept.book.take(receipt):
        return ""
    line = json.dumps({
        "stage": receipt.stage, "first": receipt.first, "last": receipt.last,
        "contributions": receipt.contributions, "signer": receipt.signer, "time": at,
        "receipt": base64.b64encode(data).decode(),
    })  # fmt: skip
    kept.lines[receipt.stage, receipt.first // rounds, receipt.signer] = line
    kept.first_seconds = at if kept.first_seconds is None else min(at, kept.first_seconds)
    return line


class Receipts:
    """One per worker."""

    def __init__(
        self,
        identity: Identity,
        signed: SignedManifest,
        stage: int,
        path: Path | None,
        neighbourhood: Neighbourhood,
        now: Callable[[], float],
        note: Callable[..., None],
    ) -> None:
        """`path` None keeps nothing on disk; `now`: the swarm's time in seconds."""
        self.identity, self.signed, self.stage = identity, signed, stage
        self.path = path
        self.neighbourhood, self.now, self.note = neighbourhood, now, note
        self.block_rounds = signed.manifest.rounds.snapshot_rounds
        self.makers = SettledMakers(identity.peer_id, stage, self.block_rounds)
        empty = Kept(ReceiptBook(self.block_rounds))
        self.kept = read(path, signed, identity.peer_id) if path is not None else empty
        if self.path is not None and self.kept.unusable:
            self.note("receipts_unusable", lines=self.kept.unusable)
        self._owed: OrderedDict[PeerId, list[bytes]] = OrderedDict()
        self._tokens: dict[int, int] = {}
        """Of the own contributions that have not settled, by round."""
        self._block = [0, 0]
        """Own contributions that settled in this block, and their tokens; not on disk yet."""
        self.prune()

    def made(self, round: int, tokens: int) -> None:
        """An own contribution, and how many tokens it stands for."""
        self._tokens[round] = tokens
        while len(self._tokens) > 4 * self.block_rounds + 64:
            del self._tokens[min(self._tokens)]

    def settled(self, settled: Settled) -> None:
        """A round settled here: sign what is due at the end of a block."""
        makers = [reference.peer for reference in settled.references]
        due = self.makers.settled(settled.round, makers)
        tokens = self._tokens.pop(settled.round, None)
        if tokens is not None and self.identity.peer_id in makers:
            self._block = [self._block[0] + 1, self._block[1] + tokens]
        if (settled.round + 1) % self.block_rounds == 0:
            self._count_own(settled.round // self.block_rounds)
        for receipt in due:
            data = seal_receipt(self.identity, self.signed.run_id, receipt, self.now())
            if not self.neighbourhood.post(receipt.maker, "group", ReceiptIs(data)):
                self._owe(receipt.maker, data)

    def _count_own(self, block: int) -> None:
        (made, tokens), self._block, key = self._block, [0, 0], (self.stage, block)
        if made:
            self.kept.made[key] = self.kept.made.get(key, 0) + made
            self.kept.tokens[key] = self.kept.tokens.get(key, 0) + tokens
            self._append(_own_line(key, made, tokens))

    def _owe(self, maker: PeerId, data: bytes) -> None:
        owed = self._owed.setdefault(maker, [])
        owed.append(data)
        del owed[:-RECEIPTS_OWED]
        while len(self._owed) > MAKERS_OWED:
            self._owed.popitem(last=False)

    def linked(self, peer: PeerId) -> None:
        """It can be sent to: hand over what it was owed."""
        for data in self._owed.pop(peer, ()):
            self.neighbourhood.post(peer, "group", ReceiptIs(data))

    def message(self, peer: PeerId, message: ReceiptIs) -> None:
        """From whoever signed it."""
        try:
            line = take(self.kept, message.receipt, self.signed, self.identity.peer_id, peer)
        except WireError as error:
            self.neighbourhood.refused(peer, error.code, str(error))
            return
        if line:
            self.note("receipt", signer=peer, accepted=self.kept.book.total().contributions)
            self._append(line)

    def _append(self, line: str) -> None:
        """A full disk costs the receipt, not the training; it is said once an event."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            self.note("receipt_not_kept", reason=error.strerror or str(error))

    def prune(self) -> None:
        """Write the file anew, without what is superseded or too old."""
        if self.path is None or not self.path.exists():
            return
        kept = self.kept
        blocks = kept.book.blocks
        lines = [line for (stage, block, _), line in sorted(kept.lines.items()) if (stage, block) in blocks]
        newest = sorted(kept.tokens.items(), key=lambda item: item[0][1])[-BLOCKS_KEPT:]
        own = [_own_line(key, kept.made[key], tokens) for key, tokens in newest]
        older = [json.dumps({"older": kept.book.older})] if kept.book.older else []
        write_atomically(self.path, "".join(f"{line}\n" for line in [*older, *own, *lines]).encode())


def _own_line(key: tuple[int, int], made: int, tokens: int) -> str:
    return json.dumps({"stage": key[0], "own": key[1], "made": made, "tokens": tokens})


def summary(kept: Kept) -> dict[str, Any]:
    """For `swarmnet me`: plain data. Tokens are this peer's own count, of confirmed blocks only."""
    total = kept.book.total()
    tokens = sum(kept.tokens.get(key, 0) for key in kept.book.blocks)
    return {
        "accepted": total.contributions, "tokens": tokens, "signers": total.signers,
        "receipts": total.receipts, "blocks": total.blocks, "since": kept.first_seconds,
        "unusable": kept.unusable, "made": sum(kept.made.values()),
    }  # fmt: skip
