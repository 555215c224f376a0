"""The one word for what rounds are at."""

from typing import get_args

from round_group import RULES, Group

from peers.telemetry.metrics import PHASES
from swarmnet.identifiers import PeerId
from swarmnet.rounds.contribution_sets import kept_rounds
from swarmnet.rounds.events import Committed
from swarmnet.rounds.phase import Phase, phase_of

ONE, OTHER = PeerId("peer0"), PeerId("peer1")


def test_every_phase_has_its_series():
    assert {"none", *get_args(Phase)} == set(PHASES)


def test_a_round_gathers_then_the_contribution_is_made_then_those_of_others_are_waited_for():
    group = Group(2)
    group.run(1.0)
    here = group.peers[ONE]
    assert phase_of(here) == "gathering"
    group.handle(ONE, Committed(50))
    assert phase_of(here) == "gathering"
    group.cut = {(OTHER, ONE)}
    group.handle(ONE, Committed(50))
    assert phase_of(here) == "contributing", "it is not made yet"
    group.run(0.5 * RULES.deadline_seconds)
    assert phase_of(here) == "waiting", "nothing comes from the other one"
    group.run(RULES.deadline_seconds)
    assert here.applied == 0
    assert phase_of(here) == "gathering"


def test_a_newcomer_catches_up_with_what_the_group_has_settled():
    group = Group(3)
    group.run(10.0, tokens_per_second=50)
    late = PeerId("late")
    group.join(late, settled=group.peers[ONE].settled - 10, like=ONE)
    seen = []
    for _ in range(100):
        group.run(0.1, tokens_per_second=50)
        seen.append(phase_of(group.peers[late]))
    assert seen[0] in ("gathering", "catching_up"), "until it has heard of the others"
    assert "catching_up" in seen[:20]
    assert "catching_up" not in seen[-20:]


def test_a_round_that_may_not_end_before_older_ones_settle_says_so():
    group = Group(1)
    here = group.peers[ONE]
    far = here.settled + kept_rounds(RULES)
    here.applied, here.open_round.number = far - 1, far
    assert phase_of(here) == "gathering"
    here.applied, here.open_round.number = far, far + 1
    assert phase_of(here) == "settling"
