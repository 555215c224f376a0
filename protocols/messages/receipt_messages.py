"""Message that carries a receipt: a peer's signed statement that another peer's contributions were settled.

See table.py and docs/wire.md for the message numbers and other properties.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from protocols.fields import Message
from protocols.signed.signed_receipts import RECEIPT_LIMIT


class ReceiptMessage(Message, frozen=True, tag=70):
    """Signed statement about those of the receiver's contributions that the sender saw settle. It needs no
    reply."""

    kind: ClassVar[str] = "update"
    receipt: Annotated[bytes, Meta(max_length=120 + RECEIPT_LIMIT)]
    """An envelope around a `ReceiptBody` (protocols/signed/signed_receipts.py). The envelope's round is
    the last round."""
