"""Draws pictures again and again until a key ends it; without a terminal one frame is printed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from peers.control.client import ask
from peers.inference.visit import Reached
from peers.top import screen
from peers.top.keys import Keys
from peers.top.picture import Picture, from_json
from peers.top.records import Watch, look
from peers.top.replay import Player, Replay
from protocols.errors import WireError

FRAME_SECONDS = 0.25
PEER_SECONDS = 1.0
"""How often a running peer is asked: it looks at itself as often."""
DIRECTORY_SECONDS = 5.0
"""How often the directory is asked; records change every 30 s, or when a peer's state does."""
ANSWER_SECONDS = 10.0
"""Deadline of an answer of the peer on this machine."""
LEAVE = "q leaves"
PLAYING = "q leaves   space pauses   + - speed   left right 10 s   home end"


def peer(console: Console, state: Path) -> None:
    """Attached to the peer that runs with this state folder. UserError when none answers."""
    picture = from_json(ask(state, {"do": "status"}, ANSWER_SECONDS))
    if not console.is_terminal:
        console.print(screen.frame(picture, console))
        return
    with Keys() as keys, _live(console) as live:
        asked_at = time.monotonic()
        while "q" not in keys.pressed(FRAME_SECONDS):
            if time.monotonic() >= asked_at + PEER_SECONDS:
                picture = from_json(ask(state, {"do": "status"}, ANSWER_SECONDS))
                asked_at = time.monotonic()
            live.update(_framed(picture, console, LEAVE), refresh=True)


def replay(console: Console, logs: Replay, speed: float, start: float | None) -> None:
    """Event logs, from `start` seconds on. Without a terminal: the moment `start`, or else the end."""
    if not console.is_terminal:
        picture = logs.at(logs.seconds if start is None else start)
        console.print(screen.frame(picture, console))
        return
    with Keys() as keys, _live(console) as live:

        def draw(picture: Picture, line: str) -> None:
            live.update(_framed(picture, console, f"{line}   {PLAYING}"), refresh=True)

        player = Player(logs.seconds, time.monotonic(), speed, start or 0.0)
        play(logs, player, keys.pressed, time.monotonic, draw)


def play(
    logs: Replay,
    player: Player,
    pressed: Callable[[float], list[str]],
    clock: Callable[[], float],
    draw: Callable[[Picture, str], None],
) -> None:
    """Until a key ends it. `pressed(seconds)` waits for keys, `clock` is in seconds."""
    draw(logs.at(player.position), player.line)
    while True:
        for key in pressed(FRAME_SECONDS):
            if not player.press(key, clock()):
                return
        draw(logs.at(player.advance(clock())), player.line)


async def swarm(console: Console, found: Reached) -> None:
    """What the directory says of the run, again and again."""
    pictures = _looks(found)
    async with aclosing(pictures):
        if not console.is_terminal:
            console.print(screen.frame(await anext(pictures), console))
            return
        with Keys() as keys, _live(console) as live:
            async for picture in pictures:
                until = time.monotonic() + DIRECTORY_SECONDS
                while time.monotonic() < until:
                    live.update(_framed(picture, console, LEAVE), refresh=True)
                    if "q" in await asyncio.to_thread(keys.pressed, FRAME_SECONDS):
                        return


async def _looks(found: Reached) -> AsyncGenerator[Picture]:
    """Picture after picture; a directory that does not answer leaves the last one standing."""
    watch, manifest = Watch(found.signed.manifest), found.signed.manifest
    records = await look(found.directory, found.signed.run_id, manifest)
    while True:
        yield watch.take(records, found.directory.now())
        try:
            records = await look(found.directory, found.signed.run_id, manifest)
        except WireError:
            continue


def _live(console: Console) -> Live:
    return Live(console=console, screen=True, auto_refresh=False)


def _framed(picture: Picture, console: Console, foot: str) -> Group:
    return screen.frame(picture, console, foot, console.height - 1)
