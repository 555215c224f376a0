"""What strangers send is taken or refused, soon, by every decoder, and kept by none (scripts/soak fuzz)."""

import subprocess

import pytest
from fuzz_soak import DECODERS, ROOT, fuzz
from hypothesis import settings

INPUTS = 10 * settings.default.max_examples
"""From each of two seeds."""
FIXED_SEED = 1


def fresh_seed():
    """Another for every commit, and the same whenever it is tested again; as with schedules of faults."""
    said = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", "HEAD"], cwd=ROOT, capture_output=True, timeout=30
    )
    return int(said.stdout[:8] or "2", 16)


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name.replace(" ", "-"))
def test_hostile_bytes_are_taken_or_refused_and_nothing_else(decoder):
    seeds = (FIXED_SEED, fresh_seed())
    assert [problem for seed in seeds for problem in fuzz(decoder, INPUTS, seed).wrong()] == []
