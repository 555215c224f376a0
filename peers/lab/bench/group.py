"""Benchmark of how fast contributions reach a whole group, and their traffic: hundreds of `GroupRounds`.

The state machines and the sizes of their messages are the product's. Peers, contributions, links and time are
stubs. Results have the size of counts of votes. A link has a delay, no loss and no limit, so that hops and
timeouts are measured and not bandwidth. The result depends only on the seed.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from peers.worker.rounds.wire_events import read_progress, read_reference, write_announces, write_progress
from protocols.framing.frames import wire_bytes
from protocols.messages.table import Contribution, Message, Slices, encode
from protocols.messages.table import GetContributions as WireWant
from protocols.messages.table import GetIds as WireAskIds
from protocols.signed.envelope import ENVELOPE_BYTES
from protocols.signed.identity import SIGNATURE_BYTES
from protocols.signed.slices import head_bytes
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.membership.membership import SILENT_SECONDS
from swarmnet.membership.overlay import choose_helpers, choose_neighbours, hops
from swarmnet.optimizer.reduced_votes import count_code
from swarmnet.rounds import events
from swarmnet.rounds.contributors import HasWeight
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.result_table import Contributor, Draw, ReducerClass, Table, head_of
from swarmnet.run.schema import Rounds

MICROBATCH_TOKENS = 256
MICROBATCH_SECONDS = 1.0
"""Mean time between two microbatches of a peer; drawn from half of it to one and a half."""
SHARE_MICROBATCHES = 4
"""Microbatches of each peer in a round, for rounds of about four seconds."""
BLOCK_ROUNDS = 16
"""Rounds after which reducers are drawn again: the default of `rounds.snapshot_interval`."""
WINDOW = 2
"""Rounds within which a late contribution is still a correction: `rounds.window`."""
MAKE_SECONDS = 0.1
"""Time from the end of a round to a peer's own contribution."""
AUDIT_SECONDS = 0.5
"""Time from a false result to the proof at its first auditor."""
REPLACE_SECONDS = 5.0
"""Time until another helper takes the place of one that was killed or excluded."""
MIN_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.01, 0.1
"""One-way latency, drawn for each pair: 20 to 200 ms of round trip, within a country to around the world."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for contributions that arrived."""

    peer: PeerId
    ids: tuple[ContributionId, ...]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A helper takes the place of another, with the state of the peer that gets this event."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """A reducer was found to lie; the group learns this `news`."""

    news: tuple[events.Event, ...]


@dataclass(frozen=True, slots=True)
class GroupRow:
    """Result for one group. Delivery times are in seconds since a contribution was made."""

    peers: int
    links: float
    """Mean number of links of a peer."""
    hops: int
    rounds: int
    """Number of rounds that all peers settled, with equal sets."""
    delivered_p50: float
    """Median time until another peer has a contribution."""
    delivered_p999: float
    """Time until another peer has a contribution, for 999 of 1,000 (contribution, peer) pairs."""
    everywhere_p999: float
    """Time until all peers have a contribution, for 999 of 1,000 contributions."""
    settled_seconds: float
    """Median time from the end of a round to its settlement."""
    twice: int
    """Number of bodies that a peer received although it had them."""
    sent_ratio: float
    """Mean bytes that a peer sends, divided by the bytes of all contributions together."""
    most_sent_ratio: float
    """The same ratio, of the peer that sends most."""
    corrections: float
    """Share of the contributions that arrived after their round was applied."""
    line_mean: float
    """Mean bytes that a peer sends in a round, divided by the bytes of one contribution. No helpers."""
    line_most: float
    """The same ratio, of the peer that sends most."""
    helper_mean: float
    """The mean of the helpers, those that replace others counted as one with them; 0 without helpers."""
    results_ratio: float
    """Bytes of all results of a round, divided by the bytes of one contribution; 0 without reducers."""
    closed_to_held: float
    """Median time from the end of a round at the first peer until all peers have the round's set."""
    counted: float
    """Share of the contributions to settled rounds that are in their sets; the others were returned."""
    killed: int
    """Number of peers that were killed or excluded."""


