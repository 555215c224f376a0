"""A plan in words and one table."""

from __future__ import annotations

from peers.capacity.plan import Answer

LINE_SHARE = 0.2
"""More of a line than this for contributions is worth a word."""


def render(answer: Answer) -> str:
    """For people."""
    costs = 1 - answer.churned / answer.tokens_per_second
    peers = sum(answer.peers)
    rows = [
        ("tokens per second", f"{answer.churned:,.0f}"),
        ("days", f"{answer.days:,.2f} to {answer.target:,} tokens"),
        ("without churn", f"{answer.tokens_per_second:,.0f} tokens per second; churn costs {costs:.2%}"),
        ("the most possible", f"{answer.most:,.0f} (maximum flow, or the shared cores)"),
        ("simulated", f"{answer.simulated:,} of {peers:,} peers"),
        ("weakest stage", f"{answer.weakest}: {answer.capacity[answer.weakest]:,.0f} tokens per second"),
        ("a round", f"every {answer.round_seconds:.3g} s"),
    ]
    lines = [f"{name:<20}{value}" for name, value in rows]
    lines += ["", f"{'':>35}sent per peer and day"]
    lines.append(f"{'stage':>5}{'peers':>8}{'tokens/s':>14}{'microbatches':>15}{'contributions':>15}")
    table = zip(answer.peers, answer.capacity, answer.data_bytes, answer.update_bytes, strict=True)
    for stage, (count, capacity, data, updates) in enumerate(table):
        lines.append(f"{stage:>5}{count:>8,}{capacity:>14,.0f}{_bytes(data):>15}{_bytes(updates):>15}")
    if answer.line_share > LINE_SHARE:
        longer = answer.line_share / LINE_SHARE
        lines += [
            "",
            f"Contributions would take {answer.line_share:,.0%} of the thinnest line: make "
            f"rounds.target_tokens {longer:,.2g} times as large, or sync.kept smaller.",
        ]
    return "\n".join(lines)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
