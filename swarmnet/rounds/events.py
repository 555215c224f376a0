"""Input events of `GroupRounds`, and the effects that it returns for its caller to carry out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.history import SettledSet
from swarmnet.rounds.result_table import ReducerClass, Table, TagKey
from swarmnet.run.rates import Rates


@dataclass(frozen=True, slots=True)
class Reference:
    """Names one contribution. `size` is in bytes, envelope included."""

    round: int
    peer: PeerId
    id: ContributionId
    size: int


Sets = Mapping[int, tuple[Reference, ...]]
"""Round -> the complete set with which it settled, which may be empty."""


@dataclass(frozen=True, slots=True)
class OpenSet:
    """What a peer holds of a round that it has closed, as its Progress reports it."""

    round: int
    gathered: int
    """Level of "all nearby contributions are held here" (`FinalityRules.gathered`); 0: not yet."""
    sealed: int
    """Level of "nearby peers have sealed this set" (`FinalityRules.sealed`); 0: not sealed here."""
    count: int
    digest: bytes


# -- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradientAccumulated:
    """The gradient of a microbatch of `tokens` tokens was added to this peer's gradient sum."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Contributed:
    """Answers `MakeContribution`, or `Reduce` in runs with reducers. `reference` is None if nothing could be
    made: the gradient was not finite, or no slice arrived."""

    round: int
    reference: Reference | None
    table: Table | None = None
    """Contents of the result; None for a contribution."""


@dataclass(frozen=True, slots=True)
class SlicesSent:
    """Answers `MakeContribution` in runs with reducers: the slices of contribution `id` are being sent."""

    round: int
    id: ContributionId
    reducers: tuple[PeerId, ...] = ()
    """The reducer of each shard."""


@dataclass(frozen=True, slots=True)
class SlicesArrived:
    """`peer` has sent its slices of a round, which the caller verified and stored, or a notice of none."""

    peer: PeerId
    round: int
    has_slices: bool


@dataclass(frozen=True, slots=True)
class ProgressArrived:
    """Progress of a neighbour: how far it is, and which sets it holds."""

    peer: PeerId
    round: int
    tokens: int
    contributed: frozenset[int]
    settled: int
    in_step: bool
    anchor_round: int
    anchor: bytes
    """The neighbour's chain value (`history.Chain`) after `anchor_round`."""
    sets: tuple[OpenSet, ...]
    """Its sets of every round after `anchor_round` and before `round`."""


@dataclass(frozen=True, slots=True)
class ChainSigned:
    """`peer` has signed that its chain has this value after `round`. Verified; any peer may relay."""

    peer: PeerId
    round: int
    value: bytes


@dataclass(frozen=True, slots=True)
class ChainArrived:
    """Answers `RequestChain`: settled sets of the rounds from `first` on, and the chain value before them."""

    peer: PeerId
    first: int
    before: bytes
    sets: tuple[SettledSet, ...]


@dataclass(frozen=True, slots=True)
class ChainAsked:
    """A neighbour requests this peer's settled sets up to round `last`."""

    peer: PeerId
    last: int


@dataclass(frozen=True, slots=True)
class Announced:
    """`peer` announces contributions that it holds; for the settled rounds in `complete`, the whole sets."""

    peer: PeerId
    references: tuple[Reference, ...]
    complete: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ContributionArrived:
    """A contribution of `reference.peer` arrived from `peer`. The caller checked signature and payload."""

    peer: PeerId
    reference: Reference
    table: Table | None = None
    """Contents of the result; None for a contribution."""


@dataclass(frozen=True, slots=True)
class ResultRead:
    """Contents of a result of a settled round, which was requested with `RequestContributions`."""

    id: ContributionId
    table: Table


@dataclass(frozen=True, slots=True)
class UnknownPeersNamed:
    """A result arrived that names contributors which are no known members of the group."""

    peer: PeerId
    """The sender of the result."""
    reference: Reference
    contributors: tuple[PeerId, ...]
    """The contributors that are no members."""


@dataclass(frozen=True, slots=True)
class IdsAsked:
    """A neighbour requests the ids of the contributions that this peer holds for these rounds."""

    peer: PeerId
    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NeighbourJoined:
    """A link to a peer of the group was established."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class NeighbourLeft:
    """A link to a peer of the group ended."""

    peer: PeerId
    released: bool = False
    """True if the peer is still alive and both sides now have nearer neighbours (membership/overlay.py)."""


@dataclass(frozen=True, slots=True)
class GroupSizeChanged:
    """The known size of the group changed."""

    peers: int
    """Known peers of the group, this one included."""
    members: frozenset[PeerId] = frozenset()
    """The active peers of the group without this one. Reducers are drawn among them."""
    classes: Mapping[PeerId, ReducerClass] = field(default_factory=dict)
    """What these peers, and this one, offer as reducers; peers that offer nothing special are left out."""


@dataclass(frozen=True, slots=True)
class VotesWeighed:
    """A round has settled, and these contributors' votes have weight or none by now (open_round.py)."""

    votes: Mapping[TagKey, bool]


@dataclass(frozen=True, slots=True)
class RatesOrdered:
    """The run's owner has changed the learning rate. `rates` lists all factors that apply now."""

    rates: Rates


@dataclass(frozen=True, slots=True)
class EndOrdered:
    """The run's owner ends the run: this peer closes no round after `last` on its own. None: no end."""

    last: int | None


