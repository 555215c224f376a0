"""Build the tree of settled weights of each stage from the peers' event logs.

A node is (round, digest of the settled weights) and contains the ids that were settled there. The initial
weights and the payloads are known. The digest of every node is therefore computed again from its parent's
weights and its set; a contribution that was lost or counted twice does not fit. Real weights are no sums of
payloads, so their nodes have no parents.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np

from peers.lab.faults.play import Options, ScheduleRecord
from peers.lab.world.journal import RecordedEvent
from peers.lab.world.stub_stage import SIZE, StubReduced, fingerprint, first_units, slice_of
from peers.lab.world.world_events import Payload, Returned, Summed
from peers.telemetry import log_events
from swarmnet.identifiers import PeerId

Weights = np.ndarray[tuple[int], np.dtype[np.int32]]
Key = tuple[int, str]
"""(round, digest) of settled weights."""


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold, and where."""

    rule: str
    text: str


@dataclass(slots=True)
class MadeContribution:
    """One contribution, from its contributor's log."""

    who: str
    """Contributor, as `with_processes` names it."""
    round: int
    id: str
    time: float
    payload: bytes
    returned: Counter[bytes] = field(default_factory=Counter)
    """How often each of its parts was returned."""
    given_back_at: float = float("-inf")
    """Time of the decision to return it; the compute thread returns it later."""


@dataclass(slots=True)
class Node:
    """The settled weights after a round."""

    ids: tuple[str, ...]
    """Ids of the settled set."""
    parts: tuple[bytes, ...] = ()
    """Payloads, or slices of them, that the set adds to the weights."""
    others: list[tuple[str, ...]] = field(default_factory=list)
    """Other sets with the same digest: a result without effect adds nothing to the weights."""
    parent: Key | None = None
    """Node before this one; None: the initial weights."""
    weights: Weights = field(default_factory=lambda: np.zeros(SIZE, np.int32))


@dataclass(slots=True)
class Stage:
    """The tree of one stage, and its contributions."""

    made: dict[str, MadeContribution] = field(default_factory=dict)
    results: dict[str, MadeContribution] = field(default_factory=dict)
    """Results by id, if there are reducers; sets consist of results then."""
    nodes: dict[Key, Node] = field(default_factory=dict)
    settled: dict[str, list[tuple[float, Key]]] = field(default_factory=lambda: defaultdict(list))
    """The nodes that each peer settled, with the time."""
    held: dict[Key, set[str]] = field(default_factory=dict)
    """Ids of a node's round that were held by all peers that settled the node."""
    saved: dict[str, list[tuple[float, Key]]] = field(default_factory=lambda: defaultdict(list))
    """The nodes that each peer name saved, in any of its processes, with the time."""


def process_of(note: RecordedEvent) -> str:
    """Return the process of an event, as name.life."""
    return f"{note.name}.{note.life}"


def with_processes(notes: Iterable[RecordedEvent]) -> Iterator[tuple[str, RecordedEvent]]:
    """Yield every event with its contributor: name.life of the process, and `+n` after its nth move.

    A peer that moves hands over its contributions, and makes new ones like another contributor.
    """
    moves: dict[str, int] = {}
    for note in notes:
        me = process_of(note)
        if isinstance(note.what, log_events.Assembled):
            moves[me] = moves.get(me, -1) + 1
        yield (f"{me}+{moves[me]}" if moves.get(me) else me), note


def stages_of(notes: Iterable[RecordedEvent]) -> dict[str, int]:
    return {
        who: note.what.stage
        for who, note in with_processes(notes)
        if isinstance(note.what, log_events.Assembled)
    }


def parts_of(made: MadeContribution, reduced: StubReduced | None) -> list[bytes]:
    """Return the parts of a contribution; each must be settled once, or be returned once."""
    return [made.payload] if reduced is None else reduced.slices(made.payload)


def read(seen: ScheduleRecord) -> tuple[dict[int, Stage], list[Violation]]:
    """Return the stages' trees, and the violations that were found while building them."""
    stage_of = stages_of(seen.notes)
    stages: dict[int, Stage] = defaultdict(Stage)
    problems: list[Violation] = []
    readers: dict[str, _Reader] = {}
    made_by_payload: dict[bytes, MadeContribution] = {}
    for me, note in with_processes(seen.notes):
        if me not in stage_of:
            continue
        if me not in readers:
            readers[me] = _Reader(
                me=me,
                name=note.name,
                stage=stages[stage_of[me]],
                made_by_payload=made_by_payload,
                options=seen.options,
            )
        problems += readers[me].take(note)
    if not seen.options.real:
        peer_of = {name: peer for peer, name in seen.names.items()}
        for stage in stages.values():
            problems += list(_weigh(stage, seen.reduced, peer_of))
    return dict(stages), problems


