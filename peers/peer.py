"""The peer process: a peer file becomes a running worker or bootstrap, until a signal or a fault ends it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random

import torch
import uvloop

from peers.compute import ThreadCompute, set_threads
from peers.config import PeerFile
from peers.counted_directory import CountedDirectory
from peers.errors import UserError, as_user_errors
from peers.event_log import EventLog
from peers.http import Exporter
from peers.joining import PeerCache, find_manifest, join_directory
from peers.metrics import Metrics
from peers.observe import DirectoryObserver, Observer, Pulse
from peers.run_file import SignedManifest
from peers.settings import Settings
from peers.stage_part import real_part
from peers.status import Report, Status, hear_libraries, open_report
from peers.supervision import FAULT, Fault, Watchdog, hear_loop, reason, unless_failed
from peers.text import Corpus, TextError, load_corpus
from peers.worker import Worker
from protocols.daemon import CannotStart, DaemonOptions
from protocols.dht import DhtDirectory
from protocols.errors import WireError
from protocols.identity import Identity, IdentityError, load_or_create
from protocols.p2pd import P2pdTransport
from swarmnet.manifest import Data, Source

MANIFEST_SECONDS = 60.0
"""How often a bootstrap with a run stores its manifest again; it lives 600 s in the directory."""
BOOTSTRAP_SECONDS = 5.0
"""How often a bootstrap says how many nodes it knows."""
RESTART_SECONDS = 1.0
"""Before a p2pd is started again that died soon after its start."""
LONGEST_RESTART_SECONDS = 30.0
"""While p2pd, which had run before, cannot be started."""
SAVE_SECONDS = 10.0
"""How long a new p2pd waits for the weights to be on disk."""


class P2pdEnded(Exception):
    """p2pd died; the peer starts it again."""


def run_peer_file(config: PeerFile) -> int:
    """Run one peer until it is told to stop. Returns the exit code; UserError for what a person can mend."""
    report = open_report(config.log, sys.stderr, time.time, config.name)
    hear_libraries(report)
    with contextlib.closing(report), _only_one(config.state), as_user_errors(CannotStart, IdentityError):
        identity = load_or_create(config.identity)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(Peer(config, identity, report).run())


@contextlib.contextmanager
def _only_one(state: Path) -> Iterator[None]:
    """A lock on the state folder: two peers with one identity would be one liar."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{state} is used by another running peer; each needs its own state") from None
        yield


