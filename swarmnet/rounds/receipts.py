"""Receipts: what peers sign about each other's settled contributions, and what a peer's receipts add up to.

Rounds are counted in blocks of `snapshot_interval`, the same on every peer. A signer that restarts and signs
a block again therefore adds nothing twice. Claims are bounded: a round holds at most one contribution of a
peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarmnet.identifiers import PeerId

SIGNERS_KEPT = 4
"""Receipts kept for each block. A number of contributions is accepted if half of them confirm it."""
BLOCKS_KEPT = 4096
"""Blocks kept one by one. At 16 rounds a block and 10 s a round they are a week, at most 7 MB and 2 s of
verifying. Older blocks are kept as a sum only."""
BLOCKS_BACK = 2
"""Receipts are accepted for the newest block with own contributions and this many before it. A signer ends a
block within some rounds of the contributor. A new link takes seconds, and a block minutes."""
CHECKS_OF_A_PEER, CHECKS_OF_A_BLOCK = 4, 64
"""Signatures verified for a block, of one signer and in all. An honest signer sends one, and another after a
fork or a restart. The first four signers get the places, so 64 leave room for many dishonest ones."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """`signer` confirms: `contributions` settled sets of the rounds `first` to `last` include
    `contributor`."""

    signer: PeerId
    contributor: PeerId
    stage: int
    first: int
    last: int
    contributions: int
    tokens: int = -1
    """Tokens of these contributions; -1: not known."""


class ReceiptError(ValueError):
    """The receipt cannot be true."""


def check(receipt: Receipt, block_rounds: int) -> None:
    """Check a receipt for contradictions. Raises `ReceiptError` if it cannot be true."""
    rounds = receipt.last - receipt.first + 1
    if receipt.first < 0 or rounds < 1 or receipt.first // block_rounds != receipt.last // block_rounds:
        raise ReceiptError(f"rounds {receipt.first} to {receipt.last} do not lie within one block of rounds")
    if not 0 < receipt.contributions <= rounds:
        raise ReceiptError(f"{receipt.contributions} contributions in {rounds} rounds, not 1 to {rounds}")
    if receipt.signer == receipt.contributor:
        raise ReceiptError("signer and contributor of the receipt are the same peer")


class SettledContributors:
    """Counts how often each peer is in the settled sets of a block, as one peer has seen them."""

    def __init__(self, me: PeerId, stage: int, block_rounds: int) -> None:
        self.me, self.stage, self.block_rounds = me, stage, block_rounds
        self._sets: dict[int, frozenset[PeerId]] = {}

    def settled(self, round: int, contributors: Collection[PeerId]) -> list[Receipt]:
        """Record the contributors of a settled round. Returns the receipts to sign if the round ends a block.
        A round that settles again after a fork replaces the earlier set."""
        block = round // self.block_rounds
        self._sets = {r: kept for r, kept in self._sets.items() if r // self.block_rounds == block}
        self._sets[round] = frozenset(contributors)
        if (round + 1) % self.block_rounds:
            return []
        counts = Counter(
            contributor
            for contributors in self._sets.values()
            for contributor in contributors
            if contributor != self.me
        )
        first = min(self._sets)
        self._sets = {}
        return [
            Receipt(self.me, contributor, self.stage, first, round, count)
            for contributor, count in sorted(counts.items())
        ]


@dataclass(frozen=True, slots=True)
class CreditedBlock:
    """Own contributions that settled in a block, and their tokens."""

    stage: int
    block: int
    contributions: int
    tokens: int


class ContributionCounter:
    """Counts this peer's own contributions, and decides for which blocks it accepts receipts."""

    def __init__(self, stage: int, block_rounds: int, earlier: Iterable[tuple[int, int]] = ()) -> None:
        """`earlier`: (stage, block) pairs that earlier processes counted, in their order."""
        self.stage, self.block_rounds = stage, block_rounds
        self._newest = list(earlier)[-(BLOCKS_BACK + 1) :]
        self._made: dict[int, int] = {}
        """Tokens of own contributions that have not settled here, by round."""
        self._block = -1
        """The block that is settling now."""
        self._contributions = self._tokens = 0
        """Settled contributions and tokens of that block that were not returned yet."""
        self._checks: dict[tuple[int, int], Counter[PeerId]] = {}
        """Verified signatures of each signer, by (stage, block)."""

    def made(self, round: int, tokens: int) -> None:
        """Record an own contribution to a round, and its tokens."""
        self._made[round] = tokens
        while len(self._made) > 4 * self.block_rounds + 64:
            del self._made[min(self._made)]

    def settled(self, round: int, own: bool) -> list[CreditedBlock]:
        """Record that a round settled, with or without an own contribution.

        Returns what must be written to disk: an entry when a block gets its first contribution, later its
        counts. After a fork, nothing counts twice."""
        block, tokens = self._block_of(round), self._made.pop(round, None)
        counted = self._take_unreported() if block != self._block else []
        self._block = block
        if own and tokens is not None:
            self._contributions, self._tokens = self._contributions + 1, self._tokens + tokens
        if own and (self.stage, block) not in self._newest:
            self._newest = [*self._newest, (self.stage, block)][-(BLOCKS_BACK + 1) :]
            self._checks = {kept: checks for kept, checks in self._checks.items() if self._takes(*kept)}
            return [*counted, *(self._take_unreported() or [CreditedBlock(self.stage, block, 0, 0)])]
        return counted + self._take_unreported() if (round + 1) % self.block_rounds == 0 else counted

    def rest(self) -> list[CreditedBlock]:
        """Return what must be written before the process ends: counts that were not returned, and blocks
        whose contributions have not settled."""
        told = [block for stage, block in self._newest if stage == self.stage]
        open = {block for block in map(self._block_of, self._made) if block >= self._block}.difference(told)
        return [*self._take_unreported(), *(CreditedBlock(self.stage, block, 0, 0) for block in sorted(open))]

    def _take_unreported(self) -> list[CreditedBlock]:
        if not self._contributions:
            return []
        counted = CreditedBlock(self.stage, self._block, self._contributions, self._tokens)
        self._contributions = self._tokens = 0
        return [counted]

    def takes(self, stage: int, round: int) -> bool:
        """Return whether a receipt for the block of that round can be due. An own contribution settled here
        in one of the newest blocks, or one is open for that block, whose signer may be ahead."""
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
        """Return whether one more signature of `signer` may be verified, and count it. Requires `takes`."""
        checks = self._checks.setdefault((stage, self._block_of(round)), Counter())
        if checks[signer] >= CHECKS_OF_A_PEER or checks.total() >= CHECKS_OF_A_BLOCK:
            return False
        checks[signer] += 1
        return True


