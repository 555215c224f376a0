"""The bootstrap is away in a world: newcomers find the others afterwards, as its peers ask it again."""

from __future__ import annotations

import pytest

from peers.lab.faults.bootstrap_faults import JOIN_SECONDS, BootstrapAway, NewcomerFinds
from peers.lab.faults.faults import Join
from peers.lab.faults.invariants import check
from peers.lab.faults.play import Options, play
from peers.lab.faults.schedules import schedule
from swarmnet.membership.bootstrap_contacts import BootstrapContacts


def absence(seconds: float) -> Options:
    back = 8.0 + seconds
    faults = (BootstrapAway(8.0, back), Join(back + 0.1, "n1"), NewcomerFinds(back + JOIN_SECONDS, "n1"))
    return Options(1, peers=2, stages=1, faults=faults, rounds=10, seconds=8.0)


@pytest.mark.parametrize("seconds", [pytest.param(5.0, marks=pytest.mark.soak), 65.0])
def test_a_newcomer_finds_the_others_after_the_bootstraps_return(seconds):
    assert check(play(absence(seconds))) == []


def test_a_newcomer_that_finds_no_peer_is_reported(monkeypatch):
    monkeypatch.setattr(BootstrapContacts, "look", lambda *_: [])
    found = check(play(absence(5.0)))
    assert [violation.rule for violation in found][:1] == ["no exception escapes"]


def test_a_thousand_schedules_contain_the_absence_of_the_bootstrap():
    names = [f"p{number}" for number in range(8)]
    drawn = [fault for seed in range(1000) for fault in schedule(seed, names, 50.0)]
    assert sum(isinstance(fault, BootstrapAway) for fault in drawn) >= 10
