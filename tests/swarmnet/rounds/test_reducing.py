"""Whom the slices of a round are for, and when a reducer adds up what came."""

from __future__ import annotations

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.history import START, Chain, SettledSet
from swarmnet.rounds.reducing import WAIT_SHARE, ReductionSchedule
from swarmnet.rounds.result_table import Contributor, Draw, Table
from swarmnet.run.schema import Rounds

RULES = Rounds(contribution_timeout_seconds=4.0)
HALF = WAIT_SHARE * RULES.contribution_timeout_seconds
ME, A, B, C, D = (PeerId(name) for name in ("me", "a", "b", "c", "d"))
WINDOW = RULES.window
DRAW = Draw(b"run", 4, 3, WINDOW)
INFINITE = float("inf")


def seen(in_step: bool = True, settled: int = -1) -> NeighbourView:
    view = NeighbourView(linked_at=0.0)
    view.in_step, view.settled = in_step, settled
    return view


def settled(last: int) -> Chain:
    """A history up to this round."""
    chain = Chain()
    for number in range(last + 1):
        chain.append(SettledSet(1, b"%12d" % number))
    return chain


def value(round: int) -> bytes:
    """From which the reducers of a round are drawn in that history."""
    return settled(400).at(DRAW.seed_round(round)) if DRAW.seed_round(round) >= 0 else START


def reducing(*members: PeerId, **same_branch_peers: NeighbourView) -> ReductionSchedule:
    """Of a peer that is drawn for everything where it is the only member."""
    found = ReductionSchedule(
        rules=RULES,
        draw=DRAW,
        me=ME,
        same_branch_peers={PeerId(name): view for name, view in same_branch_peers.items()},
        chain=settled(400),
    )
    found.members = frozenset((ME, *members))
    return found


def round_of(reducing: ReductionSchedule, mine: bool) -> int:
    """The first for which this peer is drawn, or is not."""
    return next(number for number in range(400) if (ME in reducing.reducers(number)) == mine)


def test_the_slices_of_a_round_go_to_those_who_are_drawn_among_the_members():
    assert reducing().reducers(7) == (ME,) * 3
    assert reducing(A, B).reducers(7) == DRAW.reducers(7, (B, ME, A), value(7))


def test_it_waits_for_everybody_who_is_in_step():
    one = reducing(a=seen(), b=seen())
    assert one.close(5, True, 10.0)
    for peer in (A, ME):
        one.slices_arrived(peer, 5, True, True, 10.1)
        assert one.due(10.1) == []
    one.slices_arrived(B, 5, True, True, 10.2)
    assert one.due(10.2) == [5]


def tells(one: ReductionSchedule, round: int, is_in: bool) -> None:
    """A's result of a round to which this peer has contributed, sending all to A."""
    mine, other = (Contributor.of(peer, ContributionId(f"{peer} {round:10}".encode()), 1) for peer in (ME, B))
    one.sliced(round, ContributionId(mine.contribution), (A,) * 3)
    held = frozenset((mine, other) if is_in else (other,))
    one.read(A, round, Table(dict.fromkeys(range(3), held)))


def test_who_leaves_out_what_this_peer_sends_three_times_in_a_row_is_sent_nothing_for_a_while():
    one = reducing(A)
    for number, is_in in enumerate([False, False, True, False, False]):
        tells(one, number, is_in)
    drawn = [number for number in range(5, 9) if A in DRAW.reducers(number, one.members, value(number))]
    assert drawn, "it has its turn in this block"
    assert all(A in one.reducers(number) for number in drawn)
    tells(one, 5, False)
    assert not any(A in one.reducers(number) for number in drawn)
    assert any(A in one.reducers(number) for number in range(10, 40)), "it may again"


def made_by(peer: PeerId, round: int = 5) -> Contributor:
    return Contributor.of(peer, ContributionId(f"{peer} {round:10}".encode()), 1)


def result_with(*peers: PeerId, shards: tuple[int, ...] = (0, 1, 2)) -> Table:
    return Table(dict.fromkeys(shards, frozenset(map(made_by, peers))))


def draws_after(*results: tuple[PeerId, Table]) -> bool:
    """Whether A still reduces for this peer in the next block, after these results of round 5, for which this
    peer sent shard 0 to A and the others to B."""
    one = reducing(A, B, C)
    one.sliced(5, ContributionId(made_by(ME).contribution), (A, B, B))
    for reducer, table in results:
        one.read(reducer, 5, table)
    return any(A in one.reducers(number) for number in range(6, 9))


def test_whose_result_is_too_small_to_count_for_lack_of_others_too_is_sent_nothing_from_then_on():
    assert draws_after(), "it has its turn in this block"
    of_all, of_itself = (B, result_with(ME, A, B, C, D, shards=(1, 2))), (A, result_with(A))
    assert not draws_after(of_all, of_itself)
    assert not draws_after(of_itself, of_all), "in whatever order they come"
    assert draws_after(of_all, (A, result_with(A, B, C))), "it counts; this peer may have been late"
    assert draws_after(of_all, (A, result_with(ME, A))), "it added up what it was sent"
    assert draws_after(of_all, (A, result_with(C, shards=(1,)))), "nobody's slices of shard 0 came in time"


def test_what_is_too_small_to_count_is_known_by_the_largest_result_of_the_round():
    one, small, large = reducing(A, B, C), result_with(A), result_with(ME, B, C, shards=(2,))
    one.read(A, 5, small)
    assert one.countable(5, small) == small
    one.read(B, 5, large)
    assert one.countable(5, small).shards == {}
    assert one.countable(5, large) == large
    assert one.countable(6, small) == small
    one.forget_until(5)
    assert not one._largest
    assert not one._left_out


