"""What a peer does with slices and results that come in, and with its own, where there are reducers."""

from __future__ import annotations

import pytest
from clocks import on_virtual_clock
from hypothesis import given
from hypothesis import strategies as st
from reducer_world import (
    ALL,
    ME,
    RUN,
    STRANGER,
    B,
    C,
    World,
    as_contributor,
    body_of,
    evidence_of,
    head_only,
    result_of,
    signature_of,
    signed,
    slices_of,
)

from peers.lab.world.stub_stage import SLICE_BYTES
from peers.telemetry.log_events import NotFinite
from peers.worker.rounds.operations import ReduceShards, SlicedContribution
from protocols.errors import BadSignature
from protocols.messages.table import Announce, Contribution, GetContributions, Slices
from protocols.messages.table import ContributionRef as WireReference
from protocols.signed.envelope import ENVELOPE_BYTES
from protocols.signed.slices import sign_slices
from swarmnet.identifiers import ContributionId
from swarmnet.rounds.events import Reference
from swarmnet.rounds.result_table import ReducerClass
from swarmnet.rounds.upload_meter import short_tag


@on_virtual_clock
async def test_slices_are_kept_until_everybody_has_spoken_and_added_up_then():
    world = World()
    world.hear(B, Slices(0, ALL), body_of(B))
    assert world.added_up() == []
    world.hear(C, Slices(0, [0, 2]), body_of(C, shards=(0, 2)))
    of_b, of_c = slices_of(B), slices_of(C)
    both = {shard: {as_contributor(B): of_b[shard], as_contributor(C): of_c[shard]} for shard in (0, 2)}
    assert world.added_up() == [ReduceShards(0, {**both, 1: {as_contributor(B): of_b[1]}})]
    assert world.nothing_is_kept()
    assert world.path.outcomes == {}
    assert world.refused == []
    world.path.close()


@on_virtual_clock
async def test_a_word_of_nothing_is_heard_and_keeps_nothing():
    world = World()
    world.hear(B, Slices(0, []))
    world.hear(C, Slices(0, ALL), body_of(C))
    assert [set(found.slices[0]) for found in world.added_up()] == [{as_contributor(C)}]
    world.hear(C, Slices(1, []))
    world.hear(B, Slices(1, []))
    assert world.nothing_is_kept()
    assert world.refused == []
    world.path.close()


WRONG = [
    pytest.param(body_of(STRANGER), ALL, id="signed by somebody else"),
    pytest.param(body_of(B, round=1), ALL, id="of another round"),
    pytest.param(body_of(B, stage=1), ALL, id="of another stage"),
    pytest.param(body_of(B, shards=(0,)), ALL, id="too short"),
    pytest.param(body_of(B), [0, 2, 1], id="out of order"),
    pytest.param(body_of(B, shards=(0, 0)), [0, 0], id="twice the same"),
    pytest.param(body_of(B), [0, 1, 3], id="no such shard"),
    pytest.param(body_of(B)[:-1] + b"\1", ALL, id="changed"),
    pytest.param(body_of(B, shards=(1,)), [0], id="another shard"),
    pytest.param(b"", [0], id="no body"),
]


@pytest.mark.parametrize(("body", "shards"), WRONG)
@on_virtual_clock
async def test_what_an_honest_peer_cannot_have_sent_is_refused_and_nothing_of_it_kept(body, shards):
    world = World()
    world.hear(B, Slices(0, shards), body)
    assert world.refused == [(B.peer_id, "malformed")]
    assert world.nothing_is_kept()
    assert world.path.outcomes == {"malformed": 1}
    world.hear(B, Slices(0, ALL), body_of(B))
    assert not world.nothing_is_kept(), "it may yet send the right ones"
    world.path.close()


@on_virtual_clock
async def test_slices_that_the_method_does_not_take_are_refused_though_they_are_signed():
    world = World()
    wrong = tuple(reversed(slices_of(B)))
    head, _ = sign_slices(B, RUN, 0, 0, 20, wrong)
    world.hear(B, Slices(0, ALL), bytes(64) + head + b"".join(wrong))
    assert world.refused == [(B.peer_id, "malformed")]
    assert world.nothing_is_kept()
    world.path.close()


