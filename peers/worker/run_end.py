"""End a run when its owner orders it: open rounds settle, weights are saved, and the peer stops.

The order names a last round of the first stage, through which every microbatch passes. Its peers start none
after that round. The other stages continue while microbatches arrive, and end when the first stage has ended
and they are idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from peers.errors import UserError
from peers.network.discovery.height import RemoteProgressGuard
from peers.network.orders.order_book import OrderBook
from peers.state.checkpoint_file import on_disk
from peers.telemetry import log_events
from peers.telemetry.snapshot import IN_STEP
from peers.worker.worker_context import WorkerContext

LOOK_SECONDS = 1.0
SERVE_SECONDS = 60.0
"""How long a peer stays after everything has settled. Archivists fetch the last weights meanwhile, and the
other stages read in the directory that the first one has ended."""


class RunShutdown:
    """Ends one worker; does nothing before an end is ordered."""

    def __init__(
        self,
        *,
        worker: WorkerContext,
        book: OrderBook,
        elsewhere: RemoteProgressGuard,
        stands: Callable[[], None],
        leave: Callable[[], None],
        hint: str = "",
    ) -> None:
        """`stands()` is called when the run has ended here, `leave()` ends the worker, `hint` tells how to
        export the model."""
        self.hint = hint
        self.worker = worker
        self.book = book
        self.elsewhere = elsewhere
        self.stands = stands
        self.leave = leave
        self.ordered = asyncio.Event()
        self.round: int | None = None
        """The last settled round here, once the run has ended."""

    @property
    def last(self) -> int | None:
        """The last round that the owner ordered; None if no end is ordered."""
        return self.book.order.ends

    def on_change(self) -> None:
        """Called when an order has arrived or the rounds have restarted."""
        worker, last = self.worker, self.last
        if worker.update is not None and worker.stage == 0:
            worker.update.end_at(last)
        if last is not None:
            self.ordered.set()

    async def refuse_if_over(self, folder: Path | None) -> None:
        """Raise UserError if the run has ended and `folder` has intact weights of it. A peer without weights
        may still fetch them from others."""
        last = self.last
        if last is None or folder is None:
            return
        held = await asyncio.to_thread(on_disk, folder, self.elsewhere.presence.signed.run_id)
        if not held:
            return
        of_first = max((one.round for one in held if one.stage == 0), default=-1)
        ended_at = max(of_first, await self.elsewhere.first_stage())
        if ended_at >= last:
            raise UserError(
                f"the run has ended at round {ended_at}, as its owner ordered; nothing is left to train. The "
                f"weights of this peer are in {folder}; {self.hint}"
            )

    @property
    def starts_nothing(self) -> bool:
        """Whether no new microbatch starts here."""
        update = self.worker.update
        return self.round is not None or (update is not None and update.rounds.past_last)

    async def run(self) -> None:
        """Wait for the end of the run, then save the weights and leave. Runs until cancelled."""
        await self.ordered.wait()
        worker = self.worker
        while True:
            if await self._is_over():
                break
            await asyncio.sleep(LOOK_SECONDS)
        assert worker.update is not None
        self.round = worker.update.rounds.settled
        worker.log_event(log_events.RunEnded(round=self.round, ordered=self.last))
        worker.notify(
            "ended",
            f"the run has ended, as its owner ordered: all rounds up to {self.round} are settled. This peer "
            f"stays for {SERVE_SECONDS:g} s; {self.hint}",
        )
        self.stands()
        await worker.disk.save(worker.update.settled_weights)
        await asyncio.sleep(SERVE_SECONDS)
        self.leave()

    async def _is_over(self) -> bool:
        worker, last = self.worker, self.last
        if worker.update is None or last is None or worker.state not in IN_STEP:
            return False
        rounds = worker.update.rounds
        if worker.stage > 0:
            idle = rounds.open_round.tokens_of_group() == 0
            if rounds.last is None and idle and await self.elsewhere.first_stage() >= last:
                worker.update.end_at(rounds.current - 1)
        elif rounds.past_last and worker.data is not None:
            worker.data.origin.text = None
        behind = any(view.settled < rounds.settled for view in rounds.histories.same_branch_peers.values())
        return rounds.is_over and not behind
