"""Runs that differ in batch, noise and length, together: never below the truth, and hardly above it."""

import math

import pytest

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.gaussian import epsilon_gaussian
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.pld import MOST_KINDS
from sfumato.accounting.together import epsilon_together
from sfumato.errors import InputError
from tests.accounting import truth

N = 10_000
# Each: (q, sigma, T) of several runs, and delta.
SETTINGS = [
    ([(0.1, 3.0, 100), (0.01, 0.9, 400)], 1e-5),
    ([(0.4, 12.0, 300), (0.1, 4.0, 100), (0.02, 1.0, 50)], 1e-6),
    ([(0.5, 10.0, 20), (0.005, 0.8, 1000)], 1e-5),
    ([(0.3, 2.0, 20), (0.3, 2.5, 20), (0.31, 2.0, 20)], 1e-8),
]


def runs_of(parts, **facts):
    return [Mechanism(N, round(q * N), sigma, steps, **facts) for q, sigma, steps in parts]


@pytest.mark.parametrize(("parts", "delta"), SETTINGS)
def test_epsilon_of_unlike_runs_lies_between_exact_and_two_per_cent_more(parts, delta):
    exact = truth.epsilon_of_unlike(parts, delta)
    found = epsilon_together(runs_of(parts), delta)
    assert found.epsilon_pld is not None and exact <= found.epsilon <= 1.02 * exact
    assert found.epsilon <= found.epsilon_rdp == epsilon_together(runs_of(parts), delta, "rdp").epsilon
    alone = max(truth.epsilon(*part, delta) for part in parts)
    assert exact > alone  # so that leaving a run out would be seen


@pytest.mark.parametrize(("parts", "delta"), SETTINGS[:1])
def test_by_rdp_divergences_of_unlike_runs_add_up_at_each_order(parts, delta):
    def at(order):
        divergence = sum(steps * truth.rdp(q, sigma, order) for q, sigma, steps in parts)
        return divergence + math.log(1 - 1 / order) - (math.log(delta) + math.log(order)) / (order - 1)

    found = epsilon_together(runs_of(parts), delta, "rdp").epsilon
    assert found <= min(at(order) for order in (4, 7, 11)) * (1 + 1e-6)
    assert found >= truth.epsilon_of_unlike(parts, delta)


def test_neither_the_order_of_runs_nor_how_like_ones_are_grouped_matters():
    one, other = runs_of([(0.1, 3.0, 100), (0.01, 0.9, 400)])
    halves = [one.replace(num_steps=40), other, one.replace(num_steps=60)]
    assert (
        epsilon_together([one, other], 1e-5) == epsilon_together(halves, 1e-5) == epsilon_together([other, one], 1e-5)
    )


def test_runs_that_are_alike_are_one_run_of_all_their_updates():
    [run] = runs_of([(0.1, 3.0, 100)])
    assert epsilon_together([run, run, run], 1e-5) == epsilon(run.replace(num_steps=300), 1e-5)


def test_a_run_that_differs_by_next_to_nothing_costs_what_a_like_one_costs():
    one, like = runs_of([(0.1, 3.0, 100), (0.1, 3.0, 100)])
    nearly = like.replace(noise_multiplier=3.0 * (1 + 1e-9))
    alike = epsilon_together([one, like], 1e-5).epsilon
    assert epsilon_together([one, nearly], 1e-5).epsilon == pytest.approx(alike, rel=2e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_releases_of_all_examples_are_one_gaussian_beside_the_updates(accountant):
    parts = [(0.1, 3.0, 100), (0.02, 1.0, 200)]
    one, other = runs_of(parts)
    runs = [one.replace(first_release_noise=4.0), other.replace(first_release_noise=3.0)]
    exact = truth.epsilon_of_unlike(parts, 1e-5, first_mu=math.hypot(1 / 4, 1 / 3))
    found = epsilon_together(runs, 1e-5, accountant).epsilon
    assert exact <= found <= (1.02 if accountant == "pld" else 1.3) * exact
    # Steps of all examples are Gaussians, too.
    full = [one, Mechanism(N, N, 12.0, 30)]
    exact = truth.epsilon_of_unlike(parts[:1], 1e-5, first_mu=math.sqrt(30) / 12)
    assert exact <= epsilon_together(full, 1e-5).epsilon <= 1.02 * exact
    assert epsilon_together([one.replace(num_steps=0, first_release_noise=2.0)] * 4, 1e-5).epsilon == pytest.approx(
        epsilon_gaussian(1.0, 1e-5), rel=1e-8
    )


def test_a_person_moves_unlike_runs_by_all_of_their_images():
    parts = [(0.1, 6.0, 100), (0.02, 2.5, 100)]
    exact = truth.epsilon_of_unlike(parts, 1e-5, images=3)
    found = epsilon_together(runs_of(parts, images_per_unit=3), 1e-5)
    assert exact <= found.epsilon <= 1.02 * exact
    assert found.epsilon_rdp is None
    with pytest.raises(InputError, match="by RDP"):
        epsilon_together(runs_of(parts, images_per_unit=3), 1e-5, "rdp")


def test_what_releases_nothing_costs_nothing_and_no_noise_costs_everything():
    one, other = runs_of([(0.1, 3.0, 100), (0.01, 0.9, 400)])
    assert epsilon_together([], 1e-5).epsilon == 0
    assert epsilon_together([one, other.replace(num_steps=0)], 1e-5) == epsilon(one, 1e-5)
    assert epsilon_together([one, other.replace(noise_multiplier=0.0)], 1e-5).epsilon == math.inf
    assert epsilon_together([one, other.replace(first_release_noise=1e-9)], 1e-5).epsilon == math.inf


def test_more_kinds_than_pld_takes_are_composed_by_rdp():
    runs = [Mechanism(N, 100, 1.0 + kind / 1000, 1) for kind in range(MOST_KINDS + 1)]
    found = epsilon_together(runs, 1e-5)
    assert found.accountant == "rdp" and found.epsilon == epsilon_together(runs, 1e-5, "rdp").epsilon
    assert "too many" in found.note
    least, most = (Mechanism(N, 100, noise, len(runs)) for noise in (1.0, 1.0 + MOST_KINDS / 1000))
    assert epsilon(most, 1e-5, "rdp").epsilon < found.epsilon < epsilon(least, 1e-5, "rdp").epsilon


def test_what_has_no_epsilon_together_is_refused():
    one, other = runs_of([(0.1, 3.0, 100), (0.01, 0.9, 400)])
    with pytest.raises(InputError, match="shuffled"):
        epsilon_together([one, other.replace(sampling="shuffled")], 1e-5)
    for unlike in (Mechanism(N + 1, 100, 1.0, 5), other.replace(images_per_unit=2)):
        with pytest.raises(ValueError, match="not of the same examples"):
            epsilon_together([one, unlike], 1e-5)
