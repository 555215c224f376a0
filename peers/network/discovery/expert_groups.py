"""Summarize which peers train which experts, from the claims in peers' records, which are not verified.

A group's holders are the peers in step that name it in their records. When it was last trained is the median
of those that know (of two the lower). Peers that joined later do not know, nor do those that still catch up
with settled rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median_low

from peers.network.discovery.record_reader import settled_round
from peers.telemetry.snapshot import IN_STEP, ExpertGroup
from protocols.signed.peer_record import PeerRecord
from swarmnet.run.manifest import Manifest


def expert_groups(manifest: Manifest, records: Iterable[PeerRecord]) -> Iterator[ExpertGroup]:
    """Yield the expert groups by stage. Yields nothing unless each peer of the run trains one group."""
    experts = manifest.model.experts
    if experts.groups < 2:
        return
    in_step = [record for record in records if record.stage >= 0 and record.state in IN_STEP]
    each = experts.num_experts // experts.groups
    for stage in range(len(manifest.stages)):
        of_stage = [record for record in in_step if record.stage == stage]
        settled = settled_round(of_stage, stage)
        knowing = [record for record in of_stage if _has_caught_up(record, manifest.rounds.window)]
        for group in range(experts.groups):
            rounds = [round for record in knowing for round in record.experts_trained[group : group + 1]]
            known = [round for round in rounds if round >= 0]
            yield ExpertGroup(
                stage, group, group * each, (group + 1) * each - 1,
                sum(record.experts_group == group for record in of_stage),
                median_low(known) if known else None, settled,
            )  # fmt: skip


def _has_caught_up(record: PeerRecord, window: int) -> bool:
    """Return True if the peer has computed the rounds that it reports as settled. Experts are trained in
    nearly every round, so its newest trained round must be within `window` of them."""
    return max(record.experts_trained, default=-1) + window >= record.settled
