"""Loss curves from event logs: of a peer (its own microbatches) or of an observer (the whole run)."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.telemetry import log_events
from peers.telemetry.event_log import LOG_FILE, LogLine, parts, read_all

SMOOTHED_SHARE = 0.1
"""Share of a curve's points, the last ones, whose mean is shown as the loss at the end: single microbatches
differ by more than a tenth of a curve falls."""
TABLE_ROWS = 12


@dataclass(frozen=True, slots=True)
class LossPoint:
    """One point of a curve."""

    at: float
    """Unix time in seconds."""
    round: int | None
    tokens: int
    """Tokens of all peers in the settled rounds until then."""
    loss: float
    """Training loss, nats per token."""
    eval_loss: float | None
    """Loss on held-out text, nats per token, if an observer evaluates."""


def loss_points(lines: Iterable[LogLine]) -> list[LossPoint]:
    """Return the curve in an event log, oldest point first: one for each settled round of a peer with the
    mean loss of its microbatches since the round before, or one for each `swarm_seen` of an observer.

    Rounds of a branch that the peer gave up are removed."""
    points: list[LossPoint] = []
    loss_sum, loss_tokens = 0.0, 0
    for line in lines:
        match line.event:
            case log_events.Committed(tokens=tokens, loss=float(loss)):
                loss_sum += loss * tokens
                loss_tokens += tokens
            case log_events.Settled(round=round, tokens=int(tokens)) if loss_tokens:
                points.append(LossPoint(line.time, round, tokens, loss_sum / loss_tokens, None))
                loss_sum, loss_tokens = 0.0, 0
            case log_events.Resync(fork_round=int(first_abandoned)):
                points = [point for point in points if point.round is None or point.round < first_abandoned]
            case log_events.SwarmSeen(loss=float(loss)) as seen:
                points.append(LossPoint(line.time, seen.round, seen.tokens, loss, seen.eval_loss))
            case _:
                pass
    return points


def read_curve(state: Path) -> list[LossPoint]:
    """Return the curve of the peer or observer with this state folder. Raises UserError if there is none."""
    log = state / LOG_FILE
    if not parts(log):
        raise UserError(f"{state} holds no {LOG_FILE}; name the state folder of a peer or an observer")
    points = loss_points(read_all(log))
    if not points:
        raise UserError(
            f"{log} has no loss yet. A peer knows the loss of its own microbatches after the first "
            "settled round, an observer those in the peers' records: wait, or name another folder"
        )
    return points


def smoothed_end(points: Sequence[LossPoint]) -> float:
    """Return the mean loss of the last tenth of the points, nats per token."""
    last = points[-max(1, round(len(points) * SMOOTHED_SHARE)) :]
    return sum(point.loss for point in last) / len(last)


def render(name: str, points: Sequence[LossPoint]) -> str:
    """Return the curve as a table of at most TABLE_ROWS rows, each with the mean loss since the row before,
    and the loss at the end."""
    count = min(TABLE_ROWS, len(points))
    edges = [index * len(points) // count for index in range(count + 1)]
    lines = [name, f"{'time':>16}{'round':>9}{'tokens':>17}{'loss':>9}{'held out':>10}"]
    for first, stop in pairwise(edges):
        last, held_out = points[stop - 1], "-"
        if last.eval_loss is not None:
            held_out = f"{last.eval_loss:.4f}"
        mean = sum(point.loss for point in points[first:stop]) / (stop - first)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last.at))
        shown_round = "-" if last.round is None else f"{last.round:,}"
        lines.append(f"{when:>16}{shown_round:>9}{last.tokens:>17,}{mean:>9.4f}{held_out:>10}")
    lines.append(f"loss at the end, mean of the last tenth: {smoothed_end(points):.4f} nats per token")
    return "\n".join(lines)


def write_csv(file: Path, curves: Mapping[str, Sequence[LossPoint]]) -> None:
    """Write all points of all curves, a row each."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["curve", "unix_time", "round", "tokens", "loss", "eval_loss"])
    for name, points in curves.items():
        for point in points:
            rows.writerow([name, point.at, point.round, point.tokens, point.loss, point.eval_loss])
    write_atomically(file, text.getvalue().encode())


def draw(file: Path, curves: Mapping[str, Sequence[LossPoint]]) -> None:
    """Draw all curves into one PNG file: loss against tokens. Raises UserError without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError("--png needs matplotlib: scripts/setup pictures, or write --csv FILE") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for name, points in curves.items():
        tokens = [point.tokens for point in points]
        (line,) = axes.plot(tokens, [point.loss for point in points], alpha=0.35, linewidth=1)
        axes.plot(tokens, list(_running_means(points)), color=line.get_color(), label=name)
        held_out = [(point.tokens, point.eval_loss) for point in points if point.eval_loss is not None]
        if held_out:
            axes.plot(*zip(*held_out, strict=True), ":", color=line.get_color(), label=f"{name}, held out")
    axes.set_xlabel("tokens of the run")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    pyplot.close(figure)
    write_atomically(file, picture.getvalue())


def write_tensorboard(folder: Path, curves: Mapping[str, Sequence[LossPoint]]) -> None:
    """Write a TensorBoard event file for each curve; its steps are tokens. Raises UserError."""
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        raise UserError(
            "--tensorboard needs tensorboardX: scripts/setup pictures, or write --csv FILE"
        ) from None
    for name, points in curves.items():
        with SummaryWriter(str(folder / name)) as writer:
            for point in points:
                writer.add_scalar("loss/train", point.loss, point.tokens, walltime=point.at)
                if point.eval_loss is not None:
                    writer.add_scalar("loss/held out", point.eval_loss, point.tokens, walltime=point.at)


def _running_means(points: Sequence[LossPoint]) -> Iterator[float]:
    """Yield the mean loss of each point and those before it, as many as a tenth of the curve."""
    window = max(1, round(len(points) * SMOOTHED_SHARE))
    for stop in range(1, len(points) + 1):
        recent = points[max(0, stop - window) : stop]
        yield sum(point.loss for point in recent) / len(recent)
