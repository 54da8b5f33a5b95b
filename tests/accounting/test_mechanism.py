"""A mechanism whose numbers are out of range has no epsilon, so there is none."""

import math

import pytest

from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError

GOOD = {"num_examples": 10, "batch_size": 3, "noise_multiplier": 1.5, "num_steps": 4}


@pytest.mark.parametrize(
    "key, bad, good",
    [
        ("num_examples", [0, -1], [3, 10**9]),
        ("batch_size", [0, -3, 11], [1, 10]),
        ("noise_multiplier", [-1e-300, -1.0, -math.inf, math.inf, math.nan], [0.0, 1e-300, 1e300]),
        ("num_steps", [-1], [0, 10**9]),
        ("sampling", ["Poisson", ""], ["poisson", "shuffled"]),
    ],
)
def test_each_number_is_refused_out_of_its_range_by_name_and_taken_up_to_its_ends(key, bad, good):
    for value in bad:
        with pytest.raises(InputError, match=key):
            Mechanism(**{**GOOD, key: value})
        with pytest.raises(InputError, match=key):
            Mechanism(**GOOD).replace(**{key: value})
    for value in good:
        assert getattr(Mechanism(**{**GOOD, key: value}), key) == value


def test_the_sampling_probability_is_batch_over_examples():
    assert Mechanism(**GOOD).sampling_prob == 0.3 and Mechanism(10, 10, 1.0, 1).sampling_prob == 1.0
