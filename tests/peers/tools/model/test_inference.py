"""Inference in memory, on a virtual clock: peers that only hold weights, and visitors that ask them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch
from clocks import on_virtual_clock
from holders import COMPUTE_SECONDS, Holders, Pushy, until
from swarm import FOUR, TEXT, TINY_MODEL, tiny_manifest

from peers.cli import main as cli
from peers.compute.executor import FORWARD
from peers.config.errors import NoAnswer
from peers.lab.world.virtual_time import run
from peers.tools.model.evaluate import bits_per_byte
from peers.tools.model.generate import generate
from peers.tools.model.swarm_client import Conversation, SwarmClient
from peers.tools.model.swarm_session import ScoreProgress, caveats, score, stream
from peers.worker.inference import visitor_links
from peers.worker.inference.server import FORGET_SECONDS, MAX_WAITING
from peers.worker.inference.visitor_links import IDLE_SECONDS, LOOK_SECONDS, MAX_VISITORS
from peers.worker.pipeline.microbatch_compute import ComputeError
from protocols.memory.transport import Conditions
from swarmnet.inference.inference_client import ASKED_AT_ONCE, BUSY, LEAVE_OUT_SECONDS
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import whole
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import InitCheckpoint, Lora, Paths

SKIPPING = tiny_manifest(
    (1, 1, 1, 1), model=replace(TINY_MODEL, num_hidden_layers=4), paths=Paths(skip_ratio=1 / 4)
)
PROMPTS = [b"def f", b"class ", b"import ", b"", b"x" * 40, b"return", b"\x00\x01", b"for i in"]


def play(
    story: Callable[[Holders], Awaitable[None]],
    manifest: Manifest | None = None,
    conditions: Conditions | None = None,
) -> None:
    async def life() -> None:
        made = manifest or tiny_manifest()
        holders = Holders(made, FOUR | {f"of {n}": n for n in range(3, len(made.stages))}, (4,), conditions)
        asyncio.get_running_loop().set_exception_handler(escaped)
        await story(holders)

    def escaped(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        errors.append(context)

    errors: list[dict[str, object]] = []
    run(life())
    assert errors == []


async def text_of(client: SwarmClient, prompt: bytes, tokens: int, talk: Conversation | None = None) -> bytes:
    pieces = [piece async for piece in stream(client, prompt, tokens, temperature=0.0, conversation=talk)]
    return b"".join(pieces)


def local_text(holders: Holders, talk: Conversation, prompt: bytes, tokens: int) -> bytes:
    weights, model = holders.weights(talk.rounds), holders.signed.manifest.model
    return b"".join(generate(weights, model, prompt, tokens, temperature=0.0, window=16))


def test_eight_texts_at_once_are_those_of_the_local_model_and_the_peers_of_a_stage_share_the_work():
    async def story(holders: Holders) -> None:
        talks = [Conversation() for _ in PROMPTS]
        async with holders.visitor() as client:
            began = holders.loop.time()
            texts = await asyncio.gather(
                *(text_of(client, prompt, 24, talk) for prompt, talk in zip(PROMPTS, talks, strict=True))
            )
            took = holders.loop.time() - began
        for prompt, talk, text in zip(PROMPTS, talks, texts, strict=True):
            assert text == local_text(holders, talk, prompt, 24)
            assert (talk.requests, talk.left_out) == (24, {})
        assert len(set(texts)) > 4
        done = {name: peer.inference.outcomes["done"] for name, peer in holders.peers.items()}
        assert (done["a"], done["e"]) == (192, 192)
        assert min(done["c"], done["d"]) > 80
        assert took < 1.1 * 192 * COMPUTE_SECONDS, "the stages work at the same time"

    play(story)


def test_a_run_that_trains_factors_answers_with_them_and_what_is_frozen():
    async def story(holders: Holders) -> None:
        talk = Conversation()
        async with holders.visitor() as client:
            text = await text_of(client, b"def f", 12, talk)
        assert ".lora_" in " ".join(holders.weights(talk.rounds))
        assert text == local_text(holders, talk, b"def f", 12)

    start = InitCheckpoint("model", "ab" * 32, "", ("cd" * 32,) * 3)
    play(story, tiny_manifest(model=replace(TINY_MODEL, lora=Lora(rank=2)), init_checkpoint=start))


def test_a_text_comes_token_by_token():
    async def story(holders: Holders) -> None:
        times = []
        async with holders.visitor() as client:
            async for piece in stream(client, b"def f", 10, seed=3):
                times.append((holders.loop.time(), len(piece)))
        assert [length for _, length in times] == [1] * 10
        assert len({time for time, _ in times}) == 10

    play(story)


def test_a_score_is_the_local_one_to_the_last_bit_where_hidden_states_travel_exactly():
    found = {}

    async def story(holders: Holders) -> None:
        model = holders.signed.manifest.model
        for exact in (True, False):
            talk = Conversation()
            async with holders.visitor(f"exact {exact}", exact) as client:
                through = await score(client, TEXT, conversation=talk)
            weights = holders.weights(talk.rounds)

            def logits_of(tokens_BT, weights=weights):
                return forward(weights, model, whole(model), tokens_BT)

            local = bits_per_byte(logits_of, TEXT, window=16, batch=2)
            assert (through.sha256, through.bytes, through.window) == (local.sha256, len(TEXT), 16)
            found[exact] = through.perplexity / local.perplexity - 1
            assert caveats(talk) == ["weights of settled rounds, by stage: 0: 4, 1: 4, 2: 4"]

    play(story)
    assert found[True] == 0.0
    assert 0.0 < abs(found[False]) < 1e-3, "bf16 between the stages"


def test_a_score_tells_how_far_it_is_and_leaves_what_it_has_when_it_is_stopped():
    async def story(holders: Holders) -> None:
        progress = ScoreProgress()
        async with holders.visitor() as client:
            work = asyncio.create_task(score(client, TEXT, progress=progress, at_once=2))
            await until(lambda: progress.done >= 6)
            work.cancel()
            await asyncio.wait({work})
            assert 6 <= progress.done < progress.windows
            done = rf"{progress.done} of {progress.windows} windows, loss [56]\.\d{{4}} nats per token so far"
            assert re.fullmatch(done, progress.line())
            whole_text = ScoreProgress()
            found = await score(client, TEXT, progress=whole_text)
            assert whole_text.done == whole_text.windows == progress.windows
            assert whole_text.nats / whole_text.tokens == pytest.approx(found.loss)

    play(story)


def test_a_visitor_gets_its_quarter_of_a_busy_peer_however_much_waits_there():
    async def story(holders: Holders) -> None:
        busy, waiting = holders.peers["a"], 64

        def train(*_: object) -> None:
            if not stopped:
                busy.compute.submit(FORWARD, lambda: None, train)

        stopped: list[bool] = []
        async with holders.visitor() as client:
            for _ in range(waiting):
                train()
            talk, began, many = Conversation(), holders.loop.time(), 20
            for _ in range(many):
                await client.forward(talk, torch.zeros(1, 4, dtype=torch.int64))
            passed = holders.loop.time() - began
            stopped.append(True)
        assert passed < many * 8 * COMPUTE_SECONDS, f"{passed:.2f} s; behind all that waits it would be 13 s"

    play(story)


def test_a_middle_stage_whose_only_peers_die_is_left_out_where_the_run_allows_it():
    async def story(holders: Holders) -> None:
        async with holders.visitor() as client:
            talk = Conversation()
            began = asyncio.create_task(text_of(client, b"def f", 40, talk))
            await until(lambda: talk.requests >= 6)
            for name in ("c", "d"):
                holders.crash(name)
            died_at = holders.loop.time()
            assert len(await began) == 40
            assert holders.loop.time() < died_at + LEAVE_OUT_SECONDS + 2.0
            assert 30 < talk.left_out[1] < 40
            assert caveats(talk)[1] == (
                f"stage 1 had no live peer and was left out of {talk.left_out[1]} of 40 requests"
            )
            holders.add("g", 1)
            await asyncio.sleep(10.0)
            again = Conversation()
            assert await text_of(client, b"def f", 5, again) == local_text(holders, again, b"def f", 5)
            assert not again.left_out, "the newcomer is found"

    play(story, SKIPPING)


def test_a_stage_without_peers_is_waited_for_where_none_may_be_left_out_and_that_is_said():
    async def story(holders: Holders) -> None:
        async with holders.visitor() as client:
            talk = Conversation()
            began = asyncio.create_task(text_of(client, b"def f", 20, talk))
            await until(lambda: talk.requests >= 6)
            for name in ("c", "d"):
                holders.crash(name)
            await asyncio.sleep(30.0)
            assert not began.done()
            assert client.said == [("missing", "waiting for a peer of stage 1: this run leaves no stage out")]
            holders.add("g", 1)
            assert await asyncio.wait_for(began, 15.0) == local_text(holders, talk, b"def f", 20)
            assert client.said[1][0] == "found"

    play(story)


def test_a_peer_that_dies_and_one_that_refuses_are_routed_around():
    async def story(holders: Holders) -> None:
        holders.add("f", 2)
        holders.peers["f"].inference._unfit = lambda *_: ComputeError(BUSY, "no")
        async with holders.visitor() as client:
            talk = Conversation()
            began = asyncio.create_task(text_of(client, b"import ", 30, talk))
            await until(lambda: talk.requests >= 6)
            holders.crash("c")
            assert await asyncio.wait_for(began, 10.0) == local_text(holders, talk, b"import ", 30)
        assert holders.peers["f"].inference.outcomes[BUSY] > 0
        assert not talk.left_out

    play(story)


def test_a_frozen_peer_costs_one_deadline():
    async def story(holders: Holders) -> None:
        async with holders.visitor() as client:
            talk = Conversation()
            await text_of(client, b"import ", 4, talk)
            holders.network.freeze(holders.peers["d"].identity.peer_id)
            began = holders.loop.time()
            await text_of(client, b"import ", 10, talk)
            assert 1.9 < holders.loop.time() - began < 8.0

    play(story)


def test_texts_come_through_links_that_lose_and_repeat_messages():
    async def story(holders: Holders) -> None:
        async with holders.visitor() as client:
            talk = Conversation()
            text = await asyncio.wait_for(text_of(client, b"def f", 20, talk), 400.0)
            assert text == local_text(holders, talk, b"def f", 20)

    play(story, conditions=Conditions(latency_seconds=0.01, lost=0.05, repeated=0.05, reordered=0.05))


def test_a_conversation_keeps_its_weights_while_the_run_goes_on_and_takes_new_ones_when_nobody_has_them():
    async def story(holders: Holders) -> None:
        async with holders.visitor() as client:
            talk = Conversation()
            await text_of(client, b"def f", 4, talk)
            for round in (9, 14):
                for peer in holders.peers.values():
                    peer.settle(round)
            await text_of(client, b"def f", 4, talk)
            assert talk.rounds == {0: {4}, 1: {4}, 2: {4}}, "kept in the service, though no snapshot is"
            fresh = Conversation()
            await text_of(client, b"def f", 4, fresh)
            assert fresh.rounds == {0: {14}, 1: {14}, 2: {14}}
            await asyncio.sleep(2 * FORGET_SECONDS)
            await text_of(client, b"def f", 4, talk)
            assert talk.rounds == {0: {4, 14}, 1: {4, 14}, 2: {4, 14}}
            assert caveats(talk)[0].endswith("by stage: 0: 4 then 14, 1: 4 then 14, 2: 4 then 14")

    play(story)


def test_a_visitor_is_served_a_few_requests_at_once_and_the_rest_are_refused_with_a_code():
    async def story(holders: Holders) -> None:
        inference = holders.peers["a"].inference
        pushy = Pushy(holders, "pushy")
        await pushy.ask("a", 200)
        await asyncio.sleep(5.0)
        # While the link back opened, so many words for it were kept; its deadlines tell it the rest.
        assert pushy.codes() == {"done": ASKED_AT_ONCE + 1, "busy": visitor_links.MAX_WAITING}
        crowd = [Pushy(holders, f"crowd {number}") for number in range(MAX_VISITORS + 8)]
        for each in crowd:
            await each.ask("a", ASKED_AT_ONCE)
        await asyncio.sleep(0.0)
        assert len(inference._waiting) <= MAX_WAITING
        await asyncio.sleep(10.0)
        assert sum(each.codes().get("done", 0) for each in crowd) == MAX_WAITING + 1
        assert all(each.codes() for each in crowd), "everybody gets a word"
        assert len(inference.visitors) == MAX_VISITORS
        await asyncio.sleep(IDLE_SECONDS + LOOK_SECONDS + 1.0)
        assert len(inference.visitors) == 0, "who asks nothing is forgotten"
        assert not inference.work._versions

    play(story)


@pytest.mark.parametrize("network", ["203.0.113.0/24", ""], ids=["one network", "unknown networks"])
def test_eighteen_greedy_keys_keep_nobody_out(network):
    async def story(holders: Holders) -> None:
        crowd = [Pushy(holders, f"crowd {number}") for number in range(18)]
        for each in crowd:
            holders.network.seen_ranges[each.transport.peer] = network

        async def push() -> None:
            while True:
                for each in crowd:
                    await each.ask("a", ASKED_AT_ONCE)
                await asyncio.sleep(0.05)

        pushing = asyncio.create_task(push())
        await asyncio.sleep(1.0)
        async with holders.visitor() as client:
            text = await asyncio.wait_for(text_of(client, b"def f", 4, Conversation()), 15.0)
        pushing.cancel()
        assert len(text) == 4

    play(story)


def test_visitors_take_turns():
    async def story(holders: Holders) -> None:
        first, second = Pushy(holders, "first"), Pushy(holders, "second")
        await first.ask("a", ASKED_AT_ONCE)
        await second.ask("a", 1)
        await until(second.codes)
        assert first.codes()["done"] <= 2

    play(story)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"stage": 1}, "wrong_stage"),
        ({"path": 2}, "malformed"),
        ({"path": 2**40}, "malformed"),
        ({"tokens": 3}, "malformed"),
        ({"tokens": 0, "body": b""}, "malformed"),
        ({"sequences": 3, "tokens": 16, "body": bytes(192)}, "malformed"),
        ({"tokens": 2**61, "sequences": 2**61}, "malformed"),
        ({"body": b"\xff" * 16}, "malformed"),
        ({"round": 10**6}, "no_round"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_a_code(changes, code):
    async def story(holders: Holders) -> None:
        pushy = Pushy(holders, "pushy")
        await pushy.ask("a", 1, **changes)
        await asyncio.sleep(1.0)
        assert pushy.codes() == {code: 1}

    play(story)


@pytest.mark.parametrize("trick", ["nan", "short", "other round"])
def test_a_peer_that_answers_nonsense_is_routed_around(trick):
    async def story(holders: Holders) -> None:
        work = holders.peers["c"].inference.work
        honest, lied = work.run, []

        def lies(ask, body):
            answer = honest(ask, body)
            lied.append(ask.attempt)
            if trick == "other round":
                return type(answer)(answer.round + 5, answer.body)
            return type(answer)(answer.round, b"\xff" * (len(answer.body) if trick == "nan" else 8))

        async with holders.visitor() as client:
            talk = Conversation()
            await text_of(client, b"def f", 2, talk)
            work.run = lies
            text = await asyncio.wait_for(text_of(client, b"def f", 20, talk), 60.0)
            assert text == local_text(holders, talk, b"def f", 20)
        assert 1 <= len(lied) <= 2, "others are preferred then"

    play(story)


def test_before_the_first_snapshot_a_visitor_waits_and_says_so():
    async def story(holders: Holders) -> None:
        for name in ("c", "d"):
            holders.peers[name].snapshots.held = ()
        async with holders.visitor() as client:
            began = asyncio.create_task(text_of(client, b"def f", 3))
            await asyncio.sleep(10.0)
            assert not began.done()
            assert client.said == [
                ("not_ready", "a peer has no settled snapshot of its stage yet; asking again")
            ]  # fmt: skip
            holders.peers["d"].settle(4)
            assert len(await asyncio.wait_for(began, 5.0)) == 3

    play(story)


@on_virtual_clock
async def test_nobody_there_is_an_error_that_says_so():
    holders = Holders(tiny_manifest(), {})
    async with holders.visitor() as client:
        with pytest.raises(NoAnswer, match="peers reached by stage: 0: 0, 1: 0, 2: 0"):
            await client.forward(Conversation(), torch.tensor([[1, 2]]), deadline_seconds=20.0)
        assert client.said == [("missing", "waiting for a peer of stage 0: this run leaves no stage out")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--run", "nowhere.json"], "nowhere.json: no such file, and no run id"),
        (["generate", "--run", "0" * 64, "--bootstrap", "/ip4/1.2.3.4/tcp/1"], "does not name the peer"),
        (["generate", "--run", "0" * 64, "--bootstrap", "/ip4/1.2.3.4/tcp/PORT/p2p/x"], "has no /tcp/PORT"),
        (["generate", "--run", "0" * 64], "this machine remembers no peer of that run"),
    ],
)
def test_a_run_that_cannot_be_asked_is_one_line(arguments, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out, len(captured.err.splitlines())) == (2, "", 1)
    assert words in captured.err
