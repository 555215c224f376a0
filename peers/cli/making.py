"""Commands that make what the files of a run name before anything is started: tokenizer, identity."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.cli.run import Settings, overrides
from peers.config.peer_file import load
from peers.errors import UserError, as_user_errors

if TYPE_CHECKING:
    from peers.config.peer_file import PeerFile


def tokenizer(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Files or folders of text.")],
    vocabulary: Annotated[int, typer.Option(min=257, max=1 << 20, help="Most tokens.")] = 8192,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write.")] = Path("tokenizer.json"),
    eos_token: Annotated[
        str, typer.Option(metavar="TOKEN", help="Stands between two documents.")
    ] = "<|endoftext|>",
    replace: Annotated[bool, typer.Option("--replace", help="Replace the file if it is there.")] = False,
) -> None:
    """Make a tokenizer.json (byte-level BPE) from a text, of more than 64 MiB a random part."""
    import time

    from peers.cli.model import warn
    from peers.config.atomic_files import is_there, write_atomically
    from peers.data.documents import TextError, text_at
    from peers.data.local_text import progress_lines
    from peers.data.train_tokenizer import train_tokenizer

    if is_there(out) and not replace:
        raise UserError(f"{out} exists already, and runs may need it: name another --out or add --replace")
    progress = progress_lines(
        lambda _event, line: typer.echo(line, err=True), time.monotonic, "reads the text"
    )
    with as_user_errors(TextError):
        text = text_at(texts)
        made, tokens = train_tokenizer(text, vocabulary, eos_token, progress)
    write_atomically(out, made)
    for warning in text.reading.warnings():
        warn(warning)
    typer.echo(f"read   {text.reading.bytes:,} bytes of text, {text.reading.documents:,} documents")
    typer.echo(f"wrote  {out}: {tokens:,} tokens")
    if tokens < vocabulary:
        typer.echo(f"       fewer than {vocabulary:,}: the text holds no more pairs that come twice")
    typer.echo(f"run    model: {{vocab_size: {tokens}}}")
    typer.echo(f"       data: {{tokenizer: {out.name}, eos_token: '{eos_token}'}}")


def index(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of text.")],
    replace: Annotated[bool, typer.Option("--replace", help="Replace the index if it is there.")] = False,
) -> None:
    """Name the files of a text with their SHA-256, in FOLDER/index.json: so a run can say what exactly it is
    read from."""
    import hashlib
    import time

    from peers.cli.model import warn
    from peers.config.atomic_files import is_there, write_atomically
    from peers.data.documents import Reading, TextError
    from peers.data.local_text import progress_lines
    from peers.data.shards import INDEX, index_of, parsed

    out, reading = folder / INDEX, Reading()
    if is_there(out) and not replace:
        raise UserError(f"{out} exists already, and runs may name it: add --replace")
    progress = progress_lines(
        lambda _event, line: typer.echo(line, err=True), time.monotonic, "reads the text"
    )
    with as_user_errors(TextError):
        made = index_of(folder, reading, progress)
    write_atomically(out, made)
    for warning in reading.warnings():
        warn(warning)
    files = parsed(made)
    typer.echo(f"read   {sum(file.bytes for file in files):,} bytes in {len(files):,} files")
    typer.echo(f"wrote  {out}: hand it out with them")
    name = folder.resolve().name
    typer.echo(f"run    data: {{sampling: epoch, sources: [{{name: {name}, path: {name},")
    typer.echo(f"         index: {hashlib.sha256(made).hexdigest()}}}]}}")


def identity(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A peer file (.yaml), or an identity file.")],
    settings: Settings = None,
) -> None:
    """Make a peer's key if there is none yet, and print its id and the addresses by which others name it."""
    from protocols.signed.identity import IdentityError, load_or_create

    with as_user_errors(IdentityError):
        if file.suffix not in (".yaml", ".yml"):
            if settings:
                raise UserError("--set changes what a peer file sets: name one, as in: identity PEER.yaml")
            typer.echo(f"peer     {load_or_create(file).peer_id}")
            typer.echo(f"address  /ip4/ADDRESS/tcp/PORT/p2p/{load_or_create(file).peer_id}")
            return
        config = load(file, os.environ, overrides(settings))
        me = load_or_create(config.identity).peer_id
        typer.echo(f"peer     {me}  ({config.identity})")
        for address in _addresses(config):
            typer.echo(f"address  {address}/p2p/{me}")


_ANYWHERE = {"/ip4/0.0.0.0/": "/ip4/ADDRESS/", "/ip6/::/": "/ip6/ADDRESS/"}


def _addresses(config: PeerFile) -> Iterator[str]:
    """Where others reach it, as far as its file tells; ADDRESS and PORT stand for what that leaves open."""
    for address in config.announce or config.listen:
        told = address
        for anywhere, open_to_all in _ANYWHERE.items():
            told = told.replace(anywhere, open_to_all)
        yield f"{told.removesuffix('/0')}/PORT" if told.endswith("/0") else told
