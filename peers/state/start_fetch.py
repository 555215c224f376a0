"""The model that a run starts from, fetched from where a URL leads: once, into a folder of this machine.

The URL is that of a folder as Hugging Face lays it out: config.json, model.safetensors or what
model.safetensors.index.json names, and tokenizer.json if there is one. A person of this machine names it;
what a manifest says is never opened. Files get their folder's name when all are there and have the hash that
the run names: until then nothing is read of them but the names in the index, and what goes wrong leaves
nothing behind. Blocking: for a thread.
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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from peers.config.atomic_files import is_there
from peers.config.peer_file import default_state
from peers.config.remote_files import is_web, lasting_cause, reason_of, web_options
from peers.config.run_url import is_url, without_secret
from peers.errors import how_to_install
from peers.state.start_folder import CONFIG, INDEX, MOST_JSON_BYTES, StartError, hash_of, read_json
from peers.telemetry.events import Say
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.run.manifest import Lora, Manifest, ModelShape

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")
"""What an index may call a file: it becomes a name in a folder of this machine."""
LARGEST_NUMBER = 8
"""Bytes, of F64."""
BESIDE_BYTES = 256 << 20
"""For what is not weights: heads of safetensors files (100 MB each at most, by their format; some 100 bytes a
tensor in truth), configuration, index, tokenizer (17 MB for a vocabulary of 151,643)."""
SILENCE_SECONDS = 30.0
BEGIN_SECONDS = 60.0
SLOWEST = 100_000
"""Bytes per second, over the whole: 0.8 Mbit/s. What is slower is given up, so that nobody waits for ever."""
BLOCK_BYTES = 1 << 20
WAIT_SECONDS = 0.5
"""Between two looks whether another peer of this machine has it."""


async def model_here(place: str, manifest: Manifest, say: Say) -> Path | None:
    """The folder that a peer file's `start` names; where that is a URL, what was fetched from it, which all
    peers of this machine share. None: the peer file names none. Raises StartError."""
    local = folder_of(place)
    if local is not None or not place or not manifest.start.path:
        return local
    sha256 = manifest.start.sha256
    if not sha256:
        raise StartError(f"start: the run names no SHA-256 of its model: download {without_secret(place)}")
    folder = default_state(os.environ, sys.platform) / "models" / sha256[:16]
    stopped, loop = threading.Event(), asyncio.get_running_loop()

    def said(text: str) -> None:
        loop.call_soon_threadsafe(say, "weights", text)

    try:
        await asyncio.to_thread(fetched, place, folder, manifest, said, stopped.is_set)
    finally:
        stopped.set()  # The thread ends with its next block.
    return folder


def folder_of(place: str) -> Path | None:
    """Where a path or a file:// URL leads; None: elsewhere, or nowhere."""
    if not place or not is_url(place):
        return Path(place) if place else None
    parts = urlsplit(place)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def beside_run(folder: Path, url: str) -> Path:
    """Where what a run file's URL leads to lies on its creator's machine. Raises StartError."""
    name = Path(unquote(urlsplit(url).path)).name
    if not name or name.startswith("."):
        raise StartError(f"{without_secret(url)}: leads to no folder with a name, which its copy would have")
    return (folder / name).absolute()


