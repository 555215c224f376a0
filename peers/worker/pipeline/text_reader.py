"""Read a worker's text, in shards, in one of two orders.

With `sampling: random`, microbatches come from any position of the single shard that the peer drew. With
`sampling: epoch`, they come from one shard after another, and the position is kept on disk:

    STATE/text/place.json    written every few seconds and after each shard

A peer that is killed repeats at most what it has read since then. Two shards of each circle are open: the
current one and the next one, which a thread opens meanwhile. No microbatch starts while the next shard is
needed and not open yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec
from torch import Tensor

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.config.remote_files import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, retry_until_reached
from peers.config.run_file import SignedManifest
from peers.data.documents import ReadSummary, TextError
from peers.data.files import TextUnreachable, shown_place
from peers.data.local_text import places_here, progress_lines, shards_here, text_line, tokenizer_here
from peers.data.shards import Shard
from peers.data.shared_text import fetched_bytes
from peers.data.tokens import FOLDER, ShardCache, ShardTokens
from peers.process.role import Process
from peers.state.chunks.text_exchange import TextExchange
from peers.telemetry import log_events
from swarmnet.identifiers import MicrobatchId
from swarmnet.model.epochs import (
    EpochReader,
    TextPosition,
    following,
    mixed,
    reading_order,
    window_count,
    window_token_start,
)
from swarmnet.model.sampling import drawn, inputs_and_labels
from swarmnet.run.mixtures import MixtureChange
from swarmnet.run.schema import BYTES, Data

PLACE = "place.json"
SAVE_SECONDS = 10.0
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of its text a peer has read."""

    shards: int
    """Shards that this peer has and that contain at least one sequence."""
    shards_read: int
    """Shards read to their end in this epoch."""
    epochs: int
    """Completed epochs; with weighted sources, those of the source that is furthest behind."""
    read_ever: int
    """Shards read to their end in all epochs."""


@dataclass(slots=True)
class EndlessText:
    """Shards that are read in turn: those of all sources together, or those of one source with a weight."""

    name: str
    """Name of the source; empty for all sources."""
    weight: float
    shards: Mapping[str, Shard]
    reader: EpochReader
    seq_len: int
    place: TextPosition = field(default_factory=TextPosition)
    now: ShardTokens | None = None
    ahead: tuple[int, ShardTokens] | None = None
    """The next shard and its epoch."""

    empty: set[str] = field(default_factory=set)
    """Names of shards that are too short for a sequence."""
    left_out: ReadSummary = field(default_factory=ReadSummary)
    """What was left out of the shards in `empty`."""

    def count(self, shard: ShardTokens) -> int:
        return window_count(len(shard.tokens), self.seq_len)

    @property
    def size(self) -> int:
        """Number of shards that contain a sequence, as far as is known."""
        return len(self.shards) - len(self.empty)

    @property
    def is_done(self) -> bool:
        """Whether no shard is open or the open one has been read to its end."""
        return self.now is None or self.place.window >= self.count(self.now)

    def take(self) -> Tensor | None:
        """Return the next window, `seq_len` + 1 tokens of one shard; None if the next shard is not open
        yet."""
        if self.is_done:
            if self.ahead is None:
                return None
            epoch, self.now = self.ahead
            self.ahead = None
            shards = self.place.shards if epoch == self.place.epoch else 0
            self.place = replace(self.place, epoch=epoch, shard=self.now.name, window=0, shards=shards)
        assert self.now is not None
        tokens, place = self.now.tokens, self.place
        start = window_token_start(
            self.reader, place.epoch, place.shard, place.window, len(tokens), self.seq_len
        )
        self.place = replace(place, window=place.window + 1, read=place.read + 1)
        if self.is_done:
            self.place = replace(self.place, shards=place.shards + 1)
        return tokens[start : start + self.seq_len + 1]

    def sought(self) -> tuple[int, str]:
        """Return the epoch and the name of the next shard, skipping those that are too short. Raises
        UserError if all are."""
        there = [name for name in self.shards if name not in self.empty]
        if not there:
            raise _too_short(self.name, self.seq_len, self.left_out)
        return following(self.reader, there, self.place.epoch, self.place.shard)

    def add_ahead(self, epoch: int, opened: ShardTokens) -> None:
        """Read this shard next, unless it is too short."""
        if self.count(opened):
            self.ahead = epoch, opened
        else:
            self.empty.add(opened.name)
            self.left_out.add_left_out(opened.reading)


