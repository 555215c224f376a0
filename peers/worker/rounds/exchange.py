"""How the contributions of a group reach its peers, in the form in which each peer receives each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from peers.network.peer_links import PeerLinks
from peers.worker.rounds.operations import ContributionReady, Operation, SlicedContribution
from peers.worker.rounds.proofs import StoredProof
from peers.worker.rounds.stored import Opened
from peers.worker.rounds.update_compute import UpdateWork
from protocols.errors import Malformed
from protocols.messages.table import Message
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope
from protocols.signed.token_count import tokens_in
from swarmnet.identifiers import PeerId
from swarmnet.rounds import events
from swarmnet.rounds.audits import Name
from swarmnet.rounds.group_rounds import GroupRounds


class AllGather:
    """The form for runs without reducers. `ReducerPath` is the other one."""

    def __init__(
        self,
        *,
        work: UpdateWork,
        rounds: GroupRounds,
        neighbourhood: PeerLinks,
        feed: Callable[[events.Event], None],
        refuse: Callable[[PeerId, str, str], None],
    ) -> None:
        """`feed` passes an event to `rounds` and carries out its effects; `refuse` records a rejected
        message."""
        self.work = work
        self.rounds = rounds
        self.neighbourhood = neighbourhood
        self.me = neighbourhood.transport.peer
        self.feed = feed
        self.refuse = refuse

    def start(self) -> None:
        """Report what was known before the rounds start."""

    @property
    def evidence(self) -> dict[Name, StoredProof]:
        """What other peers may request about results that this peer has reduced."""
        return {}

    def close(self) -> None:
        """Stop sending."""

    def take_over(self, old: AllGather) -> None:
        """Take over the evidence of `old`."""

    def left(self, peer: PeerId) -> None:
        """Called when a neighbour has left."""

    def settled(self, round: int) -> None:
        """Called when a round has settled: forget what only open rounds need."""

    def counted(self, peers: int) -> None:
        """Called with the number of known peers of the group, including this one."""
        if peers != self.rounds.open_round.peers:
            self.feed(events.GroupSizeChanged(peers))

    def message(self, peer: PeerId, message: Message, body: bytes) -> None:
        """Handle a message about slices. Raises BadSignature."""
        reason = "a message about slices, but this run has no reducers (sync.topology: all-gather)"
        self.refuse(peer, "malformed", reason)

    # -- effects of the rounds, and results of the compute thread ---------------------------------------

    def carry_out(self, effect: events.SendEmptyNotice | events.Reduce) -> Iterable[Operation]:
        """Carry out what is decided in rounds with reducers; returns what remains for the compute thread."""
        raise AssertionError("in a run without reducers the rounds know of none")

    def was_cut(self, cut: SlicedContribution) -> None:
        """Send each slice of the own contribution to its reducer."""
        raise AssertionError("in a run without reducers no contribution is cut")

    def was_added_up(self, made: ContributionReady) -> None:
        """Called with the finished result: from now on peers can request its slices."""
        raise AssertionError("in a run without reducers no peer adds up slices")

    # -- contributions ----------------------------------------------------------------------------------

    def has_size(self, reference: events.Reference) -> bool:
        """Return whether a contribution can be as long as `reference` says."""
        return reference.size == ENVELOPE_BYTES + self.work.method.payload_bytes

    def contributors(self, references: Sequence[events.Reference]) -> tuple[PeerId, ...]:
        """Return the peers that contributed to a set, as far as they are known."""
        return tuple(reference.peer for reference in references)

    def count_contributors(self, applied: events.ApplyRound) -> int:
        """Return the number of peers that contributed to an applied round."""
        return len(applied.contributors)

    def open(self, data: bytes) -> Opened:
        """Verify a contribution to this stage. Raises WireError."""
        return self._opened(data, data)

    def _opened(self, data: bytes, signed: bytes) -> Opened:
        """Verify the part of a contribution that is signed. Raises WireError."""
        work = self.work
        longest = max(work.method.payload_bytes, len(signed))
        envelope = open_envelope(signed, work.run_id, EnvelopeKind.CONTRIBUTION, longest)
        if envelope.stage != work.stage:
            raise Malformed(f"a contribution to stage {envelope.stage}, this group holds {work.stage}")
        reference = events.Reference(envelope.round, envelope.sender, envelope.id, len(data))
        return Opened(reference, tokens_in(envelope.sequence) or 0)

    def reads(self, opened: Opened) -> bool:
        """Read a result that may include the own contribution; returns whether it was requested for that."""
        return False

    def may_enter(self, peer: PeerId, opened: Opened) -> bool:
        """Return whether a contribution that `peer` sent may enter its set now. Raises BadSignature."""
        return True

    def accepted(self, opened: Opened, body: bytes) -> None:
        """Called with a contribution that has entered its set."""
