"""Whose contributions count: members', and nobody else's, without losing an honest one or parting a group."""

from __future__ import annotations

from random import Random

import pytest
from clocks import on_virtual_clock
from hostile import Liar
from hypothesis import example, given
from hypothesis import strategies as st
from owned_swarm import FOUR, OwnedSwarm
from round_group import RULES, Group, partitioned
from swarm import OWNER, Swarm, shared_rounds, tiny_manifest

from protocols.messages.table import Announce, Contribution, PeerRecord, encode
from protocols.messages.table import ContributionRef as WireReference
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.identity import Identity
from protocols.signed.invites import prove_invite, seal_invite
from protocols.signed.records import RECORD_BYTES, open_record, seal_record
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.membership.membership import FORGET_SECONDS, Membership
from swarmnet.rounds.contributors import (
    FEWEST_MAKERS,
    MAX_CONTRIBUTORS,
    MAX_OF_ONE,
    MAX_WAITING,
    ContributorFilter,
    UnknownContributors,
    max_contributors,
)
from swarmnet.rounds.events import (
    Announced,
    ContributionArrived,
    NeighbourJoined,
    NeighbourLeft,
    ProgressArrived,
    Reference,
    TimePassed,
)
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.history import START
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import NO_ORDER

ME, A, B, C, X = (PeerId(name) for name in ("me", "a", "b", "c", "x"))


# -- in a swarm ---------------------------------------------------------------------------------------


async def hands_on(
    swarm: Swarm, friend: Liar, contributors: list[Identity], victim: str, seconds: float
) -> int:
    """`friend` delivers contributions that these sign, with honest votes, to every open round; how many."""
    update, sent, seen = swarm.members[victim].worker.services.round_service, 0, set()
    end = swarm.loop.time() + seconds
    while swarm.loop.time() < end:
        for stored in list(update.store.stored.values()):
            round = stored.reference.round
            if round in seen or round <= update.rounds.settled:
                continue
            seen.add(round)
            for contributor in contributors:
                data = seal(
                    contributor, swarm.signed.run_id, EnvelopeKind.CONTRIBUTION, 1, round, 1, stored.payload
                )
                await friend.say(swarm.members[victim].peer, Contribution(), data)
                sent += 1
        await swarm.during(0.1)
    return sent


@pytest.mark.parametrize("access", ["open", pytest.param("invite", marks=pytest.mark.soak)])
@on_virtual_clock
async def test_a_crowd_of_keys_behind_one_link_has_no_votes(access):
    swarm = OwnedSwarm(tiny_manifest((2, 1), access=access), stub=True)
    swarm.open()
    invite = seal_invite(OWNER, swarm.signed.run_id, None, swarm.loop.time() + 1e6, swarm.loop.time())
    for name, stage in FOUR:
        swarm.start(name, stage, invite=invite)
    await swarm.training()
    friend = Liar(swarm, 1, invite=invite)
    crowd = [Identity.from_seed(b"nobody %d" % number) for number in range(8)]
    assert await hands_on(swarm, friend, crowd, "c", 10.0) > 100
    names = {contributor.peer_id for contributor in crowd}
    assert not [note for note in swarm.of("contribution_accepted") if note.fields["contributor"] in names]
    outcomes = swarm.members["c"].worker.services.round_service.outcomes
    assert outcomes["not_counted"] > 100
    assert "malformed" not in outcomes
    await friend.transport.close()
    await swarm.close()
    assert shared_rounds(swarm) > 10


