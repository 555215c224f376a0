"""Peers sign what they settled: who is wrong learns it, and a restarted group knows what it had agreed on."""

import pytest
from swarm import Swarm, shared_rounds, sign, tiny_manifest

from peers.compute.stage_part import build_stage_part
from peers.lab.world.virtual_time import run
from peers.state import checkpoint_file
from peers.state.checkpoint_file import state_digest
from peers.worker.rounds.digest_gossip import SignedDigests
from protocols.errors import BadSignature
from protocols.messages.table import Statements
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId
from swarmnet.snapshots.digest_votes import ROUNDS_KEPT, SettledDigests, Statement
from swarmnet.snapshots.fetch import choose_restart, choose_root

ME, A, B, C, D = (PeerId(name) for name in ("me", "a", "b", "c", "d"))
CHAIN = b"one chain"


def say(held, round, chain=CHAIN, **words):
    """`words`: peer -> the digest that it names."""
    for peer, digest in words.items():
        held.take(Statement(PeerId(peer), round, chain, digest.encode()))
    return held


@pytest.mark.parametrize(
    ("words", "against"),
    [
        ({"me": "x", "a": "x", "b": "x"}, ()),
        ({"me": "y", "a": "x", "b": "x"}, (A, B)),
        ({"me": "y", "a": "x", "b": "x", "c": "y"}, ()),
        ({"me": "y", "a": "x", "b": "x", "c": "x", "d": "z"}, (A, B, C)),
        ({"me": "y", "a": "x"}, ()),
        ({"me": "y", "a": "x", "b": "z"}, ()),
        ({"a": "x", "b": "x"}, ()),
        ({"me": "y"}, ()),
    ],
)
def test_a_peer_is_wrong_if_more_than_half_of_its_group_names_one_other_digest(words, against):
    assert say(SettledDigests(ME), 15, **words).against(15, [A, B, C, D]) == against


def test_other_histories_and_peers_that_are_gone_do_not_count():
    held = say(SettledDigests(ME), 15, me="y")
    say(held, 15, chain=b"another", a="x", b="x", c="x")
    assert held.against(15, [A, B, C]) == ()
    say(held, 15, a="x", b="x")
    assert held.against(15, [A, B]) == (A, B)
    assert held.against(15, [A]) == ()
    assert held.differing(15, [A]) == (A,)


def test_the_newest_words_are_kept_and_a_later_one_on_a_round_replaces_the_earlier():
    held = SettledDigests(ME)
    for round in range(10):
        say(held, round, a=f"x{round}")
    assert [statement.round for statement in held.all()] == list(range(9, 9 - ROUNDS_KEPT, -1))
    gone = held.take(Statement(A, 9, CHAIN, b"y"))
    assert [statement.digest for statement in gone] == [b"x9"]
    assert (9, b"y") in held.roots()[A]
    assert held.take(Statement(A, 1, CHAIN, b"late"))[0].digest == b"late"
    assert {statement.round for statement in held.forget(A, after=7)} == {8, 9}
    assert held.peers() == {A}


OLD, NEW, ALONE = (79, b"old"), (95, b"new"), (500, b"alone")


def test_a_root_that_one_disk_holds_counts_for_all_present_peers_who_signed_it():
    disks = {A: [OLD, NEW], B: [OLD], C: [OLD]}
    assert choose_root(disks) == OLD
    assert choose_root(disks, {A: {NEW}, B: {NEW, OLD}, D: {NEW}}) == NEW
    assert choose_root({A: [OLD], B: [OLD]}, {A: {NEW}, B: {NEW}}) == OLD, "nobody holds the newer one"


def test_what_several_agreed_on_comes_before_what_one_settled_alone():
    disks = {A: [NEW], B: [ALONE]}
    assert choose_restart(disks) == ALONE, "without signatures they cannot be told apart"
    assert choose_restart(disks, {A: {NEW}, B: {NEW, ALONE}}) == NEW
    assert choose_restart(disks, {A: {NEW}, B: {ALONE}}) == ALONE
    assert choose_restart(disks, {A: {NEW}, B: {ALONE}, C: {NEW}, D: {NEW}}) == ALONE, "C and D are not here"
    assert choose_restart({}) is None


# -- in a swarm -------------------------------------------------------------------------------------------


def trio(story, manifest=None):
    """Three peers of one stage, a story, a polite end."""
    swarm = Swarm(manifest or tiny_manifest((3,)))

    async def whole():
        swarm.open()
        await story(swarm)
        for name in swarm.living():
            swarm.members[name].worker.services.disk.folder = None  # It would write in a thread.
        await swarm.close()

    run(whole())
    return swarm


def settled(swarm):
    return min((settled for _, settled in swarm.rounds().values()), default=-1)


def test_a_peer_whose_weights_go_wrong_learns_it_and_fetches_those_of_the_others():
    async def story(swarm):
        for name in "abc":
            swarm.start(name, 0)
        await swarm.until(lambda: settled(swarm) >= 24, 60.0)  # More than the sets that are kept.
        replica = swarm.members["b"].worker.services.round_service.work.replica
        replica._settled[5] ^= 1 << 7
        await swarm.until(lambda: swarm.of("fetched", "b"), 30.0)
        later = settled(swarm) + 8
        await swarm.until(lambda: settled(swarm) > later, 60.0)

    swarm = trio(story)
    note = swarm.of("digest_differs", "b")[-1]
    assert note.fields["code"] == "in_minority"
    assert {entry.name for entry in swarm.of("digest_differs")} == {"a", "b", "c"}
    (wish,) = {note.fields["reason"] for note in swarm.of("resync", "b")}
    assert "2 peers agree on other weights" in wish
    digests, last = swarm.digests(0), note.fields["round"]
    assert digests["b"][last + 8] == digests["a"][last + 8] == digests["c"][last + 8]
    swarm.notes = [entry for entry in swarm.notes if not (
        entry.event == "settled" and entry.name == "b" and entry.time <= note.time)]  # fmt: skip
    assert shared_rounds(swarm) > 12


