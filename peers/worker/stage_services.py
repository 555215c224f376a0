"""The services with which a worker serves one stage, from the choice of the stage on.

Nothing in them is optional. Only the rounds begin later, when the stage's weights are here (joining.py);
until then `NoRounds` stands for them.
"""

from __future__ import annotations

from typing import TypeVar

from peers.compute.stage_part import MakePart, StagePart
from peers.network.discovery.claims import bandwidth_fields
from peers.network.discovery.discovery import PeerDiscovery
from peers.network.discovery.height import RemoteProgressGuard
from peers.network.message_router import MessageRouter
from peers.network.peer_links import PeerLinks
from peers.network.ports import HeartbeatLoad, Listener
from peers.state.archivists import ArchivistClients
from peers.state.checkpoint_writer import CheckpointWriter
from peers.state.momentum_file import MomentumKeeper
from peers.state.snapshot_service import SnapshotService, start_digest
from peers.state.snapshot_store import Snapshots
from peers.telemetry import log_events
from peers.worker.inference.server import Inference
from peers.worker.lifecycle import Lifecycle
from peers.worker.pipeline.origin import MicrobatchSource
from peers.worker.pipeline.pipeline_service import PipelineService
from peers.worker.pipeline.return_pass import ReturnPass
from peers.worker.rounds.digest_gossip import SignedDigests
from peers.worker.rounds.no_rounds import NoRounds
from peers.worker.rounds.operations import RoundSettled
from peers.worker.rounds.receipt_service import Receipts
from peers.worker.rounds.round_service import RoundService
from peers.worker.run_orders import RunOrders
from peers.worker.starting_state import StateRecovery
from peers.worker.worker_context import WorkerContext
from protocols.fields import RunSizes
from swarmnet.identifiers import PeerId
from swarmnet.lineage import Lineage
from swarmnet.membership.membership import Membership
from swarmnet.rounds.audits import Audits
from swarmnet.rounds.contributors import ContributorFilter
from swarmnet.rounds.events import ChainSigned, FetchGroupState
from swarmnet.run.manifest import Manifest
from swarmnet.snapshots.digest_votes import Statement

Positioned = TypeVar("Positioned", bound=PipelineService)
AUDITS_OF = b"swarmnet audits 1\0"
"""Signed together with the run's id, this gives a secret that is the same after a restart. It decides which
results are audited."""


