"""Receipts: a peer's signed word that another one's contributions are in the settled sets.

Their numbers and the rest of the table are in table.py and docs/wire.md.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from protocols.fields import Message
from protocols.signed.receipts import RECEIPT_LIMIT


class ReceiptIs(Message, frozen=True, tag=70):
    """What the sender has seen settle of the receiver's contributions, signed; needs no answer."""

    kind: ClassVar[str] = "update"
    receipt: Annotated[bytes, Meta(max_length=120 + RECEIPT_LIMIT)]
    """An envelope around a ReceiptBody (protocols/signed/receipts.py); its round is the last one."""
