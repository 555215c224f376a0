"""Text and scores from a live swarm: what `swarmnet generate --run` and `swarmnet evaluate --run` do."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from peers.home.evaluate import SCORED_BYTES, Score, cut
from peers.home.generate import Continuation
from peers.inference.client import Conversation, NoAnswer, SwarmClient
from peers.joining import PeerCache, find_manifest, join_directory
from peers.run_file import SignedManifest
from peers.text import Tokenizer, open_tokenizer
from protocols.daemon import LOOPBACK, DaemonOptions
from protocols.dht import DhtDirectory
from protocols.identity import load_or_create
from protocols.p2pd import P2pdTransport
from protocols.relays import circuits_through

AT_ONCE = 8
"""Requests of one score under way: one for each of three stages to compute, and as many on their ways."""
FIND_SECONDS = 60.0
"""For a bootstrap to answer and the manifest to come."""

Say = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Reached:
    """A run that was found, and what it was found with."""

    signed: SignedManifest
    transport: P2pdTransport
    directory: DhtDirectory


@asynccontextmanager
async def visiting(
    run: str, bootstraps: Sequence[str], cache: PeerCache, say: Say, exact: bool = True
) -> AsyncIterator[SwarmClient]:
    """A visitor that asks the run's peers; raises as `reaching` does."""
    async with (
        reaching(run, bootstraps, cache, say) as found,
        SwarmClient(found.signed, found.transport, found.directory, Random(), say, exact) as client,
    ):
        yield client


@asynccontextmanager
async def reaching(
    run: str, bootstraps: Sequence[str], cache: PeerCache, say: Say
) -> AsyncIterator[Reached]:
    """A visitor of one run. `run`: a run id or a published file; `cache`: addresses to try besides. NoAnswer
    if nobody is reached, RunFileError for a bad file."""
    async with entering(bootstraps, cache, say) as (transport, directory):
        with tempfile.TemporaryDirectory(prefix="swarmnet-visitor-") as folder:
            try:
                async with asyncio.timeout(FIND_SECONDS):
                    signed = await find_manifest(run, directory, Path(folder) / "run.json", say)
            except TimeoutError:
                raise NoAnswer(f"the run was not found within {FIND_SECONDS:g} s") from None
        yield Reached(signed, transport, directory)


@asynccontextmanager
async def entering(
    bootstraps: Sequence[str], cache: PeerCache, say: Say
) -> AsyncIterator[tuple[P2pdTransport, DhtDirectory]]:
    """A visitor on p2pd, with an identity of its own that is thrown away. NoAnswer if nobody is reached."""
    with tempfile.TemporaryDirectory(prefix="swarmnet-visitor-") as folder:
        place = Path(folder)
        load_or_create(place / "identity.key")
        transport = await P2pdTransport.start(place / "identity.key", _options([*bootstraps, *cache.read()]))
        directory = None
        try:
            ways = circuits_through(bootstraps)
            directory = await DhtDirectory.start(transport.daemon, stores=False, ways=ways)
            try:
                async with asyncio.timeout(FIND_SECONDS):
                    await join_directory(directory, bootstraps, cache, say)
            except TimeoutError:
                raise NoAnswer(f"nobody answered within {FIND_SECONDS:g} s") from None
            yield transport, directory
        finally:
            if directory is not None:
                await directory.close()
            await transport.close()


def _options(addresses: Sequence[str]) -> DaemonOptions:
    """It only dials, so it asks no router for a port; peers that are reached through a relay need one."""
    if all("/127.0.0.1/" in address for address in addresses):
        return LOOPBACK
    return DaemonOptions(auto_nat=False, nat_port_map=False)


def tokenizer_of(client: SwarmClient) -> Tokenizer:
    """The run's. Raises TextError."""
    manifest = client.manifest
    return open_tokenizer(manifest.data.tokenizer, manifest.model.vocabulary)


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


def begin(
    client: SwarmClient, prompt: bytes, *, temperature: float = 0.8, top_k: int = 40, seed: int = 0
) -> Continuation:
    """A text that the run's model is to continue. Raises TextError."""
    manifest = client.manifest
    return Continuation(
        prompt, manifest.model.context, temperature=temperature, top_k=top_k, seed=seed,
        window=manifest.data.sequence_tokens, tokenizer=tokenizer_of(client),
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


async def score(
    client: SwarmClient,
    text: bytes,
    *,
    limit: int = SCORED_BYTES,
    at_once: int = AT_ONCE,
    conversation: Conversation | None = None,
) -> Score:
    """As `evaluate.score_weights`, through the swarm. Raises NoAnswer, and TextError if there is no text."""
    manifest = client.manifest
    window = min(manifest.data.sequence_tokens, manifest.model.context)
    batch = max(1, client.most_tokens // window)
    windows = cut(text, tokenizer_of(client), window=window, batch=batch, limit=limit)
    conversation = conversation or Conversation()
    room = asyncio.Semaphore(at_once)

    async def nats(number: int) -> float:
        inputs_BT, labels_BT = windows.pairs[number]
        async with room:
            return (await client.forward(conversation, inputs_BT, labels_BT)).loss_sum

    first = await nats(0)  # Alone: its answers decide by which rounds the others are answered.
    tasks = [asyncio.create_task(nats(number)) for number in range(1, len(windows.pairs))]
    try:
        return windows.score(sum(await asyncio.gather(*tasks), first))
    finally:
        for task in tasks:
            task.cancel()


def told(conversation: Conversation) -> list[str]:
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
