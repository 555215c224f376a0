"""Loss curves from event logs: `swarmnet curve`."""

import csv

import pytest

from peers.cli import main as cli
from peers.config.errors import UserError
from peers.telemetry import log_events
from peers.telemetry.event_log import EventLog
from peers.tools.curve import LossPoint, loss_points, read_curve, render, smoothed_end

ORIGIN = "12D3KooWPeer"


class Clock:
    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        self.now += 1.0
        return self.now


def write(state, *events):
    clock = Clock()
    with EventLog(path=state / "events.jsonl", clock=clock, monotonic=clock) as log:
        for event in events:
            log.record(event)


def committed(counter, tokens, loss):
    return log_events.Committed(ORIGIN, counter, tokens, loss)


def settled(round, tokens):
    return log_events.Settled(round, "ab", [], tokens)


def seen(round, loss, eval_loss=None):
    return log_events.SwarmSeen(round, round * 100, loss, eval_loss, 3, 12.5)


def test_a_point_of_a_peer_is_the_mean_of_its_microbatches_since_the_last_settled_round(tmp_path):
    write(tmp_path, committed(0, 100, 4.0), committed(1, 300, 2.0), settled(0, 800), settled(1, 1200),
          committed(2, 100, 1.0), settled(2, 1600))  # fmt: skip
    points = read_curve(tmp_path)
    assert [(point.round, point.tokens, point.loss) for point in points] == [(0, 800, 2.5), (2, 1600, 1.0)]


def test_rounds_of_a_branch_that_was_given_up_are_removed(tmp_path):
    resync = log_events.Resync("fork", [], "two branches", 1)
    write(tmp_path, committed(0, 100, 4.0), settled(0, 100), committed(1, 100, 3.0), settled(1, 200), resync,
          committed(2, 100, 2.0), settled(1, 300))  # fmt: skip
    assert [(point.round, point.loss) for point in read_curve(tmp_path)] == [(0, 4.0), (1, 2.0)]


def test_an_observers_points_are_those_that_it_showed_and_one_without_loss_is_left_out(tmp_path):
    write(tmp_path, seen(1, None), seen(2, 3.0, 3.5), seen(3, 2.0))
    points = read_curve(tmp_path)
    assert [(point.tokens, point.loss, point.eval_loss) for point in points] == [
        (200, 3.0, 3.5),
        (300, 2.0, None),
    ]


def test_the_end_is_the_mean_of_the_last_tenth():
    points = [LossPoint(0.0, round, round, float(30 - round), None) for round in range(30)]
    assert smoothed_end(points) == 2.0
    assert "mean of the last tenth: 2.0000" in render("a", points)
    assert len(render("a", points).splitlines()) == 2 + 12 + 1


def test_a_log_without_a_loss_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"holds no events\.jsonl"):
        read_curve(tmp_path)
    write(tmp_path, settled(0, 100))
    with pytest.raises(UserError, match="has no loss yet"):
        read_curve(tmp_path)
    assert loss_points([]) == []


def test_two_peers_in_one_csv_picture_and_folder_of_event_files(tmp_path, capsys):
    for name, loss in (("one", 3.0), ("two", 2.0)):
        write(tmp_path / name, committed(0, 100, loss), settled(0, 100), committed(1, 100, loss / 2),
              settled(1, 200))  # fmt: skip
    folders = [str(tmp_path / name) for name in ("one", "two")]
    written = tmp_path / "all.csv"
    with pytest.raises(SystemExit) as end:
        cli.main(["curve", *folders, "--csv", str(written)])
    assert end.value.code == 0
    rows = list(csv.DictReader(written.read_text().splitlines()))
    assert [(row["curve"], row["tokens"], row["loss"]) for row in rows] == [
        ("one", "100", "3.0"), ("one", "200", "1.5"), ("two", "100", "2.0"), ("two", "200", "1.0")
    ]  # fmt: skip
    assert "loss at the end" in capsys.readouterr().out


@pytest.mark.parametrize(("package", "option"), [("matplotlib", "--png"), ("tensorboardX", "--tensorboard")])
def test_pictures_and_event_files_are_written_or_say_what_they_need(tmp_path, capsys, package, option):
    write(tmp_path / "one", seen(1, 3.0, 3.5), seen(2, 2.0, 2.5))
    with pytest.raises(SystemExit) as end:
        cli.main(["curve", str(tmp_path / "one"), option, str(tmp_path / "out")])
    try:
        __import__(package)
    except ModuleNotFoundError:
        assert end.value.code == 2
        assert "scripts/setup pictures" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    else:
        assert end.value.code == 0
        found = tmp_path / "out"
        file = found if found.is_file() else next((found / "one").iterdir())
        assert file.stat().st_size > 200
