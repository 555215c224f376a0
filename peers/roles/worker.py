"""The worker role: finds the run, then holds one stage after the other until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from importlib.metadata import version
from random import Random

import torch

from peers.compute import ThreadCompute, set_threads
from peers.errors import UserError
from peers.joining import find_manifest
from peers.observe import Observer
from peers.roles.role import Network, Process
from peers.run_file import SignedManifest
from peers.settings import Settings
from peers.stage_part import real_part
from peers.supervision import hear_loop, unless_failed
from peers.text import Corpus, TextError, load_corpus
from peers.worker import Worker
from swarmnet.manifest import Data, Source

SAVE_SECONDS = 10.0
"""How long a new p2pd waits for the weights to be on disk."""


class WorkerRole:
    """Role `worker`. The weights outlive a session on disk and in the swarm."""

    def __init__(self, process: Process) -> None:
        self.process = process
        config = process.config
        self.device = device_of(config.device)
        self.worker: Worker | None = None
        self.observer: Observer | None = None
        self.compute: ThreadCompute | None = None
        self.stage, self.moved = None if config.stage == "auto" else config.stage, 0

    async def run(self, network: Network) -> None:
        """Until it is told to leave, and has."""
        process = self.process
        config = process.config
        assert config.run is not None, "checked by PeerFile"
        await network.join(process)
        signed = await find_manifest(config.run, network.directory, config.state / "run.json", process.say)
        process.known_as(signed.run_id, self.device.type)
        if self.device.type == "cuda":
            process.metrics.watch_gpu()
        name, owner = signed.manifest.name, signed.manifest.owner
        told = f"run {name} ({signed.run_id[:16]}...), stages: {len(signed.manifest.stages)}, owner: {owner}"
        process.say("run", told)
        set_threads(config.threads)
        while await self._stage(signed, network):
            pass

    async def _stage(self, signed: SignedManifest, network: Network) -> bool:
        """Hold one stage, until told to stop; True if it moves on to another."""
        process = self.process
        compute = self.compute = ThreadCompute(process.config.work_share)
        hear_loop(asyncio.get_running_loop(), compute.failed)
        process.pulse.fault = lambda: compute.failed.result() if compute.failed.done() else None
        worker = self.worker = Worker(
            signed, process.identity, network.transport, network.directory, compute,
            partial(self._text, signed), self._settings(),
            Random(process.identity.peer_id), process.log.record, process.say,
            partial(real_part, device=self.device),
        )  # fmt: skip
        observer = self.observer = Observer(worker, process.metrics, process.report, process.log)
        observing = asyncio.create_task(observer.run(), name="observer")
        if process.stop.is_set():
            worker.leave()
        observing.add_done_callback(worker.task_ended)
        try:
            await unless_failed(worker.run(), compute.failed)
        finally:
            observing.cancel()
            await asyncio.gather(observing, return_exceptions=True)
            observer.look()
            observer.note()
            process.log.flush()
            if worker.neighbourhood is not None:
                known = worker.neighbourhood.membership.peers.items()
                with contextlib.suppress(UserError):  # A full disk, which was said before.
                    network.cache.write((peer, seen.addresses) for peer, seen in known)
            self.worker = None
            held = worker.stage if worker.stage >= 0 else self.stage  # Also after its p2pd has died.
            self.stage = held if worker.goes_to is None else worker.goes_to
            self.moved += worker.goes_to is not None
            process.metrics.about.moves.inc(worker.goes_to is not None)
        return worker.goes_to is not None

    def _settings(self) -> Settings:
        config = self.process.config
        return Settings(
            stage=self.stage, moves=config.may_move, moved=self.moved,
            in_flight=config.in_flight, slots=config.slots, checkpoint_seconds=config.checkpoint_seconds,
            drain_seconds=config.drain_seconds, checkpoints=config.state / "checkpoints",
            version=version("swarmnet"), name=config.name,
        )  # fmt: skip

    async def _text(self, signed: SignedManifest) -> Corpus:
        """The run's text, from where this machine keeps it."""
        data = signed.manifest.data
        here = self.process.config.text
        sources = tuple(
            Source(s.name, str(here.get(s.name, s.path)), s.licence, s.origin) for s in data.sources
        )
        local = Data(sources, data.tokenizer, data.sequence_tokens, data.microbatch_sequences)
        seed = int.from_bytes(self.process.identity.public_key[:4], "little")
        vocabulary = signed.manifest.model.vocabulary
        try:
            tokens = await asyncio.to_thread(
                load_corpus, local, vocabulary, longest_bytes=self.process.config.text_limit, seed=seed
            )
        except TextError as error:
            raise UserError(str(error)) from None
        self.process.say("text", f"read {len(tokens):,} tokens of text")
        return Corpus(signed, tokens)

    def not_ready(self) -> str | None:
        if self.observer is not None and self.observer.ready:
            return None
        return self.worker.state if self.worker is not None else "connecting"

    def leave(self) -> bool:
        if self.worker is None:
            return False
        self.worker.leave()
        return True

    def working_seconds(self) -> float:
        return self.compute.working_seconds() if self.compute is not None else 0.0

    async def save(self) -> None:
        """Nobody can be reached, but the weights need not be fetched again."""
        worker = self.worker
        if worker is None or worker.update is None:
            return
        try:
            async with asyncio.timeout(SAVE_SECONDS):
                await worker.disk.save(worker.update.settled_weights)
        except TimeoutError:
            self.process.say("notsaved", f"the weights were not on disk within {SAVE_SECONDS:g} s")


def device_of(wish: str) -> torch.device:
    """The compute device that a peer file asks for. UserError when it is not there."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wish == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees no GPU; set device: cpu, or mend the driver")
    return torch.device(wish)
