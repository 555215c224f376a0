"""Summarize which peers train which experts, from the claims in peers' records, which are not verified.

In a stage with mixture-of-experts layers, each peer may train only one group of the experts. A peer is in
step if its record says that it has the stage's weights. A settled round can no longer change. The last round
in which a group was trained is the median of what peers report (of two the lower). Peers that joined later do
not know it, nor do those that still catch up with settled rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median_low

from peers.network.discovery.record_reader import settled_round
from peers.telemetry.snapshot import IN_STEP, ExpertGroup
from protocols.signed.peer_record import PeerRecord
from swarmnet.run.manifest import Manifest


def expert_groups(manifest: Manifest, records: Iterable[PeerRecord]) -> Iterator[ExpertGroup]:
    """Yield the expert groups of all stages: first and last expert, number of peers, last trained round
    (None: not known) and settled round. Yields nothing if the run has no such groups."""
    experts = manifest.model.experts
    if experts.groups < 2:
        return
    in_step = [record for record in records if record.stage >= 0 and record.state in IN_STEP]
    group_size = experts.num_experts // experts.groups
    for stage in range(len(manifest.stages)):
        of_stage = [record for record in in_step if record.stage == stage]
        settled = settled_round(of_stage, stage)
        up_to_date = [record for record in of_stage if _has_caught_up(record, manifest.rounds.window)]
        for group in range(experts.groups):
            last_trained = [
                record.experts_trained[group] for record in up_to_date if group < len(record.experts_trained)
            ]
            known_rounds = [round for round in last_trained if round >= 0]
            peers = sum(record.experts_group == group for record in of_stage)
            newest = median_low(known_rounds) if known_rounds else None
            first = group * group_size
            yield ExpertGroup(stage, group, first, first + group_size - 1, peers, newest, settled)


def _has_caught_up(record: PeerRecord, window: int) -> bool:
    """Return True if the peer has computed the rounds that it reports as settled. Some group is trained in
    nearly every round. The newest trained round must therefore be at most `window` rounds older."""
    return max(record.experts_trained, default=-1) + window >= record.settled
