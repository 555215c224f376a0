"""A peer dials those it learns of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from clocks import on_virtual_clock

from peers.lab.world.virtual_time import run
from peers.network.handshakes import MAX_GREETED
from peers.network.peer_links import PeerLinks
from peers.network.ports import HeartbeatLoad
from protocols.memory.transport import Conditions, MemoryNetwork
from protocols.messages.table import Busy, Bye, Hello, PeerRecord
from protocols.signed.envelope import run_bytes
from protocols.signed.identity import Identity
from protocols.signed.records import seal_record
from swarmnet.identifiers import PeerId, RunId
from swarmnet.membership.membership import Membership
from swarmnet.run.schema import WIRE_VERSION

RUN = RunId("ab" * 32)


class Nobody:
    """`Listener` without roles."""

    def met(self) -> tuple[PeerId, ...]:
        return ()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def test_who_leaves_before_it_is_dialled_is_not_dialled():
    async def main() -> list[Any]:
        failed: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        me, other = Identity.from_seed(b"me"), Identity.from_seed(b"other")
        noted: list[str] = []
        around = PeerLinks(
            transport=MemoryNetwork(Random(1)).transport(me.peer_id),
            run_id=RUN,
            membership=Membership(me=me.peer_id, stage=0, chance=Random(1)),
            listener=Nobody(),
            signed_manifest=b"",
            log_event=lambda event: noted.append(event.name),
        )
        around.record = b"mine"
        claimed = PeerRecord(other.peer_id, 0, "worker", ["/x"], 0, 0.0, "", name="Ada")
        record = seal_record(other, RUN, claimed, 0.0)
        around.received(other.peer_id, "group", Hello(WIRE_VERSION, run_bytes(RUN), record), b"", 0)
        assert around.membership.peers[other.peer_id].dialing
        assert around.membership.peers[other.peer_id].name == "Ada", "as `swarmnet top` shows it"
        around.received(other.peer_id, "group", Bye("leaving"), b"", 0)
        await asyncio.sleep(1.0)
        await around.close("done")
        assert "dial_failed" not in noted
        return failed

    assert run(main()) == []


def test_however_many_greet_a_bounded_number_is_remembered_and_the_linked_stay():
    async def main() -> tuple[int, bool]:
        me, friend = PeerId("me"), Identity.from_seed(b"friend")
        transport, membership = (
            MemoryNetwork(Random(1)).transport(me),
            Membership(me=me, stage=0, chance=Random(1)),
        )
        around = PeerLinks(
            transport=transport,
            run_id=RUN,
            membership=membership,
            listener=Nobody(),
            signed_manifest=b"",
            log_event=lambda event: None,
        )
        record = PeerRecord(friend.peer_id, 0, "worker", ["/x"], 0, 0.0, "")
        hello = Hello(WIRE_VERSION, run_bytes(RUN), seal_record(friend, RUN, record, 0.0))
        around.received(friend.peer_id, "group", hello, b"", 0)
        membership.linked(friend.peer_id, 0.0)
        for number in range(MAX_GREETED + 500):
            hello = Hello(WIRE_VERSION, run_bytes(RUN), b"")
            around.received(PeerId(f"visitor {number}"), "group", hello, b"", 0)
        await around.close("done")
        return len(around.greeted), friend.peer_id in around.greeted

    assert run(main()) == (MAX_GREETED, True)


class Noticing(Nobody):
    """Knows in which stages the neighbour was linked, and when not."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.seen: list[int | str] = []
        self.then: Callable[[], None] = lambda: None
        """What happens when the neighbour is linked."""

    def load(self) -> HeartbeatLoad:
        return HeartbeatLoad(self.stage, True, 1, 0.1, 0)

    def linked(self, peer: PeerId, stage: int) -> None:
        self.seen.append(stage)
        self.then()

    def unlinked(self, peer: PeerId, reason: str, released: bool) -> None:
        assert not released
        self.seen.append("unlinked")


class Pair:
    """Two peers, the other one in stage 1; this one in stage 0, and knows nothing yet."""

    def __init__(self) -> None:
        network = MemoryNetwork(Random(1), Conditions(latency_seconds=0.05))
        self.identity = Identity.from_seed(b"other")
        self.notices = Noticing(0)
        self.me = self.around(network, Identity.from_seed(b"me"), self.notices)
        self.other = self.around(network, self.identity, Noticing(1))

    def around(self, network: MemoryNetwork, identity: Identity, listener: Noticing) -> PeerLinks:
        peer, membership = (
            identity.peer_id,
            Membership(me=identity.peer_id, stage=listener.stage, chance=Random(1)),
        )
        transport = network.transport(peer)
        around = PeerLinks(
            transport=transport,
            run_id=RUN,
            membership=membership,
            listener=listener,
            signed_manifest=b"",
            log_event=lambda _: None,
        )
        around.record = self.record(listener.stage, 100.0, identity)
        around.start()
        return around

    def record(self, stage: int, signed_at: float, identity: Identity | None = None) -> bytes:
        identity = identity or self.identity
        record = PeerRecord(identity.peer_id, stage, "worker", ["/x"], 0, 0.0, "")
        return seal_record(identity, RUN, record, signed_at)

    def works(self) -> bool:
        """Whether microbatches can be sent to it."""
        peer = self.identity.peer_id
        return self.me.membership.live(1) == [peer] and self.me.post(peer, "data", Busy("", 0, 1))

    async def close(self) -> None:
        await self.me.close("done")
        await self.other.close("done")


@on_virtual_clock
async def test_whom_the_directory_still_knows_in_another_stage_is_linked_with_the_lanes_of_its_own():
    pair = Pair()
    pair.me.learn(pair.record(0, 50.0))
    await asyncio.sleep(0.02)
    pair.me.learn(pair.other.record)  # From another neighbour, while the dial is under way.
    await asyncio.sleep(2.0)
    assert pair.works()
    assert pair.notices.seen == [1]
    await pair.close()


@pytest.mark.parametrize("signed_at", [50.0, 300.0], ids=["long ago", "by a clock that was ahead"])
@on_virtual_clock
async def test_who_greets_from_another_stage_than_it_was_linked_in_is_linked_anew(signed_at):
    pair = Pair()
    pair.other.record = pair.record(0, signed_at)
    pair.notices.then = lambda: setattr(pair.other, "record", pair.record(1, 100.0))
    pair.me.learn(pair.other.record)
    await asyncio.sleep(10.0)
    assert pair.works()
    assert pair.notices.seen == [0, "unlinked", 1]
    await pair.close()
