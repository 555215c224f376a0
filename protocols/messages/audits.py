"""Messages about what reducers have added up, the slices behind a result, and who has lied about them; in a
run that audits work (`sync.audits`), about windows of it instead: `result` is the name of a window's last
commitment (swarmnet/audits/commitment.py) then, and `shard` says what else is asked for: 0 nothing, 1 what
was carried into the next window, 2 also what was contributed, of which no set holds anything."""

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
    is a lie, the signed result comes first. Of work: the signed commitments of the window in one body
    (protocols/signed/commitments.py), then in pieces as long as a contribution's moves what was carried into
    it, if anything was, and what else was asked for."""

    kind: ClassVar[str] = "audit"
    priority: ClassVar[int] = 1
    body: ClassVar[bool] = True
    result: Identifier
    shard: Number


class Worked(Message, frozen=True, tag=83):
    """A window of the sender's work is over: `result` names its last commitment, for `round`. Told to those
    who are to look into it, before anything of the sender counts."""

    kind: ClassVar[str] = "audit"
    round: RoundNumber
    result: Identifier


class Lied(Message, frozen=True, tag=82):
    """`peer` has made a result for `round` whose `shard` does not follow from its slices: the sender has the
    proof. Repeated once a second until the receiver says the same."""

    kind: ClassVar[str] = "audit"
    peer: Name
    round: RoundNumber
    result: Identifier
    shard: Number
