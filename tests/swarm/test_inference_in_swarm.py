"""Visitors of a swarm that trains: real workers in memory, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from random import Random

import pytest
from holders import named
from swarm import (
    Swarm,
    expert_manifest,
    nothing_is_committed_twice,
    shared_rounds,
    text_of,
    tiny_manifest,
)
from torch import Tensor

from peers.lab.world.virtual_time import run
from peers.state.snapshot_store import units_of
from peers.tools.model.generate import generate
from peers.tools.model.swarm_client import Conversation, SwarmClient
from protocols.signed.identity import Identity
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes
from swarmnet.run.manifest import Manifest

FIVE = {"a": 0, "c": 1, "d": 1, "e": 2, "f": 2}
NOBODYS_ROUND = 10**6
PROMPTS = [b"def f", b"class ", b"import ", b"", b"x" * 40, b"return", b"\x00\x01", b"for i in"]


class Shots:
    """The settled weights of every snapshot that any peer ever made, by stage and round."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.units: dict[tuple[int, int], Tensor] = {}
        swarm.on_note = lambda note: self.look() if note.event == "settled" else None

    def look(self) -> None:
        for member in self.swarm.members.values():
            if member.worker.services is not None:
                for held in member.worker.services.snapshots.held:
                    self.units.setdefault((member.worker.stage, held.root.round), units_of(held.data))

    def weights(self, rounds: dict[int, set[int]]) -> dict[str, Tensor]:
        """The model that answered a conversation: of each stage the weights of the one round it names."""
        manifest, found = self.swarm.signed.manifest, {}
        for stage, (round,) in rounds.items():
            layout = layout_of(parameter_shapes(manifest.model, manifest.span(stage)))
            found |= named(layout, self.units[stage, round])
        return found


def visitor(swarm: Swarm) -> SwarmClient:
    peer, network = Identity.from_seed(b"visitor").peer_id, swarm.network
    transport, directory = network.transport(peer), network.directory(peer)
    return SwarmClient(
        signed=swarm.signed,
        transport=transport,
        directory=directory,
        chance=Random(0),
        notify=lambda event, text: None,
    )


def play(
    story: Callable[[Swarm, Shots], Awaitable[None]], manifest: Manifest | None = None,
    peers: Mapping[str, int] = FIVE,
) -> Swarm:  # fmt: skip
    """Peers that have made a snapshot each, the story, and a polite end."""
    swarm = Swarm(manifest or tiny_manifest())

    async def life() -> None:
        swarm.open()
        shots = Shots(swarm)
        for name, stage in peers.items():
            swarm.start(name, stage, in_flight=2)
        await swarm.until(lambda: {stage for stage, _ in shots.units} == {*peers.values()}, 120.0)
        await story(swarm, shots)
        await swarm.close()

    run(life())
    nothing_is_committed_twice(swarm)
    assert shared_rounds(swarm) > 0
    return swarm


@pytest.mark.parametrize(
    ("manifest", "peers"),
    [
        pytest.param(tiny_manifest(), FIVE, marks=pytest.mark.soak),
        (expert_manifest(num_experts=4, top_k=2, groups=2), FIVE),
    ],
    ids=["plain", "experts"],
)
def test_while_it_trains_a_swarm_writes_the_texts_of_the_local_model_with_the_same_settled_weights(
    manifest, peers
):
    async def story(swarm: Swarm, shots: Shots) -> None:
        talks = [Conversation() for _ in PROMPTS]
        before = swarm.committed(0)
        async with visitor(swarm) as client:
            texts = await asyncio.gather(
                *(text_of(client, prompt, 12, talk) for prompt, talk in zip(PROMPTS, talks, strict=True))
            )
        model = swarm.signed.manifest.model
        whole = [talk for talk in talks if all(len(found) == 1 for found in talk.rounds.values())]
        assert len(whole) >= 6, "most kept their weights to the end, though this run settles twice a second"
        for prompt, talk, text in zip(PROMPTS, talks, texts, strict=True):
            assert (talk.requests, talk.left_out) == (12, {})
            if talk in whole:
                local = generate(shots.weights(talk.rounds), model, prompt, 12, temperature=0.0, window=16)
                assert text == b"".join(local)
        assert swarm.committed(0) > before + 10, "training went on meanwhile"

    swarm = play(story, manifest, peers)
    served = [swarm.members[name].worker.services.inference.outcomes["done"] for name in peers]
    assert min(served) > 0, "the peers of a stage share the work"


def test_a_crowd_of_requests_leaves_training_most_of_its_speed():
    rates = {}

    async def story(swarm: Swarm, shots: Shots) -> None:
        async def rate(seconds: float) -> float:
            before = swarm.committed(0)
            await swarm.during(seconds)
            return (swarm.committed(0) - before) / seconds

        rates["alone"] = await rate(10.0)
        async with visitor(swarm) as client:
            crowd = [asyncio.create_task(text_of(client, b"def f", 10_000, Conversation())) for _ in range(8)]
            rates["visited"] = await rate(10.0)
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
        rates["answered"] = sum(
            swarm.members[name].worker.services.inference.outcomes["done"] for name in FIVE
        )

    # Comparisons of answers would teach routing about idle peers in one of the two times only.
    play(story, tiny_manifest(compared_fraction=0.0))
    assert rates["visited"] > 0.7 * rates["alone"], rates
    assert rates["answered"] > 100, rates
