"""One attacker with many keys: they announce themselves, join, and contribute invented votes as newcomers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median

from hostile import Liar
from swarm import COST_SECONDS, TINY_MODEL, Swarm, tiny_manifest

from peers.worker.worker import Worker
from protocols.messages.table import Contribution, Heartbeat, PeerRecord, Progress
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.records import seal_record
from protocols.signed.token_count import encode_tokens
from swarmnet.identifiers import PeerId
from swarmnet.optimizer.agreement.ledger import AgreementLedger
from swarmnet.rounds.result_table import tag_of
from swarmnet.run.schema import Data, Sync

HONEST = [f"honest {number}" for number in range(8)]
ANNOUNCED_SECONDS = 60.0
"""Half of a record's life."""
GREETING_SECONDS = 30.0
"""In this time, every key greets every honest peer whose link it lacks."""
TICK_SECONDS = 1.0
SLOWER = 50


def manifest():
    """One stage whose votes are weighed by agreement."""
    tiny = tiny_manifest(
        (1,),
        data=Data(seq_len=8, micro_batch_size=1),
        model=replace(TINY_MODEL, hidden_size=16, num_hidden_layers=1, intermediate_size=16),
        sync=Sync(method="sign-muon", fragments=1, learning_rate=8e-3, warmup_rounds=1, weights="agreement"),
    )
    return replace(tiny, rounds=replace(tiny.rounds, global_batch_tokens=128))


def slow(kind: int) -> float:
    """Seconds of compute: so many that most messages are those of the attacker."""
    return SLOWER * COST_SECONDS[kind]


class FalseKey(Liar):
    """Says that it takes part, and contributes votes of chance."""

    def __init__(self, swarm: Swarm, name: str) -> None:
        super().__init__(swarm, 0, name)
        self.address = f"/memory/{self.identity.peer_id}"
        self.sequence = 0
        self.way = "contributes"
        """How it behaves: `joins`, `contributes` as a newcomer does, or `stalls`: it says that it is in step,
        and agrees to nothing."""

    def received(self, *_: object) -> None: ...

    async def announce(self) -> None:
        """Store a fresh record."""
        swarm, me = self.swarm, self.identity.peer_id
        content = PeerRecord(
            me, 0, "worker", [self.address], self._round(), 1e6, "0", state="training", tokens=10**12
        )
        self.record = seal_record(self.identity, swarm.signed.run_id, content, swarm.loop.time())
        await swarm.network.directory(me).announce(swarm.signed.run_id, 0, self.record, 5.0)

    def linked(self) -> list[PeerId]:
        return [peer for (peer, _), link in self._links.items() if not link.closed]

    async def take_part(self, chance: Random) -> None:
        """What a member says each second to those that hold a link to it, and a contribution."""
        linked = self.linked()
        if not linked:
            return
        round = self._round()
        self.sequence += 1
        worker = self.swarm.members[self.swarm.living()[0]].worker
        size = worker.services.round_service.work.method.payload_bytes
        votes = seal(
            self.identity, self.swarm.signed.run_id, EnvelopeKind.CONTRIBUTION, 0, round,
            encode_tokens(8, round), chance.randbytes(size),
        )  # fmt: skip
        for peer in linked:
            await self.say(peer, Heartbeat(self.sequence, -1, 0.0, 0, True, 0, 0.1, round, True))
            if self.way == "joins":
                continue
            in_step = self.way == "stalls"
            await self.say(peer, Progress(round, 8, [], -1, in_step, -1, b"", []))
            await self.say(peer, Contribution(), votes)

    def _round(self) -> int:
        return max((current for current, _ in self.swarm.rounds().values()), default=0)


