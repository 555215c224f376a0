"""How the contributions of a group reach its peers: each peer gets each of them, or reducers get slices.

A peer sends its own slices to reducers, and collects those that it reduces (swarmnet/rounds/reducing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from peers.compute.executor import Compute
from peers.network.message_router import MessageRouter, handles
from peers.network.peer_links import PeerLinks
from peers.telemetry import log_events
from peers.worker.rounds.audit_path import AuditPath, StoredProof
from peers.worker.rounds.operations import ContributionReady, Operation, ReduceShards, SlicedContribution
from peers.worker.rounds.stored import Opened
from peers.worker.rounds.update_compute import UpdateWork
from protocols.errors import BadSignature, Malformed, WireError
from protocols.messages.table import Slices
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope
from protocols.signed.grants import Reduction, contributors_of, grant_of, require_grant, require_grants
from protocols.signed.identity import SIGNATURE_BYTES
from protocols.signed.slices import head_bytes, open_slices
from protocols.signed.token_count import tokens_in
from swarmnet.identifiers import PeerId
from swarmnet.optimizer.method import ContributionError, ReducedMethod
from swarmnet.rounds import events
from swarmnet.rounds.audits import Audits, Name
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.reducing import ReductionSchedule
from swarmnet.rounds.result_table import MAX_CONTRIBUTORS, Contributor, Table, class_of, tag_of
from swarmnet.rounds.upload_meter import measured_uploads, short_tag

Kept = dict[int, dict[Contributor, bytes]]
"""Slices by shard, then by contributor."""


@dataclass(eq=False, kw_only=True)
class AllGather:
    """The form for runs without reducers. `ReducerPath` is the other one."""

    work: UpdateWork
    rounds: GroupRounds
    neighbourhood: PeerLinks
    feed: Callable[[events.Event], None]
    """Passes an event to `rounds` and carries out its effects."""
    refuse: Callable[[PeerId, str, str], None]
    """Records a rejected message."""

    def start(self) -> None:
        """Report what was known before the rounds start."""

    @property
    def evidence(self) -> dict[Name, StoredProof]:
        """What other peers may request about results that this peer has reduced."""
        return {}

    def report_uploads(self) -> bytes:
        """Return what this peer's next record reports of the uploads of others. Unused without reducers."""
        return b""

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

    def register(self, router: MessageRouter) -> None:
        """Handle messages about slices from now on."""
        for service in (ReducerPath, AuditPath):
            router.refuse(service, self._refuse_slices)

    def _refuse_slices(self, peer: PeerId) -> None:
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


