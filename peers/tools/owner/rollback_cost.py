"""What it costs to take one peer's contributions out of the open rounds, by the peers' own records."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_high

from peers.telemetry.console import counted
from peers.telemetry.snapshot import IN_STEP
from protocols.signed.peer_record import PeerRecord
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import Manifest


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
        "contributed"
    )
