"""Interfaces for sending messages and for finding peers. They are implemented over hivemind's p2pd and in
memory.

A link is one-way: the peer that opened it sends, the other receives. Replies travel over a link that the
other side opens back. Thus each link has one owner, and each side notices when the other side closes. Each
link carries one lane: a class of messages, such as data. Chunks are parts of a snapshot of the weights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

from protocols.fields import Body
from protocols.messages.table import Lane, Message
from protocols.messages.terms import ANYTHING, Terms
from protocols.signed.opinions import OpinionKind, SignedOpinion
from protocols.signed.orders import SignedOrder
from swarmnet.identifiers import PeerId, RunId


class Receiver(Protocol):
    """The peer's side of a transport. Its methods are called from the event loop and must not block."""

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        """Handle a complete message from an authenticated peer. The length and hash of the body are already
        checked. To refuse the message, raise a WireError: the transport then closes the link and calls
        `refused` with that error."""

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None:
        """Called when a link from or to `peer` has ended, unless this side closed it."""

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        """Called after `peer` violated the protocol and its link was closed. `code` is a WireError code."""


class Link(Protocol):
    """Sends to one peer on one lane. Smaller `Message.priority` goes first; long messages are interleaved."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def closed(self) -> bool: ...

    @property
    def queued_bytes(self) -> int: ...

    def post(self, message: Message, body: Body = b"") -> int:
        """Queue a message and return its size on the wire in bytes. Arrival is not confirmed. On the data
        lane, messages may arrive out of order or twice. Raises PeerGone if the link has ended, and Backlog if
        more bytes than the transport's limit are queued."""

    async def drained(self, below_bytes: int, deadline_seconds: float) -> None:
        """Wait until at most `below_bytes` are queued. Raises PeerGone at the deadline or the link's end."""

    def close(self) -> None:
        """End the link and drop what is queued."""


FindChunk = Callable[[bytes, int], memoryview | None]
"""Maps (digest of settled weights, chunk index) to the chunk, or to None if this peer does not have it."""
FindText = Callable[[bytes, int], Awaitable[bytes | None]]
"""Maps (SHA-256 of a file of the run's text, chunk index) to the chunk, read from disk; None: not here."""


async def find_no_text(_digest: bytes, _index: int) -> bytes | None:
    """Return None: the answer of a peer that has no text to share."""
    return None


Arrived = Callable[[PeerId, bytes, int, bytes | None], None]
"""Receives (holder, digest, index, chunk) in answer to `ChunkDownloader.ask`. Chunk None: none came."""
Progressed = Callable[[PeerId], None]
"""Called when a holder has sent another part of a chunk."""


class ChunkDownloader(Protocol):
    """Separate connections for downloading chunks (protocols/p2pd/chunk_streams.py)."""

    @property
    def requests_per_holder(self) -> int:
        """Number of chunks that can be in flight from one holder at the same time."""

    def ask(self, holder: PeerId, addresses: Sequence[str], digest: bytes, index: int) -> None:
        """Request a chunk from a holder. `arrived` is called exactly once for it."""

    async def close(self) -> None: ...


class Transport(Protocol):
    """Sends and receives messages for one peer."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def addresses(self) -> Sequence[str]:
        """Multiaddrs at which others reach this peer, without the /p2p/ part."""

    def seen_range(self, peer: PeerId) -> str:
        """Return the public /24 or /48 from which the peer's links come. If the links come through a relay,
        this is the relay's range. Empty for private addresses and for a peer without links."""

    def on_address_change(self, told: Callable[[], None]) -> None:
        """Call `told` whenever `addresses` has changed; it replaces the previous callback."""

    def listen(self, receiver: Receiver, terms: Terms = ANYTHING) -> None:
        """Start to deliver messages to `receiver`. Before this call, nothing is accepted. The receiver
        replaces the previous one, which gets no more calls and is not kept alive. `terms` says which bodies
        are accepted from which peers."""

    @property
    def subflows(self) -> Mapping[str, int]:
        """Statistics of the extra connections for slow links (protocols/p2pd/multipath_link.py). The keys are
        the numbers of connections that are `open`, were `opened` or `failed`, and `repeated`: messages sent
        again because a connection broke. Empty if one connection carries everything."""

    def serve_chunks(self, find: FindChunk) -> None:
        """Answer chunk requests of other peers with `find(digest, index)`. Uploads that are still running for
        a previous `find` are cut off."""

    def serve_text(self, find: FindText) -> None:
        """Answer chunk requests for which `serve_chunks` has nothing with `find(digest, index)`."""

    async def carriers(self, count: int, arrived: Arrived, progressed: Progressed) -> ChunkDownloader | None:
        """Open extra connections for fetching chunks. Returns None where one connection is enough."""

    async def open(
        self, peer: PeerId, lane: Lane, deadline_seconds: float, addresses: Sequence[str] = ()
    ) -> Link:
        """Open a new link. `addresses` are hints. Raises PeerGone if the peer is not reached in time."""

    async def close(self) -> None: ...


class Directory(Protocol):
    """Publishes and finds the records of a stage's peers, and runs' manifests, owners' orders and registry
    entries. A record is only a hint: a peer is alive when it answers."""

    def now(self) -> float:
        """Return the swarm's time in seconds, which is used to sign records."""

    async def announce(self, run: RunId, stage: int, record: bytes, deadline_seconds: float) -> bool:
        """Publish this peer's signed record for `RECORD_SECONDS`. Returns False if no node stored it."""

    def met(self) -> Collection[PeerId]:
        """Return the peers whose DHT nodes have answered this peer's node. Their addresses are known."""

    async def look_up(self, run: RunId, stage: int, deadline_seconds: float) -> dict[PeerId, bytes]:
        """Return the signed, verified and unexpired PeerRecords of a stage."""

    async def put_manifest(self, run: RunId, signed_manifest: bytes, deadline_seconds: float) -> bool:
        """Store the run's signed manifest. Returns False if no node stored it."""

    async def get_manifest(self, run: RunId, deadline_seconds: float) -> bytes | None:
        """Return the manifest with the owner's signature, checked against the run id; None if not found."""

    async def ask(self, peer: PeerId, addresses: Sequence[str], deadline_seconds: float) -> None:
        """Return once this peer's own process has answered. Raises Unreachable if no address of the peer
        answers. Raises PeerGone if one does but the process does not reply."""

    async def put_order(self, run: RunId, order: bytes, deadline_seconds: float) -> bool:
        """Store a signed order of the owner or of the moderators; it never replaces a newer one. False if no
        node stored it."""

    async def get_order(self, run: RunId, author: PeerId, deadline_seconds: float) -> SignedOrder | None:
        """Return the newest order that is found, or None. `author`: the owner or the moderators' joint id."""

    async def put_listing(self, listing: bytes, deadline_seconds: float) -> bool:
        """Store a run's entry in the registry of runs. Returns False if no node stored it."""

    async def listings(self, deadline_seconds: float) -> list[RunId]:
        """Return the runs in the registry. The caller must check each run's manifest."""

    async def put_opinion(self, opinion: SignedOpinion, deadline_seconds: float) -> bool:
        """Store an opinion about a run until it expires. Returns False if no node stored it."""

    async def opinions(self, run: RunId, kind: OpinionKind, deadline_seconds: float) -> list[SignedOpinion]:
        """Return the newest opinions that are in force, one of each author and document."""

    async def close(self) -> None: ...
