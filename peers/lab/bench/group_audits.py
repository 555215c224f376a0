"""When a reducer that lies is found, and what looking costs every line: the group of group.py, whose peers
look into results as swarmnet/rounds/audits.py draws them. What is computed of slices is a stub: who has all
slices of the false shard knows that it is false."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median

from peers.lab.bench.group import StubGroup
from protocols.framing.frames import wire_bytes
from protocols.messages.table import AskSlices, Evidence, Lied, Message, encode
from protocols.signed.slices import head_bytes
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds import events
from swarmnet.rounds.audits import Audits, Name, Question
from swarmnet.rounds.result_table import Table

FIRST_LIE = 2
"""The round: the group is in step by then."""


@dataclass(frozen=True, slots=True)
class Asked:
    peer: PeerId
    name: Name


@dataclass(frozen=True, slots=True)
class Given:
    """All slices of it."""

    name: Name


@dataclass(frozen=True, slots=True)
class Accused:
    peer: PeerId
    name: Name


class AuditedGroup(StubGroup):
    """From FIRST_LIE on the first reducer that publishes something lies in the first of its shards."""

    def __init__(self, peers: int, contribution_bytes: int, seed: int, shards: int) -> None:
        super().__init__(peers, contribution_bytes, seed, shards)
        self.audits = {name: Audits(f"{seed}/{name}".encode(), self.rules.window) for name in self.machines}
        for name, machine in self.machines.items():
            convicted = self.audits[name].convicted
            machine.maker_counts = partial(_counts, convicted)
        self.slice_bytes = head_bytes(shards) + contribution_bytes // shards
        self.liar: PeerId | None = None
        self.lies: dict[ContributionId, Name] = {}
        self.found_in: int | None = None
        self.found_at = 0.0
        self.known_at: dict[PeerId, float] = {}
        self.audited = dict.fromkeys(self.machines, 0)
        """Bytes that went up for audits, by peer; a proof is none."""
        self.looked = 0

    def publish(
        self, me: PeerId, round: int, identity: ContributionId, size: int, table: Table | None
    ) -> None:
        super().publish(me, round, identity, size, table)
        if table is not None and round >= FIRST_LIE:
            self.liar = self.liar or me
            if me == self.liar:
                self.lies[identity] = (identity, min(table.shards))

    def deliver(self, name: PeerId, event: object) -> None:
        match event:
            case Asked(peer, asked):
                self.give(name, peer, asked)
            case Given(given) if self.lies.get(given[0]) == given:
                self.convict(name, given)
            case Given():
                pass
            case Accused(peer, accused):
                reference = self.references[accused[0]]
                if name != reference.peer and self.audits[name].is_news(reference.peer, reference.round):
                    self.tell(name, peer, AskSlices(*accused), Asked(name, accused))
            case _:
                super().deliver(name, event)
                if isinstance(event, events.ContributionArrived):
                    self.look_into(name, event)

    def look_into(self, name: PeerId, came: events.ContributionArrived) -> None:
        reference, table = came.reference, came.table
        machine = self.machines[name]
        state = machine.rounds.get(reference.round)
        if table is None or state is None or reference.peer == name or not machine.in_step:
            return
        if reference.id not in {held.id for held in state.held.values()}:
            return
        for shard in self.audits[name].drawn(reference.id, table, len(self.members)):
            self.looked += 1
            question = (reference.id, shard)
            self.audited[name] += self.tell(name, reference.peer, AskSlices(*question), Asked(name, question))

    def give(self, me: PeerId, peer: PeerId, asked: Name) -> None:
        maker = self.references[asked[0]].peer
        slices = len(self.tables[asked[0]].shards[asked[1]])
        body = slices * self.slice_bytes + (0 if me == maker else self.references[asked[0]].size)
        frames = (slices - 1) * wire_bytes(len(encode(Evidence(*asked))), 0)
        sent = self.tell(me, peer, Evidence(*asked), Given(asked), body + frames)
        if me == maker:
            self.audited[me] += sent

    def tell(self, me: PeerId, peer: PeerId, message: Message, event: object, body: int = 0) -> int:
        self.send(me, peer, message, event, body)
        return wire_bytes(len(encode(message)), body)

    def convict(self, me: PeerId, lie: Name) -> None:
        reference, audits = self.references[lie[0]], self.audits[me]
        if me == reference.peer or not audits.is_news(reference.peer, reference.round):
            return
        if self.found_in is None:
            self.found_in, self.found_at = reference.round, self.now
        self.known_at.setdefault(me, self.now)
        audits.proves(Question(lie, reference.round, reference.peer, reference.peer, 0.0))
        self.handle(me, events.Convicted(reference.peer, audits.convicted[reference.peer]))
        self.handle(me, events.GroupCounted(len(self.members) - 1, self.members - {reference.peer}))
        if reference.peer in self.links[me]:
            self.handle(me, events.NeighbourLeft(reference.peer))
        for peer in sorted(self.links[me] - {reference.peer}):
            if self.audits[peer].is_news(reference.peer, reference.round):  # Else it would say that it knows.
                self.tell(me, peer, Lied(reference.peer, reference.round, *lie), Accused(me, lie))


def _counts(convicted: Mapping[PeerId, int], maker: PeerId, round: int) -> bool:
    return round < convicted.get(maker, round + 1)


@dataclass(frozen=True, slots=True)
class Row:
    """Of some plays. Bytes in contributions."""

    peers: int
    plays: int
    rounds: Sequence[int | None]
    """Until the liar was found, the first in which it lied counted: of every play; None: it was not."""
    known_seconds: float
    """From when it was found until everybody had the proof, the longest."""
    settled: float
    """Lies that stay in the weights, of a play, mean."""
    looked: float
    """Audits in a round."""
    line_mean: float
    line_most: float
    share: float
    """Of what goes up a line in all."""


def measure(
    peers: int, contribution_bytes: int, seconds: float, seeds: Sequence[int], shards: int
) -> Row:
    """AssertionError if two honest peers settled different sets."""
    found: list[int | None] = []
    known, settled, looked, lines, most, shares = [0.0], [], [], [], [], []
    for seed in seeds:
        group = AuditedGroup(peers, contribution_bytes, seed, shards)
        group.run(seconds)
        honest = group.machines.keys() - {group.liar}
        sets = {
            number: {names for peer, (names, _) in of_round.items() if peer in honest}
            for number, of_round in group.settled.items()
        }
        assert all(len(names) <= 1 for names in sets.values()), f"seed {seed}: different sets settled"
        found.append(None if group.found_in is None else 1 + group.found_in - FIRST_LIE)
        if group.known_at.keys() >= honest:
            known.append(max(group.known_at.values()) - group.found_at)
        counted = {name for of in sets.values() for names in of for name in names}
        settled.append(len(counted & group.lies.keys()))
        rounds = max(1, len(group.closed))
        looked.append(group.looked / rounds)
        up = [sent / rounds / contribution_bytes for sent in group.audited.values()]
        lines.append(mean(up))
        most.append(max(up))
        shares.append(sum(group.audited.values()) / sum(group.sent.values()))
    return Row(
        peers, len(seeds), found, max(known), mean(settled), mean(looked), mean(lines), max(most),
        mean(shares),
    )  # fmt: skip


def render(rows: Sequence[Row]) -> str:
    lines = [
        "| peers | plays | found in round, median / latest | not found | everybody knows after (s) "
        "| lies that stay, of a play | audits a round | a line for them, mean / most | of all it carries |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        found = [number for number in row.rounds if number is not None]
        when = f"{median(found):g} / {max(found)}" if found else "-"
        lines.append(
            f"| {row.peers} | {row.plays} | {when} | {row.plays - len(found)} | {row.known_seconds:.2f} "
            f"| {row.settled:.1f} | {row.looked:.1f} | {row.line_mean:.2f} / {row.line_most:.2f} "
            f"| {row.share:.0%} |"
        )
    return "\n".join(lines)
