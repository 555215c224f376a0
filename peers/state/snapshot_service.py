"""Serve the settled weights as snapshots to peers that join, and fetch them when this peer joins.

Every `snapshot_interval` settled rounds, all peers of a group keep the same snapshot. Its root, which each
peer signs, names the round, the digest of the weights and the hash of each chunk. A joining peer asks its
group for offers: an offer lists roots, and names the oldest round whose set of contributions is kept. The
joining peer chooses the newest root that two thirds offer or have signed, and fetches its chunks from several
of the peers that offer it (holders). Then it catches up with the sets of later rounds. Carriers are extra
connections for chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median_low
from typing import Protocol

import msgspec

from peers.network.message_router import handles
from peers.runtime.lived_clock import Clock
from peers.state.checkpoint_file import state_digest
from peers.state.chunks.chunk_transfer import ChunkTransfer
from peers.state.partial_download import Download, KeptChunks
from peers.state.snapshot_store import (
    NOT_BEGUN,
    SNAPSHOTS_KEPT,
    RoundProgress,
    Snapshots,
    Weights,
    sealed_round,
    units_of,
)
from peers.telemetry import log_events
from peers.telemetry.console import amount
from peers.telemetry.log_events import Notify
from peers.telemetry.reasons import HOLDERS
from protocols.errors import CannotStart, Malformed, WireError
from protocols.fields import Body
from protocols.messages.table import (
    HEADER_LIMIT,
    Chunk,
    GetChunk,
    GetState,
    Lane,
    Message,
    NoChunk,
    SnapshotOffer,
    SnapshotRoot,
)
from protocols.ports import ChunkDownloader, Transport
from protocols.signed import msgpack_guard
from protocols.signed.envelope import EnvelopeKind, open_envelope
from protocols.signed.token_count import tokens_in
from swarmnet.identifiers import PeerId, RunId
from swarmnet.lineage import NO_RETURN, Lineage
from swarmnet.membership.peer_info import PeerInfo
from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.rounds.history import START
from swarmnet.run.manifest import Manifest
from swarmnet.snapshots.digest_votes import Root
from swarmnet.snapshots.fetch import (
    ASKED_AT_ONCE,
    Dropped,
    SnapshotFetch,
    choose_restart,
    choose_root,
    chunk_bytes,
)

OFFER_SECONDS = 2.0
"""Seconds that a newcomer waits for the slowest neighbour's offer."""
ASK_AGAIN_SECONDS = 0.25
MORE_HOLDERS_SECONDS = 2.0
"""Interval for asking more peers during a fetch: 103 MB take 25 s from four holders on home links."""
CARRIERS = 6
"""Number of carriers, each a p2pd that takes 60 MB during the fetch.

At 50 ms and 1 % loss a connection carries 2.7 Mbit/s on average, but unevenly. Six use 86 to 91 % of a
holder's 10 Mbit/s (measured), four only 79 %."""
NOTHING = -2
"""Value of `have` in `SnapshotService.fetch` if this peer has no weights, not even the initial ones."""
SNAPSHOTS_ALONE = -3
"""The same, if neither contributions nor the initial weights would suffice."""
CARRIED_BYTES = 8 << 20
"""A smaller state arrives before carriers would help."""
_root_decoder: msgspec.msgpack.Decoder[SnapshotRoot] = msgspec.msgpack.Decoder(SnapshotRoot)


class SnapshotPorts(Protocol):
    """The part of the neighbourhood that the state path needs."""

    @property
    def clock(self) -> Clock: ...

    @property
    def transport(self) -> Transport: ...

    def known(self) -> Mapping[PeerId, PeerInfo]:
        """Return the known peers."""

    def post(self, peer: PeerId, lane: Lane, message: Message, body: Body = b"") -> bool: ...

    def answer(self, peer: PeerId, lane: Lane, message: Message, body: Body = b"") -> None:
        """Send a response to a neighbour or a visitor."""

    def refused(self, peer: PeerId, code: str, reason: str) -> None: ...


def start_digest(manifest: Manifest, stage: int) -> bytes | None:
    """Return the digest of a stage's initial weights if they are a model; None if the seed makes them."""
    return (
        bytes.fromhex(manifest.init_checkpoint.digests[stage]) if manifest.init_checkpoint.digests else None
    )


