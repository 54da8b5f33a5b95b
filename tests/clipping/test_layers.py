"""The batched engines against a loop over single images, layer by layer: where others were silently wrong."""

import pytest
import torch
from torch import nn

from sfumato.clipping import clipped_grad
from sfumato.models.layers import WeightStandardizedConv2d

CONVOLUTIONS = {
    "plain": {"kernel_size": 3},
    "one_by_one": {"kernel_size": 1},
    "no_bias": {"kernel_size": 3, "bias": False},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "stride_that_leaves_pixels_over": {"kernel_size": 2, "stride": 3},
    "uneven": {"kernel_size": (1, 3), "stride": (2, 1), "padding": (0, 1)},
    "dilated": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "grouped": {"kernel_size": 3, "groups": 2},
    "depthwise": {"kernel_size": 3, "groups": 4, "padding": 1},
    "same": {"kernel_size": 3, "padding": "same", "dilation": 2},
    "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "circular": {"kernel_size": 3, "padding": 2, "padding_mode": "circular"},
    "replicate": {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"},
    "grouped_strided_dilated": {"kernel_size": 2, "groups": 4, "stride": 2, "dilation": 2, "padding": 1},
}

LAYERS = {
    "group_norm": nn.GroupNorm(2, 4),
    "instance_norm": nn.InstanceNorm2d(4, affine=True),
    "layer_norm": nn.LayerNorm([4, 7, 6]),
    "prelu": nn.PReLU(4),
    "transposed": nn.ConvTranspose2d(4, 3, 3, stride=2),
    "standardized": WeightStandardizedConv2d(4, 4, 3),
    "standardized_grouped": WeightStandardizedConv2d(4, 4, 3, groups=2, stride=2),
    "max_pool": nn.Sequential(nn.Conv2d(4, 4, 2), nn.MaxPool2d(2)),
    "average_pool": nn.Sequential(nn.Conv2d(4, 4, 2), nn.AdaptiveAvgPool2d(3)),
    "linear": nn.Linear(6, 3),
}


def loss_fn(outputs, weights):
    return (outputs * weights).sum(dim=1) + outputs.square().sum(dim=1)


def assert_equals_a_loop(layer, memory_format, augmult, clipping_norm, engine):
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(layer, nn.SiLU(), nn.Flatten()).double().to(memory_format=memory_format)
    views = max(1, augmult)
    rows = torch.randn(5 * views, 4, 7, 6, generator=generator, dtype=torch.float64).contiguous(
        memory_format=memory_format
    )
    inputs = rows.unflatten(0, (5, augmult)) if augmult else rows
    weights = torch.linspace(-1, 1, model(rows[:1]).numel(), dtype=torch.float64).expand(5, -1)

    grad_fn = clipped_grad(
        model, loss_fn, clipping_norm=clipping_norm, augmult=augmult, microbatch_size=3, engine=engine
    )
    out = grad_fn(inputs, weights)
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = [torch.zeros_like(parameter) for parameter in parameters]
    for i in range(5):
        image_rows = [rows[i * views + j].clone(memory_format=torch.contiguous_format)[None] for j in range(views)]
        gradients = [
            torch.autograd.grad(loss_fn(model(row), weights[i : i + 1]).sum(), parameters) for row in image_rows
        ]
        mean = [torch.stack(parts).mean(0) for parts in zip(*gradients, strict=True)]
        norm = torch.cat([part.flatten() for part in mean]).norm()
        torch.testing.assert_close(out.grad_norms[i], norm.detach(), rtol=1e-9, atol=1e-12)
        for total, part in zip(expected, mean, strict=True):
            total += part * min(1 / clipping_norm, 1 / norm)
    for name, total in zip(names, expected, strict=True):
        torch.testing.assert_close(out.grad_sum[name], total, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("memory_format", "augmult", "engine"),
    [
        (torch.contiguous_format, 0, "graph"),
        (torch.channels_last, 3, "graph"),
        (torch.contiguous_format, 3, "func"),
    ],
    ids=["graph", "channels_last", "func"],
)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_agree_with_a_loop_over_images(name, memory_format, augmult, engine):
    torch.manual_seed(0)
    assert_equals_a_loop(nn.Conv2d(4, 4, **CONVOLUTIONS[name]), memory_format, augmult, 1.0, engine)


@pytest.mark.parametrize(("augmult", "engine"), [(0, "graph"), (3, "graph"), (3, "func")])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_agree_with_a_loop_over_images(name, augmult, engine):
    assert_equals_a_loop(LAYERS[name], torch.contiguous_format, augmult, 1.0, engine)
