"""NF-ResNets beside timm's."""

import pytest
import torch
from torch import nn

from sfumato.models import build
from sfumato.models.resnets import NfResNet

GAIN = 1.7139588594436646


def as_timm(ours, theirs):
    """Copies our weights into timm's network; its batch normalisation of weights adds 1e-6 to their variance, which
    is nothing beside weights a thousand times as large.
    """
    blocks = [block for stage in theirs.stages for block in stage]
    pairs = [(ours.stem, theirs.stem.conv)]
    for block, other in zip(ours.blocks, blocks, strict=True):
        pairs += [(block.reduce, other.conv1), (block.middle, other.conv2), (block.expand, other.conv3)]
        if block.shortcut is not None:
            pairs.append((block.shortcut, other.downsample.conv))
            if other.stride > 1:  # De et al. leave pixels out where timm averages four
                other.downsample.pool = nn.AvgPool2d(1, 2)
        other.skipinit_gain.data.copy_(block.skip_gain[0])
    for layer, other in pairs:
        other.weight.data.copy_(1000 * layer.weight)
        other.gain.data.copy_(layer.gain)
        other.bias.data.copy_(layer.bias)
    # timm scales what a convolution gives, the paper what an activation gives.
    theirs.stem.conv.gain.data /= GAIN
    theirs.head.fc.weight.data.copy_(ours.classifier.weight * GAIN)
    theirs.head.fc.bias.data.copy_(ours.classifier.bias)


def test_the_network_is_timm_s_where_the_definitions_agree():
    timm = pytest.importorskip("timm")
    ours = build("nf_resnet50", image_size=64, channels=3, num_classes=7, seed=3)
    theirs = timm.create_model("nf_resnet50", num_classes=7, skipinit=True)
    for stage, blocks in enumerate(theirs.stages):
        for index, block in enumerate(blocks):
            block.stride = 2 if index == 0 and stage else 1
    for parameter in ours.parameters():  # so that gains, biases and skip gains count
        parameter.data += 0.1 * torch.randn_like(parameter)
    as_timm(ours, theirs)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        one, other = ours.double()(images.double()), theirs.double()(images.double())
    assert (one - other).norm() <= 1e-5 * other.norm()


def test_with_a_skip_gain_of_zero_a_block_that_keeps_its_shape_changes_nothing():
    block = NfResNet(50, 10, skip_init=0.0).blocks[1]
    x = torch.randn(2, 256, 8, 8)
    assert torch.equal(block(x), x)
