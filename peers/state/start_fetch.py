"""Download the model that a run starts from: once, from a URL into a local folder.

The URL is that of a folder in the layout of Hugging Face. It has config.json, model.safetensors or the files
that model.safetensors.index.json names, and maybe a tokenizer. The user of this machine names the URL; a
URL in a manifest is never opened. The local folder gets its final name when all files are complete and have
the hash that the run names. Else nothing is left behind. All calls except `model_here` block: use a thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from peers.config.atomic_files import is_there
from peers.config.peer_file import default_state
from peers.config.remote_files import connect, is_web, reached
from peers.config.run_url import is_url, without_secret
from peers.state.start_folder import CONFIG, INDEX, MAX_JSON_BYTES, StartError, hash_of, read_json
from peers.telemetry.log_events import Notify
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Lora, ModelShape

WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files that are fetched if they are there. An export keeps the chat template in the last two."""
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")
"""Allowed names of files in an index, because they become names in a local folder."""
LARGEST_NUMBER = 8
"""Bytes of the widest number format, F64."""
BESIDE_BYTES = 256 << 20
"""Extra bytes for files other than weights.

Headers of safetensors files have at most 100 MB each by the format, and about 100 bytes a tensor in practice.
A tokenizer has 17 MB for a vocabulary of 151,643. Configuration and index are small."""
SILENCE_SECONDS = 30.0
BEGIN_SECONDS = 60.0
SLOWEST = 100_000
"""Minimum bytes per second over the whole download: 0.8 Mbit/s. A slower one is abandoned."""
BLOCK_BYTES = 1 << 20
WAIT_SECONDS = 0.5
"""Interval of the checks whether another peer of this machine has downloaded it."""


async def model_here(place: str, manifest: Manifest, notify: Notify) -> Path | None:
    """Return the local folder of the model at `place`, a path or a URL in the peer file's `init_checkpoint`;
    None if that is empty.

    A path is returned unchanged. From a URL, the model is first downloaded into a folder that all peers of
    this machine share; but if the run does not start from a model, None is returned for a URL. Raises
    StartError if the download fails."""
    local = folder_of(place)
    if local is not None or not place or not manifest.init_checkpoint.path:
        return local
    sha256 = manifest.init_checkpoint.sha256
    if not sha256:
        raise StartError(
            f"init_checkpoint: the run names no SHA-256 of its model: download {without_secret(place)}"
        )
    folder = default_state(os.environ, sys.platform) / "models" / sha256[:16]
    stopped, loop = threading.Event(), asyncio.get_running_loop()

    def report(text: str) -> None:
        loop.call_soon_threadsafe(notify, "weights", text)

    try:
        await asyncio.to_thread(fetched, place, folder, manifest, report, stopped.is_set)
    finally:
        stopped.set()  # If this task was cancelled, the thread ends with its next block.
    return folder


def folder_of(place: str) -> Path | None:
    """Return the local path if `place` is a path or a file:// URL; None for another URL or an empty text."""
    if not place or not is_url(place):
        return Path(place) if place else None
    parts = urlsplit(place)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def beside_run(folder: Path, url: str) -> Path:
    """Return the folder for the copy of the model at `url`: below `folder`, with the last name in the URL.
    Raises StartError if the URL ends in no name."""
    name = Path(unquote(urlsplit(url).path)).name
    if not name or name.startswith("."):
        raise StartError(f"{without_secret(url)}: leads to no folder with a name, which its copy would have")
    return (folder / name).absolute()


