"""Commands for the owner of a run (order, invite, report), and the one that shows the orders.

The owner has the key that signed the run. An order is a signed message that all peers of the run obey; it
contains all earlier orders that are in force. The directory is the DHT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.config.errors import UserError, as_user_errors
from peers.config.peer_file import default_state, run_id_of
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import OwnerOrders

if TYPE_CHECKING:
    from peers.network.discovery.visitor_session import RunConnection
    from peers.tools.owner.run_facts import RunFacts
    from protocols.signed.identity import Identity
    from swarmnet.identifiers import PeerId

Run = Annotated[str, typer.Argument(metavar="RUN", help="Run id or published run file.")]
Bootstraps = Annotated[
    list[str] | None,
    typer.Option("--bootstrap", help="Multiaddr of a peer to find the run through. Repeatable."),
]
Key = Annotated[
    Path | None, typer.Option(help="The owner's identity file. [default: owner.key in the state home]")
]
Reason = Annotated[str, typer.Option(help="Reason, in one line, which all peers of the run can read.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def pause(run: Run, reason: Reason = "", key: Key = None, bootstrap: Bootstraps = None) -> None:
    """Pause the run: peers finish current work and start nothing new until `resume`."""
    _give_order(run, key, bootstrap, lambda orders: owner_orders.pause(orders, reason))


def resume(run: Run, reason: Reason = "", key: Key = None, bootstrap: Bootstraps = None) -> None:
    """Resume a paused run."""
    _give_order(run, key, bootstrap, lambda orders: owner_orders.resume(orders, reason))


def checkpoint(run: Run, reason: Reason = "", key: Key = None, bootstrap: Bootstraps = None) -> None:
    """Let all peers write their newest settled weights to disk."""
    _give_order(run, key, bootstrap, lambda orders: owner_orders.checkpoint(orders, reason))


Peer = Annotated[str, typer.Argument(metavar="PEER", help="Peer id, 12D3Koo...")]


SignOnly = Annotated[
    bool,
    typer.Option("--sign-only", help="Sign as a moderator, with --key, and print a line for others to sign."),
]


def ban(
    run: Run,
    peer: Peer,
    reason: Reason = "",
    key: Key = None,
    bootstrap: Bootstraps = None,
    sign_only: SignOnly = False,
) -> None:
    """Ban a peer: all peers close their links to it."""
    banned = parse_peer_id(peer)
    give = _sign_moderation if sign_only else _give_order
    give(run, key, bootstrap, lambda orders: owner_orders.ban(orders, banned, reason))


def unban(
    run: Run,
    peer: Peer,
    reason: Reason = "",
    key: Key = None,
    bootstrap: Bootstraps = None,
    sign_only: SignOnly = False,
) -> None:
    """Lift the ban of a peer."""
    banned = parse_peer_id(peer)
    give = _sign_moderation if sign_only else _give_order
    give(run, key, bootstrap, lambda orders: owner_orders.unban(orders, banned, reason))


Line = Annotated[str, typer.Argument(metavar="LINE", help="The line that `order ban --sign-only` printed.")]


def sign(run: Run, line: Line, key: Key = None, bootstrap: Bootstraps = None) -> None:
    """Add a moderator's signature to a ban, or to its withdrawal."""
    from peers.cli.owner.moderating import add_signature

    add_signature(run, line, load_owner_key(key)[1], bootstrap)


def publish_moderation(run: Run, line: Line, bootstrap: Bootstraps = None) -> None:
    """Send what enough moderators have signed to all peers. Anyone can do it."""
    from peers.cli.owner.moderating import publish

    publish(run, line, bootstrap)


def dismiss(run: Run, reason: Reason = "", key: Key = None, bootstrap: Bootstraps = None) -> None:
    """Dismiss the moderators: their bans do not count until `reinstate`."""
    _give_order(run, key, bootstrap, lambda orders: owner_orders.dismiss(orders, reason))


def reinstate(run: Run, reason: Reason = "", key: Key = None, bootstrap: Bootstraps = None) -> None:
    """Let bans by moderators count again."""
    _give_order(run, key, bootstrap, lambda orders: owner_orders.reinstate(orders, reason))


def withdraw(
    run: Run,
    document: Annotated[
        str, typer.Argument(metavar="SHA256", help="SHA-256 of the document, as sha256sum prints it.")
    ],
    reason: Reason = "",
    key: Key = None,
    bootstrap: Bootstraps = None,
) -> None:
    """Exclude a document from the training text from now on."""

    async def prepare_change(connection: RunConnection) -> Callable[[OwnerOrders], OwnerOrders]:
        """Return the change. Raises UserError in a private run, whose text no order names."""
        if connection.signed.manifest.data.private:
            raise UserError(
                "the run's text is private: no order may name a document by its hash; its owner removes it "
                "from the text and starts `swarmnet join` again"
            )
        return lambda orders: owner_orders.withdraw(orders, document.lower(), reason)

    give_planned_order(run, key, bootstrap, prepare_change)


