"""The methods that the learning benchmark compares, by name, and the start values of their searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from peers.config.errors import UserError
from peers.lab.bench.learning.ground import Ground
from peers.lab.bench.learning.learner import Learner, MeanGradient, schedule
from peers.lab.bench.learning.liars import Liars
from peers.lab.bench.learning.plain_demo import DECAY, KEPT, PlainDemo
from peers.lab.bench.learning.play_rounds import BenchRounds
from swarmnet.run.local_step_config import THOUSAND, InnerOptimizerName
from swarmnet.run.schema import Sync
from swarmnet.run.sync_methods import METHOD_CONFIGS

LOCAL_STEPS = 8
"""Local steps of a round (H in the papers): saves traffic on home links, with a loss near that of H = 1."""
PAPER_STEPS = 30
"""Local steps of a round (H) in the papers of DiLoCo's family."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Size and conditions of one trial."""

    peers: int
    steps: int
    delay: int = 0
    """Rounds between the end of a round and its application."""
    outer_lr: float | None = None
    """Learning rate of the outer optimizer, if the method has one; None: the paper's."""
    away: int = 0
    """Number of peers that compute nothing in the middle third of the steps."""
    late: float = 0.0
    """Share of the contributions that arrive only after their round was applied."""
    local_steps: int = 0
    """Local steps of a round, if the method takes any; 0: the method's own number."""
    liars: str = ""
    """Number and kind of peers that lie (`liars.py`); empty: none."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to build a method, and where to start the search for its learning rates."""

    make: Callable[[Ground, Setting, float], Learner]
    """Build the method from a ground, a setting and the peak learning rate."""
    begin_rate: float
    """Learning rate at which the search starts."""
    told: str
    """Short description for the report's table."""
    begin_outer: float | None = None
    """Outer learning rate at which the search starts (the paper's); None: there is no outer optimizer."""
    local_steps: int = 0
    """Local steps that a peer takes in a round; 0: none."""


def recipes(sync: Sync) -> Mapping[str, Recipe]:
    """Return all methods by name. `sync`: settings of the run, whose method is "run"."""
    votes = sync.with_method("demo-sign")
    own = partial(
        Sync,
        learning_rate=8e-3,
        momentum=sync.momentum,
        max_grad_norm=sync.max_grad_norm,
        shards=sync.shards,
        inner_batch_tokens=sync.inner_batch_tokens,
        expert_lr_scale=sync.expert_lr_scale,
    )
    diloco, sparse = own("diloco", learning_rate=2e-3), own("sparse-loco", learning_rate=4e-3)
    streaming = own("streaming-diloco", learning_rate=2e-3)
    sign_muon = sync if sync.method == "sign-muon" else sync.with_method("sign-muon")
    sign_muon = replace(sign_muon, learning_rate=METHOD_CONFIGS["sign-muon"].small_model_rate)
    average = own("diloco", outer_lr=1.0, outer_momentum=0.0)  # No outer optimizer.
    return {
        "adamw": _mean_gradient("adamw"),
        "muon": _mean_gradient("muon"),
        "demo": Recipe(_plain_demo, 2e-3, "DeMo as its paper has it, 32 of 4096 in floats"),
        "run": _rounds(sync, "the run's own method"),
        "votes-top-k": _rounds(
            replace(votes, selection="top-k", topk_per_chunk=32), "votes, the largest 32 of 4096"
        ),
        "votes-group": _rounds(
            replace(votes, selection="group", topk_per_chunk=128), "votes, the largest of each 32"
        ),
        "float-demo": _rounds(sync.with_method("demo"), "DeMo's values, exact"),
        "float-demo-paper": Recipe(_as_the_paper(sync), 2e-3, "the product's DeMo, cut and set as demo"),
        "low-rank": _rounds(
            sync.with_method("low-rank"), "of each matrix few directions, an orthogonal step"
        ),
        "hybrid": _rounds(sync.with_method("hybrid"), "the same, and votes on what they left"),
        **{
            f"sign-muon-{fragments}": _rounds(
                replace(sign_muon, fragments=fragments),
                f"signs of Muon's direction, {said}",
            )
            for fragments, said in ((1, "all"), (4, "a quarter"), (8, "an eighth"), (16, "a sixteenth"))
        },
        "local-steps": _own(own("local-steps"), "signs of a quarter"),
        "local-steps-2": _own(own("local-steps", fragments=2), "signs of a half"),
        "local-steps-1": _own(own("local-steps", fragments=1), "signs of all"),
        "local-steps-1-gain": _own(
            own("local-steps", fragments=1, outer_lr=1.4), "signs of all, 1.4 times their mean"
        ),
        "local-steps-adamw": _own(own("local-steps", inner_optimizer="adamw"), "signs of a quarter"),
        "local-steps-feedback": _own(
            own("local-steps", residual="error-feedback"), "the same, error feedback"
        ),
        "local-steps-four-bits": _own(own("local-steps", delta_codec="e3m0"), "four bits of a quarter"),
        "local-steps-sharded": _own(
            own("local-steps", topology="sharded-reduce"), "the same, through reducers"
        ),
        "average-h8": _own(replace(average, inner_optimizer="adamw"), "the mean of weights"),
        "average-h8-muon": _own(replace(average, inner_optimizer="muon"), "the mean of weights"),
        "diloco-h8": _own(diloco, "DiLoCo"),
        "diloco-h8-muon": _own(replace(diloco, inner_optimizer="muon"), "DiLoCo"),
        "diloco-h30": _own(diloco, "DiLoCo", PAPER_STEPS),
        "diloco-h30-muon": _own(replace(diloco, inner_optimizer="muon"), "DiLoCo", PAPER_STEPS),
        "streaming-diloco-h32": _own(streaming, "Streaming DiLoCo, a quarter"),
        "sparse-loco-h8": _own(sparse, "SparseLoCo"),
        "sparse-loco-h30": _own(sparse, "SparseLoCo", PAPER_STEPS),
        "sparse-loco-h30-muon": _own(replace(sparse, inner_optimizer="muon"), "SparseLoCo", PAPER_STEPS),
        "sparta": _own(own("sparta", learning_rate=4e-3), "the mean of a sixteenth of weights", 1),
    }


