"""Who sent something forged is refused for a while, longer each time."""

from __future__ import annotations

from random import Random

from swarmnet.identifiers import PeerId
from swarmnet.membership.forgers import (
    FIRST_REFUSAL_SECONDS,
    LONGEST_REFUSAL_SECONDS,
    MAX_FORGERS,
    Forgers,
)
from swarmnet.membership.membership import Membership

ME, A, B = PeerId("me"), PeerId("a"), PeerId("b")


def refused_seconds(forgers: Forgers, at: float) -> int:
    """For how many seconds A is refused from `at` on."""
    return next(seconds for seconds in range(10_000) if not forgers.refuses(A, at + seconds))


def test_the_time_doubles_up_to_a_limit_and_starts_again_after_a_long_peace():
    forgers, now, times = Forgers(), 0.0, []
    for _ in range(9):
        forgers.forged(A, now)
        times.append(refused_seconds(forgers, now))
        now += times[-1]
    assert times == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    now += LONGEST_REFUSAL_SECONDS
    forgers.forged(A, now)
    assert refused_seconds(forgers, now) == FIRST_REFUSAL_SECONDS
    assert not forgers.refuses(B, now)


def test_what_was_under_way_when_the_first_was_noticed_counts_once():
    forgers = Forgers()
    for now in (0.0, 0.1, 0.2):
        forgers.forged(A, now)
    assert refused_seconds(forgers, 0.0) == FIRST_REFUSAL_SECONDS


def test_the_table_forgets_the_oldest_forgery_first():
    forgers = Forgers()
    for number in range(MAX_FORGERS + 1):
        forgers.forged(PeerId(f"peer{number}"), 0.0)
    refused = [number for number in range(MAX_FORGERS + 1) if forgers.refuses(PeerId(f"peer{number}"), 1.0)]
    assert refused == list(range(1, MAX_FORGERS + 1))


def test_a_forger_is_not_dialled_nor_counted_and_dialled_again_when_its_time_is_up():
    membership = Membership(me=ME, stage=1, chance=Random(1))
    for peer in (A, B):
        membership.recorded(peer, 1, "worker", ("/x",), 1, b"record", 0.0)
        membership.linked(peer, 0.0)
    membership.unlinked(A, 1.0)
    membership.forged(A, 1.0)
    assert membership.group_size() == 2
    assert membership.is_member(A), "whose contributions count does not depend on links"
    assert membership.to_dial(1.0 + FIRST_REFUSAL_SECONDS - 0.1) == []
    membership.recorded(A, 1, "worker", ("/y",), 2, b"newer", 2.0)
    assert membership.to_dial(5.0) == [], "a newer record does not help"
    assert membership.to_dial(1.0 + FIRST_REFUSAL_SECONDS) == [A]