def fetched(
    url: str, folder: Path, manifest: Manifest, say: Callable[[str], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Have the model at a URL in this folder. What is there already stays as it is: whoever reads it checks
    it. Raises StartError."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(folder, is_stopped):
            if not is_there(folder):
                _fetch(url, folder, manifest, say, is_stopped)
    except OSError as error:
        raise StartError(f"{folder}: cannot be written: {error.strerror or error}") from None


@contextmanager
def _alone(folder: Path, is_stopped: Callable[[], bool]) -> Iterator[None]:
    """While no other peer of this machine fetches one into the same place."""
    lock = os.open(folder.parent, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _go_on(is_stopped)
                time.sleep(WAIT_SECONDS)
        yield
    finally:
        os.close(lock)


def _fetch(
    url: str, folder: Path, manifest: Manifest, say: Callable[[str], None], is_stopped: Callable[[], bool]
) -> None:
    source = _Source(url)
    ends = f".{folder.name}.", ".part"
    for left in folder.parent.glob(f"{ends[0]}*{ends[1]}"):  # By a process that was killed.
        shutil.rmtree(left, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=ends[0], suffix=ends[1], dir=folder.parent))
    try:
        most = _most_bytes(manifest.model)
        budget = _Budget(most, time.monotonic() + BEGIN_SECONDS + most / SLOWEST, is_stopped)
        hashes = {CONFIG: source.copy(CONFIG, part, budget, MOST_JSON_BYTES)}
        for name in source.weights(part, budget):
            say(f"fetches {name} of the model that the run starts from: {source.url}")
            hashes[name] = source.copy(name, part, budget)
        found, wanted = hash_of(hashes), manifest.start.sha256
        if wanted not in ("", found):
            raise StartError(
                f"{source.url} is not the model that start.sha256 names: that is {wanted[:16]}..., its hash "
                f"is {found}; nothing of it was kept"
            )
        source.copy_if_there(TOKENIZER, part, budget)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _most_bytes(shape: ModelShape) -> int:
    """What the run's model can take, in the widest numbers that are read."""
    shapes = parameter_shapes(replace(shape, lora=Lora()), whole(shape))
    return LARGEST_NUMBER * sum(map(prod, shapes.values())) + BESIDE_BYTES


def _go_on(is_stopped: Callable[[], bool]) -> None:
    if is_stopped():
        raise StartError("the model was not fetched: this peer was told to stop")


@dataclass(slots=True)
class _Budget:
    bytes: int
    until: float
    """On the monotonic clock."""
    is_stopped: Callable[[], bool]

    def spend(self, count: int, url: str) -> None:
        """Raises StartError."""
        _go_on(self.is_stopped)
        self.bytes -= count
        if self.bytes < 0:
            raise StartError(f"{url}: is larger than the run's model can be; nothing of it was kept")
        if time.monotonic() > self.until:
            raise StartError(
                f"{url}: comes with less than {SLOWEST:,} bytes a second; download it, and name the folder"
            )


class _Source:
    """The folder at a URL."""

    def __init__(self, url: str) -> None:
        """Raises StartError."""
        self.url, self._secret_url = without_secret(url).rstrip("/"), url
        if {"?", "#"} & set(url):
            raise StartError(f"{self.url}: a ? or a # cannot stand in the URL of a folder; leave it out")
        self._is_web = is_web(url)
        try:
            import fsspec

            options = web_options(url, SILENCE_SECONDS)
        except ImportError:
            raise StartError(f"{self.url} needs the package fsspec: {how_to_install('text')}") from None
        try:
            self._files, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:  # No such kind of place, or its package is not installed.
            raise StartError(f"{self.url} cannot be opened: {error}") from None
        self._root = root.rstrip("/")

    def weights(self, part: Path, budget: _Budget) -> list[str]:
        """Names of the files that hold weights, sorted. Raises StartError."""
        if not self.copy_if_there(INDEX, part, budget, MOST_JSON_BYTES):
            return [WEIGHTS]
        told = read_json(part / INDEX).get("weight_map")
        names = sorted({str(name) for name in told.values()}) if isinstance(told, dict) else []
        if not names or not all(map(_SHARD.fullmatch, names)):
            raise StartError(f"{self.url}/{INDEX}: names no safetensors files beside it")
        return names

    def copy_if_there(self, name: str, part: Path, budget: _Budget, most: int | None = None) -> bool:
        """As `copy`; False: there is no such file."""
        try:
            self._copy(name, part, budget, most)
        except FileNotFoundError:
            (part / name).unlink(missing_ok=True)
            return False
        return True

    def copy(self, name: str, part: Path, budget: _Budget, most: int | None = None) -> str:
        """A file into the folder `part`; its SHA-256. `most`: bytes. Raises StartError, OSError."""
        try:
            return self._copy(name, part, budget, most)
        except FileNotFoundError:
            raise StartError(
                f"{self.url}/{name}: is not there; the URL must be that of the folder in which {CONFIG} lies "
                "(of Hugging Face: https://huggingface.co/OWNER/NAME/resolve/REVISION)"
            ) from None

    def _copy(self, name: str, part: Path, budget: _Budget, most: int | None) -> str:
        digest, shown, count = hashlib.sha256(), f"{self.url}/{name}", 0
        with self._opened(name) as read, (part / name).open("wb") as file:
            while block := read():
                budget.spend(len(block), shown)
                count += len(block)
                if most is not None and count > most:
                    raise StartError(f"{shown}: is longer than {most >> 20} MiB")
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()

    @contextmanager
    def _opened(self, name: str) -> Iterator[Callable[[], bytes]]:
        """What reads a block. A plain stream where it is the web: ranges are not every server's. Raises
        StartError, FileNotFoundError."""
        options = {"block_size": 0} if self._is_web else {}
        with self._reached(name):
            file: IO[bytes] = self._files.open(f"{self._root}/{name}", "rb", **options)

        def read() -> bytes:
            with self._reached(name):
                return file.read(BLOCK_BYTES)

        with file:
            yield read

    @contextmanager
    def _reached(self, name: str) -> Iterator[None]:
        """Whatever a backend raises becomes StartError (as in peers/data/files.py)."""
        try:
            yield
        except StartError:
            raise
        except FileNotFoundError as error:
            if (cause := lasting_cause(error)) is None:
                raise
            raise self._failed(name, cause) from None
        except Exception as error:  # noqa: BLE001 - fsspec's backends have kinds of their own
            raise self._failed(name, error) from None

    def _failed(self, name: str, error: Exception) -> StartError:
        told = reason_of(error).replace(self._secret_url, self.url)
        return StartError(f"{self.url}/{name}: cannot be fetched: {told}")
