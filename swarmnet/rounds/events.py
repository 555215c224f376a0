"""What happens to a group's rounds, and what `GroupRounds` asks its caller to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.history import SettledSet
from swarmnet.rounds.result_table import Table
from swarmnet.run.rates import Rates


@dataclass(frozen=True, slots=True)
class Reference:
    """Names one contribution; `size` in bytes, envelope included."""

    round: int
    peer: PeerId
    id: ContributionId
    size: int


Sets = Mapping[int, tuple[Reference, ...]]
"""Round -> the whole set that it settled with, which may be empty."""


@dataclass(frozen=True, slots=True)
class OpenSet:
    """What a peer holds of a round that it has closed."""

    round: int
    gathered: int
    """Level of "what is made for it is made" around the peer (settlement.py); 0: not here yet."""
    sealed: int
    """Level of "has sealed this set"; 0: it may still make something for it."""
    count: int
    digest: bytes


# -- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Committed:
    """A microbatch's gradient was added here."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Contributed:
    """The answer to MakeContribution, or to Reduce where there are reducers; None: nothing could be made (the
    gradient was not finite, no slice came)."""

    round: int
    reference: Reference | None
    table: Table | None = None
    """Of a result."""


@dataclass(frozen=True, slots=True)
class Sliced:
    """Where there are reducers, the answer to MakeContribution: it is on its way to them, under that name."""

    round: int
    id: ContributionId
    reducers: tuple[PeerId, ...] = ()
    """By shard."""


@dataclass(frozen=True, slots=True)
class SlicesArrived:
    """`peer` has sent its slices of a round, verified by the caller and kept there, or a word that it has
    none."""

    peer: PeerId
    round: int
    has_slices: bool


@dataclass(frozen=True, slots=True)
class ProgressArrived:
    peer: PeerId
    round: int
    tokens: int
    contributed: frozenset[int]
    settled: int
    in_step: bool
    anchor_round: int
    anchor: bytes
    """The value of its chain of settled sets (branches.Chain) after `anchor_round`."""
    sets: tuple[OpenSet, ...]
    """What it holds of every round after `anchor_round` and before `round`."""


@dataclass(frozen=True, slots=True)
class HistorySigned:
    """`peer` has put its name to a history, of which the chain has this value after `round`. Verified by the
    caller; from anybody."""

    peer: PeerId
    round: int
    value: bytes


@dataclass(frozen=True, slots=True)
class ChainArrived:
    """The answer to AskChain: settled sets from `first` on, and the chain's value before them."""

    peer: PeerId
    first: int
    before: bytes
    sets: tuple[SettledSet, ...]


@dataclass(frozen=True, slots=True)
class ChainAsked:
    peer: PeerId
    last: int


@dataclass(frozen=True, slots=True)
class Announced:
    """`peer` holds these; for the rounds in `complete`, settled there, they are the whole sets."""

    peer: PeerId
    references: tuple[Reference, ...]
    complete: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ContributionArrived:
    """`peer` sent it; its maker is `reference.peer`. Signature and payload are already checked."""

    peer: PeerId
    reference: Reference
    table: Table | None = None
    """Of a result."""


@dataclass(frozen=True, slots=True)
class ResultRead:
    """Who is in a result of a round that has settled: it came because it was asked for (Want)."""

    id: ContributionId
    table: Table


@dataclass(frozen=True, slots=True)
class StrangersNamed:
    """A result came, and names contributors that do not belong to the group, as far as this peer knows."""

    peer: PeerId
    """That sent it."""
    reference: Reference
    contributors: tuple[PeerId, ...]
    """That are no members."""


@dataclass(frozen=True, slots=True)
class IdsAsked:
    peer: PeerId
    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NeighbourJoined:
    """A link to a peer of the group stands."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class NeighbourLeft:
    peer: PeerId
    released: bool = False
    """It is there still: both sides have nearer neighbours now (membership/overlay.py)."""


@dataclass(frozen=True, slots=True)
class GroupCounted:
    """So many peers are known of the group, this one included."""

    peers: int
    members: frozenset[PeerId] = frozenset()
    """Those of them that take part, besides this one: reducers are drawn among them."""


@dataclass(frozen=True, slots=True)
class RatesOrdered:
    """The run's owner has the learning rate changed: all that holds now."""

    rates: Rates


@dataclass(frozen=True, slots=True)
class EndOrdered:
    """The run's owner has it end: this peer closes no later round on its own. None: it does not end."""

    last: int | None


