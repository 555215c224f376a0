"""Visitors of a swarm that trains: real workers in memory, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from random import Random

import pytest
import torch
from holders import named
from swarm import (
    TEXT,
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
from peers.tools.model.evaluate import score_weights
from peers.tools.model.generate import generate
from peers.tools.model.swarm_client import Conversation, SwarmClient
from peers.tools.model.swarm_session import score, told
from protocols.signed.identity import Identity
from swarmnet.model.decoder import Rotation, attended, forward, one_layer
from swarmnet.model.experts.mixture import choose, feed_forward
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.run.manifest import Manifest, ModelShape

FIVE = {"a": 0, "c": 1, "d": 1, "e": 2, "f": 2}
NOBODYS_ROUND = 10**6
PROMPTS = [b"def f", b"class ", b"import ", b"", b"x" * 40, b"return", b"\x00\x01", b"for i in"]


ROUTED = replace(expert_manifest(count=4, active=2, groups=2, form="routed"), stages=(2, 1))
EIGHT = {"a": 0, "c": 1, "d": 1, "p": 2, "q": 2, "r": 3, "s": 4, "u": 5}
"""Two peers of the second stage, two of the first one's first group of experts, one of each other group."""


class Shots:
    """The settled weights of every snapshot that any peer ever made, by stage and round."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.units: dict[tuple[int, int], Tensor] = {}
        swarm.on_note = lambda note: self.look() if note.event == "settled" else None

    def look(self) -> None:
        for member in self.swarm.members.values():
            if member.worker.states is not None:
                for held in member.worker.snapshots.held:
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
    return SwarmClient(swarm.signed, transport, directory, Random(0), lambda event, text: None)


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
    [(tiny_manifest(), FIVE), (expert_manifest(count=4, active=2, groups=2), FIVE), (ROUTED, EIGHT)],
    ids=["plain", "experts", "routed"],
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
    served = [swarm.members[name].worker.inference.outcomes["done"] for name in peers]
    assert min(served) > 0, "the peers of a stage share the work"


def test_a_score_by_others_experts_is_that_of_the_whole_model_at_once():
    async def story(swarm: Swarm, shots: Shots) -> None:
        talk = Conversation()
        async with visitor(swarm) as client:
            found = await score(client, TEXT, limit=600, conversation=talk)
        assert {stage: len(rounds) for stage, rounds in talk.rounds.items()} == dict.fromkeys(range(6), 1)
        model, window = swarm.signed.manifest.model, swarm.signed.manifest.data.sequence_tokens
        alone = score_weights(shots.weights(talk.rounds), model, TEXT, window=window, limit=600)
        assert found.loss == pytest.approx(alone.loss, rel=1e-6)
        assert (found.sha256, found.window) == (alone.sha256, alone.window)

    play(story, ROUTED, EIGHT)


def greedy_without(weights: dict[str, Tensor], shape: ModelShape, prompt: bytes, tokens: int) -> bytes:
    """The likeliest text where the first two layers have no experts 2 and 3."""

    def run_layer(
        members: Mapping[str, Tensor], shape: ModelShape, hidden_BTD: Tensor, rotation: Rotation
    ) -> Tensor:
        hidden_BTD, normed_BTD = attended(members, shape, hidden_BTD, rotation)
        choice, said_BTD = choose(members["mlp.gate"], shape, normed_BTD.flatten(0, 1), (2, 3)), hidden_BTD
        for expert in (0, 1):
            weights_N = (choice.weights * (choice.chosen == expert)).sum(dim=-1)
            said_N = feed_forward(members, shape, f"mlp.experts.{expert}.", normed_BTD.flatten(0, 1))
            said_BTD = said_BTD + (said_N * weights_N[:, None]).view_as(hidden_BTD)
        return said_BTD

    text, layers = prompt, {0: run_layer, 1: run_layer, 2: one_layer}
    for _ in range(tokens):
        seen = torch.tensor([list(text)])
        with torch.no_grad():
            logits_BTV = forward(weights, shape, whole(shape), seen, run_layers=layers)
        text += bytes([int(logits_BTV[0, -1].argmax())])
    return text[len(prompt) :]


def test_experts_that_nobody_holds_are_left_out_of_texts_and_that_is_said():
    async def story(swarm: Swarm, shots: Shots) -> None:
        said: list[tuple[str, str]] = []
        async with visitor(swarm) as client:
            client.say = lambda event, text: said.append((event, text))
            before = Conversation(pins={3: NOBODYS_ROUND})
            await text_of(client, b"def f", 3, before)
            assert (before.left_out, said) == ({}, [])
            assert 0 <= max(before.rounds[3]) < NOBODYS_ROUND, "it goes on with the newest"
            await swarm.crash("r")
            await swarm.until(lambda: swarm.of("experts_missing", "a"), 20.0)
            talk = Conversation()
            text = await text_of(client, b"def f", 6, talk)
        assert len(text) == 6
        assert talk.left_out == {3: 6}
        assert 3 not in talk.rounds
        assert [event for event, _ in said] == ["missing"], "once"
        assert "stage 3, which holds experts" in said[0][1]
        assert any("stage 3 had no live peer" in line for line in told(talk))
        assert text == greedy_without(shots.weights(talk.rounds), swarm.signed.manifest.model, b"def f", 6)

    play(story, ROUTED, EIGHT)


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
        rates["answered"] = sum(swarm.members[name].worker.inference.outcomes["done"] for name in FIVE)

    play(story)
    assert rates["visited"] > 0.7 * rates["alone"], rates
    assert rates["answered"] > 100, rates
