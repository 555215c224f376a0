"""The invariants of every fault schedule, checked offline from the peers' event logs (read by trees.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from peers.lab.faults.faults import Flap, Join, Noise, OneWay, Partition, PoliteLeave, Skew, Slow
from peers.lab.faults.moves import Move
from peers.lab.faults.play import EXPERTS, HEAL_SECONDS, ScheduleRecord
from peers.lab.faults.trees import (
    Key,
    Stage,
    Violation,
    parts_of,
    process_of,
    read,
    stages_of,
    with_processes,
)
from peers.lab.world.world_events import (
    Crashed,
    LeaveRequested,
    MoveRequested,
    Noticed,
    StageBack,
    StageKilled,
)
from peers.state.checkpoint_file import KEPT
from peers.telemetry import log_events
from swarmnet.membership.membership import SILENT_SECONDS
from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.snapshots.fetch import AGREEMENT

CALLBACKS_PER_PEER = 2_500
"""Maximum per peer and second; busy worlds take about 200. A busy loop takes as many as it can."""
UNDISTURBED_SECONDS = 10.0
"""Time in which a restarted stage assembles again, if no other fault disturbs it."""
GENTLE = (Join, PoliteLeave, Move, Skew, Slow)
"""Faults that kill, stop or cut off no peer."""
UNNOTICED_SECONDS = SILENT_SECONDS + 2.0
"""Time in which all peers notice that a peer is gone, or receive its leave message."""
UNDER_WAY_SECONDS = 2.0
"""Decisions this close to the end may still wait for the compute thread."""


def check(seen: ScheduleRecord) -> list[Violation]:
    """Return all violations of the invariants; an empty list if all invariants hold."""
    found = [Violation("no exception escapes", f"{name}: {error}") for name, error in seen.escaped]
    found += list(_progress(seen)) + list(_bounded(seen)) + list(_committed(seen))
    found += list(_emptied(seen)) + list(_slandered(seen))
    stages, problems = read(seen)
    found += problems
    rules = _of_real_stage if seen.options.real else _of_stage
    for number, stage in stages.items():
        found += [Violation(v.rule, f"stage {number}: {v.text}") for v in rules(seen, number, stage)]
    return found


def _of_real_stage(seen: ScheduleRecord, number: int, stage: Stage) -> Iterator[Violation]:
    """Check a stage with real weights, which has no tree.

    The peers that are alive at the end have settled the same weights since the last heal.
    """
    digests: dict[int, tuple[str, str]] = {}
    healed = seen.healed_at + HEAL_SECONDS
    for me in (me for me, held in seen.living.items() if held == number):
        for place, (time, (round, digest)) in enumerate(stage.settled[me], 1):
            if time <= healed and place < len(stage.settled[me]):
                continue  # The peer may have left that branch since.
            other, first = digests.setdefault(round, (me, digest))
            if first != digest:
                yield Violation("one digest soon after the last heal", f"{me} and {other} at round {round}")
    if seen.options.experts:
        yield from _every_expert(seen, number)


def _every_expert(seen: ScheduleRecord, number: int) -> Iterator[Violation]:
    """At the end some peer trains each expert shard, if there are enough peers."""
    held = {
        me: note.what.group
        for me, note in with_processes(seen.notes)
        if isinstance(note.what, log_events.ExpertsReassigned) and seen.living.get(me) == number
    }
    missing = set(range(EXPERTS.groups)) - set(held.values())
    if missing and len(held) >= EXPERTS.groups:
        yield Violation("every expert is trained in the end", f"no peer trains group {missing}; {held}")


def _of_stage(seen: ScheduleRecord, number: int, stage: Stage) -> Iterator[Violation]:
    """Check a stage with stubbed weights: one branch at the end, and every contribution accounted for."""
    living = [me for me, held in seen.living.items() if held == number]
    replaced = _replaced_states(seen)
    last = {me: stage.settled[me][-1][1] for me in living if stage.settled[me] and me not in replaced}
    if not last:
        yield Violation("progress after the last heal", "no living peer has settled anything")
        return
    final = _path(stage, max(last.values()))
    for me, key in last.items():
        if key[0] in final and final[key[0]] != key:
            yield Violation("one branch at the end", f"{me} is at {key[0]} on another branch")
    healed = seen.healed_at + HEAL_SECONDS
    for me in living:
        wrong = [key[0] for time, key in stage.settled[me] if time > healed and final.get(key[0]) != key]
        wrong = [round for round in wrong if round in final]
        if wrong:
            yield Violation("one digest soon after the last heal", f"{me} settled {wrong} on another branch")
    yield from _contributions(seen, stage, final)
    yield from _held(stage, final)
    yield from _restarts(seen, number, stage, final)


def _replaced_states(seen: ScheduleRecord) -> set[str]:
    """Return the peers that loaded a fetched state and have settled nothing since.

    The last round that such a peer settled lies on the branch that it abandoned.
    """
    settled: dict[str, int] = {}
    replaced: set[str] = set()
    for me, note in with_processes(seen.notes):
        match note.what:
            case log_events.Settled(round):
                settled[me] = round
                replaced.discard(me)
            case log_events.InStep(settled=fetched) if fetched > settled.get(me, fetched):
                replaced.add(me)
    return replaced


def _path(stage: Stage, key: Key | None) -> dict[int, Key]:
    """Return the nodes from the start to `key`, by round."""
    path: dict[int, Key] = {}
    while key is not None and key in stage.nodes:
        path[key[0]] = key
        key = stage.nodes[key].parent
    return path


def _contributions(seen: ScheduleRecord, stage: Stage, final: dict[int, Key]) -> Iterator[Violation]:
    """Check that no contribution is lost or settled twice.

    Each one is on the final branch once, or was returned to its contributor, or its contributor is gone. In
    schedules that kill or cut off no peer the last case is no excuse: a peer that moves or leaves hands over
    its contributions. The newest ones, made after the last heal, may still be undecided.
    """
    gentle = all(isinstance(fault, GENTLE) for fault in seen.faults)
    counts = Counter(part for key in final.values() for part in stage.nodes[key].parts)
    decided, late = max(final) - 2 * seen.rules.window - 2, seen.ended_at - UNDER_WAY_SECONDS
    for made in stage.made.values():
        for part in parts_of(made, seen.reduced):
            where = f"{made.id[:12]} of {made.who} for round {made.round}, made at {made.time:.2f}"
            where += f", shard {part[-1]}" if seen.reduced is not None else ""
            returned = made.returned[part] + (made.returned[made.payload] if part != made.payload else 0)
            if counts[part] > 1:
                yield Violation("nothing settled twice", f"{where}: {counts[part]} times")
            if returned > 1:
                yield Violation("nothing offered twice", f"{where} came back {returned} times")
            elif counts[part] and returned:
                yield Violation("nothing settled twice", f"{where} is settled and came back")
            lives = made.who in seen.living
            if counts[part] or returned or made.given_back_at > late or not (lives or gentle):
                continue
            if made.round <= decided or (lives and made.time <= seen.healed_at):
                yield Violation("nothing vanishes", f"{where} is neither settled nor did it come back")


def _held(stage: Stage, final: dict[int, Key]) -> Iterator[Violation]:
    """Check the set of each round: it has what all peers held that settled the round.

    This includes contributions whose contributor is gone. If one peer made two, the smaller one is enough.
    """
    for key in final.values():
        ids = stage.nodes[key].ids
        members = stage.results or stage.made
        with_processes = {members[name].who.partition(".")[0] for name in ids}
        for name in stage.held.get(key, set()).difference(ids):
            made = members.get(name)
            if made is not None and made.who.partition(".")[0] not in with_processes:
                text = f"{name[:12]} of {made.who}, round {key[0]}"
                yield Violation("what everybody held is settled", text)


def _restarts(seen: ScheduleRecord, number: int, stage: Stage, final: dict[int, Key]) -> Iterator[Violation]:
    """Check that a stage whose peers were all killed resumes from the right round.

    This is the newest round that two thirds of its disks hold. The check is skipped if the links between its
    peers were disturbed, or if another peer entered the stage meanwhile.
    """
    stage_of, killed_at = stages_of(seen.notes), -1.0
    assembled = [
        (who, other)
        for who, other in with_processes(seen.notes)
        if isinstance(other.what, log_events.Assembled)
    ]
    for note in seen.notes:
        if isinstance(note.what, StageKilled) and note.what.stage == number:
            killed_at = note.time
        elif isinstance(note.what, StageBack) and note.what.stage == number:
            until = note.time + UNDISTURBED_SECONDS
            others = [
                other
                for who, other in assembled
                if killed_at < other.time < until
                and stage_of[who] == number
                and other.name not in note.what.names
            ]
            disks = [_disk(stage, name, killed_at) for name in note.what.names if name not in note.what.lost]
            if others or not disks or _disturbed(seen, killed_at, until):
                continue
            named = Counter(key for disk in disks for key in disk)
            shared = [key for key, count in named.items() if count >= AGREEMENT * len(disks)]
            newest = max(shared, default=None)
            if newest is not None and final.get(newest[0]) != newest:
                text = f"round {newest[0]} was on two thirds of the disks at {killed_at:.2f}, and is lost"
                yield Violation("no settled round is lost", text)


def _disk(stage: Stage, name: str, at: float) -> set[Key]:
    """Return the rounds whose checkpoints a peer's disk holds at the time `at`."""
    saved = sorted({key for time, key in stage.saved[name] if time <= at})
    return set(saved[-KEPT:])


