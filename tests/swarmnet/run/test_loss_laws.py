"""The laws by which the planner expects losses are the least squares over the trials of docs/learning.md."""

import numpy as np
import pytest

from swarmnet.run.loss_law import MOST_BITS, LossLaw
from swarmnet.run.sync_methods import METHOD_CONFIGS

LOCAL_STEPS = [
    # (peers, bits of a weight in the run, per cent above AdamW), of `local-steps` and `local-steps-1`
    *[(2, 101.6, -5.8), (4, 101.6, -1.5), (8, 101.6, 1.0), (32, 25.4, 12.4)],
    *[(2, 25.4, -1.8), (4, 25.4, 4.7), (8, 25.4, 10.3), (32, 6.4, 18.5)],
    *[(16, 50.8, 8.7), (16, 101.6, 4.2), (32, 25.4, 12.4), (32, 101.6, 2.0)],
    *[(4, 101.6, -2.8), (4, 101.6, -0.8), (4, 101.6, -0.5), (4, 50.8, -1.1), (4, 50.8, -1.1)],
    *[(4, 25.4, 3.5), (4, 25.4, 3.4), (4, 25.4, 2.4)],
    *[(4, 163, -5.2), (4, 41, -1.5), (4, 571, -3.6), (4, 143, -1.7)],
    *[(8, 150, -3.9), (8, 37.5, 0.8), (2, 76, -7.4), (2, 19, -6.6), (8, 76, -2.6), (8, 19, 3.1)],
]
SIGN_MUON = [
    # the same of `sign-muon-1`, `-4`, `-8` and `-16`, one round late
    *[(16, 400, -6.8), (16, 100, -4.8), (16, 50, -2.4), (16, 25, 2.1), (64, 100, -2.7)],
    *[(4, 400, -7.5), (4, 100, -7.4), (4, 50, -5.9), (4, 25, -1.7)],
    *[(2, 400, -7.3), (2, 100, -6.3), (2, 50, -4.2)],
]
TRIALS = {"local-steps": LOCAL_STEPS, "sign-muon": SIGN_MUON}


def fitted(trials) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    peers, bits, excess = np.array(trials, dtype=float).T
    terms = np.stack([np.ones_like(peers), np.log(peers), -np.log(bits)], axis=1)
    logs = np.log1p(excess / 100)
    found, *_ = np.linalg.lstsq(terms, logs, rcond=None)
    return found, terms, logs


@pytest.mark.parametrize("method", TRIALS)
def test_a_law_is_the_least_squares_of_its_trials(method):
    law: LossLaw = METHOD_CONFIGS[method].loss_law
    (scale, peers, bits), terms, logs = fitted(TRIALS[method])
    assert law.scale == pytest.approx(np.exp(scale), abs=2e-3)
    assert (law.peers_exponent, law.bits_exponent) == pytest.approx((peers, bits), abs=1e-3)
    for place in range(len(logs)):
        left = [trial for at, trial in enumerate(TRIALS[method]) if at != place]
        found, *_ = fitted(left)
        logs[place] -= terms[place] @ found
    assert law.error == pytest.approx(np.sqrt(np.mean(logs**2)), abs=5e-3), "of trials that were left out"
    assert law.fitted_peers == max(peers for peers, *_ in TRIALS[method])


def test_more_bits_than_were_tried_are_expected_to_bring_nothing_more():
    law = METHOD_CONFIGS["local-steps"].loss_law
    assert law.ratio(4, 10 * MOST_BITS) == law.ratio(4, MOST_BITS) < law.ratio(4, 100) < law.ratio(16, 100)
