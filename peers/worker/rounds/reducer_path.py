"""Move slices of contributions to and through reducers: send this peer's own slices, and collect the slices
that this peer reduces (swarmnet/rounds/reducing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from peers.network.message_router import MessageRouter, handles
from peers.network.peer_links import PeerLinks
from peers.telemetry import log_events
from peers.worker.rounds.audit_path import AuditPath
from peers.worker.rounds.update_compute import ContributionReady, ReduceShards, SlicedContribution, UpdateWork
from protocols.errors import BadSignature, Malformed, WireError
from protocols.messages.table import Slices
from protocols.signed.grants import Reduction, grant_of, require_grant
from protocols.signed.identity import SIGNATURE_BYTES
from protocols.signed.slices import head_bytes, open_slices
from swarmnet.identifiers import PeerId
from swarmnet.optimizer.method import ContributionError, ReducedMethod
from swarmnet.rounds import events
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.result_table import MAX_CONTRIBUTORS, Contributor, tag_of

Kept = dict[int, dict[Contributor, bytes]]
"""Slices by shard, then by contributor."""


class ReducerPath:
    def __init__(
        self,
        *,
        reduced: ReducedMethod,
        work: UpdateWork,
        rounds: GroupRounds,
        neighbourhood: PeerLinks,
        audits: AuditPath,
        feed: Callable[[events.Event], None],
        refuse: Callable[[PeerId, str, str], None],
        count: Callable[[str], None],
        log_event: log_events.LogEvent,
    ) -> None:
        """`feed` passes an event to `rounds` and carries out its effects; `refuse` and `count` record
        rejected slices."""
        self.reduced = reduced
        self.work = work
        self.rounds = rounds
        self.audits = audits
        self.neighbourhood = neighbourhood
        self.me = neighbourhood.transport.peer
        self.feed = feed
        self.refuse = refuse
        self.count = count
        self.log_event = log_event
        self.kept: dict[int, Kept] = {}
        """Slices for this peer to reduce, by round."""
        self._heads: dict[int, dict[Contributor, bytes]] = {}
        """The signed heads of these slices, by round."""
        self._reducing: dict[int, Kept] = {}

    def say_nothing(self, round: int, reducers: Sequence[PeerId]) -> None:
        for peer in reducers:
            self.neighbourhood.post(peer, "group", Slices(round, []))

    def was_cut(self, cut: SlicedContribution) -> None:
        """Send each slice of the own contribution to its reducer."""
        others = sorted(set(cut.reducers) - {self.me}, key=lambda peer: (peer < self.me, peer))
        if cut.id is None:
            self.say_nothing(cut.round, others)
            self.feed(events.SlicesArrived(self.me, cut.round, False))
            return
        self.feed(events.SlicesSent(cut.round, cut.id, cut.reducers))
        for peer in others:  # Each peer starts with a different reducer.
            shards = cut.shards_of(peer)
            body = b"".join([cut.grants[peer], cut.head, *(cut.slices[shard] for shard in shards)])
            self.neighbourhood.post(peer, "group", Slices(cut.round, shards), body)
        mine = {shard: cut.slices[shard] for shard in cut.shards_of(self.me)}
        if mine:
            grant = grant_of(self.me, cut.grants[self.me])
            self._keep(cut.round, Contributor.of(self.me, cut.id, cut.tokens, grant), cut.head, mine)
        self.feed(events.SlicesArrived(self.me, cut.round, bool(mine)))

    def register(self, router: MessageRouter) -> None:
        """Handle messages about slices from now on. Only group members may request or send evidence."""
        router.add(self)
        has_weight = self.rounds.has_weight
        router.add(self.audits, accepts=lambda peer: has_weight(peer, self.rounds.current))

    @handles(Slices)
    def _slices(self, peer: PeerId, message: Slices, body: bytes) -> None:
        """Accept slices of a contribution that this peer reduces. Raises BadSignature."""
        round, shards = message.round, message.shards
        if not shards and not body:
            self.feed(events.SlicesArrived(peer, round, False))
            return
        if not self.rounds.takes_slices(peer, round) or not self._has_room(round, peer):
            self.count("not_counted")
            return
        signature, evidence = body[:SIGNATURE_BYTES], body[SIGNATURE_BYTES:]
        reduction = Reduction(self.work.run_id, self.work.stage, round, self.me)
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
        self.neighbourhood.introduce(peer, tuple(self.rounds.neighbours))
        self.feed(events.SlicesArrived(peer, round, True))

    def add_up(self, round: int) -> ReduceShards:
        self._reducing[round] = self.kept.pop(round, {})
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
