"""Text and scores from a live swarm: what `swarmnet generate --run` and `swarmnet evaluate --run` do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from peers.config.run_file import SignedManifest
from peers.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_file
from peers.errors import NoAnswer
from peers.network.discovery.bootstrap import PeerCache
from peers.network.discovery.visitor_session import reaching
from peers.telemetry.events import Notify
from peers.tools.model.evaluate import SCORED_BYTES, Score, cut
from peers.tools.model.generate import Continuation
from peers.tools.model.swarm_client import Conversation, SwarmClient
from protocols.errors import WireError
from protocols.signed.invites import open_invite, prove_invite
from swarmnet.identifiers import PeerId

AT_ONCE = 8
"""Requests of one score under way: one for each of three stages to compute, and as many on their ways."""


@asynccontextmanager
async def visiting(
    run: str,
    bootstraps: Sequence[str],
    cache: PeerCache,
    notify: Notify,
    exact: bool = True,
    invite: bytes = b"",
    tokenizer: Path | None = None,
) -> AsyncIterator[SwarmClient]:
    """A visitor that asks the run's peers, and shows them `invite`. `tokenizer`: the run's tokenizer.json.
    Raises as `reaching` does, NoAnswer where the run would not let it in, TextError without the tokenizer."""
    async with reaching(run, bootstraps, cache, notify) as found:
        unfit = not_let_in(found.signed, invite, found.transport.peer, found.directory.now())
        if unfit is not None:
            raise NoAnswer(unfit)
        tokenizer_file(found.signed.manifest.data, tokenizer)
        shown = invite_shown(found.signed, invite, found.transport.peer)
        async with SwarmClient(
            found.signed, found.transport, found.directory, Random(), notify, exact, shown, tokenizer
        ) as client:
            yield client


def invite_shown(signed: SignedManifest, invite: bytes, visitor: PeerId) -> bytes:
    """What the visitor shows of its invite to the run's peers; empty where the run is open to all."""
    return prove_invite(invite, signed.run_id, visitor) if signed.manifest.access == "invite" else b""


def not_let_in(signed: SignedManifest, invite: bytes, visitor: PeerId, now_seconds: float) -> str | None:
    """Why no peer of the run would speak to this visitor, and what to do; None: some may."""
    manifest = signed.manifest
    if manifest.access != "invite":
        return None
    owner = manifest.contact or manifest.owner
    ask = f"ask the run's owner for one that is for anyone (`swarmnet invite RUN --anyone`): {owner}"
    if not invite:
        return f"the run takes visitors by invite only: give --invite; {ask}"
    try:
        shown = prove_invite(invite, signed.run_id, visitor)
        found = open_invite(shown, signed.run_id, manifest.owner, visitor)
    except WireError as error:
        return f"--invite does not fit the run ({error}); {ask}"
    if found.peer is not None:  # Before its expiry: another one of that kind would not help.
        return f"--invite is for {found.peer} alone, and a visitor has a new name each time; {ask}"
    unfit = found.refusal(visitor, now_seconds)
    return f"--invite: {unfit}; {ask}" if unfit is not None else None


def tokenizer_of(client: SwarmClient) -> Tokenizer:
    """The run's. Raises TextError."""
    manifest = client.manifest
    file = tokenizer_file(manifest.data, client.tokenizer)
    opened = open_tokenizer(file, manifest.model.vocab_size, manifest.data.eos_token)
    if opened.warning:
        client.notify("text", opened.warning)
    return opened


async def stream(
    client: SwarmClient,
    prompt: bytes,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    conversation: Conversation | None = None,
) -> AsyncIterator[bytes]:
    """As `generate.generate`, through the swarm: the new bytes as they come. Raises NoAnswer.

    Peers keep nothing between tokens, so each one costs a forward pass over the whole window.
    """
    going = begin(client, prompt, temperature=temperature, top_k=top_k, seed=seed)
    model = SwarmModel(client, conversation)
    for _ in range(tokens):
        yield going.take(await model.logits(going))
        if going.ended:
            return


def begin(
    client: SwarmClient, prompt: bytes, *, temperature: float = 0.8, top_k: int = 40, seed: int = 0
) -> Continuation:
    """A text that the run's model is to continue. Raises TextError."""
    manifest = client.manifest
    return Continuation(
        prompt, manifest.model.max_position_embeddings, temperature=temperature, top_k=top_k, seed=seed,
        window=manifest.data.seq_len, tokenizer=tokenizer_of(client),
    )  # fmt: skip


class SwarmModel:
    """As `generate.LocalModel`, asked of the run's live peers; a text by the same weights."""

    def __init__(self, client: SwarmClient, conversation: Conversation | None = None) -> None:
        self._client = client
        self.conversation = conversation or Conversation()

    async def logits(self, going: Continuation) -> Tensor:
        """[V]: what comes next in the text. Raises NoAnswer."""
        answer = await self._client.forward(self.conversation, torch.tensor([going.visible]))
        assert answer.logits is not None
        return answer.logits[0]

    def forget(self) -> None:
        """The next text is asked of the newest weights."""
        self.conversation = Conversation()


@dataclass(slots=True)
class ScoreProgress:
    """How far a score is."""

    windows: int = 0
    done: int = 0
    tokens: int = 0
    nats: float = 0.0
    """Summed over the tokens that are done."""

    def line(self) -> str:
        loss = f", loss {self.nats / self.tokens:.4f} nats per token so far" if self.tokens else ""
        return f"{self.done} of {self.windows} windows{loss}"


async def score(
    client: SwarmClient,
    text: bytes,
    *,
    limit: int = SCORED_BYTES,
    at_once: int = AT_ONCE,
    conversation: Conversation | None = None,
    progress: ScoreProgress | None = None,
) -> Score:
    """As `evaluate.score_weights`, through the swarm. `progress`: filled in as answers come. Raises NoAnswer,
    and TextError if there is no text."""
    manifest = client.manifest
    window = min(manifest.data.seq_len, manifest.model.max_position_embeddings)
    batch = max(1, client.max_tokens // window)
    windows = cut(text, tokenizer_of(client), window=window, batch=batch, limit=limit)
    conversation = conversation or Conversation()
    room = asyncio.Semaphore(at_once)
    progress = progress or ScoreProgress()
    progress.windows = sum(len(inputs_BT) for inputs_BT, _ in windows.pairs)

    async def nats(number: int) -> float:
        inputs_BT, labels_BT = windows.pairs[number]
        async with room:
            found = (await client.forward(conversation, inputs_BT, labels_BT)).loss_sum
        progress.done += len(inputs_BT)
        progress.tokens += labels_BT.numel()
        progress.nats += found
        return found

    first = await nats(0)  # Alone: its answers decide by which rounds the others are answered.
    tasks = [asyncio.create_task(nats(number)) for number in range(1, len(windows.pairs))]
    try:
        return windows.score(sum(await asyncio.gather(*tasks), first))
    finally:
        for task in tasks:
            task.cancel()


def caveats(conversation: Conversation) -> list[str]:
    """What one should know of the answers, in lines for people."""
    rounds = ", ".join(
        f"{stage}: {' then '.join(map(str, sorted(found)))}"
        for stage, found in sorted(conversation.rounds.items())
    )
    lines = [f"weights of settled rounds, by stage: {rounds}"]
    lines += [
        f"stage {stage} had no live peer and was left out of {count} of {conversation.requests} requests"
        for stage, count in sorted(conversation.left_out.items())
    ]
    return lines
