"""Sum what peers' records tell of their contributions, across restarts and moves.

A record is a peer's signed announcement, renewed regularly. Its token count starts at 0 again when the peer
restarts or moves to another stage. Nothing proves these counts. The receipts in a record are signed by other
peers of the stage, and confirm contributions to settled rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from peers.network.discovery.claims import plain_name
from protocols.errors import WireError
from protocols.signed.envelope import claimed
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import RECORD_SECONDS
from protocols.signed.signed_receipts import open_receipt
from swarmnet.identifiers import RunId

MAX_KEPT = 8192
"""Maximum number of (peer, stage) entries; beyond it the smallest are forgotten."""

STAGE_DIGITS = 5
"""Maximum digits of a stage number, as in the names of an archive's checkpoints."""
_LIMIT = 1 << 63
"""A bound above any count."""

Key = tuple[str, int]
"""Peer and stage."""


class NewestClaim(NamedTuple):
    """What a peer's newest record claimed. The next one is compared with it."""

    stage: int
    started: int
    """Start of the peer's process, as in `PeerRecord.started`."""
    tokens: int
    joules: int
    at: float
    """Unix time in seconds at which it was signed."""


class ConfirmedContributions(NamedTuple):
    """A peer's contributions in one stage that receipts confirm."""

    contributions: int = 0
    block: int = -1
    """The newest block of rounds with a receipt. One of an earlier block adds nothing, so none counts twice.
    """
    of_block: int = 0
    """How many of `contributions` are in that block."""


class ContributorTotal(msgspec.Struct, frozen=True):
    """All that is known of one peer's contributions, as it is kept on disk."""

    peer: str
    name: str
    tokens: dict[int, int]
    """Stage -> tokens."""
    seconds: float
    """Time in which its tokens grew."""
    joules: int
    newest: NewestClaim | None
    confirmed: dict[int, ConfirmedContributions] = {}
    """Stage -> contributions there that receipts confirm."""