@pytest.mark.parametrize("place", [10, 64 + 60], ids=["of the grant", "of the slices"])
@on_virtual_clock
async def test_a_forged_signature_is_counted_and_ends_the_link(place):
    world = World()
    forged = bytearray(body_of(B))
    forged[place] ^= 1
    with pytest.raises(BadSignature):
        world.hear(B, Slices(0, ALL), bytes(forged))
    assert world.path.outcomes == {"bad_signature": 1}
    assert world.nothing_is_kept()
    world.path.close()


GRANTS = [
    pytest.param(signature_of(B, C), id="for another reducer"),
    pytest.param(signature_of(B, shards=(0, 1)), id="for other shards"),
    pytest.param(signature_of(B, round=1), id="for another round"),
    pytest.param(signature_of(B, stage=1), id="for another stage"),
    pytest.param(signature_of(B, serial=2), id="for another contribution"),
    pytest.param(signature_of(C), id="of another peer"),
    pytest.param(bytes(64), id="none"),
]


@pytest.mark.parametrize("signature", GRANTS)
@on_virtual_clock
async def test_slices_without_a_grant_for_just_these_are_refused(signature):
    """Nobody would take the result that names them."""
    world = World()
    with pytest.raises(BadSignature):
        world.hear(B, Slices(0, ALL), signature + evidence_of(B))
    assert world.nothing_is_kept()
    world.path.close()


@pytest.mark.parametrize(
    ("what", "other"), [("MAX_CONTRIBUTORS", 1), ("tag_of", lambda peer: as_contributor(B).peer)],
    ids=["too many", "two keys with one tag"],
)  # fmt: skip
@on_virtual_clock
async def test_only_slices_are_taken_that_a_table_can_name(monkeypatch, what, other):
    """Else the reducer makes a table that it cannot read itself, which has ended its process."""
    monkeypatch.setattr(f"peers.worker.rounds.exchange.{what}", other)
    world = World()
    world.hear(B, Slices(0, ALL), body_of(B))
    world.hear(C, Slices(0, ALL), body_of(C))
    assert world.path.outcomes == {"not_counted": 1}
    assert set(world.path.exchange.kept[0][0]) == {as_contributor(B)}
    world.path.close()


@on_virtual_clock
async def test_what_would_not_be_added_up_is_counted_and_not_looked_at():
    """Of a peer that does not count, of rounds that are settled or far ahead, a second time, too late."""
    world = World(settled=4)
    far = world.path.rounds.current + world.path.manifest.rounds.window + 1
    for sender, round in ((STRANGER, 5), (B, 4), (B, 0), (B, far)):
        world.hear(sender, Slices(round, ALL), b"not even slices")
    assert world.path.outcomes == {"not_counted": 4}
    world.hear(B, Slices(5, ALL), body_of(B, round=5))
    kept = {shard: dict(held) for shard, held in world.path.exchange.kept[5].items()}
    world.hear(B, Slices(5, ALL), body_of(B, round=5, serial=2))
    assert world.path.exchange.kept[5] == kept, "the first ones count"
    world.hear(C, Slices(5, []))
    assert len(world.added_up()) == 1
    world.hear(C, Slices(5, ALL), body_of(C, round=5))
    assert world.nothing_is_kept()
    assert world.path.outcomes == {"not_counted": 6}
    assert world.refused == []
    world.path.close()


@on_virtual_clock
async def test_in_a_run_without_reducers_slices_are_malformed():
    world = World(reduced=False)
    for shards, body in (([], b""), (ALL, body_of(B))):
        world.hear(B, Slices(0, shards), body)
    assert world.refused == [(B.peer_id, "malformed")] * 2
    assert world.nothing_is_kept()
    world.path.close()


@given(st.integers(0, 6), st.lists(st.integers(-1, 3), max_size=4), st.binary(max_size=300))
@on_virtual_clock
async def test_whatever_comes_keeps_nothing(round, shards, body):
    world = World()
    world.hear(B, Slices(round, shards), body)
    assert world.nothing_is_kept()
    world.path.close()


@on_virtual_clock
async def test_a_result_enters_the_set_of_its_round():
    world = World()
    data, name = result_of(C)
    world.hear(B, Contribution(), data)
    assert world.path.outcomes == {"accepted": 1}
    assert [reference.id for reference in world.path.rounds.rounds[0].held.values()] == [name]
    assert world.offers.contributors([Reference(0, C.peer_id, name, len(data))]), "and is read"
    world.path.close()


