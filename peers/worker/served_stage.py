"""Dispatch what the peer links report (messages, new and lost links) to the services of a stage, and tell
others what this peer claims about itself."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import isfinite
from pathlib import Path

from peers.compute.stage_part import MakePart
from peers.config.errors import IdentityInUse
from peers.network.discovery.claims import Claims, plain_name
from peers.network.discovery.height import RemoteProgressGuard
from peers.network.message_router import MessageRouter, handles
from peers.network.ports import HeartbeatLoad
from peers.state.snapshot_service import SnapshotService
from peers.telemetry.snapshot import IN_STEP
from peers.worker.inference.server import Inference
from peers.worker.lifecycle import Lifecycle
from peers.worker.order_enforcement import OrderEnforcer
from peers.worker.pipeline.answer_checks import AnswerChecks
from peers.worker.pipeline.pipeline_service import PipelineService
from peers.worker.pipeline.reservation_client import ReservationClient
from peers.worker.pipeline.text_reader import coverage_of
from peers.worker.rounds.audit_path import AuditPath
from peers.worker.rounds.exchange import ReducerPath
from peers.worker.rounds.receipt_service import Receipts
from peers.worker.rounds.round_service import RoundService
from peers.worker.run_end import RunShutdown
from peers.worker.run_orders import RunOrders
from peers.worker.stage_moves import StageMover
from peers.worker.stage_services import StageServices
from peers.worker.worker_context import WorkerContext
from protocols.fields import Body
from protocols.messages.table import GetState, Message, PeerRecords, Statements
from protocols.signed.peer_record import MAX_VERDICTS
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId
from swarmnet.membership.peer_info import HELPER_ROLE
from swarmnet.optimizer.agreement.ledger import KeepsLedger
from swarmnet.optimizer.agreement.weight_report import is_reporter
from swarmnet.rounds.events import ProcessSuspended

SERVICES = (
    PipelineService,
    AnswerChecks,
    ReservationClient,
    RoundService,
    ReducerPath,
    AuditPath,
    SnapshotService,
    Receipts,
    Inference,
    OrderEnforcer,
)
"""The services of a stage that handle messages."""
HIGHEST_LOSS = 1e6
"""Upper bound in nats per token: a record takes no higher value, and a higher one means nothing."""


class NoStage:
    """Stands for the served stage until one is chosen."""

    services: StageServices | None = None
    ended_at: int | None = None
    has_weights = False
    has_company = True
    moving_to = -1

    def linked_peers(self) -> list[PeerId]:
        return []

    def stop_moving(self) -> None:
        """Do nothing, since nothing moves."""

    async def save_newest(self) -> None:
        """Do nothing, since there is nothing to save."""


class ServedStage:
    """One stage as this worker serves it: its services, and what steers them. `Listener` of its links."""

    def __init__(
        self,
        *,
        context: WorkerContext,
        lifecycle: Lifecycle,
        orders: RunOrders,
        elsewhere: RemoteProgressGuard,
        make_part: MakePart,
        stage: int,
        leave: Callable[[], None],
    ) -> None:
        """`leave()` ends the worker."""
        self.lifecycle = lifecycle
        self.orders = orders
        router = MessageRouter(*SERVICES)
        router.add(self)  # Proofs of a snapshot are sent before `SnapshotService` offers it.
        self.services = StageServices(
            context=context,
            lifecycle=lifecycle,
            orders=orders,
            elsewhere=elsewhere,
            listener=self,
            router=router,
            make_part=make_part,
            stage=stage,
        )
        self.moving = StageMover(self.services)
        self.ending = RunShutdown(
            services=self.services,
            orders=orders,
            elsewhere=elsewhere,
            stands=self.announce_standing,
            leave=leave,
        )
        self.enforcer = OrderEnforcer(
            services=self.services, orders=orders, ending=self.ending, stands=self.announce_standing
        )
        router.add(self.enforcer)
        self._answered_own = 0
        """Sequence number of the newest record of a later process with this identity."""
        self.make_record()

    def start(self) -> None:
        """Enforce orders and open links from now on."""
        self.enforcer.begin()
        self.services.links.start()

    async def close(self) -> None:
        await self.enforcer.close()
        self.moving.close()
        await self.services.close()

    @property
    def ended_at(self) -> int | None:
        """The last settled round, once the run has ended here."""
        return self.ending.round

    @property
    def has_weights(self) -> bool:
        """Whether this peer has joined the rounds of its stage."""
        return self.services.round_service.has_weights

    @property
    def has_company(self) -> bool:
        """Whether another peer of the stage has its weights, too."""
        return self.services.has_company()

    @property
    def moving_to(self) -> int:
        """The announced target stage; -1 for none."""
        return self.moving.moving_to

    def linked_peers(self) -> list[PeerId]:
        """Return the peers with open links."""
        return self.services.linked()

    def stop_moving(self) -> None:
        """Move to no other stage from now on."""
        self.moving.close()

    async def save_newest(self) -> None:
        """Save the newest snapshot, which may be the only copy. Called when the settled weights are lost."""
        await self.services.disk.save_newest(self.services.snapshots)

    def make_record(self) -> bytes:
        """Return a new signed record for the directory and for neighbours."""
        services = self.services
        claims = claims_of(services, self.load())
        invite = self.orders.gatekeeper.record_invite
        record = services.context.presence.record(services.stage, claims, invite)
        services.links.record = record
        return record

    def announce_standing(self) -> None:
        """Called when the owner may have paused, resumed or ended the run."""
        if self.lifecycle.state in IN_STEP:
            standing = "paused_by_owner" if self.orders.paused else "training"
            self.lifecycle.enter("ended" if self.ending.has_ended else standing)

    def own_record(self, signed: SignedRecord) -> None:
        """End if an earlier process uses this identity. Answer a later one's record with a new own one."""
        services, context = self.services, self.services.context
        try:
            is_later = context.presence.judge_own(signed)
        except IdentityInUse as error:
            self.lifecycle.goodbye = ""  # Otherwise the other peers would take the earlier process for gone.
            context.end_with(error)
            return
        if is_later and signed.sequence > self._answered_own:
            if not self._answered_own:
                text = "another process has started with this identity; it ends soon"
                context.notify("identity_shared", text)
            self._answered_own = signed.sequence
            context.presence.announce_now()
            record = self.make_record()
            for peer in services.linked():
                services.links.post(peer, "group", PeerRecords([record]))

    # -- what the links report ------------------------------------------------------------------------

    def load(self) -> HeartbeatLoad:
        return self.services.load(self.moving.moving_to)

    def linked(self, peer: PeerId, stage: int) -> None:
        self.lifecycle.wake()
        self.enforcer.linked(peer)
        self.services.receipts.linked(peer)
        if stage == self.services.stage:
            self.services.round_service.linked(peer)

    def counted(self, peers: int) -> None:
        self.services.round_service.counted(peers)

    def on_stall(self, seconds: float) -> None:
        self.services.round_service.feed(ProcessSuspended(seconds))

    def unlinked(self, peer: PeerId, reason: str, released: bool) -> None:
        services = self.services
        self.lifecycle.wake()
        services.pipeline_service.unlinked(peer)
        services.round_service.left(peer, released)
        services.snapshot_service.unlinked(peer)
        self.moving.gone(peer)

    def beat(self, peer: PeerId) -> None:
        self.moving.beaten(peer)
        self.services.pipeline_service.pump()

    def message(self, peer: PeerId, message: Message, body: bytes) -> None:
        self.lifecycle.wake()
        self.services.router.dispatch(peer, message, body)

    @handles(GetState)
    def _on_state_request(self, peer: PeerId, _message: GetState, _body: bytes) -> None:
        """Send what proves the offers that `SnapshotService` sends next."""
        self.services.digests.send_all(peer)
        self.enforcer.on_state_request(peer)

    @handles(Statements)
    def _on_statements(self, peer: PeerId, message: Statements, _body: bytes) -> None:
        keepers = self.services.recovery.keepers
        if keepers.is_one(peer):
            keepers.receive(peer, message)
        else:
            self.services.digests.message(peer, message)

    # -- what the links ask ---------------------------------------------------------------------------

    def met(self) -> Collection[PeerId]:
        return self.services.context.presence.directory.met()

    def answer_visitor(self, peer: PeerId, message: Message, body: Body) -> None:
        self.services.inference.visitors.post(peer, message, body)


