"""Commands by which a run's owner changes its course: `order rate` (learning rate), `order mixture` (weights
of the sources), `order rollback`, `order return` and `order end`.

An order is a signed message that all peers of the run obey. Most apply from a round that is far enough ahead
for all peers to receive the order in time. The directory is the DHT with the signed records of all peers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated

import typer

from peers.cli.owner.commands import Bootstraps, Key, Peer, Reason, Run, give_planned_order, parse_peer_id
from peers.config.errors import UserError
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import OwnerOrders

if TYPE_CHECKING:
    from peers.network.discovery.visitor_session import RunConnection
    from peers.tools.owner.round_ahead import Chosen
    from swarmnet.run.schema import Data

MAX_FACTOR_DIGITS = 20
"""Maximum digits of a factor in thousandths: an order has 64 bits."""
REREAD_SECONDS = 2.0
"""Seconds between two reads of the directory."""
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask after the cost was shown.")]
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
    thousandths = _thousandths(factor)

    async def prepare_rate(connection: RunConnection) -> Callable[[OwnerOrders], OwnerOrders]:
        first = await _choose_round(connection, from_round)
        typer.echo(f"from   round {first.round}: {first.why}")  # `why` says how the round was chosen.
        return lambda orders: owner_orders.rate(orders, thousandths, first.round, reason)

    give_planned_order(run, key, bootstrap, prepare_rate)


def mixture(
    run: Run,
    weights: Annotated[
        list[str], typer.Argument(metavar="SOURCE=WEIGHT...", help="All sources; 0: read no more.")
    ],
    from_round: FromRound = None,
    reason: Reason = "",
    key: Key = None,
    bootstrap: Bootstraps = None,
) -> None:
    """Change the weights of the run's sources from a round on, for all peers."""
    pairs = [text.rpartition("=") for text in weights]
    ordered = tuple((name, _thousandths(weight)) for name, _, weight in pairs)

    async def prepare_mixture(connection: RunConnection) -> Callable[[OwnerOrders], OwnerOrders]:
        _require_sources(connection.signed.manifest.data, ordered)
        first = await _choose_round(connection, from_round)
        typer.echo(f"from   round {first.round}: {first.why}")
        return lambda orders: owner_orders.mixture(orders, ordered, first.round, reason)

    give_planned_order(run, key, bootstrap, prepare_mixture)


def _require_sources(data: Data, weights: Sequence[tuple[str, int]]) -> None:
    """Raise UserError unless the run has weights, and these are for all of its sources."""
    names = [source.name for source in data.sources]
    if data.sampling != "epoch" or not any(source.weight for source in data.sources):
        raise UserError(
            "the run was published without weights of its sources, so that they cannot change: they need "
            "data.sampling: epoch, and a weight of each source"
        )
    if sorted(names) != sorted(name for name, _ in weights):
        shown = " ".join(f"{name}=WEIGHT" for name in names)
        raise UserError(f"give the weight of each source once: {shown}")


def rollback(
    run: Run,
    peer: Peer,
    yes: Yes = False,
    reason: Reason = "",
    key: Key = None,
    bootstrap: Bootstraps = None,
) -> None:
    """Ban a peer and take its contributions out of all rounds that have not settled; shows the cost first."""
    from peers.network.discovery.record_reader import look
    from peers.tools.owner.rollback_cost import describe_cost

    faulty = parse_peer_id(peer)

    async def prepare_rollback(connection: RunConnection) -> Callable[[OwnerOrders], OwnerOrders]:
        """Show what it costs and ask, unless `yes`. Returns the change of the orders."""
        manifest = connection.signed.manifest
        records = await look(connection.directory, connection.signed.run_id, len(manifest.stages))
        cost = describe_cost(manifest, [signed.record for signed in records.values()], faulty)
        await _confirm([cost], yes)
        return lambda orders: owner_orders.roll_back(orders, faulty, reason)

    give_planned_order(run, key, bootstrap, prepare_rollback)


def return_to(
    run: Run,
    round: Annotated[int, typer.Argument(metavar="ROUND", min=0, max=2**31, help="Last round to keep.")],
    archive: Annotated[str, typer.Option(help="Folder or URL of an archive with older snapshots.")] = "",
    yes: Yes = False,
    reason: Reason = "",
    key: Key = None,
    bootstrap: Bootstraps = None,
) -> None:
    """Let all stages return to their newest snapshots up to ROUND; shows the cost first."""
    from peers.network.discovery.record_reader import look
    from peers.tools.owner.return_points import find_points
    from peers.tools.owner.rollback_cost import describe_return_cost

    async def prepare_return(connection: RunConnection) -> Callable[[OwnerOrders], OwnerOrders]:
        """Find the snapshots, show what a return costs, and ask, unless `yes`."""
        manifest = connection.signed.manifest
        if manifest.data.private:
            raise UserError(
                "a private run cannot return: its privacy budget counts each round once. End it, and publish "
                "a run that starts from an export"
            )
        points = await find_points(connection, round, archive)
        records = await look(connection.directory, connection.signed.run_id, len(manifest.stages))
        await _confirm(describe_return_cost([each.record for each in records.values()], points), yes)
        roots = tuple((kept, digest.hex()) for kept, digest in (point.root for point in points))
        return lambda orders: owner_orders.return_to(orders, roots, reason)

    give_planned_order(run, key, bootstrap, prepare_return)


