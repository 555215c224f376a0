"""Load a whole model from this machine's disk: the newest checkpoints of a run, or an export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from peers.config.atomic_files import is_file
from peers.config.run_file import parse
from peers.data.tokenizer import Tokenizer, open_reader, tokenizer_file
from peers.state import checkpoint_file
from peers.tools.model.export import MANIFEST_FILE, load_end, load_shape, load_weights
from swarmnet.run.schema import Data, FormatName, ModelShape

BYTES = 256
"""Number of tokens of a model that reads bytes."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A whole model on disk."""

    weights: dict[str, Tensor]
    shape: ModelShape
    tokenizer: Tokenizer
    tokenizer_file: Path | None
    """None: its tokens are bytes."""
    window: int | None
    """Training sequence length in tokens; None: unknown."""
    is_library_alone: bool
    """Whether it was trained only on Python's standard library, as far as is known."""


def held(
    source: Path | None,
    warn: Callable[[str], None],
    tokenizer: Path | None = None,
    conversations: bool | None = False,
) -> StoredModel:
    """Return the model of checkpoints or of an export in `source` (None: the current folder).

    `warn` is called about newer files that cannot be used, and about removed settings of a tokenizer.json.
    `tokenizer`: the run's tokenizer.json; an export contains its own. It reads `conversations`, or plain text
    with False; None: what the run was trained on. Raises ExportError, TextError or UserError."""
    place = source or Path()

    def opened_for(data: Data | None, file: Path | None, vocabulary: int, eos_token: str) -> Tokenizer:
        """Return the tokenizer in `file`, and pass on its warning."""
        of_run = data is not None and data.format == "messages"
        form: FormatName = "messages" if (of_run if conversations is None else conversations) else "text"
        opened = open_reader(Data(eos_token=eos_token, format=form), file, vocabulary)
        if opened.warning:
            warn(opened.warning)
        return opened

    if is_file(place / "config.json"):
        shape, manifest = load_shape(place), place / MANIFEST_FILE
        known = parse(manifest.read_bytes()).data if is_file(manifest) else None
        window, alone = (known.seq_len, known.is_library_alone) if known else (None, False)
        file = tokenizer or (None if shape.vocab_size == BYTES else place / "tokenizer.json")
        opened = opened_for(known, file, shape.vocab_size, load_end(place))
        return StoredModel(load_weights(place), shape, opened, file, window, alone)
    newest = checkpoint_file.newest(source)
    shape, data = newest.manifest.model, newest.manifest.data
    for trouble in newest.passed_over:
        warn(f"passed over: {trouble}")
    file = tokenizer_file(data, tokenizer)
    opened = opened_for(data, file, shape.vocab_size, data.eos_token)
    return StoredModel(newest.whole(), shape, opened, file, data.seq_len, data.is_library_alone)
