"""Opinions about a run: only their author can sign them, they fit one place, and the newest counts."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.dht.stored_values import key_id, stored_value, verify_value
from protocols.errors import BadSignature, Malformed, TooLarge, WireError
from protocols.signed.envelope import EnvelopeKind, run_bytes, seal
from protocols.signed.identity import Identity
from protocols.signed.opinions import (
    OPINION_LIMIT,
    OPINION_SECONDS,
    OpinionDocument,
    open_opinion,
    opinions_in_force,
    opinions_key,
    seal_opinion,
)
from swarmnet.identifiers import RunId

ANNA, BEN = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
NOW = 1_800_000_000.0
LINES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=60)


def endorsement(identity=ANNA, run=RUN, text="good text", now=NOW, withdrawn=False):
    return seal_opinion(identity, run, OpinionDocument("", text, withdrawn), now)


def objection(document="ef" * 32, identity=ANNA, now=NOW, withdrawn=False):
    return seal_opinion(identity, RUN, OpinionDocument(document, "mine", withdrawn), now)


@given(LINES, LINES, st.booleans())
def test_an_opinion_says_what_was_signed_and_proves_its_place_in_the_directory(document, text, withdrawn):
    opinion = seal_opinion(ANNA, RUN, OpinionDocument(document, text, withdrawn), NOW)
    assert (opinion.document, opinion.text, opinion.withdrawn) == (document, text, withdrawn)
    assert len(opinion.data) <= OPINION_LIMIT
    proof = verify_value(stored_value(opinion.data), plain=False)
    assert proof.key == key_id(opinions_key(RUN, "objection" if document else "endorsement"))
    assert proof.subkey == opinion.subkey
    assert (proof.sequence, proof.issued_seconds) == (int(NOW * 1e6), NOW)
    assert proof.expires_seconds == NOW + OPINION_SECONDS


@given(st.integers(0, len(endorsement().data) * 8 - 1))
def test_no_bit_can_be_changed(bit):
    data = bytearray(endorsement().data)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        open_opinion(bytes(data))


@given(st.binary(max_size=1500))
def test_any_bytes_are_refused_with_a_reason(data):
    with pytest.raises(WireError):
        open_opinion(data)


@given(st.recursive(st.none() | st.booleans() | st.text() | st.binary(), st.lists, max_leaves=5))
def test_a_signed_payload_of_another_form_is_refused(payload):
    data = seal(ANNA, RUN, EnvelopeKind.OPINION, -1, 0, 7, msgspec.msgpack.encode(payload))
    with pytest.raises(WireError):
        open_opinion(run_bytes(RUN) + data)


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (OpinionDocument("", "two\nlines"), Malformed),
        (OpinionDocument("\x1b[2J", ""), Malformed),
        (OpinionDocument("", "x" * 201), Malformed),
        (OpinionDocument("界" * 200, "界" * 200), TooLarge),
    ],
)
def test_long_texts_and_those_that_steer_a_terminal_are_refused(document, error):
    with pytest.raises(error):
        seal_opinion(ANNA, RUN, document, NOW)


@pytest.mark.parametrize(("stage", "round", "sequence"), [(0, 0, 7), (-1, 1, 7), (-1, 0, 0)])
def test_an_envelope_with_a_stage_a_round_or_no_time_is_refused(stage, round, sequence):
    payload = msgspec.msgpack.encode(OpinionDocument("", "good"))
    data = seal(ANNA, RUN, EnvelopeKind.OPINION, stage, round, sequence, payload)
    with pytest.raises(Malformed):
        open_opinion(run_bytes(RUN) + data)


def test_an_opinion_does_not_speak_for_another_run():
    content = run_bytes(OTHER_RUN) + endorsement().data[32:]
    with pytest.raises((BadSignature, WireError)):
        open_opinion(content)


@given(st.permutations(range(4)))
def test_the_newest_opinion_counts_in_any_order_and_a_replayed_one_does_not(order):
    opinions = [
        endorsement(text="first", now=NOW - 30),
        endorsement(withdrawn=True, now=NOW - 20),
        endorsement(BEN, now=NOW - 10),
        objection(now=NOW - 5),
    ]
    seen = [opinions[number] for number in order]
    assert opinions_in_force(seen, RUN, "endorsement", NOW) == [opinions[2]]
    assert opinions_in_force(seen, RUN, "objection", NOW) == [opinions[3]]
    assert opinions_in_force(seen, OTHER_RUN, "endorsement", NOW) == []


def test_opinions_expire():
    old = endorsement()
    assert opinions_in_force([old], RUN, "endorsement", NOW + OPINION_SECONDS - 1) == [old]
    assert opinions_in_force([old], RUN, "endorsement", NOW + OPINION_SECONDS + 1) == []


def test_one_author_may_object_to_several_documents_and_withdraw_one():
    first, second = objection("a place"), objection("another")
    withdrawn = objection("a place", withdrawn=True, now=NOW + 1)
    assert first.subkey != second.subkey
    assert opinions_in_force([withdrawn, first, second], RUN, "objection", NOW + 2) == [second]
    assert replace(first, run_id=OTHER_RUN).subkey != first.subkey
