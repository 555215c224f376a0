"""Help texts of commands: the list of commands in sections, and value names that are not Python's types."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

VALUE_NAMES = {"str": "TEXT", "int": "N", "float": "NUMBER", "path": "PATH"}
"""What a help text has in place of a Python type."""
TYPE = re.compile(r" <(?:list\[)?(str|int|float|path)(?: range)?\]?>", re.IGNORECASE)
SUMMARY_LENGTH = 160
"""Characters of the first sentence of a help text that a list of commands shows. It fits two lines."""


class PlainCommand(TyperCommand):
    """A command whose help text shows no Python types."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        arguments: list[tuple[str, str]] = []
        options: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            shown, meaning = record
            if parameter.param_type_name == "argument":
                arguments.append((TYPE.sub("", shown), meaning))
            else:
                options.append((TYPE.sub(lambda found: f" {VALUE_NAMES[found[1].lower()]}", shown), meaning))
        for title, records in (("Arguments", arguments), ("Options", options)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class SectionedGroup(TyperGroup):
    """A command group that lists its commands in the sections that they name, in the order in which they were
    added. Commands that name none are in a section `Commands`."""

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        commands = [(name, command) for name, command in self.commands.items() if not command.hidden]
        widest = max((len(name) for name, _ in commands), default=0)
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in commands:
            title = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(title, []).append(
                (name.ljust(widest), command.get_short_help_str(SUMMARY_LENGTH))
            )
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)
