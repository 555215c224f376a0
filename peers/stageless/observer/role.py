"""The observer role: read the run's directory, ask peers whether they respond, and show the result on a page.

The directory is a DHT in which every peer announces itself by a signed record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.metadata import version
from typing import Protocol

from peers.config.errors import UserError
from peers.config.run_file import SignedManifest
from peers.config.run_url import join_command
from peers.network.discovery.bootstrap import find_manifest
from peers.network.discovery.claimed_tokens import Contributions
from peers.network.discovery.claims import Claims, plain_name
from peers.network.discovery.record_reader import OBSERVER
from peers.process.role import Network, Process, Role
from peers.runtime.http_server import PageServer
from peers.runtime.supervision import until_one_ends
from peers.stageless.observer.crawler import Crawl
from peers.stageless.observer.order_reader import Orders
from peers.stageless.observer.page_json import Board, seen_event
from peers.stageless.observer.pages import pages
from peers.stageless.observer.people_file import KEEP_SECONDS, keep_people, restore_people
from peers.stageless.observer.sightings import PeerObservations
from peers.stageless.observer.snapshot_of_records import snapshot_of
from peers.stageless.observer.steady_stage import SteadyStage
from peers.stageless.observer.swarm_metrics import SwarmMetrics
from peers.telemetry import event_log, log_events
from peers.telemetry.console import StatusLine
from peers.telemetry.event_log import LOG_FILE
from peers.telemetry.snapshot import SwarmSnapshot
from protocols.signed.peer_record import NO_STAGE

DRAW_SECONDS = 1.0


class Evaluator(Protocol):
    """Evaluates the run in addition, if the peer file says so (peers/tools/model/evaluator.py)."""

    @property
    def loss(self) -> float | None: ...

    @property
    def round(self) -> int: ...

    @property
    def answer(self) -> tuple[float, log_events.PromptContinued] | None:
        """The newest continuation of the peer file's prompt, and its Unix time."""

    async def run(self, signed: SignedManifest, network: Network, changed: Callable[[], None]) -> None: ...


