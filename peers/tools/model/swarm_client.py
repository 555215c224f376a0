"""The client side of inference: a peer without a stage that gets answers from live peers.

The client finds peers of every stage in the directory and keeps links to some of each. `Requests`
(swarmnet/inference/inference_client.py) decides which peer to ask. Answers come over links that the peers
open on the same connections, so the client need not be reachable. The client stores the answer of each
stage until the next stage has answered; hidden states pass through it as bytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from peers.config.errors import NoAnswer
from peers.config.run_file import SignedManifest
from peers.network.discovery.announcer import OPERATION_SECONDS
from peers.network.discovery.record_reader import newest, opened
from peers.network.message_router import MessageRouter, handles
from peers.runtime.timer import Timer
from peers.telemetry.log_events import Notify
from peers.telemetry.reasons import refusal
from peers.worker.inference.forward_compute import TOKEN_BYTES
from protocols.errors import WireError
from protocols.fields import RunSizes
from protocols.messages.table import ForwardDeclined, Forwarded, ForwardRequest, Hello, Lane, Message, Refuse
from protocols.messages.terms import Terms
from protocols.ports import Directory, Link, Transport
from protocols.signed.envelope import run_bytes
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId
from swarmnet.inference.inference_client import (
    CODES,
    MALFORMED,
    NOT_READY,
    WRONG_STAGE,
    Effect,
    Impossible,
    Missing,
    Pins,
    RequestFinished,
    Requests,
    SendRequest,
)
from swarmnet.model import activation_codec
from swarmnet.run.activation_sizes import Codec
from swarmnet.run.schema import WIRE_VERSION

DIAL_SECONDS = 8.0
LOOK_SECONDS = 10.0
"""Seconds between look-ups of all stages in the directory; LOOK_SOON_SECONDS while a stage has no peer."""
LOOK_SOON_SECONDS = 1.0
REDIAL_SECONDS = 5.0
MAX_LINKED = 8
"""Maximum linked peers per stage: eight requests at four per peer need two."""
ANSWER_SECONDS = 300.0
"""Timeout of a request in all, including the wait for missing stages."""


@dataclass(slots=True)
class Conversation:
    """Requests that belong together and should be answered by the same weights."""

    pins: Pins = field(default_factory=dict)
    rounds: dict[int, set[int]] = field(default_factory=dict)
    """Rounds of the weights that answered, by stage: one each, unless peers dropped them meanwhile."""
    left_out: Counter[int] = field(default_factory=Counter)
    """Number of requests that skipped a stage, by stage."""
    requests: int = 0


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Output of the last stage."""

    logits: Tensor | None
    """Logits [B, V] of each sequence's last token; None if a score was requested."""
    loss_sum: float
    """Loss in nats, summed over the labels."""


@dataclass(slots=True)
class _Open:
    conversation: Conversation
    shape: tuple[int, int]
    inputs: bytes
    tokens: bytes
    """Tokens that accompany hidden states through a narrow boundary; else empty."""
    labels: bytes
    answer: asyncio.Future[HeadOutput]


