import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import BadSignature, Malformed, TooLarge, WireError, WrongRun
from protocols.framing.frames import wire_bytes
from protocols.messages.table import Contribution, encode
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope, seal
from protocols.signed.identity import Identity
from swarmnet.identifiers import RunId

ALICE, BOB = Identity.from_seed(b"alice"), Identity.from_seed(b"bob")
RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
TWIN_RUN = RunId("ab" * 8 + "cd" * 24)  # the same first 8 bytes, which are all that travels
PAYLOAD = b"votes" * 100
SEALED = seal(ALICE, RUN, EnvelopeKind.CONTRIBUTION, 2, 7, 9, PAYLOAD)


def opened(data, run=RUN, kind=EnvelopeKind.CONTRIBUTION, limit=10_000):
    return open_envelope(data, run, kind, limit)


def test_an_envelope_comes_back_as_it_was_sealed():
    envelope = opened(SEALED)
    assert envelope.sender == ALICE.peer_id
    assert (envelope.kind, envelope.stage, envelope.round, envelope.sequence) == (
        EnvelopeKind.CONTRIBUTION,
        2,
        7,
        9,
    )
    assert envelope.payload == PAYLOAD
    assert len(envelope.id) == 16


def test_envelope_frame_and_header_of_a_contribution_take_at_most_190_bytes():
    header = encode(Contribution())
    overhead = wire_bytes(len(header), ENVELOPE_BYTES + 25_000) - 25_000
    assert ENVELOPE_BYTES == 120
    assert overhead == 140
    assert overhead <= 190


def test_a_stage_of_minus_one_is_a_stage():
    data = seal(ALICE, RUN, EnvelopeKind.RECORD, -1, 0, 2**63, b"")
    assert open_envelope(data, RUN, EnvelopeKind.RECORD, 0).stage == -1


def test_the_id_names_sender_place_and_payload():
    ids = {
        opened(seal(who, RUN, EnvelopeKind.CONTRIBUTION, stage, round, sequence, payload)).id
        for who in (ALICE, BOB)
        for stage in (0, 1)
        for round in (0, 1)
        for sequence in (0, 1)
        for payload in (b"a", b"b")
    }
    assert len(ids) == 32
    assert opened(SEALED).id == opened(seal(ALICE, RUN, EnvelopeKind.CONTRIBUTION, 2, 7, 9, PAYLOAD)).id


def test_another_runs_envelope_is_told_apart_from_a_forgery():
    with pytest.raises(WrongRun):
        opened(SEALED, run=OTHER_RUN)
    with pytest.raises(BadSignature):
        opened(SEALED, run=TWIN_RUN)


def test_a_signature_for_one_kind_is_worth_nothing_as_another():
    with pytest.raises(Malformed):
        opened(SEALED, kind=EnvelopeKind.SNAPSHOT)
    relabelled = SEALED[:1] + bytes([EnvelopeKind.SNAPSHOT]) + SEALED[2:]
    with pytest.raises(BadSignature):
        opened(relabelled, kind=EnvelopeKind.SNAPSHOT)


def test_lengths_are_checked_before_anything_else():
    with pytest.raises(TooLarge):
        opened(b"\xff" * 200, limit=79)
    with pytest.raises(Malformed):
        opened(SEALED[: ENVELOPE_BYTES - 1])


def test_a_sender_cannot_be_swapped():
    stolen = SEALED[:10] + BOB.public_key + SEALED[42:]
    with pytest.raises(BadSignature):
        opened(stolen)


@given(at=st.integers(0, len(SEALED) - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_is_ever_accepted(at, bit):
    damaged = bytearray(SEALED)
    damaged[at] ^= 1 << bit
    with pytest.raises(WireError):
        opened(bytes(damaged))


@given(cut=st.integers(0, len(SEALED) - 1), tail=st.binary(max_size=40))
def test_no_cut_or_lengthened_envelope_is_ever_accepted(cut, tail):
    data = SEALED[:cut] + tail
    if data != SEALED:
        with pytest.raises(WireError):
            opened(data)


@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused(data):
    with pytest.raises(WireError):
        opened(data)
