"""A published run from a URL: bounded in size and time, checked by its signature and, if given, its id."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from typing import IO
from urllib.parse import SplitResult, urldefrag, urlsplit

from peers.config.run_file import RunFileError, SignedManifest, from_published
from peers.errors import UserError
from swarmnet.identifiers import RunId
from swarmnet.membership.address_ranges import ip_of, is_public
from swarmnet.run.manifest import MANIFEST_LIMIT

SCHEMES = ("https", "http", "file")
FETCH_SECONDS = 20.0
"""From looking up the server's name to the last byte: 64 KiB in it are 26 kbit/s."""
ANSWER_SECONDS = 10.0
"""Longest silence of the server."""
MAX_BYTES = 4 * MANIFEST_LIMIT
"""As for a file (run_file.py)."""
_PART_BYTES = 16 * 1024


def is_url(text: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*://", text) is not None


def without_secret(url: str) -> str:
    """For people, logs and reports: the user and the password that stand before the host are left out."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}" if separator else url


def fetch_run(url: str) -> SignedManifest:
    """The published run at `url`; `#RUN_ID` behind it says which it must be. Raises UserError.

    Plain http is good enough: the owner's signature and the id say what the run is, not who sent it."""
    try:
        address, fragment = urldefrag(url)
        scheme = urlsplit(address).scheme
    except ValueError as error:
        raise UserError(f"{url}: is no URL: {error}") from None
    if scheme not in SCHEMES:
        raise UserError(
            f"{url}: only {', '.join(SCHEMES)} URLs are fetched; download the file and join from it"
        )
    if fragment and not re.fullmatch(r"[0-9a-f]{64}", fragment):
        raise UserError(
            f"{url}: behind # stands {fragment[:80]!r}; expected the run id, 64 hexadecimal digits"
        )
    raw = _fetch(address)
    try:
        return from_published(raw, address, RunId(fragment) if fragment else None)
    except RunFileError as error:
        raise UserError(f"{error}; ask whoever gave you the URL for the run id and a new link") from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows what `may_follow` allows."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str,
        headers: http.client.HTTPMessage, newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        """See HTTPRedirectHandler. Raises HTTPError for what is not followed."""
        if not may_follow(req.full_url, newurl):
            told = f"{msg}, and leads to {newurl[:200]}, which is not followed (type it, if you know it)"
            raise urllib.error.HTTPError(req.full_url, code, told, headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def may_follow(before: str, after: str) -> bool:
    """Return whether a request for the URL `before` may be redirected to the URL `after`.

    It may to https on the open internet, and to the server that was asked already: the author of a URL must
    not choose what this machine asks of its own network. Blocking: looks up the name of the server."""
    old, new = urlsplit(before), urlsplit(after)
    same = (old.scheme, old.netloc) == (new.scheme, new.netloc)
    return same or (new.scheme == "https" and _on_the_internet(new))


def _on_the_internet(url: SplitResult) -> bool:
    """False if the host is this machine or one of its networks. What has no address will fail by itself."""
    try:
        found = socket.getaddrinfo(url.hostname, url.port or 443, type=socket.SOCK_STREAM)
    except OSError:
        return True
    ips = [ip_of(str(one[4][0]).partition("%")[0]) for one in found]
    return all(ip is not None and is_public(ip) for ip in ips)


def _fetch(address: str) -> bytes:
    """In a thread of its own: a server that sends a byte now and then keeps each single read below its limit,
    and nothing else ends a look-up of its name."""
    done: Future[bytes] = Future()

    def fetch() -> None:
        try:
            done.set_result(_download(address))
        except (UserError, OSError, ValueError, http.client.HTTPException) as error:
            done.set_exception(error)

    threading.Thread(target=fetch, name="fetch", daemon=True).start()
    try:
        return done.result(FETCH_SECONDS)
    except TimeoutError:
        raise _too_slow(address) from None


def _too_slow(address: str) -> UserError:
    return UserError(f"{address}: is not there after {FETCH_SECONDS:g} s; try again later")


def _download(address: str) -> bytes:
    """Raises UserError."""
    until = time.monotonic() + FETCH_SECONDS
    parts: list[bytes] = []
    try:
        with urllib.request.build_opener(_Redirects).open(address, timeout=ANSWER_SECONDS) as answer:
            while part := answer.read1(_PART_BYTES):
                parts.append(part)
                if sum(map(len, parts)) > MAX_BYTES:
                    raise UserError(f"{address}: is longer than a published run may be ({MAX_BYTES} bytes)")
                if time.monotonic() > until:
                    raise _too_slow(address)
    except urllib.error.HTTPError as error:
        error.close()  # Else its connection is open until somebody collects it.
        raise UserError(
            f"{address}: the server answers {error.code} {error.reason}; is the URL right?"
        ) from None
    except urllib.error.URLError as error:
        raise UserError(f"{address}: cannot be fetched: {error.reason}") from None
    except OSError as error:
        raise UserError(f"{address}: cannot be fetched: {error.strerror or 'no answer in time'}") from None
    except (ValueError, http.client.InvalidURL) as error:
        raise UserError(f"{address}: is no URL: {error}") from None
    except http.client.HTTPException as error:
        raise UserError(
            f"{address}: what answers there is no web server ({type(error).__name__}); is the port right?"
        ) from None
    return b"".join(parts)
