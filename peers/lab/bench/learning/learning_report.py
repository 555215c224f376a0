"""Reports of the learning benchmark: a table, JSON, and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peers.config.errors import UserError
from peers.lab.bench.learning.liars import Liars
from peers.lab.bench.learning.trials import Outcome, mean_and_spread
from swarmnet.run.manifest import Manifest

BASELINE = "adamw"
Curve = Sequence[tuple[int, float]]
"""Training curve of a demo's report: pairs of tokens and training loss."""


@dataclass(frozen=True, slots=True)
class MethodRow:
    """One method at its best rate, over all seeds."""

    method: str
    told: str
    rate: float
    outer_lr: float | None
    local_steps: int
    """Local steps that a peer takes in a round; 0: none."""
    rates_tried: int
    loss: float
    """Held-out loss in nats per token, mean over the seeds."""
    spread: float
    """Standard deviation of `loss` over the seeds."""
    bits_per_byte: float
    contribution_bytes: float
    """Bytes of contributions that a peer sends for each token it trains."""
    seconds: float
    """Mean seconds of one trial."""
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class LearningReport:
    """The comparison of all methods on one run."""

    name: str
    parameters: int
    tokens: int
    """Tokens that all peers together train in each trial."""
    peers: int
    delay: int
    away: int
    late: float
    liars: str
    """Number and kind of peers that lie, as `N:KIND`; empty: none."""
    split: str
    """How the text is divided among owners (`text_split.py`); empty: all peers have all of it."""
    owners: int
    """Number of owners, who have peers in turn."""
    seeds: int
    activation_bytes: float
    """Bytes of activations and gradients that a peer of a middle stage sends for each token."""
    rows: tuple[MethodRow, ...]


def row(method: str, told: str, local_steps: int, rates_tried: int, outcomes: Sequence[Outcome]) -> MethodRow:
    """Return the row of a method from its outcomes, one for each seed."""
    loss, spread = mean_and_spread(each.loss for each in outcomes)
    return MethodRow(
        method,
        told,
        outcomes[0].trial.rate,
        outcomes[0].trial.outer_lr,
        local_steps,
        rates_tried,
        loss,
        spread,
        mean_and_spread(each.bits_per_byte for each in outcomes)[0],
        mean_and_spread(each.bytes_per_token for each in outcomes)[0],
        mean_and_spread(each.seconds for each in outcomes)[0],
        tuple(outcomes),
    )


def activation_bytes(manifest: Manifest) -> float:
    """Return the bytes of an activation and a gradient per token; 0 in a run of one stage."""
    if len(manifest.stages) == 1:
        return 0.0
    return (manifest.body_bytes + manifest.gradient_bytes) / manifest.microbatch_tokens


def render(report: LearningReport) -> str:
    """Return the report as a table, best method first."""
    baseline = next((each for each in report.rows if each.method == BASELINE), None)
    lines = [
        f"{report.name}: {report.parameters:,} parameters, {report.tokens:,} tokens "
        f"({report.tokens / report.parameters:.1f} per parameter), {report.peers} peers, {report.seeds} seeds"
        + (f", rounds applied {report.delay} later" if report.delay else "")
        + (f", {report.late:.0%} of contributions late" if report.late else "")
        + (f", liars: {report.liars}" if report.liars else "")
        + (f", text of {report.owners} owners: {report.split}" if report.split else "")
        + (f", {report.away} of the peers away for a third" if report.away else ""),
        f"activations: {report.activation_bytes:,.0f} bytes per token of a middle stage",
        "",
        f"{'method':<21}{'rate':>9}{'outer':>7}{'tried':>6}{'H':>4}{'loss':>9}{'+-':>8}{'bits/byte':>11}"
        f"{'to adamw':>10}{'bytes/token':>13}{'fewer':>9}{'seconds':>9}  what",
    ]
    for each in sorted(report.rows, key=lambda found: found.loss):
        relative, fewer, outer = "", "", "" if each.outer_lr is None else f"{each.outer_lr:g}"
        local_steps = each.local_steps or ""
        if baseline is not None:
            relative = f"{each.loss / baseline.loss - 1:+.1%}"
            fewer = f"{baseline.contribution_bytes / each.contribution_bytes:,.0f}"
        lines.append(
            f"{each.method:<21}{each.rate:>9.2g}{outer:>7}{each.rates_tried:>6}{local_steps:>4}{each.loss:>9.4f}{each.spread:>8.4f}"
            f"{each.bits_per_byte:>11.4f}{relative:>10}{each.contribution_bytes:>13,.2f}{fewer:>9}"
            f"{each.seconds:>9,.0f}  {each.told}"
        )
    lines.extend(line for each in report.rows if (line := _weights_line(report, each)))
    lines.extend(line for each in report.rows if (line := _owners_line(each)))
    return "\n".join(lines)


