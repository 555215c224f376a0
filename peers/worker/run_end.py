"""The end of a run, as its owner orders it: what is open settles, is saved, and the peer stops.

The order names a round of the first stage, which every microbatch passes: its peers begin none after it. The
other stages go on for as long as anything comes to them, and end when the first has and they are idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from peers.errors import UserError
from peers.network.discovery.height import RemoteProgressGuard
from peers.network.orders.order_book import OrderBook
from peers.state.checkpoint_file import on_disk
from peers.telemetry import events as noted
from peers.telemetry.snapshot import IN_STEP
from peers.worker.worker_context import WorkerContext

LOOK_SECONDS = 1.0
SERVE_SECONDS = 60.0
"""So long a peer is still there when all is settled: for archivists to take the last weights, and for the
other stages to read in the directory that the first has ended."""


class RunShutdown:
    """Of one worker. It does nothing before an end is ordered."""

    def __init__(
        self,
        worker: WorkerContext,
        book: OrderBook,
        elsewhere: RemoteProgressGuard,
        stands: Callable[[], None],
        leave: Callable[[], None],
        *,
        hint: str = "",
    ) -> None:
        """`stands()`: the run has ended here; `leave()` ends the worker; `hint`: how to export the model."""
        self.hint = hint
        self.worker = worker
        self.book = book
        self.elsewhere = elsewhere
        self.stands, self.leave = stands, leave
        self.ordered = asyncio.Event()
        self.round: int | None = None
        """The last settled round here, once the run has ended."""

    @property
    def last(self) -> int | None:
        """The round that the owner has named."""
        return self.book.order.ends

    def on_change(self) -> None:
        """An order has come, or the rounds have begun anew."""
        worker, last = self.worker, self.last
        if worker.update is not None and worker.stage == 0:
            worker.update.end_at(last)
        if last is not None:
            self.ordered.set()

    async def refuse_if_over(self, folder: Path | None) -> None:
        """Raise UserError where the run has ended, and intact weights of it are in `folder`. A peer without
        any may still get them from others."""
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
                f"the run has ended at round {ended_at}, as its owner ordered: nothing is left to train. The "
                f"weights of this peer are in {folder}; {self.hint}"
            )

    @property
    def starts_nothing(self) -> bool:
        """Whether no microbatch is begun here any more."""
        update = self.worker.update
        return self.round is not None or (update is not None and update.rounds.past_last)

    async def run(self) -> None:
        """Until the worker is told to leave, by this when the run has ended."""
        await self.ordered.wait()
        worker = self.worker
        while True:
            if await self._is_over():
                break
            await asyncio.sleep(LOOK_SECONDS)
        assert worker.update is not None
        self.round = worker.update.rounds.settled
        worker.log_event(noted.RunEnded(round=self.round, ordered=self.last))
        worker.notify(
            "ended",
            f"the run has ended, by its owner's order: all rounds up to {self.round} are settled. This peer "
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
            worker.data.text = None
        behind = any(view.settled < rounds.settled for view in rounds.histories.same_branch_peers.values())
        return rounds.is_over and not behind
