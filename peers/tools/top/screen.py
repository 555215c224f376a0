"""Draw a snapshot as lines of a terminal of at least 80 columns, with or without colour, Unicode or ASCII."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from textwrap import wrap

from rich.console import Console, Group
from rich.text import Text

from peers.telemetry.console import amount, pace, printable
from peers.telemetry.event import short
from peers.telemetry.reasons import JOIN
from peers.telemetry.snapshot import PeerRow, ShownEvent, SwarmSnapshot

UNICODE, ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"
MIN_PEERS, MIN_EVENTS = 4, 3
"""Minimum rows of each on a low terminal."""
MAX_STAGES = 24
"""Maximum stages that are listed one by one; of more stages only the thin ones are named."""
THIN_PEERS = 2
"""A stage with fewer peers than this stops if it loses one."""
STYLES = {"warning": "yellow", "error": "bold red", "info": ""}
STATE_STYLES = {
    "training": "green",
    "gone": "red",
    "stopped": "red",
    "suspect": "yellow",
    "quiet": "yellow",
    "joining": "cyan",
    "paused_by_owner": "magenta",
    "ended": "magenta",
    "paused": "magenta",
    "leaving": "cyan",
}

Column = tuple[str, int, Callable[[PeerRow], str]]
"""Heading, width and content of a column; right-aligned if the width is negative."""


def frame(snapshot: SwarmSnapshot, console: Console, foot: str = "", rows: int | None = None) -> Group:
    """Return the whole screen. `rows`: maximum lines; None: as many as needed."""
    width = max(40, console.width)
    bars = UNICODE if console.encoding.lower().startswith("utf") else ASCII
    head = [_title(snapshot, width), _figures(snapshot)]
    if snapshot.planned is not None and snapshot.round is not None:
        head.append(Text(f"progress {snapshot.progress}"))
    head += [_curve(snapshot, width, bars), _stages(snapshot, bars)]
    if snapshot.waits_for:
        names = ", ".join(map(str, snapshot.waits_for[:MAX_STAGES]))
        head.append(Text(f"waits for stages {names}: no peer holds them", style="bold red"))
        head.append(Text(f"hold one: {JOIN}", style="bold red"))
    head += [Text(part, style="bold red") for line in snapshot.warnings for part in _wrapped(line, width)]
    head += [Text(part, style="yellow") for line in snapshot.doubts for part in _wrapped(line, width)]
    known = (
        _own_work(snapshot),
        _tokens(snapshot),
        _traffic("up", snapshot.sent),
        _traffic("down", snapshot.received),
        _counts("microbatches", snapshot.microbatches),
        _counts("rounds", snapshot.rounds),
        _comparisons(snapshot),
        _computing(snapshot),
        _memory(snapshot),
    )
    tail = [line for line in known if line is not None]
    shown_peers, shown_events = _room(snapshot, rows, len(head) + len(tail) + 5 + bool(foot))
    lines = [*head, Text(), *_peers(snapshot, width, shown_peers), Text(), *tail]
    lines += [*_events(snapshot.events, shown_events), *([Text(foot, style="dim")] if foot else [])]
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
        line.truncate(width, overflow="crop")
        if bars is ASCII:  # Names of peers may contain any printable character.
            line.plain = line.plain.encode(console.encoding, "replace").decode(console.encoding)
    return Group(*lines)


def _wrapped(sentences: str, width: int) -> list[str]:
    """Return lines of at most `width` characters; a command to copy gets its own line."""
    parts = re.split(r"(?<=: )(?=swarmnet )", printable(sentences))
    return [line for part in parts for line in wrap(part, width, break_on_hyphens=False)]


def _room(snapshot: SwarmSnapshot, rows: int | None, taken: int) -> tuple[int, int]:
    """Return how many peers and events fit."""
    if rows is None:
        return len(snapshot.rows), 20
    left = max(MIN_PEERS + MIN_EVENTS, rows - taken)
    peers = min(len(snapshot.rows), max(MIN_PEERS, left - max(MIN_EVENTS, left // 3)))
    return peers, max(MIN_EVENTS, left - peers)


def _title(snapshot: SwarmSnapshot, width: int) -> Text:
    at = datetime.fromtimestamp(snapshot.at, UTC).strftime("%H:%M:%S")
    words = [word for word in ("swarmnet top", snapshot.run, snapshot.source, snapshot.state) if word]
    left = printable("   ".join(words))[: width - 10]
    return Text(left.ljust(width - 8) + at, style="bold")


def _figures(snapshot: SwarmSnapshot) -> Text:
    parts = []
    if snapshot.round is not None:
        settled = f" (settled {snapshot.settled})" if snapshot.settled is not None else ""
        parts.append(f"round {snapshot.round}{settled}")
    if snapshot.lag is not None:
        parts.append(f"lag {snapshot.lag}")
    if snapshot.loss is not None:
        parts.append(f"loss {snapshot.loss:.3f}")
    if snapshot.eval_loss is not None:
        parts.append(f"held-out {snapshot.eval_loss:.3f}")
    if snapshot.tokens_per_second is not None:
        parts.append(pace(snapshot.tokens_per_second))
    return Text("  ".join(parts))


def _own_work(snapshot: SwarmSnapshot) -> Text | None:
    work = snapshot.own_work
    return Text(work.text(), style="bold") if work is not None and work.tokens else None


def _tokens(snapshot: SwarmSnapshot) -> Text | None:
    """Return the token counts of the run and of the selected peer."""
    parts = []
    if snapshot.finalized_tokens is not None:
        parts.append(f"{snapshot.finalized_tokens:,} in all (settled)")
    parts += [f"{snapshot.tokens:,} since start"] * bool(snapshot.tokens)
    return Text(f"{'tokens':<13}{'  '.join(parts)}") if parts else None


def _curve(snapshot: SwarmSnapshot, width: int, bars: str) -> Text:
    if not snapshot.losses:
        return Text("loss     not known yet", style="dim")
    first, last = f"{snapshot.losses[0]:.3f}", f"{snapshot.losses[-1]:.3f}"
    room = width - len(first) - len(last) - len("loss     ") - 2
    return Text(f"loss     {first} {spark(snapshot.losses, room, bars)} {last}")


def spark(values: Sequence[float], width: int, bars: str = UNICODE) -> str:
    """Return a curve that is one line high. Longer series are averaged; shorter ones keep their length."""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    step = (high - low) / (len(bars) - 1) or 1.0
    return "".join(bars[round((mean - low) / step)] for mean in means)


def _stages(snapshot: SwarmSnapshot, bars: str) -> Text:
    line, stages = Text("stages  "), snapshot.stages
    is_long = len(stages) > MAX_STAGES
    named = [stage for stage in stages if not is_long or (stage.is_seen and stage.peers < THIN_PEERS)]
    for stage in named[:MAX_STAGES]:
        count = stage.peers
        style = "bold red" if count == 0 else "yellow" if count < THIN_PEERS else "green"
        line.append(f" {stage.stage}:", style="dim")
        if not stage.is_seen:
            line.append(" ? ", style="dim")
            continue
        line.append(bars[-1] * min(count, 8) + f" {count} ", style=style)
    if len(named) < len(stages):
        line.append(f" and {len(stages) - len(named[:MAX_STAGES])} more")
    return line if stages else Text("stages   not known yet", style="dim")


def _columns(snapshot: SwarmSnapshot, width: int) -> list[Column]:
    """Return the columns that have values and fit the width."""
    columns: list[Column] = [
        ("stage", -5, lambda seen: "-" if seen.stage < 0 else str(seen.stage)),
        ("peer", 16, lambda seen: printable(seen.name)[:12] or short(seen.peer)),
        ("state", 9, lambda seen: printable(seen.state)),
        ("round", -6, lambda seen: _number(seen.round)),
        ("votes", -5, _votes),
        ("loss", -6, lambda seen: "-" if seen.loss is None else f"{seen.loss:.3f}"),
        ("tok/s", -7, lambda seen: _number(seen.tokens_per_second)),
        ("can do", -7, lambda seen: _number(seen.can_do)),
        ("up", -7, lambda seen: "-" if seen.sent_bytes is None else amount(seen.sent_bytes)),
        ("down", -7, lambda seen: "-" if seen.received_bytes is None else amount(seen.received_bytes)),
    ]
    known = [
        column
        for column in columns
        if column[0] in ("stage", "peer", "state") or any(column[2](seen) != "-" for seen in snapshot.rows)
    ]
    while sum(abs(size) + 1 for _, size, _ in known) > width + 1:
        known.pop()
    return known


def _votes(seen: PeerRow) -> str:
    """Return what the peer's votes weigh, as a percentage; `new` if they are not known yet."""
    if seen.is_new_voter:
        return "new"
    return "-" if seen.vote_weight is None else f"{seen.vote_weight:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _peers(snapshot: SwarmSnapshot, width: int, most: int) -> list[Text]:
    """Return the table of at most `most` peers as lines of `width` columns."""
    columns = _columns(snapshot, width)

    def row(words: Sequence[str]) -> str:
        cells = zip(columns, words, strict=True)
        return " ".join(
            word.rjust(-size) if size < 0 else word[:size].ljust(size) for (_, size, _), word in cells
        ).rstrip()

    lines = [Text(row([heading for heading, _, _ in columns]), style="bold")]
    shown = snapshot.rows
    if len(shown) > most:  # Peers with a problem come first.
        shown = tuple(sorted(shown, key=lambda seen: (not seen.here, seen.state == "training")))
    for seen in shown[:most]:
        mark = " (here)" if seen.here else ""
        words = [cell(seen) + (mark if heading == "peer" else "") for heading, _, cell in columns]
        line = Text(row(words))
        style = STATE_STYLES.get(seen.state, "")
        if style:
            line.highlight_words([f" {seen.state}"], style)
        lines.append(line)
    if len(snapshot.rows) > most:
        lines.append(Text(f"      and {len(snapshot.rows) - most} more", style="dim"))
    return lines


