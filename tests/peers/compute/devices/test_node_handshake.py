"""The handshake between a peer and a node that lends it devices: what fits, and bytes of others."""

import socket
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.compute.devices import node_handshake
from peers.compute.devices.node_handshake import (
    LENDER,
    MAGIC,
    NONCE_BYTES,
    PEER,
    PROOF_BYTES,
    HandshakeError,
    WrongKey,
    accept_lender,
    greet_peer,
    prove,
    read_key,
)
from peers.config.errors import UserError

NONCES = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES)
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = GREETING_BYTES + PROOF_BYTES


@contextmanager
def pair():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def refused_by(side, sent):
    """How a side with KEY refuses a connection on which these bytes come and no more."""
    with pair() as (end, hostile):
        hostile.sendall(sent)
        hostile.shutdown(socket.SHUT_WR)
        with pytest.raises(HandshakeError) as refusal:
            side(end, KEY)
        return refusal.value


def played(peer_key, lender_key):
    """A handshake: the error of each side, None without; and all bytes of the lender and of the peer."""
    errors, sent = {}, {"lender": b"", "peer": b""}

    def run(name, side, end, key):
        try:
            side(end, key)
        except HandshakeError as error:
            errors[name] = error
        end.shutdown(socket.SHUT_WR)

    def copy(name, source, target):
        while piece := source.recv(4096):
            sent[name] += piece
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)

    with pair() as (lender, lender_line), pair() as (peer, peer_line):
        work = [
            (run, "lender", greet_peer, lender, lender_key),
            (run, "peer", accept_lender, peer, peer_key),
            (copy, "lender", lender_line, peer_line),
            (copy, "peer", peer_line, lender_line),
        ]
        threads = [threading.Thread(target=each[0], args=each[1:]) for each in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return errors.get("lender"), errors.get("peer"), sent["lender"], sent["peer"]


def test_equal_keys_fit_and_no_key_travels():
    lender_error, peer_error, of_lender, of_peer = played(KEY, KEY)
    assert (lender_error, peer_error) == (None, None)
    assert (len(of_lender), len(of_peer)) == (GREETING_BYTES + PROOF_BYTES, ANSWER_BYTES)
    assert KEY not in of_lender + of_peer


def test_a_lender_with_another_key_finds_out_and_sends_no_proof():
    lender_error, peer_error, of_lender, _ = played(KEY, OTHER_KEY)
    assert isinstance(lender_error, WrongKey)
    assert isinstance(peer_error, HandshakeError)
    assert len(of_lender) == GREETING_BYTES


@given(st.binary(max_size=200) | st.binary(max_size=200).map(MAGIC.__add__))
def test_hostile_bytes_are_refused_by_both_sides(sent):
    for side in (accept_lender, greet_peer):
        refused_by(side, sent)


@given(st.data())
def test_replayed_truncated_and_reflected_messages_are_refused(data):
    _, _, of_lender, of_peer = played(KEY, KEY)
    assert isinstance(refused_by(accept_lender, of_lender), WrongKey), "the peer has a new nonce"
    assert isinstance(refused_by(greet_peer, of_peer), WrongKey), "and so has the lender"
    for side, sent in ((accept_lender, of_lender), (greet_peer, of_peer)):
        refused_by(side, sent[: data.draw(st.integers(0, len(sent) - 1))])


def test_a_side_refuses_its_own_proof_sent_back():
    with pair() as (end, hostile):
        hostile.sendall(MAGIC + bytes(NONCE_BYTES))
        thread = threading.Thread(target=reflect, args=(hostile,))
        thread.start()
        with pytest.raises(WrongKey):
            accept_lender(end, KEY)
        thread.join()


def reflect(hostile):
    """Send the proof of the peer back to it."""
    received = b""
    while len(received) < ANSWER_BYTES:
        received += hostile.recv(ANSWER_BYTES)
    hostile.sendall(received[-PROOF_BYTES:])


@given(
    st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES),
    st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES),
)
def test_a_proof_is_of_one_key_role_and_connection(one, other):
    proofs = {prove(key, role, one, other) for key in (KEY, OTHER_KEY) for role in (PEER, LENDER)}
    assert len(proofs) == 4
    assert (prove(KEY, PEER, other, one) in proofs) == (one == other)


def test_a_side_that_drips_bytes_is_given_up(monkeypatch):
    monkeypatch.setattr(node_handshake, "STEP_SECONDS", 0.2)
    with pair() as (end, hostile):
        hostile.sendall(MAGIC)
        with pytest.raises((HandshakeError, TimeoutError)):
            accept_lender(end, KEY)


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"k" * 31, 0o600, "has 31 bytes and needs 32"),
        (b"k" * 32, 0o640, r"can be read by others \(mode 640\); run: chmod 600"),
        (None, 0, "is not there or no file; make one with"),
    ],
)
def test_a_key_file_that_is_no_secret_is_refused(tmp_path, content, mode, words):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(UserError, match=words):
        read_key(path)


def test_the_end_of_the_line_is_not_part_of_a_key(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    path.chmod(0o600)
    assert read_key(path) == KEY
