"""Errors that a person can cause. The command line prints each as one line and exits with code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime


class UserError(Exception):
    """A mistake in a command, a file or the environment. The message says what would be right."""


class ConfigError(UserError):
    """Wrong configuration. Each problem is one line: `file:line: key: what is wrong, what would be right`."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        super().__init__(self.problems[0] + more)


class UnknownRun(UserError):
    """No reachable peer has the manifest of a run. The run id is most likely wrong."""


class IdentityInUse(UserError):
    """Another process with this identity is still running. `started`: Unix time of its start."""

    def __init__(self, started: float) -> None:
        when = datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        super().__init__(f"another process uses this identity (started at {when})")


class DevicesLost(Exception):
    """A device process of this peer has ended or hangs; the message says which and why. The parts of the
    stage on the other devices are useless without it, so the peer loads its stage again."""


class NoAnswer(Exception):
    """The swarm did not answer. The message names what the peer waited for."""


@contextmanager
def as_user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of the layers below, whose message is already for people, into UserError."""
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from None


def how_to_install(extra: str) -> str:
    """Return the install command for an extra. It installs only packages whose hashes are in the lock file,
    into the running environment."""
    return f"in this repository's folder, VENV={sys.prefix} scripts/setup {extra}"
