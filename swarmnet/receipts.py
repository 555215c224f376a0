"""Who signs whose contributions, and what a peer's receipts add up to.

Rounds are counted in blocks of `snapshot_rounds`, the same on every peer: however often a signer starts
again, what it says of a block adds nothing twice. A round holds at most one contribution of a peer, which
bounds what anybody can claim. No IO.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarmnet.identifiers import PeerId

SIGNERS_KEPT = 4
"""Receipts kept per block. A contribution counts when half of them stand for it."""
BLOCKS_KEPT = 4096
"""At 16 rounds a block and 10 s a round, a week; 7 MB of file and 2 s of verifying at most. Older ones are
only added up."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """`signer` says: of the rounds `first` to `last` of a stage, so many settled sets hold one of `maker`."""

    signer: PeerId
    maker: PeerId
    stage: int
    first: int
    last: int
    contributions: int
    tokens: int = -1
    """-1: not known."""


class ReceiptError(ValueError):
    """No receipt that could be true."""


def check(receipt: Receipt, block_rounds: int) -> None:
    """Raises ReceiptError."""
    rounds = receipt.last - receipt.first + 1
    if receipt.first < 0 or rounds < 1 or receipt.first // block_rounds != receipt.last // block_rounds:
        raise ReceiptError(f"rounds {receipt.first} to {receipt.last} are no part of one block")
    if not 0 < receipt.contributions <= rounds:
        raise ReceiptError(f"{receipt.contributions} contributions in {rounds} rounds")
    if receipt.signer == receipt.maker:
        raise ReceiptError("a receipt for oneself")


class SettledMakers:
    """What one peer has seen settle: at the end of a block, who is in it how often."""

    def __init__(self, me: PeerId, stage: int, block_rounds: int) -> None:
        self.me, self.stage, self.block_rounds = me, stage, block_rounds
        self._sets: dict[int, frozenset[PeerId]] = {}

    def settled(self, round: int, makers: Collection[PeerId]) -> list[Receipt]:
        """A round settled here; the receipts to sign if that ends a block. Again after a fork: the newest
        counts."""
        block = round // self.block_rounds
        self._sets = {r: kept for r, kept in self._sets.items() if r // self.block_rounds == block}
        self._sets[round] = frozenset(makers)
        if (round + 1) % self.block_rounds:
            return []
        counts = Counter(maker for makers in self._sets.values() for maker in makers if maker != self.me)
        first = min(self._sets)
        self._sets = {}
        return [
            Receipt(self.me, maker, self.stage, first, round, count)
            for maker, count in sorted(counts.items())
        ]


@dataclass(frozen=True, slots=True)
class Sum:
    """What receipts add up to."""

    contributions: int = 0
    """Accepted by others: for each block, as many as half of its signers stand for."""
    receipts: int = 0
    signers: int = 0
    blocks: int = 0


class ReceiptBook:
    """The receipts of one maker."""

    def __init__(self, block_rounds: int) -> None:
        self.block_rounds = block_rounds
        self.blocks: dict[tuple[int, int], dict[PeerId, Receipt]] = {}
        """By (stage, block), by signer."""
        self.older = 0
        """Contributions of blocks that are no longer kept."""

    def take(self, receipt: Receipt) -> bool:
        """True if it is kept: news, and not too many are there already. It must have been checked."""
        key = (receipt.stage, receipt.first // self.block_rounds)
        held = self.blocks.get(key, {})
        known = held.get(receipt.signer)
        if known is not None and known.contributions >= receipt.contributions:
            return False
        if known is None and len(held) >= SIGNERS_KEPT:
            return False
        self.blocks.setdefault(key, {})[receipt.signer] = receipt
        while len(self.blocks) > BLOCKS_KEPT:
            oldest = min(self.blocks, key=lambda block: block[1])
            self.older += accepted(self.blocks.pop(oldest).values())
        return True

    def total(self) -> Sum:
        kept = [receipt for held in self.blocks.values() for receipt in held.values()]
        return Sum(
            self.older + sum(accepted(held.values()) for held in self.blocks.values()),
            len(kept), len({receipt.signer for receipt in kept}), len(self.blocks),
        )  # fmt: skip


def accepted(receipts: Iterable[Receipt]) -> int:
    """Of one block: the number that at least half of its signers say, or more."""
    counts = sorted((receipt.contributions for receipt in receipts), reverse=True)
    return counts[(len(counts) - 1) // 2] if counts else 0
