"""A process of several stages is several peers, each with ports of its own: which line is of which."""

from __future__ import annotations

from dataclasses import replace

from peers.config.peer_file import PeerFile
from peers.config.sibling_file import HIGHEST_PORT, sibling_file
from peers.errors import ConfigError
from peers.telemetry.event_log import read_lately
from peers.telemetry.events import Assembled, Started
from peers.tools.doctor.line import Line, Tell
from peers.tools.doctor.machine import port

OF_EACH = ("p2pd", "reachability")
"""What is told of every stage; everything else is the same for all."""


def stage_held(config: PeerFile, number: int, running: bool) -> int | None:
    """By sibling `number`; None: that is only chosen when it starts. Of a running one its log tells; None:
    it has not said so yet, or so long ago that it is kept no more."""
    if config.stage != "auto":
        return config.stage + number
    log = sibling_file(config, number).state / "events.jsonl"
    found = None
    for line in read_lately(log) if running else ():
        if isinstance(line.event, Started):
            found = None
        elif isinstance(line.event, Assembled):
            found = line.event.stage
    return found


def of_stage(config: PeerFile, number: int, running: bool, line: Line) -> Line:
    """The same line, saying which stage it is of, where there are several."""
    if config.stages == 1:
        return line
    held = stage_held(config, number, running)
    if held is not None:
        which = f"stage {held}"
    elif running:
        which = f"its stage {number + 1} of {config.stages} (which one, its event log does not tell)"
    else:
        which = f"stage {number + 1} of the {config.stages} it will hold"
    return replace(line, text=f"{which}: {line.text}", data={**line.data, "sibling": number, "stage": held})


def telling(config: PeerFile, number: int, running: bool, tell: Tell) -> Tell:
    """For the visit of one sibling to the swarm: what is the same for all is told by the first one."""

    def told(line: Line) -> None:
        if line.check in OF_EACH:
            tell(of_stage(config, number, running, line))
        elif number == 0:
            tell(line)

    return told


def ports(config: PeerFile, running: bool) -> list[Line]:
    """Whether each p2pd could listen: the first where the peer file says, the others on the ports behind."""
    lines: list[Line] = []
    takers: dict[str, int] = {}
    for number in range(config.stages):
        try:
            sibling = sibling_file(config, number)
        except ConfigError as error:
            fix = f"listen: [/ip4/0.0.0.0/tcp/{HIGHEST_PORT - config.stages + 1}] in the peer file, or below"
            lines.append(Line("port", "fail", str(error), fix))
            break
        line = port(sibling, running)
        for address in sibling.listen:
            taker = takers.setdefault(address, number)
            if taker != number and "/0/" not in f"{address}/" and not running:
                text = f"{address} is also where stage {taker + 1} of the {config.stages} would listen"
                fix = f"leave {config.stages} ports from each address of listen to the next"
                line = Line("port", "fail", text, fix, line.data)
        lines.append(of_stage(config, number, running, line))
    return lines