@dataclass(eq=False, kw_only=True)
class _Reader:
    """Reads the log of one process while it is in one stage."""

    me: str
    name: str
    stage: Stage
    made_by_payload: dict[bytes, MadeContribution]
    options: InitVar[Options]

    def __post_init__(self, options: Options) -> None:
        self._is_reduced = options.sharded
        self._is_real = options.real
        self._payloads: dict[int, bytes] = {}
        self._results: dict[int, bytes] = {}
        self._held: dict[int, set[str]] = defaultdict(set)
        self._keys: dict[int, Key] = {}

    def take(self, note: RecordedEvent) -> Iterator[Violation]:
        match note.what:
            case Payload(round, payload):
                self._payloads[round] = payload
            case Summed(round, payload):
                self._results[round] = payload
            case log_events.Reduced(round, id):
                self.stage.results[id] = MadeContribution(
                    self.me, round, id, note.time, self._results.get(round, b"")
                )
                self._held[round].add(id)
            case log_events.ContributionMade(round, id):
                made = MadeContribution(self.me, round, id, note.time, self._payloads.get(round, b""))
                self.stage.made[id] = made
                self.made_by_payload[made.payload] = made
                if not self._is_reduced:
                    self._held[round].add(id)
            case log_events.ContributionAccepted(round, id):
                self._held[round].add(id)
            case log_events.ContributionReturned(round=round, id=id):
                self._held[round].discard(id)
                if (own := self.stage.made.get(id)) is not None:
                    own.given_back_at = note.time
            case log_events.Resync():
                self._held.clear()  # The state is fetched again, with its open contributions.
            case Returned(_, payload, shards) if payload in self.made_by_payload:
                parts = [slice_of(payload, shard) for shard in shards] or [payload]
                self.made_by_payload[payload].returned.update(parts)
            case log_events.Saved(round) if round in self._keys:
                self.stage.saved[self.name].append((note.time, self._keys[round]))
            case log_events.Settled(round, digest, ids):
                yield from self._settled(note.time, (round, digest), tuple(ids))

    def _settled(self, time: float, key: Key, ids: tuple[str, ...]) -> Iterator[Violation]:
        self._keys[key[0]] = key
        self.stage.settled[self.me].append((time, key))
        held = self._held.pop(key[0], set())
        self.stage.held[key] = self.stage.held.get(key, held) & held
        known = self.stage.nodes.setdefault(key, Node(ids))
        # In a model this small a reducer may have no weights, so that its result has no effect.
        if set(known.ids) != set(ids) and self._is_reduced:
            known.others.append(ids)
        elif set(known.ids) != set(ids) and not self._is_real:
            yield Violation("one digest, one set", f"{self.me} round {key[0]}")


def _counting(
    reduced: StubReduced, of_set: Sequence[MadeContribution], peer_of: Mapping[str, str], round: int
) -> tuple[bytes, ...]:
    """Return the slices of these results that count."""
    results = {PeerId(peer_of[one.who.partition(".")[0]]): one.payload for one in of_set}
    return tuple(reduced.counting(results, round))


def _weigh(stage: Stage, reduced: StubReduced | None, peer_of: Mapping[str, str]) -> Iterator[Violation]:
    """Find every node's parent by its weights."""
    members = stage.made if reduced is None else stage.results
    by_round: dict[int, list[Key]] = defaultdict(list)
    for key in sorted(stage.nodes):
        node = stage.nodes[key]
        unknown = [name for name in node.ids if name not in members]
        if unknown:
            yield Violation("only what was made is settled", f"round {key[0]}: {unknown}")
            continue
        if reduced is None:
            node.parts = tuple(members[name].payload for name in node.ids)
        else:
            node.parts, *others = (
                _counting(reduced, [members[name] for name in ids if name in members], peer_of, key[0])
                for ids in (node.ids, *node.others)
            )
            if any(sorted(parts) != sorted(node.parts) for parts in others):
                yield Violation("one digest, one set", f"round {key[0]}")
        step = np.zeros(SIZE, np.int32)
        for part in node.parts:
            step += fingerprint(part)
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
