"""What the directory answers: a budget of bytes for each asker, a part of what is too long, and turns."""

from __future__ import annotations

import asyncio
import time
from random import Random
from types import SimpleNamespace

import pytest

from protocols.daemon.hivemind_imports import DictionaryDHTValue, MSGPackSerializer, PeerID, dht_pb2
from protocols.dht.answers import ANSWER_LIMIT, STRANGERS_ANSWER_LIMIT, Answers, Requester
from protocols.dht.stored_values import (
    DICTIONARY,
    PEERS_PER_KEY,
    key_id,
    part_of_dictionary,
    split_values,
    stored_value,
)
from protocols.dht.validator import ValidatedP2P
from protocols.messages.table import PeerRecord
from protocols.signed.identity import Identity
from protocols.signed.records import RECORD_LIMIT, seal_record, stage_key
from swarmnet.resources.allowances import ANSWER_BYTES_AT_ONCE, ANSWER_BYTES_PER_SECOND

RUN = "ab" * 32
KEY = key_id(stage_key(RUN, 0))
STRANGER = PeerID.from_base58(Identity.from_seed(b"stranger").peer_id)
SECONDS = 15


def honest_record(number: int, invite: bytes = b"") -> tuple[str, bytes]:
    """Peer id and stored value of a worker that says all that workers say: 394 bytes, 627 with a bearer's
    invite."""
    identity = Identity.from_seed(b"peer %d" % number)
    addresses = [f"/ip4/{ip}/tcp/{31000 + number}" for ip in (f"203.0.113.{number % 256}", "192.168.1.7")]
    record = PeerRecord(
        identity.peer_id, 0, "worker", addresses, 4, 1234.5, "0.1.0", name="a-volunteer", state="training",
        loss=3.2, tokens=10**9, settled=100_000, sent_bytes=10**11, received_bytes=10**11, invite=invite,
        finalized_tokens=10**10, device="cuda", up_bytes_per_second=10**7,
        down_bytes_per_second=10**8,
    )  # fmt: skip
    sealed = seal_record(identity, RUN, record, time.time())
    return identity.peer_id, stored_value(bytes.fromhex(RUN) + sealed)


def packed(records: list[tuple[str, bytes]]) -> bytes:
    dictionary = DictionaryDHTValue()
    for peer, value in records:
        dictionary.store(peer, value, time.time() + 60)
    return bytes(MSGPackSerializer.dumps(dictionary))


class Node:
    """A gate whose storage holds one dictionary under any key that it is asked for."""

    def __init__(self, value: bytes) -> None:
        self.gate = ValidatedP2P(self, lambda peer, reason: None)
        self.gate.answers = Answers(lambda key: len(value))
        self.value, self.built = value, 0

    ending = None

    async def connections(self, deadline_seconds):
        return [(str(STRANGER), "/ip4/198.51.100.7/tcp/9")]

    async def hivemind(self, request, context):
        response = dht_pb2.FindResponse()
        for _ in request.keys:
            self.built += len(self.value)
            response.results.add(
                type=dht_pb2.FOUND_DICTIONARY, value=self.value, expiration_time=time.time() + 60
            )
        return response

    async def find(self, *keys: bytes):
        class Context:
            remote_id = STRANGER

        return await self.gate._serve_find(self.hivemind, dht_pb2.FindRequest(keys=keys), Context())


def found(result) -> list[str]:
    return list(MSGPackSerializer.loads(result.value).data) if result.value else []


@pytest.mark.parametrize(("invite", "near"), [(b"", False), (bytes(233), True)])
async def test_one_answer_has_all_records_of_400_peers_in_one_stage(invite, near):
    records = [honest_record(number, invite) for number in range(400)]
    node = Node(packed(records))
    node.gate.neighbours = lambda: [STRANGER] if near else []
    response = await node.find(KEY)
    assert set(found(response.results[0])) == {peer for peer, _ in records}


