"""Alerts fire when they should and are quiet when they should: `promtool test rules` on minutes of series."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

RULES = Path(__file__).parent.parent / "configs" / "observability" / "alerts.yml"
PEER = '{instance="a"}'
STEP = f"swarmnet_train_last_step_timestamp_seconds{PEER}"
CLOCK = f"swarmnet_network_clock_offset_seconds{PEER}"
pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def state(name, labels=""):
    return f'swarmnet_state{{instance="a",state="{name}"{labels}}}'


def each(*spans):
    """Promtool's values, one a minute: so many times each."""
    return " ".join(f"{value}x{minutes - 1}" for value, minutes in spans)


def fires(folder, alert, series, minutes):
    """At which of these minutes the alert fires. `series`: promtool's values by name."""
    return [minute for minute in minutes if _fires(folder / "test.yml", alert, series, minute)]


def _fires(file, alert, series, minute):
    asked = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    once = {"expr": asked, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": 1}]}
    given = [{"series": name, "values": values} for name, values in series.items()]
    file.write_text(json.dumps({
        "rule_files": [str(RULES)], "evaluation_interval": "15s",
        "tests": [{"interval": "1m", "input_series": given, "promql_expr_test": [once]}],
    }))  # fmt: skip
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr
    assert "SUCCESS" in said or "got: {} 0E+00" in said, said  # Else it is no answer.
    return done.returncode == 0


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


def test_one_stage_of_a_process_that_trains_is_no_word_for_another_that_joins(tmp_path):
    first, second = (f',stage="{stage}"' for stage in "01")
    series = {
        state("training", first): each((1, 60)), state("training", second): each((0, 60)),
        'swarmnet_train_last_step_timestamp_seconds{instance="a",stage="0"}':
            " ".join(str(60 * minute) for minute in range(60)),
        'swarmnet_train_last_step_timestamp_seconds{instance="a",stage="1"}': each((0, 60)),
    }  # fmt: skip
    for alert in ("PeerStuck", "NoFirstRound"):
        assert fires(tmp_path, alert, series, (20, 50)) == [], alert


@pytest.mark.parametrize("offset", ["2.4", "-2.4", "-7200"])
def test_a_clock_that_is_off_is_an_alert_before_records_are_refused_for_it(tmp_path, offset):
    assert fires(tmp_path, "ClockOffset", {CLOCK: each((offset, 30))}, (2, 7, 20)) == [7, 20]


@pytest.mark.parametrize("offset", ["0", "1.4", "-1.4"])
def test_a_clock_that_is_off_by_no_more_than_lines_are_slow_is_none(tmp_path, offset):
    assert fires(tmp_path, "ClockOffset", {CLOCK: each((offset, 30))}, (7, 20)) == []
