"""A systemd user unit for a peer file: it starts with the machine, and again after a fault."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.config.atomic_files import is_there, write_atomically
from peers.config.peer_file import PeerFile
from peers.errors import UserError
from peers.runtime.state_lock import is_held

WRITTEN = "# Written by `swarmnet service install`."
"""The first line of its units."""
COMMAND_SECONDS = 30.0
"""`systemctl stop` waits for the peer to leave politely; it is asked without waiting."""
STOP_MARGIN_SECONDS = 15.0
"""Besides the peer's own time to finish, before systemd kills it."""


@dataclass(frozen=True, slots=True)
class Service:
    """The unit of one peer file."""

    name: str
    """`swarmnet-NAME.service`."""
    path: Path
    text: str
    file: Path
    """The peer file."""
    state: Path
    """Folder of that peer."""


@dataclass(frozen=True, slots=True)
class Done:
    """What was done about a unit."""

    lines: list[str]
    """For people."""
    ok: bool
    """Whether no step failed; one that a person has to do has not."""


def service_of(file: Path, config: PeerFile, program: Sequence[str], home: Path) -> Service:
    """`program`: what starts swarmnet; `home`: where systemd looks for a user's units."""
    name = f"swarmnet-{re.sub(r'[^A-Za-z0-9_.-]+', '-', config.name).strip('-.') or 'peer'}.service"
    command = " ".join(map(_quoted, [*program, "run", str(file.absolute())]))
    text = f"""{WRITTEN}
[Unit]
Description=swarmnet {config.role} {_plain(config.name)}
Documentation=https://www.freedesktop.org/software/systemd/man/systemd.service.html
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=600
StartLimitBurst=10

[Service]
Type=exec
ExecStart={command}
WorkingDirectory={_escaped(str(file.absolute().parent))}
Environment=SWARMNET__LOG=json
# 0: told to leave. 2: a mistake in the file, which starting again does not mend.
Restart=on-failure
RestartPreventExitStatus=2
RestartSec=10
KillSignal=SIGTERM
KillMode=mixed
TimeoutStopSec={config.drain_seconds + STOP_MARGIN_SECONDS:.0f}
Nice=10
NoNewPrivileges=true

[Install]
WantedBy=default.target
"""
    return Service(name, home / name, text, file.absolute(), config.state)


def other_file(service: Service) -> str | None:
    """What the unit of this name starts, if that is not this peer: two peers may have the same `name`. None:
    it is not there, it is of this peer, or of a peer file that is gone. Raises UserError."""
    started = _started(service.path)
    if started is None:
        return None
    file = _file_in(started)
    if file is None:
        return started or "no ExecStart"
    ours = not is_there(file) or file.resolve() == service.file.resolve()
    return None if ours else str(file)


def started_by(unit: Path) -> Path | None:
    """The peer file of a unit; None: it names none. Raises UserError."""
    return _file_in(_started(unit) or "")


