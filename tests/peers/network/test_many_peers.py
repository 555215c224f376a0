"""Records and links of many peers, as an attacker can make them: each costs a peer little."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from peers.lab.world.virtual_time import run
from peers.network import peer_links
from peers.network.peer_links import PeerLinks
from protocols.errors import NoPlace
from protocols.memory.transport import MemoryNetwork
from protocols.messages.table import HEADER_LIMIT, Hello, PeerRecord, PeerRecords, encode
from protocols.signed.envelope import run_bytes
from protocols.signed.identity import Identity
from protocols.signed.records import SignedRecord, open_record, seal_record
from swarmnet.identifiers import PeerId, RunId
from swarmnet.membership.guests import MAX_OF_RANGE
from swarmnet.membership.membership import FORGOTTEN_AT_ONCE, MAX_PEERS, Membership
from swarmnet.run.schema import WIRE_VERSION

RUN = RunId("ab" * 32)
LONGEST_ADDRESSES = ["/dns/" + "x" * 200] * 15


class Nobody:
    """`Listener` without roles."""

    def met(self) -> tuple[PeerId, ...]:
        return ()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def play(story: Callable[[PeerLinks], Awaitable[None]]) -> None:
    """Run `story` with the links of a peer of stage 0, which has not announced itself and dials nobody."""

    async def main() -> None:
        me = PeerId("me")
        links = PeerLinks(
            transport=MemoryNetwork(Random(1)).transport(me),
            run_id=RUN,
            membership=Membership(me=me, stage=0, chance=Random(1)),
            listener=Nobody(),
            signed_manifest=b"",
            log_event=lambda event: None,
        )
        await story(links)
        await links.close("done")

    run(main())


def sealed(name: str, addresses: list[str]) -> tuple[PeerId, bytes]:
    identity = Identity.from_seed(name.encode())
    record = PeerRecord(identity.peer_id, 0, "worker", addresses, 0, 0.0, "")
    return identity.peer_id, seal_record(identity, RUN, record, 0.0)


def test_found_records_are_verified_once_and_a_full_peer_learns_some_of_many_strangers(monkeypatch):
    verified = []

    def count_and_open(data: bytes, run_id: RunId) -> SignedRecord:
        verified.append(data)
        return open_record(data, run_id)

    async def story(links: PeerLinks) -> None:
        monkeypatch.setattr(peer_links, "open_record", count_and_open)
        known = dict(sealed(f"key {number}", []) for number in range(MAX_PEERS))
        for _ in range(2):
            links.learn_found(known)
            assert len(verified) == len(links.membership.peers) == MAX_PEERS
        strangers = dict(sealed(f"stranger {number}", []) for number in range(2 * FORGOTTEN_AT_ONCE))
        links.learn_found(known | strangers)
        assert len(verified) == MAX_PEERS + FORGOTTEN_AT_ONCE

    play(story)


def test_records_that_do_not_fit_in_one_message_are_sent_in_several_and_once(monkeypatch):
    async def story(links: PeerLinks) -> None:
        sent: list[PeerRecords] = []
        monkeypatch.setattr(links, "post", lambda peer, lane, message: sent.append(message))
        contributors = []
        for number in range(40):
            peer, record = sealed(f"key {number}", LONGEST_ADDRESSES)
            links.learn(record)
            contributors.append(peer)
        for _ in range(2):
            links.introduce(contributors, [PeerId("neighbour"), contributors[0]])
        assert all(len(encode(message)) <= HEADER_LIMIT for message in sent)
        assert sum(len(message.records) for message in sent) == 40 + 39, "none gets its own"

    play(story)


def test_the_link_of_a_peer_that_gets_none_in_return_ends_at_once():
    async def story(links: PeerLinks) -> None:
        def greet(number: int) -> PeerId:
            peer, record = sealed(f"key {number}", [f"/ip4/8.8.8.8/tcp/{number + 1}"])
            links.received(peer, "group", Hello(WIRE_VERSION, run_bytes(RUN), record), b"", 0)
            return peer

        neighbours = [greet(number) for number in range(12)]  # A larger group is not fully linked.
        for peer in neighbours:
            links.membership.linked(peer, 0.0)
        refused = 0
        for number in range(100, 200):
            try:
                greet(number)
            except NoPlace:
                refused += 1
        assert refused >= 100 - MAX_OF_RANGE - len(links.membership.wanted())
        with pytest.raises(NoPlace):
            links.received(PeerId(greeted_without_place(links)), "group", PeerRecords([]), b"", 0)
        links.received(neighbours[0], "group", PeerRecords([]), b"", 0)

    play(story)


def greeted_without_place(links: PeerLinks) -> PeerId:
    return next(peer for peer in links.greeted if links.membership.finds_no_place(peer))
