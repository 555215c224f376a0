"""What a peer says to people and to machines."""

import io
import json
import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.telemetry.console import (
    JsonReporter,
    LineReporter,
    LogToReporter,
    StatusLine,
    amount,
    open_report,
    printable,
    shown,
)

STATUS = StatusLine(
    "training",
    stage=1,
    stages=3,
    round=17,
    loss=2.3456,
    tokens_per_second=12345.6,
    sent_bytes=1_500_000,
    received_bytes=999,
    group_peers=2,
    swarm_peers=6,
    confirmed_tokens=60_160,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@given(st.text())
def test_what_strangers_wrote_is_shown_on_a_terminal_without_what_steers_it_and_means_the_same(text):
    told = json.dumps({"name": text}, indent=2, ensure_ascii=False)
    on_screen = shown(told, Terminal())
    assert all(character.isprintable() or character == "\n" for character in on_screen)
    assert json.loads(on_screen) == {"name": text}
    assert shown(told, io.StringIO()) == told, "a program gets it as it is"


def test_the_status_line_says_how_it_goes():
    assert STATUS.line() == (
        "training  round 17  loss 2.346  60,160 tokens confirmed  12,346 tok/s  stage 1 of 0-2"
        "  up 1.5 MB down 999 B  peers 2 here, 6 in all"
    )
    assert replace(STATUS, stage=0, stages=1).line().split("  ")[5] == "stage 0", "the only one"


def test_what_matters_most_fits_into_80_columns():
    waiting = replace(STATUS, round=12345, loss=10.25, confirmed_tokens=987_654_321, waits_for=12)
    assert waiting.line()[:80].startswith(
        "waits for stage 12  round 12345  loss 10.250  987.7 million tokens confirmed"
    )


def test_without_a_terminal_logs_are_json_with_the_clock_that_was_given():
    stream = io.StringIO()
    report = open_report("auto", stream, lambda: 12.5, "attic")
    report.status(STATUS)
    report.notify("peer_lost", "lost a neighbour", "warning", peer="12D3")
    status, said = map(json.loads, stream.getvalue().splitlines())
    assert status["event"] == "status"
    assert status["loss"] == 2.3456
    assert said == {"time": 12.5, "name": "attic", "level": "warning", "event": "peer_lost",
                    "text": "lost a neighbour", "peer": "12D3"}  # fmt: skip


@pytest.mark.parametrize("log", ["auto", "line"])
def test_where_there_is_no_terminal_the_status_comes_once_a_minute_and_at_once_when_it_changes(log):
    stream, now = io.StringIO(), [1000.0]
    report = open_report(log, stream, lambda: now[0])
    for second in range(121):
        now[0] = 1000.0 + second
        report.status(replace(STATUS, round=second))
    assert len(stream.getvalue().splitlines()) == 3
    report.status(replace(STATUS, state="leaving"))
    assert len(stream.getvalue().splitlines()) == 4


def test_a_program_that_asks_for_json_hears_every_status():
    stream = io.StringIO()
    report = open_report("json", stream, lambda: 0.0)
    for round in range(5):
        report.status(replace(STATUS, round=round))
    assert [json.loads(line)["round"] for line in stream.getvalue().splitlines()] == [0, 1, 2, 3, 4]


def test_the_same_status_is_one_line_where_there_is_no_terminal():
    stream = io.StringIO()
    report = open_report("line", stream, lambda: 0.0)
    assert isinstance(report, LineReporter)
    report.status(STATUS)
    report.status(STATUS)
    report.notify("x", "bad\x1b[2J\nnews", "error")
    report.close()
    assert stream.getvalue().splitlines() == [STATUS.line(), "error: bad?[2J?news"]


def test_on_a_terminal_the_line_is_rewritten_and_news_stay_above_it():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    report = open_report("auto", stream, lambda: 0.0)
    report.status(STATUS)
    report.notify("x", "something happened")
    report.status(StatusLine("leaving"))
    report.close()
    assert "something happened\n" in stream.getvalue()
    assert "leaving" in stream.getvalue()


def test_what_libraries_log_becomes_part_of_the_report():
    stream = io.StringIO()
    logger = logging.Logger("library")
    logger.addHandler(LogToReporter(JsonReporter(stream=stream, clock=lambda: 0.0)))
    logger.info("chatter")
    logger.error("two\nlines %s", 5)
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert (line["level"], line["text"]) == ("error", "library: two lines 5")


def test_amounts():
    assert [amount(number) for number in (0, 999, 1000, 123_456, 2_340_000, 999_999, 10**13)] == [
        "0 B", "999 B", "1.0 kB", "123 kB", "2.3 MB", "1.0 MB", "10.0 TB"
    ]  # fmt: skip


def test_nothing_printable_is_lost():
    assert printable("Bücher 本 ok") == "Bücher 本 ok"
