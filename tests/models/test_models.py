"""Figures and shapes of the networks, and that each may be trained privately."""

import pytest
import torch
from torch import nn

from sfumato.clipping import findings
from sfumato.errors import InputError
from sfumato.models import build
from sfumato.models.resnets import WideResNet
from sfumato.models.small import SmallCNN


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "options", "parameters"),
    [
        ("wide_resnet", (32, 3, 10), {"depth": 16, "width": 4}, 2_753_818),  # De et al. 2022
        ("wide_resnet", (32, 3, 10), {"depth": 28, "width": 10}, 36_500_378),
        ("wide_resnet", (32, 3, 10), {"weight_standardization": False}, 2_751_562),  # Sander et al. 2022
        ("small_cnn", (28, 1, 10), {}, 20_586),
        ("tanh_cnn", (28, 1, 10), {}, 26_010),
        ("lenet", (28, 1, 10), {}, 61_706),
        ("nf_resnet50", (224, 3, 1000), {}, 25_557_048),
    ],
)
def test_parameter_counts_are_the_published_ones(name, shape, options, parameters):
    size, channels, classes = shape
    with torch.device("meta"):
        model = build(name, image_size=size, channels=channels, num_classes=classes, options=options, seed=0)
    assert count(model) == parameters


@pytest.mark.parametrize(("size", "channels", "classes"), [(13, 1, 2), (100, 3, 10)])
def test_the_default_network_takes_any_size_from_eight_and_stays_small(size, channels, classes):
    model = build("small_cnn", image_size=size, channels=channels, num_classes=classes, seed=0)
    assert model(torch.randn(2, channels, size, size)).shape == (2, classes)
    assert 4_000 < count(model) < 150_000


SMALLEST = {"small_cnn": 8, "tanh_cnn": 14, "lenet": 12, "wide_resnet": 8, "nf_resnet50": 32}


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_size_works_and_a_smaller_one_is_refused_by_name(name):
    size = SMALLEST[name]
    model = build(name, image_size=size, channels=1, num_classes=4, seed=0)
    assert model(torch.randn(3, 1, size, size)).shape == (3, 4)
    with pytest.raises(InputError, match=f"model {name} needs images of at least {size}x{size}"):
        build(name, image_size=size - 1, channels=1, num_classes=4, seed=0)


WIDE = {"width": 1, "normalization": "none", "weight_standardization": True}
OTHER = {"width": 1, "order": "norm-activation", "weight_standardization": False}


@pytest.mark.parametrize(
    ("name", "options"),
    [("small_cnn", {"order": "norm-activation"}), ("tanh_cnn", {}), ("wide_resnet", WIDE), ("wide_resnet", OTHER)],
)
def test_every_network_may_be_trained_privately(name, options):
    model = build(name, image_size=16, channels=3, num_classes=5, options=options, seed=0)
    assert findings(model, torch.zeros(1, 3, 16, 16)) == []


def layers_run(model, size=8):
    """The classes of the elementary layers, in the order in which they run."""
    seen = []
    for module in model.modules():
        if not list(module.children()):
            name = type(module).__name__.replace("WeightStandardized", "")
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    model(torch.randn(1, 3, size, size))
    return seen


@pytest.mark.parametrize(
    ("options", "before_conv"),
    [
        ({}, ["ReLU", "GroupNorm"]),
        ({"order": "norm-activation"}, ["GroupNorm", "ReLU"]),
        ({"normalization": "none"}, ["ReLU"]),
    ],
)
def test_every_convolution_but_the_stem_comes_after_activation_and_norm_in_the_chosen_order(options, before_conv):
    seen = [layer for layer in layers_run(WideResNet(10, depth=16, width=1, **options)) if layer != "Identity"]
    # 15 convolutions after the stem (12 residual, 3 shortcuts), and the classifier.
    assert seen == ["Conv2d"] + (before_conv + ["Conv2d"]) * 15 + before_conv + ["Linear"]


@pytest.mark.parametrize(
    ("order", "after_conv"), [("activation-norm", ["ReLU", "GroupNorm"]), ("norm-activation", ["GroupNorm", "ReLU"])]
)
def test_every_stage_of_the_default_network_ends_in_activation_and_norm_in_the_chosen_order(order, after_conv):
    stage = ["Conv2d", "MaxPool2d", *after_conv]
    assert layers_run(SmallCNN(10, 32, 3, order=order), size=32) == stage * 2 + ["Flatten", "Linear"]


def test_each_group_of_a_wide_resnet_has_its_own_shortcut_and_stride():
    model = WideResNet(10, depth=16, width=2)
    shortcuts = [block.shortcut[1] for block in model.blocks if not isinstance(block.shortcut, nn.Identity)]
    expected = [(16, 32, (1, 1), (1, 1)), (32, 64, (1, 1), (2, 2)), (64, 128, (1, 1), (2, 2))]
    assert [(c.in_channels, c.out_channels, c.kernel_size, c.stride) for c in shortcuts] == expected
    groups = {norm.num_groups for norm in model.modules() if isinstance(norm, nn.GroupNorm)}
    assert len(model.blocks) == 6 and groups == {16}


def test_impossible_networks_are_refused():
    for name, options, message in (
        ("wide_resnet", {"depth": 4}, "6n \\+ 4"),
        ("wide_resnet", {"width": 0}, "width must be at least 1"),
        ("wide_resnet", {"order": "relu"}, "Known are activation-norm, norm-activation"),
        ("wide_resnet", {"normalization": "batch"}, "Known are group, none"),
        ("wide_resnet", {"groups": 3}, "groups = 3"),
        ("small_cnn", {"order": "norm"}, "Known are activation-norm, norm-activation"),
    ):
        with pytest.raises(InputError, match=message):
            build(name, image_size=32, channels=3, num_classes=10, options=options, seed=0)
