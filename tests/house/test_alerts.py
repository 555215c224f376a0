"""Alerts fire when they should and are quiet when they should: `promtool test rules` on minutes of series."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from ruamel.yaml import YAML

RULES = Path(__file__).parents[2] / "configs" / "observability" / "alerts.yml"
PEER = '{instance="a"}'
STEP = f"swarmnet_train_last_step_timestamp_seconds{PEER}"
CLOCK = f"swarmnet_network_clock_offset_seconds{PEER}"
SAVED = f"swarmnet_checkpoint_last_success_timestamp_seconds{PEER}"
EVERY = f"swarmnet_checkpoint_interval_seconds{PEER}"
ARCHIVED = 'swarmnet_archive_last_success_timestamp_seconds{instance="a",stage="1"}'
LOOKS = f"swarmnet_archive_interval_seconds{PEER}"
pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def state(name):
    return f'swarmnet_state{{instance="a",state="{name}"}}'


def each(*spans):
    """Promtool's values, one a minute: so many times each."""
    return " ".join(f"{value}x{minutes - 1}" for value, minutes in spans)


QUIET = r"time: (?:(\d+)h)?(?:(\d+)m)?,\s+exp: \{\} 1E\+00\s+got: \{\} 0E\+00"
"""Of what promtool says: a time at which nothing fires, where it was told that something does."""


def minutes_of(time):
    hours, minutes = time
    return 60 * int(hours or 0) + int(minutes or 0)


@cache
def rules_of_all_groups():
    return [rule for group in YAML(typ="safe").load(RULES.read_text())["groups"] for rule in group["rules"]]


def fires(folder, alert, series, minutes):
    """At which of these minutes the alert fires. `series`: promtool's values by name."""
    asked = [rule for rule in rules_of_all_groups() if rule["alert"] == alert]
    assert len(asked) == 1, alert
    (folder / "rule.yml").write_text(json.dumps({"groups": [{"name": "one", "rules": asked}]}))
    asked_for = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    firing = [{"labels": "{}", "value": 1}]
    given = [{"series": name, "values": values} for name, values in series.items()]
    (folder / "test.yml").write_text(json.dumps({
        "rule_files": ["rule.yml"], "evaluation_interval": "15s",
        "tests": [{"interval": "1m", "input_series": given, "promql_expr_test": [
            {"expr": asked_for, "eval_time": f"{minute}m", "exp_samples": firing} for minute in minutes
        ]}],
    }))  # fmt: skip
    done = subprocess.run(
        ["promtool", "test", "rules", folder / "test.yml"], capture_output=True, text=True, timeout=120
    )
    said = done.stdout + done.stderr
    quiet = [minutes_of(time) for time in re.findall(QUIET, said)]
    assert ("SUCCESS" in said) is (not quiet), said  # Else it is no answer.
    assert set(quiet) <= set(minutes), said
    return [minute for minute in minutes if minute not in quiet]


# Unix time is 0 at promtool's minute 0, so a round at minute 5 has the timestamp 300.

BEGINS = {state("joining"): each((1, 2), (0, 60)), state("training"): each((0, 2), (1, 60))}
"""In the group from minute 2 on."""


def test_a_peer_that_has_just_begun_is_not_stuck_and_one_that_never_gets_a_round_is_noticed(tmp_path):
    series = {**BEGINS, STEP: each((0, 60))}
    assert fires(tmp_path, "PeerStuck", series, (3, 4, 10, 15, 30, 50)) == []
    assert fires(tmp_path, "NoFirstRound", series, (3, 10, 20, 28, 50)) == [28, 50]


def test_a_first_round_that_takes_its_time_is_no_alert(tmp_path):
    series = {**BEGINS, STEP: f"{each((0, 12))} {' '.join(str(60 * minute) for minute in range(12, 50))}"}
    for alert in ("PeerStuck", "NoFirstRound"):
        assert fires(tmp_path, alert, series, (3, 11, 13, 20, 40)) == [], alert