def shifted(manifest, by):
    """The first weights, each moved by so many units."""
    part = build_stage_part(manifest, 0)
    units = part.first_units()
    for entry in part.layout.entries:
        units[entry.offset : entry.offset + entry.size] += by
    return units


def statement(identity, run_id, round, units, chain=b"twelve bytes"):
    return seal(identity, run_id, EnvelopeKind.SETTLED, 0, round, round, chain + state_digest(round, units))


def test_a_restarted_group_goes_on_from_what_it_had_agreed_on_not_from_what_one_settled_alone(tmp_path):
    """The disk of b is lost, c had gone on alone: a's older weights have the names of all three."""
    manifest = tiny_manifest((3,))
    run_id, layout = sign(manifest).run_id, build_stage_part(manifest, 0).layout
    agreed, alone = shifted(manifest, 3), shifted(manifest, 5)
    names = {name: Identity.from_seed(name.encode()) for name in "abc"}
    words = [statement(identity, run_id, 7, agreed) for identity in names.values()]
    lonely = [statement(names["c"], run_id, 63, alone)]
    checkpoint_file.write(tmp_path / "a", manifest, 0, 7, b"twelve bytes", agreed, layout, words)
    checkpoint_file.write(tmp_path / "c", manifest, 0, 63, b"twelve bytes", alone, layout, lonely)

    async def story(swarm):
        for name in "abc":
            swarm.start(name, 0, checkpoints=tmp_path / name)
        await swarm.until(lambda: settled(swarm) >= 15, 60.0)

    swarm = trio(story, manifest)
    first = {name: min(digests) for name, digests in swarm.digests(0).items()}
    assert first == {"a": 8, "b": 8, "c": 8}
    assert shared_rounds(swarm) > 4


def test_words_are_kept_beside_the_checkpoint(tmp_path):
    manifest = tiny_manifest((3,))
    part, run_id = build_stage_part(manifest, 0), sign(manifest).run_id
    words = [statement(Identity.from_seed(name), run_id, 3, part.first_units()) for name in (b"a", b"b")]
    path = checkpoint_file.write(
        tmp_path, manifest, 0, 3, b"twelve bytes", part.first_units(), part.layout, words
    )
    assert checkpoint_file.restore_signed(path, run_id, 0, part.layout)[0].signed == tuple(words)


def test_forged_and_foreign_words_are_refused_or_ignored():
    async def story(swarm):
        for name in "ab":
            swarm.start(name, 0)
        await swarm.until(lambda: settled(swarm) >= 4, 60.0)
        worker, run_id = swarm.members["a"].worker, swarm.signed.run_id
        digests: SignedDigests = worker.services.digests
        before = {peer: set(roots) for peer, roots in digests.roots().items()}
        friend, stranger = swarm.members["b"].identity, Identity.from_seed(b"a stranger")
        units = worker.services.part.first_units()
        bad = bytearray(statement(friend, run_id, 99, units))
        bad[-1] ^= 1
        other = seal(friend, run_id, EnvelopeKind.SETTLED, 1, 99, 99, bytes(44))
        short = seal(friend, run_id, EnvelopeKind.SETTLED, 0, 99, 99, bytes(43))
        with pytest.raises(BadSignature):  # Its link ends by that.
            digests.message(friend.peer_id, Statements([bytes(bad)]))
        for data in (other, short, b"", statement(stranger, run_id, 99, units)):
            digests.message(friend.peer_id, Statements([data]))
        digests.restore([bytes(bad), other, short, b"", statement(stranger, run_id, 99, units)])
        after = {peer: set(roots) for peer, roots in digests.roots().items()}
        after.pop(stranger.peer_id)  # What the own disk holds may be of a peer that is not met yet.
        assert after == before
        assert worker.services.links.traffic.refused["malformed"] == 3

    trio(story)


def test_words_between_snapshots_displace_none_and_two_of_each_peer_are_passed_on():
    """One of this history and one of another: who is to see both is on either side."""

    async def story(swarm):
        for name in "abc":
            swarm.start(name, 0)
        await swarm.until(lambda: settled(swarm) >= 12, 60.0)
        worker, run_id = swarm.members["a"].worker, swarm.signed.run_id
        digests: SignedDigests = worker.services.digests
        before, friend = digests.roots(), swarm.members["b"].identity
        between = [round for round in digests._chains if not digests._is_turn(round)]
        units = worker.services.part.first_units()
        for round in between:
            for chain in (digests._chains[round], b"another one!"):
                word = statement(friend, run_id, round, units, chain)
                digests.message(friend.peer_id, Statements([word]))
        assert digests.roots() == before
        newest = [statement(friend, run_id, between[-1], units, chain)
                  for chain in (digests._chains[between[-1]], b"another one!")]  # fmt: skip
        told, post = {}, worker.services.links.post
        worker.services.links.post = lambda peer, lane, message: told.setdefault(peer, []).append(message)
        forked, branch_peer = swarm.members["c"].peer, friend.peer_id
        digests.sign((forked,))
        for peer in (forked, branch_peer):
            own, others = told[peer]
            assert len(own.statements) == 1
            assert {*newest} <= {*others.statements}
        digests._newest[friend.peer_id].pop(True)
        told.clear()
        digests.sign((forked,))
        assert [len(told[peer]) for peer in (forked, branch_peer)] == [2, 1], (
            "its own side has heard it itself"
        )
        worker.services.links.post = post

    trio(story)
