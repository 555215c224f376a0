"""The observer's pages: HTML, its JSON, metrics, service discovery and health."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files

from prometheus_client import CONTENT_TYPE_LATEST

from peers.runtime.http_server import HttpResponse, Page, Probe, probed
from peers.stageless.observer.page_json import Board
from peers.stageless.observer.swarm_metrics import SwarmMetrics

JSON = "application/json; charset=utf-8"
ICON = b"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" fill="#2f7d5b">
<circle cx="4" cy="4" r="2.5"/><circle cx="12" cy="5" r="2.5"/><circle cx="7" cy="12" r="2.5"/></svg>"""


def pages(
    board: Callable[[], Board | None],
    metrics: SwarmMetrics,
    targets: Sequence[str],
    healthy: Probe,
) -> dict[str, Page]:
    """Return the observer's pages by path. `board` returns the page's data, or None until the run is known.
    `targets` are addresses that `/sd` (service discovery) gives to Prometheus. `healthy` is asked for
    `/healthz`. The HTML has no data of the swarm; it fetches `/swarm.json`."""
    html = files("peers.stageless.observer").joinpath("page.html").read_bytes()

    def swarm(query: Mapping[str, str]) -> HttpResponse:
        current = board()
        if current is None:
            return HttpResponse(503, JSON, b'{"error": "the run is not known yet: fetching its manifest"}')
        return HttpResponse(200, JSON, current.answer(query.get("search", "")))

    return {
        "/": lambda _: HttpResponse(200, "text/html; charset=utf-8", html),
        "/icon.svg": lambda _: HttpResponse(200, "image/svg+xml", ICON),
        "/swarm.json": swarm,
        "/metrics": lambda _: HttpResponse(200, CONTENT_TYPE_LATEST, metrics.text()),
        "/sd": lambda _: HttpResponse(200, JSON, _discovery(board(), targets)),
        "/healthz": lambda _: probed(healthy),
    }


def _discovery(board: Board | None, targets: Sequence[str]) -> bytes:
    """Return the response for Prometheus' `http_sd_configs`."""
    labels = {"run": board.signed.run_id} if board is not None else {}
    return json.dumps([{"targets": list(targets), "labels": labels}] if targets else []).encode()
