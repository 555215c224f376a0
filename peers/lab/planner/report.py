"""A plan in words and one table."""

from __future__ import annotations

from peers.lab.planner.question import Answer
from peers.telemetry.console import counted

LINE_SHARE = 0.2
"""More of a line than this for contributions is worth a word."""


def render(answer: Answer) -> str:
    """For people."""
    skips = min(answer.visited) < 1
    rows = [
        ("tokens per second", f"{answer.churned:,.0f}"),
        ("days", f"{answer.days:,.2f} to {answer.target:,} tokens"),
        ("without churn", f"{answer.tokens_per_second:,.0f} tokens per second; churn costs {_churn(answer)}"),
        ("the most possible", f"{answer.most:,.0f} (maximum flow, or the shared cores)"),
        ("simulated", f"{answer.simulated:,} of {sum(answer.peers):,} peers"),
        ("weakest stage", _weakest(answer)),
        ("a round", _rounds(answer)),
    ]
    if answer.whole_rounds:
        first = f"{answer.whole:,.0f} tokens per second in the first {counted(answer.whole_rounds, 'round')}"
        rows.insert(1, ("before that", first + ", which leave out nothing"))
    lines = [f"{name:<20}{value}" for name, value in rows]
    lines += ["", f"{'':>{43 if skips else 35}}sent per peer and day"]
    visits = f"{'visits':>8}" if skips else ""
    lines.append(f"{'stage':>5}{'peers':>8}{'tokens/s':>14}{visits}{'microbatches':>15}{'contributions':>15}")
    table = zip(
        answer.peers, answer.capacity, answer.visited, answer.data_bytes, answer.update_bytes, strict=True
    )
    for stage, (count, capacity, part, data, updates) in enumerate(table):
        visits = f"{part:>8.0%}" if skips else ""
        sent = f"{_bytes(data):>15}{_bytes(updates):>15}"
        lines.append(f"{stage:>5}{count:>8,}{capacity:>14,.0f}{visits}{sent}")
    return "\n".join(lines + _advice(answer))


def _churn(answer: Answer) -> str:
    churn = answer.churn
    if not churn.leaving:
        return "nothing"
    hastened = f", {churn.hastened:,.0f} times as fast" if churn.hastened > 1.5 else ""
    return (
        f"{churn.costs:.2%} ({churn.leaving:,.{0 if churn.leaving >= 10 else 1}f} leave an hour; played: "
        f"{churn.deaths:,}{hastened}; by arithmetic {churn.computed:.2%})"
    )


def _weakest(answer: Answer) -> str:
    stage = answer.weakest
    bears = answer.capacity[stage] / answer.visited[stage]
    part = answer.visited[stage]
    visits = "" if part == 1 else f" of the run's, {part:.0%} of which visit it"
    return f"{stage}: {bears:,.0f} tokens per second{visits}"


def _rounds(answer: Answer) -> str:
    first, slowest = answer.round_seconds[0], max(answer.round_seconds)
    if slowest < 1.05 * first:
        return f"every {first:.3g} s"
    stage = answer.round_seconds.index(slowest)
    return f"every {first:.3g} s; of stage {stage} every {slowest:.3g} s"


def _advice(answer: Answer) -> list[str]:
    if answer.line_share <= LINE_SHARE:
        return []
    return [
        "",
        f"Contributions would take {answer.line_share:,.0%} of the thinnest line: make rounds.target_tokens "
        f"{answer.full_line_share / LINE_SHARE:,.2g} times as large, or sync.kept smaller.",
    ]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
