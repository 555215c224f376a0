"""What a person can cause. The command line prints these as one line and exits with code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime


class UserError(Exception):
    """A mistake in a command, a file or the surroundings; the message says what would be right."""


class ConfigError(UserError):
    """Wrong configuration. Each problem is one line: `file:line: key: what is wrong, what would be right`."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        super().__init__(self.problems[0] + more)


class UnknownRun(UserError):
    """A run whose manifest nobody has: most likely its id is not right."""


class IdentityInUse(UserError):
    """An earlier process with this identity still runs. `started`: Unix time at which it started."""

    def __init__(self, started: float) -> None:
        when = datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        super().__init__(f"another process uses this identity (started at {when})")


class DevicesLost(Exception):
    """A process of a peer's devices has ended or hangs; the message says which and why. What the others hold
    is of no use without it: the peer takes its stage up again."""


class NoAnswer(Exception):
    """The swarm did not answer; the message says for whom it was waited."""


@contextmanager
def as_user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of the layers below, whose message is already for people, into UserError."""
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from None


def how_to_install(extra: str) -> str:
    """What to type: only what the lock has a hash of, into the environment that runs this."""
    return f"in this repository's folder, VENV={sys.prefix} scripts/setup {extra}"
