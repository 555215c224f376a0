"""Fetch files of the run's text from other peers, and send them on.

Peers of the first stage and archivists are asked; if none sends a file, it is read from the archive that the
user names. An index, a list of hashes or a tokenizer (a blob) comes
from one peer at a time and is checked as a whole. The chunks of a file come from several peers and are
checked one by one. A peer that sends wrong bytes is never asked again; one that does not answer rests for a
while.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.config.peer_file import PeerFile
from peers.config.run_file import SignedManifest
from peers.data.documents import ReadSummary, TextError
from peers.data.files import File, Place, TextUnreachable
from peers.data.local_text import kept_shards, places_here, progress_lines, tokenizer_here
from peers.data.shards import MAX_INDEX_BYTES, Shard
from peers.data.shared_text import (
    fetched_bytes,
    fetched_folder,
    keep_only_fetched,
    needed_blobs,
    shared_blobs,
    shared_files,
)
from peers.state.archive_store import ArchiveError, open_store
from peers.state.archived_text import ArchivedText
from peers.state.chunks.chunk_transfer import ChunkTransfer
from peers.state.chunks.file_download import FileDownload
from peers.state.chunks.text_shelf import BLOB_CHUNK_BYTES, HASH_BYTES, TextShelf
from peers.telemetry import log_events
from peers.telemetry.log_events import Notify
from peers.telemetry.reasons import HOLDERS
from protocols.errors import CannotStart, WireError
from protocols.ports import ChunkDownloader, Directory, Transport
from protocols.signed.peer_record import NO_STAGE
from protocols.signed.records import open_record
from swarmnet.identifiers import PeerId
from swarmnet.snapshots.fetch import Dropped, SnapshotFetch, chunk_bytes

CARRIERS = 2
"""Extra p2pd processes, of 60 MB each, while text is fetched: text then does not delay the rounds."""
ARCHIVIST = "archivist"
MAX_HOLDERS = 8
"""Peers from which one file is fetched at a time. Others replace those that are dropped."""
LOOK_UP_SECONDS = 10.0
MORE_HOLDERS_SECONDS = 10.0
"""Interval at which peers are looked up again while a file is fetched."""
ANSWER_SECONDS = 20.0
"""Timeout for one chunk of a blob, of 1 MiB at most. Files notice a stall sooner."""
REST_SECONDS = 20.0
"""Time for which a peer that did not answer is not asked."""
BEGIN_SECONDS = 60.0
SLOWEST = 20_000
"""Minimum bytes per second of a file from all peers together. A slower download is begun anew with others;
its chunks stay."""
MAX_FRUITLESS = 3
"""Files in a row of which a peer may send nothing before it rests. It may be gone, or have few files."""
UNANSWERED = ("gone", "stalled")
LIES = ("wrong_hash", "wrong_length")


@dataclass(frozen=True, slots=True)
class _Running:
    """The file that is being fetched."""

    digest: bytes
    transfer: ChunkTransfer
    senders: set[PeerId]


@dataclass(eq=False, kw_only=True)
class TextExchange:
    """The text of one run, between this peer and others. One file is fetched at a time."""

    config: PeerFile
    signed: SignedManifest
    transport: Transport
    directory: Directory
    log_event: log_events.LogEvent
    notify: Notify

    def __post_init__(self) -> None:
        self.folder = fetched_folder(self.config)
        self.shelf = TextShelf()
        self.fetched_bytes = 0
        """Bytes of files that came from other peers since the text was opened."""
        self._clock = asyncio.get_running_loop()
        self._one_at_a_time = asyncio.Lock()
        self._chance = Random(self.transport.peer)
        self._carriers: ChunkDownloader | None = None
        self._closing: asyncio.Task[None] | None = None
        """The newest closing of carriers."""
        self._holders: dict[PeerId, Sequence[str]] = {}
        """Addresses of the peers that may have text."""
        self._looked_up_at = float("-inf")
        self._resting: dict[PeerId, float] = {}
        self._liars: set[PeerId] = set()
        self._fruitless: Counter[PeerId] = Counter()
        """Number of files in a row of which a peer has sent nothing."""
        self._retried: set[tuple[PeerId, int]] = set()
        """Requests for chunks of the present file that failed and were repeated."""
        self._answers: dict[tuple[PeerId, bytes, int], asyncio.Future[bytes | None]] = {}
        self._running: _Running | None = None
        self._progress: Callable[[int, int], None] = lambda done, total: None
        self._expected_bytes = 0
        self.transport.serve_text(self.shelf.find)

    @property
    def _places(self) -> dict[str, Place]:
        return places_here(self.signed.manifest, self.config)

    async def close(self) -> None:
        """Stop fetching. Files that are here are still sent. If the caller is cancelled meanwhile, the next
        call waits for the end."""
        if self._carriers is not None:
            closing = self._carriers.close()
            self._carriers = None
            self._closing = asyncio.get_running_loop().create_task(closing, name="close carriers")
        if self._closing is not None:
            await asyncio.shield(self._closing)

    # -- what is shared -------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Fetch the indexes and the tokenizer that are not here. Raises TextUnreachable, TextError."""
        needed = await asyncio.to_thread(needed_blobs, self.signed.manifest, self.config, self._places)
        for sha256, what in needed.items():
            try:
                data = await self._fetch_blob(bytes.fromhex(sha256), what, await self._candidates(what))
            except TextUnreachable:
                if await self._fetch_archived(sha256, what, MAX_INDEX_BYTES):
                    continue
                raise
            self.folder.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                await asyncio.to_thread(write_atomically, self.folder.path(sha256), data)
            except UserError as error:
                raise TextError(str(error)) from None

    async def share(self, shards: Mapping[str, list[Shard]], withdrawn: Collection[bytes]) -> None:
        """Send from now on what this peer has of the shared text, without withdrawn files. Files of other
        peers that are not in `shards` are removed. Raises TextError."""
        manifest, config, places = self.signed.manifest, self.config, self._places
        chosen = [shard for some in shards.values() for shard in some]
        tokenizer = tokenizer_here(manifest, config)
        blobs = await asyncio.to_thread(shared_blobs, manifest, config, places, tokenizer)
        fetched = [file for shard in chosen for file in shard.files if file.chunks]
        names = {path.name for path in blobs.values() if path.parent == self.folder.folder}
        names |= {file.sha256 for file in fetched}
        await asyncio.to_thread(keep_only_fetched, self.folder, names)
        files = await asyncio.to_thread(shared_files, manifest, config, places, withdrawn)
        self.shelf.replace(files, blobs)
        missing = [file for file in fetched if not self._is_here(file)]
        self.fetched_bytes, self._expected_bytes = 0, sum(file.bytes for file in missing)
        if fetched:
            self._progress = progress_lines(
                self.notify, self._clock.time, "fetches the run's text from other peers"
            )
            stated = sum(source.file_bytes for source in manifest.data.sources if source.is_shared)
            self.notify(
                "text",
                f"other peers send {len(fetched):,} files, {fetched_bytes(chosen) / 1e6:,.1f} MB of "
                f"{stated / 1e6:,.1f} MB; {self._expected_bytes / 1e6:,.1f} MB are still to come. They are "
                f"kept in {self.folder.folder} and sent on (max_text_bytes: 0 in the peer file stops that)",
            )

    async def keep(self, public_key: bytes, withdrawn: frozenset[bytes]) -> None:
        """Share the run's text without reading it: what is on this machine, and what other peers send, as
        far as the user allows. `public_key` is this peer's. Raises TextUnreachable and TextError."""
        data = self.signed.manifest.data
        sources = tuple(each for each in data.sources if each.is_shared and each.name in self._places)
        if not sources:
            return
        await self.prepare()
        some = replace(data, sources=sources, sampling="epoch")
        choose = partial(kept_shards, self.signed.manifest, some, self.config, public_key, withdrawn)
        shards = await asyncio.to_thread(choose, ReadSummary())
        await self.share(shards, withdrawn)
        try:
            for shard in (each for of_source in shards.values() for each in of_source):
                await self.fetch(shard)
        finally:
            await self.close()

    async def fetch(self, shard: Shard) -> None:
        """Fetch the files of a shard that are not here. Raises TextUnreachable and TextError."""
        async with self._one_at_a_time:
            for file in shard.files:
                if file.chunks and not await asyncio.to_thread(self._is_here, file):
                    try:
                        await self._fetch_file(file)
                    except TextUnreachable:
                        if not await self._fetch_archived(file.sha256, file.name, file.bytes):
                            raise

    async def _fetch_archived(self, sha256: str, what: str, longest: int) -> bool:
        """Fetch a file from the archive that the user names. Returns whether it is here now; what is wrong
        with the archive is reported. Raises TextError if the disk refuses."""
        if not self.config.archive:
            return False
        began, path = self._clock.time(), self.folder.path(sha256)
        try:
            size = await asyncio.to_thread(
                lambda: ArchivedText(open_store(self.config.archive)).fetch(sha256, path, longest)
            )
        except ArchiveError as error:
            self.notify("archive", str(error))
            return False
        except OSError as error:
            raise TextError(str(error) if error.errno is None else f"{path}: {error.strerror}") from None
        if size:
            seconds = round(self._clock.time() - began, 3)
            self.log_event(log_events.TextFetched(what, size, seconds, 0))
        return size > 0

    def _is_here(self, file: File) -> bool:
        try:
            return self.folder.path(file.sha256).stat().st_size == file.bytes
        except OSError:
            return False

    # -- holders --------------------------------------------------------------------------------------

    async def _candidates(self, what: str) -> list[PeerId]:
        """Return the peers to ask, in random order. Raises TextUnreachable if there is none."""
        now = self._clock.time()
        if now >= self._looked_up_at + MORE_HOLDERS_SECONDS:
            try:
                self._holders = await self._look_up()
            except WireError as error:
                raise TextUnreachable(f"{what} of the run's text: {error}") from None
            self._looked_up_at = now
        asleep = {peer for peer, until in self._resting.items() if now < until}
        peers = [peer for peer in self._holders if peer not in self._liars | asleep]
        if not peers:
            known = f", and none of {len(self._holders)} others answers" if self._holders else ""
            raise TextUnreachable(
                f"{what} of the run's text is not here, and no peer that may have it is online{known}: wait "
                "for one of the first stage or an archivist, or name your own copy in data_paths"
            )
        self._chance.shuffle(peers)
        return peers

    async def _look_up(self) -> dict[PeerId, Sequence[str]]:
        """Return the addresses of the peers that may have text. Raises WireError."""
        found: dict[PeerId, Sequence[str]] = {}
        for stage in (0, NO_STAGE):
            records = await self.directory.look_up(self.signed.run_id, stage, LOOK_UP_SECONDS)
            for peer, data in records.items():
                record = open_record(data, self.signed.run_id).record
                if peer != self.transport.peer and (stage == 0 or record.role == ARCHIVIST):
                    found[peer] = record.addresses
        return found

    def _report_dropped(self, dropped: Dropped) -> None:
        """Remember and report a peer that failed."""
        peer, code = dropped.peer, dropped.code
        reason = dropped.reason or HOLDERS[code].meaning
        self._fruitless[peer] += 1
        if code in LIES:
            self._liars.add(peer)
        elif code in UNANSWERED or self._fruitless[peer] >= MAX_FRUITLESS:
            self._resting[peer] = self._clock.time() + REST_SECONDS
        self.log_event(log_events.HolderDropped(peer=peer, code=code, reason=reason))
        if code in LIES:
            self.notify("holder", f"{peer} {reason}; it is asked for text no more")

    # -- requests -------------------------------------------------------------------------------------

    async def _open_carriers(self) -> ChunkDownloader:
        """Return the connections for chunks. Raises TextUnreachable, or TextError if there are none."""
        if self._carriers is None:
            try:
                self._carriers = await self.transport.carriers(CARRIERS, self._arrived, self._progressed)
            except CannotStart as error:
                raise TextUnreachable(f"the run's text cannot be fetched: {error}") from None
        if self._carriers is None:
            raise TextError("this network has no connections for text: name a copy of it in data_paths")
        return self._carriers

    async def _fetch_blob(self, digest: bytes, what: str, holders: Sequence[PeerId]) -> bytes:
        """Return the bytes with this SHA-256, from the first peer that has them. Raises TextUnreachable."""
        await self._open_carriers()
        for peer in holders:
            data = await self._blob_from(peer, digest)
            if data is None:
                continue
            if hashlib.sha256(data).digest() == digest:
                return data
            self._report_dropped(Dropped(peer, "wrong_hash", f"sent {what} with a wrong hash"))
        await self.close()  # The connections may be at fault, too.
        self._looked_up_at = float("-inf")
        raise TextUnreachable(f"none of {len(holders)} peers sends {what} of the run's text")

    async def _blob_from(self, peer: PeerId, digest: bytes) -> bytes | None:
        """Return what a peer sends as a blob, at most MAX_INDEX_BYTES; None if it sends nothing."""
        data = bytearray()
        while len(data) <= MAX_INDEX_BYTES:
            chunk = await self._ask(peer, digest, len(data) // BLOB_CHUNK_BYTES)
            data += chunk or b""
            if len(chunk or b"") != BLOB_CHUNK_BYTES:
                break
        return bytes(data) or None

    async def _ask(self, peer: PeerId, digest: bytes, index: int) -> bytes | None:
        """Request a chunk of a blob, twice if nothing comes. Returns None if the peer does not send it."""
        carriers, key = await self._open_carriers(), (peer, digest, index)
        for _ in range(2):
            self._answers[key] = asyncio.get_running_loop().create_future()
            carriers.ask(peer, self._holders[peer], digest, index)
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    chunk = await self._answers[key]
            except TimeoutError:
                self._report_dropped(Dropped(peer, "stalled"))
                return None
            finally:
                self._answers.pop(key, None)
            if chunk is not None:
                return chunk
        return None

    async def _fetch_file(self, file: File) -> None:
        """Fetch one file. Raises TextUnreachable, and TextError if the disk refuses."""
        began = self._clock.time()
        digest, path = bytes.fromhex(file.sha256), self.folder.path(file.sha256)
        holders = await self._candidates(file.name)
        hashes = await self._hashes_of(file, holders)
        download = FileDownload(path, hashes, file.bytes)
        try:
            try:
                senders, missing = await self._fetch_chunks(file, digest, download, holders)
            finally:
                await download.close()
            if missing:
                await self.close()
                self._looked_up_at = float("-inf")
                raise TextUnreachable(
                    f"{file.name} is not complete: {missing:,} of {len(hashes):,} chunks are missing, "
                    f"and none of {len(holders)} peers sends them"
                )
            await download.finish()
        except OSError as error:
            raise TextError(str(error) if error.errno is None else f"{path}: {error.strerror}") from None
        seconds = self._clock.time() - began
        self.log_event(log_events.TextFetched(file.name, file.bytes, round(seconds, 3), len(senders)))

    async def _hashes_of(self, file: File, holders: Sequence[PeerId]) -> list[bytes]:
        """Return the SHA-256 of each chunk of a file. Raises TextUnreachable, and TextError for a list that
        does not fit the file's size."""
        if file.bytes <= chunk_bytes(file.bytes):
            return [bytes.fromhex(file.sha256)]
        listed = await self._fetch_blob(bytes.fromhex(file.chunks), f"the hashes of {file.name}", holders)
        count = -(-file.bytes // chunk_bytes(file.bytes))
        if len(listed) != count * HASH_BYTES:
            raise TextError(f"the run's index contradicts itself about {file.name}: tell the run's owner")
        return [listed[start : start + HASH_BYTES] for start in range(0, len(listed), HASH_BYTES)]

    async def _fetch_chunks(
        self, file: File, digest: bytes, download: FileDownload, candidates: list[PeerId]
    ) -> tuple[set[PeerId], int]:
        """Fetch the chunks of a file. Returns the peers that sent some, and the number of missing chunks.
        Raises OSError if the disk refuses."""
        carriers, here = await self._open_carriers(), await download.resume()
        holders, spare = candidates[:MAX_HOLDERS], candidates[MAX_HOLDERS:]
        fetch = SnapshotFetch(
            hashes=download.hashes, holders=holders, asked_at_once=carriers.requests_per_holder, here=here
        )

        def request(peer: PeerId, index: int) -> None:
            carriers.ask(peer, self._holders[peer], digest, index)

        def put(index: int, chunk: bytes) -> None:
            download.put(index, chunk)
            self.fetched_bytes += len(chunk)
            self._progress(self.fetched_bytes, self._expected_bytes)
            if download.has_failed:
                transfer.ended.set()

        def on_dropped(dropped: Dropped) -> None:
            """Report a peer that was dropped, and ask another one."""
            self._report_dropped(dropped)
            if spare:
                asyncio.get_running_loop().call_soon(transfer.add, spare.pop())

        transfer = ChunkTransfer(
            fetch=fetch, size=file.bytes, clock=self._clock, request=request, put=put, dropped=on_dropped
        )
        self._running = _Running(digest, transfer, set())
        self._retried.clear()
        try:
            async with asyncio.timeout(BEGIN_SECONDS + file.bytes / SLOWEST):
                transfer.start()
                await transfer.ended.wait()
        except TimeoutError:
            pass  # What is missing is reported.
        finally:
            senders = self._running.senders
            self._running = None
            transfer.close()
        return senders, len(fetch.missing)

    def _progressed(self, peer: PeerId) -> None:
        if self._running is not None:
            self._running.transfer.progressed(peer)

    def _arrived(self, peer: PeerId, digest: bytes, index: int, chunk: bytes | None) -> None:
        """Handle the answer to a request. If nothing came, the connection may have been closed for idleness:
        the request is repeated once."""
        answer = self._answers.get((peer, digest, index))
        if answer is not None and not answer.done():
            answer.set_result(chunk)
            return
        running = self._running
        if running is None or running.digest != digest or peer not in running.transfer.fetch.holders:
            return
        if chunk is not None:
            if running.transfer.receive(peer, index, chunk):
                running.senders.add(peer)
                self._fruitless.pop(peer, None)
        elif (peer, index) in self._retried:
            running.transfer.drop(peer, "no_chunk", f"does not send chunk {index}")
        elif self._carriers is not None:
            self._retried.add((peer, index))
            self._carriers.ask(peer, self._holders[peer], digest, index)
