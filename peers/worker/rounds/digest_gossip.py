"""Signed words on settled weights: made every few rounds, told to the group, kept beside the checkpoints.

A statement is an envelope around the chain's value and the digest of the settled weights after a round. They
say which snapshot a group agrees on, after a restart of everything too, and tell a peer whose weights went
wrong that they did: it then fetches the group's. Where histories stay apart there are more of them, which say
who is on which (swarmnet/rounds/fork_choice.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from peers.config.run_file import SignedManifest
from peers.network.peer_links import PeerLinks
from peers.state.checkpoint_file import STATEMENT_BYTES, state_digest
from peers.state.snapshot_store import Weights
from peers.telemetry import events as noted
from peers.worker.rounds.update_compute import Settled
from protocols.errors import BadSignature, Malformed, WireError
from protocols.messages.table import MAX_STATEMENTS, Statements
from protocols.signed.envelope import EnvelopeKind, open_envelope, seal
from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId
from swarmnet.rounds.events import Resync
from swarmnet.rounds.history import START
from swarmnet.snapshots.digest_votes import Root, SettledDigests, Statement

CHAINS_KEPT = 16
"""Rounds: what others sign is as old as its way here."""


class SignedDigests:
    def __init__(
        self,
        identity: Identity,
        signed: SignedManifest,
        stage: int,
        neighbourhood: PeerLinks,
        wrong: Callable[[Resync], None],
        log_event: noted.LogEvent,
    ) -> None:
        """Signs for every snapshot. `wrong` is called when the own weights are not what the group has."""
        self.identity = identity
        self.run_id = signed.run_id
        self.stage = stage
        self.every_rounds = signed.manifest.rounds.snapshot_interval
        self.neighbourhood = neighbourhood
        self.wrong = wrong
        self.log_event = log_event
        self.digests = SettledDigests(identity.peer_id)
        self._signed: dict[Statement, bytes] = {}
        self._statements: dict[bytes, Statement] = {}
        self._told: tuple[int, tuple[PeerId, ...]] = (-1, ())
        """The newest difference that was noted."""
        self._last: tuple[int, bytes, bytes] | None = None
        """Round, chain and digest of what settled last."""
        self._chains: dict[int, bytes] = {}
        """Of the newest rounds here."""
        self._newest: dict[PeerId, dict[bool, bytes]] = {}
        """What each peer signed last, of another history than here and of this one, whatever the round."""
        self.heard: Callable[[Statement], None] = lambda _: None
        """Is told of what is news."""

    def settled(self, settled: Settled) -> None:
        """A round settled here: say so if it is its turn."""
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
        """This peer goes on from these weights: what it said of a history that it gave up no longer holds."""
        round, self._last, self._chains, self._newest = weights.settled_round, None, {}, {}
        self._forget(self.digests.forget(self.identity.peer_id, round))
        if round >= 0 and self._is_turn(round):
            self._send_digest(round, weights.chain, state_digest(round, weights.units))

    def sign(self, forked: Collection[PeerId]) -> None:
        """What settled last, for all; for these, who are on another history, what others have signed, and for
        the rest who has signed another, with all that it has."""
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
        """Everything that is held, the newest first, to a peer that chooses a state."""
        statements = [self._signed[statement] for statement in self.digests.all()]
        self.neighbourhood.answer(peer, "group", Statements(statements[:MAX_STATEMENTS]))

    def message(self, peer: PeerId, message: Statements) -> None:
        """From a neighbour, its own or those of others; only words of peers that are known here are kept.
        Raises BadSignature for what nobody has signed: it should have looked before it passed that on."""
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
        """From the own disk. What is not in order there is left out."""
        for data in kept:
            try:
                self._keep(self._open(data), data)
            except WireError as error:
                self.log_event(noted.StatementUnusable(reason=str(error)))

    def of_round(self, round: int) -> list[bytes]:
        """To keep beside a checkpoint of that round."""
        return [self._signed[statement] for statement in self.digests.of_round(round)][:MAX_STATEMENTS]

    def roots(self) -> dict[PeerId, frozenset[Root]]:
        """What each peer has put its name to."""
        return self.digests.roots()

    def _take(self, data: bytes) -> int | None:
        """The round of a statement that is news. Raises WireError."""
        if data in self._statements or any(data in words.values() for words in self._newest.values()):
            return None
        statement = self._open(data)
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
        if envelope.stage != self.stage or len(payload) != STATEMENT_BYTES:
            raise Malformed(f"a settled digest of stage {envelope.stage} with {len(payload)} bytes")
        return Statement(envelope.sender, envelope.round, payload[: len(START)], payload[len(START) :])

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
        """Look whether the weights after a round are the group's."""
        group = self._group()
        differing = self.digests.differing(round, group)
        if not differing or (round, differing) == self._told:
            return
        self._told = (round, differing)
        right = self.digests.against(round, group)
        code = "in_minority" if right else "digests_differ"
        self.log_event(noted.DigestDiffers(code=code, round=round, peers=list(differing)))
        if right:
            reason = f"{len(right)} peers agree on other weights after round {round}: this peer's are wrong"
            first = max(0, round + 1 - self.every_rounds)
            self.log_event(noted.Resync(code=code, peers=list(right), reason=reason, fork_round=first))
            self.wrong(Resync(right, reason, first))