@dataclass(eq=False, kw_only=True)
class ReducerPath(AllGather):
    """The form of the exchange in which each peer sends each slice of its contribution to one reducer."""

    reduced: ReducedMethod
    reducing: ReductionSchedule
    audits: AuditPath
    count: Callable[[str], None]
    """Counts a received contribution by its outcome."""
    leave: Callable[[PeerId], None]
    """Called when a linked peer is no neighbour any more."""
    is_member: Callable[[PeerId], bool]
    """Returns whether a peer belongs to the group."""
    log_event: log_events.LogEvent
    kept: dict[int, Kept] = field(default_factory=dict, init=False)
    """Slices for this peer to reduce, by round."""
    _heads: dict[int, dict[Contributor, bytes]] = field(default_factory=dict, init=False)
    """The signed heads of these slices, by round."""
    _reducing: dict[int, Kept] = field(default_factory=dict, init=False)
    _reported: bytes = field(default=b"", init=False)
    """What this peer's newest record reports of the uploads of others. It draws by the same as they do."""

    def start(self) -> None:
        for liar, first in self.audits.audits.convicted.items():
            self.feed(events.Convicted(liar, first))

    @property
    def evidence(self) -> dict[Name, StoredProof]:
        return self.audits.kept

    def report_uploads(self) -> bytes:
        self._reported = self.rounds.pulls.meter.reports(self.neighbourhood.clock.time())
        return self._reported

    def close(self) -> None:
        self.audits.close()

    def take_over(self, old: AllGather) -> None:
        self.audits.kept = old.evidence

    def left(self, peer: PeerId) -> None:
        self.audits.left(peer)

    def counted(self, peers: int) -> None:
        """Draw reducers among the group's active peers, and keep as neighbours those that share rounds."""
        rounds, reducing, stage = self.rounds, self.reducing, self.work.stage
        membership, me = self.neighbourhood.membership, self.rounds.me
        members, candidates = frozenset((*membership.active(stage), me)), membership.candidates()
        others = {peer: membership.peers[peer] for peer in members.union(candidates) - {me}}
        reports = frozenset((peer, others[peer].uploads_seen) for peer in members - {me})
        measured = measured_uploads(reports | {(me, self._reported)})
        classes = {me: class_of(membership.upload, measured.get(short_tag(me), inf), membership.is_helper)}
        for peer, known in others.items():
            classes[peer] = class_of(known.upload, measured.get(short_tag(peer), inf), known.is_helper)
        of_members = {peer: classes[peer] for peer in members}
        if (peers, members, of_members) != (rounds.open_round.peers, reducing.members, reducing.classes):
            self.feed(events.GroupSizeChanged(peers, members, of_members))
        if rounds.agreement.hops > 1:  # Otherwise all are linked anyway.
            membership.reduces(reducing.soon(rounds.current, candidates, classes))
        for peer in self.neighbourhood.linked(stage):
            if membership.shares_rounds(peer) and peer not in rounds.neighbours:
                self.feed(events.NeighbourJoined(peer))
            elif peer in rounds.neighbours and not membership.shares_rounds(peer):
                self.leave(peer)  # From now on its link carries only slices.
        self.audits.look()

    def register(self, router: MessageRouter) -> None:
        router.add(self)
        has_weight = self.rounds.admission.has_weight
        router.add(self.audits, accepts=lambda peer: has_weight(peer, self.rounds.current))

    def carry_out(self, effect: events.SendEmptyNotice | events.Reduce) -> Iterable[Operation]:
        match effect:
            case events.SendEmptyNotice(round, reducers):
                self.say_nothing(round, reducers)
                return ()
            case events.Reduce(round):
                return (self.add_up(round),)

    def has_size(self, reference: events.Reference) -> bool:
        return 0 < reference.size - ENVELOPE_BYTES <= self.reduced.longest_result

    def contributors(self, references: Sequence[events.Reference]) -> tuple[PeerId, ...]:
        tags = self.rounds.offers.contributors(references)
        known = (self.rounds.me, *self.neighbourhood.known())
        return tuple(peer for peer in known if tag_of(peer) in tags)

    def count_contributors(self, applied: events.ApplyRound) -> int:
        state = self.rounds.rounds.get(applied.round)
        results = tuple(state.held.values()) if state is not None else ()
        return len(self.rounds.offers.contributors(results))

    def open(self, data: bytes) -> Opened:
        """Verify a result. Only its head is signed, which names the rest by its digest. Raises WireError."""
        try:
            table, length = self.reduced.head(data[ENVELOPE_BYTES:])
        except ContributionError as error:
            raise Malformed(str(error)) from None
        signed = ENVELOPE_BYTES + length
        return replace(self._opened(data, data[:signed]), table=table, signed=signed)

    def reads(self, opened: Opened) -> bool:
        identity = opened.reference.id
        if opened.table is None or not self.rounds.offers.wants(identity):
            return False
        self.feed(events.ResultRead(identity, opened.table))
        return True

    def may_enter(self, peer: PeerId, opened: Opened) -> bool:
        """Return whether all contributors of a result belong to the group; otherwise it may wait for them.
        Raises as `require_grants`."""
        table, reference = opened.table or Table({}), opened.reference
        strangers = tuple(one for one in contributors_of(table) if not self.is_member(one))
        if strangers:
            self.feed(events.UnknownPeersNamed(peer, reference, strangers))
        if strangers and not self.rounds.takes(reference):
            return False
        require_grants(table, Reduction(self.work.run_id, self.work.stage, reference.round, reference.peer))
        return True

    def accepted(self, opened: Opened, body: bytes) -> None:
        if opened.table is not None:
            self.audits.came(opened.reference, body, opened.table)

    def say_nothing(self, round: int, reducers: Sequence[PeerId]) -> None:
        for peer in reducers:
            self.neighbourhood.post(peer, "group", Slices(round, []))

    def was_cut(self, cut: SlicedContribution) -> None:
        """Send each slice of the own contribution to its reducer."""
        others = sorted(set(cut.reducers) - {self.rounds.me}, key=lambda peer: (peer < self.rounds.me, peer))
        if cut.id is None:
            self.say_nothing(cut.round, others)
            self.feed(events.SlicesArrived(self.rounds.me, cut.round, False))
            return
        self.feed(events.SlicesSent(cut.round, cut.id, cut.reducers))
        for peer in others:  # Each peer starts with a different reducer.
            shards = cut.shards_of(peer)
            body = b"".join([cut.grants[peer], cut.head, *(cut.slices[shard] for shard in shards)])
            self.neighbourhood.post(peer, "group", Slices(cut.round, shards), body)
        mine = {shard: cut.slices[shard] for shard in cut.shards_of(self.rounds.me)}
        if mine:
            grant = grant_of(self.rounds.me, cut.grants[self.rounds.me])
            self._keep(cut.round, Contributor.of(self.rounds.me, cut.id, cut.tokens, grant), cut.head, mine)
        self.feed(events.SlicesArrived(self.rounds.me, cut.round, bool(mine)))

    @handles(Slices)
    def take(self, peer: PeerId, message: Slices, body: bytes) -> None:
        """Accept slices of a contribution that this peer reduces. Raises BadSignature."""
        round, shards = message.round, message.shards
        if not shards and not body:
            self.feed(events.SlicesArrived(peer, round, False))
            return
        if not self.rounds.takes_slices(peer, round) or not self._has_room(round, peer):
            self.count("not_counted")
            return
        signature, evidence = body[:SIGNATURE_BYTES], body[SIGNATURE_BYTES:]
        reduction = Reduction(self.work.run_id, self.work.stage, round, self.rounds.me)
        try:
            slices = open_slices(evidence, self.work.run_id, shards, self.reduced.slice_bytes)
            if (slices.sender, slices.stage, slices.round) != (peer, self.work.stage, round):
                raise Malformed("slices by another signer than their sender, or for another round")
            for shard, data in slices.data.items():
                self.reduced.check_slice(shard, data)
            require_grant(signature, reduction, slices)
        except BadSignature as error:
            self.count(error.code)
            raise
        except (WireError, ContributionError) as error:
            self.refuse(peer, getattr(error, "code", "malformed"), str(error))
            return
        head = evidence[: head_bytes(len(self.reduced.slice_bytes))]
        grant = grant_of(peer, signature)
        self._keep(round, Contributor.of(peer, slices.id, slices.tokens, grant), head, slices.data)
        # A neighbour rejects a result that names a peer unknown to it.
        self.neighbourhood.introduce([peer], tuple(self.rounds.neighbours))
        self.feed(events.SlicesArrived(peer, round, True))

    def add_up(self, round: int) -> ReduceShards:
        """Return the slices to sum now. Those of peers that the owner has rolled back are left out; rounds
        that are summed already keep theirs (docs/decisions/0053-roll-back.md)."""
        gone = {tag_of(peer) for peer in self.rounds.rolled_back}
        slices = {
            shard: {contributor: data for contributor, data in of.items() if contributor.peer not in gone}
            for shard, of in self.kept.pop(round, {}).items()
        }
        self._reducing[round] = {shard: of for shard, of in slices.items() if of}
        return ReduceShards(round, self._reducing[round])

    def was_added_up(self, made: ContributionReady) -> None:
        """Called with the finished result: from now on peers can request its slices."""
        added, heads = self._reducing.pop(made.round, {}), self._heads.pop(made.round, {})
        if made.id is None or made.table is None:
            return
        shards, contributors = sorted(made.table.shards), len(made.table.contributors)
        self.log_event(log_events.Reduced(made.round, made.id.hex(), shards, contributors))
        for shard, held in added.items():
            bodies = [heads[one] + held[one] for one in sorted(held)]
            self.audits.keep((made.id, shard), made.round, bodies)

    def settled(self, round: int) -> None:
        self.audits.settled(round)
        for kept in (self.kept, self._heads, self._reducing):
            kept.pop(round, None)

    def _has_room(self, round: int, peer: PeerId) -> bool:
        """Return whether another contributor fits into this peer's result table, which has 1024 entries, each
        with its own tag."""
        tags = {contributor.peer for contributor in self._heads.get(round, ())}
        return len(tags) < MAX_CONTRIBUTORS and tag_of(peer) not in tags

    def _keep(self, round: int, contributor: Contributor, head: bytes, slices: Mapping[int, bytes]) -> None:
        kept = self.kept.setdefault(round, {})
        for shard, data in slices.items():
            kept.setdefault(shard, {})[contributor] = data
        self._heads.setdefault(round, {})[contributor] = head