def _too_short(source: str, length: int, read: ReadSummary) -> UserError:
    whose = f"the source `{source}`" if source else "the run's text"
    return UserError(f"no shard of {whose} holds a sequence of {length + 1} tokens: add text{read.reason()}")


class TextReader:
    """The `Text` of one process. Calling `open` again closes the text before and continues at the same
    position."""

    def __init__(
        self,
        *,
        process: Process,
        signed: SignedManifest,
        exchange: TextExchange,
        opened: Callable[[], None],
        ended: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`exchange` gets from other peers what is not here. `opened()` is called when a shard that was
        waited for may be open; `ended` receives failed tasks."""
        self._process = process
        self._signed = signed
        self._exchange = exchange
        self._opened = opened
        self._ended = ended
        self._path = process.config.state / FOLDER / PLACE
        self.circles: list[EndlessText] = []
        self._mixture: MixtureChange | None = None
        """The owner's change of the weights that holds now; None: the manifest's hold."""
        self._drawn: Tensor | None = None
        self._cache: ShardCache | None = None
        self._waiting: list[Tensor] = []
        """Windows of a microbatch that is not complete yet."""
        self._wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        """Tasks that read ahead and fetch the text; none with random sampling."""
        self._whole = b""
        self._saved = b""
        """Position after the newest complete microbatch, and the position that is on disk."""

    @property
    def _reader(self) -> EpochReader:
        return EpochReader(self._signed.run_id, self._signed.manifest.seed, self._process.identity.peer_id)

    @property
    def _data(self) -> Data:
        return self._signed.manifest.data

    async def open(self, withdrawn: frozenset[bytes]) -> TextReader:
        """Open the text; returns when microbatches can be taken. Raises UserError."""
        await self.close()
        process, config, manifest = self._process, self._process.config, self._signed.manifest
        sources = places_here(manifest, config).items()
        places = ", ".join(f"{name} from {shown_place(place)}" for name, place in sources)
        tokenizer = tokenizer_here(manifest, config) or BYTES
        process.notify("text", f"reads the run's text: {places}; tokens: {tokenizer}")
        if self._data.private:
            withdrawn = frozenset()  # No order may look for a private document by its hash.
            process.notify("text", "the text is private: none of it is sent, named or hashed for others")
        await self._patiently(self._exchange.prepare)
        shards, self._cache, reading = await self._patiently(
            lambda: asyncio.to_thread(shards_here, manifest, config, process.identity.public_key, withdrawn)
        )
        try:
            await self._patiently(lambda: self._exchange.share(shards, withdrawn))
            if self._data.sampling == "random":
                await self._open_drawn(shards[""][0])
                return self
            self._warn(reading)
            self._restore(shards)
            for circle in self.circles:
                if (shard := circle.shards.get(circle.place.shard)) is not None:
                    circle.now = await self._open(shard)
            await self._open_ahead()
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._read_ahead(), name="read ahead")]
        if any(fetched_bytes(some) for some in shards.values()):
            self._tasks.append(asyncio.create_task(self._fetch_all(shards), name="fetch text"))
        for task in self._tasks:
            task.add_done_callback(self._ended)
        there, size = self._covered(), sum(each.bytes for some in shards.values() for each in some)
        process.notify(
            "text",
            f"{there.shards:,} shards, {size / 1e6:,.1f} MB; {there.shards_read:,} of them are read in epoch "
            f"{there.epochs}",
        )
        return self

    async def close(self) -> None:
        """Close the text and save the position to disk."""
        if self._cache is not None:
            self._cache.stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            await self._save()
        await self._exchange.close()
        self._tasks = []
        self._waiting.clear()

    def microbatch(
        self, key: MicrobatchId, mixture: MixtureChange | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Return inputs_BT and labels_BT. With random sampling they belong to the key, else they are this
        peer's next ones, whatever the key, by the weights of `mixture` or else of the manifest. None means
        that the next shard is not open yet; `opened` is called when it is."""
        if self._drawn is not None:
            return drawn(self._signed.run_id, self._signed.manifest.seed, key, self._drawn, self._data)
        if mixture != self._mixture:
            self._mix(mixture)
        while len(self._waiting) < self._data.micro_batch_size:
            places = [circle.place.read - circle.place.since for circle in self.circles]
            circle = self.circles[mixed(places, [circle.weight for circle in self.circles])]
            before = circle.now
            window = circle.take()
            if window is None:
                self._wanted.set()
                return None
            self._waiting.append(window)
            if circle.is_done:
                self._log_shard_read(circle)
            if circle.is_done or circle.now is not before:
                self._wanted.set()
        microbatch = inputs_and_labels(self._waiting)
        self._waiting.clear()
        self._whole = self._as_json()
        return microbatch

    def _mix(self, mixture: MixtureChange | None) -> None:
        """Read by other weights from now on. What was read before does not count for their shares."""
        self._mixture = mixture
        for circle, weight in zip(self.circles, self._weights(), strict=True):
            circle.weight = weight
            circle.place = replace(circle.place, since=circle.place.read)

    def _weights(self) -> list[float]:
        """Return the weight of each circle: those of the present mixture, or of the manifest if it names no
        source."""
        names = [circle.name for circle in self.circles]
        ordered = self._mixture.weights_of(names) if self._mixture is not None else []
        if any(ordered):
            return [float(weight) for weight in ordered]
        published = {source.name: source.weight for source in self._data.sources}
        return [published.get(name, 1.0) for name in names]

    def coverage(self) -> Coverage | None:
        """Return how much was read; None with random sampling, which does not count it."""
        return self._covered() if self.circles else None

    def _covered(self) -> Coverage:
        places = [(circle.place, circle.size) for circle in self.circles]
        return Coverage(
            sum(size for _, size in places),
            sum(place.shards for place, _ in places),
            min(place.epoch for place, _ in places),
            sum(place.epoch * size + place.shards for place, size in places),
        )

    async def _open_drawn(self, shard: Shard) -> None:
        opened, length = await self._open(shard), self._data.seq_len
        read = opened.reading
        counts = read.files, read.documents, read.bytes, read.left_out
        self._process.notify_event(log_events.Text(text_line(opened), *counts))
        if not window_count(len(opened.tokens), length):
            raise _too_short("", length, read)
        self._drawn = opened.tokens

    def _restore(self, shards: Mapping[str, list[Shard]]) -> None:
        """Make the circles, each at this peer's saved position if there is one."""
        if not any(source.weight for source in self._data.sources):
            shards = {"": [each for some in shards.values() for each in some]}
        kept = self._kept()
        self._mixture = kept.mixture
        self.circles = [
            EndlessText(
                name,
                1.0,
                {each.name: each for each in some},
                self._reader,
                self._data.seq_len,
                kept.circles.get(name, TextPosition()),
            )
            for name, some in shards.items()
        ]
        for circle, weight in zip(self.circles, self._weights(), strict=True):
            circle.weight = weight

    async def _read_ahead(self) -> None:
        """Open next shards until cancelled. Raises UserError if the text cannot be read."""
        while True:
            self._wanted.clear()
            await self._open_ahead()
            self._opened()
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVE_SECONDS):
                    await self._wanted.wait()
            await self._save()

    async def _fetch_all(self, shards: Mapping[str, list[Shard]]) -> None:
        """Fetch all shards that other peers send, so that this peer can send them on. Shards that no peer
        sends now are tried again later. Raises UserError."""
        by_name = {shard.name: shard for some in shards.values() for shard in some}
        left, pause = reading_order(self._reader, by_name), FIRST_PAUSE_SECONDS
        while left:
            failed = []
            for name in left:
                try:
                    await self._exchange.fetch(by_name[name])
                except TextUnreachable:  # Reading reports it when the shard is needed.
                    failed.append(name)
                except TextError as error:
                    raise UserError(str(error)) from None
            await self._exchange.close()
            if failed:
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)
            left = failed

    async def _open_ahead(self) -> None:
        for circle in self.circles:
            while circle.ahead is None:
                epoch, name = circle.sought()
                circle.add_ahead(epoch, await self._open(circle.shards[name]))

    async def _open(self, shard: Shard) -> ShardTokens:
        cache, loop = self._cache, asyncio.get_running_loop()
        assert cache is not None
        said_here = progress_lines(self._process.notify, loop.time)

        def progress(done: int, all: int) -> None:
            loop.call_soon_threadsafe(said_here, done, all)

        await self._patiently(lambda: self._exchange.fetch(shard))
        opened = await self._patiently(lambda: asyncio.to_thread(cache.open, shard, progress))
        self._warn(opened.reading)
        return opened

    async def _patiently(self, read: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of `read`, repeated while the text's server, or all peers with text, do not
        respond. Raises UserError."""
        try:
            return await retry_until_reached(read, TextUnreachable, self._report_problem)
        except TextError as error:
            raise UserError(str(error)) from None

    async def _save(self) -> None:
        if (told := self._whole) != self._saved:
            try:
                await asyncio.to_thread(write_atomically, self._path, told)
                self._saved = told
            except UserError as error:  # The disk is full.
                self._report_problem(str(error))

    def _as_json(self) -> bytes:
        circles = {circle.name: circle.place for circle in self.circles}
        return msgspec.json.encode(_Places(self._signed.run_id, circles, self._mixture))

    def _kept(self) -> _Places:
        """Return the positions that are on disk; empty if there are none of this run."""
        nothing = _Places(self._signed.run_id, {})
        try:
            told = msgspec.json.decode(self._path.read_bytes(), type=_Places)
        except (OSError, ValueError, RecursionError):
            return nothing
        whole = all(
            min(one.epoch, one.window, one.shards, one.since, one.read - one.since) >= 0
            for one in told.circles.values()
        )
        return told if whole and told.run == self._signed.run_id else nothing

    def _log_shard_read(self, circle: EndlessText) -> None:
        """Log that the open shard was read to its end."""
        place = circle.place
        assert circle.now is not None
        tokens = circle.count(circle.now) * circle.seq_len
        self._process.log.record(log_events.ShardRead(place.shard, place.epoch, tokens))
        if place.shards >= circle.size:
            there = self._covered().shards
            told = f"epoch {place.epoch} ends: all {there:,} shards are read"
            self._process.notify_event(log_events.EpochRead(told, place.epoch, there))

    def _warn(self, reading: ReadSummary) -> None:
        for warning in reading.warnings():
            self._report_problem(warning)

    def _report_problem(self, warning: str) -> None:
        self._process.report.notify("text", warning, level="warning")
        self._process.log.record(log_events.TextNotice(warning, "text_left_out"))


def coverage_of(text: object) -> Coverage | None:
    """Return the coverage of a worker's text; None with random sampling or while no text is open."""
    return text.coverage() if isinstance(text, TextReader) else None


class _Places(msgspec.Struct, frozen=True):
    run: str
    circles: dict[str, TextPosition]
    mixture: MixtureChange | None = None
