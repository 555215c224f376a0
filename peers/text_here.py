"""A run's text on this machine: where the peer file says that it is, else where the run's owner had it.

Only the first stage reads text. A machine without it holds any other stage, and never moves to that one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from peers.config.peer_file import PeerFile
from peers.errors import UserError
from peers.text import TextError, files_of, load_corpus
from swarmnet.manifest import Data, Manifest

FIRST_STAGE = 0


def text_here(manifest: Manifest, config: PeerFile) -> Data:
    """The run's data with this machine's paths."""
    data, here = manifest.data, config.text
    sources = tuple(replace(source, path=str(here.get(source.name, source.path))) for source in data.sources)
    tokenizer = str(config.tokenizer) if config.tokenizer and data.tokenizer != "bytes" else data.tokenizer
    return replace(data, sources=sources, tokenizer=tokenizer)


def missing_text(manifest: Manifest, config: PeerFile) -> str:
    """What of the run's text is not on this machine, and what to do; empty: all is there. By the names of
    files alone: none is read."""
    data = text_here(manifest, config)
    for source in data.sources:
        try:
            files_of(source.path)
        except TextError as error:
            return (
                f"{error}; it is the run's source `{source.name}`: say where that is on this machine, in the "
                f"peer file: text: {{{source.name}: PATH}}"
            )
    if data.tokenizer != "bytes" and not Path(data.tokenizer).is_file():
        return (
            f"tokenizer {data.tokenizer} does not exist; say where the run's tokenizer.json is on this "
            "machine, in the peer file: tokenizer: PATH"
        )
    return ""


def never_held(manifest: Manifest, config: PeerFile, missing: str) -> frozenset[int]:
    """The stages that this machine cannot hold as text is `missing` (as `missing_text` says). A stage that
    a person typed is theirs to choose, and so are as many as the run has."""
    chosen = config.stage != "auto" or config.stages >= len(manifest.stages)
    return frozenset({FIRST_STAGE}) if missing and not chosen else frozenset()


def read_text_here(manifest: Manifest, config: PeerFile, seed: int, withdrawn: frozenset[bytes]) -> Tensor:
    """Its tokens, without the documents that the owner has withdrawn. Raises UserError."""
    try:
        return load_corpus(
            text_here(manifest, config), manifest.model.vocabulary,
            longest_bytes=config.text_limit, seed=seed, withdrawn=withdrawn,
        )  # fmt: skip
    except TextError as error:
        raise UserError(missing_text(manifest, config) or str(error)) from None
