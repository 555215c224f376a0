"""The registry of public runs: `propose` and `registry list`, `show`, `endorse`, `object` and `objections`.

The registry is a key of the directory (the DHT). A curator is a person whose endorsements a user trusts; an
objection asks a run's owner to take a document out of the text. Both are signed opinions.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.cli.owner.commands import (
    AsJson,
    Bootstraps,
    Key,
    Reason,
    Run,
    echo,
    give_planned_order,
    load_owner_key,
    parse_peer_id,
    state_home,
)
from peers.config.errors import UserError, as_user_errors
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import REASON_LIMIT, OrderError, OwnerOrders

if TYPE_CHECKING:
    from peers.network.discovery.visitor_session import RunConnection
    from peers.tools.owner.registry import RegisteredRun
    from protocols.signed.identity import Identity
    from protocols.signed.opinions import OpinionDocument, SignedOpinion
    from swarmnet.identifiers import PeerId

OPERATION_SECONDS = 15.0
KEEP_SECONDS = 60.0
"""Seconds between two renewals of a proposal; an entry lives 600 s, so nine in a row may be lost."""
MAX_SHOWN = 100
"""Maximum number of documents that `registry objections` shows: those with most objections."""
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
Withdraw = Annotated[bool, typer.Option("--withdraw", help="Withdraw what this key has signed before.")]


def propose(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file.")],
    key: Key = None,
    bootstrap: Bootstraps = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write. [default: NAME.run.json in the same folder]")
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Sign without checking text and tokenizer.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep it listed until Ctrl+C.")] = False,
) -> None:
    """Publish a run as a proposal: listed in the registry, and paused until `order resume`."""
    from peers.cli.connecting import with_run
    from peers.cli.run import publish

    if not bootstrap:
        raise UserError("a proposal needs a directory: add --bootstrap MULTIADDR of any peer of any run")
    published = out or run_file.with_suffix(".run.json")
    settings = ["listed=true"]
    publish(run_file, key=key, bootstrap=bootstrap, out=published, unchecked=unchecked, settings=settings)

    async def prepare(connection: RunConnection) -> Callable[[OwnerOrders], OwnerOrders]:
        """Put the run into the directory. Returns the order that pauses it."""
        await _store_run(connection)
        return _pause_proposal

    give_planned_order(str(published), key, bootstrap, prepare)
    typer.echo(f"start  swarmnet order resume {published} --bootstrap {bootstrap[0]}")
    if not keep:
        typer.echo("listed for 10 minutes; a bootstrap of the run or --keep lists it for longer")
        return
    typer.echo("listed until Ctrl+C")
    with_run(str(published), bootstrap, _keep_listed)


def _pause_proposal(orders: OwnerOrders) -> OwnerOrders:
    """Return the orders that pause a proposed run. Raises OrderError if it was resumed before."""
    if orders.sequence and not orders.paused:
        raise OrderError("the run is no proposal any more: it was resumed")
    return orders if orders.paused else owner_orders.pause(orders, "proposed")


async def _store_run(connection: RunConnection) -> None:
    """Put a run's manifest and its entry into the directory. Raises UserError if no node stores it."""
    from protocols.signed.registry_entry import seal_listing

    signed, directory = connection.signed, connection.directory
    entry = seal_listing(signed.run_id, signed.manifest.owner, signed.signature)
    stored = await directory.put_manifest(signed.run_id, signed.wire(), OPERATION_SECONDS)
    if not (await directory.put_listing(entry, OPERATION_SECONDS) and stored):
        raise UserError("no node of the directory has stored the proposal: repeat the command")


async def _keep_listed(connection: RunConnection) -> None:
    """Store the run, its entry and the owner's order again and again, until cancelled."""
    from peers.cli.connecting import notify
    from peers.network.orders.order_book import OrderBook
    from peers.network.orders.republish import keep

    signed = connection.signed
    book = OrderBook(signed=signed, kept=None, log_event=lambda *_, **__: None, notify=notify)
    while True:
        await _store_run(connection)
        await keep(book, connection.directory, lambda *_, **__: None)
        await asyncio.sleep(KEEP_SECONDS)