@on_virtual_clock
async def test_a_result_that_names_who_granted_nothing_ends_the_link_of_whoever_passes_it_on():
    """Here what they granted to B."""
    world = World()
    with pytest.raises(BadSignature):
        world.hear(B, Contribution(), result_of(C, grants_to=B)[0])
    assert world.path.outcomes == {"bad_signature": 1}
    assert not world.path.store.stored
    world.path.close()


@on_virtual_clock
async def test_a_result_that_names_peers_outside_the_group_waits():
    world = World()
    world.hear(B, Contribution(), result_of(C, contributors=(B, STRANGER))[0])
    assert world.path.outcomes == {"not_counted": 1}
    assert not world.path.store.stored
    assert world.refused == []
    world.path.close()


DATA, NAME = result_of(C)


@pytest.mark.parametrize(
    "data",
    [head_only(DATA), DATA[:-1], DATA + b"\0", DATA[:-1] + b"\1", DATA[: ENVELOPE_BYTES + 9]],
    ids=["the head alone", "too short", "too long", "other sums", "half a table"],
)
@on_virtual_clock
async def test_for_an_open_round_only_a_whole_result_is_taken(data):
    world = World()
    world.hear(B, Contribution(), data)
    assert world.refused == [(B.peer_id, "malformed")]
    assert not world.path.store.stored
    assert not world.path.store.heads
    state = world.path.rounds.rounds.get(0)
    assert state is None or not state.held
    world.path.close()


@on_virtual_clock
async def test_a_head_that_was_changed_is_a_forgery():
    world = World()
    bent = bytearray(DATA)
    bent[ENVELOPE_BYTES + 2] ^= 1
    with pytest.raises(BadSignature):
        world.hear(B, Contribution(), bytes(bent))
    assert not world.path.store.stored
    world.path.close()


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "the head alone"])
@on_virtual_clock
async def test_a_settled_result_is_read_when_it_was_asked_for_and_only_then(whole):
    world = World(settled=9)
    data, name = result_of(C, round=1)
    data = data if whole else head_only(data)
    references = (Reference(1, C.peer_id, name, len(data)),)
    world.hear(B, Contribution(), data)
    assert world.path.outcomes == {"late": 1}
    assert not world.offers.contributors(references)
    world.offers.made(1, ContributionId(b"my contribution."), 0.0)
    world.offers.settled(1, references)
    world.hear(B, Contribution(), data)
    assert world.offers.contributors(references), "now it is known who is in it"
    assert not world.path.store.stored, "and nothing else is done with it"
    assert world.path.outcomes == {"late": 1, "contribution_returned": 1}, "none of it was mine"
    world.path.close()


@on_virtual_clock
async def test_who_was_away_gets_the_head_of_a_result_whose_sums_are_forgotten():
    world = World()
    world.hear(B, Contribution(), DATA)
    world.posted.clear()
    world.hear(C, GetContributions([NAME]))
    assert [body for peer, message, body in world.posted if isinstance(message, Contribution)] == [DATA]
    world.path.store.forget_bodies(0)
    world.posted.clear()
    world.hear(B, GetContributions([NAME, b"never heard of 1"]))
    sent = [(peer, body) for peer, message, body in world.posted if isinstance(message, Contribution)]
    assert sent == [(B.peer_id, head_only(DATA))]
    world.path.close()


@on_virtual_clock
async def test_names_of_results_that_are_longer_than_any_are_refused():
    world = World()
    longest = ENVELOPE_BYTES + world.path.work.method.reduced.longest_result
    for size in (longest + 1, ENVELOPE_BYTES, 0, -5):
        world.hear(B, Announce([WireReference(0, C.peer_id, b"i" * 16, size)], []))
    assert world.refused == [(B.peer_id, "malformed")] * 4
    world.hear(B, Announce([WireReference(0, C.peer_id, b"i" * 16, longest)], []))
    assert len(world.path.rounds.pulls) == 1
    world.path.close()


