"""Dial-back, in memory: who may have what dialled, how often, and what strangers can do to who dials."""

import asyncio
from types import SimpleNamespace
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relayed import Stream

from peers.lab.world.virtual_time import run as run_virtual
from protocols.errors import Malformed, PeerGone
from protocols.reachability.dial_back import (
    PART_LIMIT,
    DialBackRequest,
    DialBackResponse,
    Greeting,
    encode,
    read_part,
    statement,
)
from protocols.reachability.dial_back_service import STREAMS, DialBackService, may_dial, observed_ip, place_of
from protocols.reachability.fresh_dial import ADDRESSES, DialOutcome, Outcome
from protocols.signed.identity import Identity
from swarmnet.membership.address_ranges import ip_of

HELPER, ASKER, OTHER = (Identity.from_seed(name) for name in (b"helper", b"asker", b"other"))
SEEN = "/ip4/8.8.4.4/tcp/40000"
HERE = "/ip4/8.8.4.4/tcp/31331"


class Helper:
    """A service that dials nobody: `reached` says who is where."""

    def __init__(self, able=True, names=None, reached=(HERE,), seconds=0.0):
        self.dialled, self.reached, self.seconds = [], reached, seconds
        self.names = names or {}
        self.service = DialBackService(
            peer=HELPER.peer_id, dials=self.dial, able=lambda: able, names=self.look_up
        )

    async def dial(self, peer, addresses):
        self.dialled.append((peer, tuple(addresses)))
        await asyncio.sleep(self.seconds)
        return tuple(
            DialOutcome(each, "reached" if each in self.reached else "silent", "", 0.1) for each in addresses
        )

    async def look_up(self, name):
        return self.names.get(name, ())

    async def asked(self, addresses, identity=ASKER, seen=SEEN, sign=None, signed_for=HELPER):
        """What it answers, and the address it says it saw. PeerGone if it ends the stream instead."""
        stream = Stream()
        info = SimpleNamespace(addr=seen)
        serving = asyncio.create_task(self.service.accept(info, stream.to_service, stream))
        try:
            greeting = await read_part(stream.to_asker, Greeting, 1.0)
            signer = sign or identity
            signed = statement(greeting.challenge, signed_for.peer_id, identity.peer_id, addresses)
            stream.to_service.feed_data(
                encode(DialBackRequest(identity.peer_id, tuple(addresses), signer.sign(signed)))
            )
            return await read_part(stream.to_asker, DialBackResponse, 60.0), greeting.observed
        finally:
            stream.to_service.feed_eof()
            await serving
            assert stream.ended


def outcomes(answer):
    return {each.address: each.outcome for each in answer.dialled}


def test_what_its_owner_signed_is_dialled_and_what_was_met_comes_back():
    helper = Helper()
    answer, observed = run_virtual(helper.asked([HERE, "/ip4/192.168.1.1/tcp/1", "/ip4/8.8.8.8/tcp/4001"]))
    assert observed == SEEN
    assert outcomes(answer) == {
        HERE: "reached", "/ip4/192.168.1.1/tcp/1": "not_tried", "/ip4/8.8.8.8/tcp/4001": "not_tried",
    }  # fmt: skip
    assert helper.dialled == [(ASKER.peer_id, (HERE,))]


@pytest.mark.parametrize("wrong", [{"sign": OTHER}, {"signed_for": OTHER}], ids=["not the owner", "a replay"])
def test_what_its_owner_did_not_sign_for_this_helper_is_not_dialled(wrong):
    helper = Helper()
    with pytest.raises(PeerGone):
        run_virtual(helper.asked([HERE], **wrong))
    assert helper.dialled == []


def test_nobody_gets_more_than_two_a_minute_and_all_together_four():
    async def ask_often():
        helper = Helper()

        async def code(seen):
            return (await helper.asked([HERE], seen=seen))[0].code

        told = [await code(SEEN) for _ in range(3)]
        told += [await code(f"/ip4/8.8.8.{number}/tcp/1") for number in range(3)]
        await asyncio.sleep(61)
        return told, await code(SEEN), len(helper.dialled)

    told, later, dialled = run_virtual(ask_often())
    assert told == ["done", "done", "busy", "done", "done", "busy"]
    assert (later, dialled) == ("done", 3)


