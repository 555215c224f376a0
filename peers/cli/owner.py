"""Owner's commands: order, orders, invite, registry, report."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.config.peer_file import default_state, run_id_of
from peers.errors import UserError, as_user_errors

if TYPE_CHECKING:
    from peers.config.run_file import SignedManifest
    from peers.network.discovery.visitor_session import Reached
    from peers.tools.owner.run_facts import RunFacts
    from protocols.signed.identity import Identity
    from swarmnet.identifiers import PeerId
    from swarmnet.run.owner_orders import OwnerOrders

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
    from swarmnet.run import owner_orders

    _order(run, key, bootstrap, lambda held: owner_orders.pause(held, reason))


def resume(run: Run, reason: Reason = "", key: Key = None, bootstrap: Bootstraps = None) -> None:
    """Resume a paused run."""
    from swarmnet.run import owner_orders

    _order(run, key, bootstrap, lambda held: owner_orders.resume(held, reason))


def checkpoint(run: Run, reason: Reason = "", key: Key = None, bootstrap: Bootstraps = None) -> None:
    """Let all peers write their newest settled weights to disk."""
    from swarmnet.run import owner_orders

    _order(run, key, bootstrap, lambda held: owner_orders.checkpoint(held, reason))


Peer = Annotated[str, typer.Argument(metavar="PEER", help="Peer id, 12D3Koo...")]


def ban(run: Run, peer: Peer, reason: Reason = "", key: Key = None, bootstrap: Bootstraps = None) -> None:
    """Ban a peer: all peers close their links to it."""
    from swarmnet.run import owner_orders

    banned = _peer(peer)
    _order(run, key, bootstrap, lambda held: owner_orders.ban(held, banned, reason))


def unban(run: Run, peer: Peer, reason: Reason = "", key: Key = None, bootstrap: Bootstraps = None) -> None:
    """Lift the ban of a peer."""
    from swarmnet.run import owner_orders

    banned = _peer(peer)
    _order(run, key, bootstrap, lambda held: owner_orders.unban(held, banned, reason))


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
    from swarmnet.run import owner_orders

    _order(run, key, bootstrap, lambda held: owner_orders.withdraw(held, document.lower(), reason))


def revoke(
    run: Run,
    invite: Annotated[str, typer.Argument(metavar="INVITE", help="The id that `invite` printed.")],
    reason: Reason = "",
    key: Key = None,
    bootstrap: Bootstraps = None,
) -> None:
    """Revoke an invite, and disconnect peers that joined with it."""
    from swarmnet.run import owner_orders

    _order(run, key, bootstrap, lambda held: owner_orders.revoke(held, invite.lower(), reason))


def _echo(text: str) -> None:
    """Print text that may contain words of a run's owner or of strangers."""
    from peers.telemetry.console import shown

    typer.echo(shown(text, sys.stdout))


def _owner(key: Path | None) -> tuple[Path, Identity]:
    """Return the owner's key file and the key. Raises UserError."""
    from protocols.signed.identity import IdentityError, load

    path = key or _states() / "owner.key"
    with as_user_errors(IdentityError):
        return path, load(path)


def _order(
    run: str, key: Path | None, bootstrap: list[str] | None, change: Callable[[OwnerOrders], OwnerOrders]
) -> None:
    """Give an order."""

    async def planned(found: Reached) -> Callable[[OwnerOrders], OwnerOrders]:
        return change

    order_as_planned(run, key, bootstrap, planned)


def order_as_planned(
    run: str, key: Path | None, bootstrap: list[str] | None,
    planned: Callable[[Reached], Awaitable[Callable[[OwnerOrders], OwnerOrders]]],
) -> None:  # fmt: skip
    """Give an order that depends on the state of the run, which `planned` receives. Raises UserError."""
    from peers.cli.connecting import NOT_REACHED, notify, ways_in
    from peers.network.discovery.visitor_session import reaching
    from peers.tools.owner.give_order import check_owner, give, newest
    from protocols.errors import WireError
    from swarmnet.run.owner_orders import describe_changes

    path, identity = _owner(key)
    bootstraps = bootstrap or []
    cache = ways_in(run, bootstraps)

    async def whole() -> None:
        async with reaching(run, bootstraps, cache, notify) as found:
            check_owner(found.signed, identity, path)
            kept = _states() / "orders" / f"{found.signed.run_id[:16]}.bin"
            change = await planned(found)
            given = await give(found, identity, await newest(found, kept, notify), change)
        for line in describe_changes(given.before, given.order.order):
            _echo(f"order  {line}")
        keeps = "keeps" if given.stored else "does not keep"
        typer.echo(f"sent   to {given.told} peers; the directory {keeps} it")
        if not given.told and not given.stored:
            raise UserError(
                "no peer has it yet: repeat the command when peers are online (the order is saved)"
            )

    with as_user_errors(*NOT_REACHED, WireError):
        asyncio.run(whole())


def show_orders(run: Run, bootstrap: Bootstraps = None, as_json: AsJson = False) -> None:
    """Show the current orders of a run's owner: pause, bans, withdrawn documents, revoked invites."""
    from dataclasses import asdict

    from peers.cli.connecting import NOT_REACHED, notify, ways_in
    from peers.network.discovery.visitor_session import reaching
    from peers.tools.owner.give_order import newest
    from protocols.errors import WireError

    bootstraps = bootstrap or []
    cache = ways_in(run, bootstraps)

    async def whole() -> OwnerOrders:
        async with reaching(run, bootstraps, cache, notify) as found:
            return (await newest(found, None, notify)).public

    with as_user_errors(*NOT_REACHED, WireError):
        order = asyncio.run(whole())
    _echo(json.dumps(asdict(order), indent=2, ensure_ascii=False) if as_json else _words(order))


