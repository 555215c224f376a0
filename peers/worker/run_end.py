"""End a run when its owner orders it: open rounds settle, weights are saved, and the peer stops.

The order names a last round of the first stage, through which every microbatch passes. Its peers start none
after that round. The other stages continue while microbatches arrive, and end when the first stage has ended
and they are idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from peers.config.errors import UserError
from peers.network.discovery.height import RemoteProgressGuard
from peers.state.checkpoint_file import on_disk
from peers.telemetry import log_events
from peers.telemetry.snapshot import IN_STEP
from peers.worker.rounds.round_service import RoundService
from peers.worker.run_orders import RunOrders
from peers.worker.stage_services import StageServices
from peers.worker.worker_context import WorkerContext

LOOK_SECONDS = 1.0
SERVE_SECONDS = 60.0
"""How long a peer stays after everything has settled. Archivists fetch the last weights meanwhile, and the
other stages read in the directory that the first one has ended."""


async def refuse_ended_run(context: WorkerContext, orders: RunOrders, elsewhere: RemoteProgressGuard) -> None:
    """Raise UserError if the run has ended and this peer's disk has intact weights of it. A peer without
    weights may still fetch them from others."""
    last, folder = orders.last_round, context.settings.checkpoints
    if last is None or folder is None:
        return
    held = await asyncio.to_thread(on_disk, folder, context.signed.run_id)
    if not held:
        return
    of_first = max((one.round for one in held if one.stage == 0), default=-1)
    ended_at = max(of_first, await elsewhere.first_stage())
    if ended_at >= last:
        raise UserError(
            f"the run has ended at round {ended_at}, as its owner ordered; nothing is left to train. The "
            f"weights of this peer are in {folder}; {context.settings.export_hint}"
        )


class RunShutdown:
    """Ends one stage's worker; does nothing before an end is ordered."""

    def __init__(
        self,
        *,
        services: StageServices,
        orders: RunOrders,
        elsewhere: RemoteProgressGuard,
        stands: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        """`stands()` is called when the run has ended here, `leave()` ends the worker."""
        self._services = services
        self._orders = orders
        self._elsewhere = elsewhere
        self._stands = stands
        self._leave = leave
        self.ordered = asyncio.Event()
        self.round: int | None = None
        """The last settled round here, once the run has ended."""

    def on_change(self) -> None:
        """Called when an order has arrived or the rounds have restarted."""
        last = self._orders.last_round
        if self._services.stage == 0:
            self._services.round_service.end_at(last)
        if last is not None:
            self.ordered.set()

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended here."""
        return self.round is not None

    @property
    def starts_nothing(self) -> bool:
        """Whether no new microbatch starts here."""
        return self.has_ended or self._services.round_service.rounds.past_last

    async def run(self) -> None:
        """Wait for the end of the run, then save the weights and leave. Runs until cancelled."""
        await self.ordered.wait()
        services, context = self._services, self._services.context
        while True:
            service = services.round_service
            if service.has_weights and await self._is_over(service):
                break
            await asyncio.sleep(LOOK_SECONDS)
        self.round = service.rounds.settled
        context.log_event(log_events.RunEnded(round=self.round, ordered=self._orders.last_round))
        context.notify(
            "ended",
            f"the run has ended, as its owner ordered: all rounds up to {self.round} are settled. This peer "
            f"stays for {SERVE_SECONDS:g} s; {context.settings.export_hint}",
        )
        self._stands()
        await services.disk.save(service.settled_weights)
        await asyncio.sleep(SERVE_SECONDS)
        self._leave()

    async def _is_over(self, service: RoundService) -> bool:
        """Return whether no round is left. Also lets a later stage end once the first one has."""
        services, last = self._services, self._orders.last_round
        if last is None or services.lifecycle.state not in IN_STEP:
            return False
        rounds = service.rounds
        if services.stage > 0:
            idle = not rounds.open_round.has_tokens()
            if rounds.last is None and idle and await self._elsewhere.first_stage() >= last:
                service.end_at(rounds.current - 1)
        elif rounds.past_last:
            services.pipeline_service.origin.text = None
        behind = any(view.settled < rounds.settled for view in rounds.histories.same_branch_peers.values())
        return rounds.is_over and not behind
