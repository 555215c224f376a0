"""One peer of the swarm is hostile: authenticated, greeted, and free to say anything to a live worker.

Whatever it says, nothing is raised, what is refused is counted, memory stays bounded, and afterwards the
swarm trains on and settles equal weights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random

import msgspec
import pytest
from hostile import ACT_SHAPE, BODIES, BODY_BYTES, Liar, messages
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from swarm import Swarm, nothing_is_committed_twice, shared_rounds, sign, tiny_manifest

from peers.lab.world.virtual_time import run
from protocols.messages.table import (
    Act,
    Announce,
    Contribution,
    ContributionRef,
    GetChunk,
    GetManifest,
    GetState,
    Grad,
    Heartbeat,
    Nack,
    PeerRecord,
    PeerRecords,
    Progress,
    SnapshotOffer,
    SnapshotRoot,
)
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, seal
from protocols.signed.identity import Identity
from protocols.signed.records import seal_record
from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.rounds.fetch_scheduler import MAX_PULLS
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.history import START

HONEST = {"a": 0, "c": 1, "d": 1, "e": 2}
MANIFEST = tiny_manifest()
NAMES = [Identity.from_seed(name.encode()).peer_id for name in (*HONEST, "liar")]
LANES = st.sampled_from(["group", "data", "bulk"])
LATE_SECONDS = 40.0
"""A liar may cost the group a finality_timeout_seconds here and a back-off there, but no more than this."""


def play(stage: int, story: Callable[[Swarm, Liar], Awaitable[None]]) -> Swarm:
    """Four honest peers and a liar of `stage`; afterwards the liar is gone and all must be well."""
    swarm = Swarm(MANIFEST, stub=True)

    async def whole() -> None:
        swarm.open()
        for name, at in HONEST.items():
            swarm.start(name, at, in_flight=2)
        await swarm.until(lambda: swarm.committed(0) >= 10, 30.0)
        liar = Liar(swarm, stage)
        for name in HONEST:
            await liar.say(swarm.members[name].peer, GetState())
        await swarm.during(0.5)
        await story(swarm, liar)
        await swarm.during(2.0)
        bounded(swarm)
        await liar.transport.close()
        commits, settled = swarm.committed(0), len(swarm.of("settled", "c"))
        await swarm.until(lambda: swarm.committed(0) >= commits + 20, LATE_SECONDS)
        await swarm.until(lambda: len(swarm.of("settled", "c")) >= settled + 3, LATE_SECONDS)
        await swarm.close()

    run(whole())
    nothing_is_committed_twice(swarm)
    assert shared_rounds(swarm) > 0
    return swarm


def bounded(swarm: Swarm) -> None:
    """Nothing that a worker keeps grows with what it is told."""
    rules = MANIFEST.rounds
    for name in swarm.living():
        worker = swarm.members[name].worker
        update, data = worker.services.round_service, worker.services.pipeline_service
        assert len(update.rounds.rounds) <= 2 * (kept_rounds(rules) + rules.window)
        assert len(update.rounds.history) <= kept_rounds(rules) + 1
        assert len(update.rounds.pulls) <= MAX_PULLS
        assert len(update.store.stored) <= 6 * (2 * kept_rounds(rules) + rules.window)
        assert data.pipeline.under_way <= data.pipeline.slots
        assert len(data.bodies) <= len(data.pipeline.jobs)
        assert data.work.stage_compute.open <= data.pipeline.slots
        assert len(data.ledger.rerouted) < 12
        assert len(worker.services.links.membership.peers) < 80
        assert sum(map(len, worker.services.links._link_pool.waiting.values())) <= 64
        assert len(worker.services.links._link_pool._tasks) < 50


def refusals(swarm: Swarm, name: str) -> int:
    worker = swarm.members[name].worker
    return sum(worker.services.links.traffic.refused.values()) + sum(
        count for code, count in worker.services.round_service.outcomes.items() if code != "accepted"
    )


@settings(
    max_examples=max(1, settings.default.max_examples // 10),
    deadline=None, suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)  # fmt: skip
@given(
    st.sampled_from([0, 1, 2]), st.lists(st.tuples(LANES, messages(NAMES), BODIES), min_size=20, max_size=60)
)
def test_any_messages_with_any_fields_leave_the_worker_as_it_was(stage, said):
    async def story(swarm: Swarm, liar: Liar) -> None:
        for lane, message, body in said:
            for name in ("c", "d"):
                await liar.say(swarm.members[name].peer, message, body, lane)
            await swarm.during(0.02)

    play(stage, story)


def test_envelopes_of_other_runs_stages_and_kinds_and_bent_ones_are_refused_and_counted():
    swarm_run = sign(MANIFEST).run_id
    other_run = sign(replace(MANIFEST, name="another")).run_id

    async def story(swarm: Swarm, liar: Liar) -> None:
        victim = swarm.members["c"].worker
        round, me = victim.services.round_service.rounds.current, liar.identity
        honest = next(iter(victim.services.round_service.store.stored.values())).data
        payload = honest[ENVELOPE_BYTES:]
        bent = bytearray(seal(me, swarm_run, EnvelopeKind.CONTRIBUTION, 1, round, round, payload))
        bent[-1] ^= 1
        bodies = [
            seal(me, other_run, EnvelopeKind.CONTRIBUTION, 1, round, round, payload),
            seal(me, swarm_run, EnvelopeKind.CONTRIBUTION, 0, round, round, payload),
            seal(me, swarm_run, EnvelopeKind.SNAPSHOT, 1, round, round, payload),
            seal(me, swarm_run, EnvelopeKind.CONTRIBUTION, 1, round, round, payload[:-1]),
            seal(me, swarm_run, EnvelopeKind.CONTRIBUTION, 1, round, round, payload + b"\0"),
            honest[:ENVELOPE_BYTES],
            b"",
            bytes(bent),  # The last, since nothing more is accepted after it.
        ]
        for number, body in enumerate(bodies, 1):
            before = refusals(swarm, "c")
            await liar.say(victim.context.transport.peer, Contribution(), body)
            await swarm.during(0.05)
            assert refusals(swarm, "c") > before, f"body {number} was not counted"
        assert not [
            note
            for note in swarm.of("contribution_accepted", "c")
            if note.fields["contributor"] == me.peer_id
        ]

    swarm = play(1, story)
    assert swarm.members["c"].worker.services.links.traffic.refused["wrong_run"] == 1


def test_replayed_and_far_and_double_contributions_are_not_kept():
    async def story(swarm: Swarm, liar: Liar) -> None:
        victim = swarm.members["c"].worker
        kept = [stored.data for stored in victim.services.round_service.store.stored.values()]
        for data in kept * 20:
            await liar.say(victim.context.transport.peer, Contribution(), data)
        round, chance = victim.services.round_service.rounds.current, Random(1)
        size = victim.services.round_service.work.method.payload_bytes
        votes = [bytes(size), *(data[ENVELOPE_BYTES:] for data in kept[:3])]
        for number in range(150):
            at = round if number < 50 else round + 1000 + number
            vote = chance.choice(votes)
            data = seal(liar.identity, swarm.signed.run_id, EnvelopeKind.CONTRIBUTION, 1, at, number, vote)
            await liar.say(victim.context.transport.peer, Contribution(), data)
        before = len(victim.services.round_service.store.stored)
        await swarm.during(1.0)
        assert len(victim.services.round_service.store.stored) < before + 40
        assert victim.services.round_service.outcomes["not_taken"] > 100
        assert (
            victim.services.round_service.outcomes.get("repeated", 0)
            + victim.services.round_service.outcomes.get("late", 0)
            > 0
        )

    play(1, story)


def test_two_contributions_for_one_round_told_to_two_peers_still_settle_as_one():
    async def story(swarm: Swarm, liar: Liar) -> None:
        for _ in range(5):
            workers = [swarm.members[name].worker for name in ("c", "d")]
            payload = next(iter(workers[0].services.round_service.store.stored.values())).data[
                ENVELOPE_BYTES:
            ]
            at = workers[0].services.round_service.rounds.current
            for number, worker in enumerate(workers):
                data = seal(
                    liar.identity, swarm.signed.run_id, EnvelopeKind.CONTRIBUTION, 1, at, number, payload
                )
                await liar.say(worker.context.transport.peer, Contribution(), data)
            await swarm.during(0.5)

    swarm = play(1, story)
    assert [
        note
        for note in swarm.of("contribution_accepted")
        if note.fields["contributor"] == Identity.from_seed(b"liar").peer_id
    ]


def test_names_without_end_and_records_without_end_are_not_remembered():
    async def story(swarm: Swarm, liar: Liar) -> None:
        victim, chance = swarm.members["c"].worker, Random(2)
        for at in range(20):
            round = victim.services.round_service.rounds.current
            names = [ContributionRef(round, f"p{at}-{n}", chance.randbytes(16), 100) for n in range(400)]
            await liar.say(victim.context.transport.peer, Announce(names, []))
            await liar.say(victim.context.transport.peer, GetManifest())
            for _ in range(20):
                await liar.say(victim.context.transport.peer, GetChunk(bytes(32), 0))
            await swarm.during(0.01)
        records = []
        for number in range(40):
            identity = Identity.from_seed(b"sybil %d" % number)
            record = PeerRecord(identity.peer_id, 1, "worker", [], 0, 0.0, "0")
            records.append(seal_record(identity, swarm.signed.run_id, record, swarm.loop.time()))
        await liar.say(victim.context.transport.peer, PeerRecords(records[:20]))
        await liar.say(victim.context.transport.peer, PeerRecords(records[20:]))

    play(1, story)


def test_gradients_and_beats_that_lie_about_numbers_are_refused():
    async def story(swarm: Swarm, liar: Liar) -> None:
        victim = swarm.members["c"].worker
        peer = victim.context.transport.peer
        beat = Heartbeat(1, -1, 0.0, 2, True, 8, 0.001, 0, True)
        await liar.say(peer, beat)
        await swarm.until(lambda: liar.heard["Act"] > 0, 20.0)
        before = refusals(swarm, "c")
        lies = {"tokens": 10**6, "loss_sum": float("nan"), "path_seconds": float("inf"), "shape": (1, 1, 1)}
        for field, value in lies.items():
            count = liar.heard["Act"]
            act = next(m for m in reversed(liar.messages) if isinstance(m, Act))
            grad = Grad(act.origin, act.counter, act.attempt, 100.0, 32, 0.01, 0.0, ACT_SHAPE)
            lie = msgspec.structs.replace(grad, **{field: value})
            await liar.say(peer, lie, bytes(BODY_BYTES), "data")
            await swarm.during(0.1)
            assert refusals(swarm, "c") > before, field
            before = refusals(swarm, "c")
            for sequence in range(count + 2, count + 60):  # It is left alone for a while after each lie.
                if liar.heard["Act"] > count:
                    break
                await liar.say(peer, msgspec.structs.replace(beat, sequence=sequence))
                await swarm.during(0.5)
        await liar.say(peer, msgspec.structs.replace(beat, stage=1))
        await swarm.during(0.1)
        assert refusals(swarm, "c") > before
        assert peer in NAMES
        assert victim.services.links.membership.peers[liar.identity.peer_id].stage == 2

    swarm = play(2, story)
    tokens = {note.fields["tokens"] for note in swarm.of("committed")}
    assert tokens == {32}


def test_codes_that_a_peer_invents_do_not_become_names_of_metrics():
    async def story(swarm: Swarm, liar: Liar) -> None:
        victim = swarm.members["c"].worker
        for number in range(30):
            await liar.say(
                victim.context.transport.peer, Heartbeat(number, -1, 0.0, 2, True, 8, 0.0001, 0, True)
            )
            await swarm.during(0.3)
            for act in [m for m in liar.messages if isinstance(m, Act)]:
                nack = Nack(act.origin, act.counter, act.attempt, f"code{number}", "")
                await liar.say(victim.context.transport.peer, nack, lane="data")
        assert liar.heard["Act"] > 0
        assert victim.services.pipeline_service.ledger.rerouted.get("other", 0) > 0

    play(2, story)


def test_a_snapshot_root_that_is_no_text_where_text_should_be_stops_no_newcomer():
    """Signed as it should be, by a peer of the group: who asks it for the state goes on with the others'."""

    async def story(swarm: Swarm, liar: Liar) -> None:
        honest = msgspec.msgpack.encode(SnapshotRoot(3, 1, 0, bytes(32), START, []))
        payload = honest.replace(b"root", b"\xff\xfe\xfd\xfc")
        root = seal(liar.identity, swarm.signed.run_id, EnvelopeKind.SNAPSHOT, 1, 3, 3, payload)
        await swarm.until(lambda: len(swarm.of("settled", "c")) > 8, LATE_SECONDS)
        newcomer = swarm.start("n", 1)
        while not swarm.of("in_step", "n"):
            await liar.say(newcomer.peer, SnapshotOffer(1, 3, 3, bytes(32), [root], 3))
            await swarm.during(0.05)
        assert liar.heard["GetState"], "the newcomer has asked it"
        assert newcomer.worker.services.links.traffic.refused["malformed"]

    play(1, story)