def _disturbed(seen: ScheduleRecord, since: float, until: float) -> bool:
    return any(
        isinstance(fault, (Flap, Noise, OneWay, Partition)) and fault.at < until and fault.until > since
        for fault in seen.faults
    )


def _committed(seen: ScheduleRecord) -> Iterator[Violation]:
    stage_of = stages_of(seen.notes)
    committed = Counter(
        (process_of(note), stage_of[who], note.what.origin, note.what.counter)
        for who, note in with_processes(seen.notes)
        if isinstance(note.what, log_events.Committed)
    )
    for (me, stage, origin, counter), count in committed.items():
        if count > 1:
            text = f"{me} at stage {stage}: {origin} {counter}, {count} times"
            yield Violation("a microbatch is committed once per peer", text)


def _emptied(seen: ScheduleRecord) -> Iterator[Violation]:
    """Check that a peer which moves by its own decision leaves an active peer behind in its stage.

    A peer that was killed or ordered away just before also counts: the moving peer could not know.
    """
    serving: dict[str, int] = {}
    """Stage in which each process is active, or was until its time in `gone`."""
    gone: dict[str, float] = {}
    stage_of = stages_of(seen.notes)
    for who, note in with_processes(seen.notes):
        me = process_of(note)
        match note.what:
            case log_events.InStep():
                serving[me] = stage_of[who]
            case log_events.Assembled():
                serving.pop(me, None)
                gone.pop(me, None)
            case Crashed() | LeaveRequested() | MoveRequested():
                gone[me] = note.time
            case Noticed("moves"):
                stage = serving.pop(me, None)
                stay = [
                    other
                    for other, held in serving.items()
                    if held == stage and gone.get(other, note.time) >= note.time - UNNOTICED_SECONDS
                ]
                if stage is not None and not stay:
                    text = f"{who} left stage {stage} at {note.time:.2f}, where no other peer was active"
                    yield Violation("a stage is never emptied by a move", text)


