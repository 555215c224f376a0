"""Read the run owner's orders, and objections to its text, from the directory for an observer.

An order is signed by the owner and contains everything that is in force: a pause, bans, withdrawn documents.
The directory is the DHT that stores it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from peers.config.run_file import SignedManifest
from peers.network.discovery.announcer import OPERATION_SECONDS
from peers.network.orders.order_book import OrderBook
from peers.telemetry import log_events
from peers.telemetry.console import counted
from peers.telemetry.snapshot import ORDERS_NOT_READ, OwnerOrdersView, Pause, ShownEvent
from protocols.errors import WireError
from protocols.ports import Directory
from protocols.signed.opinions import SignedOpinion
from swarmnet.run.owner_orders import OwnerOrders, describe_news
from swarmnet.run.rates import WHOLE

SHOWN_ENTRIES = 20
"""Bans and withdrawals with reasons in one response, the newest first; the others are only counted."""
LONGEST_TEXT = 200
"""Characters of an event's text; an order may contain hundreds of bans."""


def as_json(ordered: OwnerOrdersView) -> dict[str, object]:
    """Return the orders as plain data of bounded size, for the page. Reasons are what the owner typed. Only
    the newest SHOWN_ENTRIES bans and withdrawals are listed, newest first; all are counted."""
    order, pause = ordered.order, ordered.pause
    return {
        "asked_at": ordered.asked_at,
        "given_at": ordered.given_at,
        "reason": order.reason,
        "held": order.paused,
        "held_since": pause.since if pause is not None else None,
        "held_reason": pause.reason if pause is not None else None,
        "checkpoints": order.checkpoint,
        "banned": len(order.bans),
        "withdrawn": len(order.withdrawn),
        "revoked": len(order.revoked),
        "rates": [{"from_round": rate.from_round, "factor": rate.factor / WHOLE} for rate in order.rates],
        "mixtures": [
            {
                "from_round": change.from_round,
                "weights": {name: weight / WHOLE for name, weight in change.weights},
            }
            for change in order.mixtures
        ],
        "ends": order.ends,
        "bans": [
            {"peer": ban.peer, "reason": ban.reason, "by": ban.by}
            for ban in order.bans[: -SHOWN_ENTRIES - 1 : -1]
        ],
        "withdrawals": [
            {"document": withdrawal.document, "reason": withdrawal.reason}
            for withdrawal in order.withdrawn[: -SHOWN_ENTRIES - 1 : -1]
        ],
    }


class Orders:
    """Reads the newest order. It stays when the directory does not respond later, or has lost it."""

    def __init__(
        self, signed: SignedManifest, log_event: log_events.LogEvent, happened: Callable[[ShownEvent], None]
    ) -> None:
        """`happened` is called with each newer order as text."""
        self.book = OrderBook(signed=signed, kept=None, log_event=log_event, notify=lambda *_: None)
        self.book.heard.append(self._on_order)
        self.log_event = log_event
        self.happened = happened
        self.ordered = ORDERS_NOT_READ
        self._disputed = 0
        """Number of documents of the text that were objected to and not withdrawn, when last reported."""

    async def look(self, directory: Directory) -> None:
        """Read the newest order and the objections from the directory. A failure is logged."""
        try:
            await self.book.look_up(directory, OPERATION_SECONDS)
            run_id = self.book.signed.run_id
            self._on_objections(await directory.opinions(run_id, "objection", OPERATION_SECONDS), directory)
        except WireError as error:
            self.log_event(log_events.LookUpFailed(what="order", code=error.code, reason=str(error)))
            return
        self.ordered = replace(self.ordered, asked_at=directory.now())

    def _on_order(self, before: OwnerOrders, now: OwnerOrders) -> None:
        """Keep the newer order `now`, and report how it differs from the order `before`."""
        self.ordered = replace(self.ordered, order=now, pause=self._current_pause(before, now))
        how = "new order" if before.sequence else "the newest order"
        text = f"{how}: {describe_news(before, now)}"
        self.happened(ShownEvent(now.sequence / 1e6, "order", text[:LONGEST_TEXT]))

    def _on_objections(self, objections: Iterable[SignedOpinion], directory: Directory) -> None:
        """Report that people object to more documents than before."""
        withdrawn = {withdrawal.document for withdrawal in self.book.order.withdrawn}
        disputed = len({objection.document for objection in objections} - withdrawn)
        if disputed > self._disputed:
            text = (
                f"{counted(disputed, 'document')} of the text objected to: swarmnet registry objections RUN"
            )
            self.happened(ShownEvent(directory.now(), "objection", text))
        self._disputed = disputed

    def _current_pause(self, before: OwnerOrders, now: OwnerOrders) -> Pause | None:
        """Return the pause in force after the order `now`, which replaces `before`: a new pause or the one
        of earlier. None without a pause, or if the order starts one but also changes something else: its
        reason may then be for that other change."""
        if not now.paused:
            return None
        before_but_paused = replace(before, paused=True)
        if _without_signature_data(now) == _without_signature_data(before_but_paused):
            # Nothing else has changed, so the order's reason belongs to the pause.
            return Pause(now.sequence / 1e6, now.reason)
        return self.ordered.pause if before.paused else None


def _without_signature_data(order: OwnerOrders) -> OwnerOrders:
    """Return the order without its number and reason, for comparison of what is in force."""
    return replace(order, sequence=0, reason="")
