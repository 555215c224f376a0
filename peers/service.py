"""A systemd user unit for a peer file: it starts with the machine, and again after a fault."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.config.peer_file import PeerFile
from peers.errors import UserError
from peers.files import write_atomically

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


def service_of(file: Path, config: PeerFile, program: Sequence[str], home: Path) -> Service:
    """`program`: what starts swarmnet; `home`: where systemd looks for a user's units."""
    name = f"swarmnet-{re.sub(r'[^A-Za-z0-9_.-]+', '-', config.name).strip('-.') or 'peer'}.service"
    command = " ".join(map(_quoted, [*program, "run", str(file.absolute())]))
    text = f"""# Written by `swarmnet service install`.
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
    return Service(name, home / name, text)


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


def install(service: Service) -> list[str]:
    """Write the unit and start it where that can be done; lines for people."""
    write_atomically(service.path, service.text.encode())
    told = [f"wrote    {service.path}"]
    commands = [["daemon-reload"], ["enable", "--now", "--no-block", service.name]]
    told += _run(commands)
    told.append(f"logs     journalctl --user -u {service.name} -f")
    told.append("at boot  loginctl enable-linger    (else it starts when you log in)")
    return told


def uninstall(service: Service) -> list[str]:
    """Stop and remove the unit; the peer's own files stay."""
    if not service.path.exists():
        raise UserError(f"{service.path}: is not there; `swarmnet service install PEER.yaml` would write it")
    told = _run([["disable", "--now", "--no-block", service.name]])
    try:
        service.path.unlink()
    except OSError as error:
        raise UserError(f"{service.path}: cannot be removed: {error.strerror}") from None
    return [*told, f"removed  {service.path}", *_run([["daemon-reload"]])]


def _run(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run what can be run now, and say what a person has to."""
    can = user_manager_answers()
    told = []
    for command in commands:
        line = "systemctl --user " + " ".join(command)
        if not can:
            told.append(f"to do    {line}    (no user manager answers here)")
            continue
        code, said = systemctl(*command)
        told.append(f"ran      {line}" if code == 0 else f"failed   {line}: {said[:300]}")
    return told


def status(service: Service) -> list[str]:
    """Lines for people."""
    if not service.path.exists():
        return [f"{service.name}: not installed ({service.path} is not there)"]
    code, said = systemctl("is-active", service.name)
    return [f"{service.name}: {said or ('active' if code == 0 else 'unknown')} ({service.path})"]
