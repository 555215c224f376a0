"""The documents of an owner's private text as tokens, of which excerpts are trained with noise.

Shapes: T tokens of a sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from peers.config.peer_file import PeerFile
from peers.data.documents import DocumentText, ReadSummary, TextError
from peers.data.local_text import kept_shards, missing_text, tokenizer_here
from peers.data.tokenizer import open_reader
from swarmnet.model.sampling import as_context
from swarmnet.run.manifest import Manifest

MIN_DOCUMENTS = 2
"""A sum takes half of the documents at most, so that none is in it twice."""


@dataclass(frozen=True, slots=True)
class Documents:
    """All documents of a text, in their order."""

    tokens: Sequence[Tensor]
    """Tokens of each document, one-dimensional."""
    digest: str
    """SHA-256 over all of them. It never leaves the machine."""
    reading: ReadSummary


def read_documents(manifest: Manifest, config: PeerFile, public_key: bytes) -> Documents:
    """Read and tokenize the text that the peer file names. From a text over `max_data_bytes`, a random part
    is read. Raises TextError and TextUnreachable."""
    if missing := missing_text(manifest, config):
        raise TextError(missing)
    reads = open_reader(manifest.data, tokenizer_here(manifest, config), manifest.model.vocab_size)
    reading, digest, found = ReadSummary(), hashlib.sha256(), list[Tensor]()
    shards = kept_shards(manifest, manifest.data, config, public_key, frozenset(), reading)
    for shard in (shard for some in shards.values() for shard in some):
        text = DocumentText(
            shard.files,
            shard.others,
            longest_bytes=min(shard.longest_bytes, config.max_data_bytes),
            seed=shard.seed,
            vocabulary=reads.vocabulary,
        )
        blocks = list[bytes]()
        for starts, block in text.blocks():
            if starts and blocks:
                found.append(reads.encode(b"".join(blocks)))
                blocks.clear()
            blocks.append(block)
        found.append(reads.encode(b"".join(blocks)))
        reading.add_left_out(text.reading)
    for tokens in found:
        digest.update(len(tokens).to_bytes(8) + tokens.numpy().tobytes())
    if len(found) < MIN_DOCUMENTS:
        raise TextError(
            f"the text has {len(found)} documents, and data.privacy protects documents: write each into a "
            f"file of its own, or into a line of a .jsonl file{reading.reason()}"
        )
    return Documents(found, digest.hexdigest(), reading)


def excerpt_of(document: Tensor | None, length: int, chance: Random) -> Tensor:
    """Return `length` tokens from a random place of a document, int64 [T]. Where it is shorter, and where it
    is None, context without a loss fills the rest."""
    excerpt_T = as_context(torch.zeros(length, dtype=torch.int64))
    if document is not None:
        start = chance.randrange(max(1, len(document) - length + 1))
        part = document[start : start + length]
        excerpt_T[: len(part)] = part.long()
    return excerpt_T
