"""A peer dials those it learns of."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from peers.neighbourhood import Neighbourhood
from peers.virtual_time import run
from protocols.envelope import run_bytes
from protocols.identity import Identity
from protocols.memory import MemoryNetwork
from protocols.messages import Bye, Hello, PeerRecord
from protocols.records import seal_record
from swarmnet.identifiers import RunId
from swarmnet.manifest import WIRE_VERSION
from swarmnet.membership import Membership

RUN = RunId("ab" * 32)


class Nobody:
    """`Listener` without roles."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def test_who_leaves_before_it_is_dialled_is_not_dialled():
    async def main() -> list[Any]:
        failed: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        me, other = Identity.from_seed(b"me"), Identity.from_seed(b"other")
        noted: list[str] = []
        around = Neighbourhood(
            MemoryNetwork(Random(1)).transport(me.peer_id), RUN, Membership(me.peer_id, 0, Random(1)),
            Nobody(), b"", lambda event, **fields: noted.append(event),
        )  # fmt: skip
        around.record = b"mine"
        record = seal_record(other, RUN, PeerRecord(other.peer_id, 0, "worker", ["/x"], 0, 0.0, ""), 0.0)
        around.received(other.peer_id, "group", Hello(WIRE_VERSION, run_bytes(RUN), record), b"", 0)
        assert around.membership.peers[other.peer_id].dialing
        around.received(other.peer_id, "group", Bye("leaving"), b"", 0)
        await asyncio.sleep(1.0)
        await around.close("done")
        assert "dial_failed" not in noted
        return failed

    assert run(main()) == []
