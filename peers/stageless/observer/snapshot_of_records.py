"""The snapshot of a swarm from the signed records in its directory, for an observer and `top --run`.

A snapshot is the state of all peers at one moment. A record is a peer's announcement, with what it claims.
All counts are claims. A number for the whole swarm is a median, or a capped sum. In the sum no peer counts
for more than 16 times the median peer. None counts for more tokens than all rounds can hold. A single false
claim changes little; a majority could."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random

from peers.config.run_file import SignedManifest
from peers.network.discovery.claims import claimed_bandwidth
from peers.network.discovery.expert_groups import expert_groups
from peers.network.discovery.record_reader import (
    eval_loss,
    finalized_tokens,
    settled_round,
    stuck_of,
    usual_loss,
    usual_round,
    waits_for_weights,
)
from peers.stageless.observer.judged_peers import Judgements, doubts
from peers.stageless.observer.run_state import find_obstacles
from peers.stageless.observer.sightings import PeerObservation, PeerObservations
from peers.telemetry.reasons import stuck_lines
from peers.telemetry.snapshot import (
    HOLDING,
    IN_STEP,
    ORDERS_NOT_READ,
    ROLES,
    STATES,
    OldestCheckpoint,
    OwnerOrdersView,
    PeerRow,
    SwarmSnapshot,
    capped_sum,
    complete,
    plain_state,
    plain_version,
)
from protocols.signed.peer_record import PeerRecord
from swarmnet.identifiers import PeerId
from swarmnet.placement import policy
from swarmnet.run.progress import planned_rounds

MAX_CONTRIBUTORS = 20
NO_BOOTSTRAPS: Mapping[str, bool] = {}


def snapshot_of(
    sightings: PeerObservations,
    signed: SignedManifest,
    now: float,
    ordered: OwnerOrdersView = ORDERS_NOT_READ,
    *,
    own_eval_loss: float | None = None,
    walked_at: float = 0.0,
    bootstraps: Mapping[str, bool] = NO_BOOTSTRAPS,
) -> SwarmSnapshot:
    """Return the snapshot at time `now`. `ordered` are the owner's orders. `own_eval_loss` is this observer's
    newest loss on held-out text; its own record is not among the observations. `walked_at` is when all
    records were last read. `bootstraps` maps addresses to whether they respond."""
    manifest = signed.manifest
    present = list(sightings.here())
    workers = [observed.record for observed in present if observed.record.stage >= 0]
    # Peers in a state of IN_STEP follow the rounds; those of HOLDING serve their stage or are about to.
    training = [record for record in workers if plain_state(record.state) in IN_STEP]
    current_round = usual_round(training)
    contributions, stages = sightings.contributions, range(len(manifest.stages))
    if current_round is not None:
        contributions.rounds = current_round + 1
    # Upper bound of a peer's tokens. A round may exceed its target, by less than the target.
    max_tokens = 2 * (contributions.rounds + 1) * manifest.rounds.global_batch_tokens
    planned = planned_rounds(manifest.sync, ordered.order.ends)
    sightings.pace.add(now, current_round)
    stage_rates = [
        _total_rate(observed.tokens_per_second for observed in present if observed.record.stage == stage)
        for stage in stages
    ]
    stage_peers = [observed for observed in present if plain_state(observed.record.state) in HOLDING]
    served_stages = {observed.record.stage for observed in stage_peers}
    judgements = Judgements.of(observed.record for observed in present)
    rows = tuple(judgements.judged(_peer_row(observed)) for observed in sightings.peers.values())
    stuck = stuck_of((observed.record for observed in stage_peers), manifest.rounds.rounds_from_seed)
    obstacles = find_obstacles(sightings, signed, now, stuck, bool(ordered.held))
    is_halted = ordered.held or any(obstacle.stops_run for obstacle in obstacles)
    incomplete = SwarmSnapshot(
        source="the directory, as peers say",
        at=now,
        run=manifest.name,
        run_id=signed.run_id,
        state="paused_by_owner" if ordered.held else "",
        rows=rows,
        weakest=_weakest_stage(stage_peers, signed, now) if not stuck else None,
        round=current_round,
        planned=planned,
        seconds_left=None if is_halted else sightings.pace.seconds_left(now, planned),
        settled=settled_round(training, stage=0),
        loss=usual_loss(training),
        eval_loss=eval_loss((observed.record for observed in present), own_eval_loss),
        tokens=max(contributions.of_stage(stage, max_tokens) for stage in stages),
        finalized_tokens=finalized_tokens(training, stage=0),
        tokens_per_second=max((rate for rate in stage_rates if rate is not None), default=None),
        sent={"all": sum(record.sent_bytes for record in workers)},
        received={"all": sum(record.received_bytes for record in workers)},
        sent_bytes_per_second=_total_rate(observed.sent_bytes_per_second for observed in present),
        received_bytes_per_second=_total_rate(observed.received_bytes_per_second for observed in present),
        events=tuple(sightings.events),
        departures=dict(sightings.departures.most_common()),
        away=dict(Counter(sightings.away.values()).most_common()),
        waits_for=tuple(stage for stage in stages if stage not in served_stages) if present else (),
        warnings=stuck_lines(stuck, signed.run_id),
        obstacles=obstacles,
        checkpoint=_oldest_checkpoint(sightings.peers.values(), len(stages), now),
        contributors=tuple(contributions.ranking(MAX_CONTRIBUTORS, max_tokens)),
        experts=tuple(expert_groups(manifest, (observed.record for observed in present))),
        doubts=doubts(rows, judgements, signed.run_id),
        weight_conflicts={stage: len(peers) for stage, (_, peers) in judgements.dissenters().items()},
        ordered=ordered,
        left_out=sightings.left_out,
        walked_at=walked_at,
        bootstraps=dict(bootstraps),
    )
    layers = [len(span.layers) for span in map(manifest.span, stages)]
    shown = complete(incomplete, layers)  # Adds the rows' sums by stage, state and version.
    return replace(shown, states={**shown.states, **_bootstrap_states(bootstraps)})


def _bootstrap_states(bootstraps: Mapping[str, bool]) -> dict[str, dict[str, int]]:
    """Return the states of the configured bootstraps, which have a record only while no peer trains."""
    if not bootstraps:
        return {}
    up = sum(bootstraps.values())
    return {"bootstrap": {**dict.fromkeys(STATES, 0), "serving": up, "gone": len(bootstraps) - up}}


def state_of(observed: PeerObservation) -> str:
    return "gone" if observed.gone else plain_state(observed.record.state)


def _total_rate(rates: Iterable[float | None]) -> float | None:
    """Return the rate of all peers together; None before any has signed a second record."""
    known_rates = [rate for rate in rates if rate is not None]
    return capped_sum(known_rates) if known_rates else None


def _peer_row(observed: PeerObservation) -> PeerRow:
    """Return the peer as a row of the snapshot, from its newest record. `tokens_per_second` is the measured
    growth of its tokens, and `can_do` the speed that it claims for its machine."""
    record = observed.record
    return PeerRow(
        record.peer,
        record.stage,
        state_of(observed),
        record.name,
        role=record.role if record.role in ROLES else "other",
        round=record.round if record.stage >= 0 else None,
        loss=record.loss,
        tokens=record.tokens,
        tokens_per_second=observed.tokens_per_second,
        can_do=record.tokens_per_second or None,
        sent_bytes=record.sent_bytes,
        received_bytes=record.received_bytes,
        version=plain_version(record.version),
        signed_at=observed.signed_at,
        answers=observed.answers,
    )


def _weakest_stage(holding: Sequence[PeerObservation], signed: SignedManifest, now: float) -> int | None:
    """Return the stage that a newcomer would choose, by the same policy; None without a peer. `holding` are
    the peers that serve a stage or are about to."""
    data = signed.manifest.data
    microbatch_tokens = data.seq_len * data.micro_batch_size
    candidates = []
    for observed in holding:
        record, age = observed.record, max(0.0, now - observed.signed_at)
        rate = record.tokens_per_second / microbatch_tokens
        link = claimed_bandwidth(record)
        waits = waits_for_weights(record)
        # `rate` is in microbatches per second, and `age` is that of the record in seconds.
        peer = policy.ObservedPeer(record.stage, rate, record.moving_to, age, record.round, link, waits)
        candidates.append((PeerId(record.peer), peer))
    if not candidates:
        return None
    rules = policy.move_rules(signed.manifest)
    return policy.choose_stage(policy.summarize_records(candidates, rules), rules, Random(0))


def _oldest_checkpoint(peers: Iterable[PeerObservation], stages: int, now: float) -> OldestCheckpoint | None:
    """Return the newest checkpoint of the stage whose newest one is oldest. None if a stage has none."""
    newest: dict[int, OldestCheckpoint] = {}
    for observed in peers:
        record: PeerRecord = observed.record
        if record.checkpoint_round < 0:
            continue
        checkpoint = OldestCheckpoint(record.checkpoint_round, min(now, record.checkpoint_seconds))
        if record.stage not in newest or newest[record.stage].at < checkpoint.at:
            newest[record.stage] = checkpoint
    if any(stage not in newest for stage in range(stages)):
        return None
    return min((newest[stage] for stage in range(stages)), key=lambda checkpoint: checkpoint.at)
