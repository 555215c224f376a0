"""What the rounds request from the compute thread, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.events import (
    ApplyRound,
    MakeContribution,
    RateRound,
    Reference,
    RemoveContribution,
    RestoreToMomentum,
    SettleRound,
)
from swarmnet.rounds.result_table import Contributor, Table, TagKey


@dataclass(frozen=True, slots=True)
class DecodeContribution:
    round: int
    peer: PeerId
    payload: bytes


@dataclass(frozen=True, slots=True)
class ContributionReady:
    """A contribution; it has no data if there was no gradient, or one that is not finite."""

    round: int
    data: bytes
    tokens: int
    id: ContributionId | None
    is_result: bool = False
    """Whether this is the result of contributions that this peer has reduced."""
    table: Table | None = None
    """The table of contributors, for a result."""
    signed: int = 0
    """For a result: length in bytes of its signed head, which names the rest. 0: all of it is signed."""


@dataclass(frozen=True, slots=True)
class SlicedContribution:
    """A contribution for reducers; it has no id if there was no gradient, or one that is not finite."""

    round: int
    reducers: tuple[PeerId, ...]
    """The reducer of each shard, by shard."""
    tokens: int
    head: bytes = b""
    """The signed head that is sent before the slices (protocols/signed/slices.py)."""
    slices: tuple[bytes, ...] = ()
    id: ContributionId | None = None
    grants: Mapping[PeerId, bytes] = field(default_factory=dict)
    """For each reducer, the signature that allows it to reduce these slices (protocols/signed/grants.py)."""

    def shards_of(self, reducer: PeerId) -> list[int]:
        """Return the shards whose slices go to this reducer, in order."""
        return [shard for shard, drawn in enumerate(self.reducers) if drawn == reducer]


@dataclass(frozen=True, slots=True)
class ReduceShards:
    """The slices of a round, by shard and contributor, that this peer reduces."""

    round: int
    slices: Mapping[int, Mapping[Contributor, bytes]]


@dataclass(frozen=True, slots=True)
class RoundSettled:
    round: int
    digest: bytes
    """`Replica.digest()` after the round, or NOT_HASHED."""
    chain: bytes
    references: tuple[Reference, ...]
    tokens: int | None = None
    """Tokens in all settled rounds up to this one; None if not known."""
    contributors: tuple[PeerId, ...] = ()
    """The contributors to the round, as far as they are known."""
    votes: Mapping[TagKey, bool] = field(default_factory=dict)
    """Whether the votes of each contributor that is known by now have weight; empty if all weigh the same."""


@dataclass(frozen=True, slots=True)
class ExpertChange:
    """Reported when this peer trains other experts, or when a group of experts lost or gained its peers."""

    round: int
    experts: range
    group: int
    holders: tuple[int, ...]
    """Number of peers that train each group."""


Operation = (
    MakeContribution
    | ReduceShards
    | DecodeContribution
    | RemoveContribution
    | RateRound
    | ApplyRound
    | SettleRound
    | RestoreToMomentum
)
Done = ContributionReady | SlicedContribution | RoundSettled | ExpertChange


def experts_line(took_up: ExpertChange) -> str:
    """Return a line for people about the experts that this peer trains."""
    first, last = took_up.experts[0], took_up.experts[-1]
    which = f"expert {first}" if first == last else f"experts {first} to {last}"
    counts = ", ".join(map(str, took_up.holders))
    line = f"trains {which} of each layer; peers of each group of experts: {counts}"
    others = ((group, count) for group, count in enumerate(took_up.holders) if group != took_up.group)
    alone = [str(group) for group, count in others if not count]
    if not alone:
        return line
    return f"{line}; no peer trains group {' and '.join(alone)}: it stays as it is until one does"