def revoke(
    run: Run,
    invite: Annotated[str, typer.Argument(metavar="INVITE", help="The id that `invite` printed.")],
    reason: Reason = "",
    key: Key = None,
    bootstrap: Bootstraps = None,
) -> None:
    """Revoke an invite, and disconnect peers that joined with it."""
    _give_order(run, key, bootstrap, lambda orders: owner_orders.revoke(orders, invite.lower(), reason))


def echo(text: str) -> None:
    """Print text that may contain words of untrusted people; `shown` replaces control characters."""
    from peers.telemetry.console import shown

    typer.echo(shown(text, sys.stdout))


def load_owner_key(key: Path | None) -> tuple[Path, Identity]:
    """Return the path of the owner's key file and the key. Raises UserError if it cannot be read."""
    from protocols.signed.identity import IdentityError, load

    path = key or state_home() / "owner.key"
    with as_user_errors(IdentityError):
        return path, load(path)


def _sign_moderation(
    run: str, key: Path | None, bootstrap: list[str] | None, change: Callable[[OwnerOrders], OwnerOrders]
) -> None:
    """Sign a change of the moderators' bans with one key, and print it. Raises UserError."""
    from peers.cli.owner.moderating import begin

    begin(run, load_owner_key(key)[1], bootstrap, change)


def _give_order(
    run: str, key: Path | None, bootstrap: list[str] | None, change: Callable[[OwnerOrders], OwnerOrders]
) -> None:
    """Sign and send an order. `change` returns the new orders from those in force. Raises UserError."""

    async def prepare_change(_connection: RunConnection) -> Callable[[OwnerOrders], OwnerOrders]:
        return change  # This order does not depend on the run's progress.

    give_planned_order(run, key, bootstrap, prepare_change)


def give_planned_order(
    run: str,
    key: Path | None,
    bootstrap: list[str] | None,
    planned: Callable[[RunConnection], Awaitable[Callable[[OwnerOrders], OwnerOrders]]],
) -> None:
    """Sign and send an order that may depend on the progress of the run. `planned` receives the connection to
    the run and returns a function from the orders in force to the new ones. Raises UserError."""
    from peers.cli.connecting import notify, with_run
    from peers.tools.owner.give_order import check_owner, give, newest

    path, identity = load_owner_key(key)

    async def send_order(connection: RunConnection) -> None:
        """Send the order, print what it changes, and raise UserError if nothing has stored it."""
        check_owner(connection.signed, identity, path)
        saved_orders = state_home() / "orders" / f"{connection.signed.run_id[:16]}.bin"
        change = await planned(connection)
        # The newest orders of the directory and of this machine, which saves all that it has given.
        in_force = await newest(connection, saved_orders, notify)
        given = await give(connection, identity, in_force, change)
        for line in owner_orders.describe_changes(given.before, given.order.order):
            echo(f"order  {line}")
        verb = "keeps" if given.stored else "does not keep"
        typer.echo(f"sent   to {given.told} peers; the directory {verb} it")
        if not given.told and not given.stored:
            raise UserError(
                "no peer has it yet: repeat the command when peers are online (the order is saved)"
            )

    with_run(run, bootstrap, send_order)


def show_orders(run: Run, bootstrap: Bootstraps = None, as_json: AsJson = False) -> None:
    """Show the current orders of a run's owner: pause, bans, withdrawn documents, revoked invites."""
    from dataclasses import asdict

    from peers.cli.connecting import notify, with_run
    from peers.tools.owner.give_order import newest

    async def fetch_orders(connection: RunConnection) -> OwnerOrders:
        known = await newest(connection, kept=None, notify=notify)
        return known.directory.order

    order = with_run(run, bootstrap, fetch_orders)
    echo(json.dumps(asdict(order), indent=2, ensure_ascii=False) if as_json else _describe_order(order))


def _describe_order(order: OwnerOrders) -> str:
    """Return the orders in force as lines for people: pause, bans, withdrawn documents, revoked invites,
    changes of the learning rate, and the last round."""
    from swarmnet.run.rates import in_words

    if not order.sequence:
        return "the run's owner has given no order"
    # An order's sequence is the time of its signature in microseconds.
    given = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(order.sequence / 1e6))
    lines = [f"newest order of {given}: {order.reason or 'no reason given'}"]
    lines.append("the run is paused" if order.paused else "the run is not paused")
    lines += [f"banned     {ban.peer}  by the {ban.by}: {ban.reason}" for ban in order.bans]
    lines += ["the moderators are dismissed: their bans do not count"] * order.dismissed
    lines += [f"withdrawn  {entry.document}  {entry.reason}" for entry in order.withdrawn]
    lines += [f"revoked    {invite}" for invite in order.revoked]
    lines += [f"rate       {in_words(rate.factor)} from round {rate.from_round} on" for rate in order.rates]
    lines += [
        f"mixture    {' '.join(f'{name}={in_words(weight)}' for name, weight in change.weights)} from round "
        f"{change.from_round} on"
        for change in order.mixtures
    ]
    if order.returned is not None:
        lines.append(f"returned   {order.returned.describe()}")
    if order.ends is not None:
        lines.append(f"ends       at round {order.ends}")
    return "\n".join(lines)


