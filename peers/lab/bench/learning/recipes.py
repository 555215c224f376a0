"""Every method that the bench compares, under its name, and the rate at which its search begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from peers.lab.bench.learning.ground import Ground
from peers.lab.bench.learning.learner import Learner, MeanGradient, schedule
from peers.lab.bench.learning.plain_demo import PlainDemo
from peers.lab.bench.learning.rounds import Rounds
from swarmnet.run.manifest import MethodName, Sync
from swarmnet.run.own_steps import InnerName

LOCAL_STEPS = 8
"""H: where HOME lines make exchanges worth saving, and the loss is still near that of H = 1."""
PAPER_STEPS = 30
"""H in the papers of DiLoCo's family."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One trial's shape."""

    peers: int
    steps: int
    delay: int = 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a method is made."""

    make: Callable[[Ground, Setting, float], Learner]
    """Of a ground, a setting and the peak of its learning rate."""
    begin_rate: float
    """Where its search begins."""
    told: str
    """What it is, in a few words."""


def recipes(sync: Sync) -> Mapping[str, Recipe]:
    """All of them; `sync`: the run's own method."""
    votes = replace(sync, method="demo-votes")
    return {
        "adamw": _mean_gradient("adamw"),
        "muon": _mean_gradient("muon"),
        "demo": Recipe(_plain_demo, 2e-3, "DeMo as its paper has it, 32 of 4096 in floats"),
        "run": _rounds(sync, "the run's own method"),
        "votes-top-k": _rounds(replace(votes, selection="top-k", kept=32), "votes, the largest 32 of 4096"),
        "votes-group": _rounds(replace(votes, selection="group", kept=128), "votes, the largest of each 32"),
        "votes-seeded": _rounds(replace(votes, selection="seeded", kept=1024), "votes, a seeded quarter"),
        "float-demo": _rounds(replace(sync, method="demo-float"), "DeMo's values, exact"),
        "local-steps": _own(sync, "local-steps", 8e-3, "signs of a quarter"),
        "local-steps-2": _own(sync, "local-steps", 8e-3, "signs of a half", parts=2),
        "local-steps-1": _own(sync, "local-steps", 8e-3, "signs of all", parts=1),
        "local-steps-adamw": _own(sync, "local-steps", 8e-3, "signs of a quarter", inner="adamw"),
        "local-steps-feedback": _own(
            sync, "local-steps", 8e-3, "signs of a quarter, error feedback", rest="feedback"
        ),
        "local-steps-four-bits": _own(sync, "local-steps", 8e-3, "four bits of a quarter", sent="four-bits"),
        "local-steps-sharded": _own(
            sync, "local-steps", 8e-3, "signs of a quarter, through reducers", exchange="sharded"
        ),
        "average-h8": _average(sync, "adamw"),
        "average-h8-muon": _average(sync, "muon"),
        "diloco-h8": _own(sync, "diloco", 2e-3, "DiLoCo"),
        "diloco-h30": _own(sync, "diloco", 2e-3, "DiLoCo", PAPER_STEPS),
        "diloco-h30-muon": _own(sync, "diloco", 2e-3, "DiLoCo", PAPER_STEPS, inner="muon"),
        "streaming-diloco-h32": _own(sync, "streaming-diloco", 2e-3, "Streaming DiLoCo, each of four parts"),
        "sparse-loco-h8": _own(sync, "sparse-loco", 4e-3, "SparseLoCo"),
        "sparse-loco-h30": _own(sync, "sparse-loco", 4e-3, "SparseLoCo", PAPER_STEPS),
        "sparse-loco-h30-muon": _own(sync, "sparse-loco", 4e-3, "SparseLoCo", PAPER_STEPS, inner="muon"),
        "partitioned": _own(sync, "partitioned", 4e-3, "partitioned averaging, a sixteenth", 1),
    }


def _mean_gradient(inner: InnerName) -> Recipe:
    def make(ground: Ground, setting: Setting, rate: float) -> Learner:
        return MeanGradient(ground, setting.peers, inner, schedule(rate, setting.steps))

    return Recipe(make, 8e-3, "the mean gradient every step")


def _plain_demo(ground: Ground, setting: Setting, rate: float) -> Learner:
    return PlainDemo(ground, setting.peers, schedule(rate, setting.steps))


def _rounds(sync: Sync, told: str, steps: int = LOCAL_STEPS) -> Recipe:
    """`steps`: of a peer's own in a round, where it takes any."""
    every = 1 if sync.own_steps is None else steps

    def make(ground: Ground, setting: Setting, rate: float) -> Learner:
        return Rounds(ground, setting.peers, sync, rate, setting.steps, setting.delay, every)

    return Recipe(make, sync.learning_rate, told)


def _own(
    sync: Sync, method: MethodName, begin_rate: float, told: str, steps: int = LOCAL_STEPS, **keys: Any
) -> Recipe:
    """A method of peers that step by themselves as its authors have it, but for `keys` of the manifest; of
    the run's own keys those that all of them have."""
    mine = Sync(
        method, momentum=sync.momentum, clip=sync.clip, shards=sync.shards, learning_rate=begin_rate, **keys
    )
    assert mine.own_steps is not None
    told += f", {'every step' if steps == 1 else f'every {steps} steps'}, {mine.own_steps.inner} inside"
    return _rounds(mine, told, steps)


def _average(sync: Sync, inner: InnerName) -> Recipe:
    """DiLoCo without its outer optimizer."""
    return _own(
        sync, "diloco", 8e-3, "mean of weights", outer_rate=1.0, outer_momentum=0.0, inner=inner
    )
