"""The ports: how messages travel and how peers are found. Implementations: hivemind (p2pd) and memory.

A link is one-way: who opened it sends, the other side receives. A reply goes over the link that the other
side opens back. So no link has two owners, and either side notices when the other ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from protocols.fields import Body
from protocols.messages.table import Lane, Message
from protocols.messages.terms import ANYTHING, Terms
from protocols.signed.orders import SignedOrder
from swarmnet.identifiers import PeerId, RunId


class Receiver(Protocol):
    """The peer's side of a transport. Called from the event loop; must not block."""

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        """A whole message from an authenticated peer, its body's length and hash checked. Raising a
        WireError refuses it: the link is closed and `refused` called with that error."""

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None:
        """A link from or to this peer ended and was not closed by us."""

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        """Something malformed came from this peer; its link was closed (WireError codes)."""


class Link(Protocol):
    """Sends to one peer on one lane, smaller `Message.priority` first, pieces interleaved."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def closed(self) -> bool: ...

    @property
    def queued_bytes(self) -> int: ...

    def post(self, message: Message, body: Body = b"") -> int:
        """Queue a message and return its bytes on the wire. Raises PeerGone if the link has ended, Backlog
        if more than the transport's limit is queued. Arrival is not confirmed. On the data lane messages may
        arrive in another order, and one twice."""

    async def drained(self, below_bytes: int, deadline_seconds: float) -> None:
        """Wait until at most `below_bytes` are queued; PeerGone at the deadline or if the link ends."""

    def close(self) -> None:
        """End the link; what is queued is dropped."""


FindChunk = Callable[[bytes, int], memoryview | None]
"""(digest of settled weights, index) -> the chunk, or None if it is not held here."""
Arrived = Callable[[PeerId, bytes, int, bytes | None], None]
"""(holder, digest, index, chunk or None): the answer to `Carries.ask`; None when none came."""
Progressed = Callable[[PeerId], None]
"""A holder has sent another part of a chunk."""


class Carries(Protocol):
    """Connections of their own for chunks (protocols/p2pd/chunk_streams.py)."""

    @property
    def lanes_per_holder(self) -> int:
        """How many chunks are on their way at once from one holder."""

    def ask(self, holder: PeerId, addresses: Sequence[str], digest: bytes, index: int) -> None:
        """`arrived` will be called once."""

    async def close(self) -> None: ...


class Transport(Protocol):
    @property
    def peer(self) -> PeerId: ...

    @property
    def addresses(self) -> Sequence[str]:
        """Multiaddrs under which others reach this peer, without the /p2p/ part."""

    def seen_range(self, peer: PeerId) -> str:
        """The public /24 or /48 from which the peer's links come here, a relay's if they come through one;
        empty: private, or there is none."""

    def when_moved(self, told: Callable[[], None]) -> None:
        """`told` is called whenever `addresses` has changed; it replaces the one before."""

    def listen(self, receiver: Receiver, terms: Terms = ANYTHING) -> None:
        """Start to deliver; before this nothing is accepted. It takes the place of whoever listened before:
        that one hears nothing more, and is not held on to. `terms`: what is taken, and of whom."""

    @property
    def subflows(self) -> Mapping[str, int]:
        """More connections for slow links (protocols/p2pd/multipath_link.py): how many are `open`, were
        `opened`, `failed`; and the messages `repeated` as one broke. Empty where one connection carries
        all."""

    def serve_chunks(self, find: FindChunk) -> None:
        """Answer the carriers of others: `find(digest, index)` is the chunk, or None. What they were being
        sent of another one's is cut off."""

    async def carriers(self, count: int, arrived: Arrived, progressed: Progressed) -> Carries | None:
        """More connections to fetch chunks on; None where one connection carries all that there is."""

    async def open(
        self, peer: PeerId, lane: Lane, deadline_seconds: float, addresses: Sequence[str] = ()
    ) -> Link:
        """A new link. `addresses` are hints. Raises PeerGone when the peer is not reached in time."""

    async def close(self) -> None: ...


class Directory(Protocol):
    """Signed records under (run, stage). A record is a hint: a peer is alive when it answers."""

    def now(self) -> float:
        """The swarm's time in seconds, with which records are signed."""

    async def announce(self, run: RunId, stage: int, record: bytes, deadline_seconds: float) -> bool:
        """Publish the own signed PeerRecord for `RECORD_SECONDS`; False if nobody stored it."""

    def met(self) -> Collection[PeerId]:
        """Peers whose nodes have answered this one: to dial them leads to no new address."""

    async def look_up(self, run: RunId, stage: int, deadline_seconds: float) -> dict[PeerId, bytes]:
        """Signed, verified, unexpired PeerRecords of a stage."""

    async def put_manifest(self, run: RunId, signed_manifest: bytes, deadline_seconds: float) -> bool: ...

    async def get_manifest(self, run: RunId, deadline_seconds: float) -> bytes | None:
        """The canonical manifest with the owner's signature, checked against the run id; None: not found."""

    async def ask(self, peer: PeerId, addresses: Sequence[str], deadline_seconds: float) -> None:
        """Return when this peer's own process has answered. Raises Unreachable if no address of it does,
        PeerGone if one does and the process says nothing."""

    async def put_order(self, run: RunId, order: bytes, deadline_seconds: float) -> bool:
        """Store an owner's signed order; an older one than is kept there replaces nothing."""

    async def get_order(self, run: RunId, owner: PeerId, deadline_seconds: float) -> SignedOrder | None:
        """The newest order of the run's owner that is found; None: none was given."""

    async def put_listing(self, listing: bytes, deadline_seconds: float) -> bool:
        """Store a run's entry in the registry (signed/registry_entry.py)."""

    async def listings(self, deadline_seconds: float) -> list[RunId]:
        """The runs in the registry; each is to be looked at by its manifest."""

    async def close(self) -> None: ...