class Peer:
    """One process. A session lasts as long as its p2pd; the weights outlive it on disk and in the swarm."""

    def __init__(self, config: PeerFile, identity: Identity, report: Report) -> None:
        self.config = config
        self.identity = identity
        self.report = report
        self.metrics = Metrics()
        self.log = EventLog(config.state / "events.jsonl", time.time, time.monotonic)
        self.log.trouble = partial(report.say, "event_log", level="warning")
        self.worker: Worker | None = None
        self.observer: Observer | None = None
        self.pulse = Pulse()
        self.compute: ThreadCompute | None = None
        self.listen = config.listen
        """With the ports that p2pd got: after a restart it is found where it was."""
        self.stage, self.moved = None if config.stage == "auto" else config.stage, 0
        self._stop = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        address = self.config.metrics.address
        exporter = None
        if address is not None:
            exporter = Exporter(address, self.metrics.text, self.pulse.problem, self._not_ready)
            self.say("metrics", f"metrics at {exporter.url}/metrics", url=exporter.url)
        self.log.record("started", peer=self.identity.peer_id, pid=os.getpid(), role=self.config.role)
        self.metrics.about.build(version("swarmnet"), platform.python_version(), version("torch")).set(1)
        pulse = asyncio.create_task(self.pulse.run(), name="pulse")
        watchdog = Watchdog(lambda: self.pulse.turns, self._working_seconds, self._last_words)
        watchdog.start()
        try:
            await self._sessions()
        except (Fault, MemoryError) as error:
            why = str(error) if isinstance(error, Fault) else reason(error)
            self._last_words(f"cannot go on: {why}")
            self.log.record("fault", reason=why)
            return FAULT
        finally:
            watchdog.stop()
            pulse.cancel()
            self.log.record("stopped")
            self.log.close()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)
        return 0

    async def _sessions(self) -> None:
        """One after another, until told to stop: each lasts as long as its p2pd."""
        pause = RESTART_SECONDS
        while True:
            began = time.monotonic()
            try:
                await self._session()
                return
            except P2pdEnded as error:
                self.metrics.network.daemon_restarts.inc()
                ran_well = time.monotonic() > began + LONGEST_RESTART_SECONDS
                pause = 0.0 if ran_well else RESTART_SECONDS
                self.say("p2pd_ended", f"{error}; starting it again in {pause:g} s")
            except CannotStart as error:
                if self.listen == self.config.listen:
                    raise  # It never ran: a person must look at the addresses.
                self.say("p2pd_not_started", f"{error}; trying again in {pause:g} s")
                self.listen = self.config.listen
                pause = min(LONGEST_RESTART_SECONDS, max(RESTART_SECONDS, 2 * pause))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop.wait()
                return

    def _working_seconds(self) -> float:
        return self.compute.working_seconds() if self.compute is not None else 0.0

    def _last_words(self, text: str) -> None:
        self.report.say("fault", text, "error")

    def say(self, event: str, text: str, **fields: object) -> None:
        """One line for people, and the event log."""
        self.report.say(event, text, "info", **fields)
        self.log.record(event, text=text, **fields)

    def _signalled(self) -> None:
        """The first signal leaves politely, the second one at once."""
        self._signals += 1
        if self._signals > 1:
            self.log.flush()
            os._exit(FAULT)
        longest = f"{self.config.drain_seconds:g} s at most"
        self.report.say("leaving", f"leaving: finishes what is under way ({longest}); again: at once")
        self._stop.set()
        if self.worker is not None:
            self.worker.leave()

    def _not_ready(self) -> str | None:
        if self.config.role == "bootstrap" or (self.observer is not None and self.observer.ready):
            return None
        return self.worker.state if self.worker is not None else "connecting"

    # -- one session ----------------------------------------------------------------------------------

    async def _session(self) -> None:
        self.report.status(Status("connecting"))
        transport = await P2pdTransport.start(self.config.identity, self._daemon_options())
        self.listen = with_ports(self.config.listen, transport.addresses)
        directory = observing = None
        try:
            directory = await DhtDirectory.start(transport.daemon)
            for address in transport.addresses:
                where = f"listening on {address}/p2p/{transport.peer}"
                self.say("listening", where, p2pd=transport.daemon.pid)
            counted = CountedDirectory(directory)
            observer = DirectoryObserver(counted, directory, self.metrics)
            observing = asyncio.create_task(observer.run(), name="directory observer")
            if self.config.role == "bootstrap":
                role = self._bootstrap(counted, directory, transport.addresses)
            else:
                role = self._worker(transport, counted)
            await self._unless_ended(transport, role)
        finally:
            if observing is not None:
                observing.cancel()
            if directory is not None:
                await directory.close()
            await transport.close()

    async def _unless_ended(self, transport: P2pdTransport, role: object) -> None:
        """Run the role until it ends, is told to stop before it began to train, or p2pd dies."""
        assert asyncio.iscoroutine(role)
        work = asyncio.create_task(role, name="role")
        ended = asyncio.create_task(transport.ended(), name="p2pd")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            while not work.done():
                waits = {work, ended} if self._stop.is_set() else {work, ended, stop}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    await self._save()
                    raise P2pdEnded(ended.result())
                if self._stop.is_set() and self.worker is None:
                    return
            work.result()
        finally:
            for task in (work, ended, stop):
                task.cancel()
            await asyncio.gather(work, ended, stop, return_exceptions=True)

    async def _save(self) -> None:
        """Nobody can be reached, but the weights need not be fetched again."""
        worker = self.worker
        if worker is None or worker.update is None:
            return
        try:
            async with asyncio.timeout(SAVE_SECONDS):
                await worker.disk.save(worker.update.settled_weights)
        except TimeoutError:
            self.say("not_saved", f"the weights were not on disk within {SAVE_SECONDS:g} s")

    def _daemon_options(self) -> DaemonOptions:
        config = self.config
        return DaemonOptions(
            listen=self.listen, announce=config.announce, auto_nat=config.nat, nat_port_map=config.nat,
            relay=config.relay, reachability="public" if config.role == "bootstrap" else None,
        )  # fmt: skip

    async def _bootstrap(
        self, directory: CountedDirectory, dht: DhtDirectory, addresses: Sequence[str]
    ) -> None:
        """Only lets others find each other, and keeps a run's manifest findable."""
        cache = PeerCache(self.config.state / "peers.json")
        if self.config.bootstrap:
            await join_directory(directory, self.config.bootstrap, cache, self.say)
        signed = None
        if self.config.run is not None:
            signed = await find_manifest(
                self.config.run, directory, self.config.state / "run.json", self.say
            )
            self._tell_how_to_join(signed, addresses)
        self._known_as(signed.run_id if signed is not None else "")
        put_at = float("-inf")
        while True:
            if signed is not None and time.monotonic() >= put_at + MANIFEST_SECONDS:
                put_at = time.monotonic()
                with contextlib.suppress(WireError):
                    await directory.put_manifest(signed.run_id, signed.wire(), 10.0)
            self.report.status(Status("bootstrap", swarm_peers=dht.known_nodes))
            self.log.flush()
            await asyncio.sleep(BOOTSTRAP_SECONDS)

    def _tell_how_to_join(self, signed: SignedManifest, addresses: Sequence[str]) -> None:
        public = [address for address in addresses if "/127.0.0.1/" not in address and "/::1/" not in address]
        address = f"{(public or addresses)[0]}/p2p/{self.identity.peer_id}"
        name, run = signed.manifest.name, signed.run_id
        self.say("run", f"run {name}: others join with: swarmnet join {run} --bootstrap {address}")

    def _known_as(self, run: str) -> None:
        device = device_of(self.config.device).type if self.config.role == "worker" else "none"
        self.metrics.about.peer(run, self.identity.peer_id, self.config.role, device).set(1)

    async def _worker(self, transport: P2pdTransport, directory: CountedDirectory) -> None:
        config, cache = self.config, PeerCache(self.config.state / "peers.json")
        assert config.run is not None, "checked by PeerFile"
        if config.bootstrap:
            await join_directory(directory, config.bootstrap, cache, self.say)
        signed = await find_manifest(config.run, directory, config.state / "run.json", self.say)
        self._known_as(signed.run_id)
        name, owner = signed.manifest.name, signed.manifest.owner
        told = f"run {name} ({signed.run_id[:16]}...), stages: {len(signed.manifest.stages)}, owner: {owner}"
        self.say("run", told)
        set_threads(config.threads)
        while await self._stage(signed, transport, directory, cache):
            pass

    async def _stage(
        self, signed: SignedManifest, transport: P2pdTransport, directory: CountedDirectory, cache: PeerCache
    ) -> bool:
        """Hold one stage, until told to stop; True if it moves on to another."""
        compute = self.compute = ThreadCompute(self.config.work_share)
        hear_loop(asyncio.get_running_loop(), compute.failed)
        self.pulse.fault = lambda: compute.failed.result() if compute.failed.done() else None
        worker = self.worker = Worker(
            signed, self.identity, transport, directory, compute, partial(self._text, signed),
            self._settings(), Random(self.identity.peer_id), self.log.record, self.say,
            partial(real_part, device=device_of(self.config.device)),
        )  # fmt: skip
        observer = self.observer = Observer(worker, self.metrics, self.report, self.log)
        observing = asyncio.create_task(observer.run(), name="observer")
        if self._stop.is_set():
            worker.leave()
        observing.add_done_callback(worker.task_ended)
        try:
            await unless_failed(worker.run(), compute.failed)
        finally:
            observing.cancel()
            await asyncio.gather(observing, return_exceptions=True)
            observer.look()
            observer.note()
            self.log.flush()
            if worker.neighbourhood is not None:
                known = worker.neighbourhood.membership.peers.items()
                with contextlib.suppress(UserError):  # A full disk, which was said before.
                    cache.write((peer, seen.addresses) for peer, seen in known)
            self.worker = None
            held = worker.stage if worker.stage >= 0 else self.stage  # Also after its p2pd has died.
            self.stage = held if worker.goes_to is None else worker.goes_to
            self.moved += worker.goes_to is not None
        return worker.goes_to is not None

    def _settings(self) -> Settings:
        config = self.config
        return Settings(
            stage=self.stage, moves=config.may_move, moved=self.moved,
            in_flight=config.in_flight, slots=config.slots, checkpoint_seconds=config.checkpoint_seconds,
            drain_seconds=config.drain_seconds, checkpoints=config.state / "checkpoints",
            version=version("swarmnet"),
        )  # fmt: skip

    async def _text(self, signed: SignedManifest) -> Corpus:
        """The run's text, from where this machine keeps it."""
        data = signed.manifest.data
        here = self.config.text
        sources = tuple(
            Source(s.name, str(here.get(s.name, s.path)), s.licence, s.origin) for s in data.sources
        )
        local = Data(sources, data.tokenizer, data.sequence_tokens, data.microbatch_sequences)
        seed = int.from_bytes(self.identity.public_key[:4], "little")
        vocabulary = signed.manifest.model.vocabulary
        try:
            tokens = await asyncio.to_thread(
                load_corpus, local, vocabulary, longest_bytes=self.config.text_limit, seed=seed
            )
        except TextError as error:
            raise UserError(str(error)) from None
        self.say("text", f"read {len(tokens):,} tokens of text")
        return Corpus(signed, tokens)


def with_ports(listen: Sequence[str], addresses: Sequence[str]) -> tuple[str, ...]:
    """`listen` with the ports that p2pd chose where it says 0; as it is where that cannot be told."""
    filled = []
    for wanted in listen:
        _, ip, host, transport, port, *rest = [*wanted.split("/"), *[""] * 5]
        for address in addresses:
            _, its_ip, its_host, its_transport, its_port, *its_rest = [*address.split("/"), *[""] * 5]
            same = (ip, transport, rest) == (its_ip, its_transport, its_rest)
            if same and port == "0" and host in (its_host, "0.0.0.0", "::"):
                wanted = "/".join([*wanted.split("/")[:4], its_port, *wanted.split("/")[5:]])
                break
        filled.append(wanted)
    return tuple(filled)


def device_of(wish: str) -> torch.device:
    """The compute device that a peer file asks for. UserError when it is not there."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wish == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees no GPU; set device: cpu, or mend the driver")
    return torch.device(wish)
