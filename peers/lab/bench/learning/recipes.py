"""Every method that the bench compares, under its name, and the rate at which its search begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from peers.lab.bench.learning.ground import Ground
from peers.lab.bench.learning.learner import InnerName, Learner, MeanGradient, schedule
from peers.lab.bench.learning.local_steps import (
    Exchange,
    Levels,
    LocalSteps,
    Nesterov,
    Powers,
    Quantizer,
    Signs,
    TwoMagnitudes,
)
from peers.lab.bench.learning.plain_demo import DECAY, KEPT, PlainDemo
from peers.lab.bench.learning.rounds import Rounds
from swarmnet.run.manifest import Sync

LOCAL_STEPS = 8
"""H: where HOME lines make exchanges worth saving, and the loss is still near that of H = 1."""
SPARSE_KEPT = 64
"""Of 4096: what SparseLoCo's authors use."""


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
        "float-demo-paper": Recipe(_as_the_paper(sync), 2e-3, "the product's DeMo, cut and set as demo"),
        "low-rank": _rounds(
            replace(sync, method="low-rank"), "of each matrix few directions, an orthogonal step"
        ),
        "hybrid": _rounds(replace(sync, method="hybrid"), "the same, and votes on what they left"),
        "local-steps": _product_steps(sync, 4),
        "local-steps-2": _product_steps(sync, 2),
        "local-steps-sharded": _product_steps(replace(sync, exchange="sharded"), 4),
        "average-adamw": _local(
            "adamw", Exchange(LOCAL_STEPS), f"mean of weights, every {LOCAL_STEPS} steps"
        ),
        "average-muon": _local("muon", Exchange(LOCAL_STEPS), f"mean of weights, every {LOCAL_STEPS} steps"),
        "diloco-8": _diloco("adamw", 8),
        "diloco-30": _diloco("adamw", 30),
        "diloco-30-muon": _diloco("muon", 30),
        "streaming-30": _streaming(30),
        "sparta": _local("adamw", Exchange(1, parts=20), "partitioned averaging: a twentieth every step"),
        "sparse-loco": _local(
            "adamw",
            Exchange(
                LOCAL_STEPS,
                kept=SPARSE_KEPT,
                quantizer=TwoMagnitudes(SPARSE_KEPT),
                residual="feedback",
                feedback_decay=0.95,
            ),
            f"SparseLoCo: {SPARSE_KEPT} of 4096, two bits, every {LOCAL_STEPS} steps",
        ),
        "live-4": _signs("muon", 4, "a quarter"),
        "live-4-adamw": _signs("adamw", 4, "a quarter"),
        "live-2": _signs("muon", 2, "a half"),
        "live-1": _signs("muon", 1, "all"),
        "result-4": _result(Levels(4), "four bits"),
        "result-2": _result(Levels(2), "two bits"),
        "result-1": _result(Signs(), "signs"),
        "feedback-4": _local(
            "muon",
            Exchange(LOCAL_STEPS, parts=4, quantizer=Signs(), residual="feedback"),
            f"signs of a quarter every {LOCAL_STEPS} steps, error feedback",
        ),
        "powers-4": _local(
            "muon",
            Exchange(LOCAL_STEPS, parts=4, quantizer=Powers()),
            f"four bits of a quarter every {LOCAL_STEPS} steps, live residual",
        ),
    }


def _mean_gradient(inner: InnerName) -> Recipe:
    def make(ground: Ground, setting: Setting, rate: float) -> Learner:
        return MeanGradient(ground, setting.peers, inner, schedule(rate, setting.steps))

    return Recipe(make, 8e-3, "the mean gradient every step")


def _plain_demo(ground: Ground, setting: Setting, rate: float) -> Learner:
    return PlainDemo(ground, setting.peers, schedule(rate, setting.steps))


def _as_the_paper(sync: Sync) -> Callable[[Ground, Setting, float], Learner]:
    """DeMo's own settings, in the product."""
    return _rounds(
        replace(
            sync, method="demo-float", selection="top-k", kept=KEPT, momentum=DECAY, transform="fine-dct",
            cut="tiles",
        ), "",
    ).make  # fmt: skip


def _rounds(sync: Sync, told: str) -> Recipe:
    every = LOCAL_STEPS if sync.method == "local-steps" else 1

    def make(ground: Ground, setting: Setting, rate: float) -> Learner:
        return Rounds(ground, setting.peers, sync, rate, setting.steps, setting.delay, every)

    return Recipe(make, sync.learning_rate, told)


def _product_steps(sync: Sync, parts: int) -> Recipe:
    method = replace(sync, method="local-steps", parts=parts, learning_rate=8e-3)
    through = ", through reducers" * (sync.exchange == "sharded")
    told = f"the product's local steps, signs of 1/{parts} every {LOCAL_STEPS} steps, Muon{through}"
    return _rounds(method, told)


def _local(inner: InnerName, exchange: Exchange, told: str) -> Recipe:
    def make(ground: Ground, setting: Setting, rate: float) -> Learner:
        return LocalSteps(ground, setting.peers, inner, schedule(rate, setting.steps), exchange)

    return Recipe(make, 8e-3, f"{told}, {inner} inside")


def _signs(inner: InnerName, parts: int, share: str) -> Recipe:
    exchange = Exchange(LOCAL_STEPS, parts=parts, quantizer=Signs())
    return _local(inner, exchange, f"signs of {share} every {LOCAL_STEPS} steps, live residual")


def _result(result: Quantizer, told: str) -> Recipe:
    exchange = Exchange(LOCAL_STEPS, parts=4, quantizer=Signs(), result=result)
    return _local("muon", exchange, f"signs of a quarter every {LOCAL_STEPS} steps, their mean in {told}")


def _diloco(inner: InnerName, every: int) -> Recipe:
    def make(ground: Ground, setting: Setting, rate: float) -> Learner:
        exchange = Exchange(every, residual="none")
        outer = Nesterov(ground.size)
        return LocalSteps(ground, setting.peers, inner, schedule(rate, setting.steps), exchange, outer)

    return Recipe(make, 4e-3, f"DiLoCo, every {every} steps, Nesterov 0.9 at 0.7, {inner} inside")


def _streaming(every: int, fragments: int = 3) -> Recipe:
    def make(ground: Ground, setting: Setting, rate: float) -> Learner:
        exchange = Exchange(
            every // fragments, parts=fragments, by_layer=True, quantizer=Powers(), residual="none"
        )
        outer = Nesterov(ground.size)
        return LocalSteps(ground, setting.peers, "adamw", schedule(rate, setting.steps), exchange, outer)

    return Recipe(make, 4e-3, f"Streaming DiLoCo, {fragments} fragments every {every} steps, four bits")
