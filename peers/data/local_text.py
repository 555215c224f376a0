"""Find a run's text on this machine, only where the peer file says that it is.

The names of sources and tokenizer in a manifest come from a stranger. Opening them as paths could send any
file of this machine to the peers of the next stage. Only the first stage reads text. A machine without the
text can serve any other stage, and never moves to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from peers.config.atomic_files import is_file
from peers.config.peer_file import PeerFile
from peers.config.run_file import as_key
from peers.config.run_url import is_url
from peers.data.documents import ReadSummary, TextError, files_at
from peers.data.shards import Shard, all_shards
from peers.data.tokens import Progress, ShardCache, ShardTokens
from peers.errors import UserError
from peers.telemetry.events import Notify
from swarmnet.run.manifest import BYTES, STANDARD_LIBRARY, Manifest

FIRST_STAGE = 0
PROGRESS_SECONDS = 5.0
"""Seconds between two progress lines while text is tokenized."""


def places_here(manifest: Manifest, config: PeerFile) -> dict[str, str]:
    """Return the place that the peer file gives for each source of the run's text, by the source's name. A
    place is a file, a folder, `python-stdlib`, or a URL."""
    configured = {name: str(place) for name, place in config.data_paths.items()}
    library = {one.name: STANDARD_LIBRARY for one in manifest.data.sources if one.path == STANDARD_LIBRARY}
    places = library | configured
    return {source.name: places[source.name] for source in manifest.data.sources if source.name in places}


def tokenizer_here(manifest: Manifest, config: PeerFile) -> Path | None:
    """Return the path that the peer file gives for the run's tokenizer.json; None: tokens are bytes, or it
    gives none."""
    return None if manifest.data.tokenizer == BYTES else config.tokenizer


def missing_text(manifest: Manifest, config: PeerFile) -> str:
    """Return which part of the run's text is missing on this machine, and what to do; empty: nothing is
    missing. Only file names are checked: no file is read and no server is contacted."""
    places, tokenizer = places_here(manifest, config), tokenizer_here(manifest, config)
    for source in manifest.data.sources:
        problem, place = "the peer file does not say where it is", places.get(source.name)
        if place is not None:
            try:
                if not is_url(place):
                    files_at(place, ReadSummary())
                continue
            except TextError as error:
                problem = str(error)
        return (
            f"the run's source `{source.name}` is not on this machine ({problem}); say where its text is, in "
            f"the peer file: data_paths: {{{as_key(source.name)}: PATH}}"
        )
    if manifest.data.tokenizer != BYTES and (tokenizer is None or not is_file(tokenizer)):
        where = f"{tokenizer} does not exist" if tokenizer else "the peer file does not say where"
        return (
            f"the run's tokenizer.json is not on this machine ({where}); say where it is, in the peer file: "
            "tokenizer: PATH"
        )
    return ""


def _asked_to_read(manifest: Manifest, config: PeerFile) -> bool:
    """Return whether a person chose the first stage, or the run has no other."""
    return config.stage == FIRST_STAGE or len(manifest.stages) == 1


def require_text(manifest: Manifest, config: PeerFile) -> None:
    """Raise UserError if the chosen stage reads the run's text and this machine lacks it."""
    if _asked_to_read(manifest, config) and (missing := missing_text(manifest, config)):
        raise UserError(missing)


def never_held(manifest: Manifest, config: PeerFile, missing: str) -> frozenset[int]:
    """Return the stages that this machine cannot serve without the text that is `missing` (see
    `missing_text`). A stage that the user chose is never among them, nor is the only stage of a run."""
    return frozenset({FIRST_STAGE}) if missing and not _asked_to_read(manifest, config) else frozenset()


def shards_here(
    manifest: Manifest, config: PeerFile, public_key: bytes, withdrawn: frozenset[bytes]
) -> tuple[dict[str, list[Shard]], ShardCache, ReadSummary]:
    """Return the shards of each source (`all_shards`), the cache of their tokens, and what was skipped.

    Documents that the owner has withdrawn are left out. Stored tokens of shards that no longer exist are
    removed. `public_key` of the peer chooses its part of a randomly sampled text. Raises TextError, and
    TextUnreachable if a URL does not answer."""
    if missing := missing_text(manifest, config):
        raise TextError(missing)
    data, reading = manifest.data, ReadSummary()
    cache = ShardCache(
        tokenizer_here(manifest, config), manifest.model.vocab_size, config.state, data.eos_token, withdrawn
    )
    reading.tokenizer = cache.warning
    seed = int.from_bytes(public_key[:4], "little")
    shards = all_shards(data, places_here(manifest, config), reading, config.max_data_bytes, seed)
    cache.keep_only(shard for some in shards.values() for shard in some)
    return shards, cache, reading


def first_shard_here(
    manifest: Manifest, config: PeerFile, public_key: bytes, progress: Progress
) -> tuple[ShardTokens, int]:
    """Return the tokens of the first shard that a peer reads, and the number of all shards. This shows
    whether the text can be read. Raises UserError."""
    try:
        shards, cache, reading = shards_here(manifest, config, public_key, frozenset())
        every = [shard for some in shards.values() for shard in some]
        return cache.open(replace(every[0], others=reading), progress), len(every)
    except TextError as error:
        raise UserError(str(error)) from None


def text_line(read: ShardTokens, shards: int = 1) -> str:
    """Return a line for people about the text that was read: the first of `shards` shards."""
    reading = read.reading
    text = (
        f"{len(read.tokens):,} tokens: {_count(reading.documents, 'document')} in "
        f"{_count(reading.files, 'file')}, {reading.bytes / 1e6:,.1f} MB"
    )
    if shards > 1:
        text = f"the first of {shards:,} shards: {text}"
    return text if read.made else f"{text}, as they were kept"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def progress_lines(
    notify: Notify, now: Callable[[], float], what: str = "makes tokens of the text, once"
) -> Progress:
    """Return a progress callback that prints a line every PROGRESS_SECONDS. `now` returns seconds."""
    began = printed_at = now()

    def progress(done: int, all: int) -> None:
        """Print progress: `done` of `all` bytes of the text are tokenized."""
        nonlocal printed_at
        at = now()
        if at - printed_at < PROGRESS_SECONDS or done <= 0:
            return
        printed_at = at
        left = (at - began) * max(0, all - done) / done
        notify("tokenizing", f"{what}: {done / 1e6:,.0f} of {all / 1e6:,.0f} MB, {left:.0f} s to go")

    return progress
