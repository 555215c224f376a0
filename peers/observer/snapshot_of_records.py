"""The snapshot of a swarm from the signed records in its directory, for an observer and `top --run`.

All counts are claims. A number for the whole swarm is a median, or a capped sum. In the sum no peer counts
for more than 16 times the median peer, or for more tokens than all rounds can hold. A single false claim
changes little; a majority could."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random

from peers.config.run_file import SignedManifest
from peers.network.discovery.claims import line_of
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
from peers.observer.sightings import PeerObservation, PeerObservations
from peers.telemetry.reasons import stuck_lines
from peers.telemetry.snapshot import (
    HOLDING,
    IN_STEP,
    ROLES,
    STATES,
    UNASKED,
    OldestCheckpoint,
    Ordered,
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

MAX_CONTRIBUTORS = 20
NO_BOOTSTRAPS: Mapping[str, bool] = {}


def snapshot_of(
    sightings: PeerObservations, signed: SignedManifest, now: float, ordered: Ordered = UNASKED, *,
    own_eval_loss: float | None = None, walked_at: float = 0.0,
    bootstraps: Mapping[str, bool] = NO_BOOTSTRAPS,
) -> SwarmSnapshot:  # fmt: skip
    """Return the snapshot. `own_eval_loss` is this observer's newest score, as its own record is not among
    the observations. `walked_at` is the time of the last complete walk; `bootstraps` maps addresses to
    whether they respond."""
    manifest = signed.manifest
    here = list(sightings.here())
    workers = [known.record for known in here if known.record.stage >= 0]
    training = [record for record in workers if plain_state(record.state) in IN_STEP]
    current = usual_round(training)
    most = (
        2 * ((current or 0) + 2) * manifest.rounds.global_batch_tokens
    )  # Rounds may exceed the target, by less than that.
    contributions, stages = sightings.contributions, range(len(manifest.stages))
    flows = [_flow(known.tokens_per_second for known in here if known.record.stage == s) for s in stages]
    holding = [known for known in here if plain_state(known.record.state) in HOLDING]
    held = {known.record.stage for known in holding}
    stuck = stuck_of((known.record for known in holding), manifest.rounds.snapshot_interval)
    known = SwarmSnapshot(
        source="the directory, as peers say",
        at=now,
        run=manifest.name,
        run_id=signed.run_id,
        state="paused_by_owner" if ordered.held else "",
        rows=tuple(map(_row, sightings.peers.values())),
        weakest=_weakest(holding, signed, now) if not stuck else None,
        round=current,
        settled=settled_round(training, 0),
        loss=usual_loss(training),
        eval_loss=eval_loss((known.record for known in here), own_eval_loss),
        tokens=max(contributions.of_stage(stage, most) for stage in stages),
        finalized_tokens=finalized_tokens(training, 0),
        tokens_per_second=max((flow for flow in flows if flow is not None), default=None),
        sent={"all": sum(record.sent_bytes for record in workers)},
        received={"all": sum(record.received_bytes for record in workers)},
        sent_bytes_per_second=_flow(known.sent_bytes_per_second for known in here),
        received_bytes_per_second=_flow(known.received_bytes_per_second for known in here),
        events=tuple(sightings.events),
        departures=dict(sightings.departures.most_common()),
        away=dict(Counter(sightings.away.values()).most_common()),
        waits_for=tuple(stage for stage in stages if stage not in held) if here else (),
        warnings=stuck_lines(stuck, signed.run_id),
        checkpoint=_checkpoint(sightings.peers.values(), len(stages), now),
        contributors=tuple(contributions.largest(MAX_CONTRIBUTORS, most)),
        experts=tuple(expert_groups(manifest, (known.record for known in here))),
        ordered=ordered,
        left_out=sightings.left_out,
        walked_at=walked_at,
        bootstraps=dict(bootstraps),
    )
    shown = complete(known, [span.stop - span.first for span in map(manifest.span, stages)])
    return replace(shown, states={**shown.states, **_bootstraps(bootstraps)})


def _bootstraps(bootstraps: Mapping[str, bool]) -> dict[str, dict[str, int]]:
    """Return the states of known bootstraps, which have a record only while no peer trains."""
    if not bootstraps:
        return {}
    up = sum(bootstraps.values())
    return {"bootstrap": {**dict.fromkeys(STATES, 0), "serving": up, "gone": len(bootstraps) - up}}


def state_of(known: PeerObservation) -> str:
    return "gone" if known.gone else plain_state(known.record.state)


def _flow(rates: Iterable[float | None]) -> float | None:
    """Return the rate of all peers together; None before any has signed a second record."""
    known_rates = [rate for rate in rates if rate is not None]
    return capped_sum(known_rates) if known_rates else None


def _row(known: PeerObservation) -> PeerRow:
    record = known.record
    return PeerRow(
        record.peer, record.stage, state_of(known), record.name,
        role=record.role if record.role in ROLES else "other",
        round=record.round if record.stage >= 0 else None,
        loss=record.loss, tokens=record.tokens, tokens_per_second=known.tokens_per_second,
        can_do=record.tokens_per_second or None,
        sent_bytes=record.sent_bytes, received_bytes=record.received_bytes,
        version=plain_version(record.version), signed_at=known.signed_at, answers=known.answers,
    )  # fmt: skip


def _weakest(holding: Sequence[PeerObservation], signed: SignedManifest, now: float) -> int | None:
    """Return the stage that a newcomer would choose."""
    data = signed.manifest.data
    tokens = data.seq_len * data.micro_batch_size
    seen = []
    for known in holding:
        record, age = known.record, max(0.0, now - known.signed_at)
        rate = record.tokens_per_second / tokens
        line = line_of(record)
        waits = waits_for_weights(record)
        counted = policy.ObservedPeer(record.stage, rate, record.moving_to, age, record.round, line, waits)
        seen.append((PeerId(record.peer), counted))
    if not seen:
        return None
    rules = policy.move_rules(signed.manifest)
    return policy.choose_stage(policy.view_of(seen, rules), rules, Random(0))


def _checkpoint(peers: Iterable[PeerObservation], stages: int, now: float) -> OldestCheckpoint | None:
    newest: dict[int, OldestCheckpoint] = {}
    for known in peers:
        record: PeerRecord = known.record
        if record.checkpoint_round < 0:
            continue
        found = OldestCheckpoint(record.checkpoint_round, min(now, record.checkpoint_seconds))
        if record.stage not in newest or newest[record.stage].at < found.at:
            newest[record.stage] = found
    if any(stage not in newest for stage in range(stages)):
        return None
    return min((newest[stage] for stage in range(stages)), key=lambda held: held.at)