def _mean_gradient(inner: InnerOptimizerName) -> Recipe:
    def make(ground: Ground, setting: Setting, rate: float) -> Learner:
        _require_all(setting)
        return MeanGradient(
            ground=ground, peers=setting.peers, inner=inner, rate=schedule(rate, setting.steps)
        )

    return Recipe(make, 8e-3, "the mean gradient every step")


def _require_all(setting: Setting) -> None:
    if setting.away or setting.late or setting.liars:
        raise UserError(
            "--away, --late and --liars: all peers share one gradient here; leave these options out"
        )


def _plain_demo(ground: Ground, setting: Setting, rate: float) -> Learner:
    _require_all(setting)
    return PlainDemo(ground=ground, peers=setting.peers, rate=schedule(rate, setting.steps))


def _as_the_paper(sync: Sync) -> Callable[[Ground, Setting, float], Learner]:
    """Return the maker of the product's DeMo with the settings of the paper."""
    return _rounds(
        replace(
            sync.with_method("demo"),
            selection="top-k",
            topk_per_chunk=KEPT,
            momentum=DECAY,
            transform="fine-dct",
            chunking="tiled",
        ),
        "",
    ).make


def _rounds(sync: Sync, told: str, steps: int = LOCAL_STEPS) -> Recipe:
    """Return the recipe of a method of the product. `steps`: local steps of a round, if it takes any."""

    def make(ground: Ground, setting: Setting, rate: float) -> Learner:
        each = sync.step_microbatches(ground.manifest.microbatch_tokens)
        every = 1 if sync.local_steps is None else (setting.local_steps or steps) * each
        if setting.liars and sync.method != "sign-muon":
            raise UserError("--liars: only contributions of sign-muon are replaced; name one with --method")
        ours = sync if setting.outer_lr is None else replace(sync, outer_lr=setting.outer_lr)
        return BenchRounds(
            ground=ground,
            peers=setting.peers,
            sync=ours,
            peak=rate,
            steps=setting.steps,
            delay=setting.delay,
            every=every,
            away=setting.away,
            late=setting.late,
            liars=Liars.parse(setting.liars, setting.peers),
        )

    own = sync.local_steps
    outer = own.outer_thousandths[0] / THOUSAND if own is not None and own.settles_momentum else None
    return Recipe(make, sync.learning_rate, told, outer, steps if own is not None else 0)


def _own(sync: Sync, told: str, steps: int = LOCAL_STEPS) -> Recipe:
    """Return the recipe of a local-step method with `steps` local steps in a round."""
    assert sync.local_steps is not None
    return _rounds(sync, f"{told}, {sync.local_steps.inner_optimizer} inside", steps)
