"""The text of a peer in a run that is read in epochs: microbatches from one shard after the other, and how
far it has come, which outlives the process.

    STATE/text/place.json    written every few seconds, and behind each shard: who is killed reads once more
                             what it has read since then

Two shards of each circle are open: the one that is read, and the one behind it, which is opened in a thread
as soon as that begins. Where it is not there in time, no microbatch is started until it is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.config.atomic_files import write_atomically
from peers.config.run_file import SignedManifest
from peers.data.documents import Reading
from peers.data.files import TextError, TextUnreachable
from peers.data.shard_tokens import ShardCache, ShardTokens
from peers.data.shards import Shard
from peers.data.tokens import FOLDER, Progress
from peers.errors import UserError
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.model.epochs import Place, Reader, following, mixed, window_count, window_start

PLACE = "place.json"
SAVE_SECONDS = 10.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
"""Between two attempts to reach who keeps the text; twice as long each time (as for archives)."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of its text a peer has read."""

    shards: int
    """That it has, and that hold a sequence at least."""
    shards_read: int
    """To their end, in this epoch."""
    epochs: int
    """Read to their end; of several sources with weights that of the one that is furthest behind."""
    tokens: int
    """Read in this epoch."""
    read_ever: int
    """Shards, in all epochs."""


@dataclass(frozen=True, slots=True)
class ShardRead:
    """What `Circle.take` has come to the end of."""

    shard: str
    epoch: int
    tokens: int
    """Of its windows."""
    ends_epoch: bool


@dataclass(slots=True)
class Circle:
    """The shards that are read in turn: of all sources together, or of one that has a weight."""

    name: str
    """The source's; empty: all."""
    weight: float
    shards: Mapping[str, Shard]
    reader: Reader
    sequence_tokens: int
    place: Place = field(default_factory=Place)
    read: int = 0
    """Windows, in all epochs."""
    now: ShardTokens | None = None
    ahead: tuple[int, ShardTokens] | None = None
    """The next one, and its epoch."""

    empty: set[str] = field(default_factory=set)
    """Shards that hold no sequence."""
    left_out: Reading = field(default_factory=Reading)
    """What was left out of those."""

    def count(self, shard: ShardTokens) -> int:
        return window_count(len(shard.tokens), self.sequence_tokens)

    @property
    def is_done(self) -> bool:
        """With the shard that is open, if one is."""
        return self.now is None or self.place.window >= self.count(self.now)

    def take(self) -> Tensor | None:
        """The next window, sequence_tokens + 1 of its shard's; None: the next shard is not open yet."""
        if self.is_done:
            if self.ahead is None:
                return None
            epoch, self.now = self.ahead
            self.ahead = None
            same = epoch == self.place.epoch
            self.place = Place(
                epoch, self.now.name, 0, self.place.shards if same else 0, self.place.windows if same else 0
            )
        assert self.now is not None
        tokens, place = self.now.tokens, self.place
        start = window_start(
            self.reader, place.epoch, place.shard, place.window, len(tokens), self.sequence_tokens
        )
        self.place = replace(place, window=place.window + 1, windows=place.windows + 1)
        self.read += 1
        if self.is_done:
            self.place = replace(self.place, shards=place.shards + 1)
        return tokens[start : start + self.sequence_tokens + 1]

    def sought(self) -> tuple[int, str]:
        """The shard behind the one that is read, and its epoch, past those that hold nothing."""
        epoch, shard = self.place.epoch, self.place.shard
        there = [name for name in self.shards if name not in self.empty]
        if not there:
            whose = f"the source `{self.name}`" if self.name else "the run's text"
            raise TextError(
                f"no shard of {whose} holds a sequence of {self.sequence_tokens + 1} tokens: add text"
                f"{self.left_out.reason()}"
            )
        return following(self.reader, there, epoch, shard)


