"""Layers follow their formulas, and what is borrowed from PyTorch gives what PyTorch gives."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sfumato.models.layers import WeightStandardizedConv2d, init_conv, init_linear
from sfumato.torch_internals import quick_group_norm


def test_standardised_kernels_follow_the_formula_channel_by_channel():
    torch.manual_seed(0)
    conv = WeightStandardizedConv2d(6, 4, 3, groups=2, stride=2, padding=1).double()
    nn.init.normal_(conv.gain)
    nn.init.normal_(conv.bias)
    weight = torch.empty_like(conv.weight)
    for i, kernel in enumerate(conv.weight):
        mean = sum(kernel.flatten()) / 27
        variance = sum((value - mean) ** 2 for value in kernel.flatten()) / 27
        weight[i] = (kernel - mean) * conv.gain[i] / math.sqrt(max(variance.item() * 27, 1e-4))
    x = torch.randn(2, 6, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(conv(x), nn.functional.conv2d(x, weight, conv.bias, 2, 1, groups=2))


def test_a_constant_kernel_stays_finite():
    conv = WeightStandardizedConv2d(3, 5, 3)
    nn.init.constant_(conv.weight, 0.7)
    loss = conv(torch.randn(1, 3, 5, 5)).sum()
    gradients = torch.autograd.grad(loss, list(conv.parameters()))
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients) and len(gradients) == 3


def test_initial_weights_have_variance_one_over_fan_in():
    torch.manual_seed(0)
    conv, linear = init_conv(nn.Conv2d(32, 256, 3)), init_linear(nn.Linear(300, 400))
    assert conv.weight.std().item() == pytest.approx(1 / math.sqrt(32 * 9), rel=0.02)
    assert WeightStandardizedConv2d(32, 256, 3).weight.std().item() == pytest.approx(1 / math.sqrt(32 * 9), rel=0.02)
    assert linear.weight.std().item() == pytest.approx(1 / math.sqrt(300), rel=0.01)
    # Cut off at two standard deviations of a normal that keeps 0.88 of its own.
    cut = 2 / 0.8796 / math.sqrt(300)
    assert 0.999 * cut < linear.weight.abs().max() <= cut and not linear.bias.any() and not conv.bias.any()


@pytest.mark.parametrize(
    ("dtype", "memory_format"), [(torch.float32, torch.channels_last), (torch.bfloat16, torch.contiguous_format)]
)
def test_the_quick_shape_of_a_group_norm_is_the_slow_one(dtype, memory_format):
    def shapes():
        with FakeTensorMode():
            images = torch.empty(3, 8, 5, 6, dtype=dtype).to(memory_format=memory_format)
            results = torch.ops.aten.native_group_norm(images, None, None, 3, 8, 30, 4, 1e-5)
            return [(result.shape, result.stride(), result.dtype) for result in results]

    slow = shapes()
    with quick_group_norm():
        assert shapes() == slow
    assert shapes() == slow


def test_a_trace_that_fails_leaves_the_formula():
    with pytest.raises(ZeroDivisionError), quick_group_norm():
        1 / 0  # noqa: B018
    formula = torch._decomp.decomposition_table[torch.ops.aten.native_group_norm.default]
    normalized = formula(torch.randn(2, 4, 3, 3), None, None, 2, 4, 9, 2, 0.0)[0]
    assert normalized.unflatten(1, (2, 2)).var((2, 3, 4), correction=0).allclose(torch.ones(2, 2))
