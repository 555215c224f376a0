"""A run's text on this machine: where its peer file says that it is, and nowhere else.

What a manifest calls its sources and its tokenizer are names that a stranger chose: whoever opened them as
paths would hand any file of this machine to the peers of the next stage. Only the first stage reads text. A
machine without it holds any other stage, and never moves to that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peers.config.atomic_files import is_file
from peers.config.peer_file import PeerFile
from peers.config.run_file import as_key
from peers.config.run_url import is_url, without_secret
from peers.data.documents import Reading, Text, TextError, files_of
from peers.data.files import ALL_SUFFIXES, PLAIN_SUFFIXES, TextUnreachable
from peers.data.shard_tokens import ShardCache
from peers.data.shards import Shard, all_shards
from peers.data.tokens import Progress, Tokens, tokens_on_disk
from peers.errors import UserError
from peers.telemetry.events import Say
from swarmnet.run.manifest import BYTES, STANDARD_LIBRARY, Manifest

FIRST_STAGE = 0
PROGRESS_SECONDS = 5.0
"""Between two lines about the tokens that are being made; nobody waits longer without a word."""


@dataclass(frozen=True, slots=True)
class TextHere:
    """What of a run's text a person of this machine has said where it is."""

    places: dict[str, str]
    """By the source's name: a file, a folder, `python-stdlib`, or where text is read in epochs a URL."""
    tokenizer: Path | None
    """None: bytes, or not said."""

    def __str__(self) -> str:
        texts = [f"{name} from {without_secret(place)}" for name, place in self.places.items()]
        return ", ".join([*texts, *([f"its tokenizer from {self.tokenizer}"] if self.tokenizer else [])])


def text_here(manifest: Manifest, config: PeerFile) -> TextHere:
    """The run's text, as far as the peer file names its places."""
    places = {name: str(place) for name, place in config.text.items()}
    places |= {
        source.name: STANDARD_LIBRARY
        for source in manifest.data.sources
        if source.path == STANDARD_LIBRARY and source.name not in places
    }
    return TextHere(
        {source.name: places[source.name] for source in manifest.data.sources if source.name in places},
        None if manifest.data.tokenizer == BYTES else config.tokenizer,
    )


def missing_text(manifest: Manifest, config: PeerFile) -> str:
    """What of the run's text is not on this machine, and what to do; empty: all is there. By the names of
    files alone: none is read, and nobody elsewhere is asked."""
    here, in_epochs = text_here(manifest, config), manifest.data.order == "epochs"
    for source in manifest.data.sources:
        problem = "the peer file does not say where it is"
        if source.name in here.places:
            place = here.places[source.name]
            if in_epochs and is_url(place):
                continue
            try:
                files_of(place, suffixes=ALL_SUFFIXES if in_epochs else PLAIN_SUFFIXES)
                continue
            except TextError as error:
                problem = str(error)
        return (
            f"the run's source `{source.name}` is not on this machine ({problem}); say where its text is, in "
            f"the peer file: text: {{{as_key(source.name)}: PATH}}"
        )
    if manifest.data.tokenizer != BYTES and (here.tokenizer is None or not is_file(here.tokenizer)):
        where = f"{here.tokenizer} does not exist" if here.tokenizer else "the peer file does not say where"
        return (
            f"the run's tokenizer.json is not on this machine ({where}); say where it is, in the peer file: "
            "tokenizer: PATH"
        )
    return ""


def _asked_to_read(manifest: Manifest, config: PeerFile) -> bool:
    """Whether a person chose the first stage, or as many as the run has."""
    return config.stage == FIRST_STAGE or config.stages >= len(manifest.stages)


def require_text(manifest: Manifest, config: PeerFile) -> None:
    """UserError if a person chose the stage that reads the run's text, which is not on this machine."""
    if _asked_to_read(manifest, config) and (missing := missing_text(manifest, config)):
        raise UserError(missing)


def never_held(manifest: Manifest, config: PeerFile, missing: str) -> frozenset[int]:
    """The stages that this machine cannot hold as text is `missing` (as `missing_text` says). A stage that
    a person typed is theirs to choose, and so are as many as the run has."""
    return frozenset({FIRST_STAGE}) if missing and not _asked_to_read(manifest, config) else frozenset()


