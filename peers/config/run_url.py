"""Read the texts by which a person names a run: a join link, or a URL.

A join link is one string with all that a newcomer needs: `swarmnet:RUN_ID@ADDRESS,ADDRESS`. A URL leads to a
published run (a JSON file that the run's owner has signed), which is fetched with limits of size and time.
The signature and, if given, the run id are checked."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO
from urllib.parse import SplitResult, urldefrag, urlsplit

from peers.config.errors import UserError
from peers.config.quantities import bootstrap_multiaddr
from peers.config.run_file import MAX_BOOTSTRAPS, RunFileError, SignedManifest, from_published
from swarmnet.identifiers import RunId
from swarmnet.membership.address_ranges import ip_of, is_public
from swarmnet.run.canonical_form import MANIFEST_LIMIT

SCHEMES = ("https", "http", "file")
FETCH_SECONDS = 20.0
"""Limit from the name lookup to the last byte: 64 KiB in this time are 26 kbit/s."""
ANSWER_SECONDS = 10.0
"""Maximum silence of the server."""
MAX_BYTES = 4 * MANIFEST_LIMIT
"""Maximum bytes of the file, as in `run_file.py`."""
_PART_BYTES = 16 * 1024

LINK_SCHEME = "swarmnet:"


@dataclass(frozen=True, slots=True)
class JoinLink:
    """A run, and the peers through which to find it."""

    run_id: RunId
    addresses: tuple[str, ...]
    """Multiaddrs that end in `/p2p/` and a peer id."""

    @property
    def text(self) -> str:
        """The link that `parse_join_link` reads."""
        return f"{LINK_SCHEME}{self.run_id}@{','.join(self.addresses)}"


def join_command(run_id: RunId, addresses: Sequence[str]) -> str:
    """Return the command with which a newcomer joins a run through these addresses."""
    return f"swarmnet join {JoinLink(run_id, tuple(addresses)).text}"


def parse_join_link(text: str) -> JoinLink | None:
    """Return the join link in `text`; None if it is another text. Raises UserError for a broken link."""
    if not text.startswith(LINK_SCHEME):
        return None
    run_id, _, addresses_text = text.removeprefix(LINK_SCHEME).partition("@")
    if not re.fullmatch(r"[0-9a-f]{64}", run_id):
        raise UserError(
            f"{text[:80]!r}: after `{LINK_SCHEME}` come the 64 digits of the run id; copy the whole link"
        )
    addresses = tuple(filter(None, addresses_text.split(",")))
    if not 1 <= len(addresses) <= MAX_BOOTSTRAPS:
        raise UserError(
            f"{text[:80]!r}: a link names 1 to {MAX_BOOTSTRAPS} addresses after `@`, and this one has "
            f"{len(addresses)}; copy the whole link again"
        )
    try:
        return JoinLink(RunId(run_id), tuple(map(bootstrap_multiaddr, addresses)))
    except ValueError as error:
        raise UserError(f"the link is not whole: {error}; copy it again") from None


def is_url(text: str) -> bool:
    """Return whether the text starts with a URL scheme."""
    return re.match(r"[a-z][a-z0-9+.-]*://", text) is not None


def without_secret(url: str) -> str:
    """Return the URL without user and password, for people, logs and reports."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}" if separator else url


def fetch_run(url: str) -> SignedManifest:
    """Return the published run at `url`. After `#` the URL may name the run id, which is then required.
    Raises UserError.

    Plain http is safe: the owner's signature and the run id prove what the run is, regardless of the sender.
    """
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
            f"{url}: the part after # is {fragment[:80]!r}; write the run id there, 64 hexadecimal digits"
        )
    raw = _fetch(address)
    try:
        return from_published(raw, address, RunId(fragment) if fragment else None)
    except RunFileError as error:
        raise UserError(
            f"{error}; ask the person who gave you the URL for the run id and a new link"
        ) from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows the redirects that `may_redirect` allows."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the request for the new URL. Raises HTTPError if `may_redirect` forbids the redirect."""
        if not may_redirect(req.full_url, newurl):
            reason = f"{msg}, and leads to {newurl[:200]}, which is not followed (type it, if you know it)"
            raise urllib.error.HTTPError(req.full_url, code, reason, headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def may_redirect(before: str, after: str) -> bool:
    """Return whether a request for the URL `before` may be redirected to the URL `after`.

    Allowed are https URLs on the public internet, and URLs on the same server. The author of a URL must not
    choose what this machine requests from its own network. Blocking: looks up the name of the server.
    """
    old, new = urlsplit(before), urlsplit(after)
    is_same_server = (old.scheme, old.netloc) == (new.scheme, new.netloc)
    return is_same_server or (new.scheme == "https" and _is_on_the_internet(new))


def _is_on_the_internet(url: SplitResult) -> bool:
    """Return False if an address of the host is not public: this machine, or a private network. True also if
    the host has no address, because the request then fails without contacting any machine."""
    try:
        results = socket.getaddrinfo(url.hostname, url.port or 443, type=socket.SOCK_STREAM)
    except OSError:
        return True
    hosts = [str(socket_address[0]) for *_, socket_address in results]
    ips = [ip_of(host.partition("%")[0]) for host in hosts]  # An IPv6 address may end in `%interface`.
    return all(ip is not None and is_public(ip) for ip in ips)


def _fetch(address: str) -> bytes:
    """Return the body at `address`, downloaded in a thread within FETCH_SECONDS. Raises UserError. A limit
    per read would not suffice: a server may send single bytes, and a name lookup has no limit."""
    done: Future[bytes] = Future()

    def download_in_thread() -> None:
        try:
            done.set_result(_download(address))
        except (UserError, OSError, ValueError, http.client.HTTPException) as error:
            done.set_exception(error)

    threading.Thread(target=download_in_thread, name="fetch", daemon=True).start()
    try:
        return done.result(FETCH_SECONDS)
    except TimeoutError:
        raise _too_slow_error(address) from None


def _too_slow_error(address: str) -> UserError:
    return UserError(f"{address}: is not downloaded after {FETCH_SECONDS:g} s; try again later")


def _download(address: str) -> bytes:
    """Return the body at `address`. Raises UserError if it fails or exceeds FETCH_SECONDS or MAX_BYTES."""
    deadline = time.monotonic() + FETCH_SECONDS
    parts: list[bytes] = []
    try:
        with urllib.request.build_opener(_Redirects).open(address, timeout=ANSWER_SECONDS) as answer:
            while part := answer.read1(_PART_BYTES):
                parts.append(part)
                if sum(map(len, parts)) > MAX_BYTES:
                    raise UserError(f"{address}: is longer than a published run may be ({MAX_BYTES} bytes)")
                if time.monotonic() > deadline:
                    raise _too_slow_error(address)
    except urllib.error.HTTPError as error:
        error.close()  # Otherwise its connection stays open until it is collected.
        raise UserError(
            f"{address}: the server responds {error.code} {error.reason}; check the URL"
        ) from None
    except urllib.error.URLError as error:
        raise UserError(f"{address}: cannot be fetched: {error.reason}") from None
    except OSError as error:
        raise UserError(f"{address}: cannot be fetched: {error.strerror or 'no answer in time'}") from None
    except (ValueError, http.client.InvalidURL) as error:
        raise UserError(f"{address}: is no URL: {error}") from None
    except http.client.HTTPException as error:
        raise UserError(
            f"{address}: the response is not from a web server ({type(error).__name__}); check the port"
        ) from None
    return b"".join(parts)
