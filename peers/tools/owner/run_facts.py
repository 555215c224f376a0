"""Collect the facts of a run's training report from its manifest, an archive, or the live swarm."""

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
from peers.network.discovery.height import REMEMBER
from peers.network.discovery.record_reader import LOOK_UP_SECONDS, finalized_tokens, look, settled_round
from peers.network.orders.order_book import OrderBook
from peers.state.archive import Archive
from peers.state.archive_store import ArchiveError
from peers.telemetry.console import counted
from peers.telemetry.snapshot import IN_STEP, ExpertGroup
from protocols.errors import WireError
from protocols.ports import Directory
from protocols.signed.opinions import SignedOpinion
from protocols.signed.peer_record import NO_STAGE
from protocols.signed.records import RECORD_SECONDS
from swarmnet.model.parameters import active_parameters, parameter_shapes
from swarmnet.run.manifest import Manifest
from swarmnet.run.owner_orders import OwnerOrders

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Forward and backward pass of a dense decoder (Kaplan et al., arXiv:2001.08361): compute = 6 N D."""
FLOPS_PER_JOULE = {"cuda": 2.0e10, "cpu": 1.0e9}
"""Assumed useful operations per joule by device. GPU: a model of 2022 with 300 W and a third of its 20
TFLOP/s in float32. CPU: a core with 15 W and two fifths of a measured 3.6e10 operations per second."""
NOT_SAID = "cpu"
"""Device that is assumed for a peer that reports none: the less efficient one, so that energy is not
underestimated."""
MEASURED = "measured"
DEVICES = {"cuda": "GPUs", "cpu": "processors"}
OVERHEAD = 1.5
"""Assumed energy of the whole machine and the network, per joule of the computing device."""
JOULES_PER_KILOWATT_HOUR = 3.6e6
OF_RECORDS = (
    "settled rounds: the median of the values that each stage's peers report (of two the lower); weights and "
    "signatures were not checked",
    "contributors: the peers in the directory at that time, each with its own count since its last start or "
    "change of stage; peers that had left or paused are missing (an archive has them)",
)
"""Assumptions of a report that is based on peers' own records only."""


@dataclass(frozen=True, slots=True)
class CreditedContributor:
    peer: str
    name: str
    tokens: int
    """Tokens by the peer's own records."""
    signed: int | None = 0
    """Number of archived checkpoints whose weights the peer has signed; None: no archive was read."""
    device: str = ""
    """Device that the peer reports; empty: it reports none."""
    joules: int = 0
    """Energy that the peer measured for these tokens; 0: not measured."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    signed: SignedManifest
    order: OwnerOrders
    made_at: datetime
    rounds: tuple[int, ...]
    """Newest settled round that is known of each stage; -1: none. Stages count their own rounds: with stage
    skipping, middle stages have fewer."""
    contributors: tuple[CreditedContributor, ...]
    origin: str
    """Source of the rounds and contributors, for people."""
    finalized_tokens: tuple[int | None, ...] = ()
    """Tokens of each stage in those rounds. None, or an empty tuple: not counted."""
    assumed: tuple[str, ...] = ()
    """Assumptions in addition to those of every report, for people."""
    read: tuple[tuple[int, int], ...] = ()
    """For each peer that reads the run's text in epochs: its number of shards, and of shards read to their
    end in all epochs."""
    experts: tuple[ExpertGroup, ...] = ()
    """Groups of experts, by the peers' records, if each peer trains one group."""
    active_peers: tuple[int, ...] = ()
    """Number of peers of each stage that have its weights."""
    remembered_round: int = -1
    """Newest settled round that bootstraps and archivists remember; -1: none."""
    objections: tuple[SignedOpinion, ...] | None = None
    """Objections to documents of the text; None: they were not looked up."""

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def known_round(self) -> int:
        """Newest settled round of the first stage that is known, also if its peers have gone; -1: none."""
        return max(self.rounds[0], self.remembered_round)

    @property
    def round(self) -> int:
        """Newest round that all stages have settled; -1: some stage has none."""
        return min(self.rounds)

    @property
    def parameters(self) -> int:
        manifest = self.manifest
        spans = map(manifest.span, range(len(manifest.stages)))
        return sum(prod(size) for span in spans for size in parameter_shapes(manifest.model, span).values())

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses: of a layer's experts only the selected ones."""
        return sum(self._active())

    def _active(self) -> list[int]:
        """Return the active parameters of each stage."""
        manifest = self.manifest
        return [active_parameters(manifest.model, manifest.span(s)) for s in range(len(manifest.stages))]

    def _tokens(self) -> list[int]:
        """Return the trained tokens of each stage as its peers counted them. Without a count, return the
        maximum: the target of every settled round, which a round closed by time does not reach."""
        counted = self.finalized_tokens or (None,) * len(self.rounds)
        return [
            tokens if tokens is not None else (round + 1) * self.manifest.rounds.global_batch_tokens
            for round, tokens in zip(self.rounds, counted, strict=True)
        ]

    @property
    def is_counted(self) -> bool:
        """Whether `tokens` was counted from contributions; otherwise it is an upper bound."""
        return bool(self.finalized_tokens) and self.finalized_tokens[0] is not None

    @property
    def devices(self) -> dict[str, float]:
        """Share of the claimed tokens by device. The key is NOT_SAID for peers that report no device, and
        MEASURED for peers that measure their energy."""
        tokens: Counter[str] = Counter()
        for one in self.contributors:
            known = one.device if one.device in FLOPS_PER_JOULE else NOT_SAID
            tokens[MEASURED if one.joules else known] += one.tokens
        whole = tokens.total()
        return {device: count / whole for device, count in tokens.items()} if whole else {NOT_SAID: 1.0}

    @property
    def tokens(self) -> int:
        """Number of trained tokens, by the first stage, which is on every path."""
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
            # The measured joules belong to the tokens that peers claim; scale them to all tokens.
            of_each = sum(one.joules for one in self.contributors if one.tokens) / whole
            joules += of_each * sum(self._tokens())
        return joules * OVERHEAD / JOULES_PER_KILOWATT_HOUR


