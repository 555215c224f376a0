"""How many microbatches an origin keeps under way: as many as keep the computers busy, and hardly more.

Too few, and the peers below wait for the network; too many, and microbatches wait in queues, which costs
memory and makes a lost peer's share of them larger. By Little's law the average number that wait for compute
is (number under way) * (share of their time that they wait for compute). It is kept between two bounds, as
TCP Vegas does (Brakmo and Peterson 1995, alpha and beta). Vegas infers the queue from the shortest answer;
on a lossy line repeated packets would look like one. Here the peers tell what they know: each answer says how
long the microbatch waited for compute and how long it computed. The rest is network.

Where the network itself is full, more in flight only makes it slower: fewer are kept under way once it takes
`MOST_STRETCH` times what it took when it was quickest (BBR bounds what it sends by the smallest round trip).

No IO. Times in seconds.
"""

from __future__ import annotations

from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.run.manifest import Manifest, ModelShape

FIRST_WINDOW = 4
LEAST_WAITING, MOST_WAITING = 2.0, 4.0
"""Of one origin, on all stages together. One server with such a queue works 85 to 90 % of the time even if
arrivals are as irregular as a Poisson stream (M/D/1: 2.4 wait at 85 %)."""
LEAST_SHARE, MOST_SHARE = 0.6, 0.75
"""Or this share of those under way, if that is more. With 0.6 of them waiting there are 2.5 times what the
way itself holds (BBR's gain is 2). Microbatches travel in bunches, as a stage does all backward passes before
any forward one: just as many as the way holds keep it busy 64 % of the time
(tests/swarmnet/pipeline/test_flow.py, far stage). With 0.5 and 0.7 seven random swarms did 95.8 % of their
maximum flow, with these 98.1 %, and an answer took a tenth longer (docs/benchmarks/removed.md)."""
MOST_STRETCH = 5.0
"""With 32 under way per origin on lines of 10 Mbit/s and 1 % loss an answer took 3.1 s for 8 % more tokens
than with 11, which took 0.7 s (docs/benchmarks/wan.md)."""
PROBE_EPOCHS = 20
"""After so many epochs of that, the line is measured again with few under way: it may have become another."""
LEAST_ANSWERS = 8
"""Per epoch, at least: fewer scatter too much."""

FLOAT_BYTES, BF16_BYTES = 4, 2
GRAPH_SHARE = 1 / 8
"""Of a machine's memory, what the graphs that wait for their gradients may take."""


def graph_bytes(manifest: Manifest, stage: int, computing: Computing = PLAIN) -> int:
    """About what a stage keeps of a microbatch from its forward to its backward pass.

    Within 2 % of what autograd was seen to keep for three shapes, with and without `qk_norm`, in float32."""
    tokens = manifest.microbatch_tokens
    layers = manifest.stages[stage]
    match computing.recompute:
        case "none":
            return tokens * layers * _layer_bytes(manifest.model, computing)
        case "stage":
            return tokens * manifest.model.width * FLOAT_BYTES
        case "layer":
            return tokens * layers * manifest.model.width * FLOAT_BYTES


def graph_at_work(manifest: Manifest, stage: int, computing: Computing = PLAIN) -> int:
    """More of the one microbatch whose backward pass is computed: what is computed again for it, and where
    the head is what it says of each token, what that comes to, and its gradient."""
    layers = {"none": 0, "stage": manifest.stages[stage], "layer": 1}[computing.recompute]
    of_token = layers * _layer_bytes(manifest.model, computing)
    if manifest.span(stage).has_head:
        of_token += 3 * FLOAT_BYTES * manifest.model.vocabulary
    return manifest.microbatch_tokens * of_token


def _layer_bytes(model: ModelShape, computing: Computing) -> int:
    """Of a token, what a layer keeps for its backward pass."""
    heads = (model.heads + model.key_value_heads) * model.head_width * (2 if model.qk_norm else 1)
    feeds = 4 * model.active_feed_forward
    if computing.dtype == "fp32":
        return FLOAT_BYTES * (6 * model.width + 2 * heads + feeds)
    # Hidden states, and what is normed of them, stay float32; what matrices take and give does not.
    return 2 * FLOAT_BYTES * model.width + BF16_BYTES * (4 * model.width + 2 * heads + feeds)


def graphs_that_fit(
    manifest: Manifest, stage: int, memory_bytes: int, computing: Computing = PLAIN
) -> int:
    """How many microbatches a peer with so much memory may keep open in this stage; at least one."""
    return max(1, int(GRAPH_SHARE * memory_bytes) // graph_bytes(manifest, stage, computing))


class Flow:
    """`window` is how many to keep under way. One per origin."""

    def __init__(self, limit: int) -> None:
        """`limit`: never more than this many."""
        self.limit = limit
        self.window = max(1, min(FIRST_WINDOW, limit))
        self.least_waiting, self.most_waiting = LEAST_WAITING, MOST_WAITING
        self.network_floor: float | None = None
        """Seconds that a microbatch spent on the network in the quickest epoch."""
        self._grew_only = True
        self._full_epochs = 0
        """Epochs in which the line was full."""
        self._passed_over = 0
        self._answers = 0
        self._total = self._queue = self._network = 0.0
        self._under_way = 0

    def aim(self, stages: int, peers_here: int, peers_below: int) -> None:
        """Wait for compute once per stage on the way, for as many peers of the next stage as there are per
        origin: each of them needs a queue (docs/benchmarks/removed.md has what fewer cost)."""
        self.least_waiting = max(LEAST_WAITING, stages * max(1.0, peers_below / max(1, peers_here)))
        self.most_waiting = MOST_WAITING / LEAST_WAITING * self.least_waiting

    def done(self, total: float, compute: float, queue: float, under_way: int) -> None:
        """A microbatch of ours is committed: its seconds from start to end, what of them was compute and
        waiting for compute on all stages, and how many were under way with it."""
        if self._passed_over > 0:  # It was started before the window changed.
            self._passed_over -= 1
            return
        self._answers += 1
        self._total += total
        self._queue += min(queue, total)
        self._network += max(0.0, total - compute - queue)
        self._under_way += under_way
        if self._answers >= max(LEAST_ANSWERS, self.window):
            self._adapt()

    def _adapt(self) -> None:
        answers, under_way = self._answers, self._under_way / self._answers
        network = self._network / answers
        waiting = under_way * self._queue / max(self._total, 1e-9)
        self.network_floor = min(self.network_floor or network, network)
        window = self.window
        used = under_way > window - 1.0  # Else something else keeps the number down.
        if waiting > max(self.most_waiting, MOST_SHARE * under_way):
            self._grew_only = False
            window -= max(1, window // 8)
        elif network > MOST_STRETCH * self.network_floor:
            self._grew_only = False
            self._full_epochs += 1
            window -= max(1, window // 8)
        elif waiting < max(self.least_waiting, LEAST_SHARE * under_way) and used:
            window += max(1, window // (2 if self._grew_only else 8))
        if self._full_epochs >= PROBE_EPOCHS:
            window, self.network_floor = min(FIRST_WINDOW, window), None
            self._grew_only, self._full_epochs = True, 0
        window = max(1, min(window, self.limit))
        self._passed_over = self.window if window != self.window else 0
        self.window = window
        self._answers = self._under_way = 0
        self._total = self._queue = self._network = 0.0
