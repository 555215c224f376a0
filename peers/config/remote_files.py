"""Open URLs with fsspec: set time limits, check redirects, and turn the errors of all its backends (HTTP, S3,
SFTP and others) into one kind."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from peers.config.run_url import may_redirect, without_secret

if TYPE_CHECKING:
    from aiohttp import ClientSession, TraceRequestRedirectParams

CONNECT_SECONDS, SILENCE_SECONDS = 10.0, 10.0
"""Time limits of a connection and of silence. A read without a response ends within half of `drain_seconds`
(20 s), so that Ctrl+C takes effect in time."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
"""Pauses between two attempts to reach a URL: the first and the maximum. Each pause is twice the one
before."""
_WEB = ("http", "https")


class RedirectRefused(OSError):
    """A web server redirects to a place that this machine must not request."""


def is_web(url: str) -> bool:
    """Return whether a URL is read over HTTP."""
    return urlsplit(url).scheme in _WEB


def fsspec_options(url: str, silence_seconds: float = SILENCE_SECONDS) -> dict[str, Any]:
    """Return fsspec's options for a URL: limits of time and redirects for http and https, none for other
    schemes. A read fails after `silence_seconds` without data. Raises ImportError without aiohttp."""
    if not is_web(url):
        return {}
    from aiohttp import ClientTimeout

    limits = ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=silence_seconds)
    return {"client_kwargs": {"timeout": limits}, "get_client": _open_session}


async def _open_session(**options: Any) -> ClientSession:  # noqa: ANN401 - what fsspec passes on
    """Return an aiohttp session that checks each redirect before it follows it."""
    from aiohttp import ClientSession, TraceConfig

    tracing = TraceConfig()
    tracing.on_request_redirect.append(_check_redirect)
    return ClientSession(trace_configs=[tracing], **options)


async def _check_redirect(
    _session: ClientSession, _context: SimpleNamespace, request: TraceRequestRedirectParams
) -> None:
    """Raise RedirectRefused if `may_redirect` forbids a redirect. aiohttp calls this before each redirect."""
    from yarl import URL

    headers, before = request.response.headers, request.url
    wanted = headers.get("Location") or headers.get("URI")
    if not wanted:
        return
    after = before.join(URL(wanted))
    if not await asyncio.to_thread(may_redirect, str(before), str(after)):
        request.response.close()
        raise RedirectRefused(
            f"the server redirects to {str(after.with_user(None))[:200]}, which is not followed: give that "
            "URL itself, if you know it"
        )


def lasting_cause(error: FileNotFoundError) -> OSError | None:
    """Return the error that fsspec hides in a FileNotFoundError, such as no connection or a refused
    redirect; None if the file is really absent."""
    cause = error.__cause__
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    return None if isinstance(cause, FileNotFoundError) else cause


def connect(
    url: str, failed: Callable[[str], Exception], silence_seconds: float = SILENCE_SECONDS, **options: object
) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. If the scheme is unknown or its package is
    not installed, raises the exception that `failed` makes of the reason."""
    import fsspec  # Installed with torch.

    try:
        files, root = fsspec.core.url_to_fs(url, **fsspec_options(url, silence_seconds), **options)
    except (ImportError, ValueError) as error:
        raise failed(f"{without_secret(url)} cannot be opened: {error}") from None
    return files, root.rstrip("/")


@contextmanager
def reached(url: str, failed: Callable[[str], Exception], *passed: type[Exception]) -> Iterator[None]:
    """Run the body of a `with` statement. Turn an exception of fsspec's backends into the one that `failed`
    makes of the reason. `passed` and absent files (FileNotFoundError) are raised unchanged. But a backend may
    report another failure as an absent file; that is treated as a failure. All exceptions are caught, because
    only an import of the backends (botocore, gcsfs, aiohttp, paramiko) could name theirs."""
    cause: Exception
    try:
        yield
        return
    except passed:
        raise
    except FileNotFoundError as error:
        hidden_cause = lasting_cause(error)
        if hidden_cause is None:
            raise
        cause = hidden_cause
    except Exception as error:  # noqa: BLE001 - see above
        cause = error
    raise failed(reason_of(cause).replace(url, without_secret(url))) from None


def reason_of(error: BaseException) -> str:
    """Return in one line why a URL cannot be read, from the exception of the attempt."""
    system_error = getattr(error, "os_error", error)  # aiohttp keeps the system's error there.
    if getattr(system_error, "errno", None) == errno.ECONNREFUSED:
        return "no response: connection refused"
    if isinstance(error, RedirectRefused):
        return str(error)
    if isinstance(error, TimeoutError) and not str(error):
        return "no response in time"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


Result = TypeVar("Result")


async def retry_until_reached(
    attempt: Callable[[], Awaitable[Result]], unreachable: type[Exception], notify: Callable[[str], None]
) -> Result:
    """Repeat `attempt` until it does not raise `unreachable`, and return its result. Pauses grow from 5 s to
    5 min, each reported to the user by `notify`. Other exceptions are raised."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await attempt()
        except unreachable as error:
            notify(f"{error}; trying again in {pause:.0f} s (Ctrl+C stops)")
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)
