"""Event logs played again: any moment, forward and back, at any speed, from one peer or several."""

import json
import random
from types import SimpleNamespace

import pytest
from one_of_each import one_of_each

from peers.errors import UserError
from peers.telemetry.event_fold import MOST_POINTS, SILENT_SECONDS, Curve, Story
from peers.telemetry.event_log import EventLog, Line, parse
from peers.telemetry.events import Started, Stopped
from peers.telemetry.notices import Teller
from peers.telemetry.picture import Picture
from peers.telemetry.said import Remark
from peers.tools.top import show
from peers.tools.top.replay import FASTEST, Player, Replay, logs_of

EPOCH = 1_700_000_000.0
A, B, C = "12D3KooWaaaaaa", "12D3KooWbbbbbb", "12D3KooWcccccc"


class Log:
    """Writes one peer's log, at times that the test names."""

    def __init__(self, folder, name, peer=A, stage=0, begin=0.0):
        self.at, self.path = begin, folder / name / "events.jsonl"
        self.log = EventLog(self.path, lambda: EPOCH + self.at, lambda: self.at)
        self(begin, "started", peer=peer, pid=1, role="worker")
        self(begin + 0.1, "run", text="run tiny (ab12...), stages: 2, owner: x")
        self(begin + 0.2, "assembled", stage=stage, parameters=10)
        self(begin + 0.3, "in_step", round=5, settled=4)

    def __call__(self, at, event, **fields):
        self.at = at
        self.log.record(parse(event, fields))

    def commits(self, first, last, loss, step=0.5):
        at = first
        while at < last:
            self(at, "committed", origin=A, counter=int(at * 2), tokens=100, loss=loss(at))
            at += step
        return self

    def close(self):
        self.log.close()


@pytest.fixture
def two_peers(tmp_path):
    """40 s of two peers: a of stage 0 all the time, b of stage 1 until it is killed after 20 s."""
    a, b = Log(tmp_path, "a", A, 0), Log(tmp_path, "b", B, 1, begin=1.0)
    a(2.0, "linked", peer=B, stage=1)
    a.commits(3.0, 20.0, lambda at: 5.0 - at / 10)
    b.commits(3.25, 20.0, lambda at: 5.0 - at / 10)
    b(20.0, "traffic", sent={"gradient": 500}, received={}, refused={})
    a(10.0, "applied", round=5, code="completed", contributors=1, waited=0.1)
    a(24.0, "unlinked", peer=B, code="silent", reason="silent", released=False)
    a(24.0, "waiting", code="stage_missing", stages=[1])
    a(30.0, "traffic", sent={"activation": 1000, "control": 20}, received={"gradient": 500}, refused={})
    a(30.0, "ledger", committed=34, tokens=3400, repeated=0, dropped={"deadline": 1}, rerouted={"gone": 2},
      refused=3, late_answers=0)  # fmt: skip
    a(40.0, "stopped", code="asked")
    a.close()
    b.close()
    return tmp_path


def states(picture):
    return {seen.name: seen.state for seen in picture.peers}


def test_each_moment_shows_what_was_so_then(two_peers):
    replay = Replay.read([two_peers])
    assert replay.seconds == pytest.approx(40.0)
    early = replay.at(10.5)
    assert (early.run, early.stages, early.round) == ("tiny", 2, 6)
    assert states(early) == {"a": "training", "b": "training"}
    assert early.tokens_per_second == pytest.approx(160.0), "16 microbatches of stage 0 in 10 s"
    assert early.loss == pytest.approx(4.325), "the mean of the 16 microbatches until then"
    later = replay.at(33.0)
    assert states(later) == {"a": "training", "b": "gone"}
    assert later.waits_for == (1,)
    assert later.sent == {"activation": 1000, "control": 20, "gradient": 500}
    assert later.microbatches == {
        "committed": 34, "repeated": 0, "refused": 3, "late_answers": 0, "rerouted": 2, "dropped": 1
    }  # fmt: skip
    assert later.rounds == {"completed": 1}
    assert later.losses[0] > 4.5 > 3.2 > later.losses[-1]
    lost = next(event for event in later.events if event.code == "silent")
    assert (lost.time, lost.level, lost.who) == (EPOCH + 24.0, "warning", "a")
    assert lost.text == "lost b: nothing was heard of it for 4 seconds"
    assert states(replay.at(40.0))["a"] == "stopped"


def test_going_back_shows_the_same_as_going_there_directly(two_peers):
    replay, moments = Replay.read([two_peers]), [0.0, 40.0, 13.0, 2.0, 25.0, 7.0, 39.0]
    pictures = [replay.at(moment) for moment in moments]
    assert pictures == [Replay.read([two_peers]).at(moment) for moment in moments]
    assert replay.at(-5.0).time == replay.at(0.0).time == EPOCH
    assert replay.at(1e9) == replay.at(40.0)


def test_a_log_that_ends_without_a_word_is_of_a_peer_that_is_gone():
    story = Story("x")
    for at, name, fields in [(0.0, "started", {"peer": A}), (1.0, "assembled", {"stage": 1})]:
        story.take(Line(EPOCH + at, at, parse(name, fields)))
    assert story.state_at(EPOCH + 1.0 + SILENT_SECONDS) == "joining"
    assert story.state_at(EPOCH + 1.1 + SILENT_SECONDS) == "gone"
    assert story.seen(EPOCH + 60.0).tokens_per_second is None


def test_every_event_is_followed_and_told_without_a_fault():
    story, teller = Story("x"), Teller(SimpleNamespace(say=lambda *_, **__: None))
    for event in [*one_of_each(), Remark("goes to 2 MB", "line"), Remark("paused", "order")]:
        story.take(Line(EPOCH, 0.0, event))
        teller.heard(Line(EPOCH, 0.0, event))
    assert [one.text for one in story.events][-2:] == ["goes to 2 MB", "paused"]


