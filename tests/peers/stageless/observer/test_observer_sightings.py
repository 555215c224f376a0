"""What an observer makes of records and of answers: who is here, who has gone and why, whom to ask when."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from observed import NOON, Crowd, record

from peers.network.discovery.claimed_tokens import MAX_KEPT, Contributions
from peers.stageless.observer import sightings as rules
from peers.stageless.observer.sightings import PeerObservations
from peers.telemetry.reasons import DEPARTURES
from peers.telemetry.snapshot import MAX_POINTS, Curve
from protocols.signed.records import RECORD_SECONDS


def seen(*records, at=NOON, stages=3):
    sightings = PeerObservations(stages)
    for signed in records:
        sightings.recorded(signed, at)
    return sightings


def test_who_answered_and_then_misses_twice_is_gone_until_it_answers_again():
    sightings = seen(record())
    peer = sightings.peers["peer-0"]
    sightings.answered("peer-0", NOON)
    sightings.missed("peer-0", "silent", NOON + 3)
    assert not peer.gone, "one miss may be the observer's own fault"
    assert peer.ask_at == NOON + 3 + rules.AGAIN_SECONDS
    sightings.missed("peer-0", "silent", NOON + 7)
    assert peer.gone == "silent"
    assert sightings.departures == {"silent": 1}
    sightings.missed("peer-0", "silent", NOON + 17)
    assert sightings.departures == {"silent": 1}, "it is counted once"
    sightings.answered("peer-0", NOON + 27)
    assert not peer.gone
    assert list(sightings.here()) == [peer]


def test_in_a_small_stage_a_dead_peer_is_noticed_within_fifteen_seconds():
    longest = rules.SHORTEST_ASK_SECONDS + rules.AGAIN_SECONDS + rules.MISSES * 3.0  # ASK_DEADLINE_SECONDS
    assert longest < 15.0 - 2.0 - 1.0, "the page asks every 2 s, the picture is drawn every second"


def test_a_peer_that_cannot_be_asked_is_believed_while_its_records_are_fresh():
    sightings = seen(record())
    for second in range(0, 45, 10):
        sightings.missed("peer-0", "not_reached", NOON + second)
        sightings.look(NOON + second)
    assert not sightings.peers["peer-0"].gone
    sightings.look(NOON + rules.FRESH_SECONDS + 1)
    assert sightings.peers["peer-0"].gone == "silent"
    sightings.recorded(record(at=NOON + 50), NOON + 51)
    assert not sightings.peers["peer-0"].gone, "it signed something since: it lives"


def test_an_old_record_of_a_peer_that_has_gone_does_not_bring_it_back():
    sightings = seen(record())
    sightings.answered("peer-0", NOON)
    sightings.missed("peer-0", "not_reached", NOON + 30)
    sightings.missed("peer-0", "not_reached", NOON + 31)
    sightings.recorded(record(at=NOON + 20), NOON + 32)
    assert sightings.peers["peer-0"].gone == "not_reached"


def test_departures_say_why():
    sightings = seen(record("leaver"), record("mover"), record("sleeper"), record("lost"))
    for peer in ("leaver", "mover", "sleeper", "lost"):
        sightings.answered(peer, NOON)
    sightings.recorded(record("leaver", at=NOON + 1, state="leaving"), NOON + 1)
    sightings.recorded(record("mover", 2, at=NOON + 1), NOON + 1)
    sightings.recorded(record("sleeper", at=NOON + 1, state="paused"), NOON + 1)
    for second in (2, 3):
        sightings.missed("leaver", "not_reached", NOON + second)
        sightings.missed("lost", "not_reached", NOON + second)
    assert sightings.departures == {"left": 1, "moved": 1, "paused": 1, "not_reached": 1}
    assert set(sightings.departures) <= set(DEPARTURES)
    assert {known.record.peer for known in sightings.here()} == {"mover", "sleeper"}
    assert [event.code for event in sightings.events] == ["moved", "paused", "left", "not_reached"]


def test_who_is_back_is_no_longer_away():
    sightings = seen(record("restarted"), record("expired"), record("leaver"))
    for peer in ("restarted", "expired", "leaver"):
        sightings.answered(peer, NOON)
        for second in (2, 3):
            sightings.missed(peer, "not_reached", NOON + second)
    assert set(sightings.away.values()) == {"not_reached"}
    sightings.recorded(record("leaver", at=NOON + 1, state="leaving"), NOON + 4)
    assert sightings.away["leaver"] == "left", "its last record was found late"
    sightings.answered("restarted", NOON + 9)
    sightings.look(NOON + RECORD_SECONDS + 2)
    assert set(sightings.away) == {"expired", "leaver", "restarted"}
    later = NOON + RECORD_SECONDS + 5
    for peer in ("expired", "restarted"):
        sightings.recorded(record(peer, at=later), later)
    assert sightings.away == {"leaver": "left"}
    came = [event.text for event in sightings.events if event.code == "came"]
    assert len(came) == 3
    assert all(text.endswith("is back") for text in came)
    assert sightings.departures.total() == 4, "the counter never shrinks"


def test_a_record_that_expires_takes_its_peer_away_and_leaves_its_contribution():
    sightings = seen(record(tokens=5000))
    sightings.look(NOON + RECORD_SECONDS + 1)
    assert sightings.peers == {}
    assert sightings.departures == {"silent": 1}
    assert sightings.contributions.ranking(5, 10**9) == [("peer-0", "peer-0", 0, 5000, 0.0)]
    sightings.recorded(record(at=NOON + 200, tokens=5100), NOON + 200)
    assert sightings.contributions.of_stage(0, 10**9) == 5100


def test_speeds_are_what_counts_grew_by_and_a_restart_is_no_loss():
    sightings = seen(record(tokens=1000, sent_bytes=10))
    sightings.recorded(record(at=NOON + 10, tokens=3000, sent_bytes=2010), NOON + 10)
    peer = sightings.peers["peer-0"]
    assert (peer.tokens_per_second, peer.sent_bytes_per_second) == (200.0, 200.0)
    sightings.recorded(record(at=NOON + 20, tokens=500), NOON + 20)
    assert peer.tokens_per_second == 50.0
    assert sightings.contributions.of_stage(0, 10**9) == 3500


def test_a_thousand_peers_are_asked_32_times_a_second_and_a_thin_stage_as_often_as_ever():
    sightings = PeerObservations(9)
    for number in range(1000):
        sightings.recorded(record(f"peer-{number}", number % 8), NOON)
    sightings.recorded(record("thin", 8), NOON)
    asked, thin = 0, []
    for quarter in range(4 * 160):
        now = NOON + quarter / 4
        if quarter % 100 == 0:
            for number in range(1000):
                sightings.recorded(record(f"peer-{number}", number % 8, at=now), now)
            sightings.recorded(record("thin", 8, at=now), now)
        for peer in sightings.due(now, 32):
            sightings.answered(peer, now)
            asked += quarter >= 240
            thin += [now] if peer == "thin" and quarter >= 240 else []
    assert 25 <= asked / 100 <= 36  # 32; the window holds no whole number of turns.
    assert max(later - earlier for earlier, later in pairwise(thin)) < 4.0


def test_nobody_is_asked_twice_at_a_time():
    sightings = seen(record("a"), record("b"), record("c"))
    assert sightings.due(NOON, 2) == ["a", "b"]
    assert sightings.due(NOON, 2) == ["c"]
    assert sightings.due(NOON + 100, 2) == []


def test_all_that_strangers_can_fill_is_bounded():
    sightings = PeerObservations(1)
    for _ in range(2):
        for number in range(rules.MAX_PEERS + 10):
            sightings.recorded(record(f"peer-{number}"), NOON)
        sightings.walked()
        assert len(sightings.peers) == rules.MAX_PEERS
        assert sightings.left_out == 10, "however often the directory is read"
    contributions = Contributions()
    for number in range(MAX_KEPT + 10):
        contributions.add(record(f"peer-{number}", tokens=number).record, NOON)
    assert len(contributions.tokens) <= MAX_KEPT
    assert contributions.ranking(1, 10**9)[0][3] == MAX_KEPT + 9, "the largest stay"
    assert len(contributions.names) <= MAX_KEPT
    assert len(contributions.newest) <= MAX_KEPT
    curve = Curve()
    for second in range(60_000):
        curve.add(float(second), second)
    assert MAX_POINTS / 2 <= len(curve.points) <= MAX_POINTS
    steps = {later - earlier for (earlier, _), (later, _) in pairwise(curve.points)}
    assert steps == {curve.step_seconds}
    assert curve.points[0] == (0.0, 0)


def test_the_energy_of_a_peer_is_added_up_over_restarts():
    contributions = Contributions()
    told = [record("a", tokens=tokens, joules=joules).record
            for tokens, joules in ((5, 100), (9, 160), (2, 30), (4, 50))]  # fmt: skip
    for number, each in enumerate(told):
        contributions.add(each, NOON + number)
    assert contributions.joules == {"a": 160 + 50}
    assert contributions.tokens["a", told[0].stage] == 9 + 4


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), peers=st.integers(1, 40))
def test_whatever_happens_counts_stay_consistent(seed, peers):
    sightings = PeerObservations(3)
    crowd = Crowd(sightings, peers, seed)
    for _ in range(40):
        crowd.live(5.0)
        here = list(sightings.here())
        assert len(here) + sum(known.gone != "" for known in sightings.peers.values()) == len(sightings.peers)
        assert all(known.signed_at + RECORD_SECONDS >= crowd.now for known in sightings.peers.values())
        assert not any(known.answers and known.misses >= rules.MISSES for known in here)
    assert set(sightings.departures) <= set(DEPARTURES)
    assert len(sightings.events) <= rules.KEPT_EVENTS