@dataclass(frozen=True, slots=True)
class Sum:
    """What receipts add up to."""

    contributions: int = 0
    """Contributions that others accept: for each block, the number that half of its signers confirm."""
    receipts: int = 0
    signers: int = 0
    blocks: int = 0


class ReceiptBook:
    """The receipts of one contributor. Sums are kept up to date, because they are read with every receipt."""

    def __init__(self, block_rounds: int) -> None:
        self.block_rounds = block_rounds
        self.blocks: dict[tuple[int, int], dict[PeerId, Receipt]] = {}
        """(stage, block) -> signer -> receipt, in order of arrival."""
        self.older = 0
        """Contributions of blocks that are no longer kept."""
        self._accepted = self._receipts = 0
        """Accepted contributions and number of the receipts that are kept."""
        self._signers: Counter[PeerId] = Counter()
        """Number of receipts kept of each signer."""

    def has_place(self, signer: PeerId, stage: int, round: int) -> bool:
        """Return whether a receipt of a signer for the block of that round could be kept."""
        held = self.blocks.get((stage, round // self.block_rounds), {})
        return signer in held or len(held) < SIGNERS_KEPT

    def take(self, receipt: Receipt) -> bool:
        """Keep a receipt that was checked. Returns False if it is no news or its block has no place left."""
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
    """Return the number of contributions that at least half of a block's signers confirm, or more."""
    counts = sorted((receipt.contributions for receipt in receipts), reverse=True)
    return counts[(len(counts) - 1) // 2] if counts else 0
