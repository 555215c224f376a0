"""When a round settles against what allies say of it."""

from __future__ import annotations

from swarmnet.agreement import Agreement
from swarmnet.identifiers import PeerId
from swarmnet.manifest import Rounds
from swarmnet.round_events import OpenSet
from swarmnet.round_sets import NeighbourView, RoundSet

RULES = Rounds(settle_seconds=3.0)


def ally(in_step: bool, digest: bytes | None) -> NeighbourView:
    sets = {} if digest is None else {5: OpenSet(5, True, 0, digest)}
    return NeighbourView(round=9, in_step=in_step, sets=sets, relation="same")


def settles(now: float, *allies: NeighbourView) -> bool:
    state = RoundSet(closed_at=0.0, sealed=True, sealed_at=1.0)
    views = {PeerId(f"p{number}"): view for number, view in enumerate(allies)}
    return Agreement(RULES, views).may_settle(5, state, False, now)


def test_a_round_settles_when_all_who_are_in_step_have_sealed_the_same_set():
    same = RoundSet().digest
    assert settles(1.5, ally(True, same), ally(True, same))
    assert not settles(1.5, ally(True, same), ally(True, b"another"))
    assert not settles(1.5, ally(True, same), ally(True, None))


def test_one_who_catches_up_is_not_waited_for_but_half_of_the_group_is_for_a_while():
    same = RoundSet().digest
    assert settles(1.5, ally(True, same), ally(True, same), ally(False, None))
    assert not settles(1.5, ally(True, same), ally(False, None), ally(False, None))
    assert settles(4.1, ally(True, same), ally(False, None), ally(False, None))
