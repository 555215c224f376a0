"""Decide how many microbatches an origin keeps in flight: enough to keep the computers busy, and few more.

The *origin* of a microbatch is the peer of the first stage that starts it. Its *window* is the number that it
keeps in flight. With too few, the peers of later stages wait for the network. With too many, microbatches
wait in queues, which costs memory and increases the loss when a peer fails.

The *answer* to a microbatch is its gradient. It reports how long the microbatch waited for compute, and how
long it computed. The remaining time is network. By Little's law the average number that wait for compute is
(number in flight) * (share of their time that they wait for compute). The window keeps this number between
two bounds, as TCP Vegas does (Brakmo and Peterson 1995). Vegas infers the number from delays, and mistakes
repeated packets for a queue. The window is adjusted after each *epoch* of some answers.

If the network itself is full, more microbatches in flight only make it slower. The window shrinks once the
network time exceeds `MAX_STRETCH` times its minimum (BBR bounds what it sends by the smallest round trip).

The module does no IO. Times are seconds.
"""

from __future__ import annotations

from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import ModelShape

FIRST_WINDOW = 4
MIN_WAITING, MAX_WAITING = 2.0, 4.0
"""Target number of waiting microbatches of one origin, over all stages. One server with such a queue works 85
to 90 % of the time even for Poisson arrivals (M/D/1: 2.4 wait at 85 %)."""
MIN_SHARE, MAX_SHARE = 0.6, 0.75
"""Target share of those in flight that wait, if it is more than the numbers above. With 0.6 waiting there are
2.5 times as many as the path itself holds (BBR's gain is 2). Microbatches travel in bunches, because a stage
does backward passes before forward passes. Exactly as many as the path holds keep it busy 64 % of the time
(`tests/swarmnet/pipeline/test_flow.py`, far stage). With 0.5 and 0.7 seven random swarms did 95.8 % of their
maximum flow, and with these values 98.1 %. An answer took a tenth longer (docs/benchmarks/removed.md)."""
MAX_STRETCH = 5.0
"""Maximum network time in multiples of its minimum. On links of 10 Mbit/s with 1 % loss, 32 in flight per
origin carried 8 % more tokens than 11, but answers took 3.1 s, not 0.7 s (docs/benchmarks/wan.md)."""
PROBE_EPOCHS = 20
"""Number of epochs with a full link after which it is measured again, because it may have changed."""
MIN_ANSWERS = 8
"""Minimum number of answers per epoch; fewer scatter too much."""

FLOAT_BYTES, BF16_BYTES = 4, 2
GRAPH_SHARE = 1 / 8
"""Share of a machine's memory for the graphs that wait for their gradients."""


def graph_bytes(manifest: Manifest, stage: int, computing: Computing = PLAIN) -> int:
    """Estimate the bytes that a stage keeps of a microbatch from its forward to its backward pass. With
    activation checkpointing these are only the inputs of the stage or of each layer. The estimate is within
    2 % of what autograd kept for three shapes, with and without `qk_norm`, in float32."""
    tokens, span = manifest.microbatch_tokens, manifest.span(stage)
    layers = span.stop - span.first  # Those of the model's end keep nothing between two messages.
    match computing.activation_checkpointing:
        case "none":
            return tokens * layers * _layer_bytes(manifest.model, computing)
        case "stage":
            return tokens * manifest.model.hidden_size * FLOAT_BYTES
        case "layer":
            return tokens * layers * manifest.model.hidden_size * FLOAT_BYTES


def graph_at_work(manifest: Manifest, stage: int, computing: Computing = PLAIN) -> int:
    """Estimate the additional bytes of the one microbatch whose backward pass is being computed. They hold
    recomputed activations and, at the head, the logits, their softmax and their gradient."""
    span = manifest.span(stage)
    recomputed_layers_by_mode = {"none": 0, "stage": len(span.layers), "layer": 1}
    recomputed_layers = recomputed_layers_by_mode[computing.activation_checkpointing]
    bytes_per_token = recomputed_layers * _layer_bytes(manifest.model, computing)
    if (span.end or span).has_head:
        bytes_per_token += 3 * FLOAT_BYTES * manifest.model.vocab_size
    return manifest.microbatch_tokens * bytes_per_token


