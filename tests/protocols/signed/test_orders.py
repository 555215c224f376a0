"""Orders: what the owner changes, how that is signed, and what of strangers is refused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm import OWNER, sign, tiny_manifest

from peers.config.errors import UserError
from peers.network.orders.order_book import OrderBook
from peers.tools.owner.give_order import give, newest
from protocols.dht.stored_values import key_id, stored_value, verify_value
from protocols.errors import BadSignature, Malformed, TooLarge, WireError, WrongRun
from protocols.messages.membership_messages import OrderUpdate
from protocols.messages.table import decode, encode
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.identity import Identity
from protocols.signed.orders import open_order, seal_order
from protocols.signed.stored_orders import is_stored_order, open_stored_order, order_key, stored_order
from swarmnet.identifiers import PeerId, RunId
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import NO_ORDER, OrderError, OwnerOrders

SIGNED = sign(tiny_manifest())
RUN = SIGNED.run_id
STRANGER = Identity.from_seed(b"stranger")
PEER = STRANGER.peer_id
DIGEST = "ab" * 32


def numbered(order: OwnerOrders, sequence: int) -> OwnerOrders:
    return replace(order, sequence=sequence)


def everything() -> OwnerOrders:
    order = owner_orders.pause(NO_ORDER, "the text was wrong")
    order = owner_orders.ban(order, PEER, "sent nonsense")
    order = owner_orders.withdraw(order, DIGEST, "its author asked")
    order = owner_orders.revoke(order, "cd" * 16, "handed on")
    return numbered(owner_orders.checkpoint(order, ""), 1_000_000)


def test_an_order_is_complete_and_says_what_it_changes():
    order = everything()
    assert order.paused
    assert order.banned(PEER).reason == "sent nonsense"
    assert order.documents() == {bytes.fromhex(DIGEST)}
    assert len(owner_orders.describe_changes(NO_ORDER, order)) == 5
    calm = owner_orders.unban(owner_orders.resume(order, ""), PEER, "a mistake")
    assert calm.banned(PEER) is None
    assert owner_orders.describe_changes(order, calm) == ["the run goes on", f"{PEER} is no longer banned"]
    assert owner_orders.describe_changes(order, order) == ["nothing changes"]


def test_a_roll_back_is_a_ban_that_also_empties_open_rounds_and_is_lifted_with_it():
    banned = owner_orders.ban(NO_ORDER, PEER, "sent nonsense")
    order = numbered(owner_orders.roll_back(banned, PEER, "noise"), 7)
    assert order.rolled_back() == {PEER}
    assert not banned.rolled_back()
    assert owner_orders.describe_changes(banned, order) == [
        f"{PEER} is banned and taken out of open rounds: noise"
    ]
    assert seal_order(OWNER, RUN, order).order == order
    with pytest.raises(OrderError, match="rolled back already"):
        owner_orders.roll_back(order, PEER, "noise")
    assert not owner_orders.unban(order, PEER, "").rolled_back()


def test_a_roll_back_without_its_ban_is_refused():
    document = ["order", "", False, 0, [], [], [], None, [], None, [], False, [PEER]]
    data = seal(OWNER, RUN, EnvelopeKind.ORDER, -1, 0, 7, msgspec.msgpack.encode(document))
    with pytest.raises(Malformed, match="without banning it"):
        open_order(data, RUN)


@pytest.mark.parametrize(
    "change",
    [
        lambda held: owner_orders.pause(held, ""),
        lambda held: owner_orders.ban(held, PEER, ""),
        lambda held: owner_orders.withdraw(held, DIGEST, ""),
        lambda held: owner_orders.withdraw(held, "my file", ""),
        lambda held: owner_orders.revoke(held, "cd" * 16, ""),
        lambda held: owner_orders.revoke(held, "x", ""),
        lambda held: owner_orders.unban(held, OWNER.peer_id, ""),
        lambda held: owner_orders.resume(NO_ORDER, ""),
        lambda held: owner_orders.checkpoint(held, "x" * 201),
        lambda held: owner_orders.checkpoint(held, "two\nlines"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_where_it_is_typed(change):
    with pytest.raises(OrderError):
        change(everything())


def test_the_sequence_grows_though_the_clock_goes_back():
    assert owner_orders.next_sequence(NO_ORDER, 10.0) == 10_000_000
    assert owner_orders.next_sequence(OwnerOrders(sequence=99_000_000), 10.0) == 99_000_001


def test_a_signed_order_comes_back_as_it_was():
    order = everything()
    signed = seal_order(OWNER, RUN, order)
    assert open_order(signed.data, RUN, OWNER.peer_id).order == order


@pytest.mark.parametrize("chains", [[], [None]], ids=["left out", "nil"])
def test_an_order_of_before_without_chains_is_still_read(chains):
    document = ["order", "", True, 0, [], [], [], *chains]
    data = seal(OWNER, RUN, EnvelopeKind.ORDER, -1, 0, 5, msgspec.msgpack.encode(document))
    assert open_order(data, RUN, OWNER.peer_id).order == OwnerOrders(5, paused=True)


def test_an_order_of_before_with_chains_is_refused_and_says_what_to_do(tmp_path):
    document = ["order", "", True, 0, [], [], [], [1600.0, [["a", "c", "e"]]]]
    data = seal(OWNER, RUN, EnvelopeKind.ORDER, -1, 0, 5, msgspec.msgpack.encode(document))
    with pytest.raises(Malformed, match="chains are no longer spoken; the owner has to give the order again"):
        open_order(data, RUN, OWNER.peer_id)
    (tmp_path / "order.bin").write_bytes(data)
    said: list[str] = []
    book = OrderBook(
        signed=SIGNED,
        kept=tmp_path / "order.bin",
        log_event=lambda *_, **__: None,
        notify=lambda _, line: said.append(line),
    )
    assert book.order == NO_ORDER
    assert len(said) == 1
    assert "order.bin" in said[0]
    assert "give the order again" in said[0]


def test_only_the_owner_gives_orders_and_only_for_the_run():
    forged = seal_order(STRANGER, RUN, everything())
    with pytest.raises(BadSignature, match="not signed by the run's owner"):
        open_order(forged.data, RUN, OWNER.peer_id)
    with pytest.raises(WrongRun):
        open_order(seal_order(OWNER, RunId("12" * 32), everything()).data, RUN, OWNER.peer_id)
    record = seal(OWNER, RUN, EnvelopeKind.RECORD, -1, 0, 1, forged.data[120:])
    with pytest.raises(WireError):
        open_order(record, RUN, OWNER.peer_id)


def test_an_order_that_nobody_would_take_is_not_made():
    order = NO_ORDER
    for number in range(600):
        order = owner_orders.withdraw(order, f"{number:064x}", "")
    with pytest.raises(TooLarge):
        seal_order(OWNER, RUN, numbered(order, 1))


@given(st.data())
def test_no_flipped_bit_of_an_order_is_accepted(data):
    signed = bytearray(seal_order(OWNER, RUN, everything()).data)
    signed[data.draw(st.integers(0, len(signed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError):
        open_order(bytes(signed), RUN, OWNER.peer_id)


@given(st.binary(max_size=400))
def test_what_the_owner_never_signed_is_refused_without_a_crash(data):
    with pytest.raises(WireError):
        open_order(data, RUN, OWNER.peer_id)
    with pytest.raises(WireError):
        open_order(seal(OWNER, RUN, EnvelopeKind.ORDER, -1, 0, 5, data), RUN, OWNER.peer_id)


def test_in_the_directory_an_order_proves_whose_place_it_fills():
    mine, forged = seal_order(OWNER, RUN, everything()), seal_order(STRANGER, RUN, everything())
    for signed in (mine, forged):
        content = stored_order(RUN, signed.data)
        assert is_stored_order(content)
        assert open_stored_order(content)[0] == RUN
        proof = verify_value(stored_value(content), plain=True)
        assert (proof.key, proof.subkey) == (key_id(order_key(RUN, signed.owner)), None)
        assert (proof.sequence, proof.issued_seconds) == (1_000_000, 1.0)
    assert order_key(RUN, OWNER.peer_id) != order_key(RUN, PeerId(STRANGER.peer_id))
    assert not is_stored_order(SIGNED.wire())


def test_the_newest_order_counts_and_survives_a_restart(tmp_path):
    notes = []

    def book():
        return OrderBook(
            signed=SIGNED,
            kept=tmp_path / "order.bin",
            log_event=lambda event: notes.append(event.name),
            notify=lambda *_: None,
        )

    heard = []
    first = book()
    first.heard.append(lambda before, now: heard.append((before.sequence, now.sequence)))
    old, new = (seal_order(OWNER, RUN, numbered(OwnerOrders(paused=True), n)) for n in (5, 6))
    assert first.take(new.data)
    assert not first.take(new.data)
    assert not first.take(old.data), "a replay of an older one"
    assert heard == [(0, 6)]
    assert book().order.sequence == 6
    (tmp_path / "order.bin").write_bytes(b"x" * 200)
    assert book().order == NO_ORDER
    assert notes[-1] == "order_unusable"


def test_of_two_orders_at_once_everybody_takes_the_same():
    one, two = (seal_order(OWNER, RUN, numbered(OwnerOrders(reason=why), 7)) for why in ("a", "b"))
    books = [
        OrderBook(signed=SIGNED, kept=None, log_event=lambda *_, **__: None, notify=lambda *_: None)
        for _ in range(2)
    ]
    for book, both in zip(books, ((one, two), (two, one)), strict=True):
        for signed in both:
            book.take(signed.data)
    assert books[0].held == books[1].held


@dataclass
class Directory:
    """What `give` asks of one."""

    there: bool = True
    """Whether a node takes what is to be stored."""
    held: list = field(default_factory=list)

    def now(self):
        return 10.0

    async def get_order(self, *_):
        return self.held[-1] if self.held else None

    async def put_order(self, run, order, _):
        if self.there:
            self.held.append(open_order(order, run, OWNER.peer_id))
        return self.there

    async def look_up(self, *_):
        return {}


@pytest.fixture
def ordering(tmp_path):
    """Gives an order as one call of the command does."""

    async def order(directory, change):
        found = SimpleNamespace(signed=SIGNED, directory=directory, transport=None)
        return await give(found, OWNER, await newest(found, tmp_path / "order.bin", lambda *_: None), change)

    return order


@pytest.mark.parametrize(
    "change",
    [
        lambda held: owner_orders.pause(held, "why"),
        lambda held: owner_orders.ban(held, PEER, "why"),
        lambda held: owner_orders.withdraw(held, DIGEST, "why"),
        lambda held: owner_orders.revoke(held, "cd" * 16, "why"),
    ],
)
async def test_an_order_that_reached_nobody_is_sent_when_it_is_given_again(ordering, change):
    directory = Directory(there=False)
    first = await ordering(directory, change)
    assert (first.stored, first.told) == (False, 0)
    directory.there = True
    again = await ordering(directory, change)
    assert again.stored
    assert again.order == first.order == directory.held[-1]
    assert len(owner_orders.describe_changes(again.before, again.order.order)) == 1, (
        "it is said what it changes for the others"
    )
    with pytest.raises(UserError, match="already"):
        await ordering(directory, change)


async def test_the_order_after_one_that_reached_nobody_says_both(ordering):
    directory = Directory(there=False)
    await ordering(directory, lambda held: owner_orders.ban(held, PEER, ""))
    directory.there = True
    given = await ordering(directory, lambda held: owner_orders.pause(held, ""))
    assert owner_orders.describe_changes(given.before, directory.held[-1].order) == [
        "the run is paused",
        f"{PEER} is banned: ",
    ]


async def test_a_mistake_is_none_the_less_one_where_an_order_was_only_kept(ordering):
    directory = Directory(there=False)
    await ordering(directory, lambda held: owner_orders.ban(held, PEER, ""))
    with pytest.raises(UserError, match="is not banned"):
        await ordering(directory, lambda held: owner_orders.unban(held, OWNER.peer_id, ""))
    with pytest.raises(UserError, match="one line of at most"):
        await ordering(directory, lambda held: owner_orders.ban(held, OWNER.peer_id, "two\nlines"))


def test_the_message_is_bounded_before_it_is_decoded():
    with pytest.raises(Malformed):
        decode(encode(OrderUpdate(bytes(16 * 1024 + 1))))


def test_a_return_is_signed_with_the_snapshot_of_each_stage_and_the_next_one_is_another():
    points = tuple((7 + stage, f"{stage:02x}" * 32) for stage in range(3))
    order = numbered(owner_orders.return_to(NO_ORDER, points, "a bug"), 7)
    data = seal_order(OWNER, RUN, order).data
    assert open_order(data, RUN).order == order
    again = owner_orders.return_to(order, points, "again")
    assert again.returned.number == 2
    assert again.lineage(0).era != order.lineage(0).era
    assert owner_orders.describe_changes(NO_ORDER, order) == [
        "the run returns to snapshots: stage 0 to round 7, stage 1 to round 8, stage 2 to round 9"
    ]
    banned = owner_orders.ban(order, PEER, "noise")
    assert banned.returned == order.returned


@pytest.mark.parametrize("point", [[7, "00" * 31], [-1, "00" * 32], [7, "0G" * 32], [7]])
def test_a_return_to_no_snapshot_is_refused(point):
    document = ["order", "", False, 0, [], [], [], None, [], None, [], False, [], [1, [point] * 3]]
    data = seal(OWNER, RUN, EnvelopeKind.ORDER, -1, 0, 7, msgspec.msgpack.encode(document))
    with pytest.raises(Malformed):
        open_order(data, RUN)


@pytest.mark.parametrize(("stages", "private"), [(3, True), (2, False)])
def test_no_peer_follows_a_return_in_a_private_run_or_of_other_stages(stages, private):
    data = replace(SIGNED.manifest.data, private=private)
    signed = replace(SIGNED, manifest=replace(SIGNED.manifest, data=data))
    book = OrderBook(signed=signed, kept=None, log_event=lambda *_, **__: None, notify=lambda *_: None)
    order = owner_orders.return_to(NO_ORDER, ((7, "00" * 32),) * stages, "")
    assert not book.take(seal_order(OWNER, RUN, numbered(order, 7)).data)
    assert book.order == NO_ORDER