def fetched(
    url: str,
    folder: Path,
    manifest: Manifest,
    notify: Callable[[str], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Download the model at a URL into `folder`, unless the folder exists; its content is checked later, when
    it is read. `notify` gets progress messages. Raises StartError if the download fails, or `is_stopped`
    returns True."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _download_lock(folder, is_stopped):
            if not is_there(folder):
                _download(url, folder, manifest, notify, is_stopped)
    except OSError as error:
        raise StartError(f"{folder}: cannot be written: {error.strerror or error}") from None


@contextmanager
def _download_lock(folder: Path, is_stopped: Callable[[], bool]) -> Iterator[None]:
    """Hold a file lock on the parent of `folder`, so that only one peer of this machine downloads at a time.
    Waits for the lock. Raises StartError if `is_stopped` returns True meanwhile."""
    lock = os.open(folder.parent, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _require_running(is_stopped)
                time.sleep(WAIT_SECONDS)
        yield
    finally:
        os.close(lock)


def _download(
    url: str, folder: Path, manifest: Manifest, notify: Callable[[str], None], is_stopped: Callable[[], bool]
) -> None:
    """Download all files into a temporary folder, check their hash, and rename the folder to `folder`.
    Temporary folders of killed processes are removed. Raises StartError, and then leaves nothing behind."""
    source = _Source(url)
    prefix, suffix = f".{folder.name}.", ".part"
    for leftover in folder.parent.glob(f"{prefix}*{suffix}"):
        shutil.rmtree(leftover, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=folder.parent))
    try:
        max_bytes = _max_bytes(manifest.model)
        deadline = time.monotonic() + BEGIN_SECONDS + max_bytes / SLOWEST
        budget = _Budget(max_bytes, deadline, is_stopped)
        hashes = {CONFIG: source.copy(CONFIG, part, budget, MAX_JSON_BYTES)}
        for name in source.weights(part, budget):
            notify(f"fetches {name} of the model that the run starts from: {source.url}")
            hashes[name] = source.copy(name, part, budget)
        actual, wanted = hash_of(hashes), manifest.init_checkpoint.sha256
        if wanted not in ("", actual):
            raise StartError(
                f"{source.url} is not the model that init_checkpoint.sha256 names: that is "
                f"{wanted[:16]}..., its hash "
                f"is {actual}; nothing of it was kept"
            )
        for name in TOKENIZER_FILES:
            source.copy_if_there(name, part, budget)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _max_bytes(shape: ModelShape) -> int:
    """Return the maximum size of the run's model in bytes, in the widest number format."""
    shapes = parameter_shapes(replace(shape, lora=Lora()), whole(shape))
    return LARGEST_NUMBER * sum(map(prod, shapes.values())) + BESIDE_BYTES


def _require_running(is_stopped: Callable[[], bool]) -> None:
    if is_stopped():
        raise StartError("the model was not fetched: this peer was told to stop")


@dataclass(slots=True)
class _Budget:
    """The remaining bytes and time of a download."""

    bytes: int
    until: float
    """Deadline on the monotonic clock."""
    is_stopped: Callable[[], bool]

    def spend(self, count: int, url: str) -> None:
        """Subtract `count` received bytes. Raises StartError if no bytes or no time is left, or if the peer
        stops; `url` is named in the message."""
        _require_running(self.is_stopped)
        self.bytes -= count
        if self.bytes < 0:
            raise StartError(f"{url}: is larger than the run's model can be; nothing of it was kept")
        if time.monotonic() > self.until:
            raise StartError(
                f"{url}: comes with less than {SLOWEST:,} bytes a second; download it, and name the folder"
            )


class _Source:
    """The remote folder at a URL."""

    def __init__(self, url: str) -> None:
        """Open the URL. Raises StartError."""
        self.url = without_secret(url).rstrip("/")
        self._secret_url = url
        if {"?", "#"} & set(url):
            raise StartError(f"{self.url}: a ? or a # cannot stand in the URL of a folder; leave it out")
        self._is_web = is_web(url)
        self._files, self._root = connect(url, StartError, SILENCE_SECONDS)

    def weights(self, part: Path, budget: _Budget) -> list[str]:
        """Return the sorted names of the files with weights: those in the index, or `WEIGHTS` without an
        index. The index is copied into `part`. Raises StartError."""
        if not self.copy_if_there(INDEX, part, budget, MAX_JSON_BYTES):
            return [WEIGHTS]
        weight_map = read_json(part / INDEX).get("weight_map")
        names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
        if not names or not all(map(_SHARD.fullmatch, names)):
            raise StartError(f"{self.url}/{INDEX}: names no safetensors files next to it")
        return names

    def copy_if_there(self, name: str, part: Path, budget: _Budget, most: int | None = None) -> bool:
        """Copy a file of at most `most` bytes into the folder `part`. Returns False if it does not exist.
        Raises StartError or OSError."""
        try:
            self._copy(name, part, budget, most)
        except FileNotFoundError:
            (part / name).unlink(missing_ok=True)
            return False
        return True

    def copy(self, name: str, part: Path, budget: _Budget, most: int | None = None) -> str:
        """Copy a file of up to `most` bytes to `part`. Returns its SHA-256. Raises StartError or OSError."""
        try:
            return self._copy(name, part, budget, most)
        except FileNotFoundError:
            raise StartError(
                f"{self.url}/{name}: is not there; the URL must be that of the folder in which {CONFIG} lies "
                "(of Hugging Face: https://huggingface.co/OWNER/NAME/resolve/REVISION)"
            ) from None

    def _copy(self, name: str, part: Path, budget: _Budget, most: int | None) -> str:
        """Copy a file as `copy` does and return its SHA-256. Raises FileNotFoundError if it is missing."""
        digest, shown_url, copied = hashlib.sha256(), f"{self.url}/{name}", 0
        with self._open_blocks(name) as read_block, (part / name).open("wb") as file:
            while block := read_block():
                budget.spend(len(block), shown_url)
                copied += len(block)
                if most is not None and copied > most:
                    raise StartError(f"{shown_url}: is longer than {most >> 20} MiB")
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()

    @contextmanager
    def _open_blocks(self, name: str) -> Iterator[Callable[[], bytes]]:
        """Open a file, and yield a function that returns the file's next block; empty at its end. From a web
        server the file is read as one stream, because not every server sends parts of a file. Opening and
        reading raise StartError or FileNotFoundError."""
        options = {"block_size": 0} if self._is_web else {}
        with self._translate_errors(name):
            file: IO[bytes] = self._files.open(f"{self._root}/{name}", "rb", **options)

        def read() -> bytes:
            with self._translate_errors(name):
                return file.read(BLOCK_BYTES)

        with file:
            yield read

    def _translate_errors(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which errors of the connection become StartError, without the URL's secrets."""

        def failed(why: str) -> StartError:
            return StartError(f"{self.url}/{name}: cannot be fetched: {why}")

        return reached(self._secret_url, failed, StartError)
