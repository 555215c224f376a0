"""A peer whose compute takes time and no processor: `wan_paced.py SECONDS SUBFLOWS PYTHON -m ...`.

For the WAN without the machine that emulates it: every microbatch takes `SECONDS` on every stage, a third of
it forward, as if each peer had a computer of its own. Hidden states and gradients are noise of the right
shape; messages, rounds, contributions and the wire are as always. `SUBFLOWS`: at most so many per link.
"""

import sys
import time
from types import SimpleNamespace

import torch

from peers.cli import main as cli
from protocols.p2pd import multipath_dialer
from swarmnet.model.stage_compute import LastStageResult, StageCompute
from swarmnet.optimizer.local_steps.inner_optimizer import InnerOptimizer

seconds = 0.0
noise = {}


def like(shape):
    if shape not in noise:
        noise[shape] = torch.randn(shape)
    return noise[shape]


def hidden_shape(stage, inputs):
    return (*inputs.shape[:2], stage._shape.crossing)


def forward(stage, key, inputs, branch_scale=1.0, tokens_BT=None):
    time.sleep(seconds / 3)
    stage._graphs[key] = SimpleNamespace(version=None)  # Of no weights: they may be written over.
    return like(hidden_shape(stage, inputs))


def backward(stage, key, hidden_gradient):
    time.sleep(2 * seconds / 3)
    stage._graphs.pop(key)
    return None if stage._span.has_embedding else like(tuple(hidden_gradient.shape))


def finish(stage, key, inputs, labels_BT, tokens_BT=None):
    time.sleep(seconds)
    return LastStageResult(5.0 * labels_BT.numel(), labels_BT.numel(), like(hidden_shape(stage, inputs)))


def use_gradient(stage, use):
    return use(like((stage._layout.size,)))


def step(inner, moved_P, gradient_P, gains, rate):
    """A peer's own step: its time is in that of the microbatches."""
    moved_P.add_(gradient_P, alpha=-rate)


if __name__ == "__main__":
    seconds = float(sys.argv[1])
    for function in (forward, backward, finish, use_gradient):
        setattr(StageCompute, function.__name__, function)
    InnerOptimizer.step = step
    multipath_dialer.MAX_CARRIERS = int(sys.argv[2])
    sys.argv = ["swarmnet", *sys.argv[6:]]
    cli.main()
