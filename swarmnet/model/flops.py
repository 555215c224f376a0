"""Count the floating-point operations that training one token takes, as the basis of utilisation.

They are counted as for PaLM (arXiv:2204.02311, appendix B). Each number of a matrix costs 6 (2 forward, 4
backward). Attention costs 12 for each number of the queries and each token of the sequence. Recomputed or
wasted work does not count, because this measures the work of the model, not of the machine. The module does
no IO.
"""

from __future__ import annotations

from math import prod

from swarmnet.model.parameters import EMBEDDING, is_anchors, is_experts, is_trained, parameter_shapes
from swarmnet.run.manifest import Manifest

PER_PARAMETER = 6
PER_FROZEN = 4
"""Operations for a frozen matrix: its gradient is not computed, only the gradient of its input."""
PER_QUERY_AND_TOKEN = 12
PER_PROJECTION = 4
"""Operations for each number of a projector, which has no gradient."""


def operations_per_token(manifest: Manifest, stage: int) -> int:
    """Return the operations of one token, forward and backward, in a stage. Table lookups are free. At narrow
    boundaries fewer numbers per token cross, so hidden states are projected to these and back."""
    shape, span = manifest.model, manifest.span(stage)
    of_experts, others = 0, 0  # Operations for the matrices of experts, and for all others.
    lookups = () if shape.tie_word_embeddings else (EMBEDDING,)  # A tied embedding is multiplied with, too.
    for name, size in parameter_shapes(shape, span).items():
        per_number = PER_PARAMETER if is_trained(manifest, name) else PER_FROZEN
        if is_experts(name):
            of_experts += per_number * prod(size)
        elif len(size) == 2 and name not in lookups and not is_anchors(name):
            others += per_number * prod(size)
    # A token passes only `top_k` of the experts, which all have the same size.
    matrices = others + of_experts * shape.experts.top_k // max(1, shape.experts.num_experts)
    projections = 0
    for layer in shape.boundary.after:
        if span.first < layer <= span.stop:  # The stage projects what leaves layer `layer`.
            projections += 1
        if span.first <= layer < span.stop:  # The stage projects what enters the next layer.
            projections += 1
    # With shared directions, the embedding and both ends of a layer are projected to the full width.
    projections += 2 * sum(map(shape.boundary.is_shared_at, range(span.first, span.stop)))
    if shape.boundary.kind == "shared-subspace" and span.has_embedding:
        projections += 1
    projected = projections * shape.boundary.width * shape.hidden_size
    queries = len(span.layers) * shape.num_attention_heads * shape.head_dim
    return matrices + PER_PROJECTION * projected + PER_QUERY_AND_TOKEN * queries * manifest.data.seq_len
