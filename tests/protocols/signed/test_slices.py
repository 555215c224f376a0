"""Slices of a contribution: each is proven by what its contributor signed, and nothing else is taken."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import BadSignature, Malformed, WireError, WrongRun
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope, seal
from protocols.signed.identity import Identity
from protocols.signed.slices import DIGEST_BYTES, head_bytes, open_slices, sign_slices
from protocols.signed.token_count import encode_tokens
from swarmnet.identifiers import RunId

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
ME, SOMEBODY = Identity.from_seed(b"me"), Identity.from_seed(b"somebody")
SLICES = (b"first", b"", b"third one", b"last")
"""One of them empty: a shard that has no chunk of the layout."""
SIZES = [len(data) for data in SLICES]
HEAD, NAME = sign_slices(ME, RUN, 2, 7, 1234, SLICES)


def body(*shards: int) -> bytes:
    return HEAD + b"".join(SLICES[shard] for shard in shards)


@pytest.mark.parametrize("shards", [[0], [1], [0, 3], [2, 3], [0, 1, 2, 3]])
def test_any_of_them_are_opened_as_they_were_signed(shards):
    found = open_slices(body(*shards), RUN, shards, SIZES)
    assert found.data == {shard: SLICES[shard] for shard in shards}
    assert (found.sender, found.stage, found.round, found.tokens) == (ME.peer_id, 2, 7, 1234)
    assert found.id == NAME, "by whichever slices it is known, the contribution has one name"


def test_the_head_is_as_long_as_told_and_says_what_the_page_of_the_wire_says():
    assert len(HEAD) == head_bytes(len(SLICES)) == ENVELOPE_BYTES + DIGEST_BYTES * len(SLICES)
    envelope = open_envelope(HEAD, RUN, EnvelopeKind.SLICES, DIGEST_BYTES * len(SLICES))
    digests = b"".join(hashlib.sha256(data).digest()[:16] for data in SLICES)
    assert bytes(envelope.payload) == digests
    assert int(EnvelopeKind.SLICES) == 9


def test_a_contribution_of_other_slices_or_another_round_has_another_name():
    names = {
        sign_slices(ME, RUN, 2, 7, 1234, (b"other", *SLICES[1:]))[1],
        sign_slices(ME, RUN, 2, 8, 1234, SLICES)[1],
        sign_slices(SOMEBODY, RUN, 2, 7, 1234, SLICES)[1],
        NAME,
    }
    assert len(names) == 4


@pytest.mark.parametrize("shards", [[], [3, 0], [0, 0], [0, 4], [-1, 0], [4], [-1], [2**62]])
def test_shards_that_are_not_in_order_there_twice_or_not_at_all_are_malformed(shards):
    whole = HEAD + b"".join(SLICES[shard % 4] for shard in shards)
    with pytest.raises(Malformed, match="of 4"):
        open_slices(whole, RUN, shards, SIZES)


def test_a_changed_slice_is_not_the_one_that_was_signed():
    changed = HEAD + b"First" + b"last"
    with pytest.raises(Malformed, match="the slice of shard 0 is not the one"):
        open_slices(changed, RUN, [0, 3], SIZES)


def test_a_slice_of_another_shard_does_not_pass_for_one():
    head, _ = sign_slices(ME, RUN, 0, 0, 1, (b"aaaa", b"bbbb"))
    with pytest.raises(Malformed, match="shard 1 is not the one"):
        open_slices(head + b"aaaa", RUN, [1], [4, 4])


@pytest.mark.parametrize("wrong", [body(0)[:-1], body(0) + b"\0", body(0, 1, 2), HEAD[:-1], b""])
def test_slices_of_other_sizes_than_the_runs_are_malformed(wrong):
    with pytest.raises(Malformed, match="not as long as the run's"):
        open_slices(wrong, RUN, [0], SIZES)


def test_a_head_for_more_or_fewer_shards_than_the_run_has_is_malformed():
    for slices in (SLICES[:3], (*SLICES, b"")):
        head, _ = sign_slices(ME, RUN, 2, 7, 1234, slices)
        with pytest.raises(Malformed):
            open_slices(head + SLICES[0], RUN, [0], SIZES)


def test_slices_of_another_run_are_told_apart_from_a_forgery():
    with pytest.raises(WrongRun):
        open_slices(body(0), OTHER_RUN, [0], SIZES)


def test_an_envelope_for_something_else_is_none_for_slices():
    digests = HEAD[ENVELOPE_BYTES:]
    other = seal(ME, RUN, EnvelopeKind.CONTRIBUTION, 2, 7, encode_tokens(1234, 7), digests)
    with pytest.raises(WireError):
        open_slices(other + SLICES[0], RUN, [0], SIZES)


@pytest.mark.parametrize("place", [1, 5, 20, 43, 47, 55, 60, 119, ENVELOPE_BYTES, len(HEAD) - 1])
def test_nothing_of_the_head_can_be_changed(place):
    """Digests of slices that did not come neither: who changed those would name another contribution."""
    bent = bytearray(body(0))
    bent[place] ^= 1
    with pytest.raises(WireError):
        open_slices(bytes(bent), RUN, [0], SIZES)


def test_what_somebody_else_signs_with_my_key_in_it_is_a_forgery():
    theirs, _ = sign_slices(SOMEBODY, RUN, 2, 7, 1234, SLICES)
    mixed = HEAD[:42] + theirs[42:] + SLICES[0]
    with pytest.raises(BadSignature):
        open_slices(mixed, RUN, [0], SIZES)


@given(st.binary(max_size=300), st.lists(st.integers(-3, 6), max_size=5))
def test_whatever_comes_is_opened_or_refused(data, shards):
    with pytest.raises(WireError):
        open_slices(data, RUN, shards, SIZES)
