"""What a roll-back or a return to snapshots costs, by the peers' own records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median_high

from peers.network.discovery.record_reader import finalized_tokens, settled_round
from peers.telemetry.console import counted
from peers.telemetry.snapshot import IN_STEP
from peers.tools.owner.return_points import ReturnPoint
from protocols.signed.peer_record import PeerRecord
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import Manifest

SUMMED = (
    ", and so do sums that reducers have made. Its own sums leave the open rounds; what others contributed "
    "to them returns to their momentum"
)


def describe_cost(manifest: Manifest, records: Iterable[PeerRecord], peer: PeerId) -> str:
    """Return in words what a roll-back of `peer` costs the run: the rounds that lose its contributions, its
    share of their gradients, and the longest delay."""
    active = [record for record in records if record.stage >= 0 and record.state in IN_STEP]
    mine = next((record for record in active if record.peer == peer), None)
    if mine is None:
        return (
            f"{peer} is in no stage now: the rounds of its stage that are still open lose what it contributed"
        )
    stage = [record for record in active if record.stage == mine.stage]
    open_rounds = max(1, median_high(record.round - record.settled for record in stage))
    speed = sum(record.tokens_per_second for record in stage)
    share = mine.tokens_per_second / speed if speed else 1 / len(stage)
    return (
        f"stage {mine.stage}: about {counted(open_rounds, 'open round')} without the contributions of this "
        f"peer, by its speed {share:.0%} of their gradients. Those that are sealed may settle "
        f"{manifest.rounds.finality_timeout_seconds:g} s later. Rounds that have settled keep what it "
        f"contributed{SUMMED * (manifest.sync.topology == 'sharded-reduce')}"
    )


def describe_return_cost(records: Sequence[PeerRecord], points: Sequence[ReturnPoint]) -> list[str]:
    """Return in words, line by line, what a return to `points` costs: the rounds that each stage gives up,
    their tokens, and the hours that the run has spent on them at its present speed."""
    lines, lost, seconds = [], 0, 0.0
    for stage, point in enumerate(points):
        settled = settled_round(records, stage)
        gives_up = "no peer trains it" if settled is None else counted(settled - point.root[0], "round")
        lines.append(f"stage {stage}: to round {point.root[0]} ({point.source}); given up: {gives_up}")
        tokens = finalized_tokens(records, stage)
        if tokens is not None and point.tokens is not None:
            lost = max(lost, tokens - point.tokens)
        speeds = [each.tokens_per_second for each in records if each.stage == stage and each.state in IN_STEP]
        seconds = max(seconds, lost / sum(speeds)) if sum(speeds) else seconds
    hours = f", about {seconds / 3600:.1f} hours at the present speed" if seconds else ""
    lines.append(
        f"given up: {lost:,} tokens{hours}; all peers start again with an empty momentum. Their later "
        "checkpoints stay on disk with the suffix .given-up"
    )
    return lines