def list_runs(
    bootstrap: Bootstraps = None,
    limit: Annotated[int, typer.Option(min=1, max=768, help="Maximum number of runs to show.")] = 50,
    endorsed: Annotated[
        bool, typer.Option("--endorsed", help="Show only runs that a trusted curator endorses.")
    ] = False,
    trust: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER|@FILE",
            help="Trust a curator, or those in a file. Repeatable. [default: curators.txt in the state home]",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List public runs: state, size, peers, tokens, licence, and which trusted curators endorse them."""
    from random import Random

    from peers.cli.connecting import NOT_REACHED, check_bootstraps, notify
    from peers.network.discovery.bootstrap import PeerCache
    from peers.network.discovery.visitor_session import join_as_visitor
    from peers.telemetry.console import counted
    from peers.tools.owner.registry import runs
    from protocols.errors import WireError

    if not bootstrap:
        raise UserError("registry needs --bootstrap MULTIADDR of any peer of any run")
    check_bootstraps(bootstrap)
    trusted = _trusted_curators(trust)
    if endorsed and not trusted:
        raise UserError(
            "--endorsed needs curators whom you trust: add --trust 12D3Koo..., or write their peer ids into "
            f"{state_home() / 'curators.txt'}, one a line"
        )
    cache = PeerCache(state_home() / "registry-peers.json")

    async def fetch_runs() -> tuple[list[RegisteredRun], int]:
        async with join_as_visitor(bootstrap, cache, notify) as (_, directory):
            return await runs(directory, limit, Random(), trusted, endorsed)

    with as_user_errors(*NOT_REACHED, WireError):
        public_runs, entries = asyncio.run(fetch_runs())  # Not every entry has a manifest.
    if as_json:
        echo(json.dumps([_as_row(run, trusted) for run in public_runs], indent=2, ensure_ascii=False))
        return
    for run in public_runs:
        echo(_as_line(_as_row(run, trusted)))
    noun = "entry" if entries == 1 else "entries"
    typer.echo(f"{counted(len(public_runs), 'run')}, {entries} {noun}", err=True)


def _trusted_curators(trust: Sequence[str] | None) -> dict[PeerId, str]:
    """Return the curators of `--trust`, or else of the user's file, with their names there. Raises
    UserError."""
    default = state_home() / "curators.txt"
    if trust is None:
        trust = [f"@{default}"] if default.exists() else []
    trusted: dict[PeerId, str] = {}
    for entry in trust:
        lines = [entry]
        if entry.startswith("@"):
            try:
                lines = Path(entry[1:]).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{entry[1:]}: the curators cannot be read: {error}") from None
        for line in lines:
            peer, _, name = line.partition("#")[0].strip().partition(" ")
            if peer:
                trusted[parse_peer_id(peer)] = name.strip()
    return trusted


def _as_row(run: RegisteredRun, trusted: dict[PeerId, str]) -> dict[str, object]:
    """Return what `registry list` shows of a run, as plain data."""
    facts, manifest = run.facts, run.signed.manifest
    return {
        "run": run.signed.run_id,
        "name": manifest.name,
        "owner": manifest.owner,
        "access": manifest.access,
        "state": run.state,
        "parameters": facts.parameters,
        "stages": len(manifest.stages),
        "peers": sum(facts.active_peers),
        "round": facts.known_round,
        "tokens": facts.tokens,
        "licence": manifest.license,
        "objections": len(facts.objections or ()),
        "endorsements": [
            {"curator": one.author, "name": trusted[one.author], "text": one.text} for one in run.endorsements
        ],
    }


def _as_line(row: dict[str, object]) -> str:
    """Return a row of `registry list` as a line."""
    from peers.telemetry.console import counted

    details = [
        str(row["state"]),
        f"{row['parameters']:,} parameters",
        counted(int(str(row["peers"])), "peer"),
        f"{row['tokens']:,} tokens",
        _printable(str(row["licence"])) or "no licence stated",
        str(row["access"]),
    ]
    endorsements = row["endorsements"]
    if isinstance(endorsements, list) and endorsements:
        names = (one["name"] or f"{one['curator'][:16]}..." for one in endorsements)
        details.append(f"endorsed by {', '.join(names)}")
    return f"{row['run']}  {_printable(str(row['name']))}  {', '.join(details)}"


def show(run: Run, bootstrap: Bootstraps = None) -> None:
    """Print a run's manifest as verified, readable JSON."""
    from peers.cli.connecting import with_run
    from peers.config.run_file import published_text

    async def fetch_manifest(connection: RunConnection) -> str:
        return published_text(connection.signed)

    echo(with_run(run, bootstrap, fetch_manifest).rstrip("\n"))


def endorse(
    run: Run, reason: Reason = "", key: Key = None, withdraw: Withdraw = False, bootstrap: Bootstraps = None
) -> None:
    """Endorse a run with your key, for 30 days. It counts for all who trust your peer id."""
    from protocols.signed.opinions import OpinionDocument

    _send_opinion(run, bootstrap, load_owner_key(key)[1], OpinionDocument("", reason, withdraw))


def object_to_document(
    run: Run,
    document: Annotated[
        str,
        typer.Argument(
            metavar="SHA256|PLACE", help="SHA-256 of the document, or in one line where it is found."
        ),
    ],
    reason: Annotated[str, typer.Option(help="Why it should not be in the text, in one line.")],
    key: Annotated[
        Path | None, typer.Option(help="Sign with this identity file. [default: a new key, anonymous]")
    ] = None,
    withdraw: Withdraw = False,
    bootstrap: Bootstraps = None,
) -> None:
    """Object to a document of a run's text, for 30 days. The owner sees it and may withdraw the document."""
    from protocols.signed.identity import Identity
    from protocols.signed.opinions import OpinionDocument

    if withdraw and key is None:
        raise UserError("--withdraw needs the key that signed the objection: add --key FILE")
    document = document.lower() if _SHA256.fullmatch(document) else document.strip()
    if not document:
        raise UserError("name the document: its SHA-256, as sha256sum prints it, or where it is found")
    identity = load_owner_key(key)[1] if key is not None else Identity.generate()
    _send_opinion(run, bootstrap, identity, OpinionDocument(document, reason, withdraw))


def objections(run: Run, bootstrap: Bootstraps = None, as_json: AsJson = False) -> None:
    """List the documents of a run's text that people object to. Keys cost nothing, so counts prove little."""
    from peers.cli.connecting import notify, with_run
    from peers.tools.owner.give_order import newest
    from peers.tools.owner.objections import disputed_documents

    async def fetch(connection: RunConnection) -> tuple[list[SignedOpinion], OwnerOrders]:
        known = await newest(connection, kept=None, notify=notify)
        found = await connection.directory.opinions(connection.signed.run_id, "objection", OPERATION_SECONDS)
        return found, known.directory.order

    opinions, order = with_run(run, bootstrap, fetch)
    documents = disputed_documents(opinions, order)[:MAX_SHOWN]
    if as_json:
        rows = [
            {"document": one.document, "keys": one.keys, "withdrawn": one.withdrawn, "reasons": one.reasons}
            for one in documents
        ]
        echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for one in documents:
        state = "withdrawn" if one.withdrawn else "in the text"
        echo(f"{one.document}  {one.keys} keys, {state}: {one.reasons[0]}")
    if not documents:
        typer.echo("no objection is known", err=True)


def _send_opinion(
    run: str, bootstrap: list[str] | None, identity: Identity, document: OpinionDocument
) -> None:
    """Sign an opinion about a run and store it. Raises UserError."""
    from peers.cli.connecting import with_run
    from protocols.signed.opinions import seal_opinion

    for text in (document.document, document.text):
        if len(text) > REASON_LIMIT or not text.isprintable():
            raise UserError(f"a reason or a place is one line of at most {REASON_LIMIT} characters")

    async def send(connection: RunConnection) -> SignedOpinion:
        opinion = seal_opinion(identity, connection.signed.run_id, document, connection.directory.now())
        if not await connection.directory.put_opinion(opinion, OPERATION_SECONDS):
            raise UserError("no node of the directory has stored it: repeat the command")
        return opinion

    opinion = with_run(run, bootstrap, send)
    until = time.strftime("%Y-%m-%d", time.gmtime(opinion.expires_seconds))
    what = f"withdrawn: {opinion.kind}" if opinion.withdrawn else opinion.kind
    typer.echo(f"{what} of {opinion.run_id[:16]} by {opinion.author}, until {until}")


def _printable(text: str) -> str:
    """Return at most 100 characters of untrusted text, without control characters."""
    return "".join(char if char.isprintable() else "?" for char in text)[:100]