class EpochText:
    """`data_path.Text`. `begin`, then `read_ahead` beside; `close` when it is not read any more."""

    def __init__(
        self,
        signed: SignedManifest,
        origin: PeerId,
        shards: Mapping[str, list[Shard]],
        cache: ShardCache,
        state: Path,
        says: Says,
    ) -> None:
        """`shards`: of each source by its name, in the manifest's order."""
        data, seed = signed.manifest.data, signed.manifest.seed
        reader, length = Reader(signed.run_id, seed, origin), data.sequence_tokens
        weights = {source.name: source.weight for source in data.sources}
        groups = {"": [each for some in shards.values() for each in some]}
        if any(weights.values()):
            groups = {name: list(some) for name, some in shards.items()}
        self.circles = [
            Circle(name, weights.get(name, 1.0), {each.name: each for each in some}, reader, length)
            for name, some in groups.items()
        ]
        self._sequences, self._run = data.microbatch_sequences, signed.run_id
        self._cache, self._path, self._says = cache, state / FOLDER / PLACE, says
        self._waiting: list[Tensor] = []
        """Windows of a microbatch that is not whole yet."""
        self._wanted = asyncio.Event()
        self._restore()
        self._whole = self._saved = self._as_json()
        """Where the newest whole microbatch ended, and what of it is on the disk."""

    def microbatch(self, key: MicrobatchId) -> tuple[Tensor, Tensor] | None:
        """inputs_BT and labels_BT, the next ones of this peer whatever the key; None: what comes next is not
        open yet, and `Says.opened` is called when it is."""
        while len(self._waiting) < self._sequences:
            circles = self.circles
            circle = circles[mixed([one.read for one in circles], [one.weight for one in circles])]
            before = circle.place.epoch, circle.place.shard
            window = circle.take()
            if window is None:
                self._wanted.set()
                return None
            self._waiting.append(window)
            if (circle.place.epoch, circle.place.shard) != before:
                self._wanted.set()
            if circle.is_done:
                self._wanted.set()
                self._tell(circle)
        window_BT = torch.stack(self._waiting).long()
        self._waiting.clear()
        self._whole = self._as_json()
        return window_BT[:, :-1].contiguous(), window_BT[:, 1:].contiguous()

    def coverage(self) -> Coverage:
        places = [one.place for one in self.circles]
        there = [len(one.shards) - len(one.empty) for one in self.circles]
        return Coverage(
            sum(there),
            sum(place.shards for place in places),
            min(place.epoch for place in places),
            sum(place.windows * one.sequence_tokens for place, one in zip(places, self.circles, strict=True)),
            sum(place.epoch * all + place.shards for place, all in zip(places, there, strict=True)),
        )

    async def begin(self) -> None:
        """Until the first shards are open. Raises UserError."""
        for circle in self.circles:
            shard = circle.shards.get(circle.place.shard)
            if shard is not None:
                circle.now = await self._open(shard)
        await self._open_ahead()

    async def read_ahead(self) -> None:
        """Until cancelled, or something is wrong with the text (UserError)."""
        while True:
            self._wanted.clear()
            await self._open_ahead()
            self._says.opened()
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVE_SECONDS):
                    await self._wanted.wait()
            try:
                await asyncio.to_thread(self.save)
            except UserError as error:
                self._says.trouble(str(error))

    def save(self) -> None:
        """Raises UserError where the disk refuses."""
        if (told := self._whole) != self._saved:
            write_atomically(self._path, told)
            self._saved = told

    async def _open_ahead(self) -> None:
        for circle in self.circles:
            while circle.ahead is None:
                try:
                    epoch, name = circle.sought()
                except TextError as error:
                    raise UserError(str(error)) from None
                opened = await self._open(circle.shards[name])
                if circle.count(opened):
                    circle.ahead = epoch, opened
                else:
                    circle.empty.add(name)
                    circle.left_out.add_left_out(opened.reading)

    async def _open(self, shard: Shard) -> ShardTokens:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                opened = await asyncio.to_thread(self._cache.open, shard, self._says.progress())
            except TextUnreachable as error:
                self._says.trouble(f"{error}; trying again in {pause:.0f} s")
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)
                continue
            except TextError as error:
                raise UserError(str(error)) from None
            for warning in opened.reading.warnings():
                self._says.trouble(warning)
            return opened

    def _tell(self, circle: Circle) -> None:
        """The shard that is open was read to its end."""
        place, there = circle.place, len(circle.shards) - len(circle.empty)
        assert circle.now is not None
        tokens = circle.count(circle.now) * circle.sequence_tokens
        self._says.read(ShardRead(place.shard, place.epoch, tokens, place.shards >= there))

    def _as_json(self) -> bytes:
        circles = {one.name: {**asdict(one.place), "read": one.read} for one in self.circles}
        return json.dumps({"run": self._run, "circles": circles}).encode()

    def _restore(self) -> None:
        """Go on where this peer was, as far as that is known."""
        try:
            told = json.loads(self._path.read_bytes())
            circles = told["circles"] if told["run"] == self._run else {}
            found = {name: _place(one) for name, one in circles.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return
        for circle in self.circles:
            if (there := found.get(circle.name)) is not None:
                circle.place, circle.read = there


def coverage_of(text: object) -> Coverage | None:
    """Of a worker's text; None where it is not read in epochs, or not now."""
    return text.coverage() if isinstance(text, EpochText) else None


def _place(told: Mapping[str, Any]) -> tuple[Place, int]:
    """Raises KeyError, TypeError, ValueError."""
    values = {one.name: told[one.name] for one in fields(Place)}
    numbers = [told["read"], *(value for name, value in values.items() if name != "shard")]
    if not (isinstance(values["shard"], str) and all(type(each) is int and each >= 0 for each in numbers)):
        raise ValueError("no place in a text")
    return Place(**values), told["read"]


@dataclass(frozen=True, slots=True)
class Says:
    """Whom an `EpochText` tells."""

    opened: Callable[[], None]
    """A shard that was waited for may be there."""
    read: Callable[[ShardRead], None]
    trouble: Callable[[str], None]
    """For people: what is left out, who does not answer."""
    progress: Callable[[], Progress]
    """Hears how far the tokens of one shard are; called in another thread."""
