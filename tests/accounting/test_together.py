"""What is released beside each other: unlike runs, a person's images. Never below the truth, and hardly above it."""

import math

import numpy as np
import pytest

from sfumato.accounting.accountants import epsilon, epsilon_together
from sfumato.accounting.gaussian import epsilon_gaussian
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.pld import MOST_KINDS, epsilon_pld
from sfumato.accounting.selection import Selection
from sfumato.errors import InputError
from tests.accounting import truth

N = 10_000
# Each: (q, sigma, T) of several runs, and delta.
UNLIKE = [
    ([(0.1, 3.0, 100), (0.01, 0.9, 400)], 1e-5),
    ([(0.4, 12.0, 300), (0.1, 4.0, 100), (0.02, 1.0, 50)], 1e-6),
    ([(0.3, 2.0, 20), (0.3, 2.5, 20), (0.31, 2.0, 20)], 1e-8),
]
MNIST = Mechanism(60_000, 2_048, 2.041, 1_500)  # epsilon 2.93
ONE, OTHER = Mechanism(N, 1000, 3.0, 100), Mechanism(N, 100, 0.9, 400)


def runs_of(parts):
    return [Mechanism(N, round(q * N), sigma, steps) for q, sigma, steps in parts]


@pytest.mark.parametrize(("parts", "delta"), UNLIKE)
def test_epsilon_of_unlike_runs_lies_between_exact_and_two_per_cent_more(parts, delta):
    exact = truth.epsilon_of_unlike(parts, delta)
    found = epsilon_together(runs_of(parts), delta)
    assert found.epsilon_pld is not None and exact <= found.epsilon <= 1.02 * exact
    assert found.epsilon <= found.epsilon_rdp == epsilon_together(runs_of(parts), delta, "rdp").epsilon
    alone = max(truth.epsilon(*part, delta) for part in parts)
    assert exact > alone  # so that leaving a run out would be seen


@pytest.mark.parametrize("parts", [UNLIKE[0][0], [(0.1, 3.0, 100), (1.0, 2.0, 1)]], ids=["sampled", "of all"])
def test_by_rdp_divergences_add_up_at_each_order(parts):
    def at(order):
        divergence = sum(steps * truth.rdp(q, sigma, order) for q, sigma, steps in parts)
        return divergence + math.log(1 - 1 / order) - (math.log(1e-5) + math.log(order)) / (order - 1)

    found = epsilon_together(runs_of(parts), 1e-5, "rdp").epsilon
    assert found <= min(at(order) for order in np.geomspace(2, 20, 8)) * (1 + 1e-6)
    sampled, whole_mu = [part for part in parts if part[0] < 1], 1 / 2.0 if parts[-1][0] == 1 else 0.0
    assert found >= truth.epsilon_of_unlike(sampled, 1e-5, whole_mu=whole_mu)