def from_manifest(signed: SignedManifest, order: OwnerOrders, now_seconds: float) -> RunFacts:
    """Return the facts of a run without an archive."""
    none = (-1,) * len(signed.manifest.stages)
    return RunFacts(signed, order, datetime.fromtimestamp(now_seconds, UTC), none, (), "the manifest alone")


def from_archive(archive: Archive, signed: SignedManifest, now_seconds: float) -> RunFacts:
    """Return the facts from an open archive. Raises ArchiveError."""
    book = _new_book(signed)
    for document in archive.orders():
        try:
            book.take(document)
        except WireError as error:
            raise ArchiveError(f"{archive.store.url}: its order is refused: {error}") from None
    stages = range(len(signed.manifest.stages))
    newest = [archive.newest(stage) for stage in stages]
    rounds = tuple(entries[0].round if entries else -1 for entries in newest)
    contributors = sorted(map(_contributor, archive.contributors()), key=lambda one: (-one.tokens, one.peer))
    at = datetime.fromtimestamp(now_seconds, UTC)
    tokens = tuple(entries[0].tokens if entries else None for entries in newest)
    origin = f"the archive {archive.store.url}"
    return RunFacts(signed, book.order, at, rounds, tuple(contributors), origin, tokens)


async def from_directory(signed: SignedManifest, directory: Directory) -> RunFacts:
    """Return the facts of a running swarm, from one look-up of all stages, the owner's newest order and the
    objections.
    Raises WireError if the directory does not answer."""
    records = await look(directory, signed.run_id, len(signed.manifest.stages))
    book = _new_book(signed)
    await book.look_up(directory, LOOK_UP_SECONDS)
    objections = await directory.opinions(signed.run_id, "objection", LOOK_UP_SECONDS)
    now = directory.now()
    reported = [one.record for one in records.values()]
    settled = [settled_round(reported, stage) for stage in range(len(signed.manifest.stages))]
    rounds = tuple(-1 if round is None else round for round in settled)
    contributors = [
        CreditedContributor(record.peer, record.name, record.tokens, None, record.device, record.joules)
        for record in reported
        if record.tokens > 0
    ]
    contributors.sort(key=lambda one: (-one.tokens, one.peer))
    origin = _origin(Counter(record.stage for record in reported), len(rounds), book.order, now)
    at = datetime.fromtimestamp(now, UTC)
    tokens = tuple(finalized_tokens(reported, stage) for stage in range(len(rounds)))
    read = tuple((one.text_shards, one.text_shards_read) for one in reported if one.text_shards)
    active = Counter(record.stage for record in reported if record.state in IN_STEP)
    remembered = [record.settled for record in reported if record.stage < 0 and record.role in REMEMBER]
    return RunFacts(
        signed,
        book.order,
        at,
        rounds,
        tuple(contributors),
        origin,
        tokens,
        OF_RECORDS,
        read,
        tuple(expert_groups(signed.manifest, reported)),
        active_peers=tuple(active[stage] for stage in range(len(rounds))),
        remembered_round=max(remembered, default=-1),
        objections=tuple(objections),
    )


def _new_book(signed: SignedManifest) -> OrderBook:
    return OrderBook(signed=signed, kept=None, log_event=lambda *_, **__: None, notify=lambda *_: None)


def _origin(peers: Mapping[int, int], stages: int, order: OwnerOrders, now_seconds: float) -> str:
    """Return the source of the facts, for people. `peers`: number of peers by stage."""
    by_stage = ", ".join(f"stage {stage}: {peers.get(stage, 0)}" for stage in range(stages))
    who = f"{counted(sum(peers.values()), 'peer')} ({by_stage}, without a stage: {peers.get(NO_STAGE, 0)})"
    given = f"of {_moment(order.sequence / 1e6)}" if order.sequence else "(none was found)"
    return (
        f"the run's directory as it was on {_moment(now_seconds)}: what {who} reported in signed "
        f"records, each at most {RECORD_SECONDS:g} s old, and the newest order of the run's owner {given}"
    )


def _moment(seconds: float) -> str:
    """Format Unix time for people, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _contributor(one: Mapping[str, Any]) -> CreditedContributor:
    tokens = one.get("tokens")
    counts = tokens.values() if isinstance(tokens, dict) else ()
    total = sum(count for count in counts if isinstance(count, int))
    signed, joules = one.get("signed"), one.get("joules")
    return CreditedContributor(
        str(one.get("peer", ""))[:64],
        str(one.get("name", ""))[:64],
        total,
        signed if isinstance(signed, int) else 0,
        str(one.get("device", ""))[:16],
        joules if isinstance(joules, int) else 0,
    )
