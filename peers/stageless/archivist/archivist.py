"""Archive a run while it is trained: manifest, orders, contributors, and each stage's settled weights.

The peers of a stage offer their settled weights as a *snapshot*, and sign *statements* about its digest. The
archivist fetches the snapshot and keeps it with these statements as a checkpoint. An order is signed by the
run's owner, for example to pause the run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from peers.config.errors import UserError
from peers.network.discovery.claimed_tokens import Contributions
from peers.network.orders.order_book import OrderBook
from peers.stageless.archivist.archivist_links import ArchivistLinks, LinkContext
from peers.state import checkpoint_file
from peers.state.archive import GIVEN_UP, Archive, ArchivedCheckpoint, IndexFull, entry_name
from peers.state.archive_store import ArchiveError, sha256
from peers.state.snapshot_service import SNAPSHOTS_ALONE, NoState, SnapshotService, start_digest
from peers.state.snapshot_store import Snapshots, Weights
from peers.telemetry import log_events
from peers.telemetry.console import counted
from peers.telemetry.log_events import Notify
from protocols.errors import WireError
from protocols.signed.identity import Identity
from protocols.signed.records import SignedRecord
from protocols.signed.stored_orders import open_order_of
from swarmnet.identifiers import PeerId
from swarmnet.lineage import Return
from swarmnet.model.flat_layout import Layout
from swarmnet.model.state_layout import state_layout

ENDING_SECONDS = 15.0
"""Interval in seconds once the owner has ordered the run's end (peers/worker/run_end.py, `SERVE_SECONDS`)."""
FETCH_SECONDS = 900.0
"""Timeout for one stage's snapshot: 103 MB take 25 s from four holders on home links."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How often the run is archived, and which checkpoints are kept."""

    seconds: float = 600.0
    newest: int = 4
    """Number of newest checkpoints of each stage that are kept."""
    every: int = 0
    """Among the checkpoints older than the `newest`, each `every`-th possible one is kept; 0 keeps none of
    them (`kept` in peers/state/archive.py)."""


class NotArchived(Exception):
    """A stage could not be archived this time."""

    def __init__(self, code: str, reason: str) -> None:
        """Create the error. `code` is one of reasons.ARCHIVING."""
        super().__init__(reason)
        self.code = code


Failure = NotArchived | WireError | NoState | UserError | TimeoutError


def code_of(error: Failure) -> str:
    """Return the code of a failure, a key of reasons.ARCHIVING, for logs and metrics."""
    match error:
        case NotArchived():
            return error.code
        case WireError():
            return "directory_silent"
        case NoState():
            return "no_agreement"
        case IndexFull():
            return "index_full"
        case UserError():
            return "not_written"
        case _:
            return "deadline"