def _words(order: OwnerOrders) -> str:
    """Return an order as text."""
    from swarmnet.run.rates import in_words

    if not order.sequence:
        return "the run's owner has given no order"
    given = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(order.sequence / 1e6))
    lines = [f"newest order of {given}: {order.reason or 'no reason given'}"]
    lines.append("the run is paused" if order.paused else "the run is not paused")
    lines += [f"banned     {ban.peer}  {ban.reason}" for ban in order.bans]
    lines += [f"withdrawn  {one.document}  {one.reason}" for one in order.withdrawn]
    lines += [f"revoked    {invite}" for invite in order.revoked]
    lines += [f"rate       {in_words(rate.factor)} from round {rate.from_round} on" for rate in order.rates]
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
    path, identity = _owner(key)
    check_owner(signed, identity, path)
    whom, now = (_peer(peer) if peer else None), time.time()
    data = seal_invite(identity, signed.run_id, whom, now + 86400 * days, now)
    if signed.manifest.access == "open":
        typer.echo(f"note   {signed.manifest.name} is open to all: no peer needs an invite", err=True)
    shown = prove_invite(data, signed.run_id, identity.peer_id)
    opened = open_invite(shown, signed.run_id, identity.peer_id, identity.peer_id)
    typer.echo(f"id     {opened.id}", err=True)
    typer.echo(invite_text(data))


def registry_list(
    bootstrap: Bootstraps = None,
    limit: Annotated[int, typer.Option(min=1, max=768, help="Maximum number of runs to show.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List public runs."""
    from random import Random

    from peers.cli.connecting import NOT_REACHED, check_bootstraps, notify
    from peers.network.discovery.bootstrap import PeerCache
    from peers.network.discovery.visitor_session import entering
    from peers.tools.owner.registry import runs
    from protocols.errors import WireError

    if not bootstrap:
        raise UserError("registry needs --bootstrap MULTIADDR of any peer of any run")
    check_bootstraps(bootstrap)

    async def whole() -> tuple[list[SignedManifest], int]:
        async with entering(bootstrap, PeerCache(_states() / "registry-peers.json"), notify) as (
            _,
            directory,
        ):
            return await runs(directory, limit, Random())

    with as_user_errors(*NOT_REACHED, WireError):
        found, entries = asyncio.run(whole())
    from peers.telemetry.console import counted

    if as_json:
        rows = [{"run": one.run_id, "name": one.manifest.name, "owner": one.manifest.owner,
                 "access": one.manifest.access} for one in found]  # fmt: skip
        _echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for one in found:
        manifest = one.manifest
        typer.echo(f"{one.run_id}  {_plain(manifest.name)}  stages {len(manifest.stages)}, {manifest.access}")
    typer.echo(f"{counted(len(found), 'run')}, {entries} {'entry' if entries == 1 else 'entries'}", err=True)


def registry_show(run: Run, bootstrap: Bootstraps = None) -> None:
    """Print a run's manifest as verified, readable JSON."""
    from peers.cli.connecting import NOT_REACHED, notify, ways_in
    from peers.config.run_file import published_text
    from peers.network.discovery.visitor_session import reaching

    bootstraps = bootstrap or []
    cache = ways_in(run, bootstraps)

    async def whole() -> str:
        async with reaching(run, bootstraps, cache, notify) as found:
            return published_text(found.signed)

    with as_user_errors(*NOT_REACHED):
        _echo(asyncio.run(whole()).rstrip("\n"))


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
    from swarmnet.run.owner_orders import NO_ORDER

    if run_id_of(run) or (bootstrap and is_file(Path(run))):
        facts = _of_live_run(run, bootstrap or [])
    elif bootstrap:
        raise UserError(
            f"{run}: neither a run id nor a published run file, and --bootstrap is for the report of a live "
            "run; an archive's report needs none"
        )
    elif is_file(Path(run)):
        facts = from_manifest(load_signed(Path(run)), NO_ORDER, time.time())
    else:
        archive = Archive(open_store(run))
        facts = from_archive(archive, archive.open(), time.time())
    text = to_json(facts) if as_json else as_markdown(facts)
    if out is None:
        _echo(text.rstrip("\n"))
    else:
        write_atomically(out, text.encode())
        typer.echo(f"wrote  {out}", err=True)


def _of_live_run(run: str, bootstraps: list[str]) -> RunFacts:
    """Return the facts of a run from its live peers. Raises UserError."""
    from peers.cli.connecting import NOT_REACHED, notify, ways_in
    from peers.network.discovery.visitor_session import reaching
    from peers.tools.owner.run_facts import from_directory
    from protocols.errors import WireError

    cache = ways_in(run, bootstraps)

    async def whole() -> RunFacts:
        async with reaching(run, bootstraps, cache, notify) as found:
            try:
                return await from_directory(found.signed, found.directory)
            except WireError as error:
                raise UserError(
                    f"{error}; a report needs every stage and the orders: repeat the command"
                ) from None

    with as_user_errors(*NOT_REACHED):
        return asyncio.run(whole())


def _states() -> Path:
    """Return the folder that contains the state folders."""
    return default_state(os.environ, sys.platform)


def _peer(text: str) -> PeerId:
    """Return a peer id. Raises UserError if it is invalid."""
    from protocols.signed.identity import public_key_bytes
    from swarmnet.identifiers import PeerId

    try:
        public_key_bytes(PeerId(text))
    except ValueError:
        raise UserError(f"{text!r} is no peer id (12D3Koo...); `swarmnet top` shows them") from None
    return PeerId(text)


def _plain(text: str) -> str:
    """Return untrusted text for a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)[:100]
