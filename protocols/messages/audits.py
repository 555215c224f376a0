"""Messages about what reducers have summed: the slices behind a result, and proofs that a result is false."""

from __future__ import annotations

from typing import ClassVar

from protocols.fields import Identifier, Message, Name, Number, RoundNumber


class AskSlices(Message, frozen=True, tag=80):
    """The slices of one shard that went into a result: answered by as many Evidence, by the result's maker
    or by who has said (Lied) that they prove it false."""

    kind: ClassVar[str] = "audit"
    result: Identifier
    shard: Number


class Evidence(Message, frozen=True, tag=81):
    """Body: one slice with its signed head (protocols/signed/slices.py). From who has said that the result
    is a lie, the signed result comes first."""

    kind: ClassVar[str] = "audit"
    priority: ClassVar[int] = 1
    body: ClassVar[bool] = True
    result: Identifier
    shard: Number


class Lied(Message, frozen=True, tag=82):
    """`peer` has made a result for `round` whose `shard` does not follow from its slices: the sender has the
    proof. Repeated once a second until the receiver says the same."""

    kind: ClassVar[str] = "audit"
    peer: Name
    round: RoundNumber
    result: Identifier
    shard: Number
