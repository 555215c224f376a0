"""Contributions where work is audited: the head is signed, and what it says behind it is the one it names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from peers.worker.rounds.stored import Stored, opened_contribution
from protocols.errors import BadSignature, Malformed
from protocols.signed.commitments import LONGEST_HEAD, cut, joined, longest_window
from protocols.signed.envelope import Kind, seal
from protocols.signed.identity import Identity
from protocols.signed.told_tokens import told
from swarmnet.audits.commitment import MOST_STRETCHES, settings_of
from swarmnet.audits.work_log import WorkLog
from swarmnet.identifiers import RunId

MAKER, RUN, ROUND = Identity.from_seed(b"maker"), RunId("5" * 64), 3
PAYLOAD = b"what it moved"
WORK = SimpleNamespace(
    commits=True, run_id=RUN, stage=0, method=SimpleNamespace(payload_bytes=len(PAYLOAD), reduced=None)
)


def head(stage: int = 0, signed_round: int = ROUND, stretches: int = 1) -> bytes:
    log = WorkLog(settings_of(b"a text", "here"), MAKER.peer_id, 2)
    for number in range(stretches):
        log.published(-1, -1)
        log.computed(number, 1000)
    written = log.told(ROUND, PAYLOAD).written()
    return seal(MAKER, RUN, Kind.CONTRIBUTION, stage, signed_round, told(512, ROUND), written)


def test_a_contribution_is_its_signed_head_and_what_that_names():
    opened = opened_contribution(head() + PAYLOAD, WORK)
    assert (opened.reference.peer, opened.reference.round, opened.tokens) == (MAKER.peer_id, ROUND, 512)
    assert opened.commitment is not None
    stored = Stored(opened.reference, head() + PAYLOAD, opened.tokens, opened.commitment)
    assert stored.payload == PAYLOAD


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (head() + PAYLOAD[::-1], "not the one that its head names"),
        (head(stage=1) + PAYLOAD, "to stage 1"),
        (head(signed_round=4) + PAYLOAD, "signed for 4"),
        (PAYLOAD, "at least"),
        (head()[:-1] + PAYLOAD, "not signed by it"),
    ],
)
def test_what_its_maker_did_not_sign_is_refused(data, message):
    with pytest.raises((Malformed, BadSignature), match=message):
        opened_contribution(data, WORK)


def test_a_window_of_heads_is_read_as_it_was_written():
    heads = [head(stretches=number) for number in (1, 2, MOST_STRETCHES)]
    assert cut(joined(heads)) == heads
    assert len(heads[-1]) <= LONGEST_HEAD
    assert len(joined(heads)) <= longest_window(2)
    with pytest.raises(Malformed, match="cut short"):
        cut(joined(heads)[:-1])
