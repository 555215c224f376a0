"""What a report on a run's training content is made of: from its manifest, an archive, or the live swarm."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from typing import Any

from peers.config.run_file import SignedManifest
from peers.network.discovery.expert_groups import expert_groups
from peers.network.discovery.record_reader import LOOK_UP_SECONDS, finalized_tokens, look, settled_round
from peers.network.orders.order_book import OrderBook
from peers.state.archive import Archive
from peers.state.archive_store import ArchiveError
from peers.telemetry.console import counted
from peers.telemetry.snapshot import ExpertGroup
from protocols.errors import WireError
from protocols.ports import Directory
from protocols.signed.orders import open_order
from protocols.signed.peer_record import NO_STAGE
from protocols.signed.records import RECORD_SECONDS
from swarmnet.model.parameters import active_parameters, parameter_shapes
from swarmnet.run.manifest import Manifest
from swarmnet.run.owner_orders import NO_ORDER, OwnerOrders

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Forward and backward of a dense decoder (Kaplan et al., arXiv:2001.08361): compute = 6 N D."""
FLOPS_PER_JOULE = {"cuda": 2.0e10, "cpu": 1.0e9}
"""Assumed, useful operations per joule by device. A GPU of 2022 at 300 W and a third of its 20 TFLOP/s of
float32. A processor's core at 15 W and two fifths of the 3.6e10 operations a second measured of one."""
NOT_SAID = "cpu"
"""Assumed of who does not say: the dearer one, so that the energy is not made smaller than it is."""
MEASURED = "measured"
DEVICES = {"cuda": "GPUs", "cpu": "processors"}
OVERHEAD = 1.5
"""Assumed: of the whole machine and the network, per joule of the computing part."""
JOULES_PER_KILOWATT_HOUR = 3.6e6
OF_RECORDS = (
    "settled rounds: of each stage what the middle one of its peers says of itself (of two the lower); no "
    "weights were looked at, nor who has signed them",
    "contributors: who was in the directory then, each with what it has counted since it last started or "
    "changed its stage; who had left or paused is missing (an archive remembers them)",
)
"""What is assumed where nothing but peers' own records is known."""


@dataclass(frozen=True, slots=True)
class CreditedContributor:
    peer: str
    name: str
    tokens: int
    """By its own records."""
    signed: int | None = 0
    """Archived checkpoints whose weights it has signed; None: no archive was looked at."""
    device: str = ""
    """That it computes with, as it says; empty: it does not."""
    joules: int = 0
    """That this has taken for these tokens, as it has measured; 0: it has not."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    signed: SignedManifest
    order: OwnerOrders
    made_at: datetime
    rounds: tuple[int, ...]
    """Newest settled round that is known of each stage; -1: none. Stages close their own rounds: where
    microbatches leave stages out, those in the middle have fewer."""
    contributors: tuple[CreditedContributor, ...]
    origin: str
    """Where the rounds and contributors come from, for people."""
    finalized_tokens: tuple[int | None, ...] = ()
    """Of each stage, in those rounds; None, or none at all: nobody has counted them."""
    assumed: tuple[str, ...] = ()
    """What is assumed of them besides what every report assumes, for people."""
    read: tuple[tuple[int, int], ...] = ()
    """Of each peer that reads the run's text in epochs: the shards that it has, and how many it has read to
    their end, in all epochs."""
    experts: tuple[ExpertGroup, ...] = ()
    """Where each peer trains one group of them, by what peers said of themselves."""

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def round(self) -> int:
        """That all stages have settled: of the one that is furthest behind; -1: not every stage has one."""
        return min(self.rounds)

    @property
    def parameters(self) -> int:
        manifest = self.manifest
        spans = map(manifest.span, range(len(manifest.stages)))
        return sum(prod(size) for span in spans for size in parameter_shapes(manifest.model, span).values())

    @property
    def active_parameters(self) -> int:
        """That one token goes through: of a layer's experts those that it takes."""
        return sum(self._active())

    def _active(self) -> list[int]:
        """Of each stage."""
        manifest = self.manifest
        return [active_parameters(manifest.model, manifest.span(s)) for s in range(len(manifest.stages))]

    def _tokens(self) -> list[int]:
        """Trained on, by stage, as peers have counted them; else every settled round holds its target at
        most, as those that are closed by time hold fewer."""
        counted = self.finalized_tokens or (None,) * len(self.rounds)
        return [
            tokens if tokens is not None else (round + 1) * self.manifest.rounds.global_batch_tokens
            for round, tokens in zip(self.rounds, counted, strict=True)
        ]

    @property
    def is_counted(self) -> bool:
        """Whether `tokens` is what contributions say, and not a bound."""
        return bool(self.finalized_tokens) and self.finalized_tokens[0] is not None

    @property
    def devices(self) -> dict[str, float]:
        """Device -> its share of the tokens that contributors claim; of who does not say: NOT_SAID; of who
        has measured what it takes: MEASURED."""
        tokens: Counter[str] = Counter()
        for one in self.contributors:
            known = one.device if one.device in FLOPS_PER_JOULE else NOT_SAID
            tokens[MEASURED if one.joules else known] += one.tokens
        whole = tokens.total()
        return {device: count / whole for device, count in tokens.items()} if whole else {NOT_SAID: 1.0}

    @property
    def tokens(self) -> int:
        """Trained on: the first stage is on every way."""
        return self._tokens()[0] if self.round >= 0 else 0

    @property
    def flops(self) -> int:
        each = zip(self._active(), self._tokens(), strict=True)
        return FLOPS_PER_PARAMETER_AND_TOKEN * sum(parameters * tokens for parameters, tokens in each)

    @property
    def kilowatt_hours(self) -> float:
        shares = {device: share for device, share in self.devices.items() if device != MEASURED}
        joules = sum(share * self.flops / FLOPS_PER_JOULE[device] for device, share in shares.items())
        if whole := sum(one.tokens for one in self.contributors):
            # What they have counted is what they say of the tokens that the stages have seen.
            of_each = sum(one.joules for one in self.contributors if one.tokens) / whole
            joules += of_each * sum(self._tokens())
        return joules * OVERHEAD / JOULES_PER_KILOWATT_HOUR


