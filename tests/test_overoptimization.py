"""experiments/overoptimization.py: its arithmetic."""

import itertools
import math
import sys

import numpy as np
import pytest
from sources import ROOT


@pytest.fixture
def law(monkeypatch):
    """The module; it finds benchmarks/common.py."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import overoptimization

    yield overoptimization
    for name in ("overoptimization", "common"):
        sys.modules.pop(name, None)


def test_the_best_of_n_is_the_mean_over_all_choices_of_n(law):
    random = np.random.default_rng(0)
    proxy, gold = random.normal(size=(2, 8))
    for n in range(1, 9):
        winners = [max(choice, key=lambda i: proxy[i]) for choice in itertools.combinations(range(8), n)]
        assert law.best_of_n(proxy, gold, n) == pytest.approx(np.mean(gold[winners]), abs=1e-12)


def test_the_kl_of_the_best_of_n_is_that_of_its_distribution_over_ranks(law):
    """Among very many responses: the best of n has density n q^(n-1) at the share q of worse ones."""
    q = (np.arange(10**6) + 0.5) / 10**6
    for n in (1, 2, 512):
        log_density = math.log(n) + (n - 1) * np.log(q)
        assert law.best_of_n_kl(n) == pytest.approx(np.mean(np.exp(log_density) * log_density), abs=1e-4)


@pytest.mark.parametrize("form", ["best of n", "ppo"])
def test_a_fit_finds_the_law_that_made_the_points(law, form):
    d = np.linspace(0, 8, 30)  # with the start, at which the logarithm is infinite
    gain = np.append(0, law.law(form, d[1:], 1.7, 0.3))
    found = law.fit(form, d, gain)
    assert (found["alpha"], found["beta"], found["r2"]) == pytest.approx((1.7, 0.3, 1.0), abs=1e-9)
    top = law.peak(form, 1.7, 0.3)
    around = law.law(form, np.array([0.99, 1, 1.01]) * top, 1.7, 0.3)
    assert around.argmax() == 1
    assert law.peak(form, 1.7, -0.3) == math.inf
