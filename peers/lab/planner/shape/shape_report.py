"""Render the result of a search for a shape as text, with a table."""

from __future__ import annotations

from math import isinf

from peers.lab.planner.plan_report import scaled
from peers.lab.planner.shape import laws
from peers.lab.planner.shape.shape_search import PlayedShape, Search
from peers.telemetry.console import counted

MINUTES, HOURS = 1440.0, 24.0
"""Minutes and hours of a day."""


def render(search: Search) -> str:
    """Return the result as text."""
    best = search.found[0]
    lines = [
        sentence(search),
        "",
        f"{search.parameters:,} parameters, {search.target:,} tokens; {search.looked_at:,} shapes by "
        f"arithmetic, {search.fitting:,} of which fit the peers' memory; simulated:",
        "",
        *_table([*search.found, *([search.as_it_is] if search.as_it_is else [])], len(search.found)),
        *([] if search.as_it_is else [f"as it is: {search.why_not}"]),
        "",
        f"The best is bounded by: {best.answer.bounds.strongest}. A round's contributions take "
        f"{best.exchange_seconds:,.0f} s of the slowest link, a round {round_seconds(best):,.0f} s.",
        *warnings(search),
    ]
    return "\n".join(lines)


def sentence(search: Search) -> str:
    """Return one sentence that compares the best shape with one peer alone."""
    best = search.found[0]
    alone = f"alone {duration(search.alone_days)}" if search.alone.fits else "alone impossible (memory)"
    together = f"together {duration(best.same_tokens_days)}, expected loss {best.loss_factor - 1:+.1%}"
    if isinf(best.days):
        return f"{alone}; {together}; the loss of one alone is never reached."
    return f"{alone}; {together}; {duration(best.days)} to the loss of one alone."


def round_seconds(one: PlayedShape) -> float:
    return max(one.answer.round_seconds)


def warnings(search: Search) -> list[str]:
    """Return warnings: where the estimates are uncertain, and which peers are left out."""
    best, found = search.found[0], []
    replicas = sum(best.answer.peers) / len(best.answer.peers)
    found.append(
        f"The expected loss has an error of about {best.law.error:.0%}: its law is that of small models."
    )
    if replicas > best.law.fitted_peers:
        found.append(
            f"The law was fitted to at most {best.law.fitted_peers} peers of a stage, and is used here for "
            f"{replicas:,.0f}: a guess, until `swarmnet bench learning RUN.yaml` has measured it."
        )
    if best.shape.local and search.rounds < laws.FEW_ROUNDS:
        found.append(
            f"Only {counted(search.rounds, 'round')} in all: what peers learn apart meets rarely. So many "
            "peers are more than such a model needs; a larger one would use them."
        )
    found += [f"NOT TAKING PART: {one}: no stage fits in that memory." for one in best.answer.left_out]
    if search.alone.fits and best.days > search.alone_days:
        found.append("SLOWER THAN ONE OF ITS MEMBERS: one peer alone is sooner at that loss, in any shape.")
    return ["", *found] if found else []


def _table(rows: list[PlayedShape], searched: int) -> list[str]:
    columns = f"{'':>9}{'stages':>7}{'microbatch':>11}{'exchange':>31}{'round':>9}{'tokens/s':>12}"
    lines = [f"{columns}{'used':>7}{'loss':>8}{'to its loss':>14}{'memory':>9}  bounded by"]
    for number, one in enumerate(rows):
        name = f"{number + 1}" if number < searched else "as it is"
        shape, answer = one.shape, one.answer
        lines.append(
            f"{name:>9}{len(shape.stages):>7}{shape.sequences:>11}{exchange(one):>31}"
            f"{round_seconds(one):>7,.0f} s{answer.churned:>12,.0f}{answer.utilisation:>7.1%}"
            f"{one.loss_factor - 1:>+8.1%}{duration(one.days):>14}{scaled(max(answer.memory)):>9}"
            f"  {answer.bounds.strongest}"
        )
    return lines


def exchange(one: PlayedShape) -> str:
    """Return how peers exchange contributions, and after how many local steps."""
    if not one.shape.local:
        return f"signs of 1/{one.shape.parts}, {one.shape.exchange}" if one.shape.parts else "votes"
    return f"{counted(local_steps(one), 'step')}, {one.shape.exchange}"


def local_steps(one: PlayedShape) -> int:
    """Return the local steps of each peer in a round."""
    replicas = sum(one.answer.peers) / len(one.answer.peers)
    return max(1, round(one.shape.round_tokens / one.shape.inner_batch_tokens / replicas))


def duration(days: float) -> str:
    """Return a duration with a fitting unit, such as "3.5 hours"."""
    if isinf(days):
        return "never"
    for unit, per_day in (("minutes", MINUTES), ("hours", HOURS)):
        if days * per_day < 2 * (MINUTES / HOURS if unit == "minutes" else HOURS):
            return f"{days * per_day:,.3g} {unit}"
    return f"{days:,.3g} days"