@dataclass(frozen=True, slots=True)
class ProcessSuspended:
    """The process was suspended, which the caller's clock left out. Other peers may have continued."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Convicted:
    """Contributions of `peer` for round `first` and later ones have no weight: it is proven to be faulty, or
    it has lost its reputation (audits.py)."""

    peer: PeerId
    first: int


@dataclass(frozen=True, slots=True)
class RollbackOrdered:
    """The run's owner takes the contributions of these peers out of all open rounds. They replace the peers
    of earlier orders."""

    peers: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A reducer was asked in `round` for the slices of a result, and did not send them."""

    peer: PeerId
    round: int


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """This peer is about to leave the group and must contribute the gradient that it has accumulated."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The deadline of `GroupRounds.next_deadline` has passed."""


Event = (
    GradientAccumulated
    | Contributed
    | SlicesSent
    | SlicesArrived
    | ResultRead
    | ProgressArrived
    | ChainSigned
    | ChainArrived
    | ChainAsked
    | Announced
    | ContributionArrived
    | IdsAsked
    | NeighbourJoined
    | NeighbourLeft
    | GroupSizeChanged
    | VotesWeighed
    | RatesOrdered
    | RollbackOrdered
    | EndOrdered
    | ProcessSuspended
    | Convicted
    | Unanswered
    | UnknownPeersNamed
    | LeaveGroup
    | TimePassed
)


# -- effects --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MakeContribution:
    """Compress and sign the gathered gradient, then report `Contributed` (`SlicesSent` if there are
    reducers)."""

    round: int
    tokens: int
    reducers: tuple[PeerId, ...] = ()
    """The reducer of each shard; empty: the contribution is sent whole to all peers of the group."""


@dataclass(frozen=True, slots=True)
class SendEmptyNotice:
    """Notify the reducers of a round that this peer sends no slices."""

    round: int
    reducers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the slices of a round that have arrived, sign the result, then report `Contributed`."""

    round: int


@dataclass(frozen=True, slots=True)
class AddContribution:
    """Add a contribution to the round's set. If the round is already applied, correct the weights."""

    reference: Reference


@dataclass(frozen=True, slots=True)
class RemoveContribution:
    """Remove a peer's contribution from the round's set. Either the group has settled without it, or a
    smaller id of the same peer replaces it (`AddContribution` follows)."""

    round: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class RateRound:
    """Set the factor of the round's learning rate (run/rates.py). Correct the weights if it is applied."""

    round: int
    factor: int


@dataclass(frozen=True, slots=True)
class ApplyRound:
    """Apply the step of the round's set to the live weights."""

    round: int
    contributors: tuple[PeerId, ...]
    waited_seconds: float
    """Seconds from closing the round to applying it."""


@dataclass(frozen=True, slots=True)
class SettleRound:
    """Settle the round: its set is final."""

    round: int
    references: tuple[Reference, ...]
    """The final set, sorted by peer."""
    chain: bytes
    """The chain value after this round."""
    tokens: int | None = None
    """Tokens in all settled rounds up to this one, filled in by the caller; None: not known."""
    contributors: tuple[PeerId, ...] = ()
    """All contributors of the round. A caller that knows them fills it in."""


@dataclass(frozen=True, slots=True)
class SendProgress:
    """Send Progress to these neighbours (the fields are those of `ProgressArrived`)."""

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
    """Send settled sets of the rounds from `first` on, and the chain value before them."""

    peer: PeerId
    first: int
    before: bytes
    sets: tuple[SettledSet, ...]


@dataclass(frozen=True, slots=True)
class RequestChain:
    """Request the settled sets up to round `last`. They show where branches fork if that lies before the sets
    in Progress. A draw of reducers may also depend on a round before the fetched state."""

    peer: PeerId
    last: int


@dataclass(frozen=True, slots=True)
class RestoreToMomentum:
    """Add an own contribution that was not settled back to the momentum, so that later rounds send it."""

    round: int
    id: ContributionId
    shards: tuple[int, ...] = ()
    """The shards whose values are returned; empty: all."""


@dataclass(frozen=True, slots=True)
class SendAnnounce:
    """Announce contributions to these peers (the fields are those of `Announced`)."""

    peers: tuple[PeerId, ...]
    references: tuple[Reference, ...]
    complete: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestContributions:
    """Request these contributions from `peer`."""

    peer: PeerId
    ids: tuple[ContributionId, ...]


@dataclass(frozen=True, slots=True)
class RequestIds:
    """Request from `peer` the ids of the contributions that it holds for these rounds."""

    peer: PeerId
    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FetchGroupState:
    """Fetch the state of the group from `peers`, because this peer cannot catch up by contributions alone."""

    peers: tuple[PeerId, ...]
    reason: str
    fork_round: int | None = None
    """The first round of this peer's branch that is given up for theirs; None: this peer is only behind."""
    exact: bool = True
    """True if the branches fork exactly at `fork_round`; False if they fork in an earlier round."""


@dataclass(frozen=True, slots=True)
class SignChain:
    """Sign this peer's newest chain value, and relay the signed values of other peers."""

    forked: tuple[PeerId, ...]
    """The neighbours on another branch."""


OfReducers = SlicesSent | SlicesArrived | ResultRead | Unanswered | Convicted | UnknownPeersNamed
Effect = (
    MakeContribution
    | SendEmptyNotice
    | Reduce
    | AddContribution
    | RemoveContribution
    | RateRound
    | ApplyRound
    | SettleRound
    | SendProgress
    | SendChain
    | RequestChain
    | RestoreToMomentum
    | SendAnnounce
    | RequestContributions
    | RequestIds
    | FetchGroupState
    | SignChain
)
