"""A web server on loopback that sends no parts of files."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Self

BLOCK = 1 << 20


class WebServer:
    """Serves `files` and answers `redirects`, both by path; lists what it was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.asked: list[str] = []
        self.sent = 0
        self.sized = True
        """Whether answers say how long they are."""

    def __enter__(self) -> Self:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Nothing on standard error."""

            def do_GET(self) -> None:
                owner.asked.append(self.path)
                data = owner.files.get(self.path, b"")
                moved = owner.redirects.get(self.path)
                self.send_response(302 if moved else 200 if self.path in owner.files else 404)
                if moved:
                    self.send_header("Location", moved)
                if owner.sized:
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command == "GET":
                    self._send(data)

            do_HEAD = do_GET  # noqa: N815 - what http.server calls

            def _send(self, data: bytes) -> None:
                try:
                    for start in range(0, len(data), BLOCK):
                        self.wfile.write(data[start : start + BLOCK])
                        owner.sent += BLOCK
                except OSError:
                    pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
