"""Generate and score text with a live swarm, for `swarmnet generate --run` and `swarmnet evaluate --run`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from peers.config.errors import NoAnswer
from peers.config.run_file import SignedManifest
from peers.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_file
from peers.network.discovery.bootstrap import PeerCache
from peers.network.discovery.visitor_session import visit_run
from peers.telemetry.log_events import Notify
from peers.tools.model.evaluate import SCORED_BYTES, Score, cut
from peers.tools.model.generate import Continuation
from peers.tools.model.swarm_client import Conversation, SwarmClient
from protocols.errors import WireError
from protocols.signed.invites import open_invite, prove_invite
from swarmnet.identifiers import PeerId

AT_ONCE = 8
"""Concurrent requests of one score: one computing in each of three stages, and as many in transit."""


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
    """Return an inference client of the run that shows `invite` to its peers. `tokenizer`: the run's
    tokenizer.json. Raises as `visit_run` does, NoAnswer if the run does not admit it, TextError without the
    tokenizer."""
    async with visit_run(run, bootstraps, cache, notify) as found:
        unfit = not_let_in(found.signed, invite, found.transport.peer, found.directory.now())
        if unfit is not None:
            raise NoAnswer(unfit)
        tokenizer_file(found.signed.manifest.data, tokenizer)
        shown = invite_shown(found.signed, invite, found.transport.peer)
        async with SwarmClient(
            signed=found.signed,
            transport=found.transport,
            directory=found.directory,
            chance=Random(),
            notify=notify,
            exact=exact,
            invite=shown,
            tokenizer=tokenizer,
        ) as client:
            yield client


def invite_shown(signed: SignedManifest, invite: bytes, visitor: PeerId) -> bytes:
    """Return the invite to show to the run's peers; empty if the run is open to all."""
    return prove_invite(invite, signed.run_id, visitor) if signed.manifest.access == "invite" else b""


def not_let_in(signed: SignedManifest, invite: bytes, visitor: PeerId, now_seconds: float) -> str | None:
    """Return why no peer of the run would admit this client, and what to do; None: some may."""
    manifest = signed.manifest
    if manifest.is_u_shaped:
        return (
            "the run is U-shaped (data.u_shaped_layers): its peers serve no texts, whose tokens would "
            "travel; use an archive of all stages: `swarmnet generate --from ARCHIVE`"
        )
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
    if found.peer is not None:  # Checked before its expiry: another invite of that kind would not help.
        return f"--invite is for {found.peer} alone, and a visitor has a new name each time; {ask}"
    unfit = found.refusal(visitor, now_seconds)
    return f"--invite: {unfit}; {ask}" if unfit is not None else None


def tokenizer_of(client: SwarmClient) -> Tokenizer:
    """Return the run's tokenizer. Raises TextError."""
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
    reads: Tokenizer | None = None,
) -> AsyncIterator[bytes]:
    """Generate as `generate.generate` through the swarm: yields the new bytes as they come. Raises NoAnswer.

    Peers keep nothing between tokens, so each token costs a forward pass over the whole window. `reads`: the
    tokenizer of the prompt; None: that of plain text.
    """
    going = begin(client, prompt, temperature=temperature, top_k=top_k, seed=seed, reads=reads)
    model = SwarmModel(client, conversation)
    for _ in range(tokens):
        yield going.take(await model.logits(going))
        if going.ended:
            return


def begin(
    client: SwarmClient,
    prompt: bytes,
    *,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    reads: Tokenizer | None = None,
) -> Continuation:
    """Return a continuation of the prompt for the run's model. Raises TextError."""
    manifest = client.manifest
    return Continuation(
        prompt,
        manifest.model.max_position_embeddings,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        window=manifest.data.seq_len,
        tokenizer=reads or tokenizer_of(client),
    )


class SwarmModel:
    """Counterpart of `generate.LocalModel` that uses live peers, with the same weights throughout a text."""

    def __init__(self, client: SwarmClient, conversation: Conversation | None = None) -> None:
        self._client = client
        self.conversation = conversation or Conversation()

    async def logits(self, going: Continuation) -> Tensor:
        """Return the logits [V] of the next token. Raises NoAnswer."""
        answer = await self._client.forward(self.conversation, torch.tensor([going.visible]))
        assert answer.logits is not None
        return answer.logits[0]

    def forget(self) -> None:
        """Use the newest weights for the next text."""
        self.conversation = Conversation()


@dataclass(slots=True)
class ScoreProgress:
    """Progress of a score."""

    windows: int = 0
    done: int = 0
    tokens: int = 0
    nats: float = 0.0
    """Loss in nats, summed over the scored tokens."""

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
    """Score as `evaluate.score_weights` through the swarm. `progress` is updated with each answer. Raises
    NoAnswer, also in a private run, and TextError if there is no text."""
    manifest = client.manifest
    if manifest.data.private:
        raise NoAnswer(
            "the run's text is private, and this would send the scored text to its peers; each owner scores "
            "its own at home: `swarmnet evaluate --from STATE --eval-text FILE`"
        )
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

    first = await nats(0)  # Sent alone: its answers choose the rounds for the other requests.
    tasks = [asyncio.create_task(nats(number)) for number in range(1, len(windows.pairs))]
    try:
        return windows.score(sum(await asyncio.gather(*tasks), first))
    finally:
        for task in tasks:
            task.cancel()


def caveats(conversation: Conversation) -> list[str]:
    """Return what a user should know about the answers, as lines for people."""
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