@on_virtual_clock
async def test_of_a_banned_peer_nothing_is_taken_soon_after_though_a_friend_hands_it_on():
    swarm = OwnedSwarm(tiny_manifest((2, 1)), stub=True)
    swarm.open()
    for name, stage in (*FOUR, ("e", 1)):
        swarm.start(name, stage)
    await swarm.training()
    banned = swarm.members["e"]
    given = await swarm.give(owner_orders.ban(NO_ORDER, banned.peer, "sent nonsense"), "a")
    rounds = swarm.members["c"].worker.services.round_service.rounds
    heard_at, rules = rounds.current, swarm.signed.manifest.rounds
    await swarm.crash("e")  # Its friend speaks for it.
    await swarm.until(lambda: swarm.knows(given), 5.0)
    assert await hands_on(swarm, Liar(swarm, 1), [banned.identity], "c", 12.0) > 15
    taken = [
        note
        for note in swarm.of("contribution_accepted", "c", "d")
        if note.fields["contributor"] == banned.peer
    ]
    last = heard_at + rules.window + rules.snapshot_interval
    assert rounds.settled > last + 5, "rounds from which it is barred have settled"
    assert all(note.fields["round"] <= last for note in taken)
    await swarm.close()
    assert shared_rounds(swarm) > 10


def test_a_ban_bars_the_same_rounds_wherever_it_is_heard_within_a_block():
    for heard, begins in ((-1, 0), (0, 8), (4, 8), (5, 16), (12, 16), (13, 24)):
        membership = Membership(me=ME, stage=0, chance=Random(0))
        membership.recorded(X, 0, "worker", (), 1, b"", 0.0)
        membership.linked(X, 0.0)
        contributors = ContributorFilter(membership, RULES)
        contributors.bar([X], heard)
        contributors.bar([X, A], heard + 50)  # A later order that repeats it.
        assert [round for round in range(40) if contributors.counts(X, round)] == list(range(begins)), heard
        contributors.bar([X], heard + 50, {X}, heard + 3)  # A roll-back begins with what is open.
        begins = min(begins, heard + 4)
        assert [round for round in range(40) if contributors.counts(X, round)] == list(range(begins)), heard
        contributors.bar([], 0)
        assert contributors.counts(X, 39)


@on_virtual_clock
async def test_an_uninvited_record_is_neither_kept_nor_dialled_and_a_bearers_record_proves_its_invite():
    swarm = OwnedSwarm(tiny_manifest((2, 1), access="invite"), stub=True)
    swarm.open()
    now, run_id = swarm.loop.time(), swarm.signed.run_id

    def invite(peer):
        return seal_invite(OWNER, run_id, peer, now + 1e6, now)

    own = Identity.from_seed(b"b").peer_id
    swarm.start("a", 0, invite=invite(None))
    swarm.start("b", 1, invite=invite(own))
    await swarm.training()
    handed = invite(None)
    late = swarm.start("c", 1, invite=handed)
    await swarm.until(lambda: late.worker.state == "training", 20.0)
    stranger = Liar(swarm, 1)
    directory = swarm.network.directory(stranger.identity.peer_id)
    await directory.announce(run_id, 1, stranger.record, 5.0)
    for told in (stranger.record, Liar(swarm, 1, "other", shown := invite(own)).record):
        swarm.members["a"].worker.services.links.learn_all([told], swarm.members["b"].peer)
    await swarm.during(25.0)
    for name in "abc":
        around = swarm.members[name].worker.services.links
        assert around.membership.peers.keys() == {
            swarm.members[other].peer for other in "abc" if other != name
        }
        assert around.traffic.refused["not_invited"] > 0
    assert not stranger.heard, "nobody has dialled it"
    found = await directory.look_up(run_id, 1, 5.0)
    public = {peer: open_record(data, run_id).record.invite for peer, data in found.items()}
    proved = prove_invite(handed, run_id, late.peer)
    assert public == {own: shown, late.peer: proved, stranger.identity.peer_id: b""}
    await swarm.close()


def test_a_record_without_an_invite_is_as_it_was_and_one_with_the_longest_fits():
    liar = Identity.from_seed(b"x")
    content = [liar.peer_id, 0, "worker", ["/x" * 100] * 12, 1, 0.0, "1"]
    plain = PeerRecord(*content)
    run_id = "ab" * 32
    assert len(open_record(seal_record(liar, run_id, plain, 1.0), run_id).record.invite) == 0
    assert seal_record(liar, run_id, plain, 1.0)[120] == 0xDC
    longest = PeerRecord(*content, name="n" * 64, state="training", loss=1.0, invite=b"i" * 256)
    data = seal_record(liar, run_id, longest, 1.0)
    assert len(data) <= RECORD_BYTES
    assert open_record(data, run_id).record.invite == b"i" * 256


