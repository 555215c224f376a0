"""Which peer holds which stage of a swarm that does not exist yet, and how fast it is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peers.errors import UserError
from peers.lab.planner.layout import PeerSpec
from peers.lab.planner.question import BACKWARD_RATIO, Question
from peers.lab.planner.speeds import PeerClass
from swarmnet.placement.policy import stage_work
from swarmnet.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Placement:
    peers: tuple[PeerSpec, ...]
    left_out: tuple[PeerClass, ...] = ()
    """Whose memory no stage fits in."""


def placed(
    manifest: Manifest, question: Question, memory: Sequence[int] = (), whole: bool = False
) -> Placement:
    """Every peer, the fastest first, in the stage that carries least of the run so far, of those that fit its
    memory. `memory`: bytes that each stage takes; empty: nothing. `whole`: while microbatches leave nothing
    out, if the run begins so; when that ends peers move. Raises UserError."""
    work, rules = stage_work(manifest), manifest.path_rules()
    shares = [one / sum(work) for one in work]
    memory = memory or [0] * len(shares)
    visits = [rules.visit_share(stage, 0 if whole else rules.whole_rounds) for stage in range(len(shares))]
    left_out = tuple(one for one in question.classes if not _fitting(one, memory))
    classes = [one for one in question.classes if one not in left_out]
    count = sum(one.count for one in classes)
    _enough(count, memory, left_out)
    has = [0.0] * len(shares)
    found: list[PeerSpec] = []
    for one in sorted(classes, key=lambda one: -(one.tokens_per_second or 0.0)):
        fitting = _fitting(one, memory)
        seconds = {
            stage: _seconds(question, one, shares, stage, manifest.microbatch_tokens, count)
            for stage in fitting
        }
        for _ in range(one.count):
            stage = min(fitting, key=has.__getitem__)
            has[stage] += 1 / seconds[stage] / visits[stage]
            found.append(_spec(question, one, stage, seconds[stage] / (1 + BACKWARD_RATIO)))
    empty = has.index(0.0) if 0.0 in has else None
    if empty is not None:
        need = f"{memory[empty] / 1e9:.3g} GB"
        raise UserError(f"nobody is left for stage {empty}, which takes {need}: cut the model in more stages")
    return Placement(tuple(found), left_out)


def _spec(question: Question, one: PeerClass, stage: int, forward: float) -> PeerSpec:
    if question.cores:  # One machine: nothing goes over a line.
        return PeerSpec(stage, forward, slots=question.slots, machine=0, region=one.region)
    return PeerSpec(stage, forward, one.up, one.down, slots=question.slots, region=one.region)


def _fitting(one: PeerClass, memory: Sequence[int]) -> list[int]:
    """Stages that such a peer can hold."""
    return [stage for stage, needs in enumerate(memory) if not one.memory or needs <= one.memory]


def _enough(count: int, memory: Sequence[int], left_out: Sequence[PeerClass]) -> None:
    least = f"{min(memory) / 1e9:.3g} GB"
    if not count:
        names = ", ".join(map(str, left_out))
        raise UserError(f"no peer has memory for a stage, which takes {least} at least: {names}")
    if count < len(memory):
        without = f", without those that have less than {least}" if left_out else ""
        raise UserError(f"{count} peers cannot hold {len(memory)} stages: one each at least{without}")


def _seconds(
    question: Question, one: PeerClass, shares: Sequence[float], stage: int, tokens: int, count: int
) -> float:
    """Of a microbatch on a peer of that kind in that stage, forward and backward."""
    if one.tokens_per_second is not None:
        return shares[stage] * tokens / one.tokens_per_second
    if question.measured is None:
        raise UserError("peers without a speed are as fast as this machine: measure it with --measure")
    alone, more = question.measured.alone[stage], question.measured.per_peer[stage]
    return alone + more * (count / len(shares) - 1)


def speed(manifest: Manifest, question: Question, one: PeerClass) -> float:
    """Tokens per second of the whole model on such a peer by itself."""
    if one.tokens_per_second is not None:
        return one.tokens_per_second
    if question.measured is None:
        return 0.0
    return manifest.microbatch_tokens / sum(question.measured.alone)


def sample(peers: Sequence[PeerSpec], wanted: int) -> list[PeerSpec]:
    """Every n-th peer of each stage, in the order of speed."""
    every = max(1.0, len(peers) / wanted)
    found: list[PeerSpec] = []
    for stage in sorted({peer.stage for peer in peers}):
        here = [peer for peer in peers if peer.stage == stage]
        count = max(1, round(len(here) / every))
        found += [here[int((index + 0.5) * len(here) / count)] for index in range(count)]
    return found
