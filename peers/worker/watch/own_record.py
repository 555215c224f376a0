"""The record of what this computer has contributed, across the stages and pauses of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from peers.config.run_file import SignedManifest
from peers.telemetry.console import count_text
from peers.telemetry.snapshot import OwnWork
from peers.worker.rounds.receipt_service import FILE_NAME, ReceiptsFile, confirmed_tokens, own_tokens, read
from peers.worker.stage_services import StageServices
from peers.worker.watch.own_rank import OwnRank
from peers.worker.watch.totals import PeerTotals
from swarmnet.identifiers import PeerId


class OwnRecord:
    """The receipts and totals of this peer."""

    def __init__(self, state: Path, me: PeerId, joules: Callable[[], float]) -> None:
        """`joules` returns the energy of the GPU since this process started; 0 if it is not known."""
        self._receipts_file = state / FILE_NAME
        self._me = me
        self._joules = joules
        self._totals = PeerTotals(state)
        self.rank = OwnRank(me)
        self._receipts_before: ReceiptsFile | None = None
        """The receipts at the end of the last stage; None if they were not read yet."""

    def count(self, now: float, trains: bool, traffic_bytes: int) -> None:
        """Take a sample of the serving worker, as `PeerTotals.look` does."""
        self._totals.look(
            now, _this_month(), trains=trains, joules=self._joules(), traffic_bytes=traffic_bytes
        )

    def month_bytes(self) -> int:
        """Return the bytes sent and received in this calendar month."""
        return self._totals.month_bytes(_this_month())

    def end_stage(self, services: StageServices | None, notify: Callable[[str, str], None]) -> None:
        """Called when the peer stops to serve a stage with these services; None if it had chosen none. Tell
        the user what this computer has contributed so far, and how much of it others have confirmed."""
        self._totals.save()
        if services is None:
            return
        self._receipts_before = kept = services.receipts.kept
        work = self.work(services.context.signed, services)
        if work.tokens:
            confirmed = count_text(confirmed_tokens(kept))
            notify("credit", f"{work.text()} Others have confirmed {confirmed} tokens (`swarmnet credit`).")

    def receipts(self, signed: SignedManifest, services: StageServices | None) -> ReceiptsFile:
        """Return the receipts of this peer. `services` is None while it serves no stage. Reading the file
        verifies each receipt, so that is done once. Raises UserError."""
        if services is not None:
            return services.receipts.kept
        if self._receipts_before is None:
            self._receipts_before = read(self._receipts_file, signed, self._me)
        return self._receipts_before

    def work(self, signed: SignedManifest, services: StageServices | None) -> OwnWork:
        """Return what this computer has contributed to the run. Raises UserError."""
        kept, totals = self.receipts(signed, services), self._totals
        if services is None:
            return OwnWork(own_tokens(kept), totals.seconds, joules=totals.joules)
        stage = services.stage if len(signed.manifest.stages) > 1 else None
        unreported, all_tokens = services.receipts.own.unreported_tokens, services.round_service.tokens
        return OwnWork(
            own_tokens(kept) + unreported,
            totals.seconds,
            share=min(1.0, (own_tokens(kept, stage) + unreported) / all_tokens) if all_tokens else None,
            stage=stage,
            joules=totals.joules,
        )


def _this_month() -> str:
    return time.strftime("%Y-%m")