def test_one_is_dialled_for_at_a_time():
    async def ask_together():
        helper = Helper(seconds=5.0)
        answers = await asyncio.gather(*(helper.asked([HERE], seen=f"/ip4/8.8.8.{n}/tcp/1") for n in (1, 2)))
        return sorted(answer.code for answer, _ in answers)

    assert run_virtual(ask_together()) == ["busy", "done"]


def test_a_helper_without_py_libp2p_says_so():
    answer, _ = run_virtual(Helper(able=False).asked([HERE]))
    assert (answer.code, answer.dialled) == ("unable", ())


def test_a_name_is_looked_up_here_and_its_address_obeys_the_rules():
    async def ask():
        names = {"home.example": ["192.168.1.1", "8.8.4.4"], "inside.example": ["192.168.1.1"]}
        helper = Helper(names=names)
        wanted = [f"/dns4/{name}/tcp/31331" for name in ("home.example", "inside.example", "nowhere.example")]
        return helper, *(await helper.asked(wanted))

    helper, answer, _ = run_virtual(ask())
    assert helper.dialled == [(ASKER.peer_id, (HERE,))]
    assert list(outcomes(answer).values()) == ["reached", "not_tried", "not_tried"]


def test_one_that_is_seen_through_a_relay_is_told_no_address():
    relayed = "/ip4/9.9.9.9/tcp/4001/p2p/12D3KooW/p2p-circuit"
    answer, observed = run_virtual(Helper().asked(["/ip4/10.0.0.1/tcp/1"], seen=relayed))
    assert observed == ""
    assert outcomes(answer) == {"/ip4/10.0.0.1/tcp/1": "not_tried"}


