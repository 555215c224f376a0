"""The rounds of a stage as a peer sees them before it has the stage's weights: it takes part in none."""

from __future__ import annotations

from typing import Literal

from peers.state.snapshot_store import NOT_BEGUN, RoundProgress
from peers.worker.rounds.round_counts import RoundCounts
from swarmnet.identifiers import PeerId
from swarmnet.rounds.events import Event
from swarmnet.rounds.own_contributions import NOTHING_PAST, RestartState
from swarmnet.run.rates import Rates


class NoGroup:
    """Stands for `GroupRounds`: no round has begun here."""

    current = 0
    settled = -1
    past_last = False


class NoRounds:
    """The null form of `RoundService`. It ignores what other peers send about rounds; they send it again."""

    has_weights: Literal[False] = False
    tokens = None

    def __init__(self) -> None:
        self.rounds = NoGroup()
        self.counts = RoundCounts()

    def linked(self, peer: PeerId) -> None:
        """Ignore the link: `RoundService` begins with the links that are open then."""

    def left(self, peer: PeerId, released: bool) -> None:
        """Ignore a peer that takes part in no round here."""

    def counted(self, peers: int) -> None:
        """Ignore the size of the group: `RoundService` begins with the newest."""

    def feed(self, event: Event) -> None:
        """Ignore the event: no round runs."""

    def committed(self, tokens: int) -> None:
        """Ignore tokens: without weights nothing was computed."""

    def ordered(self, rates: Rates) -> None:
        """Ignore the order: `RoundService` begins with the newest."""

    def roll_back(self, peers: frozenset[PeerId]) -> None:
        """Ignore the order, likewise."""

    def end_at(self, last: int | None) -> None:
        """Ignore the order, likewise."""

    def held_experts(self) -> None:
        """Return None: no experts are assigned yet."""

    def report_uploads(self) -> bytes:
        """Return no reports: nothing was measured yet."""
        return b""

    def progress(self) -> RoundProgress:
        return NOT_BEGUN

    def past(self, until: int) -> RestartState:
        return NOTHING_PAST

    def note_undecided(self) -> None:
        """Log nothing: there is no own contribution."""

    def close(self) -> None:
        """Close nothing."""
