"""Check a run file before it is signed, since a published run cannot be changed.

Its text and tokenizer are opened like peers of the first stage will open them. Values that have never trained
a model are reported.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from peers.config.atomic_files import is_file, write_atomically
from peers.config.errors import ConfigError, UserError
from peers.config.explain import is_run_file
from peers.config.peer_file import load
from peers.config.run_file import beside, find_source_text, load_manifest, load_signed
from peers.config.run_url import is_url, without_secret
from peers.data.documents import LONGEST_CORPUS_BYTES, DocumentText, ReadSummary, TextError
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import BYTES, STANDARD_LIBRARY, Data, InitCheckpoint, TextSource

if TYPE_CHECKING:
    from peers.data.tokenizer import Tokenizer

LOWEST_RATE = 2.5e-5
"""Lowest learning rate without a warning: some hundred units of the weights' grid
(docs/decisions/0002-grid.md)."""
HIGHEST_RATE = 0.08
"""Learning rate from which a warning is given. No run learnt well at it; it is ten times the highest that
trained (docs/benchmarks/attacks.md, tests/swarm/hostile/test_loud_peers.py). The files in configs/ have 0.004
and 0.001."""
MICROBATCHES_OF_A_ROUND = 4
"""Minimum microbatches of a round if their paths differ (docs/benchmarks/quality.md)."""

LONGEST_COUNTED_BYTES = 8 * 2**30
"""Maximum bytes of text that publishing reads to count it. This takes about a minute from a disk of 150
MB/s."""
FREE_KINDS = ("public", "synthetic", "other")
"""Kinds of text that peers send to each other without a word of the owner, if a licence is stated."""


def check_file(
    path: Path,
    environment: Mapping[str, str],
    overrides: Mapping[str, str],
    tokenizer: Path | None = None,
    warn: Callable[[str], None] | None = None,
    start: Path | None = None,
) -> str:
    """Return one line about a peer file, a run file or a published run.

    For a run file, `tokenizer` and `start` give the paths of the tokenizer.json and of the model to start
    from, if they are not in its folder. `warn` is called with each unusual value. Raises UserError."""
    for option, given in (("--tokenizer", tokenizer), ("--init-checkpoint", start)):
        if given is not None and (path.suffix == ".json" or not is_run_file(path)):
            raise UserError(f"{option} is for a run file, which {path} is not: leave it out")
    if path.suffix == ".json":
        if overrides:
            raise ConfigError([f"--set: {path} is published and cannot be changed"])
        signed = load_signed(path)
        return f"{path}: ok, published run {signed.run_id} of {signed.manifest.owner}"
    if is_run_file(path):
        manifest = load_manifest(path, PeerId(""), overrides)
        unlike = start_beside(path, manifest, tokenizer, start)[1]
        for unusual in [*check_run(path, manifest, tokenizer), *unlike]:
            if warn is not None:
                warn(unusual)
        return f"{path}: ok, run file of {manifest.name!r}, {len(manifest.stages)} stages"
    config = load(path, environment, overrides)
    return f"{path}: ok, peer file of {config.name!r}, role {config.role}"


def check_run(
    run_file: Path, manifest: Manifest, tokenizer: Path | None = None, *, opened: bool = True
) -> list[str]:
    """Return one line for each value that is unusual, or that could not be checked. `tokenizer`: its path, if
    it is not in the run file's folder. `opened`: whether to open text and tokenizer. Raises ConfigError for
    what cannot work."""
    if not opened:
        return ["text and tokenizer were not opened, as requested", *unusual(manifest)]
    try:
        reads = tokenizer_beside(manifest, run_file.parent, tokenizer)
        return [*_text(manifest, run_file.parent, reads), *unusual(manifest)]
    except TextError as error:
        raise ConfigError([f"{run_file}: {error}"]) from None


def tokenizer_beside(manifest: Manifest, folder: Path, given: Path | None) -> Tokenizer | None:
    """Return the tokenizer of a run file in `folder`, or the `given` one. None: the text is read as bytes
    without an end of text, so there is nothing to check. Raises TextError."""
    data = manifest.data
    if data.tokenizer == BYTES and given is None and not data.eos_token:
        return None  # Avoids importing torch, which takes seconds.
    from peers.data.tokenizer import open_reader, tokenizer_file

    file = None if data.tokenizer == BYTES else given or beside(folder, data.tokenizer)
    if data.tokenizer != BYTES and file is None:
        raise TextError(
            f"data.tokenizer: {data.tokenizer} is not next to the run file, in {folder.absolute()}: put it "
            "there, or say where it is: --tokenizer FILE (`swarmnet tokenizer TEXT` makes one)"
        )
    return open_reader(data, tokenizer_file(data, file or given), manifest.model.vocab_size)


def start_beside(
    run_file: Path, manifest: Manifest, tokenizer: Path | None, given: Path | None
) -> tuple[InitCheckpoint | None, list[str]]:
    """Return the published facts of the model that a run starts from, and a line for each unusual one.

    The model is in the run file's folder, or is the `given` one. None: the run starts from its seed.
    `tokenizer`: see `check_run`. Raises UserError."""
    wanted, folder = manifest.init_checkpoint.path, run_file.parent
    if wanted != without_secret(wanted):
        raise ConfigError(
            [
                f"{run_file}: init_checkpoint.path: it would be published with the name and the password in "
                "it; write the "
                f"folder's name, and give the URL to `swarmnet publish {run_file} --init-checkpoint URL`"
            ]
        )
    if not wanted:
        if given is not None:
            raise UserError(
                f"--init-checkpoint: {run_file} has no init_checkpoint.path: leave it out, or write one"
            )
        return None, []
    from peers.state.start_fetch import beside_run
    from peers.state.start_folder import StartError, pinned

    place = given or beside(folder, str(beside_run(folder, wanted)) if is_url(wanted) else wanted)
    if place is None and is_url(wanted):
        return None, [f"init_checkpoint: the model was not checked: publishing fetches it from {wanted}"]
    if place is None:
        raise ConfigError(
            [
                f"{run_file}: init_checkpoint.path: {wanted} is not next to the run file, in "
                f"{folder.absolute()}: put the "
                "model's folder there, or say where it is: --init-checkpoint DIR"
            ]
        )
    used = tokenizer or folder / manifest.data.tokenizer
    try:
        return pinned(place, manifest), _other_tokenizer(manifest, place, used)
    except StartError as error:
        raise ConfigError([f"{run_file}: init_checkpoint: {error}"]) from None


def model_beside(
    run_file: Path, manifest: Manifest, given: str | None, notify: Callable[[str], None]
) -> Path | None:
    """Return the folder of the model that the run file or the publisher names; None if neither does. A model
    at a URL is fetched into the run file's folder, unless it is there already. Raises UserError."""
    wanted = given or manifest.init_checkpoint.path
    if not given and not is_url(wanted):
        return None
    from peers.state.start_fetch import beside_run, fetched, folder_of

    local = folder_of(wanted)
    if local is not None or not manifest.init_checkpoint.path:
        return local or Path(wanted)  # `start_beside` reports a run that starts from its seed.
    folder = beside_run(run_file.absolute().parent, wanted)
    fetched(wanted, folder, manifest, notify)
    return folder