def test_a_peer_that_applies_no_more_rounds_is_stuck_ten_minutes_later(tmp_path):
    series = {**BEGINS, STEP: f"{each((0, 3), (180, 60))}"}
    assert fires(tmp_path, "PeerStuck", series, (10, 13, 15, 40)) == [15, 40]
    assert fires(tmp_path, "NoFirstRound", series, (15, 40)) == []


def test_who_fetches_the_state_again_and_again_is_stuck_all_the_same(tmp_path):
    training = " ".join("0" if minute % 8 == 0 else "1" for minute in range(60))
    series = {state("training"): training, STEP: each((60, 60))}
    assert fires(tmp_path, "PeerStuck", series, (20, 40)) == [20, 40]


def test_who_was_paused_for_an_hour_gets_time_for_a_round(tmp_path):
    """Its last round is old when it comes back at minute 60."""
    paused = {state("training"): each((1, 10), (0, 50), (1, 40))}
    back = {**paused, STEP: f"{each((540, 65))} {' '.join(str(60 * minute) for minute in range(65, 100))}"}
    assert fires(tmp_path, "PeerStuck", back, (30, 59, 61, 62, 64, 66, 80)) == []
    assert fires(tmp_path, "PeerStuck", {**paused, STEP: each((540, 100))}, (62, 72, 90)) == [72, 90]


@pytest.mark.parametrize("offset", ["2.4", "-2.4", "-7200"])
def test_a_clock_that_is_off_is_an_alert_before_records_are_refused_for_it(tmp_path, offset):
    assert fires(tmp_path, "ClockOffset", {CLOCK: each((offset, 30))}, (2, 7, 20)) == [7, 20]


@pytest.mark.parametrize("offset", ["0", "1.4", "-1.4"])
def test_a_clock_that_is_off_by_no_more_than_lines_are_slow_is_none(tmp_path, offset):
    assert fires(tmp_path, "ClockOffset", {CLOCK: each((offset, 30))}, (7, 20)) == []


# -- checkpoints ----------------------------------------------------------------------------------------

LATE = "_x200"
"""Not there yet for 200 minutes: a peer whose checkpoint is from minute 0 would have an old one by then."""


def late_peer(every, saved, minutes=400):
    """A peer that begins at minute 200."""
    return {
        state("training"): f"{LATE} {each((1, minutes))}", EVERY: f"{LATE} {each((every, minutes))}",
        SAVED: f"{LATE} {saved}",
    }  # fmt: skip


def every_so_many(minutes, first, last):
    """A checkpoint every so many minutes, from one minute to another."""
    return " ".join(each((at * 60, minutes)) for at in range(first, last, minutes))


def test_a_fresh_peer_is_not_without_a_checkpoint_before_it_can_have_one(tmp_path):
    series = late_peer(3600, f"{each((0, 60))} {every_so_many(60, 260, 600)}")
    for alert in ("NoCheckpoint", "NoFirstCheckpoint"):
        assert fires(tmp_path, alert, series, (201, 229, 231, 259, 261, 300, 500)) == [], alert


def test_a_peer_that_never_writes_a_checkpoint_is_noticed_after_two_hours(tmp_path):
    series = late_peer(300, each((0, 400)))
    assert fires(tmp_path, "NoFirstCheckpoint", series, (231, 300, 319, 321, 590)) == [321, 590]
    assert fires(tmp_path, "NoCheckpoint", series, (231, 321, 590)) == []


def test_a_peer_that_writes_no_more_checkpoints_is_noticed(tmp_path):
    series = late_peer(300, f"{each((0, 5))} {every_so_many(5, 205, 260)} {each((15300, 345))}")
    # The newest is from minute 255: two hours, the time of three, and half an hour.
    assert fires(tmp_path, "NoCheckpoint", series, (300, 400, 419, 421, 590)) == [421, 590]
    assert fires(tmp_path, "NoFirstCheckpoint", series, (400, 421, 590)) == []


