"""What strangers send is taken or refused, soon, by every decoder, and kept by none (scripts/soak fuzz)."""

import subprocess
import time

import pytest
from fuzz_inputs import Decoder
from fuzz_soak import DECODERS, ROOT, SLOW_SECONDS, WARM_INPUTS, chosen, fuzz

INPUTS = 500
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


def test_every_decoder_has_a_name_of_its_own():
    assert len({decoder.name for decoder in DECODERS}) == len(DECODERS)
    assert [decoder.name for decoder in chosen(["frames"])] == ["frames"]


def decoding(decode, errors=(ValueError,)):
    return Decoder("made up", lambda chance: chance.randrange(100), decode, errors)


def test_an_error_of_another_kind_is_a_fault_and_names_the_input():
    def decode(number, folder):
        if number % 2:
            raise ValueError
        raise KeyError(number)

    found = fuzz(decoding(decode), 200, seed=3)
    assert found.refused + found.faults.total() == found.inputs == 200
    assert found.refused
    (problem,) = found.wrong()
    assert "KeyError (N) in test_fuzz.py:decode, the first with" in problem


def test_an_input_that_takes_long_is_wrong_only_if_it_does_so_again():
    def slow_at(visits):
        calls = []

        def decode(number, folder):
            calls.append(number)
            if len(calls) in visits:
                until = time.thread_time() + 1.2 * SLOW_SECONDS
                while time.thread_time() < until:
                    pass

        return decode

    assert fuzz(decoding(slow_at({1})), 3, seed=3).wrong() == []
    (problem,) = fuzz(decoding(slow_at({1, 2})), 3, seed=3).wrong()
    assert "s of CPU for one input" in problem


def test_memory_that_is_kept_is_wrong():
    kept = []
    (problem,) = fuzz(decoding(lambda number, folder: kept.append(b"x" * 2**20)), WARM_INPUTS + 80, 3).wrong()
    assert "memory grew by" in problem


def test_the_same_seed_brings_the_same_inputs_again():
    def seen(seed):
        inputs = []
        fuzz(decoding(lambda number, folder: inputs.append(number)), 20, seed)
        return inputs

    assert seen(1) == seen(1) != seen(2)
