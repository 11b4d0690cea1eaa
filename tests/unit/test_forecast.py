"""The forecast follows the logarithm of the tokens, and says nothing where nothing rises."""

import pytest

from slipstream.train.forecast import forecast


def records(taus):
    return [
        {"chain_tau": tau, "tokens": 1000 * 2**k, "seconds": 10.0 * 2**k}
        for k, tau in enumerate(taus)
    ]


def test_half_a_token_more_costs_the_doublings_it_needs():
    found = forecast([{"tokens": 10, "seconds": 1.0}, *records([1.0, 1.25, 1.5, 1.75])])
    assert found.per_doubling == pytest.approx(0.25) and found.tau == 1.75
    assert found.tokens == pytest.approx(8000 * 4) and found.seconds == pytest.approx(80 * 4)
    assert "0.5 more would take about 0.0 million tokens" in str(found)


@pytest.mark.parametrize("taus", [[], [1.0, 1.5], [1.5, 1.5, 1.5], [1.6, 1.5, 1.4]])
def test_no_rise_no_forecast(taus):
    assert forecast(records(taus)) is None
