"""What `swarmnet top` draws: in 80 columns, without colour, with few rows, whatever strangers write."""

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from peers.config.errors import UserError
from peers.telemetry.reasons import stuck_lines
from peers.telemetry.snapshot import OwnWork, PeerRow, ShownEvent, SwarmSnapshot, as_json, complete, from_json
from peers.tools.top import screen

EPOCH = 1_700_000_000.0
PEERS = tuple(
    PeerRow(
        peer=f"12D3KooWpeer{number:02}",
        stage=number // 2,
        state="training",
        name=f"peer-{number}",
        round=231 + number % 2,
        loss=2.0 + number / 100,
        tokens_per_second=6000.0 + number,
        can_do=7000.0,
        sent_bytes=71_200_000,
        received_bytes=69_900_000,
        here=number == 2,
    )
    for number in range(6)
)
SNAPSHOT = SwarmSnapshot(
    source="peer attic",
    at=EPOCH,
    run="demo",
    state="training",
    rows=PEERS,
    round=231,
    settled=228,
    loss=2.0712,
    losses=tuple(4.0 - step / 60 for step in range(120)),
    tokens=503_808,
    tokens_per_second=12_918.0,
    sent={"activation": 120_000_000, "control": 900_000},
    received={"gradient": 110_000_000},
    microbatches={"committed": 4120, "rerouted": 3, "dropped": 0},
    rounds={"completed": 229, "deadline": 2},
    events=(
        ShownEvent(EPOCH - 9, "silent", "lost ...abc123: it sent nothing for 4 seconds", "warning"),
        ShownEvent(EPOCH - 5, "in_step", "in step at round 230"),
    ),
)
SNAPSHOT = complete(SNAPSHOT, [1, 1, 1])


def drawn(snapshot, width=80, rows=None, colour=False, encoding="utf-8", foot=""):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    console = Console(
        file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None,
        no_color=not colour, highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    console.print(screen.frame(snapshot, console, foot, rows))
    stream.seek(0)
    return stream.read()


def test_the_frame_fits_80_columns_and_says_all_of_it():
    text = drawn(SNAPSHOT, foot="q leaves")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("swarmnet top   demo   peer attic   training")
    assert lines[0].endswith("22:13:20")
    for words in (
        "round 231 (settled 228)  lag 1  loss 2.071  12,918 tok/s",
        "tokens       503,808 since start",
        "0:██ 2", "peer-2 (here)", "6,002", "71.2 MB", "activation 120 MB", "gradient 110 MB",
        "committed 4,120  rerouted 3", "completed 229  deadline 2",
        "silent          lost ...abc123", "q leaves",
    ):  # fmt: skip
        assert words in text, words
    assert "dropped" not in text, "what did not happen takes no room"


def test_idle_time_and_the_gradients_norm_have_a_line_where_they_are_known():
    seen = replace(SNAPSHOT, idle_share=0.4, gradient_norm=0.12345)
    assert "computing    idle 40%  gradient norm 0.123" in drawn(seen).splitlines()
    assert "computing    idle 0%" in drawn(replace(SNAPSHOT, idle_share=0.0)).splitlines()
    assert "computing" not in drawn(SNAPSHOT)


def test_a_stuck_stage_is_named_and_the_command_that_helps_is_whole():
    stuck = stuck_lines({0: 1}, "ab" * 32)
    lines = drawn(replace(SNAPSHOT, warnings=stuck)).splitlines()
    assert max(map(len, lines)) <= 80
    assert f"swarmnet join {'ab' * 8} --stage 0" in lines
    assert [line for line in lines if line.startswith("Stage 0 is stuck: 1 peer waits for its weights.")]


def test_the_memory_has_a_line_where_it_is_known():
    seen = replace(SNAPSHOT, memory_bytes=464_728_064)
    assert "memory       465 MB resident, without p2pd" in drawn(seen).splitlines()
    assert "memory" not in drawn(SNAPSHOT)


def test_a_frame_is_as_wide_as_the_terminal_and_loses_columns_first():
    for width in (40, 57, 80, 132, 200):
        lines = drawn(SNAPSHOT, width).splitlines()
        assert max(map(len, lines)) <= width
        assert ("down" in lines[5]) == (width >= 80)
        assert "state" in lines[5]


@pytest.mark.parametrize("rows", [10, 24, 40])
def test_a_low_terminal_keeps_the_head_and_the_newest_events(rows):
    many = tuple(
        replace(PEERS[0], peer=f"p{number}", name=f"n{number}", state="gone" if number == 900 else "training")
        for number in range(1000)
    )
    events = tuple(ShownEvent(EPOCH + number, "left", f"event {number}") for number in range(200))
    lines = drawn(replace(SNAPSHOT, rows=many, events=events), rows=rows).splitlines()
    assert len(lines) <= max(rows, 22)
    assert any("event 199" in line for line in lines)
    assert any("n900" in line for line in lines), "whoever is in trouble comes first"
    assert any("more" in line for line in lines)


def test_without_colour_there_is_no_escape_character_and_with_it_there_is():
    assert "\x1b" not in drawn(SNAPSHOT)
    assert "\x1b[33m" in drawn(SNAPSHOT, colour=True)


def test_a_terminal_without_unicode_gets_ascii():
    assert drawn(SNAPSHOT, encoding="ascii").isascii()


def test_a_stage_without_peers_is_shown_and_named():
    snapshot = complete(replace(SNAPSHOT, rows=PEERS[:3], waits_for=(2,)), [1, 1, 1])
    text = drawn(snapshot)
    assert "2: 0" in text
    assert "waits for stages 2: no peer holds them\nhold one: `swarmnet join RUN " in text


def test_a_stage_whose_peers_a_worker_does_not_see_is_no_stage_without_peers():
    first = (replace(PEERS[0], here=True), PEERS[1])
    text = drawn(complete(replace(SNAPSHOT, rows=first), [1, 1, 1]))
    assert "0:██ 2  1: 0  2: ? " in text
    text = drawn(complete(replace(SNAPSHOT, rows=first, waits_for=(2,)), [1, 1, 1]))
    assert "0:██ 2  1: 0  2: 0 " in text
    seen = complete(replace(SNAPSHOT, rows=(replace(PEERS[0], here=False),)), [1, 1, 1])
    assert "1: 0  2: 0 " in drawn(seen), "an observer sees all"


def test_what_is_said_again_and_again_takes_one_line():
    events = [ShownEvent(EPOCH + number, "gone", "x was not reached") for number in range(9)]
    events.insert(4, ShownEvent(EPOCH + 3.5, "left", "y"))
    lines = drawn(replace(SNAPSHOT, events=tuple(events))).splitlines()
    assert [line.split()[1:] for line in lines[-2:]] == [
        ["left", "y"], ["gone", "(9", "times)", "x", "was", "not", "reached"]
    ]  # fmt: skip


def test_nothing_known_yet_is_a_frame_too():
    text = drawn(SwarmSnapshot("peer x", EPOCH, state="connecting"))
    assert "connecting" in text
    assert "not known yet" in text


HOSTILE = "a\x1b[2Jb\nc\u202e"


def test_what_strangers_write_does_not_steer_the_terminal():
    peer = replace(PEERS[0], name=HOSTILE, state=HOSTILE)
    event = ShownEvent(EPOCH, HOSTILE, HOSTILE, "info")
    said = {"run": HOSTILE, "source": HOSTILE, "sent": {HOSTILE: 5}}
    snapshot = replace(SNAPSHOT, rows=(peer,), events=(event,), **said)
    text = drawn(snapshot)
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_curve_is_high_where_values_are():
    assert screen.spark([1.0, 2.0, 3.0], 3) == "▁▄█" or screen.spark([1.0, 2.0, 3.0], 3) == "▁▅█"
    assert screen.spark([7.0], 40) == "▁"
    assert len(screen.spark([float(x) for x in range(1000)], 40)) == 40
    assert screen.spark([2.0] * 5, 5) == "▁▁▁▁▁"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 100))