async def _confirm(cost: Sequence[str], yes: bool) -> None:
    """Show the cost and ask, unless `yes`. Raises UserError without a terminal, and typer.Abort for a no."""
    for line in cost:
        typer.echo(f"cost   {line}")
    if not yes and not sys.stdin.isatty():
        raise UserError("nothing was ordered: this is no terminal, so nobody can confirm; add --yes")
    if not yes and not await asyncio.to_thread(typer.confirm, "Order it?"):
        raise typer.Abort


def end(
    run: Run,
    from_round: FromRound = None,
    reason: Reason = "",
    key: Key = None,
    bootstrap: Bootstraps = None,
) -> None:
    """End a run before a round of the first stage: all peers settle and save what is open, and stop."""
    from peers.cli.run import warn

    async def prepare_end(connection: RunConnection) -> Callable[[OwnerOrders], OwnerOrders]:
        """Choose the last round, warn if no archivist saves the run, and return the change of the orders."""
        end_before = await _choose_round(connection, from_round)
        if end_before.round < 1:
            raise UserError("a run has at least one round: write --from-round 1 or more")
        typer.echo(f"last   round {end_before.round - 1}: {end_before.why}")
        if not await is_archived(connection):
            warn(_no_archivist_warning(connection.signed.run_id, bootstrap))
        return lambda orders: owner_orders.end(orders, end_before.round - 1, reason)

    give_planned_order(run, key, bootstrap, prepare_end)


def _no_archivist_warning(run: str, bootstraps: Sequence[str] | None) -> str:
    """Return the warning that no archivist (a peer that saves checkpoints) saves the run. It contains the
    commands that start one or export the model."""
    addresses = bootstraps or ["ADDRESS"]
    start = f"`swarmnet run configs/archivist.yaml --set run={run} --set 'bootstrap=[{','.join(addresses)}]'`"
    through = " --bootstrap ".join(addresses)
    return (
        f"no archivist saves this run, and its peers stop a minute after its end. Start one first: {start}, "
        f"or export the model while peers of every stage are here: `swarmnet export --hf FOLDER --run {run} "
        f"--bootstrap {through}`"
    )


async def is_archived(found: RunConnection) -> bool:
    """Return whether the directory lists an archivist (a peer that saves checkpoints). Raises WireError."""
    from peers.network.discovery.record_reader import look
    from peers.state.archivists import ROLE

    records = await look(found.directory, found.signed.run_id, 0)
    return any(signed.record.role == ROLE for signed in records.values())


async def _choose_round(connection: RunConnection, wanted: int | None) -> Chosen:
    """Return the first round for an order, with the reason in words: `wanted`, or one some minutes ahead. The
    latter depends on the speed of the peers, so wait up to SPEED_SECONDS until they report it. Raises
    UserError for a past round."""
    from peers.network.discovery.record_reader import look
    from peers.tools.owner.round_ahead import SPEED_SECONDS, chosen, seen

    manifest, clock = connection.signed.manifest, asyncio.get_running_loop().time
    deadline, has_notified = clock() + SPEED_SECONDS, False
    while True:
        records = await look(connection.directory, connection.signed.run_id, len(manifest.stages))
        progress = seen(manifest, [signed.record for signed in records.values()])
        # `progress` is None if no peer trains; waiting is then useless.
        if progress is None or progress.rounds_per_second > 0 or clock() >= deadline:
            return chosen(manifest, progress, wanted)
        if not has_notified:
            has_notified = True
            typer.echo(
                f"the peers have not reported their speed yet: waiting up to {SPEED_SECONDS:g} s",
                err=True,
            )
        await asyncio.sleep(REREAD_SECONDS)


def _thousandths(text: str) -> int:
    """Return a decimal factor as a whole number of thousandths: `0.5` is 500. Raises UserError if it is no
    number or has more than three decimals."""
    try:
        value = Decimal(text) * 1000
        if value.adjusted() > MAX_FACTOR_DIGITS:
            raise OverflowError  # The integer of 1e999999 would have a million digits.
        thousandths = int(value)
        is_exact = value == thousandths
    except (ArithmeticError, ValueError):
        raise UserError(f"{text[:40]!r} is no factor: write a number such as 0.5") from None
    if not is_exact:
        raise UserError(f"{text} has more than three decimals: write at most three, such as 0.333")
    return thousandths
