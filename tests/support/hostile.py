"""A peer with an identity, a signed record and a link, that says whatever a test wants it to say."""

from __future__ import annotations

from collections import Counter
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from hypothesis import strategies as st
from swarm import Swarm

from protocols.errors import WireError
from protocols.messages.table import MESSAGES, Hello, Lane, Message, PeerRecord
from protocols.signed.envelope import run_bytes
from protocols.signed.identity import Identity
from protocols.signed.invites import prove_invite
from protocols.signed.records import seal_record
from swarmnet.identifiers import PeerId
from swarmnet.run.schema import WIRE_VERSION

ACT_SHAPE = (2, 16, 32)
"""Of the tiny manifest."""
BODY_BYTES = 2 * 16 * 32 * 2
"""bf16 hidden states of that shape; an ACT has 128 bytes of labels more."""


class Liar:
    """`Receiver` that answers nothing and remembers the kinds of what it hears."""

    def __init__(self, swarm: Swarm, stage: int, name: str = "liar", invite: bytes = b"") -> None:
        self.swarm = swarm
        self.identity = Identity.from_seed(name.encode())
        self.transport = swarm.network.transport(self.identity.peer_id)
        self.transport.listen(self)
        self.invite = prove_invite(invite, swarm.signed.run_id, self.identity.peer_id)
        record = PeerRecord(
            self.identity.peer_id, stage, "worker", ["/memory/liar"], 0, 0.0, "0", invite=self.invite
        )
        self.record = seal_record(self.identity, swarm.signed.run_id, record, swarm.loop.time())
        self.heard: Counter[str] = Counter()
        self.messages: list[Message] = []
        self._links: dict[tuple[PeerId, Lane], Any] = {}

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        self.heard[type(message).__name__] += 1
        self.messages.append(message)

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None: ...

    def refused(self, peer: PeerId, code: str, reason: str) -> None: ...

    async def say(self, target: PeerId, message: Message, body: bytes = b"", lane: Lane = "group") -> None:
        """On a link that was greeted; on a fresh one if the target has closed the last."""
        link = self._links.get((target, lane))
        try:
            if link is None or link.closed:
                link = self._links[target, lane] = await self.transport.open(target, lane, 5.0)
                link.post(Hello(WIRE_VERSION, run_bytes(self.swarm.signed.run_id), self.record, self.invite))
            link.post(message, body)
        except WireError:
            self._links.pop((target, lane), None)  # Too long for a header, or the link has just ended.


INTEGERS = st.one_of(
    st.integers(0, 40),
    st.sampled_from([-1, -(2**63), 2**15, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**64 - 1]),
)
FLOATS = st.sampled_from([0.0, 0.5, 1.0, -1.0, 3599.0, 1e300, float("nan"), float("inf"), float("-inf")])
SHAPES = st.one_of(st.just(ACT_SHAPE), st.tuples(INTEGERS, INTEGERS, INTEGERS))
BYTES = st.one_of(
    st.sampled_from([8, 16, 32]).flatmap(lambda size: st.binary(min_size=size, max_size=size)),
    st.binary(max_size=80),
    st.integers(0, 70_000).map(bytes),
)
BODIES = st.one_of(
    st.just(b""),
    st.binary(max_size=300),
    st.sampled_from([b"\x00", b"\x3f", b"\x7f", b"\xff"]).map(lambda byte: byte * BODY_BYTES),
    st.sampled_from([b"\x00", b"\x01", b"\x7f"]).map(lambda byte: byte * BODY_BYTES + bytes(128)),
    st.sampled_from([b"\x00", b"\xff"]).map(lambda byte: bytes(BODY_BYTES) + byte * 128),
)


def messages(names: list[str]) -> st.SearchStrategy[Message]:
    """Every type of message, with fields of the right types and any value; `names` are peers that exist."""
    texts = st.one_of(st.sampled_from(names), st.text(max_size=80), st.integers(0, 60_000).map("x".__mul__))
    plain = {int: INTEGERS, float: FLOATS, str: texts, bytes: BYTES, bool: st.booleans()}

    def values(kind: Any) -> st.SearchStrategy[Any]:
        if get_origin(kind) is Annotated:
            return values(get_args(kind)[0])
        if get_origin(kind) is list:
            inner = values(get_args(kind)[0])
            longest = st.tuples(inner, st.integers(0, 5000)).map(lambda pair: [pair[0]] * pair[1])
            return st.one_of(st.lists(inner, max_size=5), longest)
        if get_origin(kind) in (Union, UnionType):
            return st.one_of(st.none() if kind is NoneType else values(kind) for kind in get_args(kind))
        if get_origin(kind) is tuple:
            return SHAPES
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return built(kind)
        return plain[kind]

    def built(kind: Any) -> st.SearchStrategy[Any]:
        fields = msgspec.structs.fields(kind)
        return st.builds(kind, *(values(field.type) for field in fields))

    return st.one_of([built(kind) for kind in MESSAGES])