class ObserverRole(Role):
    """Role `observer`. A session, one call of `run`, ends with its p2pd; the observations stay."""

    def __init__(self, process: Process, evaluator: Evaluator | None = None) -> None:
        self.process = process
        self.evaluator = evaluator
        self.board: Board | None = None
        self.sightings: PeerObservations | None = None
        self.orders: Orders | None = None
        self.metrics = SwarmMetrics(self._snapshot)
        self.steady = SteadyStage()

    async def run(self, network: Network) -> None:
        """Serve the page, join the network, fetch the run's manifest, and observe the run until cancelled."""
        process, config = self.process, self.process.config
        assert config.run is not None, "checked by PeerFile"
        handlers = pages(lambda: self.board, self.metrics, config.observer.targets, process.pulse.problem)
        observer = config.observer
        server = PageServer(
            address=observer.address, pages=handlers, key="observer.listen", hosts=observer.hosts
        )
        process.notify_event(log_events.Page(f"the swarm's page is at {server.url}", server.url))
        try:
            await network.join(process)
            manifest_file = config.state / "run.json"
            signed = await find_manifest(config.run, network.directory, manifest_file, process.notify)
            process.known_as(signed.run_id)
            await self._observe(signed, network)
        finally:
            await asyncio.to_thread(server.close)

    async def _observe(self, signed: SignedManifest, network: Network) -> None:
        """Crawl the run's records, update the page, announce this observer, and evaluate the run if the peer
        file says so. Return when one of these tasks ends; an error is raised."""
        process, directory = self.process, network.directory
        if self.sightings is None:
            block_rounds = signed.manifest.rounds.snapshot_interval
            contributions = Contributions(signed.run_id, block_rounds)
            sightings = PeerObservations(len(signed.manifest.stages), contributions=contributions)
            folder, archive = process.config.state, process.config.archive
            problem = await asyncio.to_thread(restore_people, folder, signed.run_id, contributions, archive)
            if problem is not None:
                process.report.notify("people", problem, level="warning")
            self.sightings = sightings
        if self.orders is None:
            self.orders = Orders(signed, process.log.record, self.sightings.events.append)
        if self.board is None:
            board = Board(signed, self._join_line(signed, network), version("swarmnet"))
            await asyncio.to_thread(board.restore, event_log.read_all(process.config.state / LOG_FILE))
            self.board = board
        me = process.identity.peer_id
        announcer = network.announcer(process, signed)
        crawl = Crawl(
            run=signed.run_id,
            me=me,
            directory=directory,
            sightings=self.sightings,
            orders=self.orders,
            bootstraps=process.config.bootstrap,
            log_event=process.log.record,
        )
        work = {
            "walk": crawl.run(),
            "draw": self._draw_forever(signed, crawl, network),
            "keep": self._keep_people_forever(signed, self.sightings),
            "announce": announcer.announce_forever(
                NO_STAGE, lambda: announcer.record(NO_STAGE, self.claims())
            ),
        }
        if self.evaluator is not None:
            work["evaluate"] = self.evaluator.run(signed, network, announcer.announce_now)
        await until_one_ends(**work)

    async def _keep_people_forever(self, signed: SignedManifest, sightings: PeerObservations) -> None:
        """Write the contributors to the disk every `KEEP_SECONDS`, and when cancelled."""

        async def keep() -> None:
            folder, contributions = self.process.config.state, sightings.contributions
            people, rounds = contributions.totals(), contributions.rounds
            try:
                await asyncio.to_thread(keep_people, folder, signed.run_id, people, rounds)
            except UserError as error:
                self.process.report.notify("people", str(error), level="warning")

        try:
            while True:
                await asyncio.sleep(KEEP_SECONDS)
                await keep()
        finally:
            await keep()

    def _snapshot(self) -> SwarmSnapshot | None:
        return self.board.snapshot if self.board is not None else None

    def claims(self) -> Claims:
        """Return the claims of this peer's record, with the newest score if it evaluates."""
        name, evaluator = plain_name(self.process.config.name), self.evaluator
        if evaluator is None:
            return Claims("serving", name, OBSERVER)
        return Claims("serving", name, OBSERVER, max(0, evaluator.round), loss=evaluator.loss)

    async def _draw_forever(self, signed: SignedManifest, crawl: Crawl, network: Network) -> None:
        """Update the page and the status line from the newest observations every `DRAW_SECONDS`."""
        assert self.board is not None
        while True:
            now = network.directory.now()
            crawl.sightings.look(now)
            own_loss = self.evaluator.loss if self.evaluator is not None else None
            if self.evaluator is not None and self.evaluator.answer is not None:
                self.board.model_answer = self.evaluator.answer
            snapshot = snapshot_of(
                crawl.sightings,
                signed,
                now,
                crawl.orders.ordered,
                own_eval_loss=own_loss,
                walked_at=crawl.walked_at,
                bootstraps=crawl.bootstraps,
            )
            if self.board.show(self.steady.steady(snapshot)):
                self.process.log.record(seen_event(self.board.snapshot))
            self.process.report.status(
                StatusLine(
                    "observing",
                    round=snapshot.round,
                    loss=snapshot.loss,
                    tokens=snapshot.tokens,
                    tokens_per_second=snapshot.tokens_per_second,
                    swarm_peers=snapshot.peers,
                )
            )
            self.process.log.flush()
            await asyncio.sleep(DRAW_SECONDS)

    def _join_line(self, signed: SignedManifest, network: Network) -> str:
        """Return the join command, through the bootstraps of the peer file, or else through this peer."""
        bootstraps = self.process.config.bootstrap or network.ways_in[:1]
        return join_command(signed.run_id, bootstraps)

    def not_ready(self) -> str | None:
        board = self.board
        if board is None:
            return "fetches the run's manifest"
        return None if board.snapshot.walked_at else "has not read the whole directory yet"
