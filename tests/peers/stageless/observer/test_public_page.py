"""The public parts of an observer's page: leaderboard, link preview, QR code, the model's answer."""

import json
import struct
import zlib
from dataclasses import replace

import pytest
from archived import entry
from observed import NOON, record
from swarm import sign, tiny_manifest

from peers.network.discovery.claimed_tokens import Contributions
from peers.runtime.http_server import PageRequest
from peers.stageless.observer.join_code import draw_code
from peers.stageless.observer.page_json import ANSWER_CHARACTERS, Board, seen_event
from peers.stageless.observer.pages import pages
from peers.stageless.observer.people_file import FILE_NAME, keep_people, restore_people
from peers.stageless.observer.preview_picture import HEIGHT, WIDTH, draw_preview
from peers.stageless.observer.sightings import PeerObservations
from peers.stageless.observer.snapshot_of_records import snapshot_of
from peers.stageless.observer.swarm_metrics import SwarmMetrics
from peers.state.archive import Archive
from peers.state.archive_store import open_store
from peers.telemetry.event_log import LOG_FILE, EventLog, read_all
from peers.telemetry.log_events import PromptContinued
from protocols.signed.identity import Identity
from protocols.signed.signed_receipts import seal_receipt
from swarmnet.rounds.receipt_rules import Receipt

HOSTILE = '"><script>alert(1)</script>'
SIGNED = sign(tiny_manifest((1, 1, 1), name="tales " + HOSTILE))
LINK = "swarmnet:" + "ab" * 32 + "@/ip4/203.0.113.5/tcp/31330/p2p/12D3KooW" + "x" * 44


def board_of(*records):
    sightings = PeerObservations(3)
    for signed in records:
        sightings.recorded(signed, NOON)
    board = Board(SIGNED, f"swarmnet join {LINK}", "0.1.0")
    board.show(snapshot_of(sightings, SIGNED, NOON, walked_at=NOON))
    return board


def served(board):
    return pages(lambda: board, SwarmMetrics(lambda: board and board.snapshot), (), lambda: None)


# -- people -----------------------------------------------------------------------------------------------


def test_tokens_and_hours_of_people_outlive_a_restart_of_the_observer_and_of_their_computers(tmp_path):
    run, first = SIGNED.run_id, Contributions()
    for at, tokens in ((0, 100), (30, 400), (60, 400), (90, 900)):
        first.add(record("a", name="anna", tokens=tokens, started=1).record, NOON + at)
    assert first.ranking(3, 10**9) == [("a", "anna", 0, 900, 60.0)], "30 s without a token are no work"
    assert restore_people(tmp_path, run, Contributions()) is None, "there is no file yet"
    keep_people(tmp_path, run, first.totals(), 0)
    second = Contributions()
    assert restore_people(tmp_path, run, second) is None
    assert second.totals() == first.totals()
    second.add(record("a", name="anna", tokens=1200, started=1).record, NOON + 400)
    assert second.ranking(1, 10**9) == [("a", "anna", 0, 1200, 60.0)], "nobody watched for so long"
    second.add(record("a", name="anna", tokens=5000, started=2).record, NOON + 430)
    assert second.ranking(1, 10**9)[0][3] == 1200 + 5000, "its process has started again"
    second.add(record("a", stage=1, name="anna", tokens=10, started=2).record, NOON + 460)
    second.add(record("a", stage=0, name="anna", tokens=5001, started=2).record, NOON + 490)
    assert second.ranking(1, 10**9)[0][3] == 6200 + 10 + 5001, "each move begins at 0"


def test_people_of_another_run_or_in_a_broken_file_are_left_out(tmp_path):
    contributions = Contributions()
    contributions.add(record("a", tokens=5).record, NOON)
    keep_people(tmp_path, "cd" * 32, contributions.totals(), 0)
    kept = Contributions()
    assert restore_people(tmp_path, SIGNED.run_id, kept) is None
    (tmp_path / FILE_NAME).write_text('{"run": 3}')
    assert "Expected `str`" in restore_people(tmp_path, SIGNED.run_id, kept)
    assert not kept.totals()


