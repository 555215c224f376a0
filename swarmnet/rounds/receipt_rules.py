"""Receipts: what peers sign about each other's settled contributions, and what a peer's receipts add up to.

Rounds are counted in blocks of `snapshot_interval`, the same on every peer. A receipt says how many rounds of
one block settled with a contribution of a peer. A signer that restarts and signs a block again therefore adds
nothing twice. Claims are bounded: a round holds at most one contribution of a peer.
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
    """Raise `ReceiptError` if a receipt cannot be true. Its rounds must lie within one block of
    `block_rounds` rounds, and its contributions be at least one and at most one a round. The contributor must
    not have signed it."""
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
        self.me = me
        self.stage = stage
        self.block_rounds = block_rounds
        self._sets: dict[int, frozenset[PeerId]] = {}

    def settled(self, round: int, contributors: Collection[PeerId]) -> list[Receipt]:
        """Record the contributors of a settled round. If the round ends a block, returns the receipts to
        sign, one for each other contributor of the block; otherwise none.

        A round that settles again after a fork replaces the earlier set."""
        block = round // self.block_rounds
        self._sets = {r: peers for r, peers in self._sets.items() if r // self.block_rounds == block}
        self._sets[round] = frozenset(contributors)
        ends_block = (round + 1) % self.block_rounds == 0
        if not ends_block:
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
        self.stage = stage
        self.block_rounds = block_rounds
        self._newest = list(earlier)[-(BLOCKS_BACK + 1) :]
        self._made: dict[int, int] = {}
        """Tokens of own contributions that have not settled here, by round."""
        self._block = -1
        """The block that is settling now."""
        self._contributions = 0
        self._tokens = 0
        """Settled contributions and tokens of that block that were not returned yet."""
        self._checks: dict[tuple[int, int], Counter[PeerId]] = {}
        """Verified signatures of each signer, by (stage, block)."""

    def made(self, round: int, tokens: int) -> None:
        """Record an own contribution to a round, and its tokens."""
        self._made[round] = tokens
        while len(self._made) > 4 * self.block_rounds + 64:
            del self._made[min(self._made)]

    def settled(self, round: int, own: bool) -> list[CreditedBlock]:
        """Record that a round settled. `own`: its set includes a contribution of this peer.

        Returns what must be written to disk: an entry when a block gets its first contribution, and the
        counts when it ends. An own contribution counts once even if its round settles again after a fork."""
        block = self._block_of(round)
        tokens = self._made.pop(round, None)  # None if there is none, or it counted before.
        to_write = self._pop_unreported() if block != self._block else []  # Counts of the block before.
        self._block = block
        if own and tokens is not None:
            self._contributions += 1
            self._tokens += tokens
        if own and (self.stage, block) not in self._newest:  # The first one in this block.
            self._newest = [*self._newest, (self.stage, block)][-(BLOCKS_BACK + 1) :]
            self._checks = {key: checks for key, checks in self._checks.items() if self._may_be_due(*key)}
            entry = self._pop_unreported() or [CreditedBlock(self.stage, block, contributions=0, tokens=0)]
            return to_write + entry
        ends_block = (round + 1) % self.block_rounds == 0
        return to_write + self._pop_unreported() if ends_block else to_write

    @property
    def unreported_tokens(self) -> int:
        """Tokens of settled own contributions that `settled` has not returned yet."""
        return self._tokens

    def rest(self) -> list[CreditedBlock]:
        """Return what must be written before the process ends: counts that were not returned yet. Each block
        with unsettled own contributions gets an entry too."""
        written = {block for stage, block in self._newest if stage == self.stage}
        unsettled = {self._block_of(round) for round in self._made}
        new = sorted(block for block in unsettled - written if block >= self._block)
        entries = [CreditedBlock(self.stage, block, contributions=0, tokens=0) for block in new]
        return self._pop_unreported() + entries

    def _pop_unreported(self) -> list[CreditedBlock]:
        """Return the counts of the block that is settling, and reset them; empty if they are 0."""
        if not self._contributions:
            return []
        counted = CreditedBlock(self.stage, self._block, self._contributions, self._tokens)
        self._contributions = 0
        self._tokens = 0
        return [counted]

    def takes(self, stage: int, round: int) -> bool:
        """Return whether other peers may sign a receipt for the block of that round. This peer must have a
        contribution there that has settled, in one of the newest blocks, or one that has not settled yet."""
        return self._may_be_due(stage, self._block_of(round))

    def _block_of(self, round: int) -> int:
        return round // self.block_rounds

    def _may_be_due(self, stage: int, block: int) -> bool:
        """The same as `takes`, for a block."""
        if (stage, block) in self._newest:
            return True
        if stage != self.stage or block < self._block - BLOCKS_BACK:
            return False
        return block in map(self._block_of, self._made)

    def may_check(self, signer: PeerId, stage: int, round: int) -> bool:
        """Return whether one more signature of `signer` for the block of that round may be verified. If so,
        it is counted. Requires `takes`."""
        checks = self._checks.setdefault((stage, self._block_of(round)), Counter())
        if checks[signer] >= CHECKS_OF_A_PEER or checks.total() >= CHECKS_OF_A_BLOCK:
            return False
        checks[signer] += 1
        return True


@dataclass(frozen=True, slots=True)
class ReceiptTotal:
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
        self._accepted = 0
        self._receipts = 0
        """Accepted contributions and number of the receipts that are kept."""
        self._signers: Counter[PeerId] = Counter()
        """Number of receipts kept of each signer."""

    def has_place(self, signer: PeerId, stage: int, round: int) -> bool:
        """Return whether a receipt of `signer` for the block of that round could be kept. Each block has
        places for `SIGNERS_KEPT` signers."""
        held = self.blocks.get((stage, round // self.block_rounds), {})
        return signer in held or len(held) < SIGNERS_KEPT

    def take(self, receipt: Receipt) -> bool:
        """Keep a receipt that was checked. Returns False if the signer's kept one counts as many
        contributions or more, or if the block has no place left. Beyond `BLOCKS_KEPT`, the oldest block
        becomes a sum."""
        if not self.has_place(receipt.signer, receipt.stage, receipt.first):
            return False
        key = (receipt.stage, receipt.first // self.block_rounds)
        known = self.blocks.get(key, {}).get(receipt.signer)
        if known is not None and known.contributions >= receipt.contributions:
            return False
        held = self.blocks.setdefault(key, {})
        self._accepted -= accepted(held.values())  # What the block's receipts added up to before.
        held[receipt.signer] = receipt
        self._accepted += accepted(held.values())
        if known is None:
            self._receipts += 1
            self._signers[receipt.signer] += 1
        if len(self.blocks) > BLOCKS_KEPT:
            self._drop_block(next(iter(self.blocks)))
        return True

    def _drop_block(self, key: tuple[int, int]) -> None:
        """Drop the receipts of the (stage, block) `key`, and add what they accept to `older`."""
        held = self.blocks.pop(key)
        self.older += accepted(held.values())
        self._accepted -= accepted(held.values())
        self._receipts -= len(held)
        self._signers -= Counter(held.keys())  # Keeps positive counts only.

    def total(self) -> ReceiptTotal:
        return ReceiptTotal(self.older + self._accepted, self._receipts, len(self._signers), len(self.blocks))


def accepted(receipts: Iterable[Receipt]) -> int:
    """Return the greatest number of contributions that at least half of a block's signers confirm, each by a
    receipt for that number or more; 0 without receipts."""
    counts = sorted((receipt.contributions for receipt in receipts), reverse=True)
    return counts[(len(counts) - 1) // 2] if counts else 0