def test_any_curve_fits(values, width):
    assert 1 <= len(screen.spark(values, width)) <= width


def test_a_snapshot_survives_the_socket():
    assert from_json(json.loads(json.dumps(as_json(SNAPSHOT)))) == SNAPSHOT


@pytest.mark.parametrize(
    "answer",
    [{}, {"source": 5, "at": 1.0}, {"source": "x", "at": 1.0, "rows": [{"peer": "y"}]},
     {"source": "x", "at": 1.0, "losses": [0.0] * 5000}],
)  # fmt: skip
def test_an_answer_that_is_no_snapshot_is_said(answer):
    with pytest.raises(UserError, match="snapshot of a swarm"):
        from_json(answer)


@pytest.mark.parametrize(
    ("role", "words"),
    [("bootstrap", "is a bootstrap"), ("observer", "is an observer"), ("archivist", "is an archivist")],
)
def test_a_peer_without_a_stage_is_not_said_to_be_of_another_version(role, words):
    answer = {"peer": "12D3KooW", "name": "x", "role": role, "pid": 1, "ready": True, "why_not": None}
    with pytest.raises(UserError, match=words) as said:
        from_json(answer)
    assert "version" not in str(said.value)
    assert "swarmnet top --run" in str(said.value)


def test_what_this_computer_did_and_how_far_the_run_is_are_said_in_words():
    work = OwnWork(2_400_000, 370.0, share=0.012)
    seen = replace(SNAPSHOT, planned=3000, seconds_left=250.0, own_work=work)
    lines = drawn(seen).splitlines()
    assert "progress round 231 of 3,000 (7.7 %), about 4 min left at this pace" in lines
    assert "This computer has trained 2.4 million tokens in 6 min (1.2 % of the run)." in lines
    assert "trained" not in drawn(replace(seen, own_work=OwnWork(0, 60.0))), "nothing counts yet"
    staged = OwnWork(9500, 30.0, share=0.5, stage=2, joules=3.6e6)
    assert staged.text() == (
        "This computer has trained 9,500 tokens in 30 s (50 % of stage 2's tokens), with 1.00 kWh."
    )
    assert from_json(json.loads(json.dumps(as_json(seen)))) == seen
