"""A conversation: the text goes on from turn to turn, as a model without a cache would write it."""

from __future__ import annotations

import asyncio
import os

import pytest
import torch
from holders import Holders
from sharp_weights import sharp_weights
from swarm import tiny_manifest
from torch import Tensor

from peers.lab.world.virtual_time import run
from peers.tools.model.chat import Chat, Here, Lines, Turns
from peers.tools.model.generate import Continuation, LocalModel, Readable
from peers.tools.model.swarm_session import SwarmModel, begin
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import whole
from swarmnet.run.manifest import ModelShape

SHAPE = ModelShape(width=32, layers=2, heads=4, key_value_heads=2, head_width=8, feed_forward=48, context=64)
PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return sharp_weights(SHAPE)


class Says:
    """A model that writes one text, byte by byte, again and again, whatever it is told."""

    def __init__(self, text: bytes) -> None:
        self.text, self.at = text, 0
        self.windows: list[bytes] = []
        self.forgotten = 0
        self.silent_after = len(text) * 1000
        self.silent = asyncio.Event()
        self.trouble: Exception | None = None

    async def logits(self, going: Continuation) -> Tensor:
        self.windows.append(bytes(going.visible))
        if self.trouble is not None:
            raise self.trouble
        if self.at >= self.silent_after:
            self.silent.set()
            await asyncio.Event().wait()
        self.at += 1
        return 1e3 * torch.nn.functional.one_hot(torch.tensor(self.text[(self.at - 1) % len(self.text)]), 256)

    def forget(self) -> None:
        self.forgotten += 1


class Scene:
    """A chat whose lines come through a pipe."""

    def __init__(self, model: object, tokens: int = 4, until: bytes = b"", window: int = 64, **more: object):
        self.shown, self.said = "", list[str]()
        self.reader, self.writer = os.pipe()
        begin = lambda prompt: Continuation(prompt, window, temperature=0)  # noqa: E731 - one expression
        self.chat = Chat(
            model, begin, Turns(tokens, until), self._show, self.said.append, lambda: None, **more
        )  # fmt: skip

    def _show(self, text: str) -> None:
        self.shown += text

    async def talk(self, text: bytes) -> str:
        """All lines at once, then the end of the file; what was shown."""
        os.write(self.writer, text)
        os.close(self.writer)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.chat.run(Lines(self.reader))
        os.close(self.reader)
        return self.shown


def by_hand(weights: dict[str, Tensor], turns: list[bytes], tokens: int) -> bytes:
    """The same conversation, each token computed from the whole text."""
    text, answers = b"", b""
    for turn in turns:
        text += turn if not text or text.endswith(b"\n") else b"\n" + turn
        answer = b""
        for _ in range(tokens):
            seen = torch.tensor([list(text + answer)])
            answer += bytes([int(forward(weights, SHAPE, whole(SHAPE), seen)[0, -1].argmax())])
        text += answer
        answers += answer if answer.endswith(b"\n") else answer + b"\n"
    return answers


async def test_a_conversation_is_one_text_that_goes_on_from_turn_to_turn(weights):
    expected = by_hand(weights, [b"def f", b"x", b"return"], 12)
    readable = Readable()
    shown = await Scene(Here(LocalModel(weights, SHAPE)), tokens=12).talk(b"def f\nx\nreturn\n")
    assert shown == readable.add(expected, final=True)


def test_the_cached_logits_are_those_of_the_whole_window(weights):
    model, going = LocalModel(weights, SHAPE), Continuation(b"def f", 64, window=16, temperature=0)
    for turn in range(3):
        for _ in range(20):  # the window starts again on the way
            cached = model.logits(going)
            uncached = forward(weights, SHAPE, whole(SHAPE), torch.tensor([going.visible]))[0, -1]
            torch.testing.assert_close(cached, uncached, atol=1e-4, rtol=0)  # of logits up to 10
            assert len(going.visible) <= 16
            going.take(uncached)
        going.add(b"turn %d" % turn)


async def test_the_model_sees_what_was_said_as_far_as_the_window_reaches():
    model = Says(b"ab")
    await Scene(model, tokens=2).talk(b"one\n\ntwo\n")
    assert model.windows == [b"one", b"onea", b"oneab", b"oneaba", b"oneabab\ntwo", b"oneabab\ntwoa"]
    short = Says(b"ab")
    await Scene(short, tokens=2, window=8).talk(b"one\n0123456789\n")
    assert short.windows[2] == b"3456789"


