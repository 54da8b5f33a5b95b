"""The membership audit: models side by side are the product's own runs, and a claim that holds is not refuted."""

import numpy as np
import pytest
import torch

from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing import problem as problem_module
from sfumato.auditing.problem import Problem
from sfumato.auditing.side_by_side import Models, Product
from sfumato.data.images import ImageSet
from sfumato.data.sampling import poisson_batch
from sfumato.models.lenet import LeNet, TanhCNN
from sfumato.randomness import Streams, key_from_seed
from sfumato.training.step import draw

KEYS = [key_from_seed(seed) for seed in range(3)]
TOOK = [True, False, True]


def made_up_problem(count=100, side=28):
    """Digits of noise: each class is brighter than the one before."""
    generator = torch.Generator().manual_seed(0)

    def images(number):
        labels = torch.arange(number) % 10
        pixels = torch.randint(0, 100, (number, 1, side, side), generator=generator) + 15 * labels[:, None, None, None]
        readable = torch.ones(number, dtype=torch.bool)
        return ImageSet(pixels.to(torch.uint8), labels, readable, (0.13,), (0.31,))

    return Problem(images(count), problem_module.candidates(images(20)))


def network(side=28, dtype=torch.float64, kind=LeNet):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(10, image_size=side).to(dtype)


def alone(problem, product, mechanism, key, took, learning_rate, fixed=None):
    """One model by the product's step, written as a loop."""
    streams, step = Streams(key, {}, {}), product.step(mechanism)
    images = problem.with_target("blank", takes_part=took)
    parameters = {name: value.clone() for name, value in product.begin.items()}
    for number in range(1, mechanism.num_steps + 1):
        indices = poisson_batch(mechanism, streams.stream("sampling", number)) if fixed is None else fixed[number - 1]
        view, model = streams.stream("augmentation", number), streams.stream("random numbers inside the model", number)
        randomness = draw(mechanism, indices, product.views, view, model)
        grad_sum = product.collect(step, parameters, images, randomness)
        for name, grad in step.release(grad_sum, streams.stream("noise", number)).items():
            parameters[name] -= learning_rate * grad
    return parameters


@pytest.mark.parametrize(
    "kind, augmult, fixed", [(LeNet, 0, False), (LeNet, 0, True), (TanhCNN, 0, False), (LeNet, 2, False)]
)
def test_a_model_among_others_is_the_products_own_run_with_its_key(kind, augmult, fixed):
    problem, mechanism = made_up_problem(), Mechanism(101, 32, 0.5, 3)
    product = Product(network(kind=kind), 0.5, augmult)
    batches = [np.array([0, 5, 100]), np.arange(40), np.array([], dtype=np.int64)] if fixed else None
    models = Models(problem, "blank", product, mechanism, learning_rate=0.5, fixed_batches=batches)
    found = models.train(KEYS, TOOK)
    for number, (key, took) in enumerate(zip(KEYS, TOOK, strict=True)):
        true = alone(problem, product, mechanism, key, took, 0.5, batches)
        for name, value in true.items():
            torch.testing.assert_close(found[name][number], value, rtol=0, atol=1e-5)
    moved = max(float((found[name] - value).abs().max()) for name, value in product.begin.items())
    assert moved > 1e-2
