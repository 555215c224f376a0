"""Commands for moderators of a run: several sign the same bans, then anyone sends these to all peers."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from peers.cli.connecting import notify, with_run
from peers.config.errors import UserError, as_user_errors
from peers.config.run_file import SignedManifest
from peers.network.discovery.visitor_session import RunConnection
from peers.telemetry.console import counted, shown
from peers.tools.owner.give_order import Change, OrderState, changed, newest, send
from protocols.errors import WireError
from protocols.signed import moderation
from protocols.signed.identity import Identity
from protocols.signed.moderation import Moderation, joint_id, moderation_bytes, moderation_text
from protocols.signed.stored_orders import open_order_of
from swarmnet.run import owner_orders
from swarmnet.run.schema import Moderators


def begin(run: str, identity: Identity, bootstraps: Sequence[str] | None, change: Change) -> None:
    """Sign a change of the moderators' bans, and print the line that other moderators sign."""

    async def signed(connection: RunConnection) -> Moderation:
        known = await _newest(connection)
        moderators = _moderators_of(connection.signed)
        orders = changed(known.newest, change, connection.directory.now())
        return moderation.begin_moderation(identity, connection.signed.run_id, moderators, orders)

    _print_line(run, with_run(run, bootstraps, signed))


def add_signature(run: str, line: str, identity: Identity, bootstraps: Sequence[str] | None) -> None:
    """Show what a line changes, add a moderator's signature, and print the new line."""

    async def signed(connection: RunConnection) -> Moderation:
        known = await _newest(connection)
        opened = _open(connection.signed, line)
        _check_newer(opened, known)
        return moderation.add_signature(identity, connection.signed.run_id, opened)

    _print_line(run, with_run(run, bootstraps, signed))


def publish(run: str, line: str, bootstraps: Sequence[str] | None) -> None:
    """Store what enough moderators have signed in the directory, and send it to live peers."""

    async def sent(connection: RunConnection) -> None:
        known, signed = await _newest(connection), connection.signed
        _check_newer(_open(signed, line), known)
        order = open_order_of(signed.manifest, signed.run_id, moderation_bytes(line))
        given = await send(connection, order, known.public)
        typer.echo(
            f"sent   to {given.told} peers; the directory {'keeps' if given.stored else 'does not keep'} it"
        )
        if not given.told and not given.stored:
            raise UserError("no peer has it yet: repeat the command when peers are online")

    with_run(run, bootstraps, sent)


async def _newest(connection: RunConnection) -> OrderState:
    """Return the moderators' newest bans."""
    author = joint_id(_moderators_of(connection.signed))
    return await newest(connection, None, notify, author)


def _moderators_of(signed: SignedManifest) -> Moderators:
    """Return the moderators of a run. Raises UserError if it has none."""
    moderators = signed.manifest.moderators
    if not moderators.keys:
        raise UserError(
            "the run has no moderators (key `moderators` of its run file): only its owner can ban"
        )
    return moderators


def _open(signed: SignedManifest, line: str) -> Moderation:
    """Return the signed bans in a line. Raises UserError if they are not for this run or its moderators."""
    with as_user_errors(WireError):
        return moderation.open_moderation(moderation_bytes(line), signed.run_id, signed.manifest.moderators)


def _check_newer(opened: Moderation, known: OrderState) -> None:
    """Show what the line changes. Raises UserError if the moderators have changed their bans since."""
    if opened.order.sequence <= known.newest.sequence:
        raise UserError(
            "the moderators' bans have changed since this line was signed, or it was sent already: "
            "sign again with `swarmnet order ban RUN PEER --sign-only`"
        )
    for text in owner_orders.describe_changes(known.newest, opened.order):
        typer.echo(shown(f"order  {text}", sys.stderr), err=True)


def _print_line(run: str, signed: Moderation) -> None:
    """Print the line, and to standard error what to do with it."""
    if signed.missing:
        typer.echo(
            f"signed {counted(signed.missing, 'signature')} missing; another moderator: "
            f"swarmnet order sign {run} LINE --key FILE",
            err=True,
        )
    else:
        typer.echo(f"signed by enough; anyone: swarmnet order publish {run} LINE", err=True)
    typer.echo(moderation_text(signed))
