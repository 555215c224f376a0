"""Where a worker starts from when it fetches the state anew."""

from __future__ import annotations

from peers.recovery import newest_wish
from swarmnet.identifiers import PeerId
from swarmnet.round_events import Resynchronise

LIAR, HONEST = PeerId("liar"), PeerId("honest")


def test_who_fell_behind_asks_those_met_since_and_not_for_ever_the_first_one():
    first, later = Resynchronise((LIAR,), "far behind"), Resynchronise((LIAR, HONEST), "far behind")
    assert newest_wish(None, first) == first
    assert newest_wish(first, later) == later


def test_a_history_that_was_given_up_stays_so_and_those_met_since_are_asked():
    forked, behind = Resynchronise((LIAR,), "forked", 7), Resynchronise((LIAR, HONEST), "far behind")
    both = newest_wish(forked, behind)
    assert both.peers == behind.peers
    assert both.fork_round == forked.fork_round
    assert not both.exact, "they may be on a third history"
    assert newest_wish(both, behind) == both
    assert newest_wish(behind, forked) == forked
    nearer = Resynchronise((HONEST, LIAR), "forked", 5)
    assert newest_wish(forked, nearer) == nearer