async def test_a_new_text_begins_after_reset():
    model = Says(b"ab")
    scene = Scene(model, tokens=1)
    await scene.talk(b"one\n/reset\ntwo\n")
    assert model.windows == [b"one", b"two"]
    assert model.forgotten == 1
    assert scene.said == ["forgotten; what you type next begins a new text"]


async def test_quit_ends_and_an_unknown_command_is_said():
    model = Says(b"ab")
    scene = Scene(model, tokens=1)
    await scene.talk(b"/resett\n//etc\r\n/quit\nnever read\n")
    assert model.windows == [b"/etc"]
    assert "/resett is no command" in scene.said[0]


async def test_an_answer_ends_with_the_text_that_was_asked_for_or_its_length():
    assert await Scene(Says(b"yes. no. "), tokens=50, until=b". ").talk(b"?\n") == "yes. \n"
    assert await Scene(Says(b"yes. no. "), tokens=3, until=b". ").talk(b"?\n") == "yes\n"


async def test_no_second_line_end_after_an_answer_that_ended_its_line():
    model = Says(b"a\n")
    assert await Scene(model, tokens=2).talk(b"one\ntwo") == "a\na\n"
    assert model.windows[2] == b"onea\ntwo"


async def test_an_answer_is_stopped_and_the_conversation_goes_on():
    model = Says(b"ab")
    model.silent_after = 3
    scene = Scene(model, tokens=5)
    talking = asyncio.create_task(scene.talk(b"one\n/quit\n"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await model.silent.wait()
    scene.chat.interrupt()
    assert await talking == "aba\n"
    assert scene.said == ["stopped"]


async def test_stopping_while_nothing_is_written_ends():
    scene = Scene(Says(b"ab"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        talking = asyncio.create_task(scene.chat.run(Lines(scene.reader)))
        await asyncio.sleep(0.05)
        scene.chat.interrupt()
        await talking
    os.close(scene.writer)


async def test_trouble_is_said_to_a_person_and_ends_a_script():
    model = Says(b"ab")
    model.trouble = LookupError("nobody holds stage 1")
    scene = Scene(model, mendable=(LookupError,))
    await scene.talk(b"one\ntwo\n")
    assert scene.said == ["nobody holds stage 1"] * 2
    with pytest.raises(LookupError):
        await Scene(model).talk(b"one\n")


class Typed(Lines):
    """Lines that are all there."""

    def __init__(self, *lines: bytes) -> None:
        self.lines = list(lines)

    async def next(self) -> bytes | None:
        return self.lines.pop(0) if self.lines else None


def test_live_peers_hold_the_conversation_that_a_model_on_disk_would():
    async def story() -> None:
        holders = Holders(tiny_manifest(), {"a": 0, "c": 1, "d": 1, "e": 2})
        async with holders.visitor() as client:
            model = SwarmModel(client)
            live = Scene(model, tokens=12)
            live.chat._begin = lambda prompt: begin(client, prompt, temperature=0)
            await live.chat.run(Typed(b"def f", b"x"))
            talk = model.conversation
            assert talk.requests == 24
            await live.chat.run(Typed(b"/reset"))
            assert model.conversation is not talk
        shape = holders.signed.manifest.model
        here = Scene(Here(LocalModel(holders.weights(talk.rounds), shape)), tokens=12, window=16)
        await here.chat.run(Typed(b"def f", b"x"))
        assert live.shown == here.shown != ""

    run(story())


async def test_what_steers_a_terminal_is_shown_harmless_and_characters_stay_whole():
    assert await Scene(Says("\x1b[2Jß日".encode()), tokens=9).talk(b"?\n") == "\ufffd[2Jß日\n"


async def test_lines_are_cut_from_whatever_pieces_come():
    reader, writer = os.pipe()
    lines = Lines(reader)
    os.write(writer, b"a\nb")
    assert await lines.next() == b"a"
    os.write(writer, b"c\r\n\nlast")
    os.close(writer)
    assert [await lines.next() for _ in range(4)] == [b"bc", b"", b"last", None]
    os.close(reader)
