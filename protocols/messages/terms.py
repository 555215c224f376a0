"""What a receiver takes, and of whom: the longest body of each kind of message, and who has greeted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from protocols.messages.table import BODY_LIMIT, AnyMessage, Message
from swarmnet.identifiers import PeerId

Bodies = Mapping[type[Message], int]
"""Kinds of messages and the longest body of each, in bytes; of a kind that is not here: none."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How a receiver listens. Of who has not greeted it nothing but headers is taken, for a few seconds."""

    bodies: Bodies
    greeted: Callable[[PeerId], bool] = lambda peer: True
    """Whether a peer has greeted, or was dialled and may answer."""

    def limit(self, peer: PeerId, message: Message) -> int:
        """The longest body that a peer may send with this message."""
        return self.bodies.get(type(message), 0) if self.greeted(peer) else 0

    @property
    def longest(self) -> int:
        """Of all bodies that are taken."""
        return max(self.bodies.values(), default=0)


ANYTHING = Terms({kind: BODY_LIMIT for kind in get_args(AnyMessage) if kind.body})
"""Of who knows no run, as measurements and tests between own peers."""