def exchange_for(
    *,
    audits: Audits,
    work: UpdateWork,
    rounds: GroupRounds,
    compute: Compute,
    neighbourhood: PeerLinks,
    feed: Callable[[events.Event], None],
    refuse: Callable[[PeerId, str, str], None],
    count: Callable[[str], None],
    leave: Callable[[PeerId], None],
    is_member: Callable[[PeerId], bool],
    log_event: log_events.LogEvent,
    folder: Path | None,
) -> AllGather:
    """Return the form of the exchange that the method needs. Arguments as for `ReducerPath` and
    `AuditPath`."""
    reduced = work.method.reduced
    if reduced is None or rounds.reducing is None:
        return AllGather(work=work, rounds=rounds, neighbourhood=neighbourhood, feed=feed, refuse=refuse)
    auditing = AuditPath(
        audits=audits,
        reduced=reduced,
        work=work,
        rounds=rounds,
        compute=compute,
        neighbourhood=neighbourhood,
        feed=feed,
        log_event=log_event,
        folder=folder,
    )
    return ReducerPath(
        reduced=reduced,
        reducing=rounds.reducing,
        audits=auditing,
        work=work,
        rounds=rounds,
        neighbourhood=neighbourhood,
        feed=feed,
        refuse=refuse,
        count=count,
        leave=leave,
        is_member=is_member,
        log_event=log_event,
    )
