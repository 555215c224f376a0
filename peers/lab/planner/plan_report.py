"""Render a plan as text, with one table."""

from __future__ import annotations

from peers.lab.planner.plan_request import CLEARLY, PlanResult
from peers.telemetry.console import counted

LINE_SHARE = 0.2
"""Share of a link above which the report warns about contributions."""


def render(answer: PlanResult) -> str:
    summed = f"{answer.bounds.summed:,.0f}"
    rows = [
        ("tokens per second", f"{answer.churned:,.0f}"),
        ("utilisation", f"{answer.utilisation:.3g} of the {summed} that all could compute"),
        ("one of these alone", _alone(answer)),
        ("days", f"{answer.days:,.2f} to {answer.target:,} tokens"),
        ("without churn", f"{answer.tokens_per_second:,.0f} tokens per second; churn costs {_churn(answer)}"),
        ("the most possible", f"{answer.most:,.0f} (maximum flow, or the shared cores)"),
        ("bounded by", _bounds(answer)),
        ("simulated", _simulated(answer)),
        ("weakest stage", _weakest(answer)),
        ("a round", _rounds(answer)),
    ]
    if answer.full_path_warmup_rounds:
        first = (
            f"{answer.whole:,.0f} tokens per second in the first "
            f"{counted(answer.full_path_warmup_rounds, 'round')}"
        )
        rows.insert(1, ("before that", first + ", which leave out nothing"))
    lines = [f"{name:<20}{value}" for name, value in rows]
    return "\n".join([*lines, "", *_table(answer), *_advice(answer), *_warnings(answer)])


def _table(answer: PlanResult) -> list[str]:
    """Return the table with one row for each stage."""
    skips = min(answer.visited) < 1
    visits = f"{'visits':>8}" if skips else ""
    lines = [
        f"{'':>{55 if skips else 47}}sent per peer and day",
        f"{'stage':>5}{'peers':>8}{'tokens/s':>14}{visits}{'memory':>12}"
        f"{'microbatches':>15}{'contributions':>15}",
    ]
    table = zip(
        answer.peers,
        answer.capacity,
        answer.visited,
        answer.memory,
        answer.data_bytes,
        answer.update_bytes,
        strict=True,
    )
    for stage, (count, capacity, part, memory, data, updates) in enumerate(table):
        visits = f"{part:>8.0%}" if skips else ""
        sent = f"{scaled(memory):>12}{scaled(data):>15}{scaled(updates):>15}"
        lines.append(f"{stage:>5}{count:>8,}{capacity:>14,.0f}{visits}{sent}")
    return lines


def _simulated(answer: PlanResult) -> str:
    return f"{answer.simulated:,} of {sum(answer.peers):,} peers"


def _alone(answer: PlanResult) -> str:
    alone = answer.alone
    if not alone.fits:
        return (
            f"cannot: the whole model takes {scaled(alone.needs)}, and it has {scaled(alone.has)} "
            f"({alone.tokens_per_second:,.0f} tokens per second if it could)"
        )
    return f"{alone.tokens_per_second:,.0f} tokens per second, in {scaled(alone.needs)} of memory"


def _bounds(answer: PlanResult) -> str:
    bounds = answer.bounds
    return (
        f"{bounds.strongest} (compute of the stages {bounds.compute:,.0f}, links "
        f"{bounds.lines:,.0f}, with contributions {bounds.exchange:,.0f}, simulated {bounds.played:,.0f})"
    )


SHAPE = "`swarmnet plan RUN.yaml --peers PEERS --shape`"


def _warnings(answer: PlanResult) -> list[str]:
    """Return the warnings; they are printed last, so that they are not overlooked."""
    found = [f"NOT TAKING PART: {one}: no stage fits in that memory." for one in answer.left_out]
    if answer.slower_than_one:
        times = answer.alone.tokens_per_second / answer.churned
        found.append(
            f"SLOWER THAN ONE OF ITS MEMBERS: one peer alone makes {times:,.3g} times as many tokens."
            f" Another shape may not be: {SHAPE}."
        )
    return ["", *found] if found else []


def _churn(answer: PlanResult) -> str:
    churn = answer.churn
    if not churn.leaving:
        return "nothing"
    hastened = f", {churn.hastened:,.0f} times as fast" if churn.hastened > 1.5 else ""
    return (
        f"{churn.costs:.2%} ({churn.leaving:,.{0 if churn.leaving >= 10 else 1}f} leave an hour; simulated: "
        f"{churn.deaths:,}{hastened}; by arithmetic {churn.computed:.2%})"
    )


def _weakest(answer: PlanResult) -> str:
    stage = answer.weakest
    bears = answer.capacity[stage] / answer.visited[stage]
    part = answer.visited[stage]
    visits = "" if part == 1 else f" of the run's, {part:.0%} of which visit it"
    return f"{stage}: {bears:,.0f} tokens per second{visits}"


def _rounds(answer: PlanResult) -> str:
    first, slowest = answer.round_seconds[0], max(answer.round_seconds)
    if slowest < 1.05 * first:
        return f"every {first:.3g} s"
    stage = answer.round_seconds.index(slowest)
    return f"every {first:.3g} s; of stage {stage} every {slowest:.3g} s"


def _advice(answer: PlanResult) -> list[str]:
    bounds = answer.bounds
    if answer.line_share <= LINE_SHARE and bounds.exchange >= CLEARLY * bounds.lines:
        return []
    times = max(answer.full_line_share / LINE_SHARE, bounds.lines / bounds.exchange)
    return [
        "",
        f"Contributions take {answer.line_share:,.0%} of the slowest link: make "
        "rounds.global_batch_tokens and "
        f"max_seconds {times:,.2g} times as large, or sync.topk_per_chunk smaller.",
    ]


def scaled(count: float) -> str:
    """Return a number of bytes with a unit, such as "1.5 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
