"""Begin the rounds of a stage once its weights are here, at first or after a fork."""

from __future__ import annotations

from peers.compute.stage_part import HasReplica
from peers.state.snapshot_store import Weights
from peers.worker.rounds.operations import RoundSettled, experts_line
from peers.worker.rounds.round_counts import RoundCounts
from peers.worker.rounds.round_service import RoundObservers, RoundService
from peers.worker.rounds.update_compute import UpdateWork
from peers.worker.stage_services import StageServices
from swarmnet.rounds.events import FetchGroupState
from swarmnet.rounds.own_contributions import OwnContributions
from swarmnet.run.rates import Rates


def join_rounds(
    *,
    services: StageServices,
    replica: HasReplica,
    weights: Weights,
    given_up: FetchGroupState | None,
    rates: Rates,
) -> RoundService:
    """Begin rounds that continue from `weights`, which `replica` holds, and return their service.

    It replaces that of `services`. What other peers may still request from the former one is taken over.
    `given_up` is why the state was fetched again; `rates` are the owner's learning rates."""
    context, part, former = services.context, services.part, services.round_service
    manifest, method = context.manifest, part.method
    draw = method.reduced.draw if method.reduced is not None else None
    offers = former.rounds.offers if former.has_weights else OwnContributions(manifest.rounds, draw)

    def keep_snapshot(settled: RoundSettled) -> None:
        """Keep a snapshot of `replica`. Called in the compute thread right after a round settled; the
        services may have other rounds by now."""
        services.snapshots.keep(
            settled.round, replica.settled_now, settled.digest, settled.chain, settled.tokens
        )

    work = UpdateWork(
        run_id=services.lineage.contribution_run(context.signed.run_id),
        stage=services.stage,
        identity=context.identity,
        stage_compute=part.compute,
        method=method,
        replica=replica,
        gathered=services.pipeline_service.work,
        settled=keep_snapshot,
        counts=RoundCounts(),
        undecided=offers.open,
        signs_every=manifest.rounds.snapshot_interval,
    )
    services.pipeline_service.work.after_gradient = work.step_if_due
    if former.has_weights:
        work.own = former.work.own
        if given_up is not None:
            offers.replaced(given_up, former.rounds.histories, weights.settled_round, weights.chain)
    offers.restored(weights.past.sets)
    offers.jumped(weights.settled_round)
    service = RoundService(
        manifest=manifest,
        work=work,
        compute=context.compute,
        neighbourhood=services.links,
        weights=weights,
        offers=offers,
        has_weight=services.contributors.counts,
        observers=RoundObservers(
            settled=services.settled,
            made=services.receipts.made,
            experts_changed=lambda change: context.notify("experts", experts_line(change)),
            sign_history=services.digests.sign,
            resynchronise=services.resynchronise,
        ),
        log_event=context.log_event,
        rates=rates,
        folder=context.settings.checkpoints,
        audits=services.audits,
    )
    services.round_service = service
    if former.has_weights:
        service.take_over(former)
    services.digests.took_up(weights)
    service.register(services.router)
    return service