@dataclass(frozen=True, slots=True)
class ArrivedSlices:
    """Slices of one contribution that arrived at a reducer; without `contribution` an empty notice."""

    peer: PeerId
    round: int
    shards: tuple[int, ...]
    contribution: ContributionId | None


class StubNetwork:
    """A virtual clock in seconds, and links that deliver messages in order, each after the link's delay."""

    def __init__(self, names: Sequence[PeerId], chance: Random) -> None:
        self.now = 0.0
        self.sent = dict.fromkeys(names, 0)
        """Bytes that each peer has sent."""
        self._chance = chance
        self._queue: list[tuple[float, int, PeerId, object]] = []
        self._sequence = 0
        self._delays: dict[tuple[PeerId, PeerId], float] = {}
        self._last_due: dict[tuple[PeerId, PeerId], float] = {}

    def post(self, receiver: PeerId, event: object, after: float = 0.0) -> None:
        """Deliver an event to a peer after so many seconds."""
        self.post_at(self.now + after, receiver, event)

    def post_at(self, due: float, receiver: PeerId, event: object) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (due, self._sequence, receiver, event))

    def send(self, sender: PeerId, receiver: PeerId, message: Message, event: object, body: int = 0) -> None:
        """Send a message; messages on one link arrive in order, as on a stream."""
        self.sent[sender] += wire_bytes(len(encode(message)), body)
        pair = (sender, receiver)
        if pair not in self._delays:
            self._delays[pair] = self._chance.uniform(MIN_DELAY_SECONDS, MAX_DELAY_SECONDS)
            self._delays[pair[::-1]] = self._delays[pair]
        arrives_at = self.now + self._delays[pair] * self._chance.uniform(1.0, 1.2)
        self._last_due[pair] = max(arrives_at, self._last_due.get(pair, 0.0))
        self.post_at(self._last_due[pair], receiver, event)

    def events_until(self, end: float) -> Iterator[tuple[PeerId, object]]:
        """Yield the events that are due up to `end` with their receivers, and advance the clock."""
        while self._queue and self._queue[0][0] <= end:
            self.now, _, receiver, event = heapq.heappop(self._queue)
            yield receiver, event


class DeliveryRecord:
    """When each contribution or result was made, reached each peer and settled; and when rounds closed."""

    def __init__(self) -> None:
        self.references: dict[ContributionId, events.Reference] = {}
        self.made_at: dict[ContributionId, float] = {}
        self.held_by: dict[ContributionId, dict[PeerId, float]] = {}
        self.tables: dict[ContributionId, Table] = {}
        """For each result of a reducer, whose slices it sums."""
        self.contributed: dict[int, set[ContributionId]] = {}
        """Contributions of each round."""
        self.settled: dict[int, dict[PeerId, tuple[tuple[ContributionId, ...], float]]] = {}
        self.closed: dict[int, float] = {}
        self.late = 0
        self.twice = 0

    def publish(self, reference: events.Reference, made_at: float) -> None:
        """Record a new member of a round's set: a contribution, or a reducer's result."""
        self.references[reference.id] = reference
        self.made_at[reference.id] = made_at
        self.held_by[reference.id] = {}

    def arrive(self, name: PeerId, reference: events.Reference, now: float, is_late: bool) -> None:
        """Record that it reached a peer. `is_late`: the peer had applied the round without it."""
        held = self.held_by[reference.id]
        self.twice += name in held
        held.setdefault(name, now)
        self.late += is_late

    def held_after(self, whole: Sequence[int]) -> list[float]:
        """Return for each round the time from its end at the first peer until all have its whole set."""
        last: dict[int, float] = {}
        for identity, held in self.held_by.items():
            number = self.references[identity].round
            last[number] = max(last.get(number, 0.0), *held.values(), self.made_at[identity])
        return [last[number] - self.closed[number] for number in whole if number in last]

    def counted(self, whole: Sequence[int], shards: int) -> float:
        """Return the share of the contributions that is in settled sets; with `shards`, of their shards."""
        made = counted = 0
        for number in whole:
            names, _ = next(iter(self.settled[number].values()))
            for identity in self.contributed.get(number, ()):
                if shards:
                    held = frozenset[int]().union(*(self.tables[name].holding(identity) for name in names))
                    made, counted = made + shards, counted + len(held)
                else:
                    made, counted = made + 1, counted + (identity in names)
        return counted / max(1, made)


