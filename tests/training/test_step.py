"""The private step against De et al. (2022): Algorithm 1 as printed, Eq. 3, and its edge cases."""

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
from sfumato.training.step import PrivateStep, Rows, draw, norm_histogram

NUM_EXAMPLES, CLIPPING_NORM = 24, 0.7
NO_VIEWS, STREAMS = Views("none", 0, 0), Streams(1)


def problem(unreadable=()):
    source = torch.Generator().manual_seed(7)
    readable = torch.ones(NUM_EXAMPLES, dtype=torch.bool)
    readable[list(unreadable)] = False
    stored = torch.randint(0, 256, (NUM_EXAMPLES, 1, 6, 6), dtype=torch.uint8, generator=source)
    labels = torch.randint(0, 3, (NUM_EXAMPLES,), generator=source)
    images = ImageSet(stored, labels, readable, mean=(0.5,), std=(0.5,))
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
    return draw(np.asarray(indices, dtype=np.int64), step.views, view, model)


def private_grad(step, model, images, indices, streams=None):
    """One update: what is released, and the statistics."""
    streams = streams or Streams()
    grad_sum, rows = step.collect(images, dict(model.named_parameters()), bits(step, indices, streams))
    return step.release(flat(grad_sum), streams.stream("noise")), statistics_of(step, grad_sum, rows)


def statistics_of(step, grad_sum, rows, with_norms=False):
    vector = flat(grad_sum)
    return step.statistics(rows, float(vector.double().norm()), len(vector), with_norms)


def flat(gradient):
    return torch.cat([value.flatten() for value in gradient.values()])


def one_by_one(model, images, indices, views=NO_VIEWS, view_bits=None):
    """Gradients and losses of each image's mean loss over its views, by plain autograd."""
    gradients, losses = torch.zeros(len(indices), sum(value.numel() for value in model.parameters())), []
    for place, index in enumerate(indices):
        inputs = views.make(images, torch.tensor([index]), view_bits, torch.device("cpu"))
        rows = inputs.flatten(0, 1) if views.augmult else inputs
        value = loss(model(rows), images.labels[[index]].expand(len(rows))).mean()
        parts = torch.autograd.grad(value, list(model.parameters()))
        gradients[place] = torch.cat([part.flatten() for part in parts])
        losses.append(float(value.detach()))
    return gradients, losses


def clipped_mean(model, images, indices):
    """Over the expected batch of 8."""
    gradients, _ = one_by_one(model, images, indices)
    return (gradients / gradients.norm(dim=1, keepdim=True).clamp(min=CLIPPING_NORM)).sum(0) / 8


@pytest.mark.parametrize("indices", [[], list(range(13)), list(range(NUM_EXAMPLES))])
def test_without_noise_the_step_is_the_sum_of_clipped_gradients_over_the_constant_batch(indices):
    model, images = problem()
    step = step_of(model)
    gradient, _ = private_grad(step, model, images, indices)
    assert torch.allclose(gradient, clipped_mean(model, images, indices), atol=1e-6)


def test_an_empty_batch_is_an_update_of_noise_alone():
    model, images = problem()
    step = step_of(model, sigma=2.0)
    gradient, statistics = private_grad(step, model, images, [])
    assert abs(float(gradient.std()) * 8 / 2.0 - 1) < 0.2
    assert statistics["loss"] == 0


@pytest.mark.parametrize("augmult", [0, 3])
def test_the_microbatch_size_changes_nothing_but_rounding(augmult):
    model, images = problem()
    streams, results = Streams(7), []
    for microbatch_size in (1, 5, 24):
        step = step_of(model, sigma=1.0, augmult=augmult, microbatch_size=microbatch_size)
        gradient, _ = private_grad(step, model, images, range(17), streams)
        results.append(gradient)
    assert all(torch.allclose(result, results[0], atol=1e-3) for result in results)  # one grid step of the noise


def test_a_view_depends_on_its_example_and_number_alone():
    """Who else is in the batch must not move an example's views."""
    model, images = problem()
    step, streams = step_of(model, augmult=3), Streams(7)
    alone = [private_grad(step, model, images, [index], streams)[0] for index in (4, 11)]
    together = private_grad(step, model, images, [4, 11], streams)[0]
    assert torch.allclose(alone[0] + alone[1], together, atol=1e-6)