@on_virtual_clock
async def test_what_a_newcomer_makes_counts_with_those_who_can_not_reach_it_once_its_record_has_travelled():
    swarm = OwnedSwarm(tiny_manifest((2, 1), access="invite"), stub=True)
    swarm.open()
    invite = seal_invite(OWNER, swarm.signed.run_id, None, swarm.loop.time() + 1e6, swarm.loop.time())
    for name, stage in (("a", 0), ("b", 1), ("c", 1), ("d", 1)):
        swarm.start(name, stage, invite=invite)
    await swarm.training()
    late = Identity.from_seed(b"e").peer_id
    for name in "cd":
        there = swarm.members[name].peer
        swarm.network.block(late, there)
        swarm.network.block(there, late)
    swarm.start("e", 1, invite=invite)
    await swarm.until(lambda: len(swarm.of("contribution_made", "e")) > 5, 30.0)
    await swarm.during(8.0)
    mine = {note.fields["id"] for note in swarm.of("contribution_made", "e")[:5]}
    for name in "bcd":
        assert mine <= {name for note in swarm.of("settled", name) for name in note.fields["ids"]}
    assert not swarm.of("resync")
    for name in swarm.living():
        await swarm.crash(name)
    assert shared_rounds(swarm) > 5


# -- in a group ---------------------------------------------------------------------------------------


def group_with_newcomer(size: int, knowing: set[PeerId], seed: int = 0) -> Group:
    """`size` peers and `x`, which only those of `knowing` are linked to, and take for a member."""
    group = Group(size, seed)
    group.join(X)
    for peer in group.peers.keys() - {X} - knowing:
        group.cut |= {(X, peer), (peer, X)}
        group.handle(X, NeighbourLeft(peer))
        group.handle(peer, NeighbourLeft(X))
        group.peers[peer].admission.has_weight = lambda contributor, round: contributor != X
    return group


def peers(*numbers: int) -> set[PeerId]:
    return {PeerId(f"peer{number}") for number in numbers}


def made_by(group: Group, contributor: PeerId, until: int) -> set[ContributionId]:
    return {
        name
        for name, reference in group.made.items()
        if reference.peer == contributor and reference.round <= until
    }


def in_settled(group: Group, at: str) -> set[ContributionId]:
    return {reference.id for sets in group.settled[PeerId(at)].values() for reference in sets}


def test_what_half_of_the_group_holds_is_taken_by_those_who_never_met_its_maker():
    group = group_with_newcomer(4, peers(0, 1))
    group.run(20.0, tokens_per_second=50)
    assert group.shared_rounds_are_equal() >= 20
    assert not group.resynchronised
    mine = made_by(group, X, group.peers[PeerId("peer3")].settled)
    assert len(mine) >= 20
    assert mine <= in_settled(group, "peer3")


@pytest.mark.parametrize("seed", range(2))
def test_who_is_known_to_one_of_four_has_no_votes_and_parts_nobody_else(seed):
    group = group_with_newcomer(4, peers(0), seed)
    group.run(60.0, tokens_per_second=30)
    del group.settled[X]
    assert group.shared_rounds_are_equal() >= 5
    assert {peer for peer, _ in group.resynchronised} == {X}
    assert not made_by(group, X, 10**6) & in_settled(group, "peer0")


def test_the_first_contributions_of_a_newcomer_wait_until_it_is_known():
    group = Group(4)
    group.join(X)
    for peer in group.peers.keys() - {X, PeerId("peer0")}:
        admission = group.peers[peer].admission
        admission.has_weight = lambda contributor, round: contributor != X or group.now > 2.0
    group.run(2.0, tokens_per_second=50)
    early = made_by(group, X, 99)
    assert len(early) >= 2
    assert len(group.peers[PeerId("peer2")].admission.waiting) > 0
    group.run(15.0, tokens_per_second=50)
    assert early <= in_settled(group, "peer2")
    assert group.shared_rounds_are_equal() >= 20
    assert not group.resynchronised
    assert not group.given_back[X]


