"""What must hold of every schedule, checked offline from the peers' event logs.

The logs make a tree per stage: a node is (round, digest of the settled weights), its contents the ids that
were settled there. The initial weights and the payloads are known, so the digest of every node is computed
anew from its parent's weights and its set: a contribution that was lost or counted twice does not fit.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from peers.simulation.play import Seen
from peers.simulation.stub import SIZE, fingerprint, first_units
from peers.simulation.world import Note
from swarmnet.round_sets import kept_rounds

HEAL_SECONDS = 20.0
"""After the last heal, all peers of a stage are on one history (issue: 20 s after a partition)."""
CALLBACKS_PER_SECOND = 40_000
"""Of a whole world; busy ones take some 3,000. A loop that spins takes as many as it can."""

Weights = np.ndarray[tuple[int], np.dtype[np.int32]]
Key = tuple[int, str]
"""(round, digest) of settled weights."""


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    text: str


@dataclass(slots=True)
class Made:
    """One contribution, as its maker's log tells it."""

    who: str
    """name.life"""
    round: int
    id: str
    time: float
    payload: bytes
    returned: int = 0


@dataclass(slots=True)
class Node:
    ids: tuple[str, ...]
    parent: Key | None = None
    """None: the initial weights."""
    weights: Weights = field(default_factory=lambda: np.zeros(SIZE, np.int32))


@dataclass(slots=True)
class Stage:
    """What the logs tell of one stage."""

    made: dict[str, Made] = field(default_factory=dict)
    nodes: dict[Key, Node] = field(default_factory=dict)
    settled: dict[str, list[tuple[float, Key]]] = field(default_factory=lambda: defaultdict(list))
    """name.life -> what it settled when."""


def check(seen: Seen) -> list[Violation]:
    """Everything that is violated; empty: all held."""
    found = [Violation("no exception escapes", f"{name}: {error}") for name, error in seen.escaped]
    found += list(_progress(seen)) + list(_bounded(seen)) + list(_committed(seen))
    if not seen.options.real:
        stages, problems = read(seen)
        found += problems
        for number, stage in stages.items():
            found += [Violation(v.rule, f"stage {number}: {v.text}") for v in _of_stage(seen, number, stage)]
    return found


# -- reading ----------------------------------------------------------------------------------------------


def stages_of(notes: list[Note]) -> dict[str, int]:
    """name.life -> the stage that it held."""
    return {who(note): note.fields["stage"] for note in notes if note.event == "assembled"}


def who(note: Note) -> str:
    return f"{note.name}.{note.life}"


