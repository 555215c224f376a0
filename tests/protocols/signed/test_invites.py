"""Invites: what a bearer shows proves the invite for its own peer id, and is worth nothing to another
peer."""

from __future__ import annotations

import pytest
from swarm import OWNER, sign, tiny_manifest

from protocols.errors import BadSignature, Malformed
from protocols.signed.identity import Identity
from protocols.signed.invites import (
    INVITE_LIMIT,
    invite_bytes,
    invite_text,
    open_invite,
    prove_invite,
    seal_invite,
)

SIGNED = sign(tiny_manifest(access="invite"))
RUN = SIGNED.run_id
GUEST, THIEF = (Identity.from_seed(name).peer_id for name in (b"guest", b"thief"))
BEARER = seal_invite(OWNER, RUN, None, 1e9, 1.0)
NAMED = seal_invite(OWNER, RUN, GUEST, 1e9, 1.0)


def opened(shown, peer=GUEST):
    return open_invite(shown, RUN, OWNER.peer_id, peer)


@pytest.mark.parametrize("handed", [BEARER, NAMED], ids=["bearer", "named"])
def test_an_invite_survives_its_text_and_lets_its_peer_in(handed):
    shown = prove_invite(invite_bytes(invite_text(handed)), RUN, GUEST)
    assert len(shown) <= INVITE_LIMIT
    assert opened(shown).refusal(GUEST, 1e8) is None


def test_what_a_bearer_shows_has_no_secret_and_lets_no_other_peer_in():
    shown = prove_invite(BEARER, RUN, GUEST)
    secret, envelope = BEARER[1:33], BEARER[33:]
    assert secret not in shown
    with pytest.raises(BadSignature, match="has not signed that peer id"):
        opened(shown, THIEF)
    with pytest.raises(Malformed):
        opened(envelope, THIEF)
    other = prove_invite(seal_invite(OWNER, RUN, None, 1e9, 1.0), RUN, THIEF)
    with pytest.raises(BadSignature):
        opened(other[:65] + envelope, THIEF)
    with pytest.raises(Malformed, match="is not an invite"):
        invite_bytes(invite_text(shown))


def test_all_bearers_of_an_invite_show_the_id_that_revokes_it():
    assert len({opened(prove_invite(BEARER, RUN, peer), peer).id for peer in (GUEST, THIEF)}) == 1


def test_the_secret_itself_opens_nothing_where_it_is_shown():
    with pytest.raises(Malformed):
        opened(BEARER)
