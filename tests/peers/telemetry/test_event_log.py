"""The event log: nothing whole is lost, and a crash costs at most the end."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_of_each import one_of_each

from peers.config.errors import UserError
from peers.telemetry import event_log, log_events
from peers.telemetry.event import Unknown
from peers.telemetry.event_log import EventLog
from peers.telemetry.log_events import NOTICE_CLASSES, Listening, NotRelayed, Relayed, TextNotice


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


CIRCUIT = "/ip4/9.9.9.9/tcp/1/p2p/a/p2p-circuit"


@pytest.fixture
def clock():
    return Clock()


def names(path):
    return [event.name for event in event_log.read(path)]


def test_events_are_read_as_they_were_written(tmp_path, clock):
    with EventLog(path=tmp_path / "state" / "events.jsonl", clock=clock, monotonic=clock) as log:
        log.record(log_events.LookUpFailed(stage=3, code="gone", reason="nobody"))
    (line,) = event_log.read(tmp_path / "state" / "events.jsonl")
    assert (line.time, line.monotonic, line.name) == (100.0, 100.0, "look_up_failed")
    assert line.event == log_events.LookUpFailed(stage=3, code="gone", reason="nobody")
    assert (tmp_path / "state" / "events.jsonl").read_text() == (
        '{"time":100.0,"monotonic":100.0,"event":"look_up_failed","stage":3,"code":"gone","reason":"nobody"}\n'
    ), "what is not known of it is left out"


def test_events_reach_the_file_by_number_or_by_time(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    log = EventLog(path=path, clock=clock, monotonic=clock, flush_count=3, flush_seconds=1.0)
    log.record(Unknown("a", {}))
    log.record(Unknown("b", {}))
    assert names(path) == []
    log.record(Unknown("c", {}))
    assert names(path) == ["a", "b", "c"]
    log.record(Unknown("d", {}))
    clock.now += 1.0
    log.record(Unknown("e", {}))
    assert names(path)[3:] == ["d", "e"]
    log.close()
    log.close()


def test_a_torn_last_line_is_left_out_and_cut_off_at_the_next_start(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    with EventLog(path=path, clock=clock, monotonic=clock) as log:
        log.record(Unknown("whole", {}))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-5])
    assert names(path) == ["whole"]
    with EventLog(path=path, clock=clock, monotonic=clock) as log:
        log.record(Unknown("next", {}))
    assert names(path) == ["whole", "next"]


def test_damage_before_the_end_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"time":1,"monotonic":1,"event":"a"}\nrubbish\n{"time":1,"monotonic":1,"event":"b"}\n')
    with pytest.raises(UserError, match=r"events\.jsonl:2: not an event"):
        names(path)


def test_a_long_log_keeps_only_its_newer_part(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    with EventLog(path=path, clock=clock, monotonic=clock, flush_count=1, limit_bytes=200) as log:
        for number in range(20):
            log.record(Unknown("e", {"number": number}))
    kept = [
        event.fields["number"]
        for file in (tmp_path / "events.jsonl.old", path)
        for event in event_log.read(file)
    ]
    assert kept == list(range(kept[0], 20))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 600


def rotating(path, clock, size=1000):
    return EventLog(path=path, clock=clock, monotonic=clock, flush_count=1, limit_bytes=size)


def fill(log, path):
    """Until it has moved to `.old` once more."""
    before = path.stat().st_ino
    while path.stat().st_ino == before:
        log.record(Unknown("e", {"text": "x" * 50}))


def begun(log):
    log.record(log_events.Started("me", 1))
    log.record(Listening("listening on /ip4/8.8.4.4/tcp/1/p2p/me", 7))
    log.record(Listening("listening on /ip4/9.9.9.9/tcp/1/p2p/me", 7))
    log.record(Relayed("through a", "a", (CIRCUIT,)))
    log.record(Relayed("through b", "b", ()))
    log.record(log_events.Assembled(2))
    log.record(NotRelayed("no more", "b"))
    log.record(log_events.Assembled(3))


def standing(path, reader):
    return [(event.name, event.fields) for event in reader(path) if event.name != "e"]


def test_what_still_holds_begins_each_new_file_of_a_long_log(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    with rotating(path, clock) as log:
        begun(log)
        for _ in range(3):
            clock.now += 10.0
            fill(log, path)
        log.record(Unknown("e", {"text": "more"}))
    held = [
        ("started", {"peer": "me", "pid": 1, "role": "worker"}),
        ("listening", {"text": "listening on /ip4/8.8.4.4/tcp/1/p2p/me", "p2pd": 7}),
        ("listening", {"text": "listening on /ip4/9.9.9.9/tcp/1/p2p/me", "p2pd": 7}),
        ("relayed", {"text": "through a", "relay": "a", "addresses": [CIRCUIT]}),
        ("assembled", {"stage": 3, "parameters": 0}),
    ]
    assert standing(path, event_log.read_part) == standing(path, event_log.read_lately) == held
    first = next(event_log.read_part(path))
    assert first.time == 130.0, "when the file was begun, not when it was said"
    assert names(path) == ["continued", "e"], "who reads the files one after the other hears nothing twice"


def test_of_a_p2pd_that_has_ended_nothing_holds_in_the_next_file(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    with rotating(path, clock) as log:
        begun(log)
        log.record(TextNotice("it died", "p2pd_ended"))
        fill(log, path)
        assert [name for name, _ in standing(path, event_log.read_part)] == ["started", "assembled"]
        log.record(log_events.Started("you"))
        fill(log, path)
    assert standing(path, event_log.read_part) == [("started", {"peer": "you", "pid": 0, "role": "worker"})]


def test_how_a_peer_stands_is_read_from_the_older_part_too_where_the_log_does_not_say_so(tmp_path, clock):
    path, older = tmp_path / "events.jsonl", tmp_path / "events.jsonl.old"
    assert list(event_log.read_lately(path)) == []
    with EventLog(path=path, clock=clock, monotonic=clock) as log:
        log.record(log_events.Started("me"))
    path.replace(older)
    with EventLog(path=path, clock=clock, monotonic=clock) as log:
        log.record(Unknown("e", {}))
    assert [event.name for event in event_log.read_lately(path)] == ["started", "e"]
    path.unlink()
    assert [event.name for event in event_log.read_lately(path)] == ["started"]


def test_what_held_before_is_an_error_if_it_was_damaged(tmp_path):
    path = tmp_path / "events.jsonl"
    for standing_ in ('"x"', "3", "[3]", '[{"peer": "me"}]'):
        path.write_text(f'{{"time":1,"monotonic":1,"event":"continued","standing":{standing_}}}\n')
        with pytest.raises(UserError, match="changed or damaged"):
            list(event_log.read_part(path))


def test_what_holds_waits_for_room_on_a_full_disk_and_still_comes_first(tmp_path, clock, monkeypatch):
    path = tmp_path / "events.jsonl"
    log = rotating(path, clock)
    begun(log)
    opens = type(path).open
    monkeypatch.setattr(type(path), "open", lambda *how, **more: Full(opens(*how, **more), 20))
    fill(log, path)
    monkeypatch.undo()
    log.record(Unknown("e", {}))
    assert names(path) == []
    log._file.room = 10**9
    log.record(Unknown("e", {}))
    log.close()
    assert names(path)[:3] == ["continued", "e", "e"]


def test_no_event_has_the_logs_own_fields():
    for kind in (*log_events.EVENT_CLASSES.values(), *NOTICE_CLASSES.values()):
        assert not {"time", "monotonic", "event"} & set(kind.__struct_fields__), kind


def test_every_event_is_read_as_it_was_written(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    with EventLog(path=path, clock=clock, monotonic=clock) as log:
        for event in one_of_each():
            log.record(event)
    assert [line.event for line in event_log.read(path)] == one_of_each()


def test_a_line_of_another_version_is_read_as_one_that_is_not_known():
    assert event_log.parse("contribution_made", {"round": 1}) == Unknown("contribution_made", {"round": 1})
    assert event_log.parse("of_tomorrow", {"a": 1}).fields == {"a": 1}
    assert event_log.parse("in_step", {"round": 1, "settled": 0, "more": 2}) == log_events.InStep(1, 0)
    assert event_log.parse("restored", {"text": "x"}) == TextNotice("x", "restored")
    assert event_log.parse("of_tomorrow", {"text": "x"}).fields == {"text": "x"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400))
def test_a_crash_at_any_byte_loses_only_the_end(tmp_path, clock, cut):
    path = tmp_path / "events.jsonl"
    path.unlink(missing_ok=True)
    with EventLog(path=path, clock=clock, monotonic=clock) as log:
        for number in range(8):
            log.record(Unknown("event", {"number": number, "text": "ü\n"}))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    read = [event.fields["number"] for event in event_log.read(path)]
    assert read == list(range(whole[:cut].count(b"\n")))


class Full:
    """A file on a disk with room for so many bytes more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = self.file.write(data[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_on_a_full_disk_events_wait_for_room_and_it_is_said_once(tmp_path, clock):
    told = []
    log = EventLog(path=tmp_path / "events.jsonl", clock=clock, monotonic=clock, flush_count=1)
    log.trouble = told.append
    log.record(Unknown("before", {}))
    full = log._file = Full(log._file, 30)
    for number in range(5):
        log.record(Unknown("during", {"number": number}))
    assert len(told) == 1
    assert "No space left on device; training continues" in told[0]
    full.room = 10**9
    log.record(Unknown("after", {}))
    log.close()
    assert names(log.path) == ["before", *["during"] * 5, "after", "log_rewritten"]
    assert told[1].endswith("events lost meanwhile: 0")


def test_a_long_log_whose_new_file_cannot_be_opened_is_written_on_and_turned_over_later(tmp_path, clock):
    path, told = tmp_path / "events.jsonl", []
    log = rotating(path, clock)
    log.trouble = told.append
    log.record(log_events.Started("me"))
    refuses, opens = True, type(path).open

    def opening(self, *how, **more):
        if refuses and self == path:
            raise OSError(24, "Too many open files")
        return opens(self, *how, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(path), "open", opening)
        for number in range(40):
            log.record(Unknown("e", {"number": number}))
        assert len(told) == 1
        assert not path.exists()
        refuses = False
        log.record(Unknown("e", {"number": 40}))
    log.close()
    older = tmp_path / "events.jsonl.old"
    numbers = [event.fields["number"] for file in (older, path) for event in event_log.read(file)
               if event.name == "e"]  # fmt: skip
    assert numbers == list(range(41))
    assert names(path)[0] == "continued"


def test_of_too_many_that_wait_the_oldest_whole_lines_are_left_out_and_counted(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(event_log, "LONGEST_WAITING_BYTES", 2000)
    log = EventLog(path=tmp_path / "events.jsonl", clock=clock, monotonic=clock, flush_count=1)
    full = log._file = Full(log._file, 30)
    for number in range(100):
        log.record(Unknown("during", {"number": number}))
    full.room = 10**9
    log.close()
    *kept, again = event_log.read(log.path)
    assert kept[0].fields["number"] == 0, "a part of it was written before the disk was full"
    numbers = [event.fields["number"] for event in kept[1:]]
    assert numbers == list(range(numbers[0], 100))
    assert again.fields["lost"] == 100 - len(kept) > 50