class StageServices:
    """All services of one stage at one peer."""

    def __init__(
        self,
        *,
        context: WorkerContext,
        lifecycle: Lifecycle,
        orders: RunOrders,
        elsewhere: RemoteProgressGuard,
        listener: Listener,
        router: MessageRouter,
        make_part: MakePart,
        stage: int,
    ) -> None:
        """`elsewhere` tells whether absent peers have the run's weights. `listener` receives what the links
        report, and `router` passes messages to the services. `make_part` builds the part that computes the
        stage."""
        manifest, settings = context.manifest, context.settings
        self.context = context
        self.lifecycle = lifecycle
        self.stage = stage
        self.lineage = orders.book.order.lineage(stage)
        """Which weights belong to the run's present history. An order that changes it restarts the worker."""
        self.router = router
        self.part = make_part(manifest, stage)
        self.round_service: RoundService | NoRounds = NoRounds()
        membership = self._make_membership()
        self.contributors = ContributorFilter(membership, manifest.rounds)
        secret = context.identity.sign(AUDITS_OF + bytes.fromhex(context.signed.run_id))
        self.audits = Audits(secret, manifest.rounds.window)
        self.contributors.convicted = orders.gatekeeper.convicted = self.audits.convicted
        self.links = self._open_links(membership, listener, orders)
        self.looking = PeerDiscovery(
            presence=context.presence,
            neighbourhood=self.links,
            stages=len(manifest.stages),
            notify=context.notify,
        )
        self.digests = self._open_digests()
        self.receipts = Receipts(
            identity=context.identity,
            signed=context.signed,
            stage=stage,
            path=settings.receipts,
            neighbourhood=self.links,
            now=context.presence.directory.now,
            log_event=context.log_event,
        )
        self.disk = self._open_disk()
        self.momentum = self._open_momentum()
        self.snapshots = Snapshots(
            identity=context.identity,
            run_id=context.signed.run_id,
            stage=stage,
            rules=manifest.rounds,
            folder=settings.checkpoints,
        )
        keepers = ArchivistClients(context.presence, self.links, stage)
        self.snapshot_service = self._open_snapshots(keepers)
        self.recovery = StateRecovery(
            disk=self.disk,
            states=self.snapshot_service,
            keepers=keepers,
            neighbourhood=self.links,
            compute=context.compute,
            log_event=context.log_event,
            notify=context.notify,
            elsewhere=lambda: elsewhere.waits(self.disk.lost_round),
            model=settings.start,
        )
        self.pipeline_service = self._open_pipeline(orders.text)
        self.inference = self._open_inference()
        for service in (self.snapshot_service, self.receipts, self.inference):
            router.add(service)
        self.pipeline_service.register(router)

    def _open_links(self, membership: Membership, listener: Listener, orders: RunOrders) -> PeerLinks:
        context = self.context
        return PeerLinks(
            transport=context.transport,
            run_id=context.signed.run_id,
            membership=membership,
            listener=listener,
            signed_manifest=context.signed.wire(),
            log_event=context.log_event,
            bodies=self.router.bodies(_sizes(context.manifest, self.part)),
            admission=orders.gatekeeper,
        )

    def _make_membership(self) -> Membership:
        context = self.context
        return Membership(
            me=context.me,
            stage=self.stage,
            chance=context.chance,
            beside=context.manifest.neighbour_stages(self.stage),
            by_invite=context.manifest.access == "invite",
            is_helper=context.settings.reduces_only,
            upload=bandwidth_fields(context.settings.line)[0],
        )

    def _open_digests(self) -> SignedDigests:
        return SignedDigests(
            identity=self.context.identity,
            signed=self.context.signed,
            stage=self.stage,
            neighbourhood=self.links,
            wrong=self.resynchronise,
            heard=self._heard_statement,
            log_event=self.context.log_event,
            lineage=self.lineage,
        )

    def _open_disk(self) -> CheckpointWriter:
        context = self.context
        return CheckpointWriter(
            folder=context.settings.checkpoints,
            signed=context.signed,
            stage=self.stage,
            part=self.part,
            compute=context.compute,
            log_event=context.log_event,
            notify=context.notify,
            digests=self.digests,
            past=lambda until: self.round_service.past(until),
            lineage=self.lineage,
        )

    def _open_momentum(self) -> MomentumKeeper:
        context = self.context
        return MomentumKeeper(
            folder=context.settings.checkpoints,
            manifest=context.manifest,
            run_id=context.signed.run_id,
            stage=self.stage,
            part=self.part,
            compute=context.compute,
            log_event=context.log_event,
        )

    def _open_snapshots(self, keepers: ArchivistClients) -> SnapshotService:
        context = self.context
        return SnapshotService(
            snapshots=self.snapshots,
            neighbourhood=self.links,
            state_bytes=self.part.state.size * 4,
            log_event=context.log_event,
            notify=context.notify,
            signed=self.digests.roots,
            start=start_digest(context.manifest, self.stage),
            kept=self.disk.chunks,
            progress=lambda: self.round_service.progress(),
            vouched=keepers.vouched,
            lineage=self.lineage,
        )

    def _open_pipeline(self, text: MicrobatchSource | None) -> PipelineService:
        context = self.context
        service = self._pipeline_at(PipelineService, self.stage, text)
        # A restarted peer keeps its identity and must not reuse names of microbatches, which other peers
        # would take for duplicates. No peer starts a thousand in a second.
        service.origin.next_counter = int(context.presence.directory.now() * 1000)
        if self.stage == 0 and context.manifest.is_u_shaped:
            self._pipeline_at(ReturnPass, context.manifest.path_rules().last, None).attach(service)
        return service

    def _pipeline_at(
        self, kind: type[Positioned], position: int, text: MicrobatchSource | None
    ) -> Positioned:
        """Return the part in the pipeline at a position of the paths: this stage, or the way back to it."""
        context = self.context
        return kind(
            manifest=context.manifest,
            stage=position,
            compute=context.compute,
            part=self.part,
            neighbourhood=self.links,
            text=text,
            chance=context.chance,
            slots=0 if context.settings.reduces_only else context.settings.slots,
            in_flight=context.settings.in_flight,
            committed=self._committed,
            round=lambda: self.round_service.rounds.current,
            log_event=context.log_event,
            line=context.settings.line,
        )

    def _open_inference(self) -> Inference:
        context = self.context
        return Inference(
            manifest=context.manifest,
            stage=self.stage,
            snapshots=self.snapshots,
            part=self.part,
            compute=context.compute,
            neighbourhood=self.links,
            log_event=context.log_event,
            chance=context.chance,
        )

    def load(self, moving_to: int) -> HeartbeatLoad:
        """Return this peer's load, as sent in heartbeats. `moving_to` is the stage to which it moves, or
        -1."""
        service, pipeline = self.round_service, self.pipeline_service
        if not service.has_weights:
            return HeartbeatLoad(self.stage, False, 0, 0.0, 0)
        ready = pipeline.serving and service.rounds.in_step
        free = max(0, pipeline.pipeline.slots - pipeline.pipeline.under_way)
        seconds = 0.0 if self.context.settings.reduces_only else pipeline.service.seconds
        return HeartbeatLoad(self.stage, ready, free, seconds, service.rounds.current, moving_to)

    def linked(self) -> list[PeerId]:
        """Return the peers with open links."""
        return [peer for peer, known in self.links.known().items() if known.linked]

    def has_company(self) -> bool:
        """Return whether another peer of the stage has its weights, too."""
        return bool(self.links.membership.active(self.stage))

    def resynchronise(self, request: FetchGroupState) -> None:
        """Stop to serve, and let the life cycle fetch the group's state again."""
        if self.lifecycle.resynchronise(request):
            self.pipeline_service.serving = False
            self.context.notify("behind", f"fetches the state again: {request.reason}")

    def return_to(self, lineage: Lineage) -> None:
        """End this worker, because the owner ordered a return to the target of `lineage`. The next worker
        begins with it as a newcomer does."""
        round = lineage.target[0] if lineage.target is not None else -1
        reason = f"the owner ordered a return to round {round}"
        self.context.log_event(log_events.Resync("returned", [], reason, round + 1))
        self.lifecycle.begin_again(self.stage)

    def settled(self, settled: RoundSettled) -> None:
        """Called on the event loop when a round has settled."""
        self.digests.settled(settled)
        self.receipts.settled(settled)

    def _heard_statement(self, said: Statement) -> None:
        self.round_service.feed(ChainSigned(said.peer, said.round, said.chain))

    def _committed(self, tokens: int) -> None:
        self.lifecycle.wake()
        self.round_service.committed(tokens)

    async def close(self) -> None:
        """Close all services, the links last."""
        self.inference.close()
        self.pipeline_service.close()
        self.round_service.note_undecided()
        self.round_service.close()
        self.snapshot_service.close()
        goodbye = self.lifecycle.goodbye if self.lifecycle.goes_to is None else "moving"
        await self.links.close(goodbye)
        await self.receipts.close()


def _sizes(manifest: Manifest, part: StagePart) -> RunSizes:
    """Return the sizes in this stage that bound the bodies of messages."""
    state, method = part.state.size * 4, part.method
    if method.reduced is None:
        return RunSizes(manifest, method.payload_bytes, state)
    return RunSizes(manifest, method.reduced.longest_result, state, sum(method.reduced.slice_bytes))
