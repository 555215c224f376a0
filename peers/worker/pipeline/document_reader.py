"""Read a private text by documents, each of which is used a limited number of times in the whole run.

    STATE/text/documents.json    how many documents of all epochs may have been used

The file is written before the documents are used. A peer that is killed therefore uses none twice in an
epoch: what was reserved is not read again. The order is the same in each epoch, so a document returns only
after all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from secrets import randbits

import msgspec
import torch
from torch import Tensor

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.config.run_file import SignedManifest
from peers.data.documents import TextError
from peers.data.files import shown_place
from peers.data.local_text import places_here
from peers.data.private_documents import Documents, excerpt_of, read_documents
from peers.data.tokens import FOLDER
from peers.process.role import Process
from peers.state.chunks.text_exchange import TextExchange
from peers.worker.pipeline.text_reader import TextReader
from swarmnet.identifiers import MicrobatchId
from swarmnet.model.computing.privacy_loss import epsilon_of, noise_multiplier
from swarmnet.model.computing.private_compute import DocumentNoise
from swarmnet.model.sampling import inputs_and_labels
from swarmnet.run.manifest import Manifest
from swarmnet.run.mixtures import MixtureChange

USED = "documents.json"
MAX_RESERVED = 32
"""Microbatches that are reserved at a time: the most that a killed peer leaves out of an epoch. Each
reservation costs a write to the disk."""


@dataclass(frozen=True, slots=True)
class PrivacySpent:
    """What an owner has used of the privacy of its documents."""

    epsilon: float
    max_epsilon: float
    delta: float
    documents: int
    epochs: int
    """Epochs that have begun: how often a document may have been used."""
    max_epochs: int

    def text(self) -> str:
        """Return it as a sentence for people."""
        return (
            f"epsilon {self.epsilon:.2f} of {self.max_epsilon:g} spent (delta {self.delta:g}); each of "
            f"{self.documents:,} documents was used at most {self.epochs} of {self.max_epochs} times"
        )


class DocumentReader:
    """The `Text` of one process in a run with noise."""

    def __init__(
        self,
        *,
        process: Process,
        signed: SignedManifest,
        opened: Callable[[], None],
        ended: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`opened()` is called when documents that were waited for are reserved; `ended` receives failed
        tasks."""
        self._process = process
        self._signed = signed
        self._opened = opened
        self._ended = ended
        self._data = signed.manifest.data
        self._path = process.config.state / FOLDER / USED
        self._documents: Documents | None = None
        self._order: list[int] = []
        """Numbers of the documents in the order of reading."""
        self._used = self._reserved = 0
        """Places in the order of all epochs, of which a microbatch takes some. Those of the last microbatch
        of an epoch may lie behind all documents."""
        self._excerpts = Random(randbits(64))
        self._wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, _withdrawn: frozenset[bytes]) -> DocumentReader:
        """Read the documents; returns when microbatches can be taken. Raises UserError."""
        await self.close()
        process, manifest = self._process, self._signed.manifest
        sources = places_here(manifest, process.config).items()
        places = ", ".join(f"{name} from {shown_place(place)}" for name, place in sources)
        process.notify("text", f"reads private documents: {places}; none is sent, named or hashed for others")
        try:
            found = await asyncio.to_thread(
                read_documents, manifest, process.config, process.identity.public_key
            )
        except TextError as error:
            raise UserError(str(error)) from None
        for warning in found.reading.warnings():
            process.notify("text", warning)
        self._order = list(range(len(found.tokens)))
        Random(f"{self._signed.run_id} {process.identity.peer_id}").shuffle(self._order)
        self._used = self._reserved = self._kept(found)
        self._documents = found
        await self._reserve()
        process.notify("text", self.spent().text())
        self._tasks = [asyncio.create_task(self._reserve_ahead(), name="reserve documents")]
        self._tasks[0].add_done_callback(self._ended)
        return self

    async def close(self) -> None:
        """Close the text. Documents that were reserved and not used may be read again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            self._reserved = self._used
            await asyncio.to_thread(self._write, self._used)
        self._tasks = []

    def microbatch(
        self, _key: MicrobatchId, _mixture: MixtureChange | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Return inputs_BT and labels_BT, an excerpt of a document in each row. None means that the documents
        are not reserved yet, or that each was used as often as the run allows."""
        if self._used >= self._reserved or self._documents is None:
            self._wanted.set()
            return None
        first = self._used % self._epoch
        self._used += self._data.micro_batch_size
        if self._reserved - self._used <= self._step // 2:
            self._wanted.set()
        numbers = self._order[first : first + self._data.micro_batch_size]
        rows: list[Tensor | None] = [self._documents.tokens[number] for number in numbers]
        rows += [None] * (self._data.micro_batch_size - len(rows))
        length = self._data.seq_len + 1
        return inputs_and_labels([excerpt_of(row, length, self._excerpts) for row in rows])

    def documents_per_sum(self) -> int:
        """Return after how many documents noise is added at the latest. A document returns only after all
        others, and microbatches may overtake each other a little."""
        return max(1, len(self._order) // 2)

    def spent(self) -> PrivacySpent:
        """Return the privacy that was used so far, with what is reserved."""
        privacy = self._data.privacy
        epochs = -(-self._reserved // self._epoch) if self._order else 0
        epsilon = epsilon_of(noise_multiplier(privacy), epochs, privacy.delta)
        return PrivacySpent(epsilon, privacy.epsilon, privacy.delta, len(self._order), epochs, privacy.epochs)

    @property
    def _epoch(self) -> int:
        """Places of an epoch, in whole microbatches."""
        size = self._data.micro_batch_size
        return -(-len(self._order) // size) * size

    @property
    def _step(self) -> int:
        """Places that are reserved at a time: of a small text a part of an epoch."""
        size = self._data.micro_batch_size
        return size * min(MAX_RESERVED, max(1, self._epoch // size // 16))

    async def _reserve_ahead(self) -> None:
        """Reserve documents until each was used as often as the run allows. Raises UserError."""
        while self._reserved < self._data.privacy.epochs * self._epoch:
            await self._wanted.wait()
            self._wanted.clear()
            await self._reserve()
            self._opened()
        self._process.notify(
            "text", f"all documents are reserved as often as data.privacy allows: {self.spent().text()}"
        )

    async def _reserve(self) -> None:
        reserved = min(self._reserved + self._step, self._data.privacy.epochs * self._epoch)
        await asyncio.to_thread(self._write, reserved)
        self._reserved = reserved  # Nothing is used before it is written.

    def _write(self, used: int) -> None:
        assert self._documents is not None, "only an open text is used"
        kept = _Used(self._signed.run_id, self._documents.digest, used)
        write_atomically(self._path, msgspec.json.encode(kept))

    def _kept(self, documents: Documents) -> int:
        """Return how many places were used by earlier processes. Raises UserError if the text is another."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Used)
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self._path}: cannot be read ({error}), so it is not known how often documents were used; "
                "restore it, or leave the run"
            ) from None
        if kept.run != self._signed.run_id:
            return 0
        if kept.digest != documents.digest:
            raise UserError(
                f"the private text has changed since this peer began, and {self._path} counts how often each "
                "document was used; put the former text back, or leave the run"
            )
        return kept.used


def reader_of(
    *,
    process: Process,
    signed: SignedManifest,
    exchange: TextExchange,
    opened: Callable[[], None],
    ended: Callable[[asyncio.Task[None]], None],
) -> TextReader | DocumentReader:
    """Return the reader that the run needs. For the arguments see both classes."""
    if signed.manifest.data.adds_noise:
        return DocumentReader(process=process, signed=signed, opened=opened, ended=ended)
    return TextReader(process=process, signed=signed, exchange=exchange, opened=opened, ended=ended)


def noise_of(text: object, manifest: Manifest, device: torch.device) -> DocumentNoise | None:
    """Return the noise for the gradients of a worker's documents; None without noise. Its seed is secret."""
    if not isinstance(text, DocumentReader):
        return None
    chance = torch.Generator(device).manual_seed(randbits(63))
    return DocumentNoise.from_manifest(manifest, chance, text.documents_per_sum)


def privacy_of(text: object) -> PrivacySpent | None:
    """Return the privacy that a worker's text has used; None without noise."""
    return text.spent() if isinstance(text, DocumentReader) else None


class _Used(msgspec.Struct, frozen=True):
    run: str
    digest: str
    used: int
