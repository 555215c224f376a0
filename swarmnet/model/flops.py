"""How many floating-point operations training a token takes, by the model's shape: what utilisation is of.

Counted as for PaLM (arXiv:2204.02311, appendix B): 6 for each parameter of a matrix (2 forward, 4 backward)
and 12 for each number of the queries and each token of the sequence, for attention. What is computed twice or
for nothing does not count: it is the work of the model, not of the machine. No IO.
"""

from __future__ import annotations

from math import prod

from swarmnet.model.parameters import EMBEDDING, is_anchors, is_experts, parameter_shapes
from swarmnet.run.manifest import Manifest

PER_PARAMETER = 6
PER_QUERY_AND_TOKEN = 12
PER_PROJECTION = 4
"""For each number of a matrix that does not learn: no gradient of it is computed."""


def operations_per_token(manifest: Manifest, stage: int) -> int:
    """Forward and backward of one token through the stage; looking a token up, in the embedding or among the
    anchors of a narrow boundary, is free."""
    shape, span = manifest.model, manifest.span(stage)
    of_experts, others = 0, 0
    for name, size in parameter_shapes(shape, span).items():
        if is_experts(name):
            of_experts += prod(size)
        elif len(size) == 2 and name != EMBEDDING and not is_anchors(name):
            others += prod(size)
    matrices = others + of_experts * shape.experts.active // max(1, shape.experts.count)
    # A boundary inside the stage is left and entered, one at its end only one of the two.
    places = shape.boundary.after
    crossings = sum((span.first < at <= span.stop) + (span.first <= at < span.stop) for at in places)
    projections = crossings * shape.boundary.width * shape.width
    queries = (span.stop - span.first) * shape.heads * shape.head_width
    return (
        PER_PARAMETER * matrices
        + PER_PROJECTION * projections
        + PER_QUERY_AND_TOKEN * queries * manifest.data.sequence_tokens
    )
