"""Which peer holds which stage of a swarm that does not exist yet, and how fast it is there."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from peers.errors import UserError
from peers.lab.planner.layout import PeerSpec
from peers.lab.planner.question import BACKWARD_RATIO, Question
from peers.lab.planner.speeds import PeerClass
from swarmnet.placement.policy import stage_work
from swarmnet.run.manifest import Manifest


def placed(manifest: Manifest, question: Question, whole: bool = False) -> list[PeerSpec]:
    """Every peer, the fastest first, in the stage that carries least of the run so far. `whole`: while
    microbatches leave nothing out, if the run begins so; when that ends peers move. Raises UserError."""
    work, rules = stage_work(manifest), manifest.path_rules()
    shares = [one / sum(work) for one in work]
    visits = [rules.visit_share(stage, 0 if whole else rules.whole_rounds) for stage in range(len(shares))]
    count = sum(one.count for one in question.classes)
    if count < len(shares):
        raise UserError(f"{count} peers cannot hold {len(shares)} stages: one each at least")
    thinnest = [(0.0, stage) for stage in range(len(shares))]
    heapq.heapify(thinnest)
    found: list[PeerSpec] = []
    for one in sorted(question.classes, key=lambda one: -(one.tokens_per_second or 0.0)):
        for _ in range(one.count):
            has, stage = heapq.heappop(thinnest)
            seconds = _seconds(question, one, shares, stage, manifest.microbatch_tokens, count)
            heapq.heappush(thinnest, (has + 1 / seconds / visits[stage], stage))
            forward = seconds / (1 + BACKWARD_RATIO)
            spec = PeerSpec(stage, forward, one.up, one.down, slots=question.slots, region=one.region)
            if question.cores:  # One machine: nothing goes over a line.
                spec = PeerSpec(stage, forward, slots=question.slots, machine=0, region=one.region)
            found.append(spec)
    return found


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


def sample(peers: Sequence[PeerSpec], wanted: int) -> list[PeerSpec]:
    """Every n-th peer of each stage, in the order of speed."""
    every = max(1.0, len(peers) / wanted)
    found: list[PeerSpec] = []
    for stage in sorted({peer.stage for peer in peers}):
        here = [peer for peer in peers if peer.stage == stage]
        count = max(1, round(len(here) / every))
        found += [here[int((index + 0.5) * len(here) / count)] for index in range(count)]
    return found
