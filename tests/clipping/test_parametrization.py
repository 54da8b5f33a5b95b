"""The closed form of weight standardisation, for several weights at once, is what autograd gives one by one."""

import pytest
import torch

from sfumato.clipping.graph.parametrization import pull_back, standardized
from sfumato.clipping.graph.rules.site import Direction, MaterializedGrads
from sfumato.models.layers import WeightStandardizedConv2d

EXAMPLES = 3


@pytest.fixture
def problem():
    return problem_of(1.0)


def problem_of(size):
    """Three standardised weights of different shapes, one without a gain, and gradients of each for three examples."""
    torch.manual_seed(0)
    weights, parameters = [], []
    for channels, kernel, has_gain in ((4, 3, True), (6, 1, True), (5, 2, False)):
        conv = WeightStandardizedConv2d(7, channels, kernel).double()
        torch.nn.init.normal_(conv.gain)
        conv.gain.requires_grad_(has_gain)
        with torch.no_grad():
            conv.weight *= size
        weights.append(conv.standardized_weight())
        parameters.append([conv.gain, conv.weight] if has_gain else [conv.weight])
    return weights, parameters, [torch.randn(EXAMPLES, *weight.shape).double() for weight in weights]


def measured(problem):
    """The closed form, and what is known of each gradient's channels."""
    weights, parameters, rows = problem
    form, _ = standardized(weights, parameters)
    each = zip(rows, form.along, weights, strict=True)
    return form, [MaterializedGrads(part).moments(Direction(along, weight)) for part, along, weight in each]


def one_by_one(weights, parameters, gradients):
    """For each weight, the gradients of its parameters."""
    return [
        pull_back([weight], own, [gradient])
        for weight, own, gradient in zip(weights, parameters, gradients, strict=True)
    ]


SIZES = pytest.mark.parametrize("size", [1.0, 1e-4], ids=["", "so small that the clamp binds"])


@SIZES
def test_the_way_back_is_autograds(size):
    weights, parameters, rows = problem_of(size)
    form, holds = standardized(weights, parameters)
    assert holds.tolist() == [True] * 3
    gradients = [part[0] for part in rows]
    for own, true in zip(form.pull_back(gradients), one_by_one(weights, parameters, gradients), strict=True):
        for part, value in zip(own, true, strict=True):
            torch.testing.assert_close(part.flatten(), value.flatten(), rtol=1e-9, atol=1e-12)


@SIZES
def test_norms_are_those_of_what_autograd_gives(size):
    weights, parameters, rows = problem = problem_of(size)
    form, moments = measured(problem)
    squares, error = form.square_norms(moments)
    for i in range(EXAMPLES):
        true = one_by_one(weights, parameters, [part[i] for part in rows])
        torch.testing.assert_close(
            squares[i], sum(value.square().sum() for own in true for value in own), rtol=1e-9, atol=0.0
        )
    assert bool((error > 0).all()) and bool((error < 1e-12 * squares).all())


def test_what_moments_may_be_off_by_is_in_the_bound(problem):
    """Moved by as much as their bounds say, for each weight alone, they move the squares by no more than the bound that
    comes out.
    """
    form, moments = measured(problem)
    squares, rounding = form.square_norms(moments)
    for which in range(3):
        part, off = moments[which], 1e-6
        errors = (off * part.squares, off * part.plain.abs(), off * part.along.abs())
        stated = [*moments]
        stated[which] = part[:3] + errors
        error = form.square_norms(stated)[1]
        for name, by in zip(("squares", "plain", "along"), errors, strict=True):
            moved = [*moments]
            moved[which] = part._replace(**{name: getattr(part, name) + by})
            change = (form.square_norms(moved)[0] - squares).abs()
            assert bool((change > 100 * rounding).all())  # the bound without these errors would not do
            assert bool((change <= error * (1 + 1e-5)).all())


def test_the_bound_holds_where_there_is_nothing_but_error(problem):
    """Shares of zero that are not zero: what counts is the square of what they are off by."""
    form, moments = measured(problem)
    none = [part._replace(plain=torch.zeros_like(part.plain), along=torch.zeros_like(part.along)) for part in moments]
    for name in ("plain", "along"):
        off = [1e-3 * part.squares.sqrt() for part in none]
        stated = [
            part[:3] + tuple(by if name == other else 0 * by for other in part._fields[:3])
            for part, by in zip(none, off, strict=True)
        ]
        moved = [part._replace(**{name: by}) for part, by in zip(none, off, strict=True)]
        change = (form.square_norms(moved)[0] - form.square_norms(none)[0]).abs()
        assert (change > 0).all() and (change <= form.square_norms(stated)[1] * (1 + 1e-5)).all()


def test_a_weight_that_is_not_standardised_is_the_only_one_that_does_not_hold(problem):
    weights, parameters, _ = problem
    bent = torch.nn.Parameter(torch.randn(4, 9).double())
    _, holds = standardized([*weights, bent.tanh()], [*parameters, [bent]])
    assert holds.tolist() == [True, True, True, False]