def _traffic(direction: str, counts: Mapping[str, int]) -> Text | None:
    total = sum(counts.values())
    if not total:
        return None
    kinds = [(kind, count) for kind, count in sorted(counts.items(), key=lambda one: -one[1]) if count]
    parts = "  ".join(f"{kind} {amount(count)}" for kind, count in kinds if kind != "all")
    return Text(f"{direction:<5}{amount(total):>8}   {printable(parts)}".rstrip())


def _counts(title: str, counts: Mapping[str, int]) -> Text | None:
    parts = "  ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    return Text(f"{title:<13}{printable(parts)}") if parts else None


def _comparisons(snapshot: SwarmSnapshot) -> Text | None:
    """Return how the comparisons of answers ended, or that the next stage has one peer."""
    if snapshot.not_compared is not None:
        return Text(f"{'comparisons':<13}none: stage {snapshot.not_compared} has one peer")
    return _counts("comparisons", snapshot.comparisons)


def _computing(snapshot: SwarmSnapshot) -> Text | None:
    parts = []
    if snapshot.idle_share is not None:
        parts.append(f"idle {snapshot.idle_share:.0%}")
    if snapshot.utilization is not None:
        parts.append(f"utilisation {snapshot.utilization:.0%} of the peak")
    if snapshot.gradient_norm is not None:
        parts.append(f"gradient norm {snapshot.gradient_norm:.3g}")
    return Text(f"{'computing':<13}{'  '.join(parts)}") if parts else None


def _memory(snapshot: SwarmSnapshot) -> Text | None:
    if snapshot.memory_bytes is None:
        return None
    return Text(f"{'memory':<13}{amount(snapshot.memory_bytes)} resident, without p2pd")


def _events(events: Sequence[ShownEvent], most: int) -> list[Text]:
    if not events:
        return []
    lines = [Text("events", style="bold")]
    for event, times in _once(events)[-most:]:
        at = datetime.fromtimestamp(event.time, UTC).strftime("%H:%M:%S")
        line = Text(f"{at} {printable(event.code)[:15]:<16}")
        again = f"({times} times) " if times > 1 else ""
        lines.append(line.append(printable(again + event.text), style=STYLES.get(event.level, "")))
    return lines


def _once(events: Sequence[ShownEvent]) -> list[tuple[ShownEvent, int]]:
    """Return the newest of equal events, with the number of repetitions."""
    said: dict[tuple[str, str], tuple[ShownEvent, int]] = {}
    for event in events:
        _, times = said.pop((event.code, event.text), (event, 0))
        said[event.code, event.text] = (event, times + 1)
    return list(said.values())
