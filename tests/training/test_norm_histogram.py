"""What is noted of gradient norms, against NumPy and one image at a time."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from sfumato.randomness import Streams
from sfumato.training import step as step_module
from sfumato.training.step import norm_histogram
from tests.training.test_step import CLIPPING_NORM, bits, flat, problem, step_of

STREAMS = Streams(1)


def one_at_a_time(step, model, images, indices, randomness):
    """Gradient of each image's mean loss over its views, by plain autograd."""
    gradients = []
    for index in indices:
        inputs = step.views.make(images, torch.tensor([index]), randomness.view_bits, torch.device("cpu"))
        rows = inputs.flatten(0, 1) if step.views.augmult else inputs
        value = nn.functional.cross_entropy(model(rows), images.labels[[index]].expand(len(rows)))
        gradients.append(
            torch.cat([part.flatten() for part in torch.autograd.grad(value, list(model.parameters()))]).numpy()
        )
    return np.stack(gradients)


@pytest.mark.parametrize("augmult", [0, 3])
def test_histogram_median_and_signal_to_noise_are_numpy_s_of_gradients_taken_one_by_one(augmult):
    model, images = problem(unreadable=[4, 7])
    indices, readable = range(17), [index for index in range(17) if index not in (4, 7)]
    step = step_of(model, sigma=1.5, augmult=augmult)
    randomness = bits(step, indices, STREAMS)
    _, statistics = step.collect(images, dict(model.named_parameters()), randomness, with_norms=True)
    found = statistics.norms
    gradients = one_at_a_time(step, model, images, readable, randomness) / CLIPPING_NORM
    norms = np.linalg.norm(gradients, axis=1)
    counts, _ = np.histogram(norms, [0, *found.edges, np.inf])
    assert found.counts == counts.tolist() and sum(found.counts) == len(readable) and found.not_finite == 0
    assert found.median == pytest.approx(np.median(norms), rel=1e-5)
    clipped = (gradients / np.maximum(norms, 1)[:, None]).sum(0)
    assert found.signal_to_noise == pytest.approx(np.linalg.norm(clipped) / (1.5 * len(clipped) ** 0.5), rel=1e-5)
    assert 0 < sum(found.counts[found.edges.index(1.0) + 1 :]) == (norms > 1).sum()


def test_looking_at_the_norms_changes_no_bit_of_the_update_and_costs_nothing_when_off(monkeypatch):
    model, images = problem()
    step = step_of(model, sigma=1.0)
    randomness = bits(step, range(13), STREAMS)
    watched, seen = step.collect(images, dict(model.named_parameters()), randomness, with_norms=True)
    monkeypatch.setattr(step_module, "norm_histogram", None)  # would fail if it were called
    plain, unseen = step.collect(images, dict(model.named_parameters()), randomness)
    assert flat(watched).equal(flat(plain)) and unseen == dataclasses.replace(seen, norms=None)


def test_a_bin_takes_its_upper_edge_and_the_outermost_take_everything_beyond():
    norms = torch.tensor(
        [0.0, 1e-9, 2.0, 2.0 * (1 + 1e-6), 3.0, 1e9, float("inf"), float("nan"), 1.0], dtype=torch.float64
    )
    losses = torch.tensor([0.0] * 8 + [float("nan")])
    found = norm_histogram(norms, losses, 2.0, {"w": torch.zeros(3)}, 0.0)
    one = found.edges.index(1.0)
    assert (found.counts[0], found.counts[-1], found.not_finite, sum(found.counts)) == (2, 1, 3, 6)
    assert found.counts[one] == 1 and found.counts[one + 1] == 1  # C itself is not clipped; a little more is
    assert sum(found.counts[one + 1 :]) == 3 and found.signal_to_noise is None
    assert found.edges == sorted(found.edges) and found.edges[0] == 1e-4 and found.edges[-1] == 1e4
