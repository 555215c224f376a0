"""A wrapper of a peer's directory (the DHT) that counts the outcomes of operations for the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Collection, Sequence
from typing import Literal, Protocol, TypeVar

from protocols.errors import WireError
from protocols.ports import Directory
from protocols.signed.opinions import OpinionKind, SignedOpinion
from protocols.signed.orders import SignedOrder
from swarmnet.identifiers import PeerId, RunId

Result = TypeVar("Result")

Operation = Literal["get", "put", "bootstrap"]
Outcome = Literal["ok", "empty", "failed"]


class Joinable(Directory, Protocol):
    """A directory that is joined through some of its nodes (`DhtDirectory`)."""

    async def bootstrap(self, multiaddrs: Sequence[str], deadline_seconds: float) -> int: ...


class CountedDirectory:
    """Passes all calls on to `inner` and counts how they ended. `ok`: found or stored. `empty`: answered, but
    nothing was found or no node stored it. `failed`: no answer, or a refused one."""

    def __init__(self, inner: Joinable) -> None:
        self._inner = inner
        self.ended: Counter[tuple[Operation, Outcome]] = Counter()

    def now(self) -> float:
        return self._inner.now()

    def met(self) -> Collection[PeerId]:
        return self._inner.met()

    async def bootstrap(self, multiaddrs: Sequence[str], deadline_seconds: float) -> int:
        return await self._count("bootstrap", self._inner.bootstrap(multiaddrs, deadline_seconds))

    async def announce(self, run: RunId, stage: int, record: bytes, deadline_seconds: float) -> bool:
        return await self._count("put", self._inner.announce(run, stage, record, deadline_seconds))

    async def put_manifest(self, run: RunId, signed_manifest: bytes, deadline_seconds: float) -> bool:
        return await self._count("put", self._inner.put_manifest(run, signed_manifest, deadline_seconds))

    async def look_up(self, run: RunId, stage: int, deadline_seconds: float) -> dict[PeerId, bytes]:
        return await self._count("get", self._inner.look_up(run, stage, deadline_seconds))

    async def get_manifest(self, run: RunId, deadline_seconds: float) -> bytes | None:
        return await self._count("get", self._inner.get_manifest(run, deadline_seconds))

    async def put_order(self, run: RunId, order: bytes, deadline_seconds: float) -> bool:
        return await self._count("put", self._inner.put_order(run, order, deadline_seconds))

    async def get_order(self, run: RunId, author: PeerId, deadline_seconds: float) -> SignedOrder | None:
        return await self._count("get", self._inner.get_order(run, author, deadline_seconds))

    async def put_listing(self, listing: bytes, deadline_seconds: float) -> bool:
        return await self._count("put", self._inner.put_listing(listing, deadline_seconds))

    async def listings(self, deadline_seconds: float) -> list[RunId]:
        return await self._count("get", self._inner.listings(deadline_seconds))

    async def put_opinion(self, opinion: SignedOpinion, deadline_seconds: float) -> bool:
        return await self._count("put", self._inner.put_opinion(opinion, deadline_seconds))

    async def opinions(self, run: RunId, kind: OpinionKind, deadline_seconds: float) -> list[SignedOpinion]:
        return await self._count("get", self._inner.opinions(run, kind, deadline_seconds))

    async def ask(self, peer: PeerId, addresses: Sequence[str], deadline_seconds: float) -> None:
        """Pass the call on without counting it: it pings a peer and does not use the directory."""
        await self._inner.ask(peer, addresses, deadline_seconds)

    async def close(self) -> None:
        await self._inner.close()

    async def _count(self, operation: Operation, work: Awaitable[Result]) -> Result:
        """Await `work`, count its outcome, and return its result. Raises the same WireError."""
        try:
            result = await work
        except WireError:
            self.ended[operation, "failed"] += 1
            raise
        self.ended[operation, "ok" if result else "empty"] += 1
        return result
