"""Assign the peers of a planned swarm to stages, and compute their speed there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low

from peers.config.errors import UserError
from peers.lab.planner.layout import PeerSpec
from peers.lab.planner.plan_request import BACKWARD_RATIO, PlanRequest
from peers.lab.planner.speeds import PeerClass
from swarmnet.placement.policy import as_suited, considers_links, move_rules, usually
from swarmnet.resources.link_bandwidth import UNKNOWN, LinkBandwidth, carried, crossings
from swarmnet.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Placement:
    """The peers with their stages."""

    peers: tuple[PeerSpec, ...]
    left_out: tuple[PeerClass, ...] = ()
    """Peer classes whose memory is too small for every stage."""


def placed(
    manifest: Manifest, question: PlanRequest, memory: Sequence[int] = (), whole: bool = False
) -> Placement:
    """Place every peer in the stage that it would choose as a newcomer (swarmnet/placement/policy.py).

    Peers come fastest first, or mixed, whichever gives the poorest stage more capacity. `memory`: bytes that
    each stage needs; empty: none. `whole`: place for the full-path warm-up, if the run has one; peers move
    when it ends. Raises UserError if there are too few peers, or if they have too little memory.
    """
    memory = memory or [0] * len(manifest.stages)
    left_out = tuple(one for one in question.classes if not _fitting(one, memory))
    classes = [one for one in question.classes if one not in left_out]
    _enough(classes, memory, left_out)
    kinds = _kinds(manifest, question, classes, memory, whole)
    usual = usually([kind.brings for kind in kinds for _ in range(kind.one.count)])
    has, found = max((_taken(order, usual) for order in _orders(kinds)), key=lambda taken: min(taken[0]))
    if 0.0 in has:
        empty = has.index(0.0)
        need = f"{memory[empty] / 1e9:.3g} GB"
        raise UserError(
            f"no peer is left for stage {empty}, which takes {need}: cut the model in more stages"
        )
    found.sort(key=lambda taken: -taken[0].one.tokens_per_second)
    return Placement(tuple(_spec(question, kind, stage) for kind, stage in found), left_out)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A peer class, with its speed in each stage of this run."""

    one: PeerClass
    seconds: tuple[float, ...]
    """Seconds of a microbatch, by stage."""
    brings: tuple[float, ...]
    """Microbatches per second of the run that a peer adds to each stage, limited by its link."""
    fitting: tuple[int, ...]
    """Stages for which its memory is large enough."""


def _kinds(
    manifest: Manifest,
    question: PlanRequest,
    classes: Sequence[PeerClass],
    memory: Sequence[int],
    whole: bool,
) -> list[_Kind]:
    """Return the classes with their speeds, fastest first."""
    rules, paths = move_rules(manifest), manifest.path_rules()
    shares = [one / sum(rules.work) for one in rules.work]
    visits = [
        paths.visit_share(stage, 0 if whole else paths.full_path_warmup_rounds)
        for stage in range(len(shares))
    ]
    count = sum(one.count for one in classes)
    tokens = manifest.microbatch_tokens
    usual = LinkBandwidth(median_low(one.up for one in classes for _ in range(one.count)))
    by_lines = not question.cores and considers_links(rules, count, usual)
    found = []
    for one in sorted(classes, key=lambda one: -one.tokens_per_second):
        line = LinkBandwidth(one.up, one.down) if by_lines else UNKNOWN
        seconds = tuple(share * tokens / one.tokens_per_second for share in shares)
        brings = tuple(
            carried(1 / each, line, crosses) / visited
            for each, crosses, visited in zip(seconds, crossings(manifest), visits, strict=True)
        )
        found.append(_Kind(one, seconds, brings, _fitting(one, memory)))
    return found


def _orders(kinds: Sequence[_Kind]) -> Iterator[list[_Kind]]:
    """Yield orders in which peers may join: one class after another, and all classes mixed evenly."""
    yield [kind for kind in kinds for _ in range(kind.one.count)]
    if len(kinds) > 1:
        mixed = [
            ((number + 0.5) / kind.one.count, place)
            for place, kind in enumerate(kinds)
            for number in range(kind.one.count)
        ]
        yield [kinds[place] for _, place in sorted(mixed)]


def _taken(order: Sequence[_Kind], usual: Sequence[float]) -> tuple[list[float], list[tuple[_Kind, int]]]:
    """Return the capacity of each stage after all peers joined in that order, and each peer's stage."""
    has = [0.0] * len(usual)
    found = []
    suits = {id(kind): as_suited([1.0] * len(usual), kind.brings, usual) for kind in order}
    for kind in order:
        seen = [there * looks for there, looks in zip(has, suits[id(kind)], strict=True)]
        stage = min(kind.fitting, key=seen.__getitem__)
        has[stage] += kind.brings[stage]
        found.append((kind, stage))
    return has, found


def _spec(question: PlanRequest, kind: _Kind, stage: int) -> PeerSpec:
    one, forward = kind.one, kind.seconds[stage] / (1 + BACKWARD_RATIO)
    if question.cores:  # All peers share one machine, without links.
        return PeerSpec(stage, forward, slots=question.slots, region=one.region)
    return PeerSpec(stage, forward, one.up, one.down, question.slots, region=one.region, loss=one.loss)


def _fitting(one: PeerClass, memory: Sequence[int]) -> tuple[int, ...]:
    """Return the stages for which such a peer has enough memory."""
    return tuple(stage for stage, needed in enumerate(memory) if not one.memory or needed <= one.memory)


def _enough(classes: Sequence[PeerClass], memory: Sequence[int], left_out: Sequence[PeerClass]) -> None:
    """Raise UserError if there are fewer peers than stages, or if no peer has enough memory."""
    least = f"{min(memory) / 1e9:.3g} GB"
    count = sum(one.count for one in classes)
    if not count:
        names = ", ".join(map(str, left_out))
        raise UserError(f"no peer has memory for a stage, which takes {least} at least: {names}")
    if count < len(memory):
        without = f", without those that have less than {least}" if left_out else ""
        raise UserError(f"{count} peers cannot hold {len(memory)} stages: one each at least{without}")


def sample(peers: Sequence[PeerSpec], wanted: int) -> list[PeerSpec]:
    """Return about `wanted` peers: every n-th of each stage, in order of speed, at least one per stage."""
    every = max(1.0, len(peers) / wanted)
    alike: dict[int, list[PeerSpec]] = {}
    for peer in peers:
        alike.setdefault(peer.stage, []).append(peer)
    found: list[PeerSpec] = []
    for _, here in sorted(alike.items()):
        count = max(1, round(len(here) / every))
        found += (here[int((index + 0.5) * len(here) / count)] for index in range(count))
    return found
