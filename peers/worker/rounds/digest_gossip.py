"""Signed digests of settled weights: made every few rounds, sent to the group, kept next to the checkpoints.

A statement is an envelope with the chain value and the digest of the settled weights after a round.
Statements prove which snapshot a group agrees on, even after a restart of all peers. They also show a peer
that its own weights are wrong, so that it fetches the group's. While branches persist, peers sign more
statements, which show which peer is on which branch (swarmnet/rounds/fork_choice.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from peers.config.run_file import SignedManifest
from peers.network.peer_links import PeerLinks
from peers.state.checkpoint_file import DIGEST_BYTES, STATEMENT_BYTES, state_digest
from peers.state.snapshot_store import Weights
from peers.telemetry import log_events
from peers.worker.rounds.operations import RoundSettled
from protocols.errors import BadSignature, Malformed, WireError
from protocols.messages.table import MAX_STATEMENTS, Statements
from protocols.signed.envelope import EnvelopeKind, open_envelope, seal
from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId
from swarmnet.lineage import ERA_BYTES, NO_RETURN, Lineage, era_of
from swarmnet.rounds.events import FetchGroupState
from swarmnet.rounds.history import START
from swarmnet.snapshots.digest_votes import Root, SettledDigests, Statement

CHAINS_KEPT = 16
"""Rounds whose chain values are kept: a statement of another peer may be this many rounds old when it
arrives."""


class SignedDigests:
    def __init__(
        self,
        *,
        identity: Identity,
        signed: SignedManifest,
        stage: int,
        neighbourhood: PeerLinks,
        wrong: Callable[[FetchGroupState], None],
        heard: Callable[[Statement], None],
        log_event: log_events.LogEvent,
        lineage: Lineage = NO_RETURN,
    ) -> None:
        """Signs for every snapshot. `wrong` is called when the group's weights differ from this peer's, and
        `heard` with each new statement. Statements of other eras than the one of `lineage` do not count."""
        self.lineage = lineage
        self.identity = identity
        self.run_id = signed.run_id
        self.stage = stage
        self.every_rounds = signed.manifest.rounds.snapshot_interval
        self.neighbourhood = neighbourhood
        self.wrong = wrong
        self.heard = heard
        self.log_event = log_event
        self.digests = SettledDigests(identity.peer_id)
        self._signed: dict[Statement, bytes] = {}
        self._statements: dict[bytes, Statement] = {}
        self._logged: tuple[int, tuple[PeerId, ...]] = (-1, ())
        """The newest difference that was logged: round and peers."""
        self._last: tuple[int, bytes, bytes] | None = None
        """Round, chain value and digest of the newest settled round."""
        self._chains: dict[int, bytes] = {}
        """Chain values of the newest rounds here."""
        self._newest: dict[PeerId, dict[bool, bytes]] = {}
        """The newest statement of each peer, for any round: one on another branch (True) and one on this
        branch (False)."""

    def settled(self, settled: RoundSettled) -> None:
        """Called when a round has settled here: sign its digest if that is due."""
        self._last = settled.round, settled.chain, settled.digest
        self._chains[settled.round] = settled.chain
        self._chains.pop(settled.round - CHAINS_KEPT, None)
        if self._is_turn(settled.round):
            known = self.neighbourhood.membership.peers.keys()
            for peer in self.digests.peers() - known:
                self._forget(self.digests.forget(peer))
            self._newest = {peer: words for peer, words in self._newest.items() if peer in known}
            self._send_digest(settled.round, settled.chain, settled.digest)
            self._compare(settled.round)

    def took_up(self, weights: Weights) -> None:
        """Called when this peer continues with fetched weights: withdraw own statements on the abandoned
        branch."""
        round = weights.settled_round
        self._last = None
        self._chains = {}
        self._newest = {}
        self._forget(self.digests.forget(self.identity.peer_id, round))
        if round >= 0 and self._is_turn(round):
            self._send_digest(round, weights.chain, state_digest(round, weights.units))

    def sign(self, forked: Collection[PeerId]) -> None:
        """Sign the newest settled round and send it to the group. Peers in `forked`, which are on another
        branch, also get the statements of all others. The remaining peers get the statements of every peer
        that signed another branch."""
        if self._last is not None:
            self._send_digest(*self._last)
        contested = [data for words in self._newest.values() if True in words for data in words.values()]
        every = [data for words in self._newest.values() for data in words.values()]
        for peer in self._group():
            if words := every if peer in forked else contested:
                self.neighbourhood.post(peer, "group", Statements(words[:MAX_STATEMENTS]))

    def _is_turn(self, round: int) -> bool:
        return (round + 1) % self.every_rounds == 0

    def _send_digest(self, round: int, chain: bytes, digest: bytes) -> None:
        data = seal(
            self.identity, self.run_id, EnvelopeKind.SETTLED, self.stage, round, round, chain + digest
        )
        if self._is_turn(round):
            self._keep(Statement(self.identity.peer_id, round, chain, digest), data)
        for peer in self._group():
            self.neighbourhood.post(peer, "group", Statements([data]))

    def send_all(self, peer: PeerId) -> None:
        """Send all statements, the newest first, to a peer that is choosing a state."""
        statements = [self._signed[statement] for statement in self.digests.all()]
        self.neighbourhood.answer(peer, "group", Statements(statements[:MAX_STATEMENTS]))

    def message(self, peer: PeerId, message: Statements) -> None:
        """Accept statements from a neighbour, its own or relayed ones; only those of known peers are kept.

        Raises BadSignature for a forged statement: the neighbour should have verified it before relaying
        it."""
        try:
            rounds = {self._take(data) for data in message.statements[:MAX_STATEMENTS]}
        except BadSignature:
            raise
        except WireError as error:
            self.neighbourhood.refused(peer, error.code, str(error))
            return
        for round in rounds - {None}:
            assert round is not None
            self._compare(round)

    def restore(self, kept: Iterable[bytes]) -> None:
        """Load statements from this peer's disk; unusable ones are skipped and logged."""
        for data in kept:
            try:
                statement = self._open(data)
                if era_of(statement.chain) == self.lineage.era:
                    self._keep(statement, data)
            except WireError as error:
                self.log_event(log_events.StatementUnusable(reason=str(error)))

    def of_round(self, round: int) -> list[bytes]:
        """Return the statements of a round, to be kept next to its checkpoint."""
        return [self._signed[statement] for statement in self.digests.of_round(round)][:MAX_STATEMENTS]

    def roots(self) -> dict[PeerId, frozenset[Root]]:
        """Return the roots that each peer has signed."""
        return self.digests.roots()

    def _take(self, data: bytes) -> int | None:
        """Accept a statement; returns its round if it is new and due for a snapshot, else None. Raises
        WireError."""
        if data in self._statements or any(data in words.values() for words in self._newest.values()):
            return None
        statement = self._open(data)
        if era_of(statement.chain) != self.lineage.era:
            return None
        known = self.neighbourhood.membership.peers.get(statement.peer)
        mine = statement.peer == self.identity.peer_id  # From before this peer's disk was lost.
        if not mine and (known is None or known.stage != self.stage):
            return None
        self.heard(statement)
        is_other = self._chains.get(statement.round, statement.chain) != statement.chain
        self._newest.setdefault(statement.peer, {})[is_other] = data
        if not self._is_turn(statement.round):
            return None
        self._keep(statement, data)
        return statement.round

    def _open(self, data: bytes) -> Statement:
        envelope = open_envelope(data, self.run_id, EnvelopeKind.SETTLED, STATEMENT_BYTES)
        payload = bytes(envelope.payload)
        chain, digest = payload[:-DIGEST_BYTES], payload[-DIGEST_BYTES:]
        if envelope.stage != self.stage or len(chain) not in (len(START), len(START) + ERA_BYTES):
            raise Malformed(f"a settled digest of stage {envelope.stage} with {len(payload)} bytes")
        return Statement(envelope.sender, envelope.round, chain, digest)

    def _keep(self, statement: Statement, data: bytes) -> None:
        self._signed[statement], self._statements[data] = data, statement
        self._forget(self.digests.take(statement))

    def _forget(self, statements: Iterable[Statement]) -> None:
        for statement in statements:
            self._statements.pop(self._signed.pop(statement, b""), None)

    def _group(self) -> list[PeerId]:
        peers = self.neighbourhood.membership.peers.items()
        return [peer for peer, known in peers if known.linked and known.stage == self.stage]

    def _compare(self, round: int) -> None:
        """Compare this peer's weights after a round with those of the group, and fetch the group's if ours
        are wrong."""
        group = self._group()
        differing = self.digests.differing(round, group)
        if not differing or (round, differing) == self._logged:
            return
        self._logged = (round, differing)
        right = self.digests.against(round, group)
        code = "in_minority" if right else "digests_differ"
        self.log_event(log_events.DigestDiffers(code=code, round=round, peers=list(differing)))
        if right:
            reason = f"{len(right)} peers agree on other weights after round {round}: this peer's differ"
            first = max(0, round + 1 - self.every_rounds)
            self.log_event(log_events.Resync(code=code, peers=list(right), reason=reason, fork_round=first))
            self.wrong(FetchGroupState(right, reason, first))
