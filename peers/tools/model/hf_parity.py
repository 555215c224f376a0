"""Check that transformers loads an exported folder and computes the same as this program.

Transformers is an optional extra. Without it there is no comparison, and the caller reports that.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.config.errors import how_to_install
from peers.data.tokenizer import Tokenizer
from peers.tools.model.export_folder import ExportError
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import whole
from swarmnet.run.schema import ModelShape

TOKENS = 256
"""Number of compared tokens, enough to reveal a wrong base of the rotary embedding."""
TOLERANCE = 1e-4
"""Maximum difference between two logits, relative to the largest logit (measured: docs/take_home.md)."""
SAMPLE = "def naïve(text):\n\treturn '日本🐝'  # 3.14\r\n"


@dataclass(frozen=True, slots=True)
class Parity:
    """Result of the comparison."""

    version: str
    """Version of transformers."""
    tokens: int
    difference: float
    """Largest difference between two logits."""
    largest: float
    """Largest logit."""


def missing() -> str | None:
    """Return why no comparison is possible, with the fix; None: it is possible."""
    if importlib.util.find_spec("transformers") is not None:
        return None
    return f"transformers is not installed, so the logits were not checked: {how_to_install('hf')}"


def compare(folder: Path, weights: Mapping[str, Tensor], shape: ModelShape, tokenizer: Tokenizer) -> Parity:
    """Load `folder` in transformers and compare. Raises ExportError if it is not the model `weights`."""
    name = f"transformers {version('transformers')}"
    # Transformers raises each of these for some unreadable folder.
    try:
        theirs, report, encode = _load(folder)
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ImportError) as error:
        raise ExportError(f"{name} does not load what was written: {error}") from error
    unequal = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if unequal:
        raise ExportError(f"{name} does not take every parameter as it is: {unequal}")
    if encode(SAMPLE) != tokenizer.encode(SAMPLE.encode()).tolist():
        raise ExportError(f"{name} makes other tokens of a text than this program")
    length = min(TOKENS, shape.max_position_embeddings)
    tokens_BT = torch.randint(shape.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = forward(weights, shape, whole(shape), tokens_BT)
        expected = theirs(tokens_BT).logits
    difference, largest = float((ours - expected).abs().max()), float(ours.abs().max())
    if not difference <= TOLERANCE * largest:
        raise ExportError(
            f"{name} computes other logits: they differ by {difference:.2e}, the largest is {largest:.3g}"
        )
    return Parity(version("transformers"), length, difference, largest)


def _load(folder: Path) -> tuple[Any, Mapping[str, Any], Any]:
    """Return the model, its missing and unexpected parameters, and its tokenizer as a function."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from peers.tools.model.narrow_transformers import register

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    register()
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model, report, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
