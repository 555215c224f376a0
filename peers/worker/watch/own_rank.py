"""The rank of this computer among the workers of the run, from the records in the directory.

Records are looked up only while somebody reads the rank, because a look-up of a large run costs megabytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peers.config.run_file import SignedManifest
from peers.worker.watch.startup_summary import found
from protocols.ports import Directory
from protocols.signed.peer_record import PeerRecord
from swarmnet.identifiers import PeerId

RANK_SECONDS = 120.0
"""Time between two look-ups; a look-up costs 2 kB per peer."""


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """A place among present workers, by the tokens that each claims since it started or moved."""

    place: int
    """1 for the one with most tokens."""
    workers: int


def rank_of(tokens: int, others: Iterable[PeerRecord]) -> WorkerRank | None:
    """Return the rank of a worker with these tokens; None if it has none, or if no other worker is there."""
    claimed = [record.tokens for record in others if record.stage >= 0 and record.role == "worker"]
    if not claimed or not tokens:
        return None
    return WorkerRank(1 + sum(other > tokens for other in claimed), 1 + len(claimed))


class OwnRank:
    """Keeps the rank of this computer while it is read."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._known: WorkerRank | None = None
        self._is_wanted = asyncio.Event()

    def request(self) -> dict[str, int] | None:
        """Return the newest rank, and have it renewed soon; None if it is not known."""
        self._is_wanted.set()
        known = self._known
        return {"place": known.place, "workers": known.workers} if known is not None else None

    async def watch(self, signed: SignedManifest, directory: Directory, tokens: Callable[[], int]) -> None:
        """Renew the rank after each request, at most every RANK_SECONDS, until cancelled. `tokens` returns
        this computer's tokens in its present stage."""
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            records = await found(directory, signed, self._me)
            if records is not None:
                self._known = rank_of(tokens(), (signed_record.record for signed_record in records.values()))
            await asyncio.sleep(RANK_SECONDS if self._known is not None else RANK_SECONDS / 8)