class StubGroup:
    """A group of `peers` state machines, linked as by `swarmnet.membership.overlay`.

    `shards`: number of shards of a contribution, if there are reducers; 0: there are none. `helpers`: number
    of further peers that only reduce. In every round the first reducer that starts to reduce is killed
    (`kills`). With helpers, one of them is killed, or lies and is excluded (`lies`), and so is each helper
    that takes its place.
    """

    def __init__(
        self,
        *,
        peers: int,
        contribution_bytes: int,
        seed: int,
        shards: int = 0,
        kills: bool = False,
        helpers: int = 0,
        lies: bool = False,
    ) -> None:
        self.chance = Random(seed)
        self.seed = seed
        self.draw = Draw(bytes([seed]), BLOCK_ROUNDS, shards, WINDOW) if shards else None
        self.kills = kills
        self.lies = lies
        self.dead: dict[PeerId, int] = {}
        """Killed or excluded peers, with the round in which each was."""
        self.liars: dict[PeerId, int] = {}
        """Peers that have lied and are not excluded yet, with the round."""
        self.slices: dict[tuple[PeerId, int], dict[int, set[Contributor]]] = {}
        """Contributors of the slices that a reducer has received for a round, by shard."""
        self.record = DeliveryRecord()
        self.contribution_bytes = contribution_bytes
        self.rules = Rounds(
            global_batch_tokens=peers * SHARE_MICROBATCHES * MICROBATCH_TOKENS,
            contribution_timeout_seconds=5.0,
            window=WINDOW,
        )
        names = [self.id_of(number) for number in range(peers + helpers)]
        self.workers = tuple(names[:peers])
        self.helpers = tuple(names[peers:])
        """All helpers so far, also those that were killed or excluded."""
        self.faulty = 0
        """Index of the helper that is killed or lies next."""
        self.members = frozenset(names)
        self.machines = {
            name: GroupRounds(
                rules=self.rules,
                me=name,
                settled=-1,
                now=0.0,
                draw=self.draw,
                has_weight=self.filter_of(name),
            )
            for name in names
        }
        self.links = self.linked()
        self.timers = dict.fromkeys(names, float("inf"))
        self.network = StubNetwork(names, self.chance)
        for name in names:
            self.handle(name, self.size_event())
            for other in sorted(self.links[name]):
                self.handle(name, events.NeighbourJoined(other))
            if name in self.workers:
                first = self.chance.uniform(0, MICROBATCH_SECONDS)
                self.network.post_at(first, name, events.GradientAccumulated(MICROBATCH_TOKENS))

    def id_of(self, number: int) -> PeerId:
        digest = hashlib.sha256(bytes([self.seed]) + number.to_bytes(4)).hexdigest()
        return PeerId(f"12D3KooW{digest[:44]}")

    def filter_of(self, name: PeerId) -> HasWeight:
        """Return whose contributions have weight for a peer: those of peers that it has not excluded."""

        def has_weight(contributor: PeerId, round: int) -> bool:
            return round < self.machines[name].admission.convicted.get(contributor, round + 1)

        return has_weight

    def size_event(self) -> events.GroupSizeChanged:
        """Return what members learn of the group now."""
        classes = {name: ReducerClass(is_helper=True) for name in self.helpers}
        return events.GroupSizeChanged(len(self.members), self.members, classes)

    def linked(self) -> dict[PeerId, frozenset[PeerId]]:
        """Return the neighbours of each member, as its membership chooses them."""
        helpers = self.members.intersection(self.helpers)
        links = {
            name: set(choose_neighbours(name, self.members) | choose_helpers(name, helpers))
            for name in self.members
        }
        for name, others in list(links.items()):
            for other in others:
                links[other].add(name)
        return {name: frozenset(others) for name, others in links.items()}

    def handle(self, name: PeerId, event: events.Event) -> None:
        machine = self.machines[name]
        for effect in machine.handle(event, self.network.now):
            self.carry_out(name, effect)
        due = machine.next_deadline()
        if due < self.timers[name]:
            self.timers[name] = due
            self.network.post_at(due, name, events.TimePassed())

    def carry_out(self, me: PeerId, effect: events.Effect) -> None:
        """Do what the rounds machine of peer `me` requested, with messages of their real size on the
        simulated links."""
        match effect:
            case events.MakeContribution(round, _, reducers):
                self.record.closed.setdefault(round, self.network.now)
                identity = self.name(me, round, "contribution")
                self.record.contributed.setdefault(round, set()).add(identity)
                if reducers:
                    self.cut(me, round, identity, reducers)
                else:
                    self.publish(me, round, identity, self.contribution_bytes, None)
            case events.SendEmptyNotice(round, reducers):
                for peer in reducers:
                    self.network.send(me, peer, Slices(round, []), ArrivedSlices(me, round, (), None))
            case events.Reduce(round):
                self.add_up(me, round)
            case events.SendProgress():
                progress = write_progress(effect)
                for peer in effect.peers:
                    self.network.send(me, peer, progress, read_progress(me, progress))
            case events.SendAnnounce(peers, references, complete):
                for message in write_announces(references, complete):
                    announced = tuple(read_reference(entry) for entry in message.references)
                    event = events.Announced(me, announced, tuple(message.complete))
                    for peer in peers:
                        self.network.send(me, peer, message, event)
            case events.RequestContributions(peer, ids):
                self.network.send(me, peer, WireWant(list(ids)), Wanted(me, ids))
            case events.RequestIds(peer, rounds):
                self.network.send(me, peer, WireAskIds(list(rounds)), events.IdsAsked(me, rounds))
            case events.SettleRound(round, references):
                names = tuple(reference.id for reference in references)
                self.record.settled.setdefault(round, {})[me] = (names, self.network.now)

    def name(self, me: PeerId, round: int, what: str) -> ContributionId:
        return ContributionId(hashlib.sha256(f"{me}/{round}/{what}".encode()).digest()[:16])

    def publish(
        self, me: PeerId, round: int, identity: ContributionId, size: int, table: Table | None
    ) -> None:
        """Publish a member of the round's set: a contribution, or a reducer's result."""
        reference = events.Reference(round, me, identity, size)
        self.record.publish(reference, self.network.now + MAKE_SECONDS)
        self.network.post(me, events.Contributed(round, reference, table), MAKE_SECONDS)

    def cut(self, me: PeerId, round: int, identity: ContributionId, reducers: tuple[PeerId, ...]) -> None:
        self.network.post(me, events.SlicesSent(round, identity, reducers), MAKE_SECONDS)
        for peer in sorted(set(reducers)):
            shards = [shard for shard, reducer in enumerate(reducers) if reducer == peer]
            arrived = ArrivedSlices(me, round, tuple(shards), identity)
            if peer == me:
                self.network.post(me, arrived, MAKE_SECONDS)
            else:
                head = SIGNATURE_BYTES + head_bytes(len(reducers))
                size = head + self.contribution_bytes * len(shards) // len(reducers)
                self.network.send(me, peer, Slices(round, shards), arrived, size)
        if me not in reducers:
            self.network.post(me, ArrivedSlices(me, round, (), None), MAKE_SECONDS)

    def slices_arrived(self, me: PeerId, said: ArrivedSlices) -> None:
        if said.contribution is not None and self.machines[me].takes_slices(said.peer, said.round):
            kept = self.slices.setdefault((me, said.round), {})
            for shard in said.shards:
                kept.setdefault(shard, set()).add(Contributor.of(said.peer, said.contribution, 1))
        self.handle(me, events.SlicesArrived(said.peer, said.round, bool(said.shards)))

    def add_up(self, me: PeerId, round: int) -> None:
        enough_live = len(self.dead) < len(self.machines) // 4
        may_fail = me == self.helpers[self.faulty] if self.helpers else enough_live
        fails = may_fail and round not in (*self.dead.values(), *self.liars.values())
        if self.kills and fails:
            self.end(me, round, SILENT_SECONDS, events.NeighbourLeft(me))
            return
        kept = self.slices.pop((me, round), {})
        if not kept:
            self.network.post(me, events.Contributed(round, None))
            return
        assert self.draw is not None
        table = Table({shard: frozenset(held) for shard, held in kept.items()})
        numbers = 8 * self.contribution_bytes // self.draw.shards  # A contribution has a bit for each.
        sums = sum(count_code(len(held)).bytes_of(numbers) for held in kept.values())
        identity = self.name(me, round, "result")
        self.record.tables[identity] = table
        self.publish(me, round, identity, ENVELOPE_BYTES + len(head_of(table, b"")) + sums, table)
        if self.lies and fails:
            self.liars[me] = round

    def end(self, me: PeerId, round: int, after: float, *news: events.Event) -> None:
        """Kill or exclude a peer. After so many seconds the group notices and its neighbours get the `news`.
        Another helper replaces a helper."""
        if me in self.dead:  # It had two rounds to reduce.
            return
        self.dead[me] = round
        self.members -= {me}
        for name in sorted(self.members):
            self.network.post(name, self.size_event(), after)
            for event in news:
                if me in self.links[name] or not isinstance(event, events.NeighbourLeft):
                    self.network.post(name, event, after + self.chance.uniform(0.0, MAX_DELAY_SECONDS))
        if me in self.helpers:
            self.network.post(next(iter(sorted(self.members))), Replaced(), REPLACE_SECONDS)

    def replace(self, donor: PeerId) -> None:
        """Add a helper with the settled state of `donor`."""
        name, machine = self.id_of(len(self.machines)), self.machines[donor]
        settled = machine.settled
        self.faulty = len(self.helpers)
        self.helpers += (name,)
        self.members |= {name}
        self.machines[name] = GroupRounds(
            rules=self.rules,
            me=name,
            settled=settled,
            now=self.network.now,
            chain_value=machine.chain.value,
            earlier=machine.chain.earlier(settled),
            draw=self.draw,
            has_weight=self.filter_of(name),
        )
        self.timers[name], self.network.sent[name] = float("inf"), 0
        before, self.links = self.links, self.linked()
        for member in sorted(self.members):
            self.handle(member, self.size_event())
            for other in sorted(self.links[member] - before.get(member, frozenset())):
                self.handle(member, events.NeighbourJoined(other))

    def run(self, seconds: float) -> None:
        for name, event in self.network.events_until(seconds):
            if name in self.dead:
                continue
            if isinstance(event, events.TimePassed):
                if self.timers[name] == self.network.now:
                    self.timers[name] = float("inf")
                    self.handle(name, event)
            else:
                self.deliver(name, event)

    def deliver(self, name: PeerId, event: object) -> None:
        if isinstance(event, Replaced):
            self.replace(name)
            return
        if isinstance(event, events.Contributed) and name in self.liars and event.reference is not None:
            first = max(0, self.liars[name] - WINDOW + 1)
            proof = events.Convicted(name, first), events.NeighbourLeft(name)
            self.network.post(name, Excluded(proof), AUDIT_SECONDS)
        if isinstance(event, Excluded):
            self.end(name, self.liars.pop(name), 0.0, *event.news)
            return
        if isinstance(event, Wanted):
            for identity in event.ids:
                reference = self.record.references[identity]
                arrived = events.ContributionArrived(name, reference, self.record.tables.get(identity))
                self.network.send(name, event.peer, Contribution(), arrived, reference.size)
        elif isinstance(event, ArrivedSlices):
            self.slices_arrived(name, event)
        else:
            if isinstance(event, events.ContributionArrived):
                is_late = self.machines[name].applied >= event.reference.round
                if name in self.workers:
                    self.record.arrive(name, event.reference, self.network.now, is_late)
            elif isinstance(event, events.GradientAccumulated):
                pause = MICROBATCH_SECONDS * self.chance.uniform(0.5, 1.5)
                self.network.post(name, event, pause)
            assert isinstance(event, events.Event)
            self.handle(name, event)