@on_virtual_clock
async def test_an_own_contribution_goes_to_its_reducers_each_slice_to_one():
    world = World()
    head, name = signed(ME)
    slices = slices_of(ME)
    reducers = (B.peer_id, ME.peer_id, B.peer_id)
    grants = {B.peer_id: signature_of(ME, B, shards=(0, 2)), ME.peer_id: signature_of(ME, shards=(1,))}
    world.path._worked([SlicedContribution(0, reducers, 20, head, slices, name, grants)], 0.0)
    sent = [(peer, message, body) for peer, message, body in world.posted if isinstance(message, Slices)]
    body = grants[B.peer_id] + head + slices[0] + slices[2]
    assert sent == [(B.peer_id, Slices(0, [0, 2]), body)]
    assert world.path.exchange.kept[0] == {1: {as_contributor(ME): slices[1]}}
    assert list(world.offers.open) == [name]
    world.path.close()


@pytest.mark.parametrize("tokens", [20, 0], ids=["not finite", "nothing computed"])
@on_virtual_clock
async def test_of_no_contribution_its_reducers_hear_and_a_gradient_that_was_not_finite_is_told(tokens):
    world = World()
    world.path._worked([SlicedContribution(0, (B.peer_id, ME.peer_id, C.peer_id), tokens)], 0.0)
    assert [note.tokens for note in world.notes if isinstance(note, NotFinite)] == [tokens] * (tokens > 0)
    sent = {(peer, body) for peer, message, body in world.posted if message == Slices(0, [])}
    assert sent == {(B.peer_id, b""), (C.peer_id, b"")}
    assert world.nothing_is_kept()
    assert not world.offers.open
    world.path.close()


@on_virtual_clock
async def test_what_was_cut_while_the_state_is_fetched_anew_is_sent_to_nobody_and_comes_back_later():
    world = World()
    head, name = signed(ME)
    world.path.close()
    world.path._worked([SlicedContribution(0, (B.peer_id,) * 3, 20, head, slices_of(ME), name)], 0.0)
    assert world.posted == []
    assert list(world.offers.open) == [name]


@on_virtual_clock
async def test_reducers_are_drawn_among_those_who_take_part_in_the_stage():
    world = World()
    world.live = {B.peer_id: None, C.peer_id: None}
    world.path.counted(3)
    everybody = frozenset((ME.peer_id, B.peer_id, C.peer_id))
    assert world.path.rounds.reducing.members == everybody
    assert world.path.rounds.open_round.peers == 3
    world.live = {C.peer_id: None}
    world.path.counted(3)
    assert world.path.rounds.reducing.members == everybody - {B.peer_id}, "as many, and others"
    world.path.close()


@on_virtual_clock
async def test_slices_of_a_round_that_settled_without_being_added_up_are_forgotten():
    world = World()
    world.hear(B, Slices(0, ALL), body_of(B))
    assert not world.nothing_is_kept()
    rounds = world.path.rounds
    rounds.applied = max(rounds.applied, 0)
    rounds._effects = []
    rounds._settle(0, 0.0)
    for effect in rounds._effects:
        world.path._carry_out(effect, [])
    assert world.nothing_is_kept()
    world.path.close()


def test_a_slice_is_as_long_as_the_stub_says():
    assert {len(data) for data in slices_of(B)} == {SLICE_BYTES}


@on_virtual_clock
async def test_reducers_are_drawn_by_claims_that_the_others_have_not_measured_otherwise():
    """B claims 10 Gbit/s. C's record says that it sends at half a megabyte per second."""
    world = World()
    peers = world.path.neighbourhood.membership.peers
    world.live = {peer.peer_id: None for peer in (B, C)}
    peers[B.peer_id].upload = peers[C.peer_id].upload = 1_250_000_000
    peers[B.peer_id].is_helper = True
    world.path.counted(3)
    classes = world.path.exchange.reducing.classes
    assert (classes[B.peer_id], classes[C.peer_id]) == (ReducerClass(3, is_helper=True), ReducerClass(3))
    peers[C.peer_id].uploads_seen = short_tag(B.peer_id) + bytes([18])
    world.path.counted(3)
    classes = world.path.exchange.reducing.classes
    assert (classes[B.peer_id], classes[C.peer_id]) == (ReducerClass(0), ReducerClass(3))
    world.path.close()