def open_root(
    data: bytes, peer: PeerId, run_id: RunId, stage: int, state_bytes: int
) -> tuple[SnapshotRoot, int | None]:
    """Verify a root that `peer` signed for a stage of this size. Returns it and the tokens in all settled
    rounds up to it, if reported. Raises WireError, msgspec.DecodeError or UnicodeDecodeError."""
    envelope = open_envelope(data, run_id, EnvelopeKind.SNAPSHOT, HEADER_LIMIT)
    msgpack_guard.check(envelope.payload, HEADER_LIMIT)
    root = _root_decoder.decode(envelope.payload)
    chunk_count = -(-state_bytes // chunk_bytes(state_bytes))  # Rounded up.
    if (
        envelope.sender != peer
        or root.stage != stage
        or sealed_round(root.round) != envelope.round
        or root.size != state_bytes
        or len(root.chunks) != chunk_count
    ):
        raise Malformed("a snapshot root that does not fit this stage")
    return root, tokens_in(envelope.sequence)


class NoState(Exception):
    """No neighbour could provide the state. The message says why."""


class FalseRoot(NoState):
    """The chunks that these holders listed for a snapshot do not have its digest."""

    def __init__(self, round: int, holders: Sequence[PeerId]) -> None:
        super().__init__(f"the chunks of the snapshot of round {round} do not make up its digest")
        self.holders = tuple(holders)


@dataclass(frozen=True, slots=True)
class RunningFetch:
    """The snapshot that is being fetched."""

    root: SnapshotRoot
    transfer: ChunkTransfer
    carriers: ChunkDownloader | None


class SnapshotService:
    """Serves snapshots, and fetches one when this peer needs it."""

    def __init__(
        self,
        *,
        snapshots: Snapshots,
        neighbourhood: SnapshotPorts,
        state_bytes: int,
        log_event: log_events.LogEvent,
        notify: Notify,
        signed: Callable[[], Mapping[PeerId, Collection[Root]]],
        start: bytes | None,
        kept: KeptChunks | None = None,
        progress: Callable[[], RoundProgress] = lambda: NOT_BEGUN,
        vouched: Callable[[PeerId, SnapshotRoot], bool] = lambda peer, root: True,
        lineage: Lineage = NO_RETURN,
    ) -> None:
        """`signed()` returns the roots that each peer has signed. `start` is the digest of the initial
        weights if the seed does not make them. `kept` has the chunks of a download that survive a restart.
        `progress()` returns this peer's progress. `vouched` returns whether a peer may offer a root
        (peers/state/archivists.py). `lineage` decides which roots belong to the run's present history."""
        self.lineage = lineage
        self.snapshots = snapshots
        self.neighbourhood = neighbourhood
        self.state_bytes = state_bytes
        """Size in bytes of this stage's weights, known from the manifest."""
        self.log_event = log_event
        self.notify = notify
        self.progress = progress
        self.signed = signed
        self.vouched = vouched
        self.start = start
        self._false_starts: set[PeerId] = set()
        """Peers whose chunk lists of the initial weights were wrong."""
        self.kept = kept or KeptChunks(None, notify)
        self.fetched_bytes = 0
        """Bytes of the newest state, including those fetched before a restart of this peer."""
        self.kept_bytes = 0
        """The part of them that was fetched before the restart."""
        self.chunks_refused = 0
        """Number of chunks with a wrong hash."""
        self._offers: dict[PeerId, SnapshotOffer] = {}
        self._reported_tokens: dict[tuple[PeerId, bytes], int] = {}
        """Tokens in all rounds up to a snapshot, by (reporting peer, snapshot digest)."""
        self._asked: set[PeerId] = set()
        """Peers whose offers are accepted."""
        self._all_offered = asyncio.Event()
        self._running: RunningFetch | None = None
        neighbourhood.transport.serve_chunks(self.chunk)

    def close(self) -> None:
        if self._running is not None:
            self._running.transfer.close()

    def _now(self) -> float:
        return self.neighbourhood.clock.time()

    # -- serving --------------------------------------------------------------------------------------

    @handles(GetState)
    def _get_state(self, peer: PeerId, _message: GetState, _body: bytes) -> None:
        self.neighbourhood.answer(peer, "group", self._make_offer())

    @handles(NoChunk)
    def _no_chunk(self, peer: PeerId, message: NoChunk, _body: bytes) -> None:
        if self._running is not None and self._running.root.digest == message.digest:
            self._running.transfer.drop(peer, "no_chunk", f"no longer has chunk {message.index}")

    def _make_offer(self) -> SnapshotOffer:
        """Return this peer's offer: its progress, its snapshots, and the oldest round whose set it has. It
        has the sets since it began, at most those of the newest `kept_rounds` settled rounds."""
        progress = self.progress()
        oldest_kept = progress.settled + 1 - kept_rounds(self.snapshots.rules)
        oldest_set = max(0, progress.began + 1, oldest_kept)
        roots = [snapshot.signed for snapshot in self.snapshots.offered()]
        return SnapshotOffer(
            self.snapshots.stage, progress.current, progress.settled, progress.digest, roots, oldest_set
        )

    @handles(GetChunk)
    def _send_chunk(self, peer: PeerId, request: GetChunk, _body: bytes) -> None:
        chunk = self.chunk(request.digest, request.index)
        if chunk is None:
            self.neighbourhood.answer(peer, "group", NoChunk(request.digest, request.index))
        else:
            self.neighbourhood.answer(peer, "bulk", Chunk(request.digest, request.index), chunk)

    # -- fetching -------------------------------------------------------------------------------------

    async def fetch(
        self, holders: Sequence[PeerId], have: int, enough: int = -1, apart: bool = False
    ) -> Weights | None:
        """Fetch the newest snapshot on which `holders`, peers of the group, agree. Returns its weights.

        `have` is the round of the weights here: -1 for the initial weights, and NOTHING without any. Returns
        None if all training peers have the sets that continue from `have`, or if the snapshot is not newer
        than round `enough`. With `have` NOTHING and no snapshot, the initial weights are fetched. If no peer
        trains (the whole group restarts), the newest state that the disks share is used, even one before
        `have`; with `apart` also if training peers do not agree. Raises NoState if none can be had."""
        self._offers = {}
        self._asked = set(holders)
        self._reported_tokens = {}
        self._all_offered.clear()
        deadline = self._now() + OFFER_SECONDS
        while self._offers.keys() < self._asked and self._now() < deadline:
            # Ask again each time: a peer may have had no link to reply.
            for holder in sorted(self._asked - self._offers.keys()):
                self.neighbourhood.post(holder, "group", GetState())
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_SECONDS):
                    await self._all_offered.wait()
        if self._offers.keys() < self._asked:
            self.log_event(log_events.OffersMissing(peers=sorted(self._asked - self._offers.keys())))
        if not self._offers:
            raise NoState(f"none of {len(holders)} peers of the stage said what it has")
        valid = {peer: self._valid_roots(peer, offer) for peer, offer in self._offers.items()}
        admitted = {peer: [root for root in roots if self._admits(root)] for peer, roots in valid.items()}
        # A peer that offers roots of another era does not train in this one, whatever it reports.
        of_era = {peer for peer, roots in valid.items() if len(admitted[peer]) == len(roots)}
        training = {
            peer: offer for peer, offer in self._offers.items() if offer.round >= 0 and peer in of_era
        }
        if training and all(offer.oldest_set <= have + 1 for offer in training.values()):
            return None  # Their sets suffice to continue from `have`.
        offers = training or self._offers
        roots = {peer: admitted[peer] for peer in offers}
        named = {
            peer: [(root.round, root.digest) for root in offered if root.round >= 0]
            for peer, offered in roots.items()
        }
        if training:  # A resumed root must be newer than `have`, and all peers must have the sets after it.
            first_round = max(0, have + 1, *(offer.oldest_set - 1 for offer in training.values()))
            usable = [root for offered in roots.values() for root in offered if root.round >= first_round]
            chosen = choose_root(named, self.signed(), await self.kept.worth_resuming(usable))
        else:
            chosen = self._choose_restart_root(named)
        if chosen is None and apart:
            chosen = self._choose_restart_root(named)
        if chosen is None and have == NOTHING and self.start is not None and not self.lineage.era:
            all_sets_kept = all(offer.oldest_set == 0 for offer in offers.values())
            return await self._fetch_start(all_sets_kept)
        if chosen is None and (training or have == NOTHING):
            raise NoState(f"{len(roots)} peers of the stage agree on no snapshot yet")
        if chosen is None:
            return None
        chosen_round, chosen_digest = chosen
        if chosen_round <= enough:
            return None
        own = self.snapshots.find(chosen_digest)
        if own is not None:
            return own.weights()
        chosen_roots = {
            peer: root
            for peer, offered in roots.items()
            for root in offered
            if (root.round, root.digest) == chosen
        }
        return await self._fetch_root(chosen_roots)

    def _admits(self, root: SnapshotRoot) -> bool:
        return self.lineage.admits((root.round, root.digest), root.chain)

    async def _fetch_start(self, all_sets_kept: bool) -> Weights:
        """Fetch the initial weights from the peers that offer them. Raises NoState if none offers them, or if
        not `all_sets_kept`: without the sets of all rounds, this peer could not continue from there."""
        roots = {
            peer: root
            for peer, offer in self._offers.items()
            for root in self._valid_roots(peer, offer)
            if root.round < 0 and peer not in self._false_starts
        }
        if not all_sets_kept or not roots:
            asked = len(self._offers)
            raise NoState(f"none of {asked} peers of the stage has the weights that the run starts from")
        try:
            return await self._fetch_root(roots)
        except FalseRoot as error:
            self._false_starts.update(error.holders)  # The next attempt uses other holders.
            raise

    def _choose_restart_root(self, named: dict[PeerId, list[tuple[int, bytes]]]) -> tuple[int, bytes] | None:
        """Return (round, digest) of the root from which the group restarts when no peer trains; None if all
        disks are empty. `named` has the other peers' roots. All peers choose alike from the same disks."""
        me = self.neighbourhood.transport.peer
        own = [(snapshot.root.round, snapshot.root.digest) for snapshot in self.snapshots.held]
        disks = {peer: roots for peer, roots in {me: own, **named}.items() if roots}
        return choose_restart(disks, self.signed())

    @handles(SnapshotOffer)
    def _on_offer(self, peer: PeerId, state: SnapshotOffer, _body: bytes) -> None:
        """Keep an offer of a peer that was asked. If it lists the snapshot that is being fetched, with the
        same chunks, the peer becomes another holder."""
        if peer not in self._asked or state.stage != self.snapshots.stage:
            return
        self._offers[peer] = state
        if self._offers.keys() >= self._asked:
            self._all_offered.set()
        running = self._running
        if running is not None:
            for offered in self._valid_roots(peer, state):
                hashes = running.transfer.fetch.hashes
                if offered.digest == running.root.digest and tuple(offered.chunks) == hashes:
                    running.transfer.add(peer)

    def _valid_roots(self, peer: PeerId, offer: SnapshotOffer) -> list[SnapshotRoot]:
        """Return the roots in a peer's offer that it has signed and that fit this stage; others are refused.
        Roots that need another peer's signature, those of archivists, are left out without it. Store the
        number of tokens that the peer reports for each root in `_reported_tokens`."""
        roots = []
        for signed in offer.roots[:SNAPSHOTS_KEPT]:
            try:
                root, reported = open_root(
                    signed, peer, self.snapshots.run_id, self.snapshots.stage, self.state_bytes
                )
                if root.round < 0 and (root.digest != self.start or root.chain != START):
                    raise Malformed("a snapshot root of another start than the run's")
            except (WireError, msgspec.DecodeError, UnicodeDecodeError) as error:
                self.neighbourhood.refused(peer, "malformed", str(error))
                continue
            is_target = (root.round, root.digest) == self.lineage.target  # Its owner vouches for it.
            if root.round < 0 or is_target or self.vouched(peer, root):
                roots.append(root)
                if reported is not None:
                    self._reported_tokens[peer, root.digest] = reported
        return roots

    async def _fetch_root(self, roots: dict[PeerId, SnapshotRoot]) -> Weights:
        """Fetch all chunks of one snapshot. `roots` has the root of each peer that offers it. All have the
        same digest, but the lists of chunk hashes may differ: the most frequent list is used. Raises NoState
        if all holders fail, and FalseRoot if the chunks do not have the digest."""
        lists = [tuple(root.chunks) for root in roots.values()]
        hashes = max(lists, key=lists.count)
        holders = [peer for peer, root in roots.items() if tuple(root.chunks) == hashes]
        root = roots[holders[0]]
        download = Download(self.kept, hashes, root.size)
        resumed = await download.resume()
        self.kept_bytes = sum(len(download.part(index)) for index in resumed)
        self.fetched_bytes = self.kept_bytes
        carriers = await self._open_carriers(root.size - self.kept_bytes)
        at_once = carriers.requests_per_holder if carriers is not None else ASKED_AT_ONCE
        fetch = SnapshotFetch(hashes=hashes, holders=holders, asked_at_once=at_once, here=resumed)
        self.log_event(
            log_events.Fetching(round=root.round, size=root.size, kept=self.kept_bytes, holders=len(holders))
        )
        size = amount(root.size) + (f", {amount(self.kept_bytes)} of it on disk" if resumed else "")
        which = f"of round {root.round}" if root.round >= 0 else "that the run starts from"
        self.notify("weights", f"fetches the weights {which}: {size}, holders: {len(holders)}")

        def put(index: int, chunk: bytes) -> None:
            """Store a chunk. A complete download needs no copy on disk."""
            download.put(index, chunk)
            self.fetched_bytes += len(chunk)
            if fetch.missing:
                download.keep(index)

        transfer = ChunkTransfer(
            fetch=fetch,
            size=root.size,
            clock=self.neighbourhood.clock,
            request=self._request,
            put=put,
            dropped=self._report_dropped,
        )
        self._running = RunningFetch(root, transfer, carriers)
        try:
            transfer.start()
            while not transfer.ended.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(MORE_HOLDERS_SECONDS):
                        await transfer.ended.wait()
                self._ask_others(fetch)
        finally:
            self._running = None
            transfer.close()
            if carriers is not None:
                await carriers.close()
            await download.close()
        if fetch.stuck:  # No holder is left.
            raise NoState(f"all {len(holders)} holders of the snapshot of round {root.round} failed")
        await self.kept.remove()
        units = units_of(bytes(download.data))
        if state_digest(root.round, units) != root.digest:
            raise FalseRoot(root.round, holders)
        tokens = [
            self._reported_tokens[peer, root.digest]
            for peer in roots
            if (peer, root.digest) in self._reported_tokens
        ]
        chain = self.lineage.continue_chain((root.round, root.digest), root.chain)
        return Weights(units, root.round, chain, tokens=median_low(tokens) if tokens else None)

    def _ask_others(self, fetch: SnapshotFetch) -> None:
        """Ask the other linked peers of the group for offers, because they may have the snapshot by now.
        Peers that are holders, or were dropped as such, are not asked."""
        for peer, known in self.neighbourhood.known().items():
            is_new = peer not in fetch.holders and peer not in fetch.dropped
            if known.linked and known.stage == self.snapshots.stage and is_new:
                self._asked.add(peer)
                self.neighbourhood.post(peer, "group", GetState())

    async def _open_carriers(self, size: int) -> ChunkDownloader | None:
        """Open extra connections if at least `CARRIED_BYTES` are to be fetched. Returns None if fewer, or if
        they cannot be opened: the fetch then only takes longer."""
        if size < CARRIED_BYTES:
            return None
        try:
            return await self.neighbourhood.transport.carriers(
                CARRIERS, self._on_carrier_chunk, self._on_carrier_progress
            )
        except CannotStart as error:
            self.log_event(log_events.NoCarriers(reason=str(error)))
            return None

    def _on_carrier_progress(self, peer: PeerId) -> None:
        if self._running is not None:
            self._running.transfer.progressed(peer)

    def _on_carrier_chunk(self, peer: PeerId, digest: bytes, index: int, chunk: bytes | None) -> None:
        """Handle a chunk from a carrier. If `chunk` is None, the connection failed, and the chunk is
        requested over the normal link."""
        if chunk is not None:
            self._on_chunk(peer, Chunk(digest, index), chunk)
        elif self._running is not None and digest == self._running.root.digest:
            self.neighbourhood.post(peer, "group", GetChunk(digest, index))

    def chunk(self, digest: bytes, index: int) -> memoryview | None:
        """Return a chunk of the snapshot with this digest, or None if there is no such snapshot or chunk."""
        snapshot = self.snapshots.find(digest)
        if snapshot is None or not 0 <= index < len(snapshot.root.chunks):
            return None
        return snapshot.chunk(index)

    @handles(Chunk)
    def _on_chunk(self, peer: PeerId, message: Chunk, body: bytes) -> None:
        """Check a received chunk, store it, and continue the fetch. Chunks of other snapshots are ignored."""
        running = self._running
        if running is not None and message.digest == running.root.digest:
            self.chunks_refused += not running.transfer.receive(peer, message.index, body)

    def unlinked(self, peer: PeerId) -> None:
        """Drop a holder whose link has ended."""
        if self._running is not None:
            self._running.transfer.drop(peer, "gone")

    def _request(self, peer: PeerId, index: int) -> None:
        """Request a chunk of the running fetch, over carriers if there are any."""
        running = self._running
        if running is None:
            return
        known = self.neighbourhood.known().get(peer)
        if running.carriers is not None and known is not None:
            running.carriers.ask(peer, known.addresses, running.root.digest, index)
        else:
            self.neighbourhood.post(peer, "group", GetChunk(running.root.digest, index))

    def _report_dropped(self, dropped: Dropped) -> None:
        reason = dropped.reason or HOLDERS[dropped.code].meaning
        if dropped.code == "wrong_length":
            self.neighbourhood.refused(dropped.peer, "malformed", reason)
        self.log_event(log_events.HolderDropped(peer=dropped.peer, code=dropped.code, reason=reason))
        left = len(self._running.transfer.fetch.holders) if self._running is not None else 0
        self.notify("holder", f"{dropped.peer} {reason}; it is asked no more, other holders: {left}")