def measure(
    peers: int,
    contribution_bytes: int,
    seconds: float,
    seed: int,
    shards: int = 0,
    kills: bool = False,
    helpers: int = 0,
    lies: bool = False,
) -> GroupRow:
    """Simulate one group for `seconds`. Raises AssertionError if two peers settled different sets."""
    group = StubGroup(
        peers=peers,
        contribution_bytes=contribution_bytes,
        seed=seed,
        shards=shards,
        kills=kills,
        helpers=helpers,
        lies=lies,
    )
    group.run(seconds)
    record = group.record
    living = set(group.workers) - group.dead.keys()
    whole = [number for number, of_round in record.settled.items() if living <= of_round.keys()]
    for number, of_round in record.settled.items():
        assert len({names for names, _ in of_round.values()}) == 1, f"different sets settled as {number}"
    pairs, everywhere = [], []
    for identity, held in record.held_by.items():
        if record.references[identity].round in whole:
            times = [at - record.made_at[identity] for at in held.values()]
            pairs += times
            others = living - {record.references[identity].peer}
            everywhere.append(max(times) if others <= held.keys() else float("inf"))
    settled = [at - record.closed[number] for number in whole for _, at in record.settled[number].values()]
    volume = sum(record.references[identity].size for identity in record.held_by)
    rounds = max(1, len(record.closed))
    lines = [group.network.sent[name] / contribution_bytes / rounds for name in group.workers]
    of_helpers = [group.network.sent[name] / contribution_bytes / rounds for name in group.helpers]
    return GroupRow(
        peers=peers,
        links=sum(map(len, group.links.values())) / len(group.links),
        hops=hops(peers),
        rounds=len(whole),
        delivered_p50=_share(pairs, 0.5),
        delivered_p999=_share(pairs, 0.999),
        everywhere_p999=_share(everywhere, 0.999),
        settled_seconds=_share(settled, 0.5),
        twice=record.twice,
        sent_ratio=sum(group.network.sent.values()) / len(group.network.sent) / volume,
        most_sent_ratio=max(group.network.sent.values()) / volume,
        corrections=record.late / max(1, len(pairs)),
        line_mean=sum(lines) / len(lines),
        line_most=max(lines),
        helper_mean=sum(of_helpers) / max(1, helpers),
        results_ratio=volume / contribution_bytes / rounds if shards else 0.0,
        closed_to_held=_share(record.held_after(whole), 0.5),
        counted=record.counted(whole, shards),
        killed=len(group.dead),
    )


def _share(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def render(rows: Sequence[GroupRow]) -> str:
    lines = [
        "| peers | links | hops | rounds settled by all | one peer, p50 (s) | one peer, p99.9 (s) "
        "| everybody, p99.9 (s) | settled after (s) | sent, mean / most | a link a round, mean / most "
        "| a helper a round | results of a round | all held after (s) | counted | killed | bodies twice "
        "| corrections |",
        "|" + "---|" * 17,
    ]
    lines += [
        f"| {row.peers} | {row.links:.1f} | {row.hops} | {row.rounds} | {row.delivered_p50:.2f} "
        f"| {row.delivered_p999:.2f} | {row.everywhere_p999:.2f} | {row.settled_seconds:.1f} "
        f"| {row.sent_ratio:.2f} / {row.most_sent_ratio:.2f} | {row.line_mean:.2f} / {row.line_most:.2f} "
        f"| {row.helper_mean:.1f} | {row.results_ratio:.2f} | {row.closed_to_held:.2f} | {row.counted:.1%} "
        f"| {row.killed} | {row.twice} | {row.corrections:.1%} |"
        for row in rows
    ]
    return "\n".join(lines)