def invite(
    run: Annotated[Path, typer.Argument(metavar="RUN.json", help="The published run file.")],
    peer: Annotated[str, typer.Option(help="Peer id of the invited peer, 12D3Koo...")] = "",
    anyone: Annotated[bool, typer.Option("--anyone", help="Admit any peer that has the invite.")] = False,
    days: Annotated[float, typer.Option(min=0.01, max=3650, help="Days until it expires.")] = 30.0,
    key: Key = None,
) -> None:
    """Sign an invite to a run. The invited peer starts with `swarmnet join RUN --invite @FILE`."""
    from peers.config.run_file import load_signed
    from peers.tools.owner.give_order import check_owner
    from protocols.signed.invites import invite_text, open_invite, prove_invite, seal_invite

    if bool(peer) == anyone:
        raise UserError("name the invited peer with --peer 12D3Koo..., or add --anyone")
    signed = load_signed(run)
    path, identity = load_owner_key(key)
    check_owner(signed, identity, path)
    invited = parse_peer_id(peer) if peer else None
    now = time.time()
    data = seal_invite(identity, signed.run_id, invited, now + 86400 * days, now)
    if signed.manifest.access == "open":
        typer.echo(f"note   {signed.manifest.name} is open to all: no peer needs an invite", err=True)
    # Open the new invite as a peer would, to learn the id by which `order revoke` names it.
    proof = prove_invite(data, signed.run_id, identity.peer_id)
    opened = open_invite(proof, signed.run_id, identity.peer_id, identity.peer_id)
    typer.echo(f"id     {opened.id}", err=True)
    typer.echo(invite_text(data))


def report(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|ARCHIVE",
            help="Published run file, folder or URL of an archive, or, with --bootstrap, a run id.",
        ),
    ],
    bootstrap: Bootstraps = None,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="File to write.")] = None,
) -> None:
    """Write the public summary of training content for the EU AI Act: sources, compute, contributors."""
    from peers.config.atomic_files import is_file, write_atomically
    from peers.config.run_file import load_signed
    from peers.state.archive import Archive
    from peers.state.archive_store import open_store
    from peers.tools.owner.run_facts import from_archive, from_manifest
    from peers.tools.owner.training_report import as_json as to_json
    from peers.tools.owner.training_report import as_markdown

    if run_id_of(run) or (bootstrap and is_file(Path(run))):
        facts = _live_run_facts(run, bootstrap or [])
    elif bootstrap:
        raise UserError(
            f"{run}: neither a run id nor a published run file, and --bootstrap is for the report of a live "
            "run; an archive's report needs none"
        )
    elif is_file(Path(run)):
        facts = from_manifest(load_signed(Path(run)), owner_orders.NO_ORDER, time.time())
    else:
        archive = Archive(open_store(run))
        facts = from_archive(archive, archive.open(), time.time())
    text = to_json(facts) if as_json else as_markdown(facts)
    if out is None:
        echo(text.rstrip("\n"))
    else:
        write_atomically(out, text.encode())
        typer.echo(f"wrote  {out}", err=True)


def _live_run_facts(run: str, bootstraps: list[str]) -> RunFacts:
    """Return what the report needs to know of a run, from the directory and live peers. Raises UserError if
    peers of a stage or the orders are missing."""
    from peers.cli.connecting import with_run
    from peers.tools.owner.run_facts import from_directory
    from protocols.errors import WireError

    async def fetch_facts(connection: RunConnection) -> RunFacts:
        try:
            return await from_directory(connection.signed, connection.directory)
        except WireError as error:
            raise UserError(
                f"{error}; a report needs every stage and the orders: repeat the command"
            ) from None

    return with_run(run, bootstraps, fetch_facts)


def state_home() -> Path:
    """Return the folder in which all peers of this user have their state folders."""
    return default_state(os.environ, sys.platform)


def parse_peer_id(text: str) -> PeerId:
    """Return the text as a peer id. Raises UserError if it is none."""
    from protocols.signed.identity import public_key_bytes
    from swarmnet.identifiers import PeerId

    try:
        public_key_bytes(PeerId(text))
    except ValueError:
        raise UserError(f"{text!r} is no peer id (12D3Koo...); `swarmnet top` shows them") from None
    return PeerId(text)
