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
BLOCKS_BACK = 2
"""Receipts are taken for the newest block with own contributions and for so many before it. A signer ends a
block within some rounds of its maker; a link that is made anew takes seconds, and a block minutes."""
CHECKS_OF_A_PEER, CHECKS_OF_A_BLOCK = 4, 64
"""Signatures that are verified for a block. An honest signer sends one, and another after a fork or a
restart; the first four signers have the places, so 64 leave room for many that lie."""


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
class Counted:
    """Own contributions that settled in a block, and the tokens that they stand for."""

    stage: int
    block: int
    contributions: int
    tokens: int


class OwnContributions:
    """What this peer contributed, by its own count, and of which blocks it therefore takes receipts."""

    def __init__(self, stage: int, block_rounds: int, earlier: Iterable[tuple[int, int]] = ()) -> None:
        """`earlier`: (stage, block) of former lives, in the order in which they were counted."""
        self.stage, self.block_rounds = stage, block_rounds
        self._newest = list(earlier)[-(BLOCKS_BACK + 1) :]
        self._made: dict[int, int] = {}
        """Tokens of the contributions that have not settled here, by round."""
        self._block = -1
        """The one that settles now."""
        self._contributions = self._tokens = 0
        """Of it; not told yet."""
        self._checks: dict[tuple[int, int], Counter[PeerId]] = {}

    def made(self, round: int, tokens: int) -> None:
        """An own contribution, and how many tokens it stands for."""
        self._made[round] = tokens
        while len(self._made) > 4 * self.block_rounds + 64:
            del self._made[min(self._made)]

    def settled(self, round: int, own: bool) -> list[Counted]:
        """A round settled here, with or without an own contribution. What is to be written down: at the first
        one of a block that it has some, later how many. Again after a fork: nothing counts twice."""
        block, tokens = self._block_of(round), self._made.pop(round, None)
        counted = self._untold() if block != self._block else []
        self._block = block
        if own and tokens is not None:
            self._contributions, self._tokens = self._contributions + 1, self._tokens + tokens
        if own and (self.stage, block) not in self._newest:
            self._newest = [*self._newest, (self.stage, block)][-(BLOCKS_BACK + 1) :]
            self._checks = {kept: checks for kept, checks in self._checks.items() if self._takes(*kept)}
            return [*counted, *(self._untold() or [Counted(self.stage, block, 0, 0)])]
        return counted + self._untold() if (round + 1) % self.block_rounds == 0 else counted

    def rest(self) -> list[Counted]:
        """At the end: what has settled and was not told, and blocks in which some are still to settle."""
        told = [block for stage, block in self._newest if stage == self.stage]
        open = {block for block in map(self._block_of, self._made) if block >= self._block}.difference(told)
        return [*self._untold(), *(Counted(self.stage, block, 0, 0) for block in sorted(open))]

    def _untold(self) -> list[Counted]:
        if not self._contributions:
            return []
        counted = Counted(self.stage, self._block, self._contributions, self._tokens)
        self._contributions = self._tokens = 0
        return [counted]

    def takes(self, stage: int, round: int) -> bool:
        """Whether a receipt for the block of that round can be owed: an own contribution settled here in one
        of the newest, or was made for a round that has not settled here: its signer may be ahead."""
        return self._takes(stage, self._block_of(round))

    def _block_of(self, round: int) -> int:
        return round // self.block_rounds

    def _takes(self, stage: int, block: int) -> bool:
        if (stage, block) in self._newest:
            return True
        if stage != self.stage or block < self._block - BLOCKS_BACK:
            return False
        return block in map(self._block_of, self._made)

    def may_check(self, signer: PeerId, stage: int, round: int) -> bool:
        """Whether another signature of that peer is worth verifying; it counts as verified. `takes` it."""
        checks = self._checks.setdefault((stage, self._block_of(round)), Counter())
        if checks[signer] >= CHECKS_OF_A_PEER or checks.total() >= CHECKS_OF_A_BLOCK:
            return False
        checks[signer] += 1
        return True


@dataclass(frozen=True, slots=True)
class Sum:
    """What receipts add up to."""

    contributions: int = 0
    """Accepted by others: for each block, as many as half of its signers stand for."""
    receipts: int = 0
    signers: int = 0
    blocks: int = 0


class ReceiptBook:
    """The receipts of one maker. What they add up to is kept up to date: it is asked for at every receipt."""

    def __init__(self, block_rounds: int) -> None:
        self.block_rounds = block_rounds
        self.blocks: dict[tuple[int, int], dict[PeerId, Receipt]] = {}
        """By (stage, block), in the order in which they came; by signer."""
        self.older = 0
        """Contributions of blocks that are no longer kept."""
        self._accepted = self._receipts = 0
        """Of those that are."""
        self._signers: Counter[PeerId] = Counter()
        """How many receipts of each are kept."""

    def has_place(self, signer: PeerId, stage: int, round: int) -> bool:
        """Whether a receipt of that signer for the block of that round could be kept."""
        held = self.blocks.get((stage, round // self.block_rounds), {})
        return signer in held or len(held) < SIGNERS_KEPT

    def take(self, receipt: Receipt) -> bool:
        """True if it is kept: news, and there is a place. It must have been checked."""
        if not self.has_place(receipt.signer, receipt.stage, receipt.first):
            return False
        key = (receipt.stage, receipt.first // self.block_rounds)
        known = self.blocks.get(key, {}).get(receipt.signer)
        if known is not None and known.contributions >= receipt.contributions:
            return False
        held = self.blocks.setdefault(key, {})
        self._accepted -= accepted(held.values())
        held[receipt.signer] = receipt
        self._accepted += accepted(held.values())
        if known is None:
            self._receipts += 1
            self._signers[receipt.signer] += 1
        if len(self.blocks) > BLOCKS_KEPT:
            self._drop(next(iter(self.blocks)))
        return True

    def _drop(self, key: tuple[int, int]) -> None:
        held = self.blocks.pop(key)
        self.older += accepted(held.values())
        self._accepted -= accepted(held.values())
        self._receipts -= len(held)
        self._signers -= Counter(held.keys())  # Keeps positive counts only.

    def total(self) -> Sum:
        return Sum(self.older + self._accepted, self._receipts, len(self._signers), len(self.blocks))


def accepted(receipts: Iterable[Receipt]) -> int:
    """Of one block: the number that at least half of its signers say, or more."""
    counts = sorted((receipt.contributions for receipt in receipts), reverse=True)
    return counts[(len(counts) - 1) // 2] if counts else 0
