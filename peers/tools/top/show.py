"""Draws pictures again and again until a key ends it; without a terminal one frame is printed.

Loads neither torch nor the network: it must be there at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from peers.runtime.control_client import ask
from peers.telemetry.picture import Picture, from_json
from peers.tools.top import screen
from peers.tools.top.keys import Keys
from peers.tools.top.replay import Player, Replay

FRAME_SECONDS = 0.25
PEER_SECONDS = 1.0
"""How often a running peer is asked: it looks at itself as often."""
ANSWER_SECONDS = 10.0
"""Deadline of an answer of the peer on this machine."""
LEAVE = "q leaves"
PLAYING = "q leaves   space pauses   + - speed   left right 10 s   home end"


def peer(console: Console, state: Path) -> None:
    """Attached to the peer that runs with this state folder. UserError when none answers."""
    picture = _asked(state)
    if not console.is_terminal:
        console.print(screen.frame(picture, console))
        return
    with Keys() as keys, live(console) as display:
        asked_at = time.monotonic()
        while "q" not in keys.pressed(FRAME_SECONDS):
            if time.monotonic() >= asked_at + PEER_SECONDS:
                picture = _asked(state)
                asked_at = time.monotonic()
            display.update(framed(picture, console, LEAVE), refresh=True)


def _asked(state: Path) -> Picture:
    return from_json(ask(state, {"do": "status"}, ANSWER_SECONDS))


def replay(console: Console, logs: Replay, speed: float, start: float | None) -> None:
    """Event logs, from `start` seconds on. Without a terminal: the moment `start`, or else the end."""
    if not console.is_terminal:
        picture = logs.at(logs.seconds if start is None else start)
        console.print(screen.frame(picture, console))
        return
    with Keys() as keys, live(console) as display:

        def draw(picture: Picture, line: str) -> None:
            display.update(framed(picture, console, f"{line}   {PLAYING}"), refresh=True)

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


def live(console: Console) -> Live:
    """The whole screen, left as it was at the end."""
    return Live(console=console, screen=True, auto_refresh=False)


def framed(picture: Picture, console: Console, foot: str) -> Group:
    """A picture that fits the terminal as it is now."""
    return screen.frame(picture, console, foot, console.height - 1)
