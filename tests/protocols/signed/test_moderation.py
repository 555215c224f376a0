"""Bans by moderators: enough of the keys in the manifest must have signed the same bans, for the same run."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm import OWNER, sign, tiny_manifest

from peers.network.orders.gatekeeper import Gatekeeper
from peers.network.orders.order_book import OrderBook
from protocols.dht.stored_values import key_id, stored_value, verify_value
from protocols.errors import BadSignature, Malformed, TooLarge, WireError, WrongRun
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, seal
from protocols.signed.identity import Identity
from protocols.signed.moderation import (
    add_signature,
    begin_moderation,
    joint_id,
    moderation_bytes,
    moderation_text,
    open_complete,
    open_moderation,
)
from protocols.signed.orders import seal_order
from protocols.signed.stored_orders import (
    is_stored_order,
    open_any_order,
    open_order_of,
    open_stored_order,
    order_key,
    stored_order,
)
from swarmnet.identifiers import PeerId, RunId
from swarmnet.run.owner_orders import Ban, OwnerOrders, describe_news
from swarmnet.run.schema import Moderators

ANNA, BEN, CLEO, STRANGER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3, 9))
MODERATORS = Moderators(tuple(one.peer_id for one in (ANNA, BEN, CLEO)), 2)
SIGNED = sign(tiny_manifest(moderators=MODERATORS))
RUN, OTHER_RUN = SIGNED.run_id, RunId("ab" * 32)
VICTIM, OTHER = PeerId("12D3KooWliar"), PeerId("12D3KooWother")


def bans(*peers, sequence=7):
    return OwnerOrders(sequence, "noise", bans=tuple(Ban(peer, f"lied, {peer}") for peer in peers))


def signed_by(*identities, order=None, run=RUN, moderators=MODERATORS):
    first, *others = identities
    begun = begin_moderation(first, run, moderators, order or bans(VICTIM))
    for other in others:
        begun = add_signature(other, run, begun)
    return begun.data


def written(*heads_of, payload=None, order=None):
    """A document with these signatures, without any check: pairs of identity and run."""
    base = signed_by(ANNA, order=order)
    start = 3 + 32 * len(MODERATORS.keys)
    payload = base[start + 1 + ENVELOPE_BYTES :] if payload is None else payload
    heads = [
        seal(identity, run, EnvelopeKind.MODERATION, -1, 0, 7, payload)[:ENVELOPE_BYTES]
        for identity, run in heads_of
    ]
    return base[:start] + bytes([len(heads)]) + b"".join(heads) + payload


def book(kept=None):
    return OrderBook(signed=SIGNED, kept=kept, log_event=lambda *_: None, notify=lambda *_: None)


def test_two_of_three_can_ban_and_whoever_signs_first_does_not_matter():
    for signers in ((ANNA, BEN), (BEN, ANNA), (CLEO, ANNA)):
        held = book()
        assert held.take(signed_by(*signers))
        assert held.order.banned(VICTIM) == Ban(VICTIM, f"lied, {VICTIM}", by="moderators")
    code, reason = Gatekeeper(held, b"", lambda: 0.0).refusal(VICTIM, b"")
    assert (code, reason) == ("banned", f"the run's moderators have banned this peer: lied, {VICTIM}")
    assert held.take(signed_by(BEN, CLEO, order=bans(OTHER, sequence=8)))
    assert [ban.peer for ban in held.order.bans] == [OTHER], "the newest one has all bans"


@pytest.mark.parametrize(
    ("data", "error", "reason"),
    [
        (signed_by(ANNA), BadSignature, "signed by 1 moderators; 2 must sign"),
        (written((ANNA, RUN), (ANNA, RUN)), Malformed, "one moderator has signed twice"),
        (written((ANNA, RUN), (STRANGER, RUN)), BadSignature, "none of the run's moderators"),
        (written((OWNER, RUN), (ANNA, RUN)), BadSignature, "none of the run's moderators"),
        (signed_by(ANNA, BEN, run=OTHER_RUN), WrongRun, "signed for the run abababab"),
        (signed_by(ANNA, STRANGER, moderators=Moderators((ANNA.peer_id, STRANGER.peer_id), 2)),
         BadSignature, "of other moderators than the run's manifest names"),
        (signed_by(ANNA, moderators=replace(MODERATORS, needed=1)), BadSignature, "of other moderators"),
        (written(), Malformed, "without a signature"),
    ],
)  # fmt: skip
def test_bans_that_too_few_have_signed_or_others_or_for_another_run_are_refused(data, error, reason):
    held = book()
    with pytest.raises(error, match=reason):
        held.take(data)
    assert held.order.bans == ()


def test_signatures_of_two_runs_or_of_two_documents_do_not_add_up():
    head_of = sorted((ANNA, BEN), key=lambda one: one.peer_id)
    mixed = written((head_of[0], RUN), (head_of[1], OTHER_RUN))
    with pytest.raises(WrongRun):
        book().take(mixed)
    one = signed_by(ANNA, BEN, order=bans(VICTIM))
    other = signed_by(ANNA, BEN, order=bans(OTHER))
    start = 3 + 32 * 3 + 1
    with pytest.raises(BadSignature):
        book().take(one[: start + ENVELOPE_BYTES] + other[start + ENVELOPE_BYTES :])


def test_a_moderator_adds_a_signature_only_once_and_a_stranger_none():
    begun = begin_moderation(ANNA, RUN, MODERATORS, bans(VICTIM))
    assert (begun.missing, begun.signers) == (1, (ANNA.peer_id,))
    with pytest.raises(Malformed, match="signed twice"):
        add_signature(ANNA, RUN, begun)
    for stranger in (STRANGER, OWNER):
        with pytest.raises(BadSignature, match="none of the run's moderators"):
            add_signature(stranger, RUN, begun)
        with pytest.raises(BadSignature, match="none of the run's moderators"):
            begin_moderation(stranger, RUN, MODERATORS, bans(VICTIM))
    done = add_signature(BEN, RUN, begun)
    assert done.missing == 0
    with pytest.raises(Malformed, match="3 signatures, of which 2 are needed"):
        add_signature(CLEO, RUN, done)
    assert open_moderation(moderation_bytes(moderation_text(done)), RUN, MODERATORS) == done


def test_moderators_only_ban_and_the_owner_can_neither_be_banned_nor_overruled():
    held = book()
    owner_order = OwnerOrders(5, "mine", paused=True, bans=(Ban(OTHER, "by me"),))
    held.take(seal_order(OWNER, RUN, owner_order).data)
    held.take(signed_by(ANNA, BEN, order=bans(VICTIM, OTHER, OWNER.peer_id)))
    assert (held.order.paused, held.order.sequence, held.order.reason) == (True, 7, "noise")
    assert [(ban.peer, ban.by) for ban in held.order.bans] == [(OTHER, "owner"), (VICTIM, "moderators")]
    held.take(signed_by(ANNA, CLEO, order=bans(sequence=8)))
    assert [ban.peer for ban in held.order.bans] == [OTHER], "what the owner has banned stays banned"


def test_the_owner_can_dismiss_the_moderators_and_reinstate_them():
    held, told = book(), []
    held.heard.append(lambda before, now: told.append((len(before.bans), len(now.bans))))
    held.take(signed_by(ANNA, BEN))
    held.take(seal_order(OWNER, RUN, OwnerOrders(9, "they lie", dismissed=True)).data)
    held.take(signed_by(ANNA, BEN, order=bans(OTHER, VICTIM, sequence=10)))
    held.take(seal_order(OWNER, RUN, OwnerOrders(11, "again")).data)
    assert told == [(0, 1), (1, 0), (0, 0), (0, 2)]


def test_a_notice_has_the_reason_of_the_newest_order_alone():
    held, notices = book(), []
    held.heard.append(lambda before, now: notices.append(describe_news(before, now)))
    held.take(seal_order(OWNER, RUN, OwnerOrders(9, "for the night", paused=True)).data)
    held.take(signed_by(ANNA, BEN))
    held.take(signed_by(ANNA, BEN, order=bans(OTHER, sequence=10)))
    assert notices == [
        "the run is paused (for the night)",
        f"{VICTIM} is banned by moderators: lied, {VICTIM}",
        f"{OTHER} is banned by moderators: lied, {OTHER}; {VICTIM} is no longer banned (noise)",
    ]


def test_an_older_document_replaces_no_newer_one_and_both_survive_a_restart(tmp_path):
    held = book(tmp_path / "order.bin")
    old, new = signed_by(ANNA, BEN), signed_by(ANNA, BEN, order=bans(OTHER, sequence=8))
    assert held.take(new)
    assert not held.take(old), "a withdrawn ban cannot be replayed"
    held.take(seal_order(OWNER, RUN, OwnerOrders(3, "", paused=True)).data)
    again = book(tmp_path / "order.bin")
    assert again.order == held.order
    assert again.order.paused
    assert again.order.banned(OTHER)


def test_a_run_without_moderators_takes_no_bans_of_any():
    signed = sign(tiny_manifest())
    held = OrderBook(signed=signed, kept=None, log_event=lambda *_: None, notify=lambda *_: None)
    with pytest.raises(BadSignature, match="other moderators"):
        held.take(signed_by(ANNA, BEN, run=signed.run_id))


def test_a_directory_node_verifies_bans_without_the_manifest():
    data = signed_by(ANNA, BEN)
    content = stored_order(RUN, data)
    assert is_stored_order(content)
    assert not is_stored_order(SIGNED.wire())
    run, order = open_stored_order(content)
    assert (run, order.owner) == (RUN, joint_id(MODERATORS))
    proof = verify_value(stored_value(content), plain=True)
    assert (proof.key, proof.sequence) == (key_id(order_key(RUN, joint_id(MODERATORS))), 7)
    with pytest.raises(BadSignature):
        verify_value(stored_value(stored_order(RUN, signed_by(ANNA))), plain=True)
    alone = Moderators((STRANGER.peer_id,), 1)
    forged = open_any_order(signed_by(STRANGER, moderators=alone), RUN)
    assert order_key(RUN, forged.owner) != order_key(RUN, order.owner), "nobody looks there"
    assert not book().accept(forged)


def test_a_long_list_of_bans_is_refused_before_it_is_sent():
    many = bans(*(PeerId(f"12D3KooW{n:044}") for n in range(400)))
    with pytest.raises(TooLarge):
        signed_by(ANNA, order=many)


@given(st.data())
def test_no_change_of_a_byte_and_no_other_bytes_ban_anybody(data):
    good = bytearray(signed_by(ANNA, BEN))
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(good) - 1))
        good[place] ^= data.draw(st.integers(1, 255))
    else:
        good = bytearray(b"\2") + data.draw(st.binary(max_size=400))
    held = book()
    with pytest.raises(WireError):
        held.take(bytes(good))
    assert held.order.bans == ()
    with pytest.raises(WireError):
        open_order_of(SIGNED.manifest, RUN, bytes(good[: data.draw(st.integers(0, len(good)))]))


@given(st.text(max_size=80))
def test_any_text_is_a_document_or_malformed(text):
    with pytest.raises(Malformed):
        open_complete(moderation_bytes("swarmnet-moderation-1." + text), RUN)
