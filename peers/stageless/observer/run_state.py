"""What a run does now, and which peers are stuck and why, in words for people who never saw a log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from peers.config.run_file import SignedManifest
from peers.network.discovery.record_reader import usual_round, waits_for_weights
from peers.stageless.observer.sightings import PeerObservation, PeerObservations
from peers.telemetry.console import counted
from peers.telemetry.event import short
from peers.telemetry.reasons import way_out
from peers.telemetry.snapshot import IN_STEP, Obstacle, SwarmSnapshot
from swarmnet.run.progress import duration_text

JOINING_SECONDS = 300.0
"""A newcomer that has no weights after this time is named. A download of a stage takes minutes."""
BEHIND_SECONDS = 180.0
"""A peer that is this far behind its stage is named. Records are up to 35 s old, so a lead of one record is
none."""
STANDSTILL_SECONDS = 300.0
STANDSTILL_ROUNDS = 10
"""A run whose round has not changed for 5 minutes, and for as long as ten rounds took, stands still."""
SHOWN_OBSTACLES = 12
"""Obstacles in a snapshot; further ones are counted in the last one."""
SHOWN_NAMES = 4
DOCTOR = "The owner of that computer can find the cause there: swarmnet doctor"


def find_obstacles(
    sightings: PeerObservations, signed: SignedManifest, now: float, stuck: Mapping[int, int], is_held: bool
) -> tuple[Obstacle, ...]:
    """Return what keeps the run, or single peers, from training at time `now`: first stages, then peers.
    `stuck` maps stages whose peers all wait for weights to their number. A run that `is_held` has none: its
    owner has paused it."""
    workers = (observed for observed in sightings.here() if observed.record.role == "worker")
    present = [observed for observed in workers if observed.record.stage >= 0]
    if is_held or not present:
        return ()
    found = [*_stage_obstacles(present, signed, stuck)]
    unchanged = sightings.pace.seconds_since_change(now)
    pace = sightings.pace.seconds_per_round(now - unchanged)  # A standstill is no pace.
    training = [now - observed.state_since for observed in present if observed.record.state == "training"]
    quiet = min(unchanged, max(training, default=0.0))
    if not found and quiet > max(STANDSTILL_SECONDS, STANDSTILL_ROUNDS * (pace or 0.0)):
        why = f"No round has ended for {duration_text(quiet)}, although peers are here."
        found.append(Obstacle("All stages", why, "Owners of peers can look for the cause: swarmnet doctor"))
    found += _slow_peers(present, now, stuck, pace)
    more = len(found) - SHOWN_OBSTACLES
    if more > 0:
        found[SHOWN_OBSTACLES:] = [Obstacle("And", f"{counted(more, 'peer')} more.", "", stops_run=False)]
    return tuple(found)


def _stage_obstacles(
    present: Sequence[PeerObservation], signed: SignedManifest, stuck: Mapping[int, int]
) -> Iterable[Obstacle]:
    """Yield the stages without a peer, unless the run may leave them out, and those without weights."""
    held = {observed.record.stage for observed in present if observed.record.state != "leaving"}
    reached = usual_round(observed.record for observed in present) or 0
    last = len(signed.manifest.stages) - 1
    for stage in range(last + 1):
        may_skip = signed.manifest.paths.skip_ratio > 0 and 0 < stage < last
        if stage in stuck:
            waiting = [observed for observed in present if observed.record.stage == stage]
            why = (
                f"{_names(waiting)} {_verb(len(waiting), 'waits', 'wait')} for its weights, "
                "and no peer that is here has them. Training continues when a peer brings them back."
            )
            yield Obstacle(f"Stage {stage}", why, way_out(signed.run_id, stage))
        elif stage not in held and not may_skip:
            why = "No peer holds this part of the model, so no text can pass through it."
            help = f"A computer that joins with the command below takes it; --stage {stage} makes sure."
            if reached >= signed.manifest.rounds.rounds_from_seed:  # Newcomers do not begin from the seed.
                why += " Its weights are on the disk of a peer that left, or in an archive."
                help = way_out(signed.run_id, stage)
            yield Obstacle(f"Stage {stage}", why, help)


def _slow_peers(
    present: Sequence[PeerObservation], now: float, stuck: Mapping[int, int], pace: float | None
) -> Iterable[Obstacle]:
    """Yield newcomers that have no weights yet, and peers that are far behind their stage. `pace` is seconds
    per round, or None."""
    newest: dict[int, int] = {}
    for observed in present:
        if observed.record.state in IN_STEP:
            stage, round = observed.record.stage, observed.record.round
            newest[stage] = max(round, newest.get(stage, round))
    for observed in present:
        record, since = observed.record, now - observed.state_since
        who, doctor = f"{_name(observed)}, stage {record.stage}", DOCTOR
        if record.stage in stuck or record.state == "leaving":
            continue
        if waits_for_weights(record) and since > JOINING_SECONDS:
            why = f"It has been joining for {duration_text(since)}: it does not get the weights of its stage."
            yield Obstacle(who, why, doctor, stops_run=False)
        elif record.state == "training" and pace:
            behind = newest[record.stage] - record.round
            if behind * pace > BEHIND_SECONDS:
                why = (
                    f"It is {counted(behind, 'round')} behind its stage, about "
                    f"{duration_text(behind * pace)}: its computer or its connection is too slow now."
                )
                yield Obstacle(who, why, doctor, stops_run=False)


def describe_state(snapshot: SwarmSnapshot, last_round: int | None) -> tuple[str, str]:
    """Return a code and one sentence on what the run does now. `last_round` is the newest round that this
    observer has seen; None if it has seen none."""
    here = [row for row in snapshot.rows if row.role == "worker" and row.state not in ("gone", "leaving")]
    working = [row for row in here if row.state != "paused"]
    ends = snapshot.ordered.order.ends
    seen = f" The last round that was seen is {last_round:,}." if last_round is not None else ""
    count = counted(len(working), "peer")
    if not snapshot.walked_at:
        return "unknown", "This page is still looking for the run's peers."
    if working and all(row.state == "ended" for row in working):
        return "ended", "The run has ended, as its owner ordered. Its peers hand over the model."
    if not working and ends is not None and last_round is not None and last_round >= ends:
        return "ended", f"The run has ended at round {ends:,}, as its owner ordered. No peer is here."
    if snapshot.ordered.held:
        return "paused", "The owner has paused this run. Peers stay connected and start no new work."
    if not working:
        who = f"All {counted(len(here), 'peer')} here are paused" if here else "No peer is here now"
        return "empty", f"{who}, so nothing is trained.{seen} It continues when someone joins."
    if any(obstacle.stops_run for obstacle in snapshot.obstacles):
        return "stuck", "This run is stuck: nothing is trained until the cause is gone."
    training = sum(row.state == "training" for row in working)
    if not training:
        return "starting", f"{count} {_verb(len(working), 'gets', 'get')} ready to train."
    return "training", f"{counted(training, 'peer')} {_verb(training, 'trains', 'train')} this model now."


def _verb(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


def _name(observed: PeerObservation) -> str:
    return observed.record.name or short(observed.record.peer)


def _names(observed: Sequence[PeerObservation]) -> str:
    """Return the names of some peers as a list for people."""
    names = [_name(each) for each in observed[:SHOWN_NAMES]]
    more = len(observed) - len(names)
    names += [f"{more} more"] * (more > 0)
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
