"""What several runs say together, beside NumPy and SciPy."""

import numpy as np
import pytest
from scipy import stats

from sfumato.studies.statistics import paired, summarise


@pytest.mark.parametrize("count", [2, 3, 4, 17])
def test_median_mean_and_spread_are_numpys(count):
    values = np.random.default_rng(count).random(count)
    found = summarise(values.tolist())
    assert found.median == pytest.approx(np.median(values), rel=1e-12)
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.std == pytest.approx(values.std(ddof=1), rel=1e-12)
    assert found.standard_error == pytest.approx(stats.sem(values), rel=1e-12)


def test_one_run_has_no_spread():
    found = summarise([0.5])
    assert (found.median, found.mean, found.std, found.standard_error) == (0.5, 0.5, None, None)


def test_a_paired_difference_has_the_standard_error_of_the_differences():
    draws = np.random.default_rng(0)
    level = draws.random(9)  # of each seed, which all cells share
    first, other = level + 0.001 * draws.random(9), level + 0.01 + 0.001 * draws.random(9)
    found = paired(other.tolist(), first.tolist())
    assert found.difference == pytest.approx((other - first).mean())
    assert found.standard_error == pytest.approx(stats.sem(other - first))
    apart = np.hypot(stats.sem(other), stats.sem(first))
    assert found.standard_error < apart / 50  # what pairing is for


def test_a_pair_of_one_seed_has_no_standard_error_and_pairs_need_equal_seeds():
    assert paired([0.5], [0.25]).standard_error is None
    with pytest.raises(ValueError, match="shorter|longer"):
        paired([0.5, 0.5], [0.25])