def _hex(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def read(seen: Seen) -> tuple[dict[int, Stage], list[Violation]]:
    """The stages' trees, and what contradicts itself while they are built."""
    stage_of = stages_of(seen.notes)
    stages: dict[int, Stage] = defaultdict(Stage)
    problems: list[Violation] = []
    payloads: dict[tuple[str, int], bytes] = {}
    made_by_payload: dict[bytes, Made] = {}
    for note in seen.notes:
        me = who(note)
        if me not in stage_of:
            continue
        stage = stages[stage_of[me]]
        if note.event == "payload":
            payloads[(me, note.fields["round"])] = note.fields["payload"]
        elif note.event == "made":
            round, name = note.fields["round"], _hex(note.fields["id"])
            made = Made(me, round, name, note.time, payloads[(me, round)])
            stage.made[name] = made_by_payload[made.payload] = made
        elif note.event == "returned" and note.fields["payload"] in made_by_payload:
            made_by_payload[note.fields["payload"]].returned += 1
        elif note.event == "settled":
            key = (note.fields["round"], _hex(note.fields["digest"]))
            ids = tuple(note.fields["ids"])
            stage.settled[me].append((note.time, key))
            known = stage.nodes.setdefault(key, Node(ids))
            if set(known.ids) != set(ids):
                problems.append(Violation("one digest, one set", f"{me} round {key[0]}"))
    for stage in stages.values():
        problems += list(_weigh(stage))
    return dict(stages), problems


def _weigh(stage: Stage) -> Iterator[Violation]:
    """Find every node's parent by its weights."""
    by_round: dict[int, list[Key]] = defaultdict(list)
    for key in sorted(stage.nodes):
        node = stage.nodes[key]
        unknown = [name for name in node.ids if name not in stage.made]
        if unknown:
            yield Violation("only what was made is settled", f"round {key[0]}: {unknown}")
            continue
        step = np.zeros(SIZE, np.int32)
        for name in node.ids:
            step += fingerprint(stage.made[name].payload)
        candidates: list[Key | None] = list(by_round[key[0] - 1]) if key[0] else [None]
        for parent in candidates:
            before = first_units().numpy() if parent is None else stage.nodes[parent].weights
            weights = before + step
            if _digest(key[0], weights) == key[1]:
                node.parent, node.weights = parent, weights
                break
        else:
            yield Violation(
                "settled weights are the sum of the settled sets",
                f"round {key[0]}, digest {key[1][:12]}: no weights before it and its {len(node.ids)} fit",
            )
        by_round[key[0]].append(key)


def _digest(round: int, weights: Weights) -> str:
    data = round.to_bytes(8, "little", signed=True) + weights.astype("<i4").tobytes()
    return hashlib.sha256(data).hexdigest()


# -- rules ------------------------------------------------------------------------------------------------


def _of_stage(seen: Seen, number: int, stage: Stage) -> Iterator[Violation]:
    living = [me for me, held in seen.living.items() if held == number]
    last = {me: stage.settled[me][-1][1] for me in living if stage.settled[me]}
    if not last:
        yield Violation("progress after the last heal", "nobody that lives has settled anything")
        return
    final = _path(stage, max(last.values()))
    for me, key in last.items():
        if key[0] in final and final[key[0]] != key:
            yield Violation("one history at the end", f"{me} is at {key[0]} on another history")
    healed = seen.healed_at + HEAL_SECONDS
    for me in living:
        wrong = [key[0] for time, key in stage.settled[me] if time > healed and final.get(key[0]) != key]
        wrong = [round for round in wrong if round in final]
        if wrong:
            yield Violation("one digest 20 s after the last heal", f"{me} settled {wrong} on another history")
    yield from _contributions(seen, stage, final)


def _path(stage: Stage, key: Key | None) -> dict[int, Key]:
    """Round -> node, from the start to `key`."""
    path: dict[int, Key] = {}
    while key is not None and key in stage.nodes:
        path[key[0]] = key
        key = stage.nodes[key].parent
    return path


def _contributions(seen: Seen, stage: Stage, final: dict[int, Key]) -> Iterator[Violation]:
    """Every contribution is in the final history once, or came back to its maker, or its maker is gone."""
    counts = Counter(name for key in final.values() for name in stage.nodes[key].ids)
    decided = max(final) - 2 * seen.rules.window - 2
    for name, count in counts.items():
        if count > 1:
            yield Violation("nothing settled twice", f"{name} {count} times")
    for made in stage.made.values():
        where = f"{made.id[:12]} of {made.who} for round {made.round}, made at {made.time:.2f}"
        if made.returned > 1:
            yield Violation("nothing offered twice", f"{where} came back {made.returned} times")
        elif made.id in counts and made.returned:
            yield Violation("nothing settled twice", f"{where} is settled and came back")
        elif made.id in counts or made.returned or made.who not in seen.living:
            continue
        elif made.round <= decided:
            yield Violation("nothing vanishes", f"{where} is neither settled nor did it come back")


def _committed(seen: Seen) -> Iterator[Violation]:
    committed = Counter(
        (who(note), note.fields["origin"], note.fields["counter"])
        for note in seen.notes
        if note.event == "committed"
    )
    for (me, origin, counter), count in committed.items():
        if count > 1:
            text = f"{me}: {origin} {counter}, {count} times"
            yield Violation("a microbatch is committed once per peer", text)


def _progress(seen: Seen) -> Iterator[Violation]:
    if not seen.calm and not seen.escaped:
        yield Violation("progress after the last heal", "; ".join(seen.standing))
    last = 0
    for sample in seen.samples:
        if sample.callbacks - last > CALLBACKS_PER_SECOND:
            text = f"{sample.callbacks - last} callbacks before {sample.time:.0f} s"
            yield Violation("nothing spins", text)
        last = sample.callbacks


def _bounded(seen: Seen) -> Iterator[Violation]:
    rounds = 2 * kept_rounds(seen.rules) + 2 * seen.rules.window
    peers = 2 * seen.peers
    most = {
        "rounds": rounds, "history": kept_rounds(seen.rules), "stored": 2 * rounds * peers,
        "pulls": rounds * peers, "jobs": 4096, "bodies": 4096,
    }  # fmt: skip
    for name, limit in most.items():
        largest = max((sample.largest.get(name, 0) for sample in seen.samples), default=0)
        if largest > limit:
            yield Violation("memory is bounded", f"{name}: {largest}, at most {limit}")
