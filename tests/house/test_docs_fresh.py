"""The generated pages are what the program says of itself."""

from pathlib import Path

import pytest

from peers.config import explain as config_explain
from peers.stageless.observer import swarm_metrics as metrics
from peers.telemetry import event_page

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "document"),
    [
        ("configuration.md", config_explain.document),
        ("metrics.md", metrics.document),
        ("events.md", event_page.document),
    ],
)
def test_the_page_is_fresh(page, document):
    assert (DOCS / page).read_text() == document(), "run scripts/docs"


@pytest.mark.parametrize("file", [config_explain.PeerFile, config_explain.Manifest])
def test_every_key_has_a_meaning(file):
    silent = [line.name for line in config_explain.lines(file) if not line.meaning]
    assert not silent, "write a docstring below the field of each: it is the key's meaning on the page"