def test_algorithm_1_as_printed_agrees_with_ours_in_mean_and_variance():
    """The paper adds noise of sigma sqrt(N_acc) / B at each of N_acc accumulation steps and averages them."""
    model, images = problem()
    sigma, num_accumulations, local, repetitions = 1.5, 4, 2, 1500
    indices = np.arange(num_accumulations * local)
    step = step_of(model, batch_size=len(indices), sigma=sigma)
    noiseless = step_of(model, batch_size=local)
    chunks = indices.reshape(num_accumulations, local)
    parts = [private_grad(noiseless, model, images, chunk)[0] for chunk in chunks]
    source, streams = torch.Generator().manual_seed(1), Streams()
    grad_sum, _ = step.collect(images, dict(model.named_parameters()), bits(step, indices))
    printed, ours = [], []
    for _ in range(repetitions):
        running = torch.zeros_like(parts[0])
        for number, part in enumerate(parts, start=1):
            noise = torch.randn(part.shape, generator=source) * sigma * num_accumulations**0.5 / len(indices)
            running += (part + noise - running) / number
        printed.append(running)
        ours.append(step.release(flat(grad_sum), streams.stream("noise")))
    printed_runs, our_runs = torch.stack(printed).double(), torch.stack(ours).double()
    standard_error = sigma / len(indices) / repetitions**0.5
    assert float((printed_runs.mean(0) - our_runs.mean(0)).abs().max()) < 6 * 2**0.5 * standard_error
    ratio = float(our_runs.var(0).mean() / printed_runs.var(0).mean())
    assert abs(ratio - 1) < 6 * 2 / (repetitions * our_runs.shape[1]) ** 0.5
    assert abs(0.95**2 - 1) > 6 * 2 / (repetitions * our_runs.shape[1]) ** 0.5  # noise 5 % off would be seen


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
        assert torch.allclose(gradient, clipped_mean(model, images, indices), atol=1e-6)
        with torch.no_grad():
            model[0].weight.mul_(0.5)


@pytest.mark.parametrize("augmult", [0, 3])
def test_histogram_median_and_signal_to_noise_are_numpy_s_of_gradients_taken_one_by_one(augmult):
    model, images = problem(unreadable=[4, 7])
    indices, readable = range(17), [index for index in range(17) if index not in (4, 7)]
    step = step_of(model, sigma=1.5, augmult=augmult)
    randomness = bits(step, indices, STREAMS)
    statistics = statistics_of(step, *step.collect(images, dict(model.named_parameters()), randomness), True)
    found = statistics["norms"]
    gradients, losses = one_by_one(model, images, readable, step.views, randomness.view_bits)
    assert statistics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    gradients = gradients.numpy() / CLIPPING_NORM
    norms = np.linalg.norm(gradients, axis=1)
    counts, _ = np.histogram(norms, [0, *found.edges, np.inf])
    assert found.counts == counts.tolist() and sum(found.counts) == len(readable) and found.not_finite == 0
    assert found.median == pytest.approx(np.median(norms), rel=1e-5)
    clipped = (gradients / np.maximum(norms, 1)[:, None]).sum(0)
    assert found.signal_to_noise == pytest.approx(np.linalg.norm(clipped) / (1.5 * len(clipped) ** 0.5), rel=1e-5)
    assert 0 < sum(found.counts[found.edges.index(1.0) + 1 :]) == (norms > 1).sum()
    assert statistics["clipped_fraction"] == (norms > 1).mean()


def test_a_bin_takes_its_upper_edge_and_the_outermost_take_everything_beyond():
    norms = [0.0, 1e-9, 2.0, 2.0 * (1 + 1e-6), 3.0, 1e9, float("inf"), float("nan"), 1.0]
    losses = torch.tensor([0.0] * 8 + [float("nan")])
    found = norm_histogram(Rows(torch.tensor(norms, dtype=torch.float64), losses), 2.0, 0.0, 0.0)
    one = found.edges.index(1.0)
    assert (found.counts[0], found.counts[-1], found.not_finite, sum(found.counts)) == (2, 1, 3, 6)
    assert found.counts[one] == 1 and found.counts[one + 1] == 1  # C itself is not clipped; a little more is
    assert sum(found.counts[one + 1 :]) == 3 and found.signal_to_noise is None
    assert found.edges == sorted(found.edges) and found.edges[0] == 1e-4 and found.edges[-1] == 1e4
