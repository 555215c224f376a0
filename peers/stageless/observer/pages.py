"""The observer's pages: HTML, JSON, pictures, metrics, service discovery and health."""

from __future__ import annotations

import html
import json
import threading
from collections.abc import Callable, Sequence
from importlib.resources import files

from prometheus_client import CONTENT_TYPE_LATEST

from peers.runtime.http_server import HttpResponse, Page, PageRequest, Probe, probed
from peers.stageless.observer.page_json import Board
from peers.stageless.observer.swarm_metrics import SwarmMetrics

JSON = "application/json; charset=utf-8"
CSS = "text/css; charset=utf-8"
JAVASCRIPT = "text/javascript; charset=utf-8"
SVG = "image/svg+xml"
ICON = b"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" fill="#2f7d5b">
<circle cx="4" cy="4" r="2.5"/><circle cx="12" cy="5" r="2.5"/><circle cx="7" cy="12" r="2.5"/></svg>"""
PREVIEW_SECONDS = 60.0
"""A preview is drawn at most this often, because strangers ask for it."""
PREVIEW_MARK = "<!-- preview -->"
"""Place in `page.html` for the fields that other sites show beside a link."""
MAX_PREVIEW_TEXT = 300
NOT_KNOWN = HttpResponse(503, JSON, b'{"error": "the run is not known yet: fetching its manifest"}')


def page_file(name: str) -> str:
    """Return a file of the observer's page, such as `page.css`, which other pages use too."""
    return files("peers.stageless.observer").joinpath(name).read_text(encoding="utf-8")


def pages(
    board: Callable[[], Board | None],
    metrics: SwarmMetrics,
    targets: Sequence[str],
    healthy: Probe,
) -> dict[str, Page]:
    """Return the observer's pages by path. `board` returns the page's data, or None until the run is known.
    `targets` are addresses that `/sd` (service discovery) gives to Prometheus. `healthy` is asked for
    `/healthz`. Of the swarm, the HTML contains only what link previews show; it fetches `/swarm.json`."""
    page, preview = page_file("page.html"), _PreviewCache()
    styles = HttpResponse(200, CSS, page_file("page.css").encode())
    functions = HttpResponse(200, JAVASCRIPT, page_file("functions.js").encode())
    script = HttpResponse(200, JAVASCRIPT, page_file("page.js").encode())

    def start(request: PageRequest) -> HttpResponse:
        """Return the page with the fields for link previews."""
        current = board()
        fields = "" if current is None else _preview_fields(current, request.site)
        return HttpResponse(200, "text/html; charset=utf-8", page.replace(PREVIEW_MARK, fields).encode())

    def swarm(request: PageRequest) -> HttpResponse:
        current = board()
        if current is None:
            return NOT_KNOWN
        return HttpResponse(200, JSON, current.answer(request.query.get("search", "")))

    def picture(_: PageRequest) -> HttpResponse:
        current = board()
        return NOT_KNOWN if current is None else HttpResponse(200, "image/png", preview.draw(current))

    def code(_: PageRequest) -> HttpResponse:
        current = board()
        if current is None or current.code is None:
            return HttpResponse(404, "text/plain; charset=utf-8", b"no code: scripts/setup page\n")
        return HttpResponse(200, SVG, current.code)

    return {
        "/": start,
        "/page.css": lambda _: styles,
        "/functions.js": lambda _: functions,
        "/page.js": lambda _: script,
        "/icon.svg": lambda _: HttpResponse(200, SVG, ICON),
        "/join.svg": code,
        "/preview.png": picture,
        "/swarm.json": swarm,
        "/metrics": lambda _: HttpResponse(200, CONTENT_TYPE_LATEST, metrics.text()),
        "/sd": lambda _: HttpResponse(200, JSON, _discovery(board(), targets)),
        "/healthz": lambda _: probed(healthy),
    }


class _PreviewCache:
    """The newest preview picture. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drawn_at = float("-inf")
        self._picture = b""

    def draw(self, board: Board) -> bytes:
        """Return the picture of the board, at most PREVIEW_SECONDS old by the board's own time."""
        with self._lock:
            if board.snapshot.at >= self._drawn_at + PREVIEW_SECONDS:
                self._picture, self._drawn_at = board.preview(), board.snapshot.at
            return self._picture


def _preview_fields(board: Board, site: str) -> str:
    """Return the HTML fields from which other sites make a preview (https://ogp.me). `site` is the beginning
    of the page's address."""
    fields = {
        "og:type": "website",
        "og:site_name": "swarmnet",
        "og:title": f"Train {board.signed.manifest.name} together",
        "og:description": board.summary(),
        "og:image": f"{site}/preview.png",
        "og:image:width": "1200",
        "og:image:height": "630",
        "og:image:alt": "The run's progress and its loss",
        "twitter:card": "summary_large_image",
    }
    description = html.escape(fields["og:description"][:MAX_PREVIEW_TEXT])
    lines = [f'<meta name="description" content="{description}">']
    for name, value in fields.items():
        lines.append(f'<meta property="{name}" content="{html.escape(value[:MAX_PREVIEW_TEXT])}">')
    return "\n".join(lines)


def _discovery(board: Board | None, targets: Sequence[str]) -> bytes:
    """Return the response for Prometheus' `http_sd_configs`."""
    labels = {"run": board.signed.run_id} if board is not None else {}
    return json.dumps([{"targets": list(targets), "labels": labels}] if targets else []).encode()
