"""The accountant of documents: exact for Gaussian noise, and equal to dp-accounting where it is installed."""

from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.model.computing.privacy_loss import delta_of, epsilon_of, noise_multiplier
from swarmnet.run.schema import DocumentPrivacy

REFERENCE = {(0.6, 1): 8.003691057033603, (1.0, 4): 9.997256150242432, (2.0, 10): 7.511275904062699}
"""Epsilon at delta 1e-5 by noise multiplier and epochs: PLDAccountant of dp-accounting 0.6.0."""


@pytest.mark.parametrize(("noise", "epochs"), REFERENCE)
def test_epsilon_is_that_of_a_reference(noise, epochs):
    assert epsilon_of(noise, epochs, 1e-5) == pytest.approx(REFERENCE[noise, epochs], abs=1e-6)
    if find_spec("dp_accounting") is not None:
        from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
        from dp_accounting.pld import PLDAccountant

        accountant = PLDAccountant()
        accountant.compose(SelfComposedDpEvent(GaussianDpEvent(noise), epochs))
        assert epsilon_of(noise, epochs, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-6)


@given(
    epsilon=st.floats(0.05, 100.0),
    delta=st.floats(1e-12, 0.1),
    epochs=st.integers(1, 1000),
)
def test_the_noise_keeps_the_promise_and_no_less_would(epsilon, delta, epochs):
    noise = noise_multiplier(DocumentPrivacy(epsilon, delta, epochs))
    assert delta_of(noise, epochs, epsilon) <= delta
    assert delta_of(0.999 * noise, epochs, epsilon) > delta
    spent = [epsilon_of(noise, used, delta) for used in (0, 1, epochs)]
    assert spent == sorted(spent)
    assert spent[0] == 0.0
    assert spent[-1] == pytest.approx(epsilon, rel=1e-3, abs=1e-3)
