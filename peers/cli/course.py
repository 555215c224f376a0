"""Owner's commands that change the course of a run: `order rate` and `order end`."""

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
    from swarmnet.run.owner_orders import OwnerOrders

MAX_FACTOR_DIGITS = 20
"""Maximum digits of a factor in thousandths: an order has 64 bits."""
AGAIN_SECONDS = 2.0
"""Seconds between two reads of the directory."""
FromRound = Annotated[
    int | None,
    typer.Option(min=0, max=2**31, help="First round. [default: some minutes ahead; it is printed]"),
]


def rate(
    run: Run,
    factor: Annotated[
        str, typer.Argument(help="Factor on the run's learning rate: 0.5 halves it, 1 restores it.")
    ],
    from_round: FromRound = None,
    reason: Reason = "",
    key: Key = None,
    bootstrap: Bootstraps = None,
) -> None:
    """Multiply the run's learning rate by FACTOR from a round on, for all peers."""
    from swarmnet.run import owner_orders

    thousandths = _thousandths(factor)

    async def planned(found: Reached) -> Callable[[OwnerOrders], OwnerOrders]:
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
    """End a run before a round of the first stage: all peers settle and save what is open, and stop."""
    from peers.cli.model import warn
    from swarmnet.run import owner_orders

    async def planned(found: Reached) -> Callable[[OwnerOrders], OwnerOrders]:
        at = await _from(found, from_round)
        if at.round < 1:
            raise UserError("a run has at least one round: write --from-round 1 or more")
        typer.echo(f"last   round {at.round - 1}: {at.why}")
        if not await is_archived(found):
            warn(_not_archived(found.signed.run_id, bootstrap))
        return lambda held: owner_orders.end(held, at.round - 1, reason)

    order_as_planned(run, key, bootstrap, planned)


def _not_archived(run: str, bootstraps: Sequence[str] | None) -> str:
    """Return a warning for the owner of a run that no archivist saves."""
    addresses = bootstraps or ["ADDRESS"]
    keep = f"`swarmnet run configs/archivist.yaml --set run={run} --set 'bootstrap=[{','.join(addresses)}]'`"
    through = " --bootstrap ".join(addresses)
    return (
        f"no archivist saves this run, and its peers stop a minute after its end. Start one first: {keep}, "
        f"or export the model while peers of every stage are here: `swarmnet export --hf FOLDER --run {run} "
        f"--bootstrap {through}`"
    )


async def is_archived(found: Reached) -> bool:
    """Return whether an archivist of the run is in the directory. Raises WireError."""
    from peers.network.discovery.record_reader import look
    from peers.state.archivists import ROLE

    records = await look(found.directory, found.signed.run_id, 0)
    return any(signed.record.role == ROLE for signed in records.values())


async def _from(found: Reached, wanted: int | None) -> Chosen:
    """Return the first round for an order. Waits until peers have reported their speed, so that the round is
    in the future."""
    from peers.network.discovery.record_reader import look
    from peers.tools.owner.round_ahead import SPEED_SECONDS, chosen, seen

    manifest, clock = found.signed.manifest, asyncio.get_running_loop().time
    until, has_notified = clock() + SPEED_SECONDS, False
    while True:
        records = await look(found.directory, found.signed.run_id, len(manifest.stages))
        now = seen(manifest, [signed.record for signed in records.values()])
        if now is None or now.rounds_per_second > 0 or clock() >= until:
            return chosen(manifest, now, wanted)
        if not has_notified:
            has_notified = True
            typer.echo(
                f"the peers have not reported their speed yet: waiting up to {SPEED_SECONDS:g} s",
                err=True,
            )
        await asyncio.sleep(AGAIN_SECONDS)


def _thousandths(text: str) -> int:
    """Return a factor in thousandths. Raises UserError if it is no such number. Its limit is checked with the
    order."""
    try:
        value = Decimal(text) * 1000
        if value.adjusted() > MAX_FACTOR_DIGITS:
            raise OverflowError  # Its integer would have as many digits as its exponent.
        whole = int(value)
        exact = value == whole
    except (ArithmeticError, ValueError):
        raise UserError(f"{text[:40]!r} is no factor: write a number such as 0.5") from None
    if not exact:
        raise UserError(f"{text} has more than three decimals: write at most three, such as 0.333")
    return whole
