"""The command line `swarmnet` and its commands. A command parses options, calls other packages, and prints.
Commands import heavy libraries such as torch only when they run, so that `--help` is fast."""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from typer.exceptions import TyperException

from peers.cli import control, doctor, host, join, lab, making, model, run, top, uninstall
from peers.cli.help_text import PlainCommand, SectionedGroup
from peers.cli.owner import commands as owner
from peers.cli.owner import course, registry
from peers.config.errors import ConfigError, UserError

ERROR_EXIT = 2
"""Exit code of errors that the user can cause and correct."""
TAKE_PART, WATCH, OWN_RUN, DEVELOP = "Take part", "Watch", "Your own run", "Develop"
"""Sections of the list of commands."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments` (None: those of the process), and exit the process with its code.

    The exit code is 2 for errors that the user can correct, and 128 plus the number for a signal."""
    prepare_for_torch(os.environ)
    received_signals: list[int] = []

    def handle_sigterm(number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM like Ctrl+C, so that temporary files are removed, among them keys. A running peer
        replaces this handler."""
        received_signals.append(number)
        sigint_handler = signal.getsignal(signal.SIGINT)
        if isinstance(sigint_handler, partial):  # asyncio's handler, which cancels its task.
            sigint_handler(number, frame)
        else:
            raise KeyboardInterrupt

    former_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, handle_sigterm)
    if former_handlers[signal.SIGINT] is signal.SIG_IGN:
        # Shells let background jobs ignore SIGINT. asyncio ends cleanly only with Python's handler.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = application()(
            args=list(arguments) if arguments is not None else None,
            prog_name="swarmnet",
            standalone_mode=False,
        )
        sys.stdout.flush()
    except ConfigError as error:
        sys.exit(_print_errors(error.problems))
    except UserError as error:
        sys.exit(_print_errors([str(error)]))
    except TyperException as error:
        sys.exit(_print_usage_error(error))
    except BrokenPipeError:
        # The program that reads this output has ended (`| head`), so nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (typer.Abort, KeyboardInterrupt):
        result = 128 + signal.SIGINT  # As shells report it.
    finally:
        for number, handler in former_handlers.items():
            signal.signal(number, handler)
    if received_signals:
        result = 128 + received_signals[0]
    sys.exit(result if isinstance(result, int) else 0)


def prepare_for_torch(environment: MutableMapping[str, str]) -> None:
    """Set the variables of OpenMP (torch's thread pool) in `environment`, if the user has not set them. Must
    be called before torch is imported, because OpenMP reads them once.

    By default its threads spin while they wait, and peers on one machine block each other. Four peers with
    two threads each on two cores did 7 steps in 34 s; with one thread each, 378 in 50 s. `threads` of the
    peer file still sets the number of torch's threads.
    """
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("OMP_WAIT_POLICY", "passive")


def application() -> typer.Typer:
    """Return the Typer application with all commands."""
    app = _group(
        "Train one language model together over the internet, without a server.", add_completion=True
    )
    take_part: dict[str, Callable[..., None]] = {
        "demo": run.demo,
        "join": join.join,
        "run": run.run,
        "lend": run.lend,
        "pause": control.pause,
        "resume": control.resume,
        "leave": control.leave,
        "limit": control.limit,
        "page": control.page,
        "credit": control.credit,
        "doctor": doctor.doctor,
        "identity": making.identity,
        "uninstall": uninstall.uninstall,
    }
    watch: dict[str, Callable[..., None]] = {
        "top": top.top,
        "curve": top.curve,
        "orders": owner.show_orders,
    }
    own_run: dict[str, Callable[..., None]] = {
        "new": making.new,
        "tokenizer": making.tokenizer,
        "text": making.inspect_text,
        "index": making.index,
        "plan": lab.plan,
        "publish": run.publish,
        "propose": registry.propose,
        "host": host.host,
        "invite": owner.invite,
        "report": owner.report,
    }
    take_home: dict[str, Callable[..., None]] = {
        "export": model.export,
        "generate": model.generate,
        "evaluate": model.evaluate,
    }
    develop: dict[str, Callable[..., None]] = {
        "chaos": lab.chaos,
        "simulate": lab.simulate,
        "version": version,
    }
    _add_commands(app, take_part, TAKE_PART)
    _add_commands(app, watch, WATCH)
    _add_commands(app, own_run, OWN_RUN)
    _add_commands(app, take_home, "Take the model home")
    _add_commands(app, develop, DEVELOP)
    _add_groups(app)
    return app


def _add_groups(app: typer.Typer) -> None:
    """Add the commands of two words: `order`, `registry`, `config` and `bench`, each with its subcommands."""
    order: dict[str, Callable[..., None]] = {
        "pause": owner.pause,
        "resume": owner.resume,
        "checkpoint": owner.checkpoint,
        "ban": owner.ban,
        "unban": owner.unban,
        "rollback": course.rollback,
        "return": course.return_to,
        "sign": owner.sign,
        "publish": owner.publish_moderation,
        "dismiss": owner.dismiss,
        "reinstate": owner.reinstate,
        "withdraw": owner.withdraw,
        "revoke": owner.revoke,
        "rate": course.rate,
        "mixture": course.mixture,
        "end": course.end,
    }
    public_runs: dict[str, Callable[..., None]] = {
        "list": registry.list_runs,
        "show": registry.show,
        "endorse": registry.endorse,
        "object": registry.object_to_document,
        "objections": registry.objections,
    }
    config: dict[str, Callable[..., None]] = {"check": config_check, "explain": config_explain}
    measure: dict[str, Callable[..., None]] = {
        "group": lab.group,
        "paths": lab.paths,
        "memory": lab.memory,
        "training": lab.training,
        "learning": lab.learning,
    }
    ordering = _group("Give an order in a run that you own. All its peers obey it; your signature proves it.")
    finding = _group("Find public runs, endorse them, and object to documents of their text.")
    explaining = _group("Check and explain configuration files.")
    measuring = _group("Run benchmarks; each figure is shown with a baseline.")
    app.add_typer(_add_commands(ordering, order), name="order", rich_help_panel=OWN_RUN)
    app.add_typer(_add_commands(finding, public_runs), name="registry", rich_help_panel=WATCH)
    app.add_typer(_add_commands(explaining, config), name="config", rich_help_panel=TAKE_PART)
    app.add_typer(_add_commands(measuring, measure), name="bench", rich_help_panel=DEVELOP)


def _add_commands(
    group: typer.Typer, commands: Mapping[str, Callable[..., None]], section: str | None = None
) -> typer.Typer:
    """Add commands, by name, to a command group, in a section of its help text. Returns the group."""
    for name, command in commands.items():
        group.command(name, cls=PlainCommand, rich_help_panel=section)(command)
    return group


def _group(help: str, add_completion: bool = False) -> typer.Typer:
    """Return an empty command group."""
    return typer.Typer(
        cls=SectionedGroup,
        help=help,
        no_args_is_help=True,
        add_completion=add_completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def config_check(
    file: Annotated[Path, typer.Argument(help="Peer file, run file or published run file.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The tokenizer.json of a run file. [default: in its folder]"),
    ] = None,
    init_checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The initial model of a run file. [default: in its folder]"),
    ] = None,
    settings: run.Settings = None,
) -> None:
    """Check a peer file, a run file or a published run file."""
    from peers.tools.owner.run_check import check_file

    typer.echo(check_file(file, os.environ, run.overrides(settings), tokenizer, run.warn, init_checkpoint))


def config_explain(
    file: Annotated[Path | None, typer.Argument(help="Peer file whose values to show.")] = None,
    of_run: Annotated[bool, typer.Option("--run", help="Explain the keys of a run file instead.")] = False,
    settings: run.Settings = None,
) -> None:
    """Explain all configuration keys: type, default, meaning; with a peer file, their values."""
    from peers.config.explain import explain, explain_file

    if file is None and settings:
        raise UserError("--set needs a peer file: swarmnet config explain PEER.yaml --set KEY=VALUE")
    text = (
        explain_file(file, os.environ, run.overrides(settings))
        if file is not None
        else explain("run" if of_run else "peer")
    )
    typer.echo(text, nl=False)


def version() -> None:
    """Print the versions of this program, its wire format, Python and the main libraries."""
    from swarmnet.run.schema import WIRE_VERSION

    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "hivemind"))
    typer.echo(
        f"swarmnet {metadata.version('swarmnet')}, wire version {WIRE_VERSION}; "
        f"{packages}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )


def _print_errors(problems: Sequence[str]) -> int:
    """Print one line for each problem, and return the exit code for errors of the user."""
    from peers.telemetry.console import printable

    for problem in problems:  # It may quote the run's untrusted owner.
        print(f"error: {printable(problem)}", file=sys.stderr)
    return ERROR_EXIT


def _print_usage_error(error: TyperException) -> int:
    """Print one line for a wrong command, or the help text if no command was given. Return the exit code."""
    lines = error.format_message().strip().splitlines()
    if len(lines) > 1:  # The help text: no command was given.
        print("\n".join(lines), file=sys.stderr)
        return ERROR_EXIT
    context = getattr(error, "ctx", None)  # The command that refused its arguments.
    path = context.command_path if context is not None else "swarmnet"
    return _print_errors([f"{lines[0] if lines else type(error).__name__} Try '{path} --help'."])


if __name__ == "__main__":
    main()
