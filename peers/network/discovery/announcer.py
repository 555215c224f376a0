"""Announce a peer in the DHT (the directory) while it lives, and look up other peers.

A record is a peer's signed announcement; it names the peer's stage and addresses. It stays in the DHT for a
while after its peer has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import msgspec

from peers.config.errors import IdentityInUse
from peers.config.run_file import SignedManifest
from peers.network.discovery.claims import Claims, bandwidth_fields
from peers.telemetry import log_events
from protocols.errors import TooLarge, WireError
from protocols.messages.table import PeerRecord
from protocols.ports import Directory, Transport
from protocols.signed.identity import Identity
from protocols.signed.peer_record import NO_STAGE, TOLD_GROUPS
from protocols.signed.records import ANNOUNCE_SECONDS, SignedRecord, open_record, seal_record
from swarmnet.identifiers import PeerId
from swarmnet.membership.own_start import OwnStart

OPERATION_SECONDS = 10.0
"""Deadline of one directory operation. Two silent nodes on the path cost hivemind 6 s (measured)."""
FIRST_LOOKS = 3
FIRST_LOOK_SECONDS = 1.0
"""Interval of the first look-ups: peers that start together see each other's records about this late."""
LOOK_SECONDS = 10.0
MAX_ASKED = 32
"""Maximum peers of a stage that a newcomer dials before it chooses a stage. The share of answers is
extrapolated to the rest of the stage."""
ANSWER_SECONDS = 3.0
EARLY = 6
EARLY_SECONDS = 10.0
"""Interval of a peer's first announcements, shorter because its speed has only just been measured."""
AGAIN_SECONDS = 1.0
"""Pause after an announcement that no node stored."""