@pytest.mark.parametrize(
    ("ip", "asker", "allowed"),
    [
        ("8.8.4.4", "8.8.4.4", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("8.8.8.8", "8.8.4.4", False),
        ("8.8.8.8", None, False),
        ("192.168.1.7", "192.168.1.9", False),
        ("192.168.1.7", "8.8.8.8", False),
        ("192.168.1.7", "127.0.0.1", False),
        ("192.168.1.7", None, False),
        ("127.0.0.1", "192.168.1.9", False),
        ("169.254.1.1", "192.168.1.9", False),
        ("224.0.0.1", "8.8.8.8", False),
        ("0.0.0.0", "8.8.8.8", False),
        ("100.64.0.1", "192.168.1.9", False),
        ("::1", "8.8.8.8", False),
        ("::ffff:192.168.1.7", "8.8.8.8", False),
        ("2a01:4f8:1:2::1", "2a01:4f8:1:2:3:4:5:6", True),
        ("2a01:4f8:1:3::1", "2a01:4f8:1:2:3:4:5:6", False),
        ("64:ff9b::7f00:1", "8.8.8.8", False),
    ],
)
def test_only_the_askers_own_addresses_are_dialled(ip, asker, allowed):
    assert may_dial(ip_of(ip), ip_of(asker) if asker else None) is allowed


@pytest.mark.parametrize(
    "address",
    ["/ip4/1.2.3.4/udp/1/quic-v1", "/ip4/1.2.3.4/tcp/1/ws", "/ip4/1.2.3.4/tcp/0", "/ip4/1.2.3.4/tcp/65536",
     "/ip6/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/1/p2p/12D3/p2p-circuit", "/unix/tcp/1/1", "", "/"],
)  # fmt: skip
def test_only_a_tcp_port_of_an_ip_or_a_name_is_a_place(address):
    assert place_of(address) is None


@given(st.text(max_size=60))
def test_no_text_is_more_than_a_refused_address(text):
    place_of(text)
    observed_ip(text)


@given(st.binary(max_size=300))
def test_bytes_of_strangers_have_nothing_dialled_and_harm_nobody(data):
    async def send():
        helper, stream = Helper(), Stream()
        stream.to_service.feed_data(data)
        stream.to_service.feed_eof()
        await helper.service.accept(SimpleNamespace(addr=SEEN), stream.to_service, stream)
        return helper.dialled, stream.ended

    assert run_virtual(send()) == ([], True)


ANYTHING = st.one_of(st.none(), st.integers(), st.text(max_size=300), st.binary(max_size=70))


@given(st.lists(st.one_of(ANYTHING, st.lists(ANYTHING, max_size=12)), max_size=5))
def test_well_framed_nonsense_has_nothing_dialled_either(fields):
    async def send():
        helper, stream = Helper(), Stream()
        try:
            data = msgspec.msgpack.encode(fields)
        except OverflowError:  # A number that MessagePack has no room for.
            data = b""
        stream.to_service.feed_data(len(data).to_bytes(2, "big") + data)
        stream.to_service.feed_eof()
        await helper.service.accept(SimpleNamespace(addr=SEEN), stream.to_service, stream)
        return helper.dialled

    assert run_virtual(send()) == []


@given(st.text(max_size=64), st.binary(min_size=64, max_size=64))
def test_an_ask_in_a_name_that_is_no_key_is_ended(name, signature):
    async def send():
        helper, stream = Helper(), Stream()
        stream.to_service.feed_data(encode(DialBackRequest(name, (HERE,), signature)))
        stream.to_service.feed_eof()
        await helper.service.accept(SimpleNamespace(addr=SEEN), stream.to_service, stream)
        return helper.dialled

    assert run_virtual(send()) == []


def test_text_that_is_no_utf_8_is_malformed_like_all_else_that_is():
    async def whole():
        reader = asyncio.StreamReader()
        array = b"\x92\xc4\x10" + bytes(16) + b"\xa2\xff\xfe"
        reader.feed_data(len(array).to_bytes(2, "big") + array)
        with pytest.raises(Malformed, match="no greeting"):
            await read_part(reader, Greeting, 1.0)

    asyncio.run(whole())


def test_a_part_that_is_too_long_is_refused_before_it_is_read():
    async def send():
        reader = asyncio.StreamReader()
        reader.feed_data(b"\xff\xff")
        await read_part(reader, DialBackRequest, 1.0)

    with pytest.raises(Malformed, match="at most"):
        run_virtual(send())


def test_more_addresses_than_allowed_are_malformed():
    addresses = tuple(f"/ip4/8.8.8.8/tcp/{port}" for port in range(1, ADDRESSES + 2))
    with pytest.raises(PeerGone):
        run_virtual(Helper().asked(addresses))


def test_silent_strangers_are_bounded_and_cut_off():
    async def flood():
        helper = Helper()
        streams = [Stream() for _ in range(STREAMS + 3)]
        info = SimpleNamespace(addr=SEEN)
        accept = helper.service.accept
        serving = [asyncio.create_task(accept(info, each.to_service, each)) for each in streams]
        await asyncio.sleep(1)
        refused = sum(each.ended for each in streams)
        await asyncio.sleep(30)
        await asyncio.gather(*serving)
        return refused, all(each.ended for each in streams), (await helper.asked([HERE]))[0].code

    assert run_virtual(flood()) == (3, True, "done")


def test_closing_gives_up_what_is_being_dialled():
    async def close():
        helper = Helper(seconds=1e6)
        asking = asyncio.create_task(helper.asked([HERE]))
        await asyncio.sleep(1)
        await helper.service.close()
        with pytest.raises(PeerGone):
            await asking
        return asyncio.get_running_loop().time()

    assert run_virtual(close()) < 60


def test_every_outcome_fits_into_an_answer():
    details = [DialOutcome("/" + "x" * 199, outcome, "d" * 300, 5.0) for outcome in sorted(get_args(Outcome))]
    assert len(encode(DialBackResponse("done", tuple(details[:ADDRESSES])))) < PART_LIMIT
