"""Serve the settled weights as snapshots to newcomers, and fetch them when this peer is one.

Every `snapshot_interval` settled rounds, all peers of a group keep the same snapshot: chunks named by hash
under one signed root. A newcomer chooses the newest root that two thirds of its group name and fetches chunks
from several peers at once. From there it continues with contributions (`GroupRounds`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from statistics import median_low
from typing import Protocol

import msgspec

from peers.runtime.lived_clock import Clock
from peers.runtime.timer import Timer
from peers.state.checkpoint_file import state_digest
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
from peers.telemetry import events as events
from peers.telemetry.console import amount
from peers.telemetry.events import Notify
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
from protocols.ports import Carries, Transport
from protocols.signed import msgpack_guard
from protocols.signed.envelope import EnvelopeKind, open_envelope
from protocols.signed.token_count import tokens_in
from swarmnet.identifiers import PeerId
from swarmnet.membership.machine import PeerInfo
from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.rounds.history import START
from swarmnet.run.manifest import Manifest
from swarmnet.snapshots.digest_votes import Root
from swarmnet.snapshots.fetch import (
    ASKED_AT_ONCE,
    Dropped,
    RequestChunk,
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


class NoState(Exception):
    """No neighbour could provide the state. The message says why."""


class FalseRoot(NoState):
    """The chunks that these holders listed for a snapshot do not have its digest."""

    def __init__(self, round: int, holders: Sequence[PeerId]) -> None:
        super().__init__(f"the chunks of the snapshot of round {round} do not make up its digest")
        self.holders = tuple(holders)


class SnapshotService:
    """Serves snapshots, and fetches one when this peer needs it."""

    def __init__(
        self,
        snapshots: Snapshots,
        neighbourhood: SnapshotPorts,
        state_bytes: int,
        log_event: events.LogEvent,
        notify: Notify,
    ) -> None:
        self.snapshots = snapshots
        self.neighbourhood = neighbourhood
        self.state_bytes = state_bytes
        """Size in bytes of this stage's weights, known from the manifest."""
        self.log_event = log_event
        self.notify = notify
        self.clock = neighbourhood.clock
        self.settled_now: Callable[[], RoundProgress] = lambda: NOT_BEGUN
        """Returns the progress of this peer once it has begun."""
        self.signed: Callable[[], Mapping[PeerId, Collection[Root]]] = dict
        """Returns the roots that each peer has signed (worker/rounds/digest_gossip.py)."""
        self.vouched: Callable[[PeerId, SnapshotRoot], bool] = lambda peer, root: True
        """Returns True if a peer may offer this root (peers/state/archivists.py)."""
        self.start: bytes | None = None
        """Digest of the initial weights if the seed does not make them."""
        self._false_starts: set[PeerId] = set()
        """Peers whose chunk lists of the initial weights were wrong."""
        self.kept = KeptChunks(None, notify)
        """Chunks of a download that survive a restart of this peer."""
        self.fetched_bytes = 0
        """Bytes of the newest state, including those fetched before a restart of this peer."""
        self.kept_bytes = 0
        """The part of them that was fetched before the restart."""
        self.chunks_refused = 0
        """Number of chunks with a wrong hash."""
        self._offers: dict[PeerId, SnapshotOffer] = {}
        self._tokens: dict[tuple[PeerId, bytes], int] = {}
        """Tokens in all rounds up to a snapshot, by (reporting peer, snapshot digest)."""
        self._asked: set[PeerId] = set()
        self._offered = asyncio.Event()
        self._fetch: SnapshotFetch | None = None
        self._root: SnapshotRoot | None = None
        self._download: Download | None = None
        self._fetched = asyncio.Event()
        self._carriers: Carries | None = None
        self._timer = Timer(self._tick, self.clock)
        neighbourhood.transport.serve_chunks(self.chunk)

    def close(self) -> None:
        self._timer.close()

    # -- serving --------------------------------------------------------------------------------------

    def message(self, peer: PeerId, message: Message, body: bytes) -> None:
        """Handle a message of the state path."""
        match message:
            case GetState():
                self.neighbourhood.answer(peer, "group", self._state())
            case GetChunk(digest, index):
                self._serve(peer, digest, index)
            case SnapshotOffer():
                self._offer(peer, message)
            case Chunk(digest, index):
                self._arrived(peer, digest, index, body)
            case NoChunk(digest, index):
                if self._root is not None and self._root.digest == digest and self._fetch is not None:
                    reason = f"no longer has chunk {index}"
                    self._do(self._fetch.drop(peer, "no_chunk", self.clock.time(), reason))

    def _state(self) -> SnapshotOffer:
        now = self.settled_now()
        oldest = max(0, now.began + 1, now.settled + 1 - kept_rounds(self.snapshots.rules))
        roots = [snapshot.signed for snapshot in self.snapshots.offered()]
        return SnapshotOffer(self.snapshots.stage, now.current, now.settled, now.digest, roots, oldest)

    def _serve(self, peer: PeerId, digest: bytes, index: int) -> None:
        chunk = self.chunk(digest, index)
        if chunk is None:
            self.neighbourhood.answer(peer, "group", NoChunk(digest, index))
        else:
            self.neighbourhood.answer(peer, "bulk", Chunk(digest, index), chunk)

    # -- fetching -------------------------------------------------------------------------------------

    async def fetch(
        self, holders: Sequence[PeerId], have: int, enough: int = -1, apart: bool = False
    ) -> Weights | None:
        """Fetch the newest agreed snapshot and return its weights.

        Returns None if contributions alone suffice to continue from round `have`, or if no snapshot is newer
        than round `enough`. `have` is -1 for the initial weights, and NOTHING without them: then the initial
        weights are fetched if there is no snapshot. If no peer has begun yet (all were restarted), the newest
        state that the disks share is used, which may be older than `have`. With `apart`, the same holds if
        the peers that have begun do not agree. Raises NoState if no peer offers a way."""
        self._offers, self._asked, self._tokens = {}, set(holders), {}
        self._offered.clear()
        until = self.clock.time() + OFFER_SECONDS
        while self._offers.keys() < self._asked and self.clock.time() < until:
            for holder in sorted(self._asked - self._offers.keys()):  # It may not have had a link to us yet.
                self.neighbourhood.post(holder, "group", GetState())
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_SECONDS):
                    await self._offered.wait()
        if self._offers.keys() < self._asked:
            self.log_event(events.OffersMissing(peers=sorted(self._asked - self._offers.keys())))
        if not self._offers:
            raise NoState(f"none of {len(holders)} peers of the stage said what it has")
        begun = {peer: offer for peer, offer in self._offers.items() if offer.round >= 0}
        if begun and all(offer.oldest_set <= have + 1 for offer in begun.values()):
            return None
        offers = begun or self._offers
        roots = {peer: self._roots(peer, offer) for peer, offer in offers.items()}
        named = {
            peer: [(root.round, root.digest) for root in offered if root.round >= 0]
            for peer, offered in roots.items()
        }
        if begun:  # The root must be new here, and every peer must have the sets after it.
            first = max(have + 1, *(offer.oldest_set - 1 for offer in begun.values()))
            usable = [root for offered in roots.values() for root in offered if root.round >= max(0, first)]
            chosen = choose_root(named, self.signed(), await self.kept.worth_resuming(usable))
        else:
            chosen = self._choose_disk(named)
        if chosen is None and apart:
            chosen = self._choose_disk(named)
        if chosen is None and have == NOTHING and self.start is not None:
            return await self._fetch_start(all(not offer.oldest_set for offer in offers.values()))
        if chosen is None and begun:
            raise NoState(f"{len(roots)} peers of the stage agree on no snapshot yet")
        if chosen is None:
            return None
        if chosen[0] <= enough:
            return None
        own = self.snapshots.find(chosen[1])
        if own is not None:
            return own.weights()
        naming = {
            peer: root for peer, offered in roots.items() for root in offered
            if (root.round, root.digest) == chosen
        }  # fmt: skip
        return await self._fetch_root(naming)

    async def _fetch_start(self, leads_on: bool) -> Weights:
        """Fetch the initial weights from the peers that have them. `leads_on`: the sets of all rounds are
        available."""
        naming = {
            peer: root for peer, offer in self._offers.items() for root in self._roots(peer, offer)
            if root.round < 0 and peer not in self._false_starts
        }  # fmt: skip
        if not leads_on or not naming:
            asked = len(self._offers)
            raise NoState(f"none of {asked} peers of the stage has the weights that the run starts from")
        try:
            return await self._fetch_root(naming)
        except FalseRoot as error:
            self._false_starts.update(error.holders)
            raise

    def _choose_disk(self, named: dict[PeerId, list[tuple[int, bytes]]]) -> tuple[int, bytes] | None:
        """Choose the state from the disks of all peers, because the whole group restarts and no peer trains
        yet."""
        me = self.neighbourhood.transport.peer
        own = [(snapshot.root.round, snapshot.root.digest) for snapshot in self.snapshots.held]
        disks = {peer: roots for peer, roots in {me: own, **named}.items() if roots}
        return choose_restart(disks, self.signed())

    def _offer(self, peer: PeerId, state: SnapshotOffer) -> None:
        """Keep a requested offer. A late one may add a holder to the running fetch."""
        if peer not in self._asked or state.stage != self.snapshots.stage:
            return
        self._offers[peer] = state
        if self._offers.keys() >= self._asked:
            self._offered.set()
        fetch, root = self._fetch, self._root
        if fetch is not None and root is not None:  # A late offer may still help.
            for offered in self._roots(peer, state):
                if offered.digest == root.digest and tuple(offered.chunks) == fetch.hashes:
                    self._do(fetch.add(peer, self.clock.time()))

    def _roots(self, peer: PeerId, offer: SnapshotOffer) -> list[SnapshotRoot]:
        """Return the roots that a peer itself has signed and that fit this stage."""
        roots = []
        for signed in offer.roots[:SNAPSHOTS_KEPT]:
            try:
                envelope = open_envelope(signed, self.snapshots.run_id, EnvelopeKind.SNAPSHOT, HEADER_LIMIT)
                msgpack_guard.check(envelope.payload, HEADER_LIMIT)
                root = _root_decoder.decode(envelope.payload)
                count = -(-self.state_bytes // chunk_bytes(self.state_bytes))
                if (
                    envelope.sender != peer or root.stage != self.snapshots.stage
                    or sealed_round(root.round) != envelope.round
                    or root.size != self.state_bytes or len(root.chunks) != count
                ):  # fmt: skip
                    raise Malformed("a snapshot root that does not fit this stage")
                if root.round < 0 and (root.digest != self.start or root.chain != START):
                    raise Malformed("a snapshot root of another start than the run's")
            except (WireError, msgspec.DecodeError, UnicodeDecodeError) as error:
                self.neighbourhood.refused(peer, "malformed", str(error))
                continue
            if root.round < 0 or self.vouched(peer, root):
                roots.append(root)
                if (tokens := tokens_in(envelope.sequence)) is not None:
                    self._tokens[peer, root.digest] = tokens
        return roots

    async def _fetch_root(self, naming: dict[PeerId, SnapshotRoot]) -> Weights:
        """Fetch all chunks of a root from the peers that name it. Peers that name the same digest may still
        list different chunk hashes. The most frequent list is tried, and the digest of the whole state
        decides."""
        lists = [tuple(root.chunks) for root in naming.values()]
        hashes = max(lists, key=lists.count)
        holders = [peer for peer, root in naming.items() if tuple(root.chunks) == hashes]
        root = self._root = naming[holders[0]]
        download = self._download = Download(self.kept, hashes, root.size)
        here = await download.resume()
        self.kept_bytes = self.fetched_bytes = sum(len(download.part(index)) for index in here)
        self._fetched.clear()
        carriers = self._carriers = await self._open_carriers(root.size - self.kept_bytes)
        at_once = carriers.lanes_per_holder if carriers is not None else ASKED_AT_ONCE
        self._fetch = SnapshotFetch(hashes, holders, at_once, here)
        self.log_event(
            events.Fetching(round=root.round, size=root.size, kept=self.kept_bytes, holders=len(holders))
        )
        size = amount(root.size) + (f", {amount(self.kept_bytes)} of it on disk" if here else "")
        which = f"of round {root.round}" if root.round >= 0 else "that the run starts from"
        self.notify("weights", f"fetches the weights {which}: {size}, holders: {len(holders)}")
        try:
            self._do(self._fetch.start(self.clock.time()))
            while not self._fetched.is_set():  # Holders that stall are dropped; without holders it is stuck.
                with suppress(TimeoutError):
                    async with asyncio.timeout(MORE_HOLDERS_SECONDS):
                        await self._fetched.wait()
                self._ask_others(self._fetch)
        finally:
            fetch, self._fetch, self._root, self._carriers = self._fetch, None, None, None
            self._download = None
            if carriers is not None:
                await carriers.close()
            await download.close()
        if fetch.stuck:
            raise NoState(f"all {len(holders)} holders of the snapshot of round {root.round} failed")
        await self.kept.remove()
        units = units_of(bytes(download.data))
        if state_digest(root.round, units) != root.digest:
            raise FalseRoot(root.round, holders)
        tokens = [self._tokens[peer, root.digest] for peer in naming if (peer, root.digest) in self._tokens]
        return Weights(units, root.round, root.chain, tokens=median_low(tokens) if tokens else None)

    def _ask_others(self, fetch: SnapshotFetch) -> None:
        """Ask peers of the group that were linked meanwhile; they may hold the same snapshot."""
        for peer, known in self.neighbourhood.known().items():
            new = peer not in fetch.holders and peer not in fetch.dropped
            if known.linked and known.stage == self.snapshots.stage and new:
                self._asked.add(peer)
                self.neighbourhood.post(peer, "group", GetState())

    async def _open_carriers(self, size: int) -> Carries | None:
        """Open extra connections for a large state. Without them, the fetch only takes longer."""
        if size < CARRIED_BYTES:
            return None
        try:
            return await self.neighbourhood.transport.carriers(CARRIERS, self._carried, self._progressed)
        except CannotStart as error:
            self.log_event(events.NoCarriers(reason=str(error)))
            return None

    def _progressed(self, peer: PeerId) -> None:
        if self._fetch is not None:
            self._fetch.progressed(peer, self.clock.time())

    def _carried(self, peer: PeerId, digest: bytes, index: int, chunk: bytes | None) -> None:
        """Handle a chunk from a carrier. If its connection failed, request the chunk over the normal link."""
        if chunk is not None:
            self._arrived(peer, digest, index, chunk)
        elif self._root is not None and digest == self._root.digest:
            self.neighbourhood.post(peer, "group", GetChunk(digest, index))

    def chunk(self, digest: bytes, index: int) -> memoryview | None:
        """Return a chunk of a snapshot, or None if it is not held."""
        snapshot = self.snapshots.find(digest)
        held = snapshot is not None and 0 <= index < len(snapshot.root.chunks)
        return snapshot.chunk(index) if snapshot is not None and held else None

    def _arrived(self, peer: PeerId, digest: bytes, index: int, body: bytes) -> None:
        """Check a received chunk, store it, and continue the fetch."""
        fetch, root, download = self._fetch, self._root, self._download
        if fetch is None or root is None or download is None or digest != root.digest:
            return
        received = hashlib.sha256(body).digest()
        self.chunks_refused += not 0 <= index < len(root.chunks) or received != root.chunks[index]
        size = chunk_bytes(root.size)
        if len(body) != min(size, root.size - index * size):
            reason = f"chunk {index} has {len(body)} bytes"
            self.neighbourhood.refused(peer, "malformed", reason)
            self._do(fetch.drop(peer, "wrong_length", self.clock.time(), reason))
            return
        wanted, effects = fetch.chunk(peer, index, received, self.clock.time())
        if wanted:
            download.put(index, body)
            self.fetched_bytes += len(body)
            if fetch.missing:
                download.keep(index)
        self._do(effects)

    def _tick(self) -> None:
        """Drop holders that stall. Called by the timer."""
        if self._fetch is not None:
            self._do(self._fetch.tick(self.clock.time()))

    def unlinked(self, peer: PeerId) -> None:
        """Drop a holder whose link has ended."""
        if self._fetch is not None:
            self._do(self._fetch.drop(peer, "gone", self.clock.time()))

    def _do(self, effects: Sequence[RequestChunk | Dropped]) -> None:
        """Send the requests and report the dropped holders that the fetch decided on."""
        fetch, root = self._fetch, self._root
        if fetch is None or root is None:
            return
        for effect in effects:
            match effect:
                case RequestChunk(peer, index):
                    known = self.neighbourhood.known().get(peer)
                    if self._carriers is not None and known is not None:
                        self._carriers.ask(peer, known.addresses, root.digest, index)
                    else:
                        self.neighbourhood.post(peer, "group", GetChunk(root.digest, index))
                case Dropped(peer, code, reason):
                    reason = reason or HOLDERS[code].meaning
                    self.log_event(events.HolderDropped(peer=peer, code=code, reason=reason))
                    left = len(fetch.holders)
                    self.notify("holder", f"{peer} {reason}; it is asked no more, other holders: {left}")
        if not fetch.missing or fetch.stuck:
            self._fetched.set()
        self._timer.arm(fetch.next_deadline())
