"""Which neighbours are on which history, by what they tell of their chains; and one that tells each of two
sides that it is with it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import round_group
from round_group import Group, partitioned

from swarmnet.identifiers import PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.events import (
    ChainArrived,
    ChainSigned,
    Effect,
    FetchGroupState,
    NeighbourJoined,
    OpenSet,
    ProgressArrived,
    RequestChain,
    SendProgress,
    SignChain,
)
from swarmnet.rounds.fork_choice import LISTEN_SECONDS, MAX_AHEAD, SIGNED_SECONDS, ForkChoice, Signed
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.history import START, Chain, SettledSet
from swarmnet.run.schema import Rounds

OLD, NEW, THIRD = PeerId("old"), PeerId("new"), PeerId("third")
RULES = Rounds(window=2, snapshot_interval=4)


def settled(branch: str, round: int) -> SettledSet:
    return SettledSet(1, f"{branch}{round:07}"[-8:].encode())


def chain(branch: str, last: int, fork: int) -> Chain:
    """All branches are the same up to the round before `fork`."""
    found = Chain()
    for round in range(last + 1):
        found.append(settled("x" if round < fork else branch, round))
    return found


def restarted(earlier: Chain, at: int) -> Chain:
    """What a peer that has started again from its disk knows of the history that it had."""
    value = earlier.at(at)
    assert value is not None
    return Chain(at, value, earlier.earlier(at))


def told(peer: PeerId, their: Chain, anchor: int) -> ProgressArrived:
    value = their.at(anchor)
    assert value is not None
    sets = tuple(
        OpenSet(round, 1, 1, entry.count, entry.digest)
        for round, entry in enumerate(their.part(anchor + 1, their.round), start=anchor + 1)
    )
    return ProgressArrived(peer, their.round + 1, 0, frozenset(), their.round, True, anchor, value, sets)


def of(mine: Chain, *peers: PeerId) -> ForkChoice:
    return ForkChoice(rules=RULES, chain=mine, neighbours={peer: NeighbourView() for peer in peers}, now=0.0)


def wishes(effects: list[Effect]) -> list[FetchGroupState]:
    return [effect for effect in effects if isinstance(effect, FetchGroupState)]


def test_peers_of_one_history_stand_together_though_one_does_not_know_where_it_began():
    mine, theirs = chain("m", 28, 20), chain("t", 30, 20)
    histories = of(mine, OLD, NEW)
    assert not wishes(histories.progress(told(OLD, theirs, 19), 9.0)), "one against one, and mine is smaller"
    (ask,) = histories.progress(told(NEW, theirs, 26), 9.0)
    assert ask == RequestChain(NEW, 28)
    answer = histories.chain_arrived(NEW, 26, theirs.at(25) or b"", tuple(theirs.part(26, 28)), 9.0)
    (resync_request,) = wishes(answer)
    assert set(resync_request.peers) == {OLD, NEW}
    assert (resync_request.fork_round, resync_request.exact) == (20, True), "the one that knows tells it"


def test_a_neighbour_that_took_up_another_history_is_asked_again_where_it_parts():
    mine, first, second = chain("m", 28, 22), chain("t", 25, 18), chain("u", 30, 22)
    histories = of(mine, OLD, NEW, THIRD)
    for peer in (NEW, THIRD):
        histories.progress(told(peer, mine, 20), 9.0)
    histories.progress(told(OLD, first, 17), 9.0)
    fork = histories.neighbours[OLD].fork
    assert fork is not None
    assert fork.round == 18
    assert histories.progress(told(OLD, second, 24), 9.1) == [RequestChain(OLD, 28)]
    histories.chain_arrived(OLD, 20, second.at(19) or b"", tuple(second.part(20, 28)), 9.2)
    fork = histories.neighbours[OLD].fork
    assert fork is not None
    assert fork.round == 22
    histories.progress(told(OLD, chain("u", 31, 22), 29), 9.3)
    assert histories.neighbours[OLD].fork == fork, "it goes on on the same one"


def test_tokens_count_for_the_round_that_a_neighbour_just_left_and_for_none_that_it_never_reported():
    mine = chain("m", 2, 9)
    histories = of(mine, OLD)
    view, progress = histories.neighbours[OLD], told(OLD, mine, 0)
    for round, tokens in ((3, 50), (4, 7), (4, 9)):
        histories.progress(replace(progress, round=round, tokens=tokens), 9.0)
    assert [view.tokens_for(round) for round in (2, 3, 4, 5)] == [0, 50, 9, 0]
    histories.progress(replace(progress, round=6, tokens=1), 9.1)
    assert [view.tokens_for(round) for round in (4, 5, 6)] == [0, 0, 1]


def test_who_took_up_the_others_history_out_of_our_reach_stands_with_them():
    mine, theirs, departed = chain("m", 28, 22), chain("u", 40, 22), chain("z", 25, 18)
    histories = of(mine, THIRD, OLD, NEW)
    told_before = [told(THIRD, departed, 17), told(OLD, chain("u", 30, 22), 20), told(NEW, theirs, 20)]
    for progress in told_before:
        assert not wishes(histories.progress(progress, 9.0)), "two of four are no majority"
    assert not wishes(histories.progress(told(THIRD, theirs, 35), 9.1)), "it may not know yet where we are"
    (resync_request,) = wishes(histories.progress(told(NEW, theirs, 27), 9.2))
    assert {THIRD, NEW} <= set(resync_request.peers)
    assert (resync_request.fork_round, resync_request.exact) == (22, True)


def test_who_has_not_come_as_far_as_the_fork_supports_neither_side():
    left, right, newcomer = chain("m", 28, 20), chain("t", 28, 20), chain("x", 15, 20)
    resolved = []
    for mine, theirs in ((left, right), (right, left)):
        histories = of(mine, OLD, NEW)
        histories.progress(told(NEW, newcomer, 10), 9.0)
        assert not wishes(histories.progress(told(OLD, theirs, 19), 9.0)), "it may come to one of them yet"
        resolved += wishes(histories.progress(told(OLD, theirs, 19), 9.0 + LISTEN_SECONDS))
    (resync_request,) = resolved
    assert resync_request.fork_round == 20


def test_two_sides_that_have_just_parted_do_not_both_give_up():
    left, right = chain("m", 20, 20), chain("t", 20, 20)
    one, two, three = (PeerId(f"left {number}") for number in range(3))
    # Of its own side each has not heard yet that it has come as far as the fork.
    of_left, of_right = of(left, two, three, OLD, NEW), of(right, NEW, one, two, three)
    behind = chain("x", 19, 20)
    for peer in (two, three):
        of_left.progress(told(peer, behind, 15), 9.0)
    of_right.progress(told(NEW, behind, 15), 9.0)
    for peer in (OLD, NEW):
        assert not wishes(of_left.progress(told(peer, right, 15), 9.1)), "two of five are no majority"
    gave_up = [bool(wishes(of_right.progress(told(peer, left, 15), 9.1))) for peer in (one, two, three)]
    assert gave_up == [False, False, True], "three of five are one"
    for peer in (two, three):
        of_left.progress(told(peer, left, 15), 9.2)
    assert not wishes(of_left.progress(told(OLD, right, 15), 9.9))


def test_who_may_still_take_up_either_history_does_not_go_on_with_the_sets_of_both():
    mine, left, right = chain("x", 19, 20), chain("m", 25, 20), chain("t", 25, 20)
    histories = of(mine, OLD, NEW)
    for peer, theirs in ((OLD, left), (NEW, right)):
        histories.progress(told(peer, theirs, 17), 9.0)
    assert set(histories.same_branch_peers) == {OLD, NEW}, "up to here they are one"
    histories.settle(settled("m", 20))
    assert set(histories.same_branch_peers) == {OLD}
    fork = histories.neighbours[NEW].fork
    assert fork is not None
    assert (fork.round, fork.exact) == (20, True)


def test_where_an_ally_that_took_up_another_history_parted_is_asked_not_guessed():
    """It was far ahead of us with it when it told so: the first set of it that we can compare is not where
    the histories part, and what was made between is given back only if that is known."""
    histories = of(chain("m", 11, 9), OLD)
    histories.progress(told(OLD, chain("m", 11, 9), 7), 9.0)
    assert set(histories.same_branch_peers) == {OLD}
    theirs = chain("t", 17, 9)
    assert not wishes(histories.progress(told(OLD, theirs, 15), 9.0)), "too far ahead to compare"
    for round in range(12, 17):
        histories.settle(settled("m", round))
    assert not histories.same_branch_peers
    fork = histories.neighbours[OLD].fork
    assert fork is None
    (ask,) = histories.progress(told(OLD, theirs, 15), 9.0)
    assert ask == RequestChain(OLD, 16)


def test_who_started_again_sees_at_once_that_the_others_began_farther_back():
    mine = restarted(chain("m", 15, 8), 15)
    mine.append(settled("m", 16))
    theirs = chain("t", 8, 8)
    histories = of(mine, OLD, NEW)
    assert not wishes(histories.progress(told(OLD, theirs, 7), 9.0)), "one of three: it stays where it is"
    (resync_request,) = wishes(histories.progress(told(NEW, theirs, 7), 9.0))
    assert set(resync_request.peers) == {OLD, NEW}
    assert (resync_request.fork_round, resync_request.exact) == (8, True)


def test_of_two_halves_the_one_that_started_farther_back_comes_to_the_other():
    mine, theirs = restarted(chain("m", 15, 8), 15), chain("t", 9, 8)
    here, there = of(mine, OLD), of(theirs, NEW)
    assert not any(wishes(here.progress(told(OLD, theirs, 7), at)) for at in (9.0, 99.0))
    assert not wishes(there.progress(told(NEW, mine, 15), 9.0)), "it may only not know where we are"
    assert wishes(there.progress(told(NEW, mine, 15), 99.0))


def test_nobody_is_an_ally_by_what_is_only_remembered():
    mine, theirs = restarted(chain("m", 15, 16), 15), chain("m", 7, 16)
    histories = of(mine, OLD)
    assert histories.progress(told(OLD, theirs, 5), 9.0) == []
    assert not histories.same_branch_peers, (
        "the sets after the seventh round are not here: it would wait for them"
    )
    assert histories.anchor()[0] == 15
    histories.progress(told(OLD, chain("m", 15, 16), 10), 9.0)
    assert set(histories.same_branch_peers) == {OLD}


def test_newcomers_without_weights_do_not_hold_up_who_is_out_of_reach():
    group, newcomers = (OLD, NEW, THIRD), [PeerId(f"newcomer {number}") for number in range(4)]
    histories = of(chain("m", 3, 9), *group)
    for peer in newcomers:
        histories.neighbours[peer] = NeighbourView(linked_at=9.0)
    far = chain("m", 60, 90)
    assert not any(wishes(histories.progress(told(peer, far, 50), 9.0)) for peer in group), "not heard yet"
    (resync_request,) = wishes(histories.progress(told(OLD, far, 50), 9.0 + LISTEN_SECONDS))
    assert set(resync_request.peers) == set(group)


LIAR = PeerId("liar")
APART_SECONDS = 10.0
SEVERAL = 3
"""Rounds, in seconds: a statement of one that settles after SIGNED_SECONDS has gone to all by then."""


class Courted(Group):
    """And one more, who says to each what that one says itself: the same history, its sets, sealed by all.
    `signs`: for whom it puts its name to that, as well."""

    def __init__(self, count: int, signs: frozenset[PeerId] = frozenset(), seed: int = 0) -> None:
        self.signs = signs
        self.is_courted = False
        self.words: dict[PeerId, dict[tuple[PeerId, bool], ChainSigned]] = {}
        self.giving_way: dict[PeerId, PeerId] = {}
        self.gave_way: set[PeerId] = set()
        super().__init__(count, seed)

    def courted(self) -> None:
        self.is_courted = True
        for peer in self.peers:
            self.handle(peer, NeighbourJoined(LIAR))

    def say(self, word: ChainSigned, to: PeerId) -> None:
        is_ours = self.peers[to].chain.at(word.round) in (word.value, None)
        self.words.setdefault(to, {})[word.peer, is_ours] = word
        self.post(word.peer, to, word)

    def carry_out(self, me: PeerId, effect: object) -> None:
        match effect:
            case SendProgress() if self.is_courted and LIAR in effect.peers:
                sets = tuple(replace(each, gathered=9, sealed=9) for each in effect.sets)
                said = ProgressArrived(
                    LIAR, effect.round, 0, frozenset(), effect.settled, True, effect.anchor_round,
                    effect.anchor, sets,
                )  # fmt: skip
                self.post(LIAR, me, said)
                if me in self.signs:
                    self.say(ChainSigned(LIAR, effect.settled, self.peers[me].chain.value), me)
            case SignChain(forked):
                own = self.peers[me].chain
                for peer in self.peers.keys() - {me}:
                    self.say(ChainSigned(me, own.round, own.value), peer)
                words = dict(self.words.get(me, {}))
                contested = {peer for peer, is_ours in words if not is_ours}
                for peer in self.peers.keys() - {me}:
                    for (of, _), word in words.items():
                        if peer in forked or of in contested:
                            self.say(word, peer)
            case FetchGroupState(peers):
                like = next((peer for peer in peers if peer in self.peers), None)
                if like is not None:
                    self.giving_way[me] = like
        super().carry_out(me, effect)

    def give_way(self) -> None:
        """Whoever is to takes up the state of the peer that it names."""
        for me, like in self.giving_way.items():
            chain, neighbours = self.peers[like].chain, list(self.peers[me].neighbours)
            self.peers[me] = GroupRounds(
                rules=round_group.RULES,
                me=me,
                settled=chain.round,
                now=self.now,
                chain_value=chain.value,
                earlier=chain.earlier(chain.round),
            )
            self.weights[me] = {}
            self.settled[me] = dict(self.settled[like])
            for peer in neighbours:
                self.handle(me, NeighbourJoined(peer))
            self.words.pop(me, None)
        self.gave_way |= self.giving_way.keys()
        self.giving_way = {}

    def histories(self) -> int:
        oldest = min(rounds.settled for rounds in self.peers.values())
        return len({rounds.chain.at(oldest) for rounds in self.peers.values()})

    def go_on(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.run(1.0, tokens_per_second=40.0)
            self.give_way()

    def heals_within(self, seconds: float) -> bool:
        for _ in range(int(seconds)):
            self.go_on(1.0)
            if self.histories() == 1:
                return True
        return False


def departed(left: int, right: int, signs: tuple[int, ...] = (), seed: int = 0) -> Courted:
    """Both sides have settled rounds without the other, and see each other again; the liar courts all."""
    names = [PeerId(f"peer{number}") for number in range(left + right)]
    group = Courted(left + right, frozenset(names[number] for number in signs), seed)
    group.run(APART_SECONDS, tokens_per_second=40.0)
    side = set(names[:left])
    partitioned(group, side)
    group.courted()
    group.run(APART_SECONDS, tokens_per_second=40.0)
    assert group.histories() == 2
    group.cut.clear()
    for one in names:
        for other in names:
            if (one in side) != (other in side):
                group.handle(one, NeighbourJoined(other))
    return group


@pytest.mark.parametrize("signs", [(), (0, 1), (2, 3), (0, 1, 2, 3), (0,), (0, 3)])
@pytest.mark.parametrize("seed", range(2))
def test_two_halves_become_one_though_somebody_tells_each_that_it_is_on_its_side(signs, seed):
    group = departed(2, 2, signs, seed)
    assert group.heals_within(SIGNED_SECONDS + SEVERAL)
    assert len(group.gave_way) == 2, "one side, and not both"
    group.go_on(APART_SECONDS)
    assert group.histories() == 1
    assert group.shared_rounds_are_equal() > 10


def test_unequal_sides_need_no_signatures():
    group = departed(2, 3)
    assert group.heals_within(SEVERAL)
    assert group.gave_way == {PeerId("peer0"), PeerId("peer1")}


def test_who_is_alone_with_a_longer_history_moves_nobody_whose_group_has_signed_its_own():
    group = Courted(4)
    group.run(APART_SECONDS, tokens_per_second=40.0)
    alone = Chain()
    for round in range(200):
        alone.append(SettledSet(9, f"alone{round:03}".encode()))
    for peer in group.peers:
        group.handle(peer, NeighbourJoined(LIAR))

    claim = ProgressArrived(LIAR, 200, 0, frozenset(), 199, True, 199, alone.value, ())

    def tell() -> None:
        for peer in group.peers:
            group.post(LIAR, peer, claim)
            group.post(LIAR, peer, ChainArrived(LIAR, 0, START, tuple(alone.part(0, 199))))
            group.post(LIAR, peer, ChainSigned(LIAR, 12, alone.at(12) or b""))

    for _ in range(3 * int(SIGNED_SECONDS)):
        tell()
        group.run(1.0, tokens_per_second=40.0)
    assert group.giving_way == {}
    assert group.histories() == 1
    assert group.peers[PeerId("peer0")].settled > 20


@dataclass
class Heard:
    chain: Chain = field(default_factory=Chain)
    signed: Signed = field(default_factory=Signed)

    def settle(self, count: int) -> None:
        for _ in range(count):
            self.chain.append(SettledSet(1, b"a set   "))
            self.signed.settled(self.chain)


def test_what_is_signed_of_rounds_ahead_is_told_apart_when_they_settle():
    heard = Heard()
    heard.settle(3)
    later = Heard()
    later.settle(5)
    for value in (later.chain.value, b"another", b"a third"):
        heard.signed.take(4, value, heard.chain)
    assert (heard.signed.ours, heard.signed.others) == (-1, -1)
    heard.settle(2)
    assert (heard.signed.ours, heard.signed.others) == (4, 4)


def test_words_on_far_rounds_take_no_room():
    heard = Heard()
    for round in range(10_000):
        heard.signed.take(round, b"another", heard.chain)
    assert len(heard.signed._ahead) == MAX_AHEAD
