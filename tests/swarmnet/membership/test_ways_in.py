"""When a peer asks its bootstraps again."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from swarmnet.identifiers import PeerId
from swarmnet.membership.bootstrap_contacts import LONGEST_ASK_SECONDS, STEADY_SECONDS, BootstrapContacts

BOOT = PeerId("boot")
OTHER = PeerId("other")


def ask_until(ways, table, away_until, end, remembered=()):
    """Look each second; the bootstrap leaves the table at 0 s. Returns when it was asked, and `lost`."""
    asked, lost = [], []
    ways.look({BOOT, *table}, remembered, -1.0)
    now = 0.0
    while now < end:
        held = {BOOT, *table} if now >= away_until and asked and asked[-1] >= away_until else table
        for peer in ways.look(held, remembered, now):
            if peer == BOOT:
                asked.append(now)
            ways.record_answer(peer, peer == BOOT and now >= away_until, now)
        lost.append(ways.lost)
        now += 1.0
    return asked, lost


@pytest.mark.parametrize("away", [5.0, 65.0, 600.0])
def test_a_bootstrap_is_asked_soon_after_its_return_however_long_it_was_away(away):
    asked, lost = ask_until(BootstrapContacts([BOOT], Random(1)), {OTHER}, away, away + 60.0)
    back = next(at for at in asked if at >= away)
    assert back - away <= 1.2 * LONGEST_ASK_SECONDS + 1.0
    assert lost[0]
    assert not lost[-1]
    assert len(asked) <= 6 + away / (0.8 * LONGEST_ASK_SECONDS) + 60.0 / (0.8 * STEADY_SECONDS)


def test_a_bootstrap_in_the_table_is_asked_now_and_then_since_it_may_have_started_anew():
    ways = BootstrapContacts([BOOT], Random(1))
    due = []
    for now in range(200):
        if ways.look({BOOT}, (), float(now)):
            ways.record_answer(BOOT, True, float(now))
            due.append(now)
    assert max(b - a for a, b in pairwise(due)) <= 1.2 * STEADY_SECONDS + 1.0
    assert not ways.lost


def test_remembered_peers_are_asked_as_well_while_all_bootstraps_are_lost():
    ways = BootstrapContacts([BOOT], Random(1))
    ways.look({BOOT}, (), 0.0)
    ways.look(set(), (), 1.0)
    ways.record_answer(BOOT, False, 1.0)
    assert ways.lost
    ways.look(set(), [OTHER], 2.0)
    assert OTHER in ways.look(set(), [OTHER], 10.0)


@pytest.mark.parametrize("found", ["answers", "is in the table"])
def test_one_bootstrap_that_answers_or_is_in_the_table_is_enough_to_be_lost_no_longer(found):
    ways = BootstrapContacts([BOOT, OTHER], Random(1))
    ways.look(set(), (), 0.0)
    for peer in (BOOT, OTHER):
        ways.record_answer(peer, False, 5.0)
    assert ways.lost
    if found == "answers":
        ways.record_answer(BOOT, True, 6.0)
    else:
        ways.look({BOOT}, (), 6.0)
    assert not ways.lost
    ways.record_answer(OTHER, False, 7.0)
    assert not ways.lost


def test_a_peer_without_bootstraps_asks_those_that_it_remembers_while_its_table_is_empty():
    ways = BootstrapContacts([], Random(1))
    assert ways.look({OTHER}, [BOOT], 0.0) == []
    ways.look(set(), [BOOT], 1.0)
    assert ways.look(set(), [BOOT], 10.0) == [BOOT]
