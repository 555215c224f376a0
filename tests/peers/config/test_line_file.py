"""What a peer knows of its own line: its limit, and what was measured last."""

from math import inf
from types import SimpleNamespace

import pytest

from peers.config.line_file import FILE_NAME, keep, known_bandwidth
from swarmnet.resources.link_bandwidth import UNKNOWN, LinkBandwidth


def config(state, upload: int | None = None):
    return SimpleNamespace(state=state, limits=SimpleNamespace(upload=upload))


def test_a_limit_bounds_what_was_measured_and_without_either_nothing_is_known(tmp_path):
    assert known_bandwidth(config(tmp_path)) == UNKNOWN
    assert known_bandwidth(config(tmp_path, 250_000)) == LinkBandwidth(250_000, inf)
    keep(tmp_path, LinkBandwidth(1_250_000.0, 12_500_000.0))
    assert known_bandwidth(config(tmp_path)) == LinkBandwidth(1_250_000.0, 12_500_000.0)
    assert known_bandwidth(config(tmp_path, 250_000)) == LinkBandwidth(250_000, 12_500_000.0)
    assert known_bandwidth(config(tmp_path, 5_000_000)).up == 1_250_000.0


def test_nothing_is_written_where_no_peer_lives(tmp_path):
    keep(tmp_path / "nobody", LinkBandwidth(1.0, 1.0))
    assert not (tmp_path / "nobody").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"up": "fast"}', '{"up": NaN, "down": -1}', "7"])
def test_a_file_that_was_tampered_with_says_nothing(tmp_path, text):
    (tmp_path / FILE_NAME).write_text(text)
    assert known_bandwidth(config(tmp_path)) == UNKNOWN