def test_a_bootstrap_has_little_to_write_and_is_not_gone_for_that():
    story = Story("boot")
    story.take(Line(EPOCH, 0.0, Started(A, 1, "bootstrap")))
    assert story.state_at(EPOCH + 3600.0) == "bootstrap"
    story.take(Line(EPOCH + 3600.0, 3600.0, Stopped("asked")))
    assert story.state_at(EPOCH + 3601.0) == "stopped"


def test_a_peer_that_starts_again_counts_anew_and_its_losses_go_on(tmp_path):
    log = Log(tmp_path, "a").commits(1.0, 5.0, lambda at: 4.0)
    log(5.0, "stopped", code="fault")
    log(8.0, "started", peer=A, pid=2, role="worker")
    log(8.2, "assembled", stage=1, parameters=10)
    log.commits(9.0, 10.0, lambda at: 3.0).close()
    picture = Replay.read([tmp_path / "a"]).at(1e9)
    assert picture.tokens == 200
    assert picture.peers[0].stage == 1
    assert picture.losses[0] == 4.0
    assert picture.losses[-1] == 3.0


def test_a_player_on_any_clock_stands_where_speed_and_keys_have_brought_it():
    player = Player(seconds=100.0, now=7.0)
    assert player.advance(9.0) == 2.0
    assert player.press("+", 9.0)
    assert player.advance(12.0) == 8.0
    player.press(" ", 12.0)
    assert player.advance(50.0) == 8.0, "paused"
    player.press("right", 50.0)
    player.press(" ", 50.0)
    assert player.advance(51.0) == 20.0
    player.press("left", 51.0)
    player.press("-", 51.0)
    assert player.advance(52.0) == 11.0
    player.press("end", 52.0)
    assert player.advance(60.0) == 100.0
    player.press("home", 60.0)
    assert player.position == 0.0
    assert player.press("x", 60.0)
    assert not player.press("q", 60.0)
    for _ in range(40):
        player.press("+", 60.0)
    assert player.speed == FASTEST


def test_a_replay_on_a_virtual_clock_is_the_same_every_time(two_peers):
    def played():
        clock, drawn = [0.0], []
        keys = iter([[], ["+"], [], ["right"], [], [" "], [], [" "], ["left"], [], ["q"]])

        def pressed(seconds):
            clock[0] += seconds
            return next(keys)

        replay = Replay.read([two_peers])
        player = Player(replay.seconds, clock[0], speed=8.0)
        show.play(replay, player, pressed, lambda: clock[0], lambda *what: drawn.append(what))
        return drawn

    first = played()
    assert [line for _, line in first][:3] == [
        "0.0 of 40.0 s, 8 x", "2.0 of 40.0 s, 8 x", "4.0 of 40.0 s, 16 x"
    ]  # fmt: skip
    assert first == played()
    assert isinstance(first[0][0], Picture)


def test_logs_are_found_in_files_state_folders_and_folders_of_those(two_peers):
    (two_peers / "a" / "events.jsonl.old").write_text("")
    assert list(logs_of([two_peers])) == ["a", "b"]
    assert logs_of([two_peers / "a"])["a"][0].name == "events.jsonl.old"
    named = logs_of([two_peers / "a" / "events.jsonl", two_peers])
    assert list(named) == ["a", "a'", "b"]


def test_of_a_peer_that_ran_for_months_what_held_when_its_log_was_begun_anew_is_told(tmp_path):
    log = Log(tmp_path, "old", B, 3)
    log.log._limit_bytes = 500
    for number in range(60):
        log(1.0 + number, "traffic", sent={}, received={}, refused={}, subflows={"x" * number: 1})
    log.close()
    begun = (tmp_path / "old" / "events.jsonl.old").read_text().splitlines()[0]
    assert '"event":"continued"' in begun, "the file that told it all is gone"
    first = Replay.read([tmp_path / "old"]).at(0.0).peers
    assert [(seen.peer, seen.stage) for seen in first] == [(B, 3)]


def test_what_is_no_log_is_said_with_its_name(two_peers, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(UserError, match=r"empty.*holds no event log; name an events\.jsonl"):
        Replay.read([empty])
    (empty / "events.jsonl").write_text("")
    with pytest.raises(UserError, match="the event logs are empty"):
        Replay.read([empty])
    (empty / "events.jsonl").write_text("no json\n")
    with pytest.raises(UserError, match=r"events\.jsonl:1: is no event"):
        Replay.read([empty])


@pytest.mark.parametrize(
    "event",
    [
        {"event": "assembled"},
        {"event": "assembled", "stage": "two"},
        {"event": "applied", "round": None},
        {"event": "traffic", "sent": 5, "received": {}},
        {"event": "ledger", "dropped": 7},
        {"event": "waiting", "stages": 3},
        {"event": "committed", "tokens": {}},
    ],
)
def test_an_event_of_another_version_is_named_instead_of_a_traceback(tmp_path, event):
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"time": 1.0, "monotonic": 1.0, **event}) + "\n")
    with pytest.raises(UserError, match=f"the event `{event['event']}` in the log of"):
        Replay.read([path]).at(10.0)


def test_a_curve_of_any_length_stays_bounded_and_keeps_its_shape():
    curve, chance = Curve(), random.Random(0)
    for index in range(100_000):
        curve.add(float(index), 10.0 - index / 20_000 + chance.gauss(0, 0.3))
    assert len(curve.points) < MOST_POINTS
    assert curve.points[0][1] == pytest.approx(10.0, abs=0.2)
    assert curve.points[-1][1] == pytest.approx(5.0, abs=0.2)
    assert [at for at, _ in curve.points] == sorted(at for at, _ in curve.points)
