"""The private step against De et al. (2022): Algorithm 1 as printed, Eq. 3, and its edge cases."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from sfumato.accounting.mechanism import Mechanism
from sfumato.clipping import clipped_grad
from sfumato.clipping.graph import engine as graph_engine
from sfumato.data.images import ImageSet
from sfumato.data.views import Views
from sfumato.randomness import Streams
from sfumato.training.step import PrivateStep, Randomness, draw

NUM_EXAMPLES, CLIPPING_NORM = 24, 0.7


def problem(unreadable=()):
    source = torch.Generator().manual_seed(7)
    readable = torch.ones(NUM_EXAMPLES, dtype=torch.bool)
    readable[list(unreadable)] = False
    images = ImageSet(
        stored=torch.randint(0, 256, (NUM_EXAMPLES, 1, 6, 6), dtype=torch.uint8, generator=source),
        labels=torch.randint(0, 3, (NUM_EXAMPLES,), generator=source),
        readable=readable,
        mean=(0.5,),
        std=(0.5,),
    )
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    return model, images


def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


def step_of(model, batch_size=8, sigma=0.0, augmult=0, microbatch_size=5):
    grad_fn = clipped_grad(model, loss, clipping_norm=CLIPPING_NORM, augmult=augmult, microbatch_size=microbatch_size)
    return PrivateStep(grad_fn, Mechanism(NUM_EXAMPLES, batch_size, sigma, 1), Views("crop_flip", augmult, 1))


def bits(step, indices, streams=None):
    streams = streams or Streams()
    view, model = streams.stream("augmentation"), streams.stream("model")
    return draw(step.mechanism, np.asarray(indices, dtype=np.int64), step.views, view, model)


def private_grad(step, model, images, indices, streams=None):
    """One update: what is released, and the statistics."""
    streams = streams or Streams()
    grad_sum, statistics = step.collect(images, dict(model.named_parameters()), bits(step, indices, streams))
    return step.release(grad_sum, streams.stream("noise")), statistics


def flat(gradient):
    return torch.cat([value.flatten() for value in gradient.values()])


def clipped_mean(model, images, indices):
    """One image at a time by plain autograd, over the expected batch of 8."""
    total = torch.zeros(sum(value.numel() for value in model.parameters()))
    for index in indices:
        value = loss(model(images.batch(torch.tensor([index]))), images.labels[[index]]).sum()
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(value, list(model.parameters()))])
        total += gradient * min(1 / CLIPPING_NORM, 1 / float(gradient.norm()))
    return total / 8


@pytest.mark.parametrize("indices", [[], [3], list(range(13)), list(range(NUM_EXAMPLES))])
def test_without_noise_the_step_is_the_sum_of_clipped_gradients_over_the_constant_batch(indices):
    model, images = problem()
    step = step_of(model)
    gradient, _ = private_grad(step, model, images, indices)
    assert torch.allclose(flat(gradient), clipped_mean(model, images, indices), atol=1e-6)


def test_an_empty_batch_is_an_update_of_noise_alone():
    model, images = problem()
    step = step_of(model, sigma=2.0)
    gradient, statistics = private_grad(step, model, images, [])
    assert abs(float(flat(gradient).std()) * 8 / 2.0 - 1) < 0.2
    assert statistics.loss == 0


def test_an_unreadable_image_contributes_exactly_zero_and_the_divisor_stays():
    model, images = problem(unreadable=[2, 5])
    step = step_of(model)
    with_them, _ = private_grad(step, model, images, [1, 2, 5, 9])
    without, _ = private_grad(step, model, images, [1, 9])
    assert torch.allclose(flat(with_them), flat(without), atol=1e-7)


@pytest.mark.parametrize("augmult", [0, 3])
def test_the_microbatch_size_changes_nothing_but_rounding(augmult):
    model, images = problem()
    streams, results = Streams(7), []
    for microbatch_size in (1, 5, 24):
        step = step_of(model, sigma=1.0, augmult=augmult, microbatch_size=microbatch_size)
        gradient, _ = private_grad(step, model, images, range(17), streams)
        results.append(flat(gradient))
    assert torch.allclose(results[0], results[1], atol=1e-3) and torch.allclose(
        results[0], results[2], atol=1e-3
    )  # one grid step of the noise


def test_a_view_depends_on_its_example_and_number_alone():
    """Who else is in the batch must not move an example's views."""
    model, images = problem()
    step, streams = step_of(model, augmult=3), Streams(7)
    alone = [flat(private_grad(step, model, images, [index], streams)[0]) for index in (4, 11)]
    together = flat(private_grad(step, model, images, [4, 11], streams)[0])
    assert torch.allclose(alone[0] + alone[1], together, atol=1e-6)


