"""The command line. A command parses options, calls the code below, and prints. Each loads the heavy
libraries that it needs."""

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

from peers.cli import (
    control,
    course,
    doctor,
    join,
    lab,
    making,
    model,
    owner,
    run,
    top,
    uninstall,
)
from peers.errors import ConfigError, UserError

ERROR_EXIT = 2
"""Exit code of errors that the user can cause and correct."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `swarmnet`. Exits the process."""
    prepare_for_torch(os.environ)
    terminated: list[int] = []

    def as_interrupted(number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM like Ctrl+C, so that temporary files are removed, among them keys. A running peer
        has a handler of its own (`process/process.py`)."""
        terminated.append(number)
        interrupt = signal.getsignal(signal.SIGINT)
        if isinstance(interrupt, partial):  # asyncio's handler, which cancels its task.
            interrupt(number, frame)
        else:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, as_interrupted)
    if before[signal.SIGINT] is signal.SIG_IGN:  # In a script's background job. A peer handles it, too;
        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio ends cleanly only with this one.
    try:
        result = application()(
            args=list(arguments) if arguments is not None else None,
            prog_name="swarmnet",
            standalone_mode=False,
        )
        sys.stdout.flush()
    except ConfigError as error:
        sys.exit(_fail(error.problems))
    except UserError as error:
        sys.exit(_fail([str(error)]))
    except TyperException as error:
        sys.exit(_usage(error))
    except BrokenPipeError:
        # The reader of our output has ended (`| head`), so nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (typer.Abort, KeyboardInterrupt):
        result = 128 + signal.SIGINT  # As shells report it.
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if terminated:
        result = 128 + terminated[0]
    sys.exit(result if isinstance(result, int) else 0)


def prepare_for_torch(environment: MutableMapping[str, str]) -> None:
    """Set the environment of OpenMP, which reads it once. Called before torch is imported.

    By default its threads spin while they wait, and peers on one machine block each other. Four peers with
    two threads each on two cores did 7 steps in 34 s; with one thread each, 378 in 50 s. `threads` of the
    peer file still sets the number of torch's threads.
    """
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("OMP_WAIT_POLICY", "passive")


def application() -> typer.Typer:
    """Return the Typer application with all commands."""
    app = _group("Train one language model together over the internet, without a server.")
    commands: dict[str, Callable[..., None]] = {
        "run": run.run,
        "tokenizer": making.tokenizer,
        "index": making.index,
        "identity": making.identity,
        "publish": run.publish,
        "join": join.join,
        "pause": control.pause,
        "resume": control.resume,
        "leave": control.leave,
        "credit": control.credit,
        "top": top.top,
        "demo": run.demo,
        "doctor": doctor.doctor,
        "chaos": lab.chaos,
        "export": model.export,
        "generate": model.generate,
        "evaluate": model.evaluate,
        "simulate": lab.simulate,
        "plan": lab.plan,
        "orders": owner.show_orders,
        "invite": owner.invite,
        "report": owner.report,
        "uninstall": uninstall.uninstall,
        "version": version,
    }
    _add(app, commands)
    _add_groups(app)
    return app


def _add_groups(app: typer.Typer) -> None:
    """Add the commands of two words."""
    order: dict[str, Callable[..., None]] = {
        "pause": owner.pause,
        "resume": owner.resume,
        "checkpoint": owner.checkpoint,
        "ban": owner.ban,
        "unban": owner.unban,
        "withdraw": owner.withdraw,
        "revoke": owner.revoke,
        "rate": course.rate,
        "end": course.end,
    }
    registry: dict[str, Callable[..., None]] = {
        "list": owner.registry_list,
        "show": owner.registry_show,
    }
    config: dict[str, Callable[..., None]] = {"check": config_check, "explain": config_explain}
    measure: dict[str, Callable[..., None]] = {
        "contribution": lab.contribution,
        "group": lab.group,
        "paths": lab.paths,
        "memory": lab.memory,
        "training": lab.training,
        "learning": lab.learning,
    }
    ordering = _group("Give an order in a run that you own. All its peers obey it; your signature proves it.")
    app.add_typer(_add(ordering, order), name="order")
    app.add_typer(_add(_group("Find public runs."), registry), name="registry")
    app.add_typer(_add(_group("Check and explain configuration files."), config), name="config")
    measuring = _add(_group("Run benchmarks; each figure is shown with a baseline."), measure)
    app.add_typer(measuring, name="bench")


def _add(group: typer.Typer, commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
    """Add commands to a group."""
    for name, command in commands.items():
        group.command(name)(command)
    return group


def _group(help: str) -> typer.Typer:
    """Return an empty command group."""
    return typer.Typer(
        help=help,
        no_args_is_help=True,
        add_completion=False,
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

    typer.echo(check_file(file, os.environ, run.overrides(settings), tokenizer, model.warn, init_checkpoint))


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
    from swarmnet.run.manifest import WIRE_VERSION

    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "hivemind"))
    typer.echo(
        f"swarmnet {metadata.version('swarmnet')}, wire version {WIRE_VERSION}; "
        f"{packages}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )


def _fail(problems: Sequence[str]) -> int:
    """Print problems and return the exit code."""
    from peers.telemetry.console import printable

    for problem in problems:  # Some of it is from a run's owner, who is not trusted.
        print(f"error: {printable(problem)}", file=sys.stderr)
    return ERROR_EXIT


def _usage(error: TyperException) -> int:
    """Print one line for a wrong command, or the help text if there is no command, and return the exit
    code."""
    lines = error.format_message().strip().splitlines()
    if len(lines) > 1:
        print("\n".join(lines), file=sys.stderr)
        return ERROR_EXIT
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "swarmnet"
    return _fail([f"{lines[0] if lines else type(error).__name__} Try '{path} --help'."])


if __name__ == "__main__":
    main()