@pytest.mark.parametrize("every", [0, 4 * 3600])
def test_whose_file_asks_for_rare_checkpoints_or_none_is_left_in_peace(tmp_path, every):
    saved = each((0, 400)) if every == 0 else f"{each((0, 240))} {each((440 * 60, 160))}"
    for alert in ("NoCheckpoint", "NoFirstCheckpoint"):
        assert fires(tmp_path, alert, late_peer(every, saved), (231, 321, 439, 500, 590)) == [], alert


def test_who_was_held_for_hours_gets_time_for_a_checkpoint(tmp_path):
    series = {
        state("training"): each((1, 60), (0, 240), (1, 200)), EVERY: each((300, 500)),
        SAVED: f"{each((3600, 305))} {every_so_many(5, 305, 500)}",
    }  # fmt: skip
    assert fires(tmp_path, "NoCheckpoint", series, (100, 250, 301, 304, 310, 400)) == []


# -- archives -------------------------------------------------------------------------------------------


def test_an_archive_whose_looks_succeed_is_no_alert_though_the_run_is_held_and_none_is_newer(tmp_path):
    """A look succeeds that finds nothing newer: the time of the newest checkpoint may stand still."""
    newest = 'swarmnet_archive_newest_timestamp_seconds{instance="a",stage="1"}'
    series = {ARCHIVED: every_so_many(10, 0, 600), LOOKS: each((600, 600)), newest: each((60, 600))}
    assert fires(tmp_path, "ArchiveStandsStill", series, (10, 130, 300, 590)) == []


def test_an_archive_into_which_nothing_of_a_stage_comes_any_more_is_noticed(tmp_path):
    series = {
        ARCHIVED: f"{every_so_many(10, 0, 100)} {each((5400, 400))}", LOOKS: each((600, 500)),
        ARCHIVED.replace('"1"', '"0"'): every_so_many(10, 0, 500),
    }  # fmt: skip
    # It last succeeded at minute 90: three looks, and two hours.
    assert fires(tmp_path, "ArchiveStandsStill", series, (100, 200, 239, 242, 490)) == [242, 490]


def test_an_archive_that_is_looked_at_rarely_has_as_many_looks(tmp_path):
    series = {ARCHIVED: f"{each((60, 300))} {every_so_many(300, 300, 1200)}", LOOKS: each((18000, 1200))}
    assert fires(tmp_path, "ArchiveStandsStill", series, (250, 299, 700, 1190)) == []


def test_a_new_archive_gets_time_and_one_into_which_nothing_ever_comes_is_noticed(tmp_path):
    begins = {LOOKS: f"{LATE} {each((600, 400))}"}
    good = {**begins, ARCHIVED: f"{LATE} {each((0, 60))} {every_so_many(10, 260, 600)}"}
    assert fires(tmp_path, "ArchiveStandsStill", good, (201, 259, 261, 330, 590)) == []
    bad = {**begins, ARCHIVED: f"{LATE} {each((0, 400))}"}
    assert fires(tmp_path, "ArchiveStandsStill", bad, (231, 319, 321, 590)) == [321, 590]


# -- votes and answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alert", "metric"),
    [
        ("VotesLoseWeight", "light_peers"),
        ("WeightsConflict", "dissenting_peers"),
        ("AnswersDiffer", "avoiding_peers"),
    ],
)
def test_a_peer_that_others_doubt_is_an_alert_after_ten_minutes_and_none_when_it_is_gone(
    tmp_path, alert, metric
):
    name = f'swarmnet_swarm_{metric}{{run="r",stage="1"}}'
    series = {
        name: each((0, 10), (1, 5), (0, 5), (1, 30), (0, 10)),
        name.replace('"1"', '"0"'): each((0, 60)),
    }
    assert fires(tmp_path, alert, series, (5, 14, 18, 29, 31, 45, 52)) == [31, 45]