def test_who_comes_later_takes_up_settled_sets_whoever_made_them():
    group = Group(3)
    group.run(10.0, tokens_per_second=50)
    gone = PeerId("peer2")
    group.leave(gone)
    group.join(X, settled=group.peers[PeerId("peer0")].settled - 10, like=PeerId("peer0"))
    group.peers[X].admission.has_weight = lambda contributor, round: contributor != gone
    group.run(15.0, tokens_per_second=50)
    assert group.peers[X].in_step
    assert not group.resynchronised
    assert in_settled(group, X) & made_by(group, gone, 99)
    group.shared_rounds_are_equal()


def test_after_a_partition_both_sides_take_what_the_other_made_meanwhile():
    group = Group(5)
    group.run(5.0, tokens_per_second=50)
    partitioned(group, peers(0, 1))
    group.run(2.0, tokens_per_second=50)
    group.cut.clear()
    for one in group.peers:
        for other in group.peers.keys() - {one}:
            group.handle(one, NeighbourJoined(other))
    group.run(25.0, tokens_per_second=50)
    assert len({machine.chain.at(20) for machine in group.peers.values()}) == 1


# -- bounds -------------------------------------------------------------------------------------------


def machine_with(*same_branch_peers: PeerId, counts=lambda contributor, round: True) -> GroupRounds:
    machine = GroupRounds(rules=RULES, me=ME, settled=-1, now=0.0, has_weight=counts)
    for branch_peer in same_branch_peers:
        machine.handle(NeighbourJoined(branch_peer), 0.0)
        machine.handle(ProgressArrived(branch_peer, 0, 0, frozenset(), -1, True, -1, START, ()), 0.0)
    return machine


def reference(number: int, contributor: PeerId | None = None) -> Reference:
    return Reference(
        0, contributor or PeerId(f"maker {number}"), ContributionId(number.to_bytes(16, "big")), 10
    )


def held_after(machine: GroupRounds, references: list[Reference], *tellers: PeerId) -> int:
    for teller in tellers:
        machine.handle(Announced(teller, tuple(references)), 0.1)
    for each in references:
        machine.handle(ContributionArrived(tellers[0], each), 0.2)
    return len(machine.rounds[0].held) if 0 in machine.rounds else 0


def test_members_that_come_and_go_fill_twice_the_group_and_who_is_linked_still_finds_room():
    machine = machine_with(A, B, C)
    assert held_after(machine, [reference(number) for number in range(100)], A) == FEWEST_MAKERS - 1
    assert not machine.expects(0, PeerId("one more"))
    assert machine.expects(0, B)
    assert held_after(machine, [reference(101, B), reference(102, C)], B) == FEWEST_MAKERS + 1


def test_no_set_outgrows_one_announcement_though_half_of_the_group_names_it():
    machine = machine_with(A, B, C, counts=lambda contributor, round: False)
    crowd = [reference(number) for number in range(MAX_CONTRIBUTORS + 100)]
    held = 0
    for start in range(0, len(crowd), 100):
        held = held_after(machine, crowd[start : start + 100], A, B)
    assert held == MAX_CONTRIBUTORS - 1, "and the own one"
    assert max_contributors(10**6) == MAX_CONTRIBUTORS
    name = Identity.from_seed(b"x").peer_id
    longest = [WireReference(2**32 - 1, name, bytes(16), 2**26)] * MAX_CONTRIBUTORS
    assert len(encode(Announce(longest, [2**32 - 1]))) < 2**16
    assert MAX_CONTRIBUTORS < 2**15, "sums of votes, and the counts that Progress tells"


def test_what_one_of_four_names_is_not_asked_for():
    machine = machine_with(A, B, C, counts=lambda contributor, round: False)
    assert held_after(machine, [reference(number) for number in range(20)], A) == 0
    assert not len(machine.pulls)
    assert len(machine.admission.waiting) == 20