def progress(rounds: GroupRounds, **lie: object) -> Progress:
    """What the peer with these rounds would say itself, but for the lie."""
    chain = rounds.chain
    true = Progress(rounds.current, 0, [], rounds.settled, True, rounds.settled, chain.value, [])
    return msgspec.structs.replace(true, **lie)


LIES = {
    "far ahead": lambda rounds: progress(rounds, round=rounds.current + 1000, tokens=10**6, in_step=False),
    "many tokens": lambda rounds: progress(rounds, tokens=10**12),
    "settled what nobody has": lambda rounds: progress(rounds, settled=rounds.settled + 5),
    "settled far ahead": lambda rounds: progress(rounds, settled=rounds.settled + 10**6),
    "another history": lambda rounds: progress(rounds, anchor=b"another!"),
    "in step and silent": lambda rounds: progress(rounds, round=0, settled=-1, anchor_round=-1, anchor=START),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies_about_rounds_neither_drives_the_others_on_nor_holds_them(lie):
    """It says it for 10 seconds, to both peers of its group, ten times a second."""

    async def story(swarm: Swarm, liar: Liar) -> None:
        workers = [swarm.members[name].worker for name in ("c", "d")]
        honest = swarm.members["a"].worker.services.round_service.rounds
        first, first_honest = workers[0].services.round_service.rounds.current, honest.current
        commits = len(swarm.of("committed", "c", "d"))
        for number in range(100):
            for worker in workers:
                peer = worker.context.transport.peer
                if number % 10 == 0:
                    await liar.say(peer, Heartbeat(number, -1, 0.0, 1, True, 0, 0.0, 0, True))
                await liar.say(peer, LIES[lie](worker.services.round_service.rounds))
            await swarm.during(0.1)
        rounds = workers[0].services.round_service.rounds.current - first
        assert len(swarm.of("committed", "c", "d")) > commits + 20, "microbatches go on"
        assert rounds <= 4 * (honest.current - first_honest) + 8, "driven on"
        assert rounds >= (honest.current - first_honest) / 8, "held back"

    play(1, story)
