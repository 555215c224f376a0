"""Who trains which experts, by what the records of a run's peers say; nobody else has counted.

A group is trained by whom it stands in the records of: those that hold the stage and take part. When it was
last trained is what the middle one of those says that know (of two the lower): who came later does not, nor
who still makes up for rounds that the group has settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median_low

from peers.network.discovery.record_reader import settled_round
from peers.telemetry.snapshot import IN_STEP, ExpertGroup
from protocols.signed.peer_record import PeerRecord
from swarmnet.run.manifest import Manifest


def expert_groups(manifest: Manifest, records: Iterable[PeerRecord]) -> Iterator[ExpertGroup]:
    """By stage, of a run whose peers each train one group; of another run none."""
    experts = manifest.model.experts
    if experts.groups < 2:
        return
    told = [record for record in records if record.stage >= 0 and record.state in IN_STEP]
    each = experts.count // experts.groups
    for stage in range(len(manifest.stages)):
        of_stage = [record for record in told if record.stage == stage]
        settled = settled_round(of_stage, stage)
        knowing = [record for record in of_stage if _is_at_hand(record, manifest.rounds.window)]
        for group in range(experts.groups):
            said = [round for record in knowing for round in record.experts_trained[group : group + 1]]
            known = [round for round in said if round >= 0]
            yield ExpertGroup(
                stage, group, group * each, (group + 1) * each - 1,
                sum(record.experts_group == group for record in of_stage),
                median_low(known) if known else None, settled,
            )  # fmt: skip


def _is_at_hand(record: PeerRecord, window: int) -> bool:
    """Whether it has computed what it says is settled: somebody trained some experts in each round, or
    nearly."""
    return max(record.experts_trained, default=-1) + window >= record.settled