def from_manifest(signed: SignedManifest, order: OwnerOrders, now_seconds: float) -> RunFacts:
    """Of a run of which nothing is archived."""
    none = (-1,) * len(signed.manifest.stages)
    return RunFacts(signed, order, datetime.fromtimestamp(now_seconds, UTC), none, (), "the manifest alone")


def from_archive(archive: Archive, signed: SignedManifest, now_seconds: float) -> RunFacts:
    """`archive` is open. Raises ArchiveError."""
    order = NO_ORDER
    held = archive.order()
    if held is not None:
        try:
            order = open_order(held, signed.run_id, signed.manifest.owner).order
        except WireError as error:
            raise ArchiveError(f"{archive.store.url}: its order is refused: {error}") from None
    stages = range(len(signed.manifest.stages))
    newest = [archive.newest(stage) for stage in stages]
    rounds = tuple(entries[0].round if entries else -1 for entries in newest)
    contributors = sorted(map(_contributor, archive.contributors()), key=lambda one: (-one.tokens, one.peer))
    at = datetime.fromtimestamp(now_seconds, UTC)
    tokens = tuple(entries[0].tokens if entries else None for entries in newest)
    origin = f"the archive {archive.store.url}"
    return RunFacts(signed, order, at, rounds, tuple(contributors), origin, tokens)


async def from_directory(signed: SignedManifest, directory: Directory) -> RunFacts:
    """Of a run whose peers are there now: one look at all stages and at the owner's newest order. Raises
    WireError where the directory does not answer."""
    records = await look(directory, signed.run_id, len(signed.manifest.stages))
    book = OrderBook(signed, None, lambda *_, **__: None, lambda *_: None)
    await book.look_up(directory, LOOK_UP_SECONDS)
    now = directory.now()
    told = [one.record for one in records.values()]
    said = [settled_round(told, stage) for stage in range(len(signed.manifest.stages))]
    rounds = tuple(-1 if round is None else round for round in said)
    contributors = [
        CreditedContributor(record.peer, record.name, record.tokens, None, record.device, record.joules)
        for record in told if record.tokens > 0
    ]  # fmt: skip
    contributors.sort(key=lambda one: (-one.tokens, one.peer))
    origin = _origin(Counter(record.stage for record in told), len(rounds), book.order, now)
    at = datetime.fromtimestamp(now, UTC)
    tokens = tuple(finalized_tokens(told, stage) for stage in range(len(rounds)))
    read = tuple((one.text_shards, one.text_shards_read) for one in told if one.text_shards)
    return RunFacts(signed, book.order, at, rounds, tuple(contributors), origin, tokens, OF_RECORDS, read,
                 tuple(expert_groups(signed.manifest, told)))  # fmt: skip


def _origin(peers: Mapping[int, int], stages: int, order: OwnerOrders, now_seconds: float) -> str:
    """`peers`: how many by stage."""
    by_stage = ", ".join(f"stage {stage}: {peers.get(stage, 0)}" for stage in range(stages))
    who = f"{counted(sum(peers.values()), 'peer')} ({by_stage}, without a stage: {peers.get(NO_STAGE, 0)})"
    given = f"of {_moment(order.sequence / 1e6)}" if order.sequence else "(none was found)"
    return (
        f"the run's directory as it was on {_moment(now_seconds)}: what {who} said of themselves in signed "
        f"records, each at most {RECORD_SECONDS:g} s old, and the newest order of the run's owner {given}"
    )


def _moment(seconds: float) -> str:
    """Since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _contributor(one: Mapping[str, Any]) -> CreditedContributor:
    tokens = one.get("tokens")
    counts = tokens.values() if isinstance(tokens, dict) else ()
    total = sum(count for count in counts if isinstance(count, int))
    signed, joules = one.get("signed"), one.get("joules")
    return CreditedContributor(
        str(one.get("peer", ""))[:64], str(one.get("name", ""))[:64], total,
        signed if isinstance(signed, int) else 0, str(one.get("device", ""))[:16],
        joules if isinstance(joules, int) else 0,
    )  # fmt: skip
