"""Load a whole model from this machine's disk: the newest checkpoints of a run, or an export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from peers.config.atomic_files import is_file
from peers.config.run_file import parse
from peers.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_file
from peers.state import checkpoint_file
from peers.tools.model.export import MANIFEST_FILE, load_end, load_shape, load_weights
from swarmnet.run.schema import ModelShape

BYTES = 256
"""Number of tokens of a model that reads bytes."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A whole model on disk."""

    weights: dict[str, Tensor]
    shape: ModelShape
    tokenizer: Tokenizer
    window: int | None
    """Training sequence length in tokens; None: unknown."""
    is_library_alone: bool
    """Whether it was trained only on Python's standard library, as far as is known."""


def held(source: Path | None, warn: Callable[[str], None], tokenizer: Path | None = None) -> StoredModel:
    """Return the model of checkpoints or of an export in `source` (None: the current folder).

    `warn` is called about newer files that cannot be used, and about removed settings of a tokenizer.json.
    `tokenizer`: the run's tokenizer.json; an export contains its own. Raises ExportError, TextError or
    UserError."""
    place = source or Path()
    if is_file(place / "config.json"):
        shape, manifest = load_shape(place), place / MANIFEST_FILE
        known = parse(manifest.read_bytes()).data if is_file(manifest) else None
        window, alone = (known.seq_len, known.is_library_alone) if known else (None, False)
        file = tokenizer or (None if shape.vocab_size == BYTES else place / "tokenizer.json")
        opened = open_tokenizer(file, shape.vocab_size, load_end(place))
        _pass_on(opened, warn)
        return StoredModel(load_weights(place), shape, opened, window, alone)
    newest = checkpoint_file.newest(source)
    shape, data = newest.manifest.model, newest.manifest.data
    for trouble in newest.passed_over:
        warn(f"passed over: {trouble}")
    opened = open_tokenizer(tokenizer_file(data, tokenizer), shape.vocab_size, data.eos_token)
    _pass_on(opened, warn)
    return StoredModel(newest.whole(), shape, opened, data.seq_len, data.is_library_alone)


def _pass_on(tokenizer: Tokenizer, warn: Callable[[str], None]) -> None:
    if tokenizer.warning:
        warn(tokenizer.warning)
