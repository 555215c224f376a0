"""The picture from the directory alone: what peers say of themselves in their signed records."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from peers.network.discovery.record_reader import (
    IN_STEP,
    QUIET_SECONDS,
    eval_loss,
    settled_round,
    settled_tokens,
    stuck_of,
    usual_loss,
    usual_round,
)
from peers.telemetry.event_fold import MOST_EVENTS, Curve
from peers.telemetry.picture import Happened, PeerSeen, Picture, curve, lag_of
from peers.telemetry.reasons import stuck_lines
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import Manifest
from swarmnet.run.owner_orders import NO_ORDER, Order, told

LONGEST_TEXT = 200
"""Characters of an event; an order may name hundreds of bans."""


class Watch:
    """Look after look: the loss curve, tokens per second and who came and went are found by comparing."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._run = manifest.run_id()
        self.losses = Curve()
        self.events: deque[Happened] = deque(maxlen=MOST_EVENTS)
        self._before: dict[PeerId, SignedRecord] = {}
        self._order = NO_ORDER
        self._speeds: dict[PeerId, float] = {}

    def take(self, records: Mapping[PeerId, SignedRecord], now: float, order: Order = NO_ORDER) -> Picture:
        """`now`: the swarm's time, Unix seconds; `order`: the newest one of the run's owner that is known."""
        first = not self._before
        self._hear(order, now, first)
        for peer, signed in records.items():
            self._compare(peer, self._before.get(peer), signed, now, first)
        for peer in self._before.keys() - records.keys():
            gone = self._before[peer].record
            text = f"{_name(gone.name, peer)} of stage {gone.stage}: its record has run out"
            self.events.append(Happened(now, "record_gone", text, "warning"))
            self._speeds.pop(peer, None)
        self._before = dict(records)
        loss = usual_loss(signed.record for signed in records.values())
        if loss is not None:
            self.losses.add(now, loss)
        return self._picture(records, now, loss)

    def _hear(self, order: Order, now: float, first: bool) -> None:
        """In the words in which a peer tells it."""
        if order.sequence <= self._order.sequence:
            return
        how = "by the owner's newest order" if first else "the owner orders"
        reason = order.reason or "no reason given"
        text = f"{how}: {'; '.join(told(self._order, order))} ({reason})"
        self.events.append(Happened(now, "order", text[:LONGEST_TEXT]))
        self._order = order

    def _compare(
        self, peer: PeerId, before: SignedRecord | None, signed: SignedRecord, now: float, first: bool
    ) -> None:
        record, name = signed.record, _name(signed.record.name, peer)
        if before is None:
            if not first:
                self.events.append(
                    Happened(now, "record_new", f"{name} announces itself for stage {record.stage}")
                )
            return
        old, passed = before.record, (signed.sequence - before.sequence) / 1e6
        if old.stage != record.stage:
            text = f"{name} went from stage {old.stage} to {record.stage}"
            self.events.append(Happened(now, "moved", text))
        elif old.state != record.state:
            self.events.append(
                Happened(now, record.state or "unknown", f"{name} of stage {record.stage}: {record.state}")
            )
        if passed > 0 and record.tokens >= old.tokens:
            self._speeds[peer] = (record.tokens - old.tokens) / passed

    def _picture(self, records: Mapping[PeerId, SignedRecord], now: float, loss: float | None) -> Picture:
        peers = [self._seen(peer, signed, now) for peer, signed in records.items()]
        peers.sort(key=lambda seen: (seen.stage, seen.name, seen.peer))
        workers = [signed.record for signed in records.values() if signed.record.stage >= 0]
        steps = [(record.stage, record.round) for record in workers
                 if record.state in ("", *IN_STEP)]  # fmt: skip
        speeds = [
            self._speeds[peer]
            for peer, signed in records.items()
            if peer in self._speeds and signed.record.stage == 0
        ]
        held = {record.stage for record in workers}
        fresh = (signed.record for signed in records.values() if now - signed.sequence / 1e6 <= QUIET_SECONDS)
        stuck = stuck_of(fresh, self.manifest.rounds.snapshot_rounds)
        return Picture(
            source="the directory, as peers say",
            time=now,
            run=self.manifest.name,
            state="held" if self._order.paused else "",
            stages=len(self.manifest.stages),
            peers=tuple(peers),
            round=usual_round(workers),
            settled=settled_round(workers, 0),
            lag=lag_of(steps),
            loss=loss,
            eval_loss=eval_loss(signed.record for signed in records.values()),
            losses=curve(self.losses.points),
            tokens=_largest_stage(workers),
            settled_tokens=settled_tokens(workers, 0),
            tokens_per_second=sum(speeds) if speeds else None,
            sent={"all": sum(record.sent_bytes for record in workers)},
            received={"all": sum(record.received_bytes for record in workers)},
            events=tuple(self.events),
            waits_for=tuple(stage for stage in range(len(self.manifest.stages)) if stage not in held),
            warnings=stuck_lines(stuck, self._run),
        )

    def _seen(self, peer: PeerId, signed: SignedRecord, now: float) -> PeerSeen:
        record = signed.record
        quiet = now - signed.sequence / 1e6 > QUIET_SECONDS
        return PeerSeen(
            peer=peer,
            stage=record.stage,
            state="quiet" if quiet else record.state or record.role,
            name=record.name,
            round=record.round if record.stage >= 0 else None,
            loss=record.loss,
            tokens_per_second=self._speeds.get(peer),
            can_do=record.tokens_per_second or None,
            sent_bytes=record.sent_bytes,
            received_bytes=record.received_bytes,
        )


def _largest_stage(workers: Iterable[PeerRecord]) -> int:
    """Tokens since the starts of a stage's peers, of the stage that has most."""
    tokens: Counter[int] = Counter()
    for record in workers:
        tokens[record.stage] += record.tokens
    return max(tokens.values(), default=0)


def _name(name: str, peer: PeerId) -> str:
    return name or f"...{peer[-6:]}"