@dataclass(slots=True)
class Contributions:
    """Tokens whose gradients peers claim to have committed, and their confirmed contributions."""

    run: RunId | None = None
    """The run of the receipts; None: receipts are not counted."""
    block_rounds: int = 1
    """Rounds in a block, of which a receipt counts the contributions."""
    rounds: int = 0
    """Rounds of the run so far, which bound what one peer can have contributed."""
    tokens: Counter[Key] = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)
    joules: Counter[str] = field(default_factory=Counter)
    """Energy in joules by peer, as its device measured it."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time by peer in which its tokens grew from one record to the next, as far as its records were read."""
    newest: dict[str, NewestClaim] = field(default_factory=dict)
    confirmed: dict[Key, ConfirmedContributions] = field(default_factory=dict)

    def add(self, record: PeerRecord, at: float) -> int:
        """Add what a peer's record, signed at `at`, claims beyond its newest record so far. Returns the
        number of new tokens. After a move or restart, counts begin at 0 again, and all of the record is new.
        Without an earlier record, some of its tokens may have been counted before it was forgotten: the
        larger of both counts is kept."""
        peer, key = record.peer, (record.peer, record.stage)
        last = self.newest.get(peer)
        if last is None:
            new_tokens = max(0, record.tokens - self.tokens[key])
            new_joules = max(0, record.joules - self.joules[peer])
        elif (last.stage, last.started) == (record.stage, record.started) and record.tokens >= last.tokens:
            new_tokens = record.tokens - last.tokens
            new_joules = max(0, record.joules - last.joules)
        else:
            new_tokens, new_joules = record.tokens, record.joules
        if last is None and self.tokens[key] + new_tokens <= 0:
            return 0
        self.names[peer] = record.name
        self.joules[peer] += new_joules
        if new_tokens:
            self.tokens[key] += new_tokens
        if last is not None and new_tokens and 0 < at - last.at <= RECORD_SECONDS:
            self.seconds[peer] = self.seconds.get(peer, 0.0) + at - last.at
        self.newest[peer] = NewestClaim(record.stage, record.started, record.tokens, record.joules, at)
        if self.run is not None and key in self.tokens:
            self._confirm(record, self.run)
        self._forget_smallest()
        return new_tokens

    def _confirm(self, record: PeerRecord, run: RunId) -> None:
        """Add the contributions that a record's receipts confirm. Invalid ones are left out, and so are those
        for another peer or stage. Of a block that was seen before, only what is more counts."""
        key = (record.peer, record.stage)
        for data in record.receipts:
            known = self.confirmed.get(key, ConfirmedContributions())
            with suppress(WireError):
                _, stage, round = claimed(data)
                if stage != record.stage or round // self.block_rounds < known.block:
                    continue  # Nothing is verified in vain.
                receipt, _ = open_receipt(data, run, self.block_rounds)
                block = receipt.last // self.block_rounds
                before = known.of_block if block == known.block else 0
                if receipt.contributor == record.peer and receipt.contributions > before:
                    total = known.contributions - before + receipt.contributions
                    self.confirmed[key] = ConfirmedContributions(total, block, receipt.contributions)

    def _forget_smallest(self) -> None:
        """If there are more than `MAX_KEPT` entries, keep only the half with most confirmed contributions and
        then most tokens."""
        if len(self.tokens) <= MAX_KEPT:
            return
        nothing = ConfirmedContributions()
        keys = sorted(self.tokens, key=lambda key: (self.confirmed.get(key, nothing)[0], self.tokens[key]))
        self.tokens = Counter({key: self.tokens[key] for key in keys[-(MAX_KEPT // 2) :]})
        peers = {peer for peer, _ in self.tokens}
        self.names = {peer: name for peer, name in self.names.items() if peer in peers}
        self.joules = Counter({peer: count for peer, count in self.joules.items() if peer in peers})
        self.seconds = {peer: time for peer, time in self.seconds.items() if peer in peers}
        self.newest = {peer: claim for peer, claim in self.newest.items() if peer in peers}
        self.confirmed = {key: known for key, known in self.confirmed.items() if key in self.tokens}

    def of_stage(self, stage: int, most: int) -> int:
        """Return the sum of the tokens of a stage's peers, each at most `most`, which limits false claims."""
        return sum(min(tokens, most) for (_, held), tokens in self.tokens.items() if held == stage)

    def ranking(self, count: int, most: int) -> list[tuple[str, str, int, int, float]]:
        """Return (peer, name, confirmed contributions, claimed tokens, seconds) of at most `count` peers.
        Those with most confirmed contributions come first, and of equal ones those with most tokens. A peer
        has at most `most` tokens in a stage, and one contribution a round."""
        tokens: Counter[str] = Counter()
        confirmed: Counter[str] = Counter()
        for (peer, stage), claimed_tokens in self.tokens.items():
            tokens[peer] += min(claimed_tokens, most)
            if (peer, stage) in self.confirmed:
                confirmed[peer] += self.confirmed[peer, stage].contributions
        ranked = [
            (peer, self.names.get(peer, ""), min(confirmed[peer], self.rounds), tokens[peer])
            for peer in tokens
        ]
        ranked.sort(key=lambda entry: (-entry[2], -entry[3]))
        return [(*entry, self.seconds.get(entry[0], 0.0)) for entry in ranked[:count]]

    def totals(self) -> list[ContributorTotal]:
        """Return everything as plain data."""
        by_peer: dict[str, dict[int, int]] = {}
        for (peer, stage), tokens in self.tokens.items():
            by_peer.setdefault(peer, {})[stage] = tokens
        return [
            ContributorTotal(
                peer=peer,
                name=self.names.get(peer, ""),
                tokens=tokens,
                seconds=self.seconds.get(peer, 0.0),
                joules=self.joules[peer],
                newest=self.newest.get(peer),
                confirmed={
                    stage: self.confirmed[peer, stage] for stage in tokens if (peer, stage) in self.confirmed
                },
            )
            for peer, tokens in by_peer.items()
        ]

    def restore_archived(self, entry: Mapping[str, Any]) -> str:
        """Restore tokens, confirmed contributions, name and energy of one contributor from an archive, which
        is not trusted: invalid values are left out. Returns the peer; empty if the entry names none."""
        peer, name, tokens, joules = (entry.get(key) for key in ("peer", "name", "tokens", "joules"))
        if not isinstance(peer, str) or not isinstance(tokens, dict):
            return ""
        confirmed = entry.get("confirmed")
        for stage, count in tokens.items():
            is_stage_number = str(stage).isdecimal() and len(str(stage)) <= STAGE_DIGITS
            if not (is_stage_number and isinstance(count, int) and 0 < count < _LIMIT):
                continue
            self.tokens[peer, int(stage)] = count
            if isinstance(confirmed, dict):
                with suppress(msgspec.ValidationError):
                    known = msgspec.convert(confirmed.get(stage), ConfirmedContributions)
                    if all(-1 <= value < _LIMIT for value in known):
                        self.confirmed[peer, int(stage)] = known
        self.names[peer] = plain_name(name) if isinstance(name, str) else ""
        self.joules[peer] = joules if isinstance(joules, int) and 0 < joules < _LIMIT else 0
        return peer

    def restore(self, totals: Iterable[ContributorTotal]) -> None:
        """Restore what `totals` returned."""
        for total in totals:
            self.names[total.peer] = total.name
            self.joules[total.peer] = total.joules
            self.seconds[total.peer] = total.seconds
            self.tokens.update({(total.peer, stage): tokens for stage, tokens in total.tokens.items()})
            self.confirmed |= {(total.peer, stage): known for stage, known in total.confirmed.items()}
            if total.newest is not None:
                self.newest[total.peer] = total.newest
        self._forget_smallest()