@dataclass(eq=False, kw_only=True)
class StageLinks:
    """A client's links to some peers of each stage, which it finds in the directory. `reached` is called with
    each peer that is linked, and its stage."""

    signed: InitVar[SignedManifest]
    transport: Transport
    directory: Directory
    chance: Random
    notify: Notify
    invite: bytes
    reached: Callable[[PeerId, int], None]

    def __post_init__(self, signed: SignedManifest) -> None:
        self.run_id = signed.run_id
        self.all_stages = range(len(signed.manifest.stages))
        self.sent_bytes = 0
        self.received_bytes = 0
        self.stages: dict[PeerId, int] = {}
        """Stages of the linked peers."""
        self._links: dict[PeerId, Link] = {}
        self._dial_at: dict[PeerId, float] = {}
        self._looker: asyncio.Task[None] | None = None
        self._complete = asyncio.Event()
        """Set when a peer of every stage has been reached."""

    def __contains__(self, peer: PeerId) -> bool:
        """Return whether a peer is or was linked."""
        return peer in self._links or peer in self._dial_at

    async def open(self) -> None:
        """Link to peers of all stages, and look for others from now on. Records outlive their peers, so this
        does not wait for the dials that remain once each stage has a peer."""
        loop = asyncio.get_running_loop()
        first = loop.create_task(self._look(), name="first look")
        complete = loop.create_task(self._complete.wait(), name="all stages")
        await asyncio.wait({first, complete}, return_when=asyncio.FIRST_COMPLETED)
        complete.cancel()
        self._looker = loop.create_task(self._look_forever(first), name="look up")

    async def close(self) -> None:
        if self._looker is not None:
            self._looker.cancel()
            await asyncio.gather(self._looker, return_exceptions=True)
        for link in self._links.values():
            link.close()
        self._links.clear()

    def post(self, peer: PeerId, message: Message, body: bytes) -> None:
        """Send a message to a linked peer. Raises WireError."""
        self.sent_bytes += self._links[peer].post(message, body)

    def is_broken(self, peer: PeerId) -> bool:
        """Return whether the link to a peer has ended. A link that the peer opened does not matter: it opens
        another with its next answer."""
        link = self._links.get(peer)
        return link is not None and link.closed

    def drop(self, peer: PeerId) -> bool:
        """Close a link; the peer is dialled again later. Returns False if there is none."""
        link = self._links.pop(peer, None)
        if link is None:
            return False
        link.close()
        del self.stages[peer]
        self._redial_later(peer)
        return True

    def _redial_later(self, peer: PeerId) -> None:
        delay_seconds = REDIAL_SECONDS * self.chance.uniform(0.8, 1.2)
        self._dial_at[peer] = asyncio.get_running_loop().time() + delay_seconds

    async def _look_forever(self, first: asyncio.Task[None]) -> None:
        await first
        while True:
            short = set(self.all_stages) - set(self.stages.values())
            await asyncio.sleep(LOOK_SOON_SECONDS if short else LOOK_SECONDS)
            await self._look()

    async def _look(self) -> None:
        """Look up all stages and dial new peers, up to MAX_LINKED per stage."""
        found = await asyncio.gather(*(self._look_up(stage) for stage in self.all_stages))
        there = newest(signed for records in found for signed in records)
        linked, now = Counter(self.stages.values()), asyncio.get_running_loop().time()
        dials = []
        for stage in self.all_stages:
            new = [
                signed
                for peer, signed in there.items()
                if signed.record.stage == stage
                and peer not in self._links
                and self._dial_at.get(peer, 0.0) <= now
            ]
            self.chance.shuffle(new)
            dials += new[: max(0, MAX_LINKED - linked[stage])]
        await asyncio.gather(*(self._dial(signed) for signed in dials))

    async def _look_up(self, stage: int) -> list[SignedRecord]:
        """Return the records of a stage; none if the directory does not answer."""
        try:
            found = await self.directory.look_up(self.run_id, stage, OPERATION_SECONDS)
            return list(opened((data for _, data in sorted(found.items())), self.run_id))
        except WireError as error:
            self.notify("look_up_failed", f"the directory does not answer for stage {stage}: {error}")
            return []

    async def _dial(self, signed: SignedRecord) -> None:
        peer, record = signed.peer, signed.record
        try:
            link = await self.transport.open(peer, "data", DIAL_SECONDS, record.addresses)
            self.sent_bytes += link.post(Hello(WIRE_VERSION, run_bytes(self.run_id), b"", self.invite))
        except WireError:
            self._redial_later(peer)
            return
        self._links[peer] = link
        self.stages[peer] = record.stage
        if len(set(self.stages.values())) == len(self.all_stages):
            self._complete.set()
        self.reached(peer, record.stage)