def _started(unit: Path) -> str | None:
    """What a unit starts; None: it is not there. Raises UserError."""
    try:
        text = unit.read_text(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{unit}: cannot be read: {error.strerror}") from None
    return next((line for line in text.splitlines() if line.startswith("ExecStart=")), "")


def _file_in(started: str) -> Path | None:
    found = _PEER_FILE.search(started)
    return Path(_unquoted(found[1])) if found is not None else None


_PEER_FILE = re.compile(r' run ("(?:[^"\\]|\\.)*"|[^\s"]+)(?= |$)')
"""In ExecStart, as `service_of` writes it."""


def _unquoted(argument: str) -> str:
    """What `_quoted` was given."""
    bare = re.sub(r"\\(.)", r"\1", argument[1:-1]) if argument.startswith('"') else argument
    return bare.replace("$$", "$").replace("%%", "%")


def _refuse_other(service: Service, instead: str) -> None:
    """Raises UserError rather than touch the unit of another peer."""
    other = other_file(service)
    if other is not None:
        raise UserError(f"{service.path} starts another peer ({other}), not {service.file}; {instead}")


def _shell(path: Path) -> str:
    return shlex.quote(str(path))


def _plain(text: str) -> str:
    return "".join(c for c in text if c.isprintable()).replace("%", "%%")


def _escaped(text: str) -> str:
    if not text.isprintable():
        raise UserError(f"{text!r}: a unit cannot hold this path; move the peer file elsewhere")
    return text.replace("%", "%%")


def _quoted(argument: str) -> str:
    """For ExecStart: `%`, `$`, quotes and backslashes mean something there."""
    escaped = _escaped(argument).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"' if re.search(r"[^\w@%+=:,./$-]", argument) else escaped


def unit_home(environment: Mapping[str, str]) -> Path:
    """Where a user's own units lie."""
    home = Path(environment.get("HOME") or Path.home())
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "systemd" / "user"


def needs_systemd() -> None:
    """Raises UserError where there is none."""
    if shutil.which("systemctl") is None:
        raise UserError(
            "this system has no systemd (systemctl is not there); start the peer at log-in yourself with: "
            "swarmnet run PEER.yaml"
        )


def systemctl(*arguments: str) -> tuple[int, str]:
    """Exit code and what it said, on one line. Not there or silent: code 1."""
    try:
        done = subprocess.run(
            ["systemctl", "--user", *arguments], capture_output=True, text=True, timeout=COMMAND_SECONDS,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def user_manager_answers() -> bool:
    """Whether `systemctl --user` reaches a manager: over ssh without a session, or in a container, it does
    not."""
    return systemctl("list-units", "--no-legend", "--no-pager", "swarmnet-*")[0] == 0


def install(service: Service) -> Done:
    """Write the unit and start it where that can be done. UserError where another peer has it, and where the
    peer runs: its unit would end at the lock, with the exit code after which systemd does not try again."""
    _refuse_other(service, "give this peer another `name`")
    if is_held(service.state):
        raise UserError(
            f"the peer of {service.state} runs: stop it first with `swarmnet leave {_shell(service.state)}`, "
            f"then install: `swarmnet service install {_shell(service.file)}`"
        )
    write_atomically(service.path, service.text.encode())
    told = [f"wrote    {service.path}"]
    commands = [["daemon-reload"], ["enable", "--now", "--no-block", service.name]]
    ran = _run(commands)
    told += ran.lines
    told.append(f"logs     journalctl --user -u {service.name} -f")
    told.append("at boot  loginctl enable-linger    (else it starts when you log in)")
    return Done(told, ran.ok)


def uninstall(service: Service) -> Done:
    """Stop and remove the unit; the peer's own files stay. UserError where it is another peer's."""
    if not service.path.exists():
        raise UserError(f"{service.path}: is not there; `swarmnet service install PEER.yaml` would write it")
    _refuse_other(service, "name that peer file to remove it")
    return remove(service.path)


def remove(unit: Path) -> Done:
    """Stop and remove a unit, whosever it is. UserError where it cannot be removed."""
    stopped = _run([["disable", "--now", "--no-block", unit.name]])
    try:
        unit.unlink()
    except OSError as error:
        raise UserError(f"{unit}: cannot be removed: {error.strerror}") from None
    reloaded = _run([["daemon-reload"]])
    lines = [*stopped.lines, f"removed  {unit}", *reloaded.lines]
    return Done(lines, stopped.ok and reloaded.ok)


def _run(commands: Sequence[Sequence[str]]) -> Done:
    """Run what can be run now, and say what a person has to."""
    can, ok = user_manager_answers(), True
    told = []
    for command in commands:
        line = "systemctl --user " + " ".join(command)
        if not can:
            told.append(f"to do    {line}    (no user manager answers here)")
            continue
        code, said = systemctl(*command)
        told.append(f"ran      {line}" if code == 0 else f"failed   {line}: {said[:300]}")
        ok = ok and code == 0
    return Done(told, ok)


def status(service: Service) -> list[str]:
    """Lines for people."""
    if not service.path.exists():
        return [f"{service.name}: not installed ({service.path} is not there)"]
    other = other_file(service)
    if other is not None:
        return [f"{service.name}: not installed ({service.path} starts another peer: {other})"]
    code, said = systemctl("is-active", service.name)
    return [f"{service.name}: {said or ('active' if code == 0 else 'unknown')} ({service.path})"]
