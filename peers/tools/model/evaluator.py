"""Let an observer score the run's newest settled weights on held-out text, again and again.

The observer requests forward passes from peers like any inference client. Training continues: peers spend at
most a quarter of their time on clients, and the observer pauses between two scores. Each score becomes a
metric, an event, and the loss in the observer's own record. `top --run` and the page of every observer show
that loss. The model may also continue a prompt, for the observer's own page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random

from peers.config.errors import NoAnswer, UserError, as_user_errors
from peers.config.run_file import SignedManifest
from peers.data.documents import TextError, held_out_text, read_text
from peers.data.tokenizer import tokenizer_file
from peers.process.role import Network, Process
from peers.telemetry import log_events
from peers.tools.model.evaluate import Score
from peers.tools.model.generate import Readable
from peers.tools.model.swarm_client import ANSWER_SECONDS, Conversation, SwarmClient
from peers.tools.model.swarm_session import ScoreProgress, invite_shown, not_let_in, score, stream

AT_ONCE = 2
"""Concurrent requests. The observer is in no hurry, and other clients need the peers, too."""
AGAIN_SECONDS = 60.0
"""Maximum time until a failed score is tried again: a run that begins has no peers for some minutes."""
ANSWER_TOKENS = 64
"""Length of a continuation: some lines. Each token costs the peers a forward pass over the window."""


class SwarmEvaluator:
    """Evaluator of an observer (`Evaluator` of peers/stageless/observer/role.py)."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.newest: Score | None = None
        self.round = -1
        """Round of the scored weights; the oldest if stages differ."""
        self.answer: tuple[float, log_events.PromptContinued] | None = None
        self.progress = ScoreProgress()

    @property
    def loss(self) -> float | None:
        """Mean loss of the newest score, in nats per token; None: there is none yet."""
        return self.newest.loss if self.newest is not None else None

    async def run(self, signed: SignedManifest, network: Network, changed: Callable[[], None]) -> None:
        """Score until cancelled, and call `changed` after each score. Raises UserError if the run does not
        admit this peer, or if the text cannot be read."""
        process, config, directory = self.process, self.process.config, network.directory
        unfit = not_let_in(signed, config.invite_bytes, network.transport.peer, directory.now())
        if unfit is not None:
            raise UserError(unfit)
        with as_user_errors(TextError):
            tokenizer_file(signed.manifest.data, config.tokenizer)
            text = await asyncio.to_thread(self._text)
        shown = invite_shown(signed, config.invite_bytes, network.transport.peer)
        # One client for all scores: peers answer over links that they opened to it, and keep these a while.
        async with SwarmClient(
            signed=signed,
            transport=network.transport,
            directory=directory,
            chance=Random(),
            notify=process.notify,
            invite=shown,
            tokenizer=config.tokenizer,
        ) as client:
            await self._evaluate_forever(client, text, changed)

    def _text(self) -> bytes:
        """Return the text to score. Raises TextError."""
        path = self.process.config.evaluating.text
        if path is None:
            return held_out_text()
        return read_text(
            str(path), lambda warning: self.process.report.notify("text", warning, level="warning")
        )

    async def _evaluate_forever(self, client: SwarmClient, text: bytes, changed: Callable[[], None]) -> None:
        while True:
            began = time.monotonic()
            interval = self.process.config.evaluating.seconds
            if not await self._once(client, text):
                interval = min(interval, AGAIN_SECONDS)
            changed()
            passed = time.monotonic() - began
            await asyncio.sleep(max(passed, interval - passed))

    async def _once(self, client: SwarmClient, text: bytes) -> bool:
        """Make one score. Returns whether the swarm answered."""
        process, talk, began = self.process, Conversation(), time.monotonic()
        self.progress = ScoreProgress()
        try:
            found = await score(client, text, conversation=talk, progress=self.progress, at_once=AT_ONCE)
        except NoAnswer as error:
            process.notify("not_evaluated", f"no score this time, after {self.progress.line()}: {error}")
            return False
        self._found(found, _oldest_round(talk), began)
        if process.config.evaluating.prompt:
            await self._continue_prompt(client, process.config.evaluating.prompt)
        return True

    async def _continue_prompt(self, client: SwarmClient, prompt: str) -> None:
        """Let the model continue the prompt. A failed request is tried again after the next score."""
        talk, readable, pieces = Conversation(), Readable(), []
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                async for piece in stream(client, prompt.encode(), ANSWER_TOKENS, conversation=talk):
                    pieces.append(readable.add(piece))
        except (NoAnswer, TimeoutError) as error:
            self.process.notify("not_evaluated", f"no continuation of the prompt this time: {error}")
            return
        text = "".join([*pieces, readable.add(b"", final=True)])
        made = log_events.PromptContinued(prompt=prompt, continuation=text, round=_oldest_round(talk))
        self.answer = time.time(), made
        self.process.log.record(made)

    def _found(self, found: Score, round: int, began: float) -> None:
        self.newest = found
        self.round = round
        self.process.notify_event(
            log_events.Evaluated(
                f"held-out loss {found.loss:.4f} nats per token, {found.bits_per_byte:.4f} bits per byte, at "
                f"round {round}",
                loss=found.loss,
                bits_per_byte=found.bits_per_byte,
                round=round,
                bytes=found.bytes,
                sha256=found.sha256,
                window=found.window,
                seconds=time.monotonic() - began,
            )
        )


def _oldest_round(talk: Conversation) -> int:
    """Return the round of the weights that answered; the oldest if stages differ, -1 if none answered."""
    return min((min(rounds) for rounds in talk.rounds.values()), default=-1)