def _other_tokenizer(manifest: Manifest, model: Path, used: Path) -> list[str]:
    theirs = model / "tokenizer.json"
    if not is_file(theirs):
        return []
    if manifest.data.tokenizer != BYTES and is_file(used) and used.read_bytes() == theirs.read_bytes():
        return []
    return [f"data.tokenizer: the model has another one, {theirs}, with whose tokens it was trained"]


def _text(manifest: Manifest, folder: Path, reads: Tokenizer | None) -> Iterator[str]:
    """Yield warnings about the run's text. Raises TextError."""
    if reads is not None and reads.warning:
        yield f"data.tokenizer: {reads.warning}"
    if manifest.data.private:
        yield "data.sources: the text was not opened: it is each owner's own"
        if manifest.is_u_shaped and manifest.access != "invite":
            yield (
                "data.u_shaped_layers: any stranger may serve the stages between, and can turn hidden states "
                "back into text; set access: invite"
            )
        return
    places: dict[str, str] = {}
    for source in manifest.data.sources:
        place = find_source_text(folder, source)
        if place is None:
            yield (
                f"data.sources: the text `{source.name}` was not checked: {source.path} is not next to the "
                f"run file, in {folder.absolute()}"
            )
            continue
        places[source.name] = place
        text = _read_as(manifest, {source.name: place}, reads)
        next(text.blocks(), None)  # Raises TextError where there is nothing in it.
        yield from (f"data.sources: {source.name}: {warning}" for warning in text.reading.warnings())
    if len(places) == len(manifest.data.sources):
        yield from _require_a_window(manifest, places, reads)