class SwarmClient:
    """Inference client and `Receiver` of its transport. `async with` opens and closes the links."""

    def __init__(
        self,
        *,
        signed: SignedManifest,
        transport: Transport,
        directory: Directory,
        chance: Random,
        notify: Notify,
        exact: bool = True,
        invite: bytes = b"",
        tokenizer: Path | None = None,
    ) -> None:
        """Prepare a client.

        `notify(event, text)` prints a line for people. `exact`: send hidden states as fp32, not in the run's
        codec. `invite`: shown to peers of a run that admits clients only by invite. `tokenizer`: path of the
        run's tokenizer.json."""
        self.manifest = signed.manifest
        self.notify = notify
        self.exact = exact
        self.tokenizer = tokenizer
        self.codec: Codec = "fp32" if exact else self.manifest.activation_codec
        self._loop = asyncio.get_running_loop()
        self._requests = Requests(self.manifest.path_rules(), chance, self._loop.time())
        self._open: dict[int, _Open] = {}
        self.links = StageLinks(
            signed=signed,
            transport=transport,
            directory=directory,
            chance=chance,
            notify=notify,
            invite=invite,
            reached=lambda peer, stage: self._do(self._requests.reached(peer, stage, self._loop.time())),
        )
        self._router = MessageRouter()
        self._router.add(self)
        self._counter = 0
        self._timer = Timer(self._tick)
        self._missing: tuple[int, ...] = ()
        """Needed stages without a peer."""
        self._said_busy: set[int] = set()
        """Busy stages that the user was notified of."""
        self._declined: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        """Number of peers that refused this client, by code."""

    async def __aenter__(self) -> SwarmClient:
        terms = Terms(self._router.bodies(RunSizes(self.manifest)), self.links.__contains__)
        self.links.transport.listen(self, terms)
        await self.links.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.close()
        await self.links.close()

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a request: peers accept at most a microbatch."""
        return self.manifest.data.seq_len * self.manifest.data.micro_batch_size

    async def forward(
        self,
        conversation: Conversation,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        deadline_seconds: float = ANSWER_SECONDS,
    ) -> HeadOutput:
        """Return the model's output for tokens_BT: the next token's logits, or the loss of the labels. Raises
        NoAnswer."""
        self._counter += 1
        key, (batch, length) = self._counter, tokens_BT.shape
        labels = b"" if labels_BT is None else _int32(labels_BT)
        answer: asyncio.Future[HeadOutput] = self._loop.create_future()
        tokens = _int32(tokens_BT)
        beside = tokens if self.manifest.model.boundary.is_narrow else b""
        self._open[key] = _Open(conversation, (batch, length), tokens, beside, labels, answer)
        self._do(self._requests.start(key, conversation.pins, self._loop.time()))
        try:
            async with asyncio.timeout(deadline_seconds):
                return await answer
        except TimeoutError:
            raise NoAnswer(f"no answer within {deadline_seconds:g} s; {self._state()}") from None
        finally:
            del self._open[key]
            self._do(self._requests.drop(key, self._loop.time()))

    def _state(self) -> str:
        linked = Counter(self.links.stages.values())
        peers = ", ".join(f"{stage}: {linked[stage]}" for stage in range(len(self.manifest.stages)))
        declined = ", ".join(f"{code} {count} times" for code, count in self._declined.items())
        away = ", ".join(f"{code} {count} times" for code, count in self._refused.items())
        refusals = (("declined", declined), ("refused us", away))
        said = "".join(f"; they {what}: {words}" for what, words in refusals if words)
        return f"peers reached by stage: {peers}{said}"

    # -- effects of Requests --------------------------------------------------------------------------

    def _tick(self) -> None:
        self._do(self._requests.tick(self._loop.time()))

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendRequest():
                    self._ask(effect)
                case RequestFinished(key, visited):
                    conversation = self._open[key].conversation
                    conversation.requests += 1
                    conversation.left_out.update(set(range(len(self.manifest.stages))) - set(visited))
                case Impossible(key, reason):
                    self._fail(key, f"several peers refuse the request: {reason}")
                case Missing(stages, busy):
                    self._say_missing(stages, busy)
        self._timer.arm(self._requests.next_deadline())

    def _ask(self, ask: SendRequest) -> None:
        kept = self._open[ask.request]
        last = ask.stage == len(self.manifest.stages) - 1
        body = kept.inputs + (kept.tokens if ask.stage else b"") + (kept.labels if last else b"")
        message = ForwardRequest(
            ask.request,
            ask.attempt,
            ask.stage,
            ask.round,
            ask.path,
            *kept.shape,
            self.exact,
            bool(kept.labels),
            ask.deadline_seconds,
        )
        try:
            self.links.post(ask.peer, message, body)
        except WireError:
            self._loop.call_soon(self._lose, ask.peer)

    def _fail(self, key: int, reason: str) -> None:
        answer = self._open[key].answer
        if not answer.done():
            answer.set_exception(NoAnswer(reason))

    def _say_missing(self, stages: tuple[int, ...], busy: tuple[int, ...]) -> None:
        without_peers = tuple(stage for stage in stages if stage not in busy)
        if without_peers and without_peers != self._missing:
            names, rules = ", ".join(map(str, without_peers)), self.manifest.path_rules()
            left = rules.stages - rules.shortest
            why = (
                f"this run lets a request leave out {left} middle stages"
                if left
                else ("this run leaves no stage out")
            )
            self.notify("missing", f"waiting for a peer of stage {names}: {why}")
        for stage in set(busy) - self._said_busy:  # Notify once: a busy swarm is busy again and again.
            self._said_busy.add(stage)
            why = "its peers have not answered in time; they are asked again"
            self.notify("busy", f"stage {stage} is busy: {why}")
        if not stages and self._missing and self._open:
            self.notify("found", "all stages that are needed have peers again")
        self._missing = without_peers

    # -- Receiver -------------------------------------------------------------------------------------

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        """Handle a peer's answer to a forward request, or its refusal. Other messages are ignored."""
        self.links.received_bytes += wire_bytes
        self._router.dispatch(peer, message, body)

    @handles(ForwardDeclined)
    def _on_declined(self, peer: PeerId, message: ForwardDeclined, _body: bytes) -> None:
        code, now = message.code, self._loop.time()
        reason = "".join(filter(str.isprintable, message.reason[:200]))  # It may be printed on a terminal.
        self._declined[code if code in CODES else "other"] += 1
        if code == WRONG_STAGE:  # It changed its stage: its record will show that.
            self._lose(peer)
        else:
            self._do(self._requests.declined(message.request, peer, message.attempt, code, reason, now))
        if code == NOT_READY and self._declined[code] == 1:
            self.notify("not_ready", "a peer has no settled snapshot of its stage yet; asking again")

    @handles(Refuse)
    def _turned_away(self, peer: PeerId, refuse: Refuse, _body: bytes) -> None:
        """Count a peer's refusal, close the link, and notify the user of the first one of each code."""
        code = refusal(refuse.code)
        reason = "".join(filter(str.isprintable, refuse.reason[:200]))
        if peer in self.links.stages and not self._refused[code]:  # Others will give the same reason.
            self.notify("turned_away", f"a peer refused this client ({code}): {reason}")
        self._refused[code] += 1
        self._lose(peer)

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None:
        if self.links.is_broken(peer):
            self._lose(peer)

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        self._lose(peer)

    def _lose(self, peer: PeerId) -> None:
        """Close a link, and send what was awaited there to another peer. The peer is dialled again later."""
        if self.links.drop(peer):
            self._do(self._requests.lost(peer, self._loop.time()))

    @handles(Forwarded)
    def _forwarded(self, peer: PeerId, message: Forwarded, body: bytes) -> None:
        """Accept a stage's output if it is awaited and valid, and continue with the next stage. The last
        stage's output ends the request."""
        key, attempt, now = message.request, message.attempt, self._loop.time()
        ask = self._requests.expects(key, peer, attempt)
        if ask is None:
            return
        kept = self._open[key]
        last = ask.stage == len(self.manifest.stages) - 1
        try:
            if ask.round not in (-1, message.round):
                raise activation_codec.HiddenError(
                    f"weights of round {message.round} where {ask.round} was asked for"
                )
            answer = self._answer(kept, body, message.loss_sum) if last else None
            if not last:  # Check here: otherwise the next stage refuses it and gets the blame.
                activation_codec.decode(body, (*kept.shape, self.manifest.model.crossing), self.codec)
        except activation_codec.HiddenError as error:
            self._do(self._requests.declined(key, peer, attempt, MALFORMED, str(error), now))
            return
        kept.conversation.rounds.setdefault(ask.stage, set()).add(message.round)
        if not last:
            kept.inputs = body
        self._do(self._requests.answered(key, peer, attempt, message.round, now))
        if answer is not None and not kept.answer.done():
            kept.answer.set_result(answer)

    def _answer(self, kept: _Open, body: bytes, loss_sum: float) -> HeadOutput:
        """Return the last stage's output. Raises HiddenError."""
        if not kept.labels:
            shape = (kept.shape[0], self.manifest.model.vocab_size)
            return HeadOutput(activation_codec.decode(body, shape, "fp32"), 0.0)
        if body:
            raise activation_codec.HiddenError(f"{len(body)} bytes in addition to a score")
        return HeadOutput(None, loss_sum)


def _int32(tokens: Tensor) -> bytes:
    data = tokens.to(torch.int32).numpy().astype("<i4", copy=False).tobytes()
    assert len(data) == tokens.numel() * TOKEN_BYTES
    return data
