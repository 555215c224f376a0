"""Keep a peer's momentum through a restart: one safetensors file per stage in the folder of its checkpoints.

Only this peer reads the file. It is no part of what other peers receive. A file that is damaged, foreign or
too old is not used: without it a peer starts with an empty momentum, as a newcomer does.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from peers.compute.executor import Compute, computed
from peers.compute.stage_part import StagePart
from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.state.checkpoint_file import content_hash, number
from peers.state.safetensors_file import MAX_HEAD_BYTES, open_tensors
from peers.telemetry import log_events
from peers.telemetry.event import Event
from swarmnet.identifiers import RunId
from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.method import KeepsMomentum
from swarmnet.run.manifest import Manifest

NAME = "momentum"
"""Name of the only tensor in the file."""
DTYPE = torch.bfloat16
"""Half the bytes of float32. A momentum's directions and signs need few digits."""
MAX_AGE = 1.0
"""Rounds after which a momentum is not used any more, in units of 1 / (1 - beta): how long a gradient stays
in it. Younger ones are used as they are. Weakened by beta for each round, they did not learn better."""


@dataclass(frozen=True, slots=True)
class MomentumFile:
    """The file of one stage."""

    folder: Path
    run_id: RunId
    stage: int
    layout: Layout

    @property
    def path(self) -> Path:
        # Its name begins as those of checkpoints, whose writer removes what a killed one left of either.
        return self.folder / f"stage-{self.stage}-momentum.safetensors"

    def write(self, round: int, momentum: Tensor) -> None:
        """Write the momentum as of `round`, bfloat16 [layout.size]. Raises UserError if the disk refuses."""
        tensors = {NAME: momentum}
        metadata = {**self._expected(), "round": str(round)}
        metadata["content"] = content_hash(metadata, tensors)
        write_atomically(self.path, save(tensors, metadata))

    def read(self) -> tuple[int, Tensor]:
        """Return the round and the momentum in the file. Raises FileNotFoundError if there is none, and
        UserError, with the reason, if it cannot be used."""
        size = self.layout.size
        try:
            if self.path.stat().st_size > MAX_HEAD_BYTES + size * DTYPE.itemsize:
                raise ValueError("it is longer than a momentum of this stage")
            with open_tensors(self.path, max_tensors=1) as file:
                metadata = file.metadata() or {}
                momentum = file.get_tensor(NAME)
            if metadata.pop("content") != content_hash(metadata, {NAME: momentum}):
                raise ValueError("it is damaged: its content does not have the hash that it names")
            if self._expected().items() - metadata.items():
                raise ValueError("it is of another run, stage or layout")
            if (momentum.dtype, momentum.shape) != (DTYPE, (size,)) or not bool(momentum.isfinite().all()):
                raise ValueError("its numbers are those of no momentum")
            return number(metadata["round"]), momentum
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise UserError(f"{self.path} cannot be used ({error})") from None

    def _expected(self) -> dict[str, str]:
        """Return the metadata of every usable file."""
        layout = hashlib.sha256(repr((self.layout.entries, self.layout.planes)).encode()).hexdigest()
        return {"run": self.run_id, "stage": str(self.stage), "layout": layout}


class MomentumKeeper:
    """Keeps the momentum of a worker. Does nothing without a folder, or if the method has no momentum that
    may return (`KeepsMomentum`)."""

    def __init__(
        self,
        *,
        folder: Path | None,
        manifest: Manifest,
        run_id: RunId,
        stage: int,
        part: StagePart,
        compute: Compute,
        log_event: log_events.LogEvent,
    ) -> None:
        self._file = None if folder is None else MomentumFile(folder, run_id, stage, part.layout)
        self._method = part.method
        self._max_age = MAX_AGE / (1 - manifest.sync.momentum)
        self._compute = compute
        self._log_event = log_event

    async def restore(self, round: int) -> None:
        """Continue from the momentum on the disk, unless it is too old. Called once, before the first
        contribution; `round` is the current one."""
        event = await computed(self._compute, partial(self._restored, round))
        if event is not None:
            self._log_event(event)

    def _restored(self, round: int) -> Event | None:
        """Continue from the momentum on the disk, and return what to log. Called in the compute thread, which
        has nothing to compute yet."""
        if self._file is None or not isinstance(self._method, KeepsMomentum):
            return None
        try:
            kept_round, momentum = self._file.read()
        except FileNotFoundError:
            return None
        except UserError as error:
            return log_events.MomentumIgnored(str(error))
        age = round - kept_round
        if not 0 <= age <= self._max_age:
            return log_events.MomentumIgnored(f"it is of round {kept_round}, and now is {round}")
        self._method.momentum.copy_(momentum)
        return log_events.MomentumRestored(round=kept_round, age=age)

    async def save(self, round: int) -> None:
        """Write the momentum in a thread; `round` is the current one. A refusal of the disk is logged."""
        method = self._method
        if self._file is None or not isinstance(method, KeepsMomentum):
            return
        momentum = method.momentum
        copy = await computed(self._compute, lambda: momentum.to("cpu", DTYPE, copy=True))
        try:
            await asyncio.to_thread(self._file.write, round, copy)
        except UserError as error:
            self._log_event(log_events.MomentumIgnored(str(error)))

    async def save_forever(self, seconds: float, current: Callable[[], int]) -> None:
        """Write the momentum every `seconds` until cancelled; `current()` is the current round. Never writes
        if `seconds` is 0."""
        if not seconds:
            await asyncio.get_running_loop().create_future()  # Never completes.
        while True:
            await asyncio.sleep(seconds)
            await self.save(current())
