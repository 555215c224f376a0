import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.signed.identity import (
    IDENTITY_BYTES,
    Identity,
    IdentityError,
    create,
    load,
    load_or_create,
    peer_id_of,
    public_key_bytes,
    verify,
)
from swarmnet.identifiers import PeerId


def test_an_identity_file_has_the_68_bytes_that_p2pd_reads_and_only_its_owner_may(tmp_path):
    identity = create(tmp_path / "identity")
    data = (tmp_path / "identity").read_bytes()
    assert len(data) == IDENTITY_BYTES == 68
    assert data[:4] == b"\x08\x01\x12\x40"
    assert data[36:] == identity.public_key
    assert stat.S_IMODE((tmp_path / "identity").stat().st_mode) == 0o600
    assert load(tmp_path / "identity").peer_id == identity.peer_id
    assert os.listdir(tmp_path) == ["identity"]


def test_the_peer_id_is_the_one_that_libp2p_derives():
    # The example key of the libp2p peer-id specification's Ed25519 test vector.
    private = bytes.fromhex(
        "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
        "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    identity = Identity.from_seed(private[4:36])
    assert identity.file_bytes() == private
    assert public_key_bytes(identity.peer_id) == private[36:]
    assert identity.peer_id.startswith("12D3KooW")


def test_an_identity_is_made_once_and_never_overwritten(tmp_path):
    path = tmp_path / "deeper" / "identity"
    first = load_or_create(path)
    assert load_or_create(path).peer_id == first.peer_id
    with pytest.raises(IdentityError, match="exists already"):
        create(path)
    assert load(path).peer_id == first.peer_id


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no Ed25519 identity"),
        (b"\x08\x00\x12\xa6\x09" + bytes(1190), "RSA"),
        (Identity.from_seed(b"a").file_bytes()[:-1], "no Ed25519 identity"),
        (Identity.from_seed(b"a").file_bytes() + b"\0", "no Ed25519 identity"),
        (Identity.from_seed(b"a").file_bytes()[:-1] + b"\xff", "damaged"),
    ],
)
def test_a_wrong_or_damaged_file_is_named(tmp_path, data, message):
    path = tmp_path / "identity"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match=message) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_a_file_that_others_may_read_is_refused_with_the_command_that_mends_it(tmp_path):
    create(tmp_path / "identity")
    (tmp_path / "identity").chmod(0o644)
    with pytest.raises(IdentityError, match=r"mode 644.*chmod 600"):
        load(tmp_path / "identity")


def test_a_missing_file_or_folder_that_cannot_be_written_is_an_identity_error(tmp_path):
    with pytest.raises(IdentityError, match="cannot read"):
        load(tmp_path / "nothing")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IdentityError, match="cannot write"):
        create(tmp_path / "file" / "identity")


def test_a_signature_is_verified_from_the_peer_id_alone():
    alice, bob = Identity.from_seed(b"alice"), Identity.from_seed(b"bob")
    signature = alice.sign(b"statement")
    assert verify(alice.peer_id, b"statement", signature)
    assert not verify(alice.peer_id, b"another", signature)
    assert not verify(bob.peer_id, b"statement", signature)
    assert not verify(alice.peer_id, b"statement", signature[:-1])


def test_a_peer_id_has_one_spelling():
    identity = Identity.from_seed(b"alice")
    for spelling in (identity.peer_id + " ", "1" + identity.peer_id, identity.peer_id + "\n"):
        assert not verify(PeerId(spelling), b"statement", identity.sign(b"statement"))


P = 2**255 - 19
SMALL_ORDER = [
    0, 1, P - 1, P, P + 1,
    2707385501144840649318225287225658788936804267575313519463743609750303402022,
    55188659117513257062467267217118295137698188065244968500265048394206261417927,
]  # fmt: skip
"""y of the points whose eightfold is nothing, the spellings with p added among them."""


def test_a_key_of_small_order_is_nobodys_and_signs_nothing():
    low = [y.to_bytes(32, "little") for y in SMALL_ORDER]
    for key in [*low, *(one[:-1] + bytes([one[-1] | 0x80]) for one in low)]:
        peer = peer_id_of(key)
        with pytest.raises(ValueError, match="nobody's key"):
            public_key_bytes(peer)
        assert not any(verify(peer, b"statement", point + bytes(32)) for point in low)


@given(peer=st.text(max_size=80), statement=st.binary(max_size=50), signature=st.binary(max_size=80))
def test_verify_never_raises_on_hostile_arguments(peer, statement, signature):
    assert verify(PeerId(peer), statement, signature) is False
