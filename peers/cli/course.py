"""Commands of a run's creator about its course: `order rate` and `order end`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated

import typer

from peers.cli.owner import Bootstraps, Key, Reason, Run, order_as_planned
from peers.errors import UserError

if TYPE_CHECKING:
    from peers.network.discovery.visitor_session import Reached
    from peers.tools.owner.round_ahead import Chosen
    from swarmnet.run.owner_orders import Order

MAX_FACTOR_DIGITS = 20
"""Of thousandths: an order carries 64 bits."""
AGAIN_SECONDS = 2.0
"""Between two looks into the directory."""
FromRound = Annotated[
    int | None,
    typer.Option(min=0, max=2**31, help="The first round. [default: some minutes ahead, as it says]"),
]


def rate(
    run: Run,
    factor: Annotated[
        str, typer.Argument(help="Of the run's learning rate: 0.5 is half of it, 1 all of it.")
    ],
    from_round: FromRound = None,
    reason: Reason = "",
    key: Key = None,
    bootstrap: Bootstraps = None,
) -> None:
    """The learning rate is FACTOR times the run's from a round on, for all peers alike."""
    from swarmnet.run import owner_orders

    thousandths = _thousandths(factor)

    async def planned(found: Reached) -> Callable[[Order], Order]:
        at = await _from(found, from_round)
        typer.echo(f"from   round {at.round}: {at.why}")
        return lambda held: owner_orders.rate(held, thousandths, at.round, reason)

    order_as_planned(run, key, bootstrap, planned)


def end(
    run: Run,
    from_round: FromRound = None,
    reason: Reason = "",
    key: Key = None,
    bootstrap: Bootstraps = None,
) -> None:
    """No round of the first stage from this one on is made: all settle what is open, save it, and stop."""
    from peers.cli.model import warn
    from swarmnet.run import owner_orders

    async def planned(found: Reached) -> Callable[[Order], Order]:
        at = await _from(found, from_round)
        if at.round < 1:
            raise UserError("a run has at least one round: name a later one with --from-round")
        typer.echo(f"last   round {at.round - 1}: {at.why}")
        if not await is_archived(found):
            warn(_not_archived(found.signed.run_id, bootstrap))
        return lambda held: owner_orders.end(held, at.round - 1, reason)

    order_as_planned(run, key, bootstrap, planned)


def _not_archived(run: str, bootstraps: Sequence[str] | None) -> str:
    """What the owner of a run should know before it ends, as nobody keeps its checkpoints."""
    addresses = bootstraps or ["ADDRESS"]
    keep = f"`swarmnet run configs/archivist.yaml --set run={run} --set 'bootstrap=[{','.join(addresses)}]'`"
    through = " --bootstrap ".join(addresses)
    return (
        f"no archivist keeps this run, and its peers stop a minute after its end. Start one before: {keep}, "
        f"or export the model while peers of every stage are here: `swarmnet export --hf FOLDER --run {run} "
        f"--bootstrap {through}`"
    )


async def is_archived(found: Reached) -> bool:
    """Whether an archivist of the run is in the directory. Raises WireError."""
    from peers.network.discovery.record_reader import look
    from peers.state.archivists import ROLE

    records = await look(found.directory, found.signed.run_id, 0)
    return any(signed.record.role == ROLE for signed in records.values())


async def _from(found: Reached, wanted: int | None) -> Chosen:
    from peers.network.discovery.record_reader import look
    from peers.tools.owner.round_ahead import SPEED_SECONDS, chosen, seen

    manifest, clock = found.signed.manifest, asyncio.get_running_loop().time
    until, told = clock() + SPEED_SECONDS, False
    while True:
        records = await look(found.directory, found.signed.run_id, len(manifest.stages))
        now = seen(manifest, [signed.record for signed in records.values()])
        if now is None or now.rounds_per_second > 0 or clock() >= until:
            return chosen(manifest, now, wanted)
        if not told:
            told = True
            typer.echo(
                f"the peers have not told how fast they are: waits for it, {SPEED_SECONDS:g} s at most",
                err=True,
            )
        await asyncio.sleep(AGAIN_SECONDS)


def _thousandths(text: str) -> int:
    """Raises UserError for what is no factor; whether it is too large is the order's matter."""
    try:
        value = Decimal(text) * 1000
        if value.adjusted() > MAX_FACTOR_DIGITS:
            raise OverflowError  # Its integer would have as many digits as the exponent says.
        whole = int(value)
        exact = value == whole
    except (ArithmeticError, ValueError):
        raise UserError(f"{text[:40]!r} is no factor: write a number, as 0.5") from None
    if not exact:
        raise UserError(f"{text} has more than three decimals: peers count in thousandths, as 0.333")
    return whole
