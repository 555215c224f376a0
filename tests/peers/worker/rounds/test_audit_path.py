"""What a peer asks of reducers and gives as one, and what it believes of a proof that somebody has lied."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from clocks import on_virtual_clock
from hypothesis import given, settings
from hypothesis import strategies as st
from reducer_world import (
    ALL,
    ME,
    RUN,
    SHARDS,
    STRANGER,
    B,
    C,
    World,
    as_contributor,
    body_of,
    evidence_of,
    played,
    slices_of,
)

from peers.lab.world.stub_stage import StubReduced
from peers.worker.rounds.operations import ContributionReady
from protocols.messages.table import Contribution, Evidence, FraudProof, GetSlices, Slices
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope, seal
from protocols.signed.identity import Identity
from swarmnet.rounds.audits import MAX_OF_RESULT
from swarmnet.rounds.history import SettledSet
from swarmnet.rounds.result_table import Table, head_of

D = Identity.from_seed(b"d")
SHARD = 1
DRAWN_FOR = 4
"""Rounds, as the world's draw has it."""


def result_of(contributor: Identity, contributors=(B, D), lies: bool = False, round: int = 0):
    """As it travels, and its name. A lie: the first contributor's slice of SHARD stands there as another."""
    held = {
        shard: {as_contributor(who, round, contributor): slices_of(who, round)[shard] for who in contributors}
        for shard in ALL
    }
    sums = b""
    for shard in ALL:
        slices = [held[shard][one] for one in sorted(held[shard])]
        if lies and shard == SHARD:
            slices[0] = bytes(len(slices[0]) - 1) + bytes([shard])
        sums += b"".join(slices)
    head = head_of(Table({shard: frozenset(of) for shard, of in held.items()}), sums)
    data = seal(contributor, RUN, EnvelopeKind.CONTRIBUTION, 0, round, round, head)
    return data + sums, open_envelope(data, RUN, EnvelopeKind.CONTRIBUTION, len(head)).id


def slice_of(who: Identity, round: int = 0, shard: int = SHARD, **of) -> bytes:
    return evidence_of(who, round, (shard,), **of)


class Looking(World):
    """It looks into every result, in SHARD."""

    def __init__(self) -> None:
        super().__init__()
        self.audits.drawn = lambda result, table, peers: (SHARD,) if SHARD in table.shards else ()

    def codes(self) -> list[str]:
        return [note.code for note in self.notes if note.name == "audited"]

    def asks(self) -> list:
        return [(peer, message) for peer, message, _ in self.posted if isinstance(message, GetSlices)]

    def took(self, *, lies: bool):
        data, name = result_of(C, lies=lies)
        self.hear(B, Contribution(), data)
        return data, name

    def answer(self, sender: Identity, name: bytes, bodies: Iterable[bytes]) -> None:
        for body in bodies:
            self.hear(sender, Evidence(name, SHARD), body)


HONEST = (slice_of(B), slice_of(D))


@on_virtual_clock
async def test_the_slices_behind_a_result_are_asked_for_and_it_stays_when_they_give_it():
    world = Looking()
    _, name = world.took(lies=False)
    assert world.asks() == [(C.peer_id, GetSlices(name, SHARD))]
    world.answer(C, name, HONEST)
    assert world.codes() == ["agrees"]
    assert C.peer_id in world.path.rounds.rounds[0].held
    world.path.close()


@on_virtual_clock
async def test_nobody_looks_into_a_result_that_is_too_small_to_count():
    world = Looking()
    of_three, name = result_of(C, contributors=(B, C, D))
    world.hear(B, Contribution(), of_three)
    world.hear(B, Contribution(), result_of(D, contributors=(D,))[0])
    assert D.peer_id in world.path.rounds.rounds[0].held
    assert world.asks() == [(C.peer_id, GetSlices(name, SHARD))]
    world.path.close()


