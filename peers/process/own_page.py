"""The page of this computer: what its worker does and has contributed, with its pause and its limits.

The page sends the requests of the control socket through a server on loopback (`local_server.py`). Its
address contains a secret, the token. Other users could read it in the process list, so a browser is given a
file in the state folder, which leads to the address.
"""

from __future__ import annotations

import secrets
from importlib.resources import files
from typing import Any

from peers.config.atomic_files import write_atomically
from peers.config.peer_file import PeerFile
from peers.config.quantities import split_host_and_port
from peers.runtime.control_server import Control, Request
from peers.runtime.http_server import HttpResponse
from peers.runtime.local_server import LocalServer

FILE_NAME = "page.html"
"""File in the state folder that leads a browser to the page; only the user can read it."""
ALLOWED = ("status", "credit", "limit", "pause", "resume")
"""Control requests that the page may send."""
FILES = (
    ("peers.process", "own_page.html"),
    ("peers.process", "own_page.css"),
    ("peers.process", "own_page.js"),
    ("peers.stageless.observer", "page.css"),
    ("peers.stageless.observer", "functions.js"),
)
"""Package and name of the files of the page."""
TOKEN_BYTES = 24
ICON = b"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" fill="#2f7d5b">
<circle cx="8" cy="8" r="5"/></svg>"""


class OwnPage:
    """Serves the page of one worker until closed."""

    def __init__(self, config: PeerFile, control: Control) -> None:
        """Start the server at `page` of the peer file, and write the file for browsers. Must be called on the
        event loop. Raises UserError if no port is free or the file cannot be written."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._file = config.state / FILE_NAME
        self._server = LocalServer(
            address=split_host_and_port(config.page),
            files=page_files(),
            token=token,
            execute=control.execute,
            allowed=ALLOWED,
        )
        self.url = f"{self._server.url}/"
        self.secret_url = f"{self.url}#{token}"
        """The address that the user opens."""
        refresh = f'<meta http-equiv="refresh" content="0;url={self.secret_url}">'
        lead = f'<!DOCTYPE html><meta charset="utf-8">{refresh}'
        try:
            write_atomically(self._file, lead.encode(), private=True)
        except BaseException:
            self._server.close()
            raise

    async def answer(self, _request: Request) -> dict[str, Any]:
        """Answer the control request `page`: the address with its token, and the file for a browser."""
        return {"url": self.secret_url, "file": str(self._file)}

    def close(self) -> None:
        """Stop the server and remove the file."""
        self._server.close()
        self._file.unlink(missing_ok=True)


def page_files() -> dict[str, HttpResponse]:
    """Return the files of the page by path. Its style and some functions are those of the observer's page."""
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    found = {"/icon.svg": HttpResponse(200, "image/svg+xml", ICON)}
    for package, name in FILES:
        kind = f"{kinds[name.rpartition('.')[2]]}; charset=utf-8"
        path = "/" if name.endswith(".html") else f"/{name}"
        found[path] = HttpResponse(200, kind, files(package).joinpath(name).read_bytes())
    return found
