"""The event log: nothing whole is lost, and a crash costs at most the end."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peers.errors import UserError
from peers.telemetry import event_log
from peers.telemetry.event_log import EventLog


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def names(path):
    return [event.name for event in event_log.read(path)]


def test_events_are_read_as_they_were_written(tmp_path, clock):
    with EventLog(tmp_path / "state" / "events.jsonl", clock, clock) as log:
        log.record("applied", round=3, digest=b"\x01\xff", peers={"b", "a"}, where=tmp_path)
    (event,) = event_log.read(tmp_path / "state" / "events.jsonl")
    assert (event.time, event.monotonic, event.name) == (100.0, 100.0, "applied")
    assert event.fields == {"round": 3, "digest": "01ff", "peers": ["a", "b"], "where": str(tmp_path)}


def test_events_reach_the_file_by_number_or_by_time(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, clock, clock, flush_count=3, flush_seconds=1.0)
    log.record("a")
    log.record("b")
    assert names(path) == []
    log.record("c")
    assert names(path) == ["a", "b", "c"]
    log.record("d")
    clock.now += 1.0
    log.record("e")
    assert names(path)[3:] == ["d", "e"]
    log.close()
    log.close()


def test_a_torn_last_line_is_left_out_and_cut_off_at_the_next_start(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    with EventLog(path, clock, clock) as log:
        log.record("whole")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-5])
    assert names(path) == ["whole"]
    with EventLog(path, clock, clock) as log:
        log.record("next")
    assert names(path) == ["whole", "next"]


def test_damage_before_the_end_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"time":1,"monotonic":1,"event":"a"}\nrubbish\n{"time":1,"monotonic":1,"event":"b"}\n')
    with pytest.raises(UserError, match=r"events\.jsonl:2: is no event"):
        names(path)


def test_a_long_log_keeps_only_its_newer_part(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    with EventLog(path, clock, clock, flush_count=1, limit_bytes=200) as log:
        for number in range(20):
            log.record("e", number=number)
    kept = [
        event.fields["number"]
        for file in (tmp_path / "events.jsonl.old", path)
        for event in event_log.read(file)
    ]
    assert kept == list(range(kept[0], 20))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 600


def rotating(path, clock, size=1000):
    return EventLog(path, clock, clock, flush_count=1, limit_bytes=size)


def fill(log, path):
    """Until it has moved to `.old` once more."""
    before = path.stat().st_ino
    while path.stat().st_ino == before:
        log.record("e", text="x" * 50)


def begun(log):
    log.record("started", peer="me", pid=1)
    log.record("listening", text="listening on /ip4/8.8.4.4/tcp/1/p2p/me")
    log.record("listening", text="listening on /ip4/9.9.9.9/tcp/1/p2p/me")
    log.record("relayed", relay="a", addresses=("/ip4/9.9.9.9/tcp/1/p2p/a/p2p-circuit",))
    log.record("relayed", relay="b", addresses=())
    log.record("assembled", stage=2)
    log.record("not_relayed", relay="b")
    log.record("assembled", stage=3)


def standing(path, reader):
    return [(event.name, event.fields) for event in reader(path) if event.name != "e"]


def test_what_still_holds_begins_each_new_file_of_a_long_log(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    with rotating(path, clock) as log:
        begun(log)
        for _ in range(3):
            clock.now += 10.0
            fill(log, path)
        log.record("e", text="more")
    held = [
        ("started", {"peer": "me", "pid": 1}),
        ("listening", {"text": "listening on /ip4/8.8.4.4/tcp/1/p2p/me"}),
        ("listening", {"text": "listening on /ip4/9.9.9.9/tcp/1/p2p/me"}),
        ("relayed", {"relay": "a", "addresses": ["/ip4/9.9.9.9/tcp/1/p2p/a/p2p-circuit"]}),
        ("assembled", {"stage": 3}),
    ]
    assert standing(path, event_log.read_part) == standing(path, event_log.read_lately) == held
    first = next(event_log.read_part(path))
    assert first.time == 130.0, "when the file was begun, not when it was said"
    assert names(path) == ["continued", "e"], "who reads the files one after the other hears nothing twice"


def test_of_a_p2pd_that_has_ended_nothing_holds_in_the_next_file(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    with rotating(path, clock) as log:
        begun(log)
        log.record("p2pd_ended", text="it died")
        fill(log, path)
        assert [name for name, _ in standing(path, event_log.read_part)] == ["started", "assembled"]
        log.record("started", peer="you")
        fill(log, path)
    assert standing(path, event_log.read_part) == [("started", {"peer": "you"})]


def test_how_a_peer_stands_is_read_from_the_older_part_too_where_the_log_does_not_say_so(tmp_path, clock):
    path, older = tmp_path / "events.jsonl", tmp_path / "events.jsonl.old"
    assert list(event_log.read_lately(path)) == []
    with EventLog(path, clock, clock) as log:
        log.record("started", peer="me")
    path.replace(older)
    with EventLog(path, clock, clock) as log:
        log.record("e")
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
    log.record("e")
    assert names(path) == []
    log._file.room = 10**9
    log.record("e")
    log.close()
    assert names(path)[:3] == ["continued", "e", "e"]


def test_an_event_cannot_overwrite_the_logs_own_fields(tmp_path, clock):
    with EventLog(tmp_path / "e", clock, clock) as log, pytest.raises(TypeError, match="time"):
        log.record("a", time=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cut=st.integers(0, 400))
def test_a_crash_at_any_byte_loses_only_the_end(tmp_path, clock, cut):
    path = tmp_path / "events.jsonl"
    path.unlink(missing_ok=True)
    with EventLog(path, clock, clock) as log:
        for number in range(8):
            log.record("event", number=number, text="ü\n")
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
    log = EventLog(tmp_path / "events.jsonl", clock, clock, flush_count=1)
    log.trouble = told.append
    log.record("before")
    full = log._file = Full(log._file, 30)
    for number in range(5):
        log.record("during", number=number)
    assert len(told) == 1
    assert "No space left on device; training goes on" in told[0]
    full.room = 10**9
    log.record("after")
    log.close()
    assert names(log._path) == ["before", *["during"] * 5, "after", "log_written_again"]
    assert told[1].endswith("events lost meanwhile: 0")


def test_a_long_log_whose_new_file_cannot_be_opened_is_written_on_and_turned_over_later(tmp_path, clock):
    path, told = tmp_path / "events.jsonl", []
    log = rotating(path, clock)
    log.trouble = told.append
    log.record("started", peer="me")
    refuses, opens = True, type(path).open

    def opening(self, *how, **more):
        if refuses and self == path:
            raise OSError(24, "Too many open files")
        return opens(self, *how, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(path), "open", opening)
        for number in range(40):
            log.record("e", number=number)
        assert len(told) == 1
        assert not path.exists()
        refuses = False
        log.record("e", number=40)
    log.close()
    older = tmp_path / "events.jsonl.old"
    numbers = [event.fields["number"] for file in (older, path) for event in event_log.read(file)
               if event.name == "e"]  # fmt: skip
    assert numbers == list(range(41))
    assert names(path)[0] == "continued"


def test_of_too_many_that_wait_the_oldest_whole_lines_are_left_out_and_counted(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(event_log, "LONGEST_WAITING_BYTES", 2000)
    log = EventLog(tmp_path / "events.jsonl", clock, clock, flush_count=1)
    full = log._file = Full(log._file, 30)
    for number in range(100):
        log.record("during", number=number)
    full.room = 10**9
    log.close()
    *kept, again = event_log.read(log._path)
    assert kept[0].fields["number"] == 0, "a part of it was written before the disk was full"
    numbers = [event.fields["number"] for event in kept[1:]]
    assert numbers == list(range(numbers[0], 100))
    assert again.fields["lost"] == 100 - len(kept) > 50
