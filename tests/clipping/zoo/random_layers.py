"""Layers that draw random numbers: by PyTorch's own functions for each row, and in ways that no key can cover."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.clipping.zoo.entry import Entry, TokenNet, net


class Layer(nn.Module):
    """A convolution and what is done to its output in training."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Conv2d(6, 6, 1), function

    def forward(self, x):
        return self.function(self.layer(x)) if self.training else self.layer(x)


class StochasticDepth(nn.Module):
    """A branch that is left out for some rows."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Conv2d(6, 6, 1)

    def forward(self, x):
        keep = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.6) / 0.6
        return x + keep * self.branch(x)


class Branch(nn.Module):
    """A branch with one of other libraries' stochastic depths."""

    def __init__(self, drop):
        super().__init__()
        self.branch, self.drop = nn.Conv2d(6, 6, 1), drop

    def forward(self, x):
        return x + self.drop(self.branch(x))


class AttentionModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


class DropConnect(nn.Module):
    """Drops weights, the same for the whole batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(6, 6, 1)

    def forward(self, x):
        return F.conv2d(x, F.dropout(self.layer.weight, 0.3), self.layer.bias)


class Windows(nn.Module):
    """Dropout of windows folded into rows."""

    def forward(self, x):
        return F.dropout(x.reshape(-1, 3, 4, 4), 0.3).reshape(x.shape)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(6, 6, 1), nn.Dropout(0.3), nn.Tanh())
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


class PatchDropout(nn.Module):
    """Keeps two tokens of four for each row, in an order of its own."""

    def forward(self, x):
        keep = torch.rand(x.shape[:2]).argsort(1)[:, :2]
        return x.gather(1, keep[:, :, None].expand(-1, -1, x.shape[2]))


class Sampled(nn.Module):
    """A latent variable: mean and deviation from the row, noise by the reparametrisation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x):
        mean, log_deviation = self.layer(x).chunk(2, -1)
        return torch.distributions.Normal(mean, log_deviation.tanh().exp()).rsample()


def by_value(x):
    """How often it draws depends on values."""
    return x + torch.rand(x.shape) if x.abs().max() > 5 else x


def mixes_pairs(x):
    """Mixup inside of the model."""
    return 0.7 * x + 0.3 * x[torch.randperm(x.shape[0])]


def timm_drop_block(batchwise):
    from timm.layers import DropBlock2d

    return net(DropBlock2d(0.3, block_size=2, batchwise=batchwise))


def torchvision_depth(mode):
    from torchvision.ops import StochasticDepth

    return net(Branch(StochasticDepth(0.4, mode)))


def drawn(name, says, factory):
    """For each row alone: must train."""
    return Entry(name, says, factory, harmless=True, draws=True)


def other(name, says, factory):
    """May be refused."""
    return Entry(name, says, factory, draws=True)


ENTRIES = [
    drawn("dropout", "dropout", lambda: net(nn.Dropout(0.3))),
    drawn("dropout_of_windows", "dropout of windows folded into rows", lambda: net(Windows())),
    other("dropout_checkpointed", "dropout in a checkpointed block", lambda: net(Checkpointed(False))),
    drawn("stochastic_depth", "a branch left out for some rows", lambda: net(StochasticDepth())),
    drawn("stochastic_depth_torchvision", "torchvision's, for each row", lambda: torchvision_depth("row")),
    drawn("patch_dropout", "half of the tokens, in an order drawn for each row", lambda: TokenNet(PatchDropout())),
    drawn("attention_module", "dropout in PyTorch's attention module", lambda: TokenNet(AttentionModule())),
    drawn(
        "transformer_layer_dropout",
        "PyTorch's transformer layer with dropout",
        lambda: TokenNet(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)),
    ),
    drawn("noise", "Gaussian noise by randn_like", lambda: net(Layer(lambda x: x + 0.1 * torch.randn_like(x)))),
    drawn(
        "bernoulli_of_input",
        "drawn with probabilities from the input",
        lambda: net(lambda x: x * torch.bernoulli(x.detach().sigmoid())),
    ),
    drawn("gumbel_softmax", "gumbel softmax", lambda: net(lambda x: x * F.gumbel_softmax(x, dim=1))),
    other("latent", "a latent variable by torch.distributions", lambda: TokenNet(Sampled())),
    other("rrelu", "leaky units of random slope, drawn where values are negative", lambda: net(nn.RReLU())),
    other("drop_connect", "weights dropped, for the whole batch", lambda: net(DropConnect())),
    other(
        "dropout_checkpointed_reentrant",
        "dropout in a checkpointed block, the older way",
        lambda: net(Checkpointed(True)),
    ),
    other("stochastic_depth_batch", "torchvision's, for the whole batch", lambda: torchvision_depth("batch")),
    other("drop_block_timm", "timm's blocks of pixels", lambda: timm_drop_block(False)),
    other("mixup", "rows mixed with others by a random permutation", lambda: net(mixes_pairs)),
    other("draws_by_value", "draws where values are large", lambda: net(by_value)),
    other(
        "numpy_noise",
        "NumPy's random numbers",
        lambda: net(lambda x: x + 0.1 * torch.from_numpy(np.random.randn(*x.shape)).to(x)),
    ),
    other("python_noise", "Python's random numbers", lambda: net(lambda x: x * random.random())),
]
