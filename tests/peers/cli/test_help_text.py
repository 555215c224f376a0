"""Help texts: sections of commands, names of values, and completion in the shell."""

import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from peers.cli import main as cli

APP = cli.application()


def shown(*arguments):
    return CliRunner().invoke(APP, [*arguments, "--help"], env={"COLUMNS": "80"}).stdout


def commands(command, path=()):
    """Yield the words of every command and group."""
    yield path
    for name, member in getattr(command, "commands", {}).items():
        yield from commands(member, (*path, name))


def test_every_command_stands_once_in_a_section_and_its_sentence_is_whole():
    text = shown()
    sections = re.findall(r"^(\S[^:\n]*):$", text, re.MULTILINE)
    assert sections == ["Options", "Take part", "Watch", "Your own run", "Take the model home", "Develop"]
    listed = re.findall(r"^  ([a-z]+)  ", text, re.MULTILINE)
    assert sorted(listed) == sorted(get_command(APP).commands)
    assert "..." not in text.split("Take part:")[1]


@pytest.mark.parametrize("path", list(commands(get_command(APP))), ids=" ".join)
def test_no_help_text_has_a_type_of_python(path):
    text = shown(*path)
    assert "Usage:" in text
    assert not re.search(r"<(list|str|int|float|path|bool)\b", text)


def test_the_shell_completes_commands():
    found = subprocess.run(
        [sys.executable, "-m", "peers.cli.main"],
        env={"_SWARMNET_COMPLETE": "complete_bash", "COMP_WORDS": "swarmnet jo", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.stdout, found.stderr) == ("join\n", "")
