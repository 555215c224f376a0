"""Reducers that want more than their share of each step: by results of themselves alone, and by results that
name contributors who sent them nothing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from swarm import Swarm, sharded_manifest

from peers.lab.world.stub_stage import SLICE_BYTES, StubReduced
from peers.lab.world.virtual_time import run
from protocols.messages.table import Slices
from protocols.signed.envelope import ENVELOPE_BYTES
from protocols.signed.grants import Reduction, grant_of, sign_grant
from swarmnet.rounds import events
from swarmnet.rounds.result_table import Contributor, Table, counting, head_of, read_head, tag_of

HONEST = ("a", "b", "c", "d")
SHARDS = 8
MANIFEST = sharded_manifest((3,), shards=SHARDS, global_batch_tokens=512)
LOOKED_AT = 8
"""Settled rounds: two draws."""


def publish_always(member) -> None:
    """It adds up something of every round, drawn or not, before the others do."""
    reducing = member.worker.services.round_service.rounds.reducing
    honest = reducing.close

    def close(round, contributes, now):
        honest(round, contributes, now)
        reducing._sum_by[round] = now + 0.05
        return True

    reducing.close = close


def reduce_alone(member) -> None:
    """It adds up its own slices alone, and sends them to those who reduce for the others as well. All that it
    publishes is true."""
    path, rounds = member.worker.services.round_service.exchange, member.worker.services.round_service.rounds
    work = path.work

    def was_cut(cut):
        def grant(reducer, shards):
            reduction = Reduction(work.run_id, work.stage, cut.round, reducer)
            return sign_grant(work.identity, reduction, cut.id, cut.tokens, shards)

        own = grant_of(rounds.me, grant(rounds.me, range(SHARDS)))
        contributor = Contributor.of(rounds.me, cut.id, cut.tokens, own)
        path._keep(cut.round, contributor, cut.head, dict(enumerate(cut.slices)))
        path.feed(events.SlicesSent(cut.round, cut.id, cut.reducers))
        for peer in set(cut.reducers) - {rounds.me}:
            shards = cut.shards_of(peer)
            body = b"".join([grant(peer, shards), cut.head, *(cut.slices[shard] for shard in shards)])
            path.neighbourhood.post(peer, "group", Slices(cut.round, shards), body)
        path.feed(events.SlicesArrived(rounds.me, cut.round, True))

    path.was_cut = was_cut
    handlers = member.worker.services.router._handlers[Slices]
    assert list(handlers) == [type(path)]
    handlers[type(path)] = lambda who, message, _: path.feed(events.SlicesArrived(who, message.round, False))
    others = rounds.reducing.members - {rounds.me}
    rounds.reducing.avoid = lambda peer, round: None
    honest = rounds.reducing.draw.reducers
    rounds.reducing.reducers = lambda round: honest(round, others, rounds.reducing._search.seed(round))
    publish_always(member)


def name_phantoms(member) -> None:
    """Its results name everybody in every shard, with contributions that never were."""
    chance, reduced = Random(1), member.worker.services.part.method.reduced
    others = sorted(member.worker.services.round_service.rounds.reducing.members - {member.peer})

    def reduce(slices):
        named = frozenset(
            Contributor(tag_of(peer), chance.randbytes(16), 512, grant_of(peer, chance.randbytes(64)))
            for peer in others
        )
        sums = b"".join(
            (chance.randbytes(SLICE_BYTES - 1) + bytes([shard])) * len(named) for shard in range(SHARDS)
        )
        return head_of(Table(dict.fromkeys(range(SHARDS), named)), sums) + sums

    reduced.reduce = reduce
    publish_always(member)


def tables_of(worker, number: int) -> dict:
    """The tables of a settled round's results, by maker."""
    found = {}
    for reference in worker.services.round_service.rounds.history[number].held.values():
        stored = worker.services.round_service.store.stored[reference.id]
        found[reference.peer], _ = read_head(bytes(stored.data[ENVELOPE_BYTES:]), SHARDS)
    return found


def play(bend: Callable, look: Callable) -> Swarm:
    """Four honest peers and one that turns bad; `look(tables, counted, peer)` at each settled round."""
    swarm = Swarm(MANIFEST, stub=True)

    async def story() -> None:
        swarm.open()
        for name in (*HONEST, "bad"):
            swarm.start(name, 0, in_flight=1)
        await swarm.until(lambda: len(swarm.of("in_step")) == 5, 30.0)
        await swarm.until(lambda: swarm.rounds()["a"][1] > 8, 30.0)
        bad, a = swarm.members["bad"], swarm.members["a"].worker
        draw = a.services.part.method.reduced.draw
        bend(bad)
        first = swarm.rounds()["a"][0] + 2
        for number in range(first, first + LOOKED_AT):
            await swarm.until(lambda number=number: swarm.rounds()["a"][1] >= number, 60.0)
            tables = tables_of(a, number)
            look(tables, counting(tables, draw, number), bad.peer)
        await swarm.close()

    run(story())
    assert isinstance(swarm.members["a"].worker.services.part.method.reduced, StubReduced)
    return swarm


def test_a_result_of_one_does_not_replace_that_of_the_others():
    alone = 0

    def look(tables, counted, bad) -> None:
        nonlocal alone
        for shard, contributors in counted.items():
            alone += bad in tables and shard in tables[bad].shards
            largest = max(len(table.shards.get(shard, ())) for table in tables.values())
            assert bad not in contributors or largest == 1, "who has reduced for itself alone"

    play(reduce_alone, look)
    assert alone > LOOKED_AT, "it did try"


def test_nobody_is_named_by_a_reducer_that_it_sent_nothing():
    counting_slices = 0

    def look(tables, counted, bad) -> None:
        nonlocal counting_slices
        assert bad not in tables
        for shard, contributors in counted.items():
            counting_slices += sum(len(tables[contributor].shards[shard]) for contributor in contributors)

    swarm = play(name_phantoms, look)
    assert counting_slices > 0.75 * LOOKED_AT * SHARDS * len(HONEST), "the others go on, and avoid it"
    forged = [swarm.members[name].worker.services.round_service.outcomes["bad_signature"] for name in HONEST]
    assert 1 <= min(forged) <= max(forged) <= 2, "it links again at once, and is not let in for a while"
