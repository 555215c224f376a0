"""Messages about the owner's orders. Their numbers and the rest of the table are in docs/wire.md."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from protocols.fields import Message
from swarmnet.run.owner_orders import ORDER_LIMIT


class OrderIs(Message, frozen=True, tag=60):
    """The newest order that the sender knows; sent when a link is made and when a newer one is learnt. It
    proves itself, so it is taken before HELLO, too."""

    order: Annotated[bytes, Meta(max_length=ORDER_LIMIT)]
    """The owner's signed envelope (protocols/signed/orders.py)."""