def test_neither_the_order_of_runs_nor_how_like_ones_are_grouped_matters():
    halves = [ONE.replace(num_steps=40), OTHER, ONE.replace(num_steps=60)]
    both = epsilon_together([ONE, OTHER], 1e-5)
    assert both == epsilon_together(halves, 1e-5) == epsilon_together([OTHER, ONE], 1e-5)
    assert epsilon_together([ONE, ONE, ONE], 1e-5) == epsilon(ONE.replace(num_steps=300), 1e-5)
    nearly = epsilon_together([ONE, ONE.replace(noise_multiplier=3.0 * (1 + 1e-9))], 1e-5).epsilon
    assert nearly == pytest.approx(epsilon_together([ONE, ONE], 1e-5).epsilon, rel=2e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_steps_of_all_examples_are_one_gaussian_beside_the_others(accountant):
    parts = [(0.1, 3.0, 100), (0.02, 1.0, 200)]
    exact = truth.epsilon_of_unlike(parts, 1e-5, whole_mu=math.hypot(1 / 4, 1 / 3))
    found = epsilon_together(runs_of([*parts, (1.0, 4.0, 1), (1.0, 3.0, 1)]), 1e-5, accountant).epsilon
    assert exact <= found <= (1.02 if accountant == "pld" else 1.3) * exact
    exact = truth.epsilon_of_unlike(parts[:1], 1e-5, whole_mu=math.sqrt(30) / 12)
    assert exact <= epsilon_together(runs_of([parts[0], (1.0, 12.0, 30)]), 1e-5).epsilon <= 1.02 * exact
    alone = epsilon_together(runs_of([(1.0, 2.0, 1)] * 4), 1e-5).epsilon
    assert alone == pytest.approx(epsilon_gaussian(1.0, 1e-5), rel=1e-8)


def test_without_sampling_all_is_one_gaussian():
    mu = math.hypot(math.sqrt(30) / 8, 1 / 3)
    exact = truth.epsilon_of_gaussian(mu, 1e-5)
    assert truth.epsilon(1.0, 8.0, 30, 1e-5, whole_mu=1 / 3) == pytest.approx(exact, rel=1e-9)
    full = runs_of([(1.0, 8.0, 30), (1.0, 3.0, 1)])
    assert exact <= epsilon_together(full, 1e-5).epsilon <= exact * (1 + 1e-8)
    assert epsilon_pld([(1.0, 20.0, 1000)], 1e-5).epsilon == epsilon_gaussian(math.sqrt(1000) / 20, 1e-5)
    assert exact <= epsilon_pld([(1 - 1e-9, 8.0, 30), (1.0, 3.0, 1)], 1e-5).epsilon <= 1.002 * exact
    of_three = epsilon_together([run.replace(images_per_unit=3) for run in full], 1e-5).epsilon
    assert of_three == pytest.approx(epsilon_gaussian(3 * mu, 1e-5), rel=1e-12)


def test_what_releases_nothing_costs_nothing_and_no_noise_costs_everything():
    assert epsilon_together([], 1e-5).epsilon == 0
    assert epsilon_together([ONE, OTHER.replace(num_steps=0)], 1e-5) == epsilon(ONE, 1e-5)
    for noise in (0.0, 1e-9):
        silent = OTHER.replace(noise_multiplier=noise)
        assert epsilon_together([ONE, silent], 1e-5).epsilon == math.inf
        assert epsilon(silent.replace(images_per_unit=2), 1e-5).epsilon == math.inf
        alone = epsilon(silent, 1e-5)
        assert alone.epsilon == alone.epsilon_rdp == math.inf and alone.epsilon_pld is None
    for none in ({}, {"images_per_unit": 2}, {"noise_multiplier": 0.0}):
        assert epsilon(MNIST.replace(num_steps=0, **none), 1e-5).epsilon == 0


def test_more_kinds_than_pld_takes_are_composed_by_rdp():
    runs = [Mechanism(N, 100, 1.0 + kind / 1000, 1) for kind in range(MOST_KINDS + 1)]
    found = epsilon_together(runs, 1e-5)
    assert found.accountant == "rdp" and found.epsilon == epsilon_together(runs, 1e-5, "rdp").epsilon
    assert "too many" in found.note
    least, most = (Mechanism(N, 100, noise, len(runs)) for noise in (1.0, 1.0 + MOST_KINDS / 1000))
    assert epsilon(most, 1e-5, "rdp").epsilon < found.epsilon < epsilon(least, 1e-5, "rdp").epsilon


def test_what_has_no_epsilon_is_refused():
    with pytest.raises(InputError, match="shuffled"):
        epsilon_together([ONE, OTHER.replace(sampling="shuffled")], 1e-5)
    for unlike in (Mechanism(N + 1, 100, 1.0, 5), OTHER.replace(images_per_unit=2)):
        with pytest.raises(ValueError, match="not of the same examples"):
            epsilon_together([ONE, unlike], 1e-5)
    with pytest.raises(InputError, match="by RDP"):
        epsilon(ONE.replace(images_per_unit=3), 1e-5, "rdp")
    with pytest.raises(InputError, match="no epsilon is known .* selected"):
        epsilon(ONE.replace(images_per_unit=3), 1e-5, "pld", Selection(5.0, 0.0, None))


@pytest.mark.parametrize(
    ("parts", "of_all", "images"),
    [
        ([(2_048 / 60_000, 2.041, 1_500)], 0.0, 2),
        ([(0.1, 6.0, 100)], 8.0, 3),
        ([(0.1, 6.0, 100), (0.02, 2.5, 100)], 0.0, 3),
    ],
)
def test_a_person_moves_all_by_all_of_their_images(parts, of_all, images):
    exact = truth.epsilon_of_unlike(parts, 1e-5, images=images, whole_mu=images / of_all if of_all else 0.0)
    found = epsilon_pld([*parts, *([(1.0, of_all, 1)] if of_all else [])], 1e-5, images).epsilon
    assert exact <= found <= 1.02 * exact


def test_several_images_cost_more_than_as_many_times_one():
    one = epsilon(MNIST, 1e-5).epsilon
    for images, about in ((2, 6.54), (3, 10.70)):
        found = epsilon(MNIST.replace(images_per_unit=images), 1e-5)
        assert found.epsilon == pytest.approx(about, abs=0.02) and found.epsilon > images * one
        assert found.epsilon_rdp is None
    few, many = (epsilon(MNIST.replace(images_per_unit=images), 1e-5).epsilon for images in (50, 2_000))
    assert 500 < few < many


def test_nobody_has_more_images_than_there_are_and_asking_for_many_takes_no_memory():
    few = MNIST.replace(num_examples=12, batch_size=2, noise_multiplier=5.0, num_steps=10)
    of_all = epsilon(few.replace(images_per_unit=12), 1e-5)
    assert epsilon(few.replace(images_per_unit=10**15), 1e-5) == of_all and of_all.epsilon < math.inf
    many = MNIST.replace(num_examples=10**6, batch_size=1_000, noise_multiplier=50.0, num_steps=100)
    most = epsilon(many.replace(images_per_unit=10**15), 1e-5)  # that the batches are samples is not used
    assert most.epsilon == epsilon_gaussian(10**6 * 10 / 50, 1e-5) and "too many" in most.note
    assert most.epsilon > epsilon(many.replace(images_per_unit=2_000), 1e-5).epsilon


@pytest.mark.parametrize("sigma", [1e-4, 1e12])
def test_next_to_no_noise_and_all_noise_are_told_of_a_person_without_a_grid(sigma):
    found = epsilon(MNIST.replace(noise_multiplier=sigma, images_per_unit=30), 1e-5).epsilon
    assert found == (math.inf if sigma < 1 else 0.0)
