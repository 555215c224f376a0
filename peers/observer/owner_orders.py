"""What a run's owner has ordered, as an observer reads it in the directory: the newest one that was seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from peers.config.run_file import SignedManifest
from peers.network.discovery.announcer import OPERATION_SECONDS
from peers.network.orders.order_book import OrderBook
from peers.telemetry import events as noted
from protocols.errors import WireError
from protocols.ports import Directory
from swarmnet.run.owner_orders import NO_ORDER, Order
from swarmnet.run.rates import WHOLE

SHOWN_ENTRIES = 20
"""Bans and withdrawals with their reasons in one answer, the newest first; the others are only counted."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The order that holds the run."""

    since: float
    """When the owner signed it, seconds since 1970."""
    reason: str


@dataclass(frozen=True, slots=True)
class Ordered:
    """What holds, as far as it was read."""

    order: Order = NO_ORDER
    asked_at: float = 0.0
    """When the directory last answered, seconds since 1970; 0: not yet."""
    pause: Pause | None = None
    """None: the run is not held, or what holds it was followed by other orders before anything was read: an
    order says what holds, and why the newest change was made, not since when the others hold."""

    @property
    def given_at(self) -> float | None:
        """When the owner signed the newest order, seconds since 1970; None: none was found."""
        return self.order.sequence / 1e6 if self.order.sequence else None

    @property
    def held(self) -> bool | None:
        """None: nobody knows yet."""
        return self.order.paused if self.asked_at else None

    def as_json(self) -> dict[str, object]:
        """Plain data of bounded size. Reasons are what the owner typed: one line each."""
        order, pause = self.order, self.pause
        return {
            "asked_at": self.asked_at,
            "given_at": self.given_at,
            "reason": order.reason,
            "held": order.paused,
            "held_since": pause.since if pause is not None else None,
            "held_reason": pause.reason if pause is not None else None,
            "checkpoints": order.checkpoint,
            "banned": len(order.bans),
            "withdrawn": len(order.withdrawn),
            "revoked": len(order.revoked),
            "rates": [{"from_round": rate.from_round, "factor": rate.factor / WHOLE} for rate in order.rates],
            "ends": order.ends,
            "bans": [{"peer": ban.peer, "reason": ban.reason}
                     for ban in order.bans[: -SHOWN_ENTRIES - 1 : -1]],
            "withdrawals": [{"document": one.document, "reason": one.reason}
                            for one in order.withdrawn[: -SHOWN_ENTRIES - 1 : -1]],
        }  # fmt: skip


UNASKED = Ordered()


class Orders:
    """Asks again and again. What was read stays where the directory is silent or has lost it."""

    def __init__(self, signed: SignedManifest, note: noted.Note) -> None:
        self.book = OrderBook(signed, None, note, lambda *_: None)
        self.book.heard.append(self._heard)
        self.note = note
        self.ordered = UNASKED

    async def look(self, directory: Directory) -> None:
        """Once."""
        try:
            await self.book.look_up(directory, OPERATION_SECONDS)
        except WireError as error:
            self.note(noted.LookUpFailed(what="order", code=error.code, reason=str(error)))
            return
        self.ordered = replace(self.ordered, asked_at=directory.now())

    def _heard(self, before: Order, now: Order) -> None:
        self.ordered = replace(self.ordered, order=now, pause=self._pause(before, now))

    def _pause(self, before: Order, now: Order) -> Pause | None:
        if not now.paused:
            return None
        if _but_for_its_signing(now) == _but_for_its_signing(replace(before, paused=True)):
            # Nothing else has changed, so the newest change is the pause, and the reason is the pause's.
            return Pause(now.sequence / 1e6, now.reason)
        return self.ordered.pause if before.paused else None


def _but_for_its_signing(order: Order) -> Order:
    return replace(order, sequence=0, reason="")