@on_virtual_clock
async def test_a_result_that_its_slices_do_not_give_is_undone_and_its_maker_parted_from():
    world = Looking()
    data, name = world.took(lies=True)
    world.answer(C, name, reversed(HONEST))
    assert world.codes() == ["lied"]
    assert world.audits.convicted.keys() == {C.peer_id}
    assert world.departed == [(C.peer_id, "invalid_reduction")]
    assert world.path.rounds.rounds[0].held == {}
    told = [(peer, message) for peer, message, _ in world.posted if isinstance(message, FraudProof)]
    assert (B.peer_id, FraudProof(C.peer_id, 0, name, SHARD)) in told
    world.posted.clear()
    world.hear(B, GetSlices(name, SHARD))
    given = [body for peer, message, body in world.posted if isinstance(message, Evidence)]
    assert given[0] == data
    assert set(given[1:]) == set(HONEST)
    world.path.close()


@on_virtual_clock
async def test_by_a_proof_that_somebody_hands_on_the_maker_is_convicted_though_its_result_was_never_here():
    world = Looking()
    data, name = result_of(C, lies=True)
    said = FraudProof(C.peer_id, 0, name, SHARD)
    world.hear(B, said)
    assert world.asks() == [(B.peer_id, GetSlices(name, SHARD))]
    world.answer(B, name, [HONEST[0], data, data, *HONEST, HONEST[0]])  # In whatever order.
    assert world.audits.convicted.keys() == {C.peer_id}
    assert world.codes() == ["lied"]
    world.posted.clear()
    world.hear(B, said)
    assert world.posted == [], "b is known to know"
    world.hear(D, said)
    assert [peer for peer, message, _ in world.posted if message == said] == [D.peer_id], "once"
    world.path.close()


NOTHING = {
    "a result that its slices give": ([result_of(C)[0], *HONEST], result_of(C)[1]),
    "a result of somebody else": ([result_of(D, lies=True)[0], *HONEST], result_of(D, lies=True)[1]),
    "a result of another name": ([result_of(C, lies=True)[0], *HONEST], b"another name 456"),
    "a stranger's slice": ([result_of(C, lies=True)[0], slice_of(STRANGER)], result_of(C, lies=True)[1]),
    "another slice of a contributor": (
        [result_of(C, lies=True)[0], slice_of(B, serial=2), slice_of(D)], result_of(C, lies=True)[1]
    ),
    "a slice of another round": (
        [result_of(C, lies=True)[0], slice_of(B, round=1), slice_of(D)], result_of(C, lies=True)[1]
    ),
    "a slice of another shard": (
        [result_of(C, lies=True)[0], slice_of(B, shard=2), slice_of(D)], result_of(C, lies=True)[1]
    ),
    "a bent slice": (
        [result_of(C, lies=True)[0], slice_of(B)[:-2] + b"\7" + slice_of(B)[-1:], slice_of(D)],
        result_of(C, lies=True)[1],
    ),
    "a result cut off": ([result_of(C, lies=True)[0][:-1], *HONEST], result_of(C, lies=True)[1]),
    "no result": ([bytes([1, EnvelopeKind.CONTRIBUTION]) + bytes(200)], result_of(C, lies=True)[1]),
}  # fmt: skip


@pytest.mark.parametrize("what", NOTHING)
@on_virtual_clock
async def test_what_proves_nothing_costs_whoever_offers_it_its_link_and_the_accused_nothing(what):
    world = Looking()
    bodies, name = NOTHING[what]
    world.hear(B, FraudProof(C.peer_id, 0, name, SHARD))
    world.answer(B, name, bodies)
    assert world.audits.convicted == {}
    assert world.departed == [(B.peer_id, "malformed")]
    world.posted.clear()
    world.hear(B, FraudProof(C.peer_id, 0, name, SHARD))
    assert world.asks() == [], "it has cried wolf"
    world.path.close()


@on_virtual_clock
async def test_nobody_is_asked_about_a_stranger_about_this_peer_or_by_a_stranger():
    world = Looking()
    for accused in (STRANGER, ME):
        world.hear(B, FraudProof(accused.peer_id, 0, b"n" * 16, SHARD))
    world.hear(STRANGER, FraudProof(C.peer_id, 0, b"n" * 16, SHARD))
    world.hear(B, FraudProof(C.peer_id, 0, b"n" * 16, SHARDS))
    assert world.posted == []
    world.path.close()


