"""What the page says of a run that trains, is stuck, is paused or has ended, and of slow peers."""

from dataclasses import replace

import pytest
from observed import NOON, record
from swarm import sign, tiny_manifest

from peers.stageless.observer.run_state import SHOWN_OBSTACLES, describe_state
from peers.stageless.observer.sightings import PeerObservations
from peers.stageless.observer.snapshot_of_records import snapshot_of
from peers.telemetry.snapshot import OwnerOrdersView, Pause
from swarmnet.run.owner_orders import OwnerOrders

SIGNED = sign(tiny_manifest((1, 1, 1)))
TRAINING = [record(f"peer-{n}", n % 3) for n in range(6)]


def seen(*records, at=NOON, orders=None, sightings=None):
    """The snapshot at `at`, after these records were read there."""
    sightings = sightings or PeerObservations(3)
    for signed in records:
        sightings.recorded(signed, at)
        sightings.answered(signed.peer, at)
    view = OwnerOrdersView(orders, NOON, Pause(NOON, "why")) if orders else OwnerOrdersView(asked_at=NOON)
    return snapshot_of(sightings, SIGNED, at, view, walked_at=at)


def in_state(state):
    return [record(f"peer-{n}", n % 3, state=state) for n in range(6)]


ORDER = OwnerOrders(int(NOON * 1e6), "why")
ENDED, PAUSED = replace(ORDER, ends=100), replace(ORDER, paused=True)


@pytest.mark.parametrize(
    ("picture", "last_round", "code", "word"),
    [
        (seen(*TRAINING), 100, "training", "6 peers train"),
        (
            seen(record("a", 0), record("b", 1), record("c", 2, state="joining", round=0)),
            100,
            "stuck",
            "stuck",
        ),
        (seen(record("a", 0), record("b", 1)), 100, "stuck", "stuck"),
        (seen(*in_state("joining")), None, "starting", "6 peers get ready"),
        (seen(*in_state("paused_by_owner"), orders=PAUSED), 100, "paused", "owner has paused"),
        (seen(orders=PAUSED), 100, "paused", "owner has paused"),
        (seen(*in_state("ended"), orders=ENDED), 100, "ended", "has ended"),
        (seen(orders=ENDED), 100, "ended", "at round 100"),
        (seen(orders=ENDED), 99, "empty", "No peer is here"),
        (seen(), 1234, "empty", "last round that was seen is 1,234"),
        (seen(*in_state("paused")), 7, "empty", "All 6 peers here are paused"),
        (seen(*in_state("leaving")), 7, "empty", "No peer is here"),
        (replace(seen(), walked_at=0.0), None, "unknown", "still looking"),
    ],
)
def test_the_page_says_honestly_what_the_run_does(picture, last_round, code, word):
    found, text = describe_state(picture, last_round)
    assert found == code
    assert word in text


def test_a_run_that_is_paused_is_not_called_stuck():
    assert not seen(*in_state("paused_by_owner")[:2], orders=PAUSED).obstacles


def test_a_stage_without_peers_and_one_without_weights_are_named_with_who_can_help():
    (empty,) = seen(record("a", 0, round=1), record("b", 1, round=1)).obstacles
    assert (empty.where, empty.stops_run) == ("Stage 2", True)
    assert empty.why.endswith("no text can pass through it.")
    assert "joins with the command below takes it; --stage 2" in empty.help, "it begins from the seed"
    (lost,) = seen(record("a", 0), record("b", 1)).obstacles
    assert lost.why.endswith("on the disk of a peer that left, or in an archive.")
    assert f"swarmnet join {SIGNED.run_id[:16]} --stage 2" in lost.help
    waiting = [record(name, 2, state="joining", round=0, name=name) for name in ("anna", "ben")]
    (stuck,) = seen(record("a", 0), record("b", 1), *waiting).obstacles
    assert "anna and ben wait for its weights" in stuck.why
    assert "The peer that was in stage 2 before" in stuck.help


def test_a_newcomer_that_waits_too_long_and_a_peer_that_lags_are_named_but_stop_nobody():
    sightings = PeerObservations(3)
    for minute in range(8):
        at = NOON + 60 * minute
        peers = [record(f"peer-{n}", n % 3, at=at, round=100 + 6 * minute) for n in range(6)]
        slow = record("slow", 1, at=at, name="attic", round=100 + minute)
        new = record("new", 2, at=at, name="cellar", state="joining", round=0)
        picture = seen(*peers, slow, new, at=at, sightings=sightings)
        if minute == 2:
            assert not picture.obstacles, "both may take so long"
    by_name = {obstacle.where: obstacle for obstacle in picture.obstacles}
    assert set(by_name) == {"attic, stage 1", "cellar, stage 2"}
    assert "35 rounds behind its stage" in by_name["attic, stage 1"].why
    assert "joining for 7 min" in by_name["cellar, stage 2"].why
    assert not any(obstacle.stops_run for obstacle in picture.obstacles)
    assert describe_state(picture, 142)[0] == "training"


def test_a_run_whose_round_does_not_change_stands_still_but_not_right_after_a_pause():
    sightings = PeerObservations(3)
    for minute in range(7):
        at = NOON + 60 * minute
        records = [record(f"peer-{n}", n % 3, at=at) for n in range(3)]
        picture = seen(*records, at=at, sightings=sightings)
        assert bool(picture.obstacles) == (minute > 5), minute
    assert "No round has ended for 6 min" in picture.obstacles[0].why
    assert describe_state(picture, 100)[0] == "stuck"
    for minute, state in ((7, "paused_by_owner"), (20, "training")):
        at = NOON + 60 * minute
        records = [record(f"peer-{n}", n % 3, at=at, state=state) for n in range(3)]
        picture = seen(*records, at=at, sightings=sightings)
    assert not picture.obstacles


def test_a_slow_run_that_stops_after_few_rounds_stands_still_too():
    sightings = PeerObservations(3)
    for minute in range(40):
        at = NOON + 60 * minute
        reached = 100 + min(minute, 6) // 2  # A round takes two minutes, until the sixth one.
        records = [record(f"peer-{n}", n % 3, at=at, round=reached) for n in range(3)]
        picture = seen(*records, at=at, sightings=sightings)
        assert bool(picture.obstacles) == (minute > 6 + 20), minute
        assert picture.seconds_left is None or not picture.obstacles


def test_what_strangers_can_make_the_page_show_is_bounded():
    sightings = PeerObservations(3)
    for minute in range(7):
        at = NOON + 60 * minute
        peers = [record(f"peer-{n}", n % 3, at=at, round=100 + minute) for n in range(3)]
        new = [record(f"new-{n}", n % 3, at=at, state="joining", round=0) for n in range(100)]
        picture = seen(*peers, *new, at=at, sightings=sightings)
    assert len(picture.obstacles) == SHOWN_OBSTACLES + 1
    assert picture.obstacles[-1].why == "88 peers more."
