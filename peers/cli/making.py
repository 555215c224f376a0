"""Commands that create files which a run file or a peer file names: a tokenizer, an index of the text files
(their SHA-256), and a peer's identity (its Ed25519 key)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.cli.run import Settings, overrides
from peers.config.errors import UserError, as_user_errors
from peers.config.peer_file import load

if TYPE_CHECKING:
    from peers.config.peer_file import PeerFile


def tokenizer(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Files or folders of text.")],
    vocab_size: Annotated[int, typer.Option(min=257, max=1 << 20, help="Maximum number of tokens.")] = 8192,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path("tokenizer.json"),
    eos_token: Annotated[
        str, typer.Option(metavar="TOKEN", help="Token that separates documents.")
    ] = "<|endoftext|>",
    replace: Annotated[bool, typer.Option("--replace", help="Replace the file if it exists.")] = False,
) -> None:
    """Train a tokenizer.json (byte-level BPE) on a text, or on a random part of one above 64 MiB."""
    import time

    from peers.cli.run import warn
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
        tokenizer_json, tokens = train_tokenizer(text, vocab_size, eos_token, progress)
    write_atomically(out, tokenizer_json)
    for warning in text.reading.warnings():
        warn(warning)
    typer.echo(f"read   {text.reading.bytes:,} bytes of text, {text.reading.documents:,} documents")
    typer.echo(f"wrote  {out}: {tokens:,} tokens")
    if tokens < vocab_size:
        typer.echo(f"       fewer than {vocab_size:,}: no other pair of tokens occurs twice in the text")
    typer.echo(f"run    model: {{vocab_size: {tokens}}}")
    typer.echo(f"       data: {{tokenizer: {out.name}, eos_token: '{eos_token}'}}")


def inspect_text(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Files or folders of text.")],
    tokenizer_path: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="tokenizer.json; else bytes.")
    ] = None,
    eos_token: Annotated[
        str, typer.Option(metavar="TOKEN", help="Token that separates documents (data.eos_token).")
    ] = "",
    column: Annotated[str, typer.Option(help="Field of the text (`a.b`: b in a).")] = "text",
    tokens: Annotated[str, typer.Option(help="Type of tokens in .bin, .npy: uint16, uint32.")] = "",
) -> None:
    """Print what a run would read of a text, and one line for each kind of file or line that it skips."""
    import time

    from peers.cli.run import warn
    from peers.data.documents import TextError, text_at
    from peers.data.local_text import progress_lines
    from peers.data.tokenizer import MAX_TOKENS, open_tokenizer
    from peers.data.tokens import encoded

    progress = progress_lines(
        lambda _event, line: typer.echo(line, err=True), time.monotonic, "reads the text"
    )
    with as_user_errors(TextError):
        tokenizer = open_tokenizer(tokenizer_path, MAX_TOKENS, eos_token)
        if tokens not in ("", "uint16", "uint32"):
            raise UserError(f"--tokens {tokens} is not uint16 or uint32")
        text = text_at(
            texts,
            sys.maxsize,
            column=column,
            tokens=tokens,
            vocabulary=tokenizer.vocabulary if tokenizer_path else MAX_TOKENS,
        )
        count = sum(map(len, encoded(text, tokenizer, progress)))
    reading = text.reading
    reading.tokenizer = tokenizer.warning
    for warning in reading.warnings():
        warn(warning)
    typer.echo(f"read   {reading.documents:,} documents in {reading.files:,} files, {reading.bytes:,} bytes")
    of_what = "bytes" if tokenizer_path is None else f"{tokenizer_path}, which has {tokenizer.vocabulary:,}"
    typer.echo(f"makes  {count:,} tokens of {of_what}; {reading.bytes / max(1, count):.2f} bytes each")


def new(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="Name of the run, and folder to write.")],
    text: Annotated[
        str, typer.Option(metavar="PATH", help="Text to train on: a folder, a file, or python-stdlib.")
    ],
    model: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Model to fine-tune (Hugging Face folder).")
    ] = None,
    lora: Annotated[
        int, typer.Option(min=0, max=256, help="With --from: rank of LoRA adapters. 0: train all weights.")
    ] = 0,
    peers: Annotated[
        str,
        typer.Option(help="Number of machines such as this one, or classes of peers as for `plan`."),
    ] = "3",
    hours: Annotated[float, typer.Option(min=0.01, help="Without --from: hours that may pass.")] = 24.0,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]", help="Where others reach the bootstrap. [default: this machine's address]"
        ),
    ] = None,
) -> None:
    """Propose a run for a text, a model and machines, and write its folder with a README of all commands."""
    import time

    from peers.data.documents import TextError
    from peers.data.local_text import progress_lines
    from peers.lab.planner.new_run.new_folder import NewRun, create

    progress = progress_lines(
        lambda _event, line: typer.echo(line, err=True), time.monotonic, "reads the text"
    )
    with as_user_errors(TextError):
        made = create(
            NewRun(name, text, model, lora, peers, hours, address),
            lambda word, line: typer.echo(f"{word:<7}{line}"),
            progress,
        )
    for note in made.notes:
        typer.echo(f"note   {note}")
    typer.echo(f"wrote  {name / 'README.md'}, {name / f'{name.name}.yaml'}, {name / 'bootstrap.yaml'}")
    for command in made.commands:
        typer.echo(f"next   {command}")


def index(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of text.")],
    replace: Annotated[bool, typer.Option("--replace", help="Replace the index if it exists.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Index .bin and .npy files.")] = False,
) -> None:
    """Write FOLDER/index.json with the SHA-256 of each text file, so that a run can name its exact text."""
    import hashlib
    import time

    from peers.cli.run import warn
    from peers.config.atomic_files import is_there, write_atomically
    from peers.data.documents import ReadSummary, TextError
    from peers.data.local_text import progress_lines
    from peers.data.shards import index_of, index_of_place, parsed

    out, reading = index_of_place(folder), ReadSummary()
    if is_there(out) and not replace:
        raise UserError(f"{out} exists already, and runs may name it: add --replace")
    progress = progress_lines(
        lambda _event, line: typer.echo(line, err=True), time.monotonic, "reads the text"
    )
    with as_user_errors(TextError):
        index_json = index_of(folder, reading, progress, "uint16" if tokens else "")
    write_atomically(out, index_json)
    for warning in reading.warnings():
        warn(warning)
    files = parsed(index_json)
    typer.echo(f"read   {sum(file.bytes for file in files):,} bytes in {len(files):,} files")
    typer.echo(f"wrote  {out}: distribute it with the files")
    name = folder.resolve().name
    typer.echo(f"run    data: {{sampling: epoch, sources: [{{name: {name}, path: {name},")
    typer.echo(f"         index: {hashlib.sha256(index_json).hexdigest()}}}]}}")


def identity(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Peer file (.yaml) or identity file.")],
    settings: Settings = None,
) -> None:
    """Create a peer's key if there is none, and print its peer id and addresses."""
    from protocols.signed.identity import IdentityError, load_or_create

    with as_user_errors(IdentityError):
        if file.suffix not in (".yaml", ".yml"):
            if settings:
                raise UserError("--set needs a peer file: swarmnet identity PEER.yaml --set KEY=VALUE")
            typer.echo(f"peer     {load_or_create(file).peer_id}")
            typer.echo(f"address  /ip4/ADDRESS/tcp/PORT/p2p/{load_or_create(file).peer_id}")
            return
        config = load(file, os.environ, overrides(settings))
        peer_id = load_or_create(config.identity).peer_id
        typer.echo(f"peer     {peer_id}  ({config.identity})")
        for address in _address_templates(config):
            typer.echo(f"address  {address}/p2p/{peer_id}")


_UNSPECIFIED = {"/ip4/0.0.0.0/": "/ip4/ADDRESS/", "/ip6/::/": "/ip6/ADDRESS/"}


def _address_templates(config: PeerFile) -> Iterator[str]:
    """Yield the multiaddrs under which others may reach the peer, from its peer file. The word ADDRESS stands
    for an address that the file leaves open (0.0.0.0), and PORT for port 0."""
    for address in config.announce or config.listen:
        shown = address
        for unspecified, placeholder in _UNSPECIFIED.items():
            shown = shown.replace(unspecified, placeholder)
        if shown.endswith("/0"):  # Port 0.
            shown = f"{shown.removesuffix('/0')}/PORT"
        yield shown