def claims_of(services: StageServices, load: HeartbeatLoad) -> Claims:
    """Return the claims as of now. `load` is what heartbeats report. Of private text they say nothing but the
    mean training loss, and not even that with noise, of which the loss has none."""
    settings, part, data = services.context.settings, services.part, services.context.manifest.data
    pipeline, service = services.pipeline_service, services.round_service
    seconds = load.service_seconds
    loss = None if data.adds_noise else pipeline.losses.mean
    saved = services.disk.saved
    coverage = None if data.private else coverage_of(pipeline.origin.text)
    held = service.held_experts()
    return Claims(
        state=services.lifecycle.state,
        name=plain_name(settings.name),
        role=HELPER_ROLE if settings.reduces_only else "worker",
        round=service.rounds.current,
        tokens_per_second=services.context.manifest.microbatch_tokens / seconds if seconds > 0 else 0.0,
        moving_to=load.moving_to,
        loss=loss if loss is not None and isfinite(loss) and 0 <= loss <= HIGHEST_LOSS else None,
        tokens=pipeline.ledger.tokens,
        settled=service.rounds.settled,
        checkpoint_round=saved[1] if saved is not None else -1,
        checkpoint_seconds=_written_at(saved[0]) if saved is not None else 0.0,
        sent_bytes=services.links.traffic.sent.total(),
        received_bytes=services.links.traffic.received.total(),
        finalized_tokens=service.tokens,
        device=part.kind or part.device.type,
        joules=settings.joules(),
        text_shards=coverage.shards if coverage is not None else 0,
        text_shards_read=coverage.read_ever if coverage is not None else 0,
        line=settings.line,
        experts_group=held.group if held is not None else -1,
        experts_trained=held.trained if held is not None else (),
        uploads_seen=service.report_uploads(),
        vote_weights=_report_weights(services),
        avoids=pipeline.checks.trust.verdicts(MAX_VERDICTS),
        receipts=services.receipts.newest(),
    )


def _report_weights(services: StageServices) -> bytes:
    """Return the newest report on the weights of votes, if this peer is one of those that report."""
    method, me = services.part.method, services.context.me
    if not isinstance(method, KeepsLedger) or method.ledger is None:
        return b""
    group = 1 + len(services.links.membership.live(services.stage))
    return method.ledger.report if is_reporter(me, group) else b""


def _written_at(path: Path) -> float:
    """Return the Unix time when the file was written, also by an earlier process; 0 if the file is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
