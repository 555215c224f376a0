"""One attacker with many keys: they announce themselves, join, and contribute invented votes as newcomers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from random import Random

from hostile import Liar
from swarm import COST_SECONDS, TINY_MODEL, Swarm, tiny_manifest

from peers.compute.executor import BACKWARD, FORWARD
from peers.worker.worker import Worker
from protocols.messages.table import Contribution, Heartbeat, Lane, Message, PeerRecord, Progress
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.records import seal_record
from protocols.signed.token_count import encode_tokens
from swarmnet.identifiers import PeerId
from swarmnet.optimizer.agreement.ledger import AgreementLedger
from swarmnet.rounds.result_table import tag_of
from swarmnet.run.schema import Data, Sync

HONEST = [f"honest {number}" for number in range(8)]
NEWCOMER = "newcomer"
ANNOUNCED_SECONDS = 60.0
"""Half of a record's life."""
GREETING_SECONDS = 30.0
"""In this time, every key greets every honest peer whose link it lacks."""
TICK_SECONDS = 1.0
NETWORKS = 16
"""Address ranges of the attacker."""
SLOWER = 50
WAYS = ("joins", "contributes", "stalls", "hurries")
"""What a key does besides greeting: nothing, or it contributes votes of chance as a newcomer, or it also says
that it is in step, and agrees to nothing, or that it has many tokens for the next round already."""
CLAIMED_TOKENS = 10**6


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
    """Seconds of compute. Microbatches take longer, so that most messages are those of the attacker."""
    return COST_SECONDS[kind] * (SLOWER if kind in (BACKWARD, FORWARD) else 1)


class FalseKey(Liar):
    """Says that it takes part, and contributes votes of chance."""

    def __init__(self, swarm: Swarm, number: int, way: str) -> None:
        super().__init__(swarm, 0, f"false {number}")
        self.address = f"/ip4/8.8.{number % NETWORKS}.{number // NETWORKS % 250 + 1}/tcp/{number + 1}"
        self.sequence = 0
        self.anchor = (-1, -1, b"")
        """What an honest peer said last of its branch."""
        self.way = way

    def received(self, _peer: PeerId, _lane: Lane, message: Message, *_: object) -> None:
        if isinstance(message, Progress):
            self.anchor = message.settled, message.anchor_round, message.anchor

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
            settled, anchor_round, anchor = self.anchor
            progress = Progress(round, 8, [], settled, self.way == "stalls", anchor_round, anchor, [])
            if self.way == "hurries":  # On the branch of those that it lies to.
                progress = Progress(
                    round + 1, CLAIMED_TOKENS, [], anchor_round, False, anchor_round, anchor, []
                )
            await self.say(peer, progress)
            await self.say(peer, Contribution(), votes)

    def _round(self) -> int:
        return max((current for current, _ in self.swarm.rounds().values()), default=0)


@dataclass
class Measured:
    """What an attack costs: with no false keys, or with many."""

    keys: int
    way: str
    joined_seconds: float = 0.0
    """Time from the start of an honest newcomer until it settles rounds with the group."""
    microbatches_per_second: float = 0.0
    rounds_per_second: float = 0.0
    cores: float = 0.0
    """Seconds of a processor core that each honest peer used in a second. The attacker's own work is counted
    too; it is a few percent (sampled)."""
    honest_weights: list[int] = field(default_factory=list)
    false_weights: list[int] = field(default_factory=list)

    def row(self) -> str:
        """A row of a table."""
        honest = sum(self.honest_weights) / len(self.honest_weights)
        false = max(self.false_weights, default=0)
        return (
            f"| {self.keys:,} | {self.way} | {self.joined_seconds:.1f} | {self.microbatches_per_second:.2f} "
            f"| {self.rounds_per_second:.2f} | {self.cores:.3f} | {honest:.1f} | {false} |"
        )


def ledger_of(worker: Worker) -> AgreementLedger:
    """The ledger that a peer has settled."""
    replica = worker.services.round_service.work.replica
    ledger = AgreementLedger()
    ledger.load(replica.settled_units()[replica.size :].numpy())
    return ledger


def is_abreast(swarm: Swarm) -> bool:
    """Whether the newcomer settles the rounds that the others settle."""
    _, settled = swarm.rounds().get(NEWCOMER, (0, -1))
    return settled >= swarm.rounds()[HONEST[0]][1] - 2


async def attack(keys: list[FalseKey], honest: list[PeerId], chance: Random) -> None:
    """Announce, greet and contribute until cancelled."""
    for key in keys:
        await key.announce()
    announced, tick = 0, 0
    greeted_per_tick = max(1, int(len(keys) * TICK_SECONDS / GREETING_SECONDS))
    announced_per_tick = max(1, int(len(keys) * TICK_SECONDS / ANNOUNCED_SECONDS))
    while True:
        for _ in range(announced_per_tick if keys else 0):
            await keys[announced % len(keys)].announce()
            announced += 1
        for number in range(greeted_per_tick if keys else 0):
            key = keys[(tick * greeted_per_tick + number) % len(keys)]
            for peer in honest:
                if peer not in key.linked():
                    await key.say(peer, Heartbeat(0, -1, 0.0, 0, True, 0, 0.1, 0, True))
        for key in keys:
            await key.take_part(chance)
        tick += 1
        await asyncio.sleep(TICK_SECONDS)


async def story(swarm: Swarm, keys: int, way: str, seconds: float) -> Measured:
    """Let honest peers settle some rounds, then attack them, and measure. Times are virtual."""
    found, chance = Measured(keys, way), Random(7)
    swarm.open()
    members = [swarm.start(name, 0, in_flight=1, compute=slow) for name in HONEST]
    await swarm.until(lambda: min((s for _, s in swarm.rounds().values()), default=-1) >= 12, 120.0)
    false = [FalseKey(swarm, number, way) for number in range(keys)]
    attacking = asyncio.create_task(attack(false, [member.peer for member in members], chance))
    await swarm.during(10.0)
    began, before, first = swarm.loop.time(), swarm.committed(0), swarm.rounds()[HONEST[0]][1]
    used_before = time.process_time()
    swarm.start(NEWCOMER, 0, in_flight=1, compute=slow)
    await swarm.until(lambda: is_abreast(swarm), 120.0)
    found.joined_seconds = swarm.loop.time() - began
    await swarm.during(max(0.0, began + seconds - swarm.loop.time()))
    passed = swarm.loop.time() - began
    found.cores = (time.process_time() - used_before) / passed / (len(members) + 1)
    found.microbatches_per_second = (swarm.committed(0) - before) / passed
    found.rounds_per_second = (swarm.rounds()[HONEST[0]][1] - first) / passed
    peers = [member.peer for member in members] + [key.identity.peer_id for key in false]
    weights = ledger_of(members[0].worker).weights(99, list(map(tag_of, peers)))
    found.honest_weights, found.false_weights = weights[: len(members)], weights[len(members) :]
    assert not attacking.done(), attacking.exception()
    attacking.cancel()
    await asyncio.gather(attacking, return_exceptions=True)
    await swarm.close()
    return found