@dataclass
class Measured:
    """What an attack costs: with no false keys, or with many."""

    keys: int
    joined_seconds: list[float] = field(default_factory=list)
    """From the start of each newcomer until it trains with the group."""
    microbatches_per_second: float = 0.0
    rounds_per_second: float = 0.0
    honest_weights: list[int] = field(default_factory=list)
    false_weights: list[int] = field(default_factory=list)
    """Weights of the false keys that the ledger knows."""
    false_contributors: int = 0
    """False keys whose contributions have settled."""

    def row(self) -> str:
        joined = f"{median(self.joined_seconds):.1f}"
        return (
            f"| {self.keys:,} | {joined} | {self.microbatches_per_second:.1f} | {self.rounds_per_second:.2f} "
            f"| {sum(self.honest_weights) / len(self.honest_weights):.1f} | {max(self.false_weights, default=0)} "
            f"| {self.false_contributors} |"
        )


def ledger_of(worker: Worker) -> AgreementLedger:
    """The ledger that a peer has settled."""
    replica = worker.services.round_service.work.replica
    ledger = AgreementLedger()
    ledger.load(replica.settled_units()[replica.size :].numpy())
    return ledger


async def attack(keys: list[FalseKey], honest: list[PeerId], chance: Random) -> None:
    """Announce, greet and contribute until cancelled."""
    for key in keys:
        await key.announce()
    announced, tick = 0, 0
    greeted_per_tick = max(1, int(len(keys) * TICK_SECONDS / GREETING_SECONDS))
    announced_per_tick = max(1, int(len(keys) * TICK_SECONDS / ANNOUNCED_SECONDS))
    while True:
        for _ in range(announced_per_tick):
            await keys[announced % len(keys)].announce()
            announced += 1
        for number in range(greeted_per_tick):
            key = keys[(tick * greeted_per_tick + number) % len(keys)]
            for peer in honest:
                if peer not in key.linked():
                    await key.say(peer, Heartbeat(0, -1, 0.0, 0, True, 0, 0.1, 0, True))
        for key in keys:
            await key.take_part(chance)
        tick += 1
        await asyncio.sleep(TICK_SECONDS)


async def story(swarm: Swarm, keys: int, way: str, seconds: float, newcomers: int) -> Measured:
    """Let honest peers settle some rounds, then attack them, and measure. Times are virtual."""
    found, chance = Measured(keys), Random(7)
    swarm.open()
    members = [swarm.start(name, 0, in_flight=1, compute=slow) for name in HONEST]
    await swarm.until(lambda: min((s for _, s in swarm.rounds().values()), default=-1) >= 12, 120.0)
    false = [FalseKey(swarm, f"false {number}") for number in range(keys)]
    for key in false:
        key.way = way
    attacking = asyncio.create_task(attack(false, [member.peer for member in members], chance))
    await swarm.during(10.0)
    began, before, first = swarm.loop.time(), swarm.committed(0), swarm.rounds()[HONEST[0]][1]
    for number in range(newcomers):
        name, at = f"newcomer {number}", swarm.loop.time()
        swarm.start(name, 0, in_flight=1, compute=slow)
        await swarm.until(
            lambda name=name: swarm.rounds().get(name, (0, -1))[1] >= swarm.rounds()[HONEST[0]][1] - 2, 120.0
        )
        found.joined_seconds.append(swarm.loop.time() - at)
    await swarm.during(max(0.0, began + seconds - swarm.loop.time()))
    passed = swarm.loop.time() - began
    found.microbatches_per_second = (swarm.committed(0) - before) / passed
    found.rounds_per_second = (swarm.rounds()[HONEST[0]][1] - first) / passed
    ledger = ledger_of(members[0].worker)
    found.honest_weights = ledger.weights(99, [tag_of(member.peer) for member in members])
    found.false_weights = ledger.weights(99, [tag_of(key.identity.peer_id) for key in false])
    sets = {note.fields.get("contributor") for note in swarm.of("contribution_accepted", HONEST[0])}
    found.false_contributors = len(sets & {key.identity.peer_id for key in false})
    attacking.cancel()
    await asyncio.gather(attacking, return_exceptions=True)
    await swarm.close()
    return found