def _layer_bytes(model: ModelShape, computing: Computing) -> int:
    """Return the bytes per token that a layer keeps for its backward pass. They are counted as numbers of
    the width of hidden states, of attention heads and of the feed-forward layer."""
    queries_and_keys = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    # Inputs and outputs of norms are float32 in either format; inputs and outputs of matrices are not.
    norm_numbers = 4 * model.hidden_size + (2 * queries_and_keys if model.qk_norm else 0)
    matrix_numbers = 2 * model.hidden_size + 2 * queries_and_keys + 4 * model.active_feed_forward
    if model.experts.num_experts:  # Each expert copies its tokens, and weighs its output in float32.
        norm_numbers += model.experts.top_k * model.hidden_size
        matrix_numbers += model.experts.top_k * model.hidden_size
    matrix_bytes = FLOAT_BYTES if computing.dtype == "fp32" else BF16_BYTES
    return FLOAT_BYTES * norm_numbers + matrix_bytes * matrix_numbers


def graphs_that_fit(manifest: Manifest, stage: int, memory_bytes: int, computing: Computing = PLAIN) -> int:
    """Return how many microbatches a peer with `memory_bytes` may keep open in this stage; at least one."""
    return max(1, int(GRAPH_SHARE * memory_bytes) // graph_bytes(manifest, stage, computing))


class Flow:
    """The flow control of one origin. `window` is how many microbatches to keep in flight."""

    def __init__(self, limit: int) -> None:
        """Create the control. The window never exceeds `limit`."""
        self.limit = limit
        self.window = max(1, min(FIRST_WINDOW, limit))
        self.least_waiting = MIN_WAITING
        self.most_waiting = MAX_WAITING
        """Bounds for the number of microbatches that wait for compute; see `aim`."""
        self.network_floor: float | None = None
        """Mean network seconds of a microbatch in the fastest epoch; None before the first epoch."""
        self._grew_only = True
        """Whether the window has only grown so far (slow start)."""
        self._full_epochs = 0
        """Number of epochs in which the link was full."""
        self._answers_to_ignore = 0
        """Number of next answers to ignore, because their microbatches started before the window changed."""
        self._answers = 0
        """Number of answers in this epoch. The next four are sums over these."""
        self._total = 0.0
        self._queue = 0.0
        self._network = 0.0
        self._under_way = 0

    def aim(self, stages: int, peers_here: int, peers_below: int) -> None:
        """Set the bounds for the number of this origin's microbatches that wait for compute. The lower bound
        is one per stage, times the peers of the next stage per origin (`peers_below` / `peers_here`). Each of
        these peers needs a queue (docs/benchmarks/removed.md)."""
        self.least_waiting = max(MIN_WAITING, stages * max(1.0, peers_below / max(1, peers_here)))
        self.most_waiting = MAX_WAITING / MIN_WAITING * self.least_waiting

    def done(self, total: float, compute: float, queue: float, under_way: int) -> None:
        """Record a committed microbatch of this origin, and adjust the window after enough of them. `total`
        are the seconds from its start to its end, `compute` those of compute, and `queue` those of waiting
        for compute. `under_way` is how many microbatches were in flight."""
        if self._answers_to_ignore > 0:  # It started before the window was changed.
            self._answers_to_ignore -= 1
            return
        self._answers += 1
        self._total += total
        self._queue += min(queue, total)
        self._network += max(0.0, total - compute - queue)
        self._under_way += under_way
        if self._answers >= max(MIN_ANSWERS, self.window):
            self._adapt()

    def _adapt(self) -> None:
        """End an epoch: adjust the window by the mean queue and network times, and reset the sums. The window
        shrinks if too many microbatches wait for compute or the network is full, and grows if too few wait.
        After `PROBE_EPOCHS` with a full network it starts small again, to measure the free network anew."""
        under_way = self._under_way / self._answers
        network = self._network / self._answers
        waiting = under_way * self._queue / max(self._total, 1e-9)
        self.network_floor = min(self.network_floor or network, network)
        window = self.window
        is_window_used = under_way > window - 1.0  # Otherwise something else limits the number in flight.
        if waiting > max(self.most_waiting, MAX_SHARE * under_way):
            self._grew_only = False
            window -= max(1, window // 8)
        elif network > MAX_STRETCH * self.network_floor:  # The network is full.
            self._grew_only = False
            self._full_epochs += 1
            window -= max(1, window // 8)
        elif waiting < max(self.least_waiting, MIN_SHARE * under_way) and is_window_used:
            growth_divisor = 2 if self._grew_only else 8  # Faster until it shrinks once (slow start).
            window += max(1, window // growth_divisor)
        if self._full_epochs >= PROBE_EPOCHS:
            window = min(FIRST_WINDOW, window)
            self.network_floor = None
            self._grew_only = True
            self._full_epochs = 0
        window = max(1, min(window, self.limit))
        self._answers_to_ignore = self.window if window != self.window else 0
        self.window = window
        self._answers = 0
        self._under_way = 0
        self._total = 0.0
        self._queue = 0.0
        self._network = 0.0
