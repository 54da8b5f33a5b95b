"""The clipped sum as a pure function is what `clipped_grad` sums, at any parameters, for any rows."""

import pytest
import torch
from torch import nn
from torch.func import vmap

from sfumato.clipping import clipped_grad
from sfumato.clipping.func import clipped_sum
from tests.clipping.problems import FIXED, cross_entropy, distance, norm

CLIPPING_NORM = 0.3


def model_of(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    ).to(dtype)


def rows_of(count, views=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    scales = 10 ** torch.linspace(-4, 1, count, dtype=dtype)
    inputs = torch.randn(count, views, 1, 6, 6, generator=generator, dtype=dtype) * scales.view(-1, 1, 1, 1, 1)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def trained(model):
    return {name: value.detach() for name, value in model.named_parameters()}


def pure_sum(model, inputs, targets, is_real=None, parameters=None):
    real = torch.ones(len(inputs), dtype=torch.bool) if is_real is None else is_real
    given = trained(model) if parameters is None else parameters
    return clipped_sum(given, model, cross_entropy, inputs, (targets,), real, clipping_norm=CLIPPING_NORM)


def reference_sum(model, inputs, targets):
    settings = {"clipping_norm": CLIPPING_NORM, "augmult": inputs.shape[1], "methods": FIXED}
    return clipped_grad(model, cross_entropy, engine="reference", **settings)(inputs, targets).grad_sum


@pytest.mark.parametrize(("count", "views"), [(1, 1), (1, 3), (7, 1), (7, 3)])
def test_it_is_the_sum_of_the_reference_for_any_number_of_rows(count, views):
    model = model_of()
    inputs, targets = rows_of(count, views)
    found, truth = pure_sum(model, inputs, targets), reference_sum(model, inputs, targets)
    assert distance(found, truth) < 1e-10
    assert norm(truth) > 0.01
    assert list(found) == list(truth) and all(value.dtype == torch.float64 for value in found.values())


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_many_parameter_sets_side_by_side_are_each_by_itself(dtype, tolerance):
    model = model_of(dtype)
    inputs, targets = rows_of(4, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    stacked = {
        name: value + 0.3 * torch.randn(5, *value.shape, generator=generator, dtype=dtype)
        for name, value in trained(model).items()
    }
    found = vmap(lambda parameters: pure_sum(model, inputs, targets, parameters=parameters))(stacked)
    for number in range(5):
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(stacked[name][number])
        own = {name: value[number] for name, value in found.items()}
        assert distance(own, reference_sum(model, inputs, targets)) < tolerance
        assert all(value.dtype == dtype for value in own.values())


def test_the_model_keeps_its_parameters_and_has_no_gradient():
    model = model_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, targets = rows_of(3)
    moved = {name: value + 1 for name, value in trained(model).items()}
    assert distance(pure_sum(model, inputs, targets, parameters=moved), pure_sum(model, inputs, targets)) > 0.01
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())


def test_one_example_moves_the_sum_by_at_most_the_sensitivity():
    model = model_of()
    inputs, targets = rows_of(8)
    whole = pure_sum(model, inputs, targets)
    moved = []
    for left_out in range(8):
        is_real = torch.arange(8) != left_out
        moved.append(distance(whole, pure_sum(model, inputs, targets, is_real)))
    assert max(moved) <= 1 + 1e-9 and max(moved) > 0.999
