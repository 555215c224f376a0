"""A worker's text, read in shards, in one of two orders. Where text is drawn, microbatches come from anywhere
in the one shard that the peer draws from. Where it is read in epochs, they come from one shard after the
other, and the peer's place outlives the process:

    STATE/text/place.json    written every few seconds, and behind each shard: a peer that is killed reads
                             once more what it has read since then

Two shards of each circle are open: the one that is read, and the next one, which a thread opens meanwhile.
While the next one is not open in time, no microbatch starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec
from torch import Tensor

from peers.config.atomic_files import write_atomically
from peers.config.remote_files import until_reached
from peers.config.run_file import SignedManifest
from peers.config.run_url import without_secret
from peers.data.documents import Reading, TextError
from peers.data.files import TextUnreachable
from peers.data.local_text import places_here, progress_lines, shards_here, text_line, tokenizer_here
from peers.data.shards import Shard
from peers.data.tokens import FOLDER, ShardCache, ShardTokens
from peers.errors import UserError
from peers.role import Process
from peers.telemetry import events as noted
from swarmnet.identifiers import MicrobatchId
from swarmnet.model.epochs import Place, Reader, following, mixed, window_count, window_start
from swarmnet.model.sampling import drawn, inputs_and_labels
from swarmnet.run.manifest import BYTES, Data

PLACE = "place.json"
SAVE_SECONDS = 10.0
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of its text a peer has read."""

    shards: int
    """That it has, and that hold a sequence at least."""
    shards_read: int
    """To their end, in this epoch."""
    epochs: int
    """Read to their end; of several sources with weights that of the one that is furthest behind."""
    read_ever: int
    """Shards, in all epochs."""


@dataclass(slots=True)
class Circle:
    """The shards that are read in turn: of all sources together, or of one that has a weight."""

    name: str
    """The source's; empty: all."""
    weight: float
    shards: Mapping[str, Shard]
    reader: Reader
    seq_len: int
    place: Place = field(default_factory=Place)
    now: ShardTokens | None = None
    ahead: tuple[int, ShardTokens] | None = None
    """The next one, and its epoch."""

    empty: set[str] = field(default_factory=set)
    """Shards that hold no sequence."""
    left_out: Reading = field(default_factory=Reading)
    """What was left out of those."""

    def count(self, shard: ShardTokens) -> int:
        return window_count(len(shard.tokens), self.seq_len)

    @property
    def size(self) -> int:
        """Shards that hold a sequence, as far as is known."""
        return len(self.shards) - len(self.empty)

    @property
    def is_done(self) -> bool:
        """With the shard that is open, if one is."""
        return self.now is None or self.place.window >= self.count(self.now)

    def take(self) -> Tensor | None:
        """The next window, seq_len + 1 of its shard's; None: the next shard is not open yet."""
        if self.is_done:
            if self.ahead is None:
                return None
            epoch, self.now = self.ahead
            self.ahead = None
            shards = self.place.shards if epoch == self.place.epoch else 0
            self.place = Place(epoch, self.now.name, 0, shards, self.place.read)
        assert self.now is not None
        tokens, place = self.now.tokens, self.place
        start = window_start(self.reader, place.epoch, place.shard, place.window, len(tokens), self.seq_len)
        self.place = replace(place, window=place.window + 1, read=place.read + 1)
        if self.is_done:
            self.place = replace(self.place, shards=place.shards + 1)
        return tokens[start : start + self.seq_len + 1]

    def sought(self) -> tuple[int, str]:
        """Return the epoch and the name of the next shard, past those that are too short. Raises UserError
        where all are."""
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


def _too_short(source: str, length: int, read: Reading) -> UserError:
    whose = f"the source `{source}`" if source else "the run's text"
    return UserError(f"no shard of {whose} holds a sequence of {length + 1} tokens: add text{read.reason()}")


