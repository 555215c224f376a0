"""Message that carries the owner's orders. docs/wire.md lists its number and remaining properties."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from protocols.fields import Message
from swarmnet.run.owner_orders import ORDER_LIMIT


class OrderUpdate(Message, frozen=True, tag=60):
    """The newest order that the sender knows; sent when a link opens and when a newer order arrives. An order
    is verified from its own signature, so it is accepted even before `Hello`."""

    before_hello: ClassVar[bool] = True
    order: Annotated[bytes, Meta(max_length=ORDER_LIMIT)]
    """The owner's signed envelope (protocols/signed/orders.py)."""