def _slandered(seen: ScheduleRecord) -> Iterator[Violation]:
    """Check that no audit accuses a reducer: all reducers are honest here."""
    for note in seen.notes:
        if isinstance(note.what, log_events.Audited) and note.what.code in ("lied", "not_in_order"):
            text = f"{seen.names[note.what.peer]}, round {note.what.round}: {note.what.code}"
            yield Violation("nobody honest is found lying", f"{process_of(note)} of {text}")


def _progress(seen: ScheduleRecord) -> Iterator[Violation]:
    if not seen.calm and not seen.escaped:
        yield Violation("progress after the last heal", "; ".join(seen.standing))
    last = 0
    for sample in seen.samples:
        if sample.callbacks - last > CALLBACKS_PER_PEER * seen.peers:
            text = f"{sample.callbacks - last} callbacks before {sample.time:.0f} s"
            yield Violation("nothing spins", text)
        last = sample.callbacks


def _bounded(seen: ScheduleRecord) -> Iterator[Violation]:
    rounds = 2 * kept_rounds(seen.rules) + 2 * seen.rules.window
    peers = 2 * seen.peers
    most = {
        "rounds": rounds,
        "history": kept_rounds(seen.rules),
        "stored": 2 * rounds * peers,
        "pulls": rounds * peers,
        "jobs": 4096,
        "bodies": 4096,
    }
    for name, limit in most.items():
        largest = max((sample.largest.get(name, 0) for sample in seen.samples), default=0)
        if largest > limit:
            yield Violation("memory is bounded", f"{name}: {largest}, at most {limit}")