def test_people_are_ranked_by_what_others_have_signed_and_that_outlives_a_restart(tmp_path):
    run, block = SIGNED.run_id, SIGNED.manifest.rounds.snapshot_interval
    loud, anna, ben, signer = (Identity.from_seed(bytes([n]) * 32) for n in range(4))

    def receipt(number, count, contributor=anna, by=signer, stage=0, of_run=run):
        first, last = block * number, block * number + block - 1
        content = Receipt(by.peer_id, contributor.peer_id, stage, first, last, count)
        return seal_receipt(by, of_run, content, NOON)

    def told(sightings, who, name, at, *receipts, tokens=100):
        fields = {"tokens": tokens, "receipts": receipts, "round": 2 * block - 1, "started": 1}
        signed = record(who.peer_id, at=NOON + at, name=name, **fields)
        sightings.recorded(signed, NOON + at)

    def shown(sightings, now):
        people = snapshot_of(sightings, SIGNED, NOON + now).contributors
        return [(name, confirmed, tokens) for _, name, confirmed, tokens, _ in people]

    sightings = PeerObservations(3, contributions=Contributions(run, block))
    false = (
        receipt(0, 2, contributor=ben), receipt(0, 2, stage=1), receipt(0, 2, of_run="cd" * 32),
        receipt(0, 2, contributor=loud)[:-1] + b"x",
    )  # fmt: skip
    told(sightings, loud, "loud", 0, *false, tokens=900)
    told(sightings, anna, "anna", 0, receipt(0, 1))
    told(sightings, anna, "anna", 30, receipt(0, block), receipt(1, 1))
    told(sightings, anna, "anna", 60, receipt(0, block), receipt(1, 1))
    told(sightings, ben, "ben", 60, *(receipt(n, block, contributor=ben) for n in range(4)))
    board = [("ben", 2 * block, 100), ("anna", block + 1, 100), ("loud", 0, 900)]
    assert shown(sightings, 60) == board, "one contribution a round at most, and none twice"

    keep_people(tmp_path, run, sightings.contributions.totals(), sightings.contributions.rounds)
    again = PeerObservations(3, contributions=Contributions(run, block))
    assert restore_people(tmp_path, run, again.contributions) is None
    assert shown(again, 90) == board, "nobody is here, and all of it is"
    told(again, anna, "anna", 120, receipt(0, block), receipt(1, 1), receipt(1, 2))
    assert shown(again, 120)[1] == ("anna", block + 2, 100)


def test_a_new_observer_takes_the_people_from_the_archive(tmp_path):
    state, place, found = tmp_path / "state", str(tmp_path / "archive"), Contributions(SIGNED.run_id, 4)
    assert restore_people(state, SIGNED.run_id, found, place) is None, "nothing is archived yet"
    archive = Archive(open_store(place))
    archive.open(SIGNED)
    archive.put(entry(0, 39, b"weights"), b"weights")
    archive.put_contributors([
        {"peer": "a", "name": "anna", "tokens": {"0": 900}, "confirmed": {"0": [30, 9, 4]}},
        {"peer": "b", "name": "ben", "tokens": {"0": 950}, "confirmed": {"0": [31, "9", 4], "1": 3}},
    ])  # fmt: skip
    assert restore_people(state, SIGNED.run_id, found, place) is None
    assert found.ranking(3, 10**9) == [("a", "anna", 30, 900, 0.0), ("b", "ben", 0, 950, 0.0)]
    other = sign(tiny_manifest(name="other")).run_id
    assert "of another run" in restore_people(state, other, Contributions(other, 4), place)


# -- previews of links ------------------------------------------------------------------------------------


def test_a_link_preview_says_how_far_the_run_is_and_nothing_in_it_can_break_out():
    board = board_of(*(record(f"peer-{n}", n) for n in range(3)))
    answer = served(board)["/"](PageRequest({}, 'https://swarm.example:1"><b>'))
    html = answer.body.decode()
    assert "<script>" not in html
    assert "<b>&" not in html.partition("<main>")[0]
    assert 'content="https://swarm.example:1&quot;&gt;&lt;b&gt;/preview.png"' in html
    assert 'property="og:title" content="Train tales &quot;&gt;&lt;script&gt;' in html
    assert (
        'property="og:description" content="Round 100 of 1,000 (10 %). 3 peers train this model now."' in html
    )
    before = served(None)
    assert "og:title" not in before["/"](PageRequest({}, "")).body.decode()
    assert before["/preview.png"](PageRequest({}, "")).status == 503


