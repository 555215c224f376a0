"""The map and the seeded swarms on which skipping is judged."""

from __future__ import annotations

import pytest

from peers.lab.bench import topologies
from peers.lab.bench.topologies import SITES, hop_seconds, latency_seconds


def test_hops_follow_from_the_map():
    assert len(SITES) == 12
    assert latency_seconds("London", "New York") == pytest.approx(0.0448, rel=0.01)
    assert latency_seconds("Tokyo", "Tokyo") == topologies.SAME_SITE_SECONDS
    for a in SITES:
        for b in SITES:
            assert latency_seconds(a, b) == latency_seconds(b, a)
            assert 0.85 < hop_seconds(a, b) < 3.0
