"""The command line. A command parses, calls and prints; it alone loads the heavy libraries it needs."""

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
"""Exit code of everything a person can cause and mend."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `swarmnet`; exits the process."""
    prepare_for_torch(os.environ)
    terminated: list[int] = []

    def as_interrupted(number: int, frame: FrameType | None) -> None:
        """SIGTERM takes the way of Ctrl+C, so that what was made for a while is removed, keys among it. A
        peer that runs has its own answer (process/process.py)."""
        terminated.append(number)
        interrupt = signal.getsignal(signal.SIGINT)
        if isinstance(interrupt, partial):  # asyncio's: it cancels what it runs.
            interrupt(number, frame)
        else:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, as_interrupted)
    if before[signal.SIGINT] is signal.SIG_IGN:  # In the background of a script, where a peer takes it, too:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio ends in order only with this one.
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
        # The reader of our output has left (`| head`): nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (typer.Abort, KeyboardInterrupt):
        result = 128 + signal.SIGINT  # as shells report it
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if terminated:
        result = 128 + terminated[0]
    sys.exit(result if isinstance(result, int) else 0)


def prepare_for_torch(environment: MutableMapping[str, str]) -> None:
    """Must come before torch is imported: OpenMP reads these once.

    Its threads otherwise spin while they wait, and the peers of one machine take each other's cores: four
    peers with two threads each on two cores did 7 steps in 34 s, with one thread each 378 in 50 s.
    `threads` of the peer file still decides how many torch uses.
    """
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("OMP_WAIT_POLICY", "passive")


def application() -> typer.Typer:
    """All commands."""
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
    """Commands of two words."""
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
    ordering = _group("Order something in a run of your own; all its peers see it, and that it is yours.")
    app.add_typer(_add(ordering, order), name="order")
    app.add_typer(_add(_group("Runs that want to be found."), registry), name="registry")
    app.add_typer(_add(_group("Look at configuration without starting anything."), config), name="config")
    measuring = _add(_group("Measure; each figure beside a baseline from the same run."), measure)
    app.add_typer(measuring, name="bench")


def _add(group: typer.Typer, commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
    for name, command in commands.items():
        group.command(name)(command)
    return group


def _group(help: str) -> typer.Typer:
    return typer.Typer(
        help=help,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def config_check(
    file: Annotated[Path, typer.Argument(help="A peer file, a run file or a published run.")],
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A run file's tokenizer.json. [default: beside it]")
    ] = None,
    start: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model it starts from. [default: beside it]")
    ] = None,
    settings: run.Settings = None,
) -> None:
    """Say whether a file is right: a peer file, a run file, or a published run."""
    from peers.tools.owner.run_check import check_file

    typer.echo(check_file(file, os.environ, run.overrides(settings), tokenizer, model.warn, start))


def config_explain(
    file: Annotated[Path | None, typer.Argument(help="A peer file, to show what it sets.")] = None,
    of_run: Annotated[bool, typer.Option("--run", help="A run file's keys instead.")] = False,
    settings: run.Settings = None,
) -> None:
    """Each key: type, default, meaning; with a peer file, the value that it gets."""
    from peers.config.explain import explain, explain_file

    if file is None and settings:
        raise UserError("--set changes what a peer file sets: name one, as in: config explain PEER.yaml")
    text = (
        explain_file(file, os.environ, run.overrides(settings))
        if file is not None
        else explain("run" if of_run else "peer")
    )
    typer.echo(text, nl=False)


def version() -> None:
    """Versions of this program, its wire format, and what it runs on."""
    from swarmnet.run.manifest import WIRE_VERSION

    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "hivemind"))
    typer.echo(
        f"swarmnet {metadata.version('swarmnet')}, wire version {WIRE_VERSION}; "
        f"{packages}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )


def _fail(problems: Sequence[str]) -> int:
    from peers.telemetry.console import printable

    for problem in problems:  # A run's owner wrote some of it.
        print(f"error: {printable(problem)}", file=sys.stderr)
    return ERROR_EXIT


def _usage(error: TyperException) -> int:
    """One line for a wrong command; the help text where there was no command at all."""
    lines = error.format_message().strip().splitlines()
    if len(lines) > 1:
        print("\n".join(lines), file=sys.stderr)
        return ERROR_EXIT
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "swarmnet"
    return _fail([f"{lines[0] if lines else type(error).__name__} Try '{path} --help'."])


if __name__ == "__main__":
    main()
