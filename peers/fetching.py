"""A published run from a URL: bounded in size and time, checked by its signature and, if given, its id."""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from urllib.parse import urldefrag, urlsplit

from peers.errors import UserError
from peers.run_file import RunFileError, SignedManifest, from_published
from swarmnet.identifiers import RunId
from swarmnet.manifest import MANIFEST_LIMIT

SCHEMES = ("https", "http", "file")
FETCH_SECONDS = 20.0
ANSWER_SECONDS = 10.0
"""Longest silence of the server."""
MOST_BYTES = 4 * MANIFEST_LIMIT
"""As for a file (run_file.py)."""
_PART_BYTES = 16 * 1024


def is_url(text: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*://", text) is not None


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


def _fetch(address: str) -> bytes:
    until = time.monotonic() + FETCH_SECONDS
    parts: list[bytes] = []
    try:
        with urllib.request.urlopen(address, timeout=ANSWER_SECONDS) as answer:
            while part := answer.read(_PART_BYTES):
                parts.append(part)
                if sum(map(len, parts)) > MOST_BYTES:
                    raise UserError(f"{address}: is longer than a published run may be ({MOST_BYTES} bytes)")
                if time.monotonic() > until:
                    raise UserError(f"{address}: is not there after {FETCH_SECONDS:g} s; try again later")
    except urllib.error.HTTPError as error:
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
