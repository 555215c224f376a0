"""Each command that the program prints is one that its command line takes.

A printed command stands in backticks, or it is the rest of its line. The strings of the code are read here,
with a word for each value in them, so a new message is checked without an entry in any table.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import typer
from syntax import MODULES, ROOT, text_of, tree_of
from typer.exceptions import TyperException

from peers.cli import main as cli
from peers.config.explain import explain

COMMANDS = typer.main.get_command(cli.application())
WORD = "1"
"""In the place of a value, and of a number that the reader fills in: an integer is a path and a name, too."""
CHOICES = {
    "command": ("pause", "resume", "leave", "credit", "top", "doctor"),
}
"""Values that are commands themselves: callers of peers/runtime/find_running.py pass them."""
NAMED = re.compile(r"swarmnet[\s\\]")
"""In the source of whatever prints a command."""
QUOTED = re.compile(r"`swarmnet\s([^`]*)`")
BARE = re.compile(rf"(?<![`\w./-])swarmnet ((?:{'|'.join(COMMANDS.commands)})\b[^\n`]*)$", re.MULTILINE)


def strings(tree: ast.AST) -> Iterator[ast.expr]:
    """Each string of a module except its docstrings, f-strings as a whole."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and type(child.value) is str):
            yield child
        else:
            yield from strings(child)


def texts(string: ast.expr) -> Iterator[str]:
    """The string with each choice for its values."""
    if isinstance(string, ast.Constant):
        yield string.value
        return
    parts = [
        (part.value,) if isinstance(part, ast.Constant) else CHOICES.get(ast.unparse(part.value), (WORD,))
        for part in string.values
    ]
    yield from map("".join, product(*parts))


def printed(text: str) -> list[str]:
    return [re.sub(r"\s+", " ", found) for found in (*QUOTED.findall(text), *BARE.findall(text))]


def in_code() -> Iterator[tuple[str, str]]:
    for file in MODULES:
        if not NAMED.search(text_of(file)):
            continue
        for string in strings(tree_of(file)):
            for text in texts(string):
                for command in printed(text):
                    yield f"{file.relative_to(ROOT)}:{string.lineno}", command


def in_help(command=COMMANDS, name: str = "swarmnet") -> Iterator[tuple[str, str]]:
    for text in (command.help, *(getattr(option, "help", None) for option in command.params)):
        for found in printed(text or ""):
            yield f"{name} --help", found
    for below, other in getattr(command, "commands", {}).items():
        yield from in_help(other, f"{name} {below}")


def parse(command: str) -> None:
    """Raises TyperException where `swarmnet COMMAND` is refused before it begins, KeyError without one."""
    words = [WORD if word == "N" else word for word in shlex.split(command)]
    found = COMMANDS
    while hasattr(found, "commands"):
        found = found.commands[words.pop(0)]
    found.make_context("swarmnet", words)


def test_each_printed_command_is_taken_as_it_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text(WORD)  # An option that takes @FILE reads it.
    explained = [("config explain", found) for kind in ("peer", "run") for found in printed(explain(kind))]
    found = sorted({*in_code(), *in_help(), *explained})
    assert len(found) > 90
    refused = []
    for place, command in found:
        try:
            parse(command)
        except (TyperException, KeyError) as error:
            refused.append(f"{place}: swarmnet {command}: {error!r}")
    assert refused == []
