"""The evaluator: a visitor that stays, and scores the run's newest settled weights on held-out text again and
again.

It asks peers for forward passes as any visitor does, so training goes on: they give visitors a quarter of
their time at most, and it rests between two scores. What it finds is a metric, an event, its picture for
`top`, and the loss in its own record, from which `top --run` and the observer have it.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from importlib.metadata import version
from random import Random
from typing import Any

from peers.config.run_file import SignedManifest
from peers.data.documents import TextError, held_out_text, read_text
from peers.data.tokenizer import tokenizer_file
from peers.errors import NoAnswer, UserError, as_user_errors
from peers.network.discovery.announcer import Presence
from peers.network.discovery.bootstrap import find_manifest
from peers.network.discovery.claims import Claims, plain_name
from peers.network.discovery.record_reader import EVALUATOR
from peers.role import Network, Process, Role
from peers.runtime.control_server import Request
from peers.runtime.supervision import until_one_ends
from peers.telemetry import said
from peers.telemetry.console import Status
from peers.telemetry.event_fold import Story
from peers.telemetry.picture import Picture, as_json, curve
from peers.tools.model.evaluate import Score
from peers.tools.model.swarm_client import Conversation, SwarmClient
from peers.tools.model.swarm_session import Progress, invite_shown, not_let_in, score
from protocols.signed.peer_record import NO_STAGE

SHOW_SECONDS = 1.0
AT_ONCE = 2
"""Requests under way: it has time, and others ask, too."""


class EvaluatorRole(Role):
    """Role `evaluator`."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.story = Story()
        """For `swarmnet top`."""
        process.log.listeners.append(self.story.take)
        process.control.answers["status"] = self._asked_how_it_is
        self.signed: SignedManifest | None = None
        self.newest: Score | None = None
        self.round = -1
        """Of the weights that were scored; of stages that differ, the oldest."""
        self.losses: list[tuple[float, float]] = []
        self.progress = Progress()

    async def run(self, network: Network) -> None:
        """Until it is cancelled. UserError if the run does not let it in, or its text is not there."""
        process, config, directory = self.process, self.process.config, network.directory
        assert config.run is not None, "checked by PeerFile"
        await network.join(process)
        signed = await find_manifest(config.run, directory, config.state / "run.json", process.say)
        self.signed = signed
        process.known_as(signed.run_id)
        unfit = not_let_in(signed, config.invite_bytes, network.transport.peer, directory.now())
        if unfit is not None:
            raise UserError(unfit)
        with as_user_errors(TextError):
            tokenizer_file(signed.manifest.data, config.tokenizer)
            text = await asyncio.to_thread(self._text)
        presence = Presence(
            signed, process.identity, network.transport, directory, version("swarmnet"), process.log.record
        )
        shown = invite_shown(signed, config.invite_bytes, network.transport.peer)
        # One visitor for all scores: peers answer over links that they opened to it, and keep these a while.
        async with SwarmClient(
            signed, network.transport, directory, Random(), process.say, invite=shown,
            tokenizer=config.tokenizer,
        ) as client:  # fmt: skip
            await until_one_ends(
                evaluate=self._evaluate_forever(client, text, presence),
                announce=presence.announce_forever(NO_STAGE, partial(self._record, presence)),
                show=self._show_forever(),
            )

    def _text(self) -> bytes:
        """Raises TextError."""
        path = self.process.config.evaluating.text
        if path is None:
            return held_out_text()
        return read_text(str(path), lambda warning: self.process.report.say("text", warning, level="warning"))

    async def _evaluate_forever(self, client: SwarmClient, text: bytes, presence: Presence) -> None:
        while True:
            began = time.monotonic()
            await self._once(client, text)
            presence.announce_now()
            passed = time.monotonic() - began
            await asyncio.sleep(max(passed, self.process.config.evaluating.seconds - passed))

    async def _once(self, client: SwarmClient, text: bytes) -> None:
        """One score; whoever does not answer is asked again the next time."""
        process, talk, began = self.process, Conversation(), time.monotonic()
        self.progress = Progress()
        try:
            found = await score(client, text, conversation=talk, progress=self.progress, at_once=AT_ONCE)
        except NoAnswer as error:
            process.say("not_evaluated", f"no score this time, after {self.progress.line()}: {error}")
            return
        self._found(found, min((min(rounds) for rounds in talk.rounds.values()), default=-1), began)

    def _found(self, found: Score, round: int, began: float) -> None:
        self.newest, self.round = found, round
        self.losses.append((time.time(), found.loss))
        evaluation = self.process.metrics.evaluation
        evaluation.set("eval_loss", found.loss)
        evaluation.set("eval_round", round)
        evaluation.set("eval_timestamp_seconds", time.time())
        self.process.tell(said.Evaluated(
            f"held-out loss {found.loss:.4f} nats per token, {found.bits_per_byte:.4f} bits per byte, at "
            f"round {round}",
            loss=found.loss, bits_per_byte=found.bits_per_byte, round=round, bytes=found.bytes,
            sha256=found.sha256, window=found.window, seconds=time.monotonic() - began,
        ))  # fmt: skip

    def _record(self, presence: Presence) -> bytes:
        loss = self.newest.loss if self.newest is not None else None
        name = plain_name(self.process.config.name)
        return presence.record(NO_STAGE, Claims("serving", name, EVALUATOR, max(0, self.round), loss=loss))

    async def _show_forever(self) -> None:
        while True:
            loss = self.newest.loss if self.newest is not None else None
            round = self.round if self.round >= 0 else None
            self.process.report.status(Status("evaluating", round=round, loss=loss))
            self.process.log.flush()
            await asyncio.sleep(SHOW_SECONDS)

    async def _asked_how_it_is(self, _request: Request) -> dict[str, Any]:
        return as_json(self.picture())

    def picture(self) -> Picture:
        """For `swarmnet top`."""
        return Picture(
            source=f"evaluator {self.process.config.name}",
            time=time.time(),
            run=self.signed.manifest.name if self.signed is not None else "",
            state=f"evaluating, {self.progress.done} of {self.progress.windows} windows",
            stages=len(self.signed.manifest.stages) if self.signed is not None else 0,
            round=self.round if self.round >= 0 else None,
            eval_loss=self.newest.loss if self.newest is not None else None,
            losses=curve(self.losses),
            events=tuple(self.story.events),
        )

    def not_ready(self) -> str | None:
        return None if self.newest is not None else "has no score yet"