def read_text_here(
    manifest: Manifest, config: PeerFile, seed: int, withdrawn: frozenset[bytes], progress: Progress
) -> Tokens:
    """Its tokens, without the documents that the owner has withdrawn; made if they do not lie in the state
    folder. Raises UserError."""
    if missing := missing_text(manifest, config):
        raise UserError(missing)
    here = text_here(manifest, config)
    try:
        text = Text(
            here.places.values(), longest_bytes=config.text_limit, seed=seed, withdrawn=withdrawn
        )
        return tokens_on_disk(
            text, here.tokenizer, manifest.model.vocabulary, config.state, progress, manifest.data.end_of_text
        )
    except TextError as error:
        raise UserError(str(error)) from None


def shards_here(
    manifest: Manifest, config: PeerFile, withdrawn: frozenset[bytes], reading: Reading
) -> tuple[dict[str, list[Shard]], ShardCache]:
    """Of a run that is read in epochs: the shards of each source, and what makes and keeps their tokens; of
    what is no shard any more nothing is kept. `reading` hears of what is left out. Raises UserError, or
    TextUnreachable where a URL does not answer."""
    if missing := missing_text(manifest, config):
        raise UserError(missing)
    here, data = text_here(manifest, config), manifest.data
    try:
        cache = ShardCache(
            here.tokenizer, manifest.model.vocabulary, config.state, data.end_of_text, withdrawn
        )
        shards = all_shards(data.sources, here.places, reading)
        cache.keep_only(shard for some in shards.values() for shard in some)
        reading.tokenizer = cache.warning
    except TextUnreachable:
        raise
    except TextError as error:
        raise UserError(str(error)) from None
    return shards, cache


def first_shard_here(manifest: Manifest, config: PeerFile, progress: Progress) -> Tokens:
    """Of a run that is read in epochs, to see whether that goes. Raises UserError."""
    reading = Reading()
    try:
        shards, cache = shards_here(manifest, config, frozenset(), reading)
        every = [shard for some in shards.values() for shard in some]
        opened = cache.open(every[0], progress)
    except TextError as error:
        raise UserError(str(error)) from None
    opened.reading.add_left_out(reading)
    opened.reading.tokenizer = reading.tokenizer
    return Tokens(opened.tokens, opened.reading, opened.made, shards=len(every))


def part_of_text(public_key: bytes) -> int:
    """The seed by which a peer chooses its part of a text that is larger than what it reads."""
    return int.from_bytes(public_key[:4], "little")


def text_line(read: Tokens) -> str:
    """What was read, for people."""
    reading = read.reading
    text = (
        f"{len(read.tokens):,} tokens: {_count(reading.documents, 'document')} in "
        f"{_count(reading.files, 'file')}, {reading.bytes / 1e6:,.1f} MB"
    )
    if read.shards:
        text = f"the first of {_count(read.shards, 'shard')}: {text}"
    if not read.made:
        return f"{text}, as they were kept"
    return text if read.before is None else f"{text}; the text is not what it was: {read.before:,} tokens"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


class Tokenizing:
    """Says how far it is, every so often."""

    def __init__(
        self,
        say: Say,
        now: Callable[[], float],
        what: str = "makes tokens of the text, once",
    ) -> None:
        """`now`: seconds."""
        self.say, self.now, self.what = say, now, what
        self.began = self.told = now()

    def from_thread(self, loop: asyncio.AbstractEventLoop) -> Progress:
        """`progress`, for another thread than the loop's."""

        def progress(done: int, all: int) -> None:
            loop.call_soon_threadsafe(self.progress, done, all)

        return progress

    def progress(self, done: int, all: int) -> None:
        """So many bytes of the text are tokens."""
        now = self.now()
        if now - self.told < PROGRESS_SECONDS or done <= 0:
            return
        self.told = now
        left = (now - self.began) * max(0, all - done) / done
        self.say(
            "tokenizing",
            f"{self.what}: {done / 1e6:,.0f} of {all / 1e6:,.0f} MB, {left:.0f} s to go",
        )