def test_whose_result_never_comes_is_sent_nothing_for_a_while_like_who_leaves_out():
    one = reducing(A)
    drawn = [number for number in range(10, 14) if A in one.reducers(number)]
    assert drawn, "it has its turn in this block"
    for number in range(5, 8):
        assert all(A in one.reducers(number) for number in drawn)
        one.sliced(number, ContributionId(b"%16d" % number), (A, ME, A))
        one.forget_until(number)
    assert not any(A in one.reducers(number) for number in range(7 + WINDOW, 7 + WINDOW + 4))


def test_who_gives_no_answer_again_and_again_is_avoided_twice_as_long_each_time():
    one, avoided, until = reducing(A), [], 0
    for _ in range(9):
        one.avoid(A, until)
        one.avoid(A, until)  # Of another shard.
        one.forget_until(until)
        begins, until = until, next(number for number in range(until, 10**4) if number >= one._avoided[A][0])
        avoided.append(until - begins)
    assert avoided == [4, 8, 16, 32, 64, 128, 256, 256, 256]
    one.avoid(A, until + 256)
    assert one._avoided[A] == (until + 256 + 4, 4), "it has been good for as long"


def test_a_word_of_nothing_is_as_good_as_slices():
    one = reducing(a=seen(), b=seen())
    one.close(5, False, 10.0)
    one.slices_arrived(A, 5, True, True, 10.1)
    assert one.due(10.1) == []
    one.slices_arrived(B, 5, False, True, 10.2)
    assert one.due(10.2) == [5], "and who closes a round with nothing of its own has said its word"


def test_for_those_who_are_not_in_step_or_have_settled_the_round_nobody_waits():
    one = reducing(a=seen(in_step=False), b=seen(settled=5), c=seen(settled=4))
    one.close(5, False, 10.0)
    assert one.due(10.0) == [], "c may contribute yet"
    one.slices_arrived(C, 5, True, True, 10.1)
    assert one.due(10.1) == [5]


def test_a_member_that_is_no_neighbour_and_a_neighbour_that_is_about_to_leave_are_waited_for():
    members_only, leaving = reducing(A), reducing(a=seen())
    for one in (members_only, leaving):
        number = round_of(one, mine=True)
        one.close(number, False, 10.0)
        assert one.due(10.0) == []
        one.slices_arrived(A, number, True, True, 10.1)
        assert one.due(10.1) == [number]


def test_it_waits_half_of_the_deadline_and_no_longer():
    one = reducing(a=seen(), b=seen())
    one.close(5, False, 10.0)
    one.slices_arrived(A, 5, True, True, 10.1)
    assert one.next_deadline() == 10.0 + HALF
    assert one.due(10.0 + HALF - 0.01) == []
    assert one.due(one.next_deadline()) == [5]
    assert one.next_deadline() == INFINITE


def test_who_is_not_drawn_has_nothing_to_add_up():
    one = reducing(A, B, C)
    number = round_of(one, mine=False)
    assert not one.close(number, True, 10.0)
    assert one.next_deadline() == INFINITE
    assert one.due(1000.0) == []


def test_who_was_drawn_by_others_only_begins_when_the_first_slices_come():
    one = reducing(A, B, C)
    number = round_of(one, mine=False)
    one.close(number, False, 10.0)
    one.slices_arrived(A, number, False, True, 10.5)
    assert one.next_deadline() == INFINITE, "that somebody has nothing is no reason to begin"
    one.slices_arrived(B, number, True, True, 11.0)
    assert one.next_deadline() == 11.0 + HALF
    one.slices_arrived(C, number, True, True, 12.0)
    assert one.next_deadline() == 11.0 + HALF, "what comes later does not put it off"
    assert one.due(12.0) == [number]


def test_slices_that_come_before_the_round_is_closed_here_wait_for_that():
    one = reducing(A, B, C)
    number = round_of(one, mine=False)
    one.slices_arrived(A, number, True, False, 1.0)
    assert one.next_deadline() == INFINITE
    assert one.due(100.0) == []
    assert one.close(number, False, 100.0), "though it was not drawn"
    assert one.next_deadline() == 100.0 + HALF


def test_each_round_is_added_up_once():
    one = reducing(a=seen(), b=seen())
    one.close(5, False, 10.0)
    one.slices_arrived(A, 5, True, True, 10.1)
    assert one.takes(B, 5)
    assert not one.takes(A, 5), "nobody twice"
    assert one.due(20.0) == [5]
    assert not one.takes(B, 5), "too late"
    one.slices_arrived(B, 5, True, True, 20.1)
    assert one.due(99.0) == []
    assert one.next_deadline() == INFINITE


def test_who_had_nothing_may_still_send_slices():
    one = reducing(a=seen())
    one.slices_arrived(A, 5, False, False, 1.0)
    assert one.takes(A, 5)


def test_rounds_under_way_wait_each_for_itself():
    one = reducing(a=seen())
    one.close(5, False, 10.0)
    one.close(6, False, 11.0)
    one.slices_arrived(A, 6, True, True, 11.1)
    assert one.due(11.1) == [6]
    assert one.due(10.0 + HALF) == [5]


def test_settled_rounds_are_forgotten():
    one = reducing(a=seen())
    for number in (5, 6, 7):
        one.close(number, False, 10.0)
    one.slices_arrived(A, 5, True, True, 10.0)
    assert one.due(10.0) == [5]
    one.forget_until(6)
    assert one.next_deadline() == 10.0 + HALF
    assert one.due(99.0) == [7]
    for kept in (one._responded, one._sent_slices, one._sum_by, one._summed):
        assert all(number > 6 for number in kept)
