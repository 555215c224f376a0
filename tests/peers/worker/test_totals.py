"""What a peer adds up over its life: time, energy, and the traffic of a month."""

import json

import pytest

from peers.worker.watch.totals import FILE_NAME, PeerTotals


def look(totals, now, month="2026-11", trains=True, joules=0.0, traffic_bytes=0):
    totals.look(now, month, trains=trains, joules=joules, traffic_bytes=traffic_bytes)


def test_only_training_time_counts_and_a_restart_goes_on(tmp_path):
    totals = PeerTotals(tmp_path)
    for now in range(5):
        look(totals, float(now), joules=100.0 * now)
    look(totals, 5.0, trains=False, joules=500.0)
    look(totals, 6.0, joules=900.0)
    look(totals, 4000.0, joules=950.0)  # The machine slept.
    assert (totals.seconds, totals.joules) == (5.0, 500.0)
    totals.save()
    again = PeerTotals(tmp_path)
    look(again, 0.0)
    look(again, 1.0)
    assert (again.seconds, again.joules) == (6.0, 500.0)


def test_traffic_is_counted_by_month_across_stages_and_restarts(tmp_path):
    totals = PeerTotals(tmp_path)
    for traffic in (0, 1000, 3000, 200, 700):  # A new stage began after 3000.
        look(totals, 0.0, traffic_bytes=traffic)
    assert totals.month_bytes("2026-11") == 3700
    totals.save()
    again = PeerTotals(tmp_path)
    look(again, 0.0, traffic_bytes=300)
    assert again.month_bytes("2026-11") == 4000
    assert again.month_bytes("2026-12") == 0
    look(again, 1.0, month="2026-12", traffic_bytes=350)
    assert again.month_bytes("2026-12") == 50


def test_counts_are_saved_now_and_then(tmp_path):
    totals = PeerTotals(tmp_path)
    for now in range(31):
        look(totals, float(now))
    assert json.loads((tmp_path / FILE_NAME).read_text())["seconds"] == 30.0
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"seconds": -1, "joules": 0, "month": "", "month_bytes": 0}', "nan",
             '{"seconds": NaN, "joules": 0, "month": "", "month_bytes": 0}',
             '{"seconds": 1, "joules": 0, "month": "", "month_bytes": 1e999}'],
)  # fmt: skip
def test_a_damaged_file_counts_nothing(tmp_path, text):
    (tmp_path / FILE_NAME).write_text(text)
    totals = PeerTotals(tmp_path)
    assert (totals.seconds, totals.joules, totals.month_bytes("")) == (0.0, 0.0, 0)


def test_a_disk_that_refuses_stops_nothing(tmp_path):
    totals = PeerTotals(tmp_path / "gone")
    look(totals, 0.0)
    totals.save()