def test_algorithm_1_as_printed_agrees_with_ours_in_mean_and_variance():
    """The paper adds noise of sigma sqrt(N_acc) / B at each of N_acc accumulation steps and averages them."""
    model, images = problem()
    sigma, num_accumulations, local, repetitions = 1.5, 4, 2, 1500
    indices = np.arange(num_accumulations * local)
    step = step_of(model, batch_size=len(indices), sigma=sigma)
    noiseless = step_of(model, batch_size=local)
    parts = [
        flat(private_grad(noiseless, model, images, chunk)[0]) for chunk in indices.reshape(num_accumulations, local)
    ]
    source = torch.Generator().manual_seed(1)
    printed, ours = [], []
    for _ in range(repetitions):
        running = torch.zeros_like(parts[0])
        for number, part in enumerate(parts, start=1):
            noise = torch.randn(part.shape, generator=source) * sigma * num_accumulations**0.5 / len(indices)
            running += (part + noise - running) / number
        printed.append(running)
        ours.append(flat(add_fresh_noise(step, images, model, indices)))
    printed_runs, our_runs = torch.stack(printed).double(), torch.stack(ours).double()
    standard_error = sigma / len(indices) / repetitions**0.5
    assert float((printed_runs.mean(0) - our_runs.mean(0)).abs().max()) < 6 * 2**0.5 * standard_error
    ratio = float(our_runs.var(0).mean() / printed_runs.var(0).mean())
    assert abs(ratio - 1) < 6 * 2 / (repetitions * our_runs.shape[1]) ** 0.5
    assert abs(0.95**2 - 1) > 6 * 2 / (repetitions * our_runs.shape[1]) ** 0.5  # noise 5 % off would be seen


def add_fresh_noise(step, images, model, indices):
    """The step's result with new noise; the clipped sum, which does not change, is computed once."""
    if not hasattr(step, "remembered"):
        cpu = torch.device("cpu")
        load = lambda kept: step.views.with_labels(images, kept, None, cpu)  # noqa: E731
        step.remembered = step.grad_fn.sum_over(load, torch.from_numpy(indices))
        step.grad_fn = SimpleNamespace(clipping_norm=CLIPPING_NORM, sum_over=lambda *given, key: step.remembered)
    return private_grad(step, model, images, indices)[0]


def test_noise_is_added_once_by_the_release_and_only_where_there_is_noise():
    model, images = problem()
    without, with_noise = step_of(model), step_of(model, sigma=1.0)
    parameters, randomness = dict(model.named_parameters()), bits(without, range(9))
    sums = [flat(step.collect(images, parameters, randomness)[0]) for step in (without, with_noise)]
    assert torch.allclose(sums[0], sums[1], atol=1e-6)
    grad_sum, _ = without.collect(images, parameters, randomness)
    stream = Streams().stream("noise")
    assert flat(without.release(grad_sum, stream)).equal(sums[0] / 8)
    noise = flat(with_noise.release(grad_sum, stream)) * 8 - sums[0]
    assert abs(float(noise.square().mean()) - 1) < 6 * (2 / len(noise)) ** 0.5


def test_statistics_are_of_the_batch_and_named_not_private():
    model, images = problem()
    step = step_of(model)
    _, statistics = private_grad(step, model, images, range(6))
    values = loss(model(images.batch(torch.arange(6))), images.labels[:6])
    assert statistics.loss == pytest.approx(float(values.detach().mean()), rel=1e-5)
    assert 0 <= statistics.clipped_fraction <= 1
    assert isinstance(bits(step, []), Randomness)


def test_what_depends_on_parameters_alone_is_computed_once_an_update(monkeypatch):
    """Of five microbatches, and of the next update at other parameters anew."""
    model, images = problem()
    step = step_of(model)
    indices = list(range(23))
    private_grad(step, model, images, [0])  # an engine is made
    seen, whole = [], graph_engine.evaluate_weights
    monkeypatch.setattr(graph_engine, "evaluate_weights", lambda *args: seen.append(1) or whole(*args))
    for update in (1, 2):
        gradient, _ = private_grad(step, model, images, indices)
        assert len(seen) == update
        assert torch.allclose(flat(gradient), clipped_mean(model, images, indices), atol=1e-6)
        with torch.no_grad():
            model[0].weight.mul_(0.5)