@pytest.mark.parametrize("near", [False, True], ids=["stranger", "neighbour"])
async def test_who_asks_without_end_is_answered_within_its_budget(near, monkeypatch):
    node, now, sent = Node(packed([("x" * 52, bytes(RECORD_LIMIT))])), 0.0, 0
    node.gate.neighbours = lambda: [STRANGER] if near else []
    monkeypatch.setattr("protocols.dht.answers._now", lambda: now)
    keys = [number.to_bytes(20, "big") for number in range(880)]
    for _ in range(20 * SECONDS):
        now += 0.05
        response = await node.find(*keys)
        assert len(response.results) == len(keys)
        sent += response.ByteSize() if response.results[0].value else 0
    assert sent <= ANSWER_BYTES_AT_ONCE + ANSWER_BYTES_PER_SECOND * SECONDS + ANSWER_LIMIT
    assert node.built <= 2 * sent, "what is not sent is hardly built"
    asks = dht_pb2.FindRequest(keys=keys).ByteSize()
    assert (await node.find(*keys)).ByteSize() < asks, "beyond its budget it is sent less than it sends"


async def test_of_a_dictionary_that_is_too_long_every_record_comes_in_time():
    records = [(f"{number:052}", bytes(RECORD_LIMIT)) for number in range(PEERS_PER_KEY)]
    node, seen = Node(packed(records)), set()
    for _ in range(10):
        response = await node.find(KEY)
        assert response.ByteSize() <= STRANGERS_ANSWER_LIMIT
        seen |= set(found(response.results[0]))
    assert len(seen) > 5 * STRANGERS_ANSWER_LIMIT // RECORD_LIMIT


async def test_answers_take_their_turns_in_pieces_and_one_that_is_late_is_not_sent(monkeypatch):
    pieces = []

    async def turn(size, priority):
        pieces.append(size)

    node, upload = Node(packed([honest_record(number) for number in range(300)])), SimpleNamespace(turn=turn)
    upload.bytes_per_second = 125_000.0
    node.gate.answers.limit_upload(upload)
    response = await node.find(KEY)
    assert sum(pieces) == response.ByteSize() <= 125_000, "no more than the line carries in a second"
    assert len(pieces) == 2
    upload.turn = lambda size, priority: asyncio.sleep(60)
    monkeypatch.setattr("protocols.dht.answers.ANSWER_SECONDS", 0.5)
    assert not found((await node.find(KEY)).results[0])


async def test_one_asker_takes_a_quarter_of_an_upload_limit(monkeypatch):
    node, now, sent = Node(packed([("x" * 52, bytes(RECORD_LIMIT))])), 0.0, 0
    monkeypatch.setattr("protocols.dht.answers._now", lambda: now)
    upload = SimpleNamespace(turn=lambda size, priority: asyncio.sleep(0), bytes_per_second=125_000.0)
    node.gate.answers.limit_upload(upload)
    for _ in range(20 * SECONDS):
        now += 0.05
        sent += (await node.find(*(number.to_bytes(20, "big") for number in range(880)))).ByteSize()
    at_once = ANSWER_BYTES_AT_ONCE * 31_250 / ANSWER_BYTES_PER_SECOND
    assert sent <= at_once + 31_250 * SECONDS + 125_000 + 20 * SECONDS * 880 * 4


async def test_what_is_handed_to_each_key_that_a_stranger_makes_is_within_the_budget_of_its_network():
    request = dht_pb2.StoreRequest(
        keys=[KEY], subkeys=[DICTIONARY], values=[bytes(3_000_000)], expiration_time=[1.0], in_cache=[False]
    )
    answers, handed = Answers(lambda key: 0), 0
    for number in range(20):
        asker = Requester(Identity.from_seed(b"fresh %d" % number).peer_id, "198.51.100.0/24", True)
        handed += (await answers.hand_over(request, asker)).ByteSize()
    assert 0 < handed < ANSWER_BYTES_AT_ONCE


def test_a_part_of_a_dictionary_is_one():
    whole = packed([honest_record(number) for number in range(20)])
    part = part_of_dictionary(whole, 5000, Random(0))
    assert 2500 < len(part) <= 5000
    assert {item.tag for item in split_values(0, KEY, DICTIONARY, part, 0.0)} < {
        item.tag for item in split_values(0, KEY, DICTIONARY, whole, 0.0)
    }