def test_nobody_waits_for_a_contribution_whose_maker_is_sent_away_meanwhile():
    sent_away: set[PeerId] = set()
    machine = machine_with(A, B, C, counts=lambda contributor, round: contributor not in sent_away)
    machine.handle(Announced(A, (reference(1, X),)), 0.1)
    assert machine.pulls.of_round(0)
    sent_away.add(X)
    assert not machine.expects(0, X)
    machine.handle(TimePassed(), 2.0)
    assert not machine.pulls.under_way(0)


@example([("b", 1, 42), ("a", 1, 298), ("b", 0, 0)])
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 40), st.integers(0, 700)), max_size=60))
def test_what_waits_is_bounded_in_all_and_of_one_neighbour(told):
    waiting = UnknownContributors()
    for peer, first, count in told:
        for number in range(first, first + count):
            waiting.named(PeerId(peer), reference(number))
        if first == 0:
            waiting.left(PeerId(peer))
        if first == 1:
            waiting.end(reference(count).id)
    assert len(waiting) <= MAX_WAITING
    for peer in "abcd":
        names = [r for r in waiting.due(1e9) if waiting.holders(r.id) == (peer,)]
        assert len(names) <= MAX_OF_ONE, "also of those that others named beside it and are gone"
    waiting.forget_until(0)
    assert len(waiting) == 0
    assert not waiting._named_alone


def test_however_many_neighbours_name_results_of_unknown_contributors_a_bounded_number_waits():
    waiting = UnknownContributors(lambda peer: False)
    results = [reference(number) for number in range(2 * MAX_WAITING)]
    for number, result in enumerate(results):
        waiting.record_unknown_in_result(PeerId(f"neighbour {number % 16}"), result, [X])
    assert len(waiting) == MAX_WAITING
    remembered = [result for result in results if waiting.names_strangers(result.id)]
    assert remembered == results[MAX_WAITING:], "the oldest are forgotten"


# -- members ------------------------------------------------------------------------------------------


def known(membership: Membership, peer: PeerId, stage: int = 0, sequence: int = 1, **more) -> None:
    membership.recorded(peer, stage, "worker", (), sequence, b"r", 0.0, **more)


def test_a_record_makes_no_member_of_a_small_open_group_and_a_link_does():
    membership = Membership(me=ME, stage=0, chance=Random(0))
    known(membership, X)
    for number in range(50):
        known(membership, PeerId(f"only a record {number}"))
    assert not membership.is_member(X)
    membership.linked(X, 0.0)
    assert membership.is_member(X)
    membership.unlinked(X, 5.0)
    assert membership.is_member(X), "killed, maybe: what it made counts"
    assert not membership.is_member(PeerId("nobody"))


@pytest.mark.parametrize("ends", ["left", "moved"])
def test_who_has_left_the_group_stays_a_maker_for_a_while(ends):
    membership = Membership(me=ME, stage=0, chance=Random(0))
    known(membership, X)
    membership.linked(X, 0.0)
    membership.left(X) if ends == "left" else known(membership, X, stage=1, sequence=2)
    assert membership.is_member(X)
    membership.forget_old(FORGET_SECONDS + 1.0)
    assert not membership.is_member(X)


def test_in_a_run_by_invite_whose_invite_was_seen_is_a_member():
    membership = Membership(me=ME, stage=0, chance=Random(0), by_invite=True)
    known(membership, X)
    known(membership, A, invited=True)
    assert not membership.is_member(X)
    assert membership.is_member(A)


def test_in_a_group_too_large_to_be_linked_whole_records_are_members():
    membership = Membership(me=ME, stage=0, chance=Random(0))
    group = [PeerId(f"peer {number}") for number in range(40)]
    for peer in group:
        known(membership, peer)
    assert not membership.is_member(group[-1]), "nobody was reached yet"
    for peer in group[:8]:
        membership.linked(peer, 0.0)
    assert membership.is_member(group[-1])
    assert not membership.is_member(PeerId("nobody"))
