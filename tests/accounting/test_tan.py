import math

import pytest

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.rdp import epsilon_rdp_classic
from sfumato.accounting.tan import epsilon_tan, overcharge, snr, snr_per_step

IMAGENET = Mechanism(1_271_167, 16_384, 2.5, 71_589)


def test_the_ratios_are_those_of_the_paper():
    assert snr_per_step(IMAGENET) == pytest.approx(16_384 / 1_271_167 / (math.sqrt(2) * 2.5))
    assert snr(IMAGENET) == pytest.approx(math.sqrt(71_589) * snr_per_step(IMAGENET))
    assert snr(IMAGENET.replace(batch_size=32_768, noise_multiplier=5.0)) == pytest.approx(snr(IMAGENET))


def test_epsilon_tan_is_the_large_noise_limit_of_classic_rdp():
    q, sigma, steps, delta = 0.01, 100.0, 500_000, 8e-7
    mechanism = Mechanism(1_000_000, 10_000, sigma, steps)
    assert epsilon_tan(mechanism, delta) == pytest.approx(epsilon_rdp_classic(q, sigma, steps, delta), rel=1e-3)


def test_epsilon_tan_underestimates_small_noise():
    at_sigma_1 = Mechanism(1_803_460, 4_096, 1.0, 223_939)  # Table 21 of De et al.: epsilon 8
    assert epsilon_tan(at_sigma_1, 5e-7) < 0.85 * epsilon(at_sigma_1, 5e-7, "rdp").epsilon


def test_the_overcharge_vanishes_with_large_noise_and_grows_with_small():
    charges = []
    for scale in (1, 2, 8):
        mechanism = Mechanism(1_271_167, 4_096 * scale, 1.0 * scale, 20_000)
        charges.append(overcharge(mechanism, 8e-7, epsilon(mechanism, 8e-7).epsilon))
    assert charges[0] > 0.2 > charges[1] > 0.02 > charges[2] > -0.001


def test_without_steps_or_noise_there_is_no_ratio_to_speak_of():
    assert snr(IMAGENET.replace(num_steps=0)) == epsilon_tan(IMAGENET.replace(num_steps=0), 1e-5) == 0
    assert snr_per_step(IMAGENET.replace(noise_multiplier=0.0)) == math.inf
    assert math.isnan(overcharge(IMAGENET.replace(num_steps=0), 1e-5, 0.0))
