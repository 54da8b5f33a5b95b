import math

import pytest

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.gaussian import epsilon_gaussian
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError
from tests.accounting import truth


def epsilon_person(mechanism, delta, images):
    return epsilon(mechanism.replace(images_per_unit=images), delta).epsilon


MNIST = Mechanism(60_000, 2_048, 2.041, 1_500)  # epsilon 2.93


@pytest.mark.parametrize(("images", "about"), [(2, 6.54), (3, 10.70)])
def test_several_images_cost_more_than_as_many_times_one(images, about):
    found = epsilon_person(MNIST, 1e-5, images)
    assert found == pytest.approx(about, abs=0.02)
    assert found > images * epsilon(MNIST, 1e-5).epsilon
    exact = truth.epsilon(MNIST.sampling_prob, 2.041, 1_500, 1e-5, images=images)
    assert exact <= found <= 1.002 * exact


@pytest.mark.parametrize("delta", [1e-5, 1e-12])
def test_a_person_with_one_image_costs_epsilon(delta):
    """RDP's where PLD certifies none."""
    assert epsilon_person(MNIST, delta, 1) == epsilon(MNIST, delta).epsilon < math.inf
    assert epsilon(MNIST, delta).accountant == ("pld" if delta == 1e-5 else "rdp")


def test_without_sampling_k_images_are_k_times_the_sensitivity():
    full = MNIST.replace(batch_size=60_000, noise_multiplier=100.0)
    assert epsilon_person(full, 1e-5, 3) == epsilon_gaussian(3 * math.sqrt(1_500) / 100, 1e-5)


def test_a_person_with_very_many_images_has_an_epsilon_too():
    few, many = epsilon_person(MNIST, 1e-5, 50), epsilon_person(MNIST, 1e-5, 2_000)
    assert 500 < few < many


def test_no_steps_and_no_noise():
    assert epsilon_person(MNIST.replace(num_steps=0), 1e-5, 2) == 0
    assert epsilon_person(MNIST.replace(noise_multiplier=0.0), 1e-5, 2) == math.inf


def test_shuffled_batches_and_no_images_are_refused():
    with pytest.raises(InputError, match="shuffled"):
        epsilon_person(MNIST.replace(sampling="shuffled"), 1e-5, 2)
    with pytest.raises(InputError, match="at least 1"):
        epsilon_person(MNIST, 1e-5, 0)


def test_nobody_has_more_images_than_there_are_and_asking_for_many_takes_no_memory():
    few = MNIST.replace(num_examples=12, batch_size=2, noise_multiplier=5.0, num_steps=10)
    assert epsilon_person(few, 1e-5, 10**15) == epsilon_person(few, 1e-5, 12) < math.inf
    many = MNIST.replace(num_examples=10**6, batch_size=1_000, noise_multiplier=50.0, num_steps=100)
    most = epsilon_person(many, 1e-5, 10**15)  # every image is one person's: that the batches are samples is not used
    assert (
        most
        == epsilon_gaussian(10**6 * 10 / 50, 1e-5)
        > epsilon_person(many, 1e-5, 2_000)
        > epsilon_person(many, 1e-5, 1_000)
    )


@pytest.mark.parametrize("sigma", [1e-4, 1e12])
def test_next_to_no_noise_and_all_noise_are_told_without_a_grid(sigma):
    found = epsilon_person(MNIST.replace(noise_multiplier=sigma), 1e-5, 30)
    assert found == (math.inf if sigma < 1 else 0.0)