class Archivist:
    """Archives one run."""

    def __init__(
        self,
        *,
        archive: Archive,
        policy: Policy,
        identity: Identity,
        book: OrderBook,
        circle: ArchivistLinks,
        log_event: log_events.LogEvent,
        notify: Notify,
    ) -> None:
        self.archive = archive
        self.policy = policy
        self.book = book
        self.circle = circle
        self.log_event = log_event
        self.notify = notify
        self.manifest = book.signed.manifest
        self.contributions = Contributions(book.signed.run_id, self.manifest.rounds.snapshot_interval)
        self.signed: Counter[str] = Counter()
        """Number of archived checkpoints that each peer has signed, which proves that it held them."""
        self.failures: Counter[tuple[int, str]] = Counter()
        """Number of failures by stage and code since the start."""
        self.succeeded: dict[int, float] = {}
        """Time at which each stage was last archived or had nothing newer; swarm time, seconds since 1970."""
        self.devices: dict[str, str] = {}
        """The device that each peer claims to compute with."""
        self._returned: Return | None = None
        """The return to snapshots that the archive follows."""
        self._layouts: dict[int, Layout] = {}
        for stage in range(len(self.manifest.stages)):
            self._layouts[stage] = state_layout(self.manifest, stage)
            stage_links = LinkContext(circle, stage)
            snapshots = Snapshots(
                identity=identity, run_id=book.signed.run_id, stage=stage, rules=self.manifest.rounds
            )
            service = SnapshotService(
                snapshots=snapshots,
                neighbourhood=stage_links,
                state_bytes=self._layouts[stage].size * 4,
                log_event=log_event,
                notify=notify,
                signed=stage_links.roots,
                start=start_digest(self.manifest, stage),
            )
            stage_links.router.add(service)
            circle.states[stage] = (stage_links, service)
            circle.serving.snapshots[stage] = (snapshots, self._layouts[stage])

    async def open(self) -> None:
        """Open the archive, and read the orders and the contributors that are in it. Raises ArchiveError."""
        await asyncio.to_thread(self.archive.open, self.book.signed)
        documents = await asyncio.to_thread(self.archive.orders)
        self.book.take_archived(documents, self.archive.store.url)
        self._returned = self._archived_return(documents)
        await self._follow_return()
        for contributor in await asyncio.to_thread(self.archive.contributors):
            self._restore_contributor(contributor)

    def _archived_return(self, documents: Iterable[bytes]) -> Return | None:
        """Return the return to snapshots that the archive follows already."""
        for data in documents:
            with suppress(WireError):
                held = open_order_of(self.manifest, self.book.signed.run_id, data)
                if held.owner == self.manifest.owner:
                    return held.order.returned
        return None

    async def run(self) -> None:
        """Archive all stages in regular intervals until cancelled. What fails is reported, and tried again
        the next time."""
        while True:
            await self.once()
            interval = self.policy.seconds
            if self.book.order.ends is not None:  # The run ends, and its peers stay only a minute longer.
                interval = min(interval, ENDING_SECONDS)
            await asyncio.sleep(interval)

    async def once(self) -> None:
        """Archive every stage once, and write the orders and the contributors. A failure is reported, and the
        other stages are archived nevertheless."""
        try:
            await self._follow_return()
        except UserError as error:  # Tried again the next time. Until then, nothing may be archived.
            self.notify("archive", str(error))
            return
        await self._prune()  # First: if the policy now keeps less, a full archive has space again.
        for stage in self._layouts:
            try:
                await self.fetch_stage(stage)
                self.succeeded[stage] = self.circle.directory.now()
            except (NotArchived, WireError, NoState, UserError, TimeoutError) as error:
                self._report_failure(stage, error)
            finally:
                self.circle.part(stage)
        try:
            await self.write_facts()
        except UserError as error:
            self.notify("archive", str(error))

    async def _follow_return(self) -> None:
        """If the owner has ordered another return to snapshots, use only what belongs to it from now on, and
        set aside what the archive has of later rounds. Raises UserError."""
        returned, held = self.book.order.returned, self.book.held
        if returned is None or held is None:
            return
        for stage, (stage_links, service) in self.circle.states.items():
            lineage = returned.lineage(stage)
            if service.lineage == lineage:
                continue
            if returned != self._returned:
                round, _ = returned.points[stage]
                for entry in await asyncio.to_thread(self.archive.set_aside, stage, round):
                    self.notify("set_aside", f"the owner gave {entry.name} up: it ends with {GIVEN_UP} now")
            stage_links.statements.clear()
            service.snapshots.held = ()
            service.lineage = lineage
        if returned != self._returned:
            await asyncio.to_thread(self.archive.put_orders, (held.data,))
            self._returned = returned

    def _report_failure(self, stage: int, error: Failure) -> None:
        """Count, log and print that a stage was not archived."""
        code = code_of(error)
        self.failures[stage, code] += 1
        self.log_event(log_events.ArchivingFailed(stage=stage, code=code, reason=str(error)))
        self.notify("archive", f"stage {stage} is not archived this time: {error or 'it took too long'}")

    async def fetch_stage(self, stage: int) -> None:
        """Fetch the newest snapshot that the stage's peers offer, and archive it if some of them have signed
        it. Does nothing if none is newer than the archived ones. Raises one of `Failure`."""
        stage_links, service = self.circle.states[stage]
        records = await self.circle.gather(stage)
        self._update_contributors(records)
        if not records.keys() - self.circle.serving.served():  # Newcomers have no weights yet.
            raise NotArchived("no_peer", "no peer of it is there")
        if not stage_links.peers:
            raise NotArchived("not_reached", "none of its peers is reached")
        archived = self.archive.newest(stage)
        archived_round = archived[0].round if archived else -1
        async with asyncio.timeout(FETCH_SECONDS):
            holders = list(stage_links.peers)
            weights = await service.fetch(holders, have=SNAPSHOTS_ALONE, enough=archived_round)
        if weights is None:
            return  # No snapshot is newer than `archived_round`.
        digest = await asyncio.to_thread(checkpoint_file.state_digest, weights.settled_round, weights.units)
        statements = stage_links.signed(weights.settled_round, weights.chain + digest)
        if not statements:
            reason = f"no peer has signed the weights of round {weights.settled_round} yet"
            raise NotArchived("not_signed", reason)
        now = self.circle.directory.now()
        entry = await asyncio.to_thread(self._write_checkpoint, stage, weights, statements, now)
        self.signed.update(entry.signers)
        self.log_event(
            log_events.Archived(stage=stage, round=entry.round, bytes=entry.bytes, signers=len(statements))
        )
        text = f"archived stage {stage}, round {entry.round}, signed by {counted(len(statements), 'peer')}"
        self.notify("archived", f"{text}, in {self.archive.store.url}")
        await self._prune()

    async def _prune(self) -> None:
        """Delete the checkpoints that the policy does not keep. Errors of the store are only reported, and a
        later call tries again."""
        interval = self.manifest.rounds.snapshot_interval
        prune = partial(self.archive.prune, interval, self.policy.newest, self.policy.every)
        try:
            for deleted in await asyncio.to_thread(prune):
                self.log_event(log_events.Pruned(stage=deleted.stage, round=deleted.round))
        except UserError as error:
            self.notify("archive", str(error))

    def _write_checkpoint(
        self, stage: int, weights: Weights, statements: dict[PeerId, bytes], now: float
    ) -> ArchivedCheckpoint:
        """Write a checkpoint with its signed statements to the archive at time `now`. Returns its entry in
        the index. Raises NotArchived if it cannot be read back."""
        data = checkpoint_file.content(
            self.manifest,
            stage,
            weights.settled_round,
            weights.chain,
            weights.units,
            self._layouts[stage],
            list(statements.values()),
            tokens=weights.tokens,
        )
        entry = ArchivedCheckpoint(
            entry_name(stage, weights.settled_round),
            stage,
            weights.settled_round,
            len(data),
            sha256(data),
            tuple(sorted(statements)),
            now,
            weights.tokens,
        )
        self.archive.put(entry, data)
        try:  # Read back, to detect a store that keeps nothing.
            self.archive.checkpoint(entry)
        except ArchiveError as error:
            raise NotArchived("not_given_back", str(error)) from None
        return entry

    # -- contributors ---------------------------------------------------------------------------------

    def _update_contributors(self, records: dict[PeerId, SignedRecord]) -> None:
        """Count the tokens and the energy that each peer's new record claims beyond the record before."""
        for peer, signed in records.items():
            self.contributions.add(signed.record, signed.sequence / 1e6)
            self.devices[peer] = signed.record.device

    def _restore_contributor(self, archived: dict[str, Any]) -> None:
        """Restore a contributor from the archive of an earlier process. Invalid values are left out."""
        peer = self.contributions.restore_archived(archived)
        if not peer:
            return
        self.devices[peer] = str(archived.get("device", ""))[:16]
        signed = archived.get("signed")
        self.signed[peer] = signed if isinstance(signed, int) and signed > 0 else 0

    async def write_facts(self) -> None:
        """Write to the archive the newest orders, and for each contributor its name, tokens and confirmed
        contributions by stage, number of signed checkpoints, device and energy."""
        await asyncio.to_thread(self.archive.put_orders, self.book.documents)
        tokens: dict[str, dict[str, int]] = {peer: {} for peer in sorted(self.signed)}
        for (peer, stage), count in sorted(self.contributions.tokens.items()):
            tokens.setdefault(peer, {})[str(stage)] = count
        confirmed = self.contributions.confirmed
        contributors = [
            {
                "peer": peer,
                "name": self.contributions.names.get(peer, ""),
                "tokens": counts,
                "confirmed": {
                    stage: confirmed[peer, int(stage)] for stage in counts if (peer, int(stage)) in confirmed
                },
                "signed": self.signed[peer],
                "device": self.devices.get(peer, ""),
                "joules": self.contributions.joules[peer],
            }
            for peer, counts in tokens.items()
        ]
        await asyncio.to_thread(self.archive.put_contributors, contributors)