def _weights_line(report: LearningReport, row: MethodRow) -> str:
    """Return a line with the mean weights of votes by agreement; empty if all are equal."""
    seeds = [outcome.vote_weights for outcome in row.outcomes if outcome.vote_weights]
    if not seeds:
        return ""
    weights = [sum(of_peer) / len(seeds) for of_peer in zip(*seeds, strict=True)]
    honest = len(weights) - Liars.parse(report.liars, report.peers).count

    def mean(peers: Sequence[int]) -> str:
        return f"{sum(weights[peer] for peer in peers) / len(peers):.3f}"

    line = f"weights of votes, {row.method}: honest peers {mean(range(honest))}"
    line += f", lowest {min(weights[:honest]):.3f}"
    if honest < len(weights):
        line += f", liars {mean(range(honest, len(weights)))}"
    if report.owners > 1:
        owners = [mean(range(owner, honest, report.owners)) for owner in range(min(honest, report.owners))]
        line += f", peers of each owner {', '.join(owners)}"
    return line


def _owners_line(row: MethodRow) -> str:
    """Return a line with the mean loss on each owner's held-out text; empty if owners have none."""
    seeds = [outcome.owner_losses for outcome in row.outcomes if outcome.owner_losses]
    means = [sum(of_owner) / len(seeds) for of_owner in zip(*seeds, strict=True)]
    return f"loss of each owner, {row.method}: {', '.join(f'{mean:.4f}' for mean in means)}" if means else ""


def as_json(report: LearningReport) -> str:
    return json.dumps(asdict(report), indent=1)


def demo_curve(file: Path) -> Curve:
    """Read the training curve of a demo's report. Raises UserError if the file is none."""
    try:
        points = json.loads(file.read_bytes())["curve"]
        return [(int(tokens), float(loss)) for tokens, loss in points]
    except (OSError, ValueError, TypeError, KeyError) as error:
        how = f"`swarmnet demo --report {file}` writes one"
        raise UserError(f"{file} is no report of a demo ({how}): {error!r}") from None


def draw(report: LearningReport, folder: Path, demos: Mapping[str, Curve]) -> list[Path]:
    """Draw loss against tokens, and loss against bytes per token; return the files.

    With `demos` of the same model, a third plot compares the training losses. Raises UserError if matplotlib
    (the extra `pictures`) is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError("pictures need matplotlib: scripts/setup pictures, or leave --pictures out") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    best_first = sorted(report.rows, key=lambda row: row.loss)
    colours = pyplot.colormaps["tab20"]
    curves, axes = pyplot.subplots(figsize=(9, 6))
    for number, each in enumerate(best_first):
        points = each.outcomes[0].curve
        axes.plot(
            [point.tokens for point in points],
            [point.loss for point in points],
            label=each.method,
            color=colours(number % colours.N),
        )
    axes.set(xlabel="tokens", ylabel="held-out loss, nats per token", title=report.name)
    axes.legend(fontsize="small")
    front, axes = pyplot.subplots(figsize=(9, 6))
    best = _front(report)
    axes.plot([each.contribution_bytes for each in best], [each.loss for each in best], color="lightgrey")
    for number, each in enumerate(best_first):
        axes.scatter(each.contribution_bytes, each.loss, color=colours(number % colours.N), zorder=2)
        axes.annotate(
            each.method,
            (each.contribution_bytes, each.loss),
            (4, 4),
            textcoords="offset points",
            fontsize="small",
        )
    axes.set(xscale="log", xlabel="bytes of contributions per token", ylabel="held-out loss, nats per token")
    axes.set(title=report.name, xmargin=0.15)  # Room for the names to the right of the points.
    files = [folder / f"{report.name}-tokens.png", folder / f"{report.name}-bytes.png"]
    figures = [curves, front]
    if demos:
        compared, axes = pyplot.subplots(figsize=(9, 5))
        for name, curve in demos.items():
            axes.plot([tokens for tokens, _ in curve], [loss for _, loss in curve], label=name)
        for each in report.rows:
            trained = [(point.tokens, point.trained) for point in each.outcomes[0].curve if point.trained]
            axes.plot(
                [tokens for tokens, _ in trained], [loss for _, loss in trained], "--", label=each.method
            )
        axes.set(xlabel="tokens", ylabel="loss in training, nats per token")
        axes.legend()
        figures.append(compared)
        files.append(folder / f"{report.name}-demo.png")
    for figure, file in zip(figures, files, strict=True):
        figure.savefig(file, dpi=120, bbox_inches="tight")
        pyplot.close(figure)
    return files


def _front(report: LearningReport) -> list[MethodRow]:
    """Return the Pareto front: methods with a lower loss than all that send as few bytes or fewer."""
    found: list[MethodRow] = []
    for each in sorted(report.rows, key=lambda row: (row.contribution_bytes, row.loss)):
        if not found or each.loss < found[-1].loss:
            found.append(each)
    return found
