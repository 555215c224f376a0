"""A run's text on this machine: where its peer file says that it is, and nowhere else.

What a manifest calls its sources and its tokenizer are names that a stranger chose: whoever opened them as
paths would hand any file of this machine to the peers of the next stage. Only the first stage reads text. A
machine without it holds any other stage, and never moves to that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from peers.config.peer_file import PeerFile
from peers.errors import UserError
from peers.files import is_file
from peers.run_file import as_key
from peers.text import TextError, files_of, load_corpus
from swarmnet.manifest import BYTES, STANDARD_LIBRARY, Manifest

FIRST_STAGE = 0


@dataclass(frozen=True, slots=True)
class TextHere:
    """What of a run's text a person of this machine has said where it is."""

    places: dict[str, str]
    """By the source's name: a file, a folder, or `python-stdlib`."""
    tokenizer: Path | None
    """None: bytes, or not said."""

    def __str__(self) -> str:
        texts = [f"{name} from {place}" for name, place in self.places.items()]
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
    files alone: none is read."""
    here = text_here(manifest, config)
    for source in manifest.data.sources:
        problem = "the peer file does not say where it is"
        if source.name in here.places:
            try:
                files_of(here.places[source.name])
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


def read_text_here(manifest: Manifest, config: PeerFile, seed: int, withdrawn: frozenset[bytes]) -> Tensor:
    """Its tokens, without the documents that the owner has withdrawn. Raises UserError."""
    if missing := missing_text(manifest, config):
        raise UserError(missing)
    here = text_here(manifest, config)
    try:
        return load_corpus(
            list(here.places.values()), manifest.model.vocabulary, tokenizer=here.tokenizer,
            longest_bytes=config.text_limit, seed=seed, withdrawn=withdrawn,
        )  # fmt: skip
    except TextError as error:
        raise UserError(str(error)) from None
