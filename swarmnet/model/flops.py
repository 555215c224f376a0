"""How many floating-point operations training a token takes, by the model's shape: what utilisation is of.

Counted as for PaLM (arXiv:2204.02311, appendix B): 6 for each parameter of a matrix (2 forward, 4 backward)
and 12 for each number of the queries and each token of the sequence, for attention. What is computed twice or
for nothing does not count: it is the work of the model, not of the machine. No IO.
"""

from __future__ import annotations

from math import prod

from swarmnet.model.parameters import EMBEDDING, parameter_shapes
from swarmnet.run.manifest import Manifest

PER_PARAMETER = 6
PER_QUERY_AND_TOKEN = 12


def operations_per_token(manifest: Manifest, stage: int) -> int:
    """Forward and backward of one token through the stage; looking a token up in the embedding is free."""
    shape, span = manifest.model, manifest.span(stage)
    matrices = sum(
        prod(size)
        for name, size in parameter_shapes(shape, span).items()
        if len(size) == 2 and name != EMBEDDING
    )
    queries = (span.stop - span.first) * shape.heads * shape.head_width
    return PER_PARAMETER * matrices + PER_QUERY_AND_TOKEN * queries * manifest.data.sequence_tokens