class TextReader:
    """`data_path.Text` of one process. `open` once more, and the text before is closed: it goes on where that
    was."""

    def __init__(
        self, process: Process, signed: SignedManifest, opened: Callable[[], None],
        ended: Callable[[asyncio.Task[None]], None],
    ) -> None:  # fmt: skip
        """`opened()`: a shard that was waited for may be there; `ended`: takes what fails."""
        self._process, self._signed, self._opened, self._ended = process, signed, opened, ended
        self._path = process.config.state / FOLDER / PLACE
        self.circles: list[Circle] = []
        self._drawn: Tensor | None = None
        self._cache: ShardCache | None = None
        self._waiting: list[Tensor] = []
        """Windows of a microbatch that is not whole yet."""
        self._wanted = asyncio.Event()
        self._ahead: asyncio.Task[None] | None = None
        self._whole = self._saved = b""
        """Where the newest whole microbatch ended, and what of it is on the disk."""

    @property
    def _data(self) -> Data:
        return self._signed.manifest.data

    async def open(self, withdrawn: frozenset[bytes]) -> TextReader:
        """Until microbatches can be taken. Raises UserError."""
        await self.close()
        process, config, manifest = self._process, self._process.config, self._signed.manifest
        sources = places_here(manifest, config).items()
        places = ", ".join(f"{name} from {without_secret(place)}" for name, place in sources)
        tokenizer = tokenizer_here(manifest, config) or BYTES
        process.notify("text", f"reads the run's text: {places}; tokens: {tokenizer}")
        shards, self._cache, reading = await self._patiently(
            lambda: shards_here(manifest, config, process.identity.public_key, withdrawn)
        )
        try:
            if self._data.sampling == "random":
                await self._open_drawn(shards[""][0])
                return self
            self._warn(reading)
            self.circles = self._circles(shards)
            for circle in self.circles:
                if (shard := circle.shards.get(circle.place.shard)) is not None:
                    circle.now = await self._open(shard)
            await self._open_ahead()
        except BaseException:
            await self.close()
            raise
        self._ahead = asyncio.create_task(self._read_ahead(), name="read ahead")
        self._ahead.add_done_callback(self._ended)
        there, size = self._covered(), sum(each.bytes for some in shards.values() for each in some)
        process.notify(
            "text",
            f"{there.shards:,} shards, {size / 1e6:,.1f} MB: {there.shards_read:,} of them are read in epoch "
            f"{there.epochs}",
        )
        return self

    async def close(self) -> None:
        """What it has come to is on the disk."""
        if self._cache is not None:
            self._cache.stopped = True
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
            await self._save()
        self._ahead = None
        self._waiting.clear()

    def microbatch(self, key: MicrobatchId) -> tuple[Tensor, Tensor] | None:
        """inputs_BT and labels_BT: where text is drawn, those of the key; else the next ones of this peer
        whatever the key. None: what comes next is not open yet, and `opened` is called when it is."""
        if self._drawn is not None:
            return drawn(self._signed.run_id, self._signed.manifest.seed, key, self._drawn, self._data)
        while len(self._waiting) < self._data.micro_batch_size:
            places = [circle.place.read for circle in self.circles]
            circle = self.circles[mixed(places, [circle.weight for circle in self.circles])]
            before = circle.now
            window = circle.take()
            if window is None:
                self._wanted.set()
                return None
            self._waiting.append(window)
            if circle.is_done:
                self._tell(circle)
            if circle.is_done or circle.now is not before:
                self._wanted.set()
        microbatch = inputs_and_labels(self._waiting)
        self._waiting.clear()
        self._whole = self._as_json()
        return microbatch

    def coverage(self) -> Coverage | None:
        """None where text is drawn: nobody counts which of it has come."""
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
        self._process.tell(noted.Text(text_line(opened), *counts))
        if not window_count(len(opened.tokens), length):
            raise _too_short("", length, read)
        self._drawn = opened.tokens

    def _circles(self, shards: Mapping[str, list[Shard]]) -> list[Circle]:
        """Each where this peer was, as far as that is known."""
        manifest, weights = self._signed.manifest, {one.name: one.weight for one in self._data.sources}
        reader = Reader(self._signed.run_id, manifest.seed, self._process.identity.peer_id)
        if not any(weights.values()):
            shards = {"": [each for some in shards.values() for each in some]}
        kept = self._kept()
        return [
            Circle(
                name, weights.get(name, 1.0), {each.name: each for each in some}, reader,
                self._data.seq_len, kept.get(name, Place()),
            )
            for name, some in shards.items()
        ]  # fmt: skip

    async def _read_ahead(self) -> None:
        """Until cancelled, or something is wrong with the text (UserError)."""
        while True:
            self._wanted.clear()
            await self._open_ahead()
            self._opened()
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVE_SECONDS):
                    await self._wanted.wait()
            await self._save()

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

        opened = await self._patiently(lambda: cache.open(shard, progress))
        self._warn(opened.reading)
        return opened

    async def _patiently(self, read: Callable[[], Result]) -> Result:
        """`read` in a thread, again where who keeps the text does not answer. Raises UserError."""
        try:
            return await until_reached(lambda: asyncio.to_thread(read), TextUnreachable, self._trouble)
        except TextError as error:
            raise UserError(str(error)) from None

    async def _save(self) -> None:
        if (told := self._whole) != self._saved:
            try:
                await asyncio.to_thread(write_atomically, self._path, told)
                self._saved = told
            except UserError as error:  # A full disk.
                self._trouble(str(error))

    def _as_json(self) -> bytes:
        circles = {circle.name: circle.place for circle in self.circles}
        return msgspec.json.encode({"run": self._signed.run_id, "circles": circles})

    def _kept(self) -> dict[str, Place]:
        """The places in the text that are on the disk."""
        try:
            told = msgspec.json.decode(self._path.read_bytes(), type=_Places)
        except (OSError, ValueError, RecursionError):
            return {}
        whole = all(min(one.epoch, one.window, one.shards, one.read) >= 0 for one in told.circles.values())
        return told.circles if whole and told.run == self._signed.run_id else {}

    def _tell(self, circle: Circle) -> None:
        """The shard that is open was read to its end."""
        place = circle.place
        assert circle.now is not None
        tokens = circle.count(circle.now) * circle.seq_len
        self._process.log.record(noted.ShardRead(place.shard, place.epoch, tokens))
        if place.shards >= circle.size:
            there = self._covered().shards
            told = f"epoch {place.epoch} ends: all {there:,} shards are read"
            self._process.tell(noted.EpochRead(told, place.epoch, there))

    def _warn(self, reading: Reading) -> None:
        for warning in reading.warnings():
            self._trouble(warning)

    def _trouble(self, warning: str) -> None:
        self._process.report.notify("text", warning, level="warning")
        self._process.log.record(noted.Remark(warning, "text_left_out"))


def coverage_of(text: object) -> Coverage | None:
    """Of a worker's text; None where it is not read in epochs, or not now."""
    return text.coverage() if isinstance(text, TextReader) else None


class _Places(msgspec.Struct, frozen=True):
    run: str
    circles: dict[str, Place]