@pytest.mark.parametrize(
    ("bodies", "code"),
    [([], "unanswered"), ([HONEST[0]], "unanswered"), ([slice_of(STRANGER)], "not_in_order")],
)
@on_virtual_clock
async def test_who_does_not_give_the_slices_is_no_liar_but_reduces_nothing_here_for_a_while(bodies, code):
    world = Looking()
    world.live = {B.peer_id: None, C.peer_id: None}
    world.path.counted(3)
    current = world.path.rounds.current
    _, name = world.took(lies=True)
    world.answer(C, name, bodies)
    await asyncio.sleep(2 * world.path.manifest.rounds.contribution_timeout_seconds)
    world.path.counted(3)
    assert world.codes() == [code]
    assert world.departed == []
    assert world.audits.convicted == {}
    reducing = world.path.rounds.reducing
    block = range(current, current + DRAWN_FOR)
    for number in block:
        world.path.rounds.chain.append(SettledSet(4, b"%12d" % number))
    assert not any(C.peer_id in reducing.reducers(number) for number in block)
    assert any(C.peer_id in reducing.soon(number, reducing.members, {}) for number in block)
    world.answer(C, name, HONEST)
    assert world.codes() == [code], "too late"
    world.path.close()


@on_virtual_clock
async def test_what_this_peer_has_added_up_is_given_to_members_a_few_times_and_then_forgotten():
    world = Looking()
    for who in (B, C):
        world.hear(who, Slices(0, ALL), body_of(who))
    (added,) = world.added_up()
    reduced = StubReduced(world.path.work.method.reduced.draw)
    payload = reduced.reduce(added.slices)
    table, length = reduced.head(payload)
    head = seal(ME, RUN, EnvelopeKind.CONTRIBUTION, 0, 0, 0, payload[:length])
    name = open_envelope(head, RUN, EnvelopeKind.CONTRIBUTION, length).id
    made = ContributionReady(0, head + payload[length:], 20, name, True, table, ENVELOPE_BYTES + length)
    world.path._worked([made], 0.0)
    world.posted.clear()
    world.hear(STRANGER, GetSlices(name, 0))
    world.hear(B, GetSlices(name, 7))
    world.hear(B, GetSlices(b"never heard of it", 0))
    assert world.posted == []
    for _ in range(2 * MAX_OF_RESULT):
        world.hear(B, GetSlices(name, 2))
    given = [body for peer, message, body in world.posted if message == Evidence(name, 2)]
    assert len(given) == 2 * MAX_OF_RESULT
    assert set(given) == {slice_of(B, shard=2), slice_of(C, shard=2)}
    world.path.exchange.audits.settled(0)
    world.hear(C, GetSlices(name, 2))
    assert len(world.posted) == 2 * MAX_OF_RESULT + 2, "whoever comes later gets it, too"
    world.path.exchange.audits.settled(world.path.rounds.offers.delay)
    world.posted.clear()
    world.hear(D, GetSlices(name, 2))
    assert world.posted == []
    world.path.close()


def test_of_two_results_of_one_reducer_the_smaller_name_counts_with_everybody_and_both_are_looked_into():
    """It may have begun anew in between, so this is no lie."""
    results = [result_of(C), result_of(C, contributors=(B,))]
    for order in (results, results[::-1]):

        def story(order=order) -> None:
            world = Looking()
            for data, _ in order:
                world.hear(B, Contribution(), data)
            smaller = min(name for _, name in results)
            assert [held.id for held in world.path.rounds.rounds[0].held.values()] == [smaller]
            asked = [message.result for _, message in world.asks()]
            assert asked == [name for _, name in order][: 1 + (order[1][1] == smaller)]
            world.path.close()

        played(story)


SAID = st.tuples(st.sampled_from([B, C, STRANGER]), st.integers(0, 3), st.binary(max_size=300))


@settings(max_examples=40)
@given(st.lists(SAID, max_size=6))
@on_virtual_clock
async def test_whatever_comes_as_evidence_convicts_nobody(said):
    world = Looking()
    _, name = world.took(lies=False)
    world.hear(B, FraudProof(C.peer_id, 0, name, SHARD))
    for sender, shard, body in said:
        world.hear(sender, Evidence(name, shard), body)
    assert world.audits.convicted == {}
    world.path.close()