def pixels(png):
    """Width, height and rows of palette indices of a PNG."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        chunks[kind] = data
        at += 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    raw = zlib.decompress(chunks[b"IDAT"])
    return width, height, [raw[n * (width + 1) + 1 : (n + 1) * (width + 1)] for n in range(height)]


@pytest.mark.parametrize("name", ["tales", "Märchen und Sagen", "сказки", "x" * 500, ""])
def test_the_preview_is_a_small_png_for_any_name(name):
    png = draw_preview(name, ["round 5 of 10", "日本語 " * 100], 0.5, [3.0, 2.0, float(2**70), 1.0])
    width, height, rows = pixels(png)
    assert (width, height, len(rows)) == (WIDTH, HEIGHT, HEIGHT)
    assert len(png) < 30_000
    bar = rows[HEIGHT - 60]
    assert bar.count(4) == (WIDTH - 120) // 2, "half of the bar is done"
    assert draw_preview("a", [], None, []).startswith(b"\x89PNG")


def test_the_preview_is_drawn_once_a_minute_whoever_asks(monkeypatch):
    board, drawn = board_of(record()), []
    monkeypatch.setattr(Board, "preview", lambda self: drawn.append(self.snapshot.at) or b"png")
    picture = served(board)["/preview.png"]
    for second in (0, 1, 59, 60, 61):
        board.snapshot = replace(board.snapshot, at=NOON + second)
        assert picture(PageRequest({}, "")).body == b"png"
    assert drawn == [NOON, NOON + 60]


# -- joining ----------------------------------------------------------------------------------------------


def test_the_join_link_is_there_as_a_qr_code_without_scripts():
    pytest.importorskip("segno", reason="segno is not installed (scripts/setup page)")
    board = board_of(record())
    answer = served(board)["/join.svg"](PageRequest({}, ""))
    assert (answer.status, answer.kind) == (200, "image/svg+xml")
    assert answer.body == draw_code(LINK)
    assert b"<script" not in answer.body
    assert len(answer.body) < 10_000
    assert json.loads(board.answer(""))["run"]["has_code"]
    assert draw_code("x" * 5000) is None, "longer than a code can be"


def test_without_segno_the_page_has_no_code_and_says_what_brings_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "segno", None)
    board = board_of(record())
    assert not json.loads(board.answer(""))["run"]["has_code"]
    answer = served(board)["/join.svg"](PageRequest({}, ""))
    assert (answer.status, answer.body) == (404, b"no code: scripts/setup page\n")


# -- what is left when nobody is here ---------------------------------------------------------------------


def test_the_last_numbers_and_the_models_answer_outlive_a_restart(tmp_path):
    made = PromptContinued(prompt="Once upon", continuation=" a time " * 1000, round=90)
    old = board_of(*(record(f"peer-{n}", n, loss=2.5) for n in range(3)))
    times = iter([NOON, NOON + 9])
    log = EventLog(path=tmp_path / LOG_FILE, clock=lambda: next(times), monotonic=lambda: 0.0)
    log.record(seen_event(old.snapshot))
    log.record(made)
    log.close()
    new = Board(SIGNED, f"swarmnet join {LINK}", "0.1.0")
    new.restore(read_all(tmp_path / LOG_FILE))
    new.show(snapshot_of(PeerObservations(3), SIGNED, NOON + 7200, walked_at=NOON + 7200))
    answer = json.loads(new.answer(""))
    assert (answer["round"], answer["does"]["code"]) == (None, "empty")
    assert (answer["last"]["at"], answer["last"]["round"], answer["last"]["loss"]) == (NOON, 100, 2.5)
    assert (answer["answer"]["prompt"], answer["answer"]["at"]) == ("Once upon", NOON + 9)
    assert len(answer["answer"]["text"]) == ANSWER_CHARACTERS
    assert answer["curve"]["round"][0] == 100
    assert new.summary().startswith("Round 100 of 1,000 (10 %). No peer is here now")
