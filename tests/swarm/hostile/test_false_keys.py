"""Many keys of one attacker announce themselves, join, contribute, and claim many tokens for the next round:
honest peers join, train and weigh as before, and rounds have as many tokens of theirs."""

from __future__ import annotations

import pytest
from false_keys import manifest, story
from swarm import Swarm

from peers.lab.world.virtual_time import run
from swarmnet.optimizer.agreement.comparison import FULL_WEIGHT

SECONDS = 8.0
KEYS = 60
"""`scripts/soak keys` has more."""


def test_false_keys_change_neither_joining_nor_throughput_nor_weights():
    without = run(story(Swarm(manifest()), 0, "joins", SECONDS))
    found = run(story(Swarm(manifest()), KEYS, "hurries", SECONDS))
    assert found.joined_seconds <= without.joined_seconds + 5.0
    assert found.microbatches_per_second >= 0.9 * without.microbatches_per_second
    assert found.rounds_per_second == pytest.approx(without.rounds_per_second, rel=0.1), "of as many tokens"
    assert set(found.honest_weights) == {FULL_WEIGHT}
    assert set(found.false_weights) == {0}