@dataclass(eq=False, kw_only=True)
class RecordAnnouncer:
    """Announces the record of this peer and looks up the records of others. `own_start`: the process's."""

    signed: SignedManifest
    identity: Identity
    transport: Transport
    directory: Directory
    version: str
    log_event: log_events.LogEvent
    own_start: OwnStart = field(default_factory=OwnStart)

    def __post_init__(self) -> None:
        self._record_changed = asyncio.Event()

    async def there(self, records: Mapping[PeerId, SignedRecord], chance: Random) -> set[PeerId]:
        """Estimate which other peers are alive, because a record outlives its peer. Up to `MAX_ASKED` random
        peers of each stage are dialled. Returns those that answer, and the same share of the others."""
        stages: dict[int, list[PeerId]] = {}
        for peer, signed in records.items():
            if peer != self.transport.peer:
                stages.setdefault(signed.record.stage, []).append(peer)
        alive = await asyncio.gather(*(self._alive(peers, records, chance) for peers in stages.values()))
        return set().union(*alive)

    async def _alive(
        self, peers: list[PeerId], records: Mapping[PeerId, SignedRecord], chance: Random
    ) -> list[PeerId]:
        """Return those of one stage's `peers` that count as alive. At most `MAX_ASKED` random ones are
        dialled, and count if they answer. If 3 of 4 answer, 3 of 4 of the others count too."""
        if len(peers) > MAX_ASKED:
            peers = chance.sample(peers, len(peers))
        dialled, others = peers[:MAX_ASKED], peers[MAX_ASKED:]
        outcomes = await asyncio.gather(*(self._answers_dial(peer, records[peer]) for peer in dialled))
        answered = [peer for peer, has_answered in zip(dialled, outcomes, strict=True) if has_answered]
        others_alive = round(len(others) * len(answered) / len(dialled))
        return answered + others[:others_alive]

    async def _answers_dial(self, peer: PeerId, signed: SignedRecord) -> bool:
        try:
            link = await self.transport.open(peer, "group", ANSWER_SECONDS, signed.record.addresses)
        except WireError:
            return False
        link.close()
        return True

    async def look_up(self, stage: int) -> dict[PeerId, bytes] | None:
        """Return the signed records of a stage by peer, or None if the directory does not answer."""
        try:
            return await self.directory.look_up(self.signed.run_id, stage, OPERATION_SECONDS)
        except WireError as error:
            self.log_event(log_events.LookUpFailed(stage=stage, code=error.code, reason=str(error)))
            return None

    def record(self, stage: int, claims: Claims, invite: bytes = b"") -> bytes:
        """Return this peer's own record for `stage` with the values in `claims`, signed and dated with the
        directory's time. `invite` is the peer's invite; empty: the run requires none."""
        record = PeerRecord(
            self.transport.peer,
            stage,
            claims.role,
            list(self.transport.addresses),
            claims.round,
            claims.tokens_per_second,
            self.version,
            claims.moving_to,
            claims.name,
            claims.state,
            claims.loss,
            claims.tokens,
            claims.settled,
            claims.checkpoint_round,
            claims.checkpoint_seconds,
            claims.sent_bytes,
            claims.received_bytes,
            self.own_start.begin(self.directory.now()),
            invite,
            -1 if claims.finalized_tokens is None else claims.finalized_tokens,
            claims.device,
            int(claims.joules),
            claims.text_shards,
            claims.text_shards_read,
            *bandwidth_fields(claims.line),
            claims.experts_group,
            claims.experts_trained[:TOLD_GROUPS],
            claims.uploads_seen,
            claims.vote_weights,
            claims.avoids,
            claims.receipts,
        )
        try:
            return seal_record(self.identity, self.signed.run_id, record, self.directory.now())
        except (
            TooLarge
        ):  # With many long addresses. Others must find this peer; they need no receipts for it.
            record = msgspec.structs.replace(record, receipts=())
            return seal_record(self.identity, self.signed.run_id, record, self.directory.now())

    def judge_own(self, signed: SignedRecord) -> bool:
        """Find out from a record, signed by this peer's key, whether another process uses that key. Returns
        True if a process that started later than this one has signed the record. Raises IdentityInUse if it
        proves that a process that started earlier still runs: this process must then end."""
        started = signed.record.started
        other = self.own_start.saw(started, signed.sequence, self.directory.now())
        if other == "earlier":
            raise IdentityInUse(started / 1e6)
        return other == "later"

    async def _check_own_record(self, stage: int) -> None:
        """Look up the stored record of this peer's key. If a process that started later has replaced it,
        announce at once: that process then sees this one and ends. Raises IdentityInUse as `judge_own`."""
        records = await self.look_up(stage) or {}
        data = records.get(self.transport.peer)
        if data is not None and self.judge_own(open_record(data, self.signed.run_id)):
            self.announce_now()

    async def announce_forever(self, stage: int, record: Callable[[], bytes]) -> None:
        """Store this peer's record and the run's manifest in the directory, again and again until cancelled.
        The first `EARLY` intervals are shorter, and so is the next one after a failure or `announce_now`.
        Raises IdentityInUse if an earlier process uses this peer's key."""
        run, early_left = self.signed.run_id, EARLY
        while True:
            if stage == NO_STAGE:  # A worker has a stage; its look-ups of stages check this anyway.
                await self._check_own_record(stage)
            try:
                stored = await self.directory.announce(run, stage, record(), OPERATION_SECONDS)
                stored &= await self.directory.put_manifest(run, self.signed.wire(), OPERATION_SECONDS)
                if not stored:
                    reason = "no node of the directory stored it"
                    self.log_event(log_events.AnnounceFailed(code="not_stored", reason=reason))
            except WireError as error:
                self.log_event(log_events.AnnounceFailed(code=error.code, reason=str(error)))
                stored = False
            early_left -= 1
            pause = EARLY_SECONDS if early_left > 0 else ANNOUNCE_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(pause if stored else AGAIN_SECONDS):
                    await self._record_changed.wait()
            self._record_changed.clear()

    def announce_now(self) -> None:
        """Announce at once, because the record has changed."""
        self._record_changed.set()

    async def look_forever(self, look: Callable[[], Awaitable[None]]) -> None:
        """Call `look` in regular intervals, which are shorter at first."""
        looks = 0
        while True:
            looks += 1
            await asyncio.sleep(FIRST_LOOK_SECONDS if looks <= FIRST_LOOKS else LOOK_SECONDS)
            await look()
