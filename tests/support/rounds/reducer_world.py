"""An `RoundService` of a run with reducers among peers that the test speaks for, and what they could sign."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace

from swarm import tiny_manifest

from peers.lab.world.stub_stage import StubMethod, StubReduced, payload_of
from peers.lab.world.virtual_time import run
from peers.network.message_router import MessageRouter
from peers.state.snapshot_store import Weights
from peers.worker.rounds.operations import ReduceShards
from peers.worker.rounds.round_service import RoundObservers, RoundService
from protocols.messages.table import Progress
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope, seal
from protocols.signed.grants import Reduction, grant_of, sign_grant
from protocols.signed.identity import Identity
from protocols.signed.slices import sign_slices
from protocols.signed.token_count import encode_tokens
from swarmnet.identifiers import RunId
from swarmnet.rounds.audits import Audits
from swarmnet.rounds.history import START
from swarmnet.rounds.own_contributions import OwnContributions
from swarmnet.rounds.result_table import Contributor, Draw

RUN = RunId("ab" * 32)
ME, B, C, STRANGER = (Identity.from_seed(name) for name in (b"me", b"b", b"c", b"stranger"))
SHARDS = 3
DRAW = Draw(bytes.fromhex(RUN), 4, SHARDS, 4)
ALL = [0, 1, 2]


def nothing_observed(settled=lambda settled: None) -> RoundObservers:
    """Observers that do nothing, apart from `settled`."""
    return RoundObservers(
        settled=settled,
        made=lambda round, tokens: None,
        experts_changed=lambda change: None,
        sign_history=lambda forked: None,
        resynchronise=lambda wish: None,
    )


class World:
    """An `RoundService` whose neighbours B and C are what the test says, and are in later rounds already, so
    that the first ones are closed here, with nothing of this peer in them. Nothing is computed."""

    def __init__(self, settled: int = -1, reduced: bool = True) -> None:
        loop = asyncio.get_running_loop()
        self.posted, self.refused, self.done, self.departed, self.notes = [], [], [], [], []
        self.audits = Audits(b"a secret", 2)
        manifest = tiny_manifest((3,))
        method = StubMethod(lambda *_, **__: None, 0, StubReduced(DRAW) if reduced else None)
        work = SimpleNamespace(
            replica=SimpleNamespace(settled_round=settled),
            method=method,
            run_id=RUN,
            stage=0,
            closed=False,
            counts=SimpleNamespace(applied=lambda *_: "completed", contributors=0),
            run=lambda operations: self.done.extend(operations) or [],
            commits=False,
        )
        around = SimpleNamespace(
            clock=SimpleNamespace(time=loop.time, call_at=loop.call_at),
            transport=SimpleNamespace(peer=ME.peer_id),
            post=self._post,
            refused=lambda peer, code, reason: self.refused.append((peer, code)),
            part_from=lambda peer, code, reason: self.departed.append((peer, code)),
            queued_bytes=lambda peer, lane: 0,
            introduce=lambda contributor, peers: None,
            known=lambda: (),
            membership=SimpleNamespace(
                active=lambda stage: self.live,
                peers=defaultdict(lambda: SimpleNamespace(upload=0, uploads_seen=b"", is_helper=False)),
                is_helper=False,
                upload=0,
                candidates=list,
                reduces=lambda peers: None,
                shares_rounds=lambda peer: True,
                is_member=lambda peer: peer != STRANGER.peer_id,
            ),
            linked=lambda stage: (),
        )
        self.live = {}
        compute = SimpleNamespace(submit=self._submit)
        self.offers = OwnContributions(manifest.rounds, DRAW if reduced else None)
        self.path = RoundService(
            manifest=manifest,
            work=work,
            compute=compute,
            neighbourhood=around,
            weights=Weights(None, settled, START),
            offers=self.offers,
            has_weight=lambda contributor, round: contributor != STRANGER.peer_id,
            observers=nothing_observed(),
            log_event=self.notes.append,
            audits=self.audits,
        )
        self.router = MessageRouter()
        self.path.register(self.router)
        for peer in (B.peer_id, C.peer_id):
            self.path.joined(peer)
            self.router.dispatch(peer, Progress(settled + 10, 0, [], settled, True, settled, START, []), b"")
        self.posted.clear()

    def _post(self, peer, lane, message, body=b"") -> bool:
        self.posted.append((peer, message, body))
        return True

    def _submit(self, kind, job, done) -> None:
        done(job(), 0.0)

    def hear(self, sender: Identity, message, body: bytes = b"") -> None:
        self.router.dispatch(sender.peer_id, message, body)

    def nothing_is_kept(self) -> bool:
        kept = getattr(self.path.exchange, "kept", {})
        return not any(held for shards in kept.values() for held in shards.values())

    def added_up(self) -> list[ReduceShards]:
        return [operation for operation in self.done if isinstance(operation, ReduceShards)]


def slices_of(who: Identity, round: int = 0, serial: int = 1) -> tuple[bytes, ...]:
    reduced = StubReduced(DRAW)
    return tuple(reduced.slices(payload_of(who.peer_id, round, serial, 5)))


def signed(who: Identity, round: int = 0, stage: int = 0, serial: int = 1):
    return sign_slices(who, RUN, stage, round, 20, slices_of(who, round, serial))


def evidence_of(who: Identity, round: int = 0, shards=tuple(ALL), **of) -> bytes:
    """Slices as they prove what a contributor said."""
    slices = slices_of(who, round, of.get("serial", 1))
    return signed(who, round, **of)[0] + b"".join(slices[shard] for shard in shards)


def signature_of(who: Identity, reducer: Identity = ME, round: int = 0, shards=tuple(ALL), **of) -> bytes:
    """That lets a reducer add up these slices."""
    reduction = Reduction(RUN, of.get("stage", 0), round, reducer.peer_id)
    return sign_grant(who, reduction, signed(who, round, **of)[1], 20, shards)


def body_of(who: Identity, round: int = 0, shards=tuple(ALL), **of) -> bytes:
    """Slices on their way to this peer."""
    return signature_of(who, ME, round, shards, **of) + evidence_of(who, round, shards, **of)


def as_contributor(
    who: Identity, round: int = 0, reducer: Identity = ME, shards=tuple(ALL), serial: int = 1
) -> Contributor:
    grant = grant_of(who.peer_id, signature_of(who, reducer, round, shards, serial=serial))
    return Contributor.of(who.peer_id, signed(who, round, serial=serial)[1], 20, grant)


def result_of(
    contributor: Identity,
    round: int = 0,
    contributors=(B, C),
    shards=tuple(ALL),
    grants_to: Identity | None = None,
):
    """A result as it travels, and its name. `grants_to`: whom its contributors let add them up, not its
    maker."""
    granted = grants_to or contributor
    held = {
        shard: {
            as_contributor(who, round, granted, shards): slices_of(who, round)[shard] for who in contributors
        }
        for shard in shards
    }
    reduced = StubReduced(DRAW)
    payload = reduced.reduce(held)
    table, length = reduced.head(payload)
    tokens = encode_tokens(table.tokens(SHARDS), round)
    head = seal(contributor, RUN, EnvelopeKind.CONTRIBUTION, 0, round, tokens, payload[:length])
    return head + payload[length:], open_envelope(head, RUN, EnvelopeKind.CONTRIBUTION, length).id


def head_only(data: bytes) -> bytes:
    return data[: ENVELOPE_BYTES + StubReduced(DRAW).head(data[ENVELOPE_BYTES:])[1]]


def played(story) -> None:
    async def main() -> None:
        story()

    run(main())