def counted_data(manifest: Manifest, folder: Path, tokenizer: Path | None) -> Data:
    """Return the run's `data`, with missing sizes, hashes and document counts filled in from the text in
    `folder`. For a text that peers may send to each other, write its index, and fill in its hash, the
    number and size of its files, and the hashes of the `tokenizer` and of the chat template. Reads the text,
    unless it is private. Raises TextError."""
    data = manifest.data
    reads = tokenizer_beside(manifest, folder, tokenizer) if data.format == "messages" else None
    sources = (
        data.sources
        if data.private
        else tuple(
            _counted(manifest, _indexed(manifest, source, folder), folder, reads) for source in data.sources
        )
    )
    file = None if data.tokenizer == BYTES else tokenizer or beside(folder, data.tokenizer)
    is_sent = file is not None and any(source.is_shared for source in sources)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest() if is_sent and file is not None else ""
    template = data.chat_template_sha256
    if data.format == "messages" and file is not None and not template:
        from peers.data.chat_settings import settings_beside

        template = settings_beside(file).sha256()
    return replace(
        data,
        sources=sources,
        tokenizer_sha256=data.tokenizer_sha256 or sha256,
        chat_template_sha256=template,
    )


def _indexed(manifest: Manifest, source: TextSource, folder: Path) -> TextSource:
    """Return a source with what peers need to send its text to each other, if they may (`TextSource.shared`).
    Writes the index of the text if there is none. Raises TextError."""
    is_free = source.kind in FREE_KINDS and source.licence not in ("", "unknown")
    wanted = source.shared == "peers" or (source.shared == "auto" and manifest.access == "open" and is_free)
    place = find_source_text(folder, source)
    if not wanted or source.path == STANDARD_LIBRARY or (source.files and source.index):
        return source
    if place is None:
        if source.shared == "auto":
            return source
        raise TextError(
            f"data.sources: {source.name}: shared: peers needs the text next to the run file when it is "
            f"published: put {source.path} into {folder.absolute()}"
        )
    from peers.data.shards import index_of, index_of_place, parsed

    path = index_of_place(Path(place))
    try:
        index = index_of(Path(place), ReadSummary(), lambda done, total: None, source.tokens)
    except TextError:
        if source.shared == "auto":  # For example, the name of a file is not one for every system.
            return source
        raise
    sha256, entries = hashlib.sha256(index).hexdigest(), parsed(index)
    if source.index not in ("", sha256) or (is_file(path) and path.read_bytes() != index):
        raise TextError(
            f"{path} is not the index of the files that are there now: `swarmnet index {place} --replace` "
            "makes a new one"
        )
    write_atomically(path, index)
    size = sum(entry.bytes for entry in entries)
    return replace(source, shared="peers", index=sha256, files=len(entries), file_bytes=size)


def _counted(manifest: Manifest, source: TextSource, folder: Path, reads: Tokenizer | None) -> TextSource:
    place = find_source_text(folder, source)
    if place is None or source.path == STANDARD_LIBRARY:
        return source
    text = _read_as(manifest, {source.name: place}, reads, sys.maxsize)
    if text.total_bytes > LONGEST_COUNTED_BYTES:
        return source
    for _ in text.blocks():
        pass
    found, digest = text.reading, source.index
    if not digest and is_file(Path(place)):
        with Path(place).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return replace(
        source,
        bytes=source.bytes or found.bytes,
        documents=source.documents or found.documents,
        sha256=source.sha256 or digest,
    )


