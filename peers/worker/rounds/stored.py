"""Contributions as they arrive, verified, and as they are stored for peers that request them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from peers.network.peer_links import PeerLinks
from peers.state.unnamed_file import store_unnamed
from peers.worker.rounds.upload_scheduler import UploadQueue
from protocols.messages.table import Contribution
from protocols.signed.envelope import ENVELOPE_BYTES
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.membership.request_budget import RequestBudget
from swarmnet.rounds.events import Reference
from swarmnet.rounds.fetch_scheduler import MAX_ASKS
from swarmnet.rounds.result_table import Table

MIN_ON_DISK = 1 << 20
"""A round's set of at least this many bytes goes to disk. The sets of a small model stay in memory: 40 rounds
take 40 MiB."""
MAX_HEADS = 4096
"""Result heads kept: hours of rounds; about 300 bytes each in a small group, 12 KB in one of 512."""


@dataclass(frozen=True, slots=True)
class Stored:
    reference: Reference
    data: bytes | memoryview
    """The envelope with the payload, as sent; on disk if it is long and its round has settled."""
    tokens: int
    """Tokens that the contributor claims for it."""

    @property
    def payload(self) -> bytes:
        return bytes(self.data[ENVELOPE_BYTES:])


@dataclass(frozen=True, slots=True)
class Opened:
    """A contribution or a result whose signature has been verified."""

    reference: Reference
    tokens: int
    table: Table | None = None
    signed: int = 0
    """Length in bytes of a result's signed head, which names the rest by its digest. 0: all is signed."""


class ContributionStore:
    """Keeps contributions, and sends them to neighbours that request them."""

    def __init__(self, neighbourhood: PeerLinks, folder: Path | None, repeat_seconds: float) -> None:
        """`folder` holds long bodies of settled rounds; None keeps them in memory. A peer may repeat a
        request after `repeat_seconds`."""
        self.stored: dict[ContributionId, Stored] = {}
        self.heads: OrderedDict[ContributionId, bytes] = OrderedDict()
        """Heads of results, for peers that were away and ask whether they are included; kept longer than the
        bodies."""
        self._neighbourhood = neighbourhood
        self._folder = folder
        self._budget: RequestBudget[tuple[PeerId, ContributionId]] = RequestBudget(repeat_seconds, MAX_ASKS)
        queued = partial(neighbourhood.queued_bytes, lane="group")
        self.uploads = UploadQueue(self._send, queued, neighbourhood.clock)

    def keep(self, stored: Stored, signed: int = 0) -> None:
        """Keep a contribution. `signed` is the length of a result's head in bytes."""
        self.stored[stored.reference.id] = stored
        if signed:
            self.heads[stored.reference.id] = bytes(stored.data[:signed])
            while len(self.heads) > MAX_HEADS:
                self.heads.popitem(last=False)

    def requested(self, peer: PeerId, ids: Iterable[ContributionId]) -> None:
        """Send a neighbour the requested contributions that are kept."""
        self.uploads.wanted(peer, (one for one in ids if one in self.stored or one in self.heads))

    def _send(self, peer: PeerId, identity: ContributionId) -> None:
        """Send a contribution, unless it was dropped after it settled."""
        stored = self.stored.get(identity)
        body = stored.data if stored is not None else self.heads.get(identity)
        if body is not None and self._budget.spend((peer, identity), self._neighbourhood.clock.time()):
            self._neighbourhood.post(peer, "group", Contribution(), body)

    def count_tokens(self, references: Sequence[Reference]) -> int:
        """Return the tokens that a set claims. All its contributions must be kept."""
        return sum(self.stored[reference.id].tokens for reference in references)

    def move_to_disk(self, settled: Sequence[Reference]) -> None:
        """Move long bodies of a settled round to disk. Many rounds are kept for peers that are behind."""
        if sum(reference.size for reference in settled) < MIN_ON_DISK:
            return
        stored = [self.stored[reference.id] for reference in settled]
        views = store_unnamed([each.data for each in stored], self._folder)
        for each, view in zip(stored, views, strict=True):
            self.stored[each.reference.id] = replace(each, data=view)

    def forget_bodies(self, until: int) -> None:
        """Drop the contributions of rounds up to `until`, except the heads of results."""
        for identity in [i for i, stored in self.stored.items() if stored.reference.round <= until]:
            del self.stored[identity]