@dataclass(frozen=True, slots=True)
class StoodStill:
    """The process did not run for so long, and the caller's clock left that out: others may have gone on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Convicted:
    """There is proof that this peer has lied, or it has lost its standing: nothing that it makes for round
    `first` and later ones counts (audits.py)."""

    peer: PeerId
    first: int


@dataclass(frozen=True, slots=True)
class Unanswered:
    """This reducer was asked in `round` for the slices of a result, and did not give them."""

    peer: PeerId
    round: int


@dataclass(frozen=True, slots=True)
class Leave:
    """This peer is about to go: contribute what is gathered."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but time has passed."""


Event = (
    Committed | Contributed | Sliced | SlicesArrived | ResultRead | ProgressArrived
    | HistorySigned | ChainArrived | ChainAsked | Announced | ContributionArrived
    | IdsAsked | NeighbourJoined | NeighbourLeft | GroupCounted | RatesOrdered
    | EndOrdered | StoodStill | Convicted | Unanswered | StrangersNamed | Leave | Tick
)  # fmt: skip


# -- effects --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MakeContribution:
    """Compress the gradient gathered so far, sign it, and come back with Contributed."""

    round: int
    tokens: int
    reducers: tuple[PeerId, ...] = ()
    """To whom its slices go, by shard; empty: everybody hears all of it. Come back with Sliced then."""


@dataclass(frozen=True, slots=True)
class SayNothing:
    """Tell these that they need not wait for slices of this peer."""

    round: int
    reducers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Add up the slices of a round that came, sign the result, and come back with Contributed."""

    round: int


@dataclass(frozen=True, slots=True)
class AddContribution:
    """It belongs to the round's set now; if the round is applied already, this corrects."""

    reference: Reference


@dataclass(frozen=True, slots=True)
class RemoveContribution:
    """It leaves the round's set: a smaller id of the same peer takes its place (AddContribution follows),
    or the group has settled without it."""

    round: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class RateRound:
    """The round's learning rate has this factor (run/rates.py); if it is applied already, this corrects."""

    round: int
    factor: int


@dataclass(frozen=True, slots=True)
class ApplyRound:
    round: int
    contributors: tuple[PeerId, ...]
    waited_seconds: float
    """From closing to applying."""


@dataclass(frozen=True, slots=True)
class SettleRound:
    round: int
    references: tuple[Reference, ...]
    """The final set, sorted by peer."""
    chain: bytes
    """The value of the chain of settled sets after it."""
    tokens: int | None = None
    """In all settled rounds up to this one; who has the contributions fills it in. None: not known."""
    makers: tuple[PeerId, ...] = ()
    """Who has contributed; who knows them all fills it in."""


@dataclass(frozen=True, slots=True)
class SendProgress:
    peers: tuple[PeerId, ...]
    round: int
    tokens: int
    contributed: tuple[int, ...]
    settled: int
    in_step: bool
    anchor_round: int
    anchor: bytes
    sets: tuple[OpenSet, ...]


@dataclass(frozen=True, slots=True)
class SendChain:
    peer: PeerId
    first: int
    before: bytes
    sets: tuple[SettledSet, ...]


@dataclass(frozen=True, slots=True)
class AskChain:
    """Ask for the sets up to round `last`: our histories parted before what Progress tells, or the draw of
    reducers follows from a round before the state that was fetched."""

    peer: PeerId
    last: int


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The group goes on without this own contribution: what it took from the momentum returns there, and
    is offered again with later rounds."""

    round: int
    id: ContributionId
    shards: tuple[int, ...] = ()
    """Only what it said of these; empty: all."""


@dataclass(frozen=True, slots=True)
class SendAnnounce:
    peers: tuple[PeerId, ...]
    references: tuple[Reference, ...]
    complete: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Want:
    peer: PeerId
    ids: tuple[ContributionId, ...]


@dataclass(frozen=True, slots=True)
class AskIds:
    peer: PeerId
    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resynchronise:
    """Contributions alone do not lead on: fetch the state from `peers`."""

    peers: tuple[PeerId, ...]
    reason: str
    fork_round: int | None = None
    """The first round of the own history that is given up for theirs; None: only behind."""
    exact: bool = True
    """Whether the histories part at `fork_round`, and not somewhere before it."""


@dataclass(frozen=True, slots=True)
class SignHistory:
    """Put the own name to what settled last, and pass on what others have put theirs to."""

    forked: tuple[PeerId, ...]
    """Who has another history."""


OfReducers = Sliced | SlicesArrived | ResultRead | Unanswered | Convicted | StrangersNamed
Effect = (
    MakeContribution | SayNothing | Reduce
    | AddContribution | RemoveContribution | RateRound | ApplyRound | SettleRound
    | SendProgress | SendChain | AskChain | GiveBack | SendAnnounce | Want | AskIds
    | Resynchronise | SignHistory
)  # fmt: skip