def _read_as(
    manifest: Manifest,
    places: Mapping[str, str],
    reads: Tokenizer | None,
    longest_bytes: int = LONGEST_CORPUS_BYTES,
) -> DocumentText:
    """Return the text of these sources, as the tokenizer `reads` it. Raises TextError."""
    from peers.data.shards import source_files

    others, sources = ReadSummary(), [one for one in manifest.data.sources if one.name in places]
    found = [source_files(source, places[source.name], others) for source in sources]
    files = [file for some in found for _, file in some]
    return DocumentText(
        files,
        others,
        longest_bytes=longest_bytes,
        places=", ".join(places.values()),
        vocabulary=manifest.model.vocab_size,
        parse_line=None if reads is None else reads.parse_line,
    )


def _require_a_window(
    manifest: Manifest, places: Mapping[str, str], reads: Tokenizer | None
) -> Iterator[str]:
    """Yield warnings about the tokens at the start of the text. Raises TextError if it is shorter than a
    sequence."""
    needed = manifest.data.seq_len + 1  # swarmnet/model/sampling.py
    there = 0
    text = _read_as(manifest, places, reads)
    for count in _counts(text, reads):
        there += count
        if there >= needed:
            yield from (f"data.tokenizer: {warning}" for warning in text.reading.losses())
            return
    raise TextError(
        f"data.sources: the text has {there} tokens, and a sequence takes {needed}: add text, or make "
        f"data.seq_len smaller{text.reading.reason()}"
    )


def _counts(text: DocumentText, reads: Tokenizer | None) -> Iterator[int]:
    """Yield the number of tokens, a part of the text at a time."""
    if reads is None:
        from peers.data.forms import RawTokens

        yield from (len(each) // 4 if isinstance(each, RawTokens) else len(each) for _, each in text.blocks())
        return
    from peers.data.tokens import encoded

    yield from (len(tokens) for tokens in encoded(text, reads, lambda done, total: None))


def unusual(manifest: Manifest) -> list[str]:
    """Return one line for each valid value that has never trained a model."""
    data, rounds, sync = manifest.data, manifest.rounds, manifest.sync
    microbatch, skips = manifest.microbatch_tokens, manifest.path_rules().skips
    checks = [
        (
            not LOWEST_RATE <= sync.learning_rate < HIGHEST_RATE,
            f"sync.learning_rate is {sync.learning_rate:g}: every weight changes by this in a round; "
            "runs have "
            f"trained with 0.002 to 0.008, at {HIGHEST_RATE:g} nothing learnt well, below "
            f"{LOWEST_RATE:g} the "
            "weights' grid is too coarse",
        ),
        (
            sync.warmup_rounds >= sync.decay_rounds,
            f"sync.warmup_rounds is {sync.warmup_rounds}, sync.decay_rounds {sync.decay_rounds}: the "
            "learning "
            "rate falls to its last value as soon as it has risen",
        ),
        (
            rounds.global_batch_tokens < microbatch,
            f"rounds.global_batch_tokens is {rounds.global_batch_tokens}, less than one microbatch of "
            f"{microbatch} tokens: "
            "each microbatch then is a round",
        ),
        (
            skips and microbatch <= rounds.global_batch_tokens < MICROBATCHES_OF_A_ROUND * microbatch,
            f"rounds.global_batch_tokens is {rounds.global_batch_tokens}, and microbatches of "
            f"{microbatch} tokens take "
            f"different paths: at least {MICROBATCHES_OF_A_ROUND} should meet in a round",
        ),
        (
            data.tokenizer != BYTES and not data.eos_token,
            "data.eos_token is empty: the model will not learn where a text ends",
        ),
    ]
    return [message for wrong, message in checks if wrong]
