"""Layers that draw random numbers: by PyTorch's own functions for each row, and in ways that no key can cover."""

import random

import numpy as np
import torch
from timm.layers import DropBlock2d
from torch import nn
from torch.nn import functional as F
from torchvision.ops import StochasticDepth

from tests.clipping.problems import Made
from tests.clipping.zoo.entry import Entry, TokenNet, net
from tests.clipping.zoo.functions import checkpointed


def noisy(self, x):
    """In training."""
    out = self.layer(x)
    return out + 0.1 * torch.randn_like(out) if self.training else out


def stochastic_depth(self, x):
    """A branch that is left out for some rows."""
    keep = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.6) / 0.6
    return x + keep * self.layer(x)


def drop_connect(self, x):
    """Drops weights, the same for the whole batch."""
    return F.conv2d(x, F.dropout(self.layer.weight, 0.3), self.layer.bias)


def convolved(function):
    return net(Made(function, layer=nn.Conv2d(6, 6, 1)))


def attention_module():
    attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    return TokenNet(Made(lambda self, x: x + self.layer(x, x, x, need_weights=False)[0], layer=attention))


def dropout_checkpointed(use_reentrant):
    return net(checkpointed(nn.Conv2d(6, 6, 1), nn.Dropout(0.3), nn.Tanh(), use_reentrant=use_reentrant))


def patch_dropout(x):
    """Keeps two tokens of four for each row, in an order of its own."""
    keep = torch.rand(x.shape[:2]).argsort(1)[:, :2]
    return x.gather(1, keep[:, :, None].expand(-1, -1, x.shape[2]))


def sampled(self, x):
    """A latent variable: mean and deviation from the row, noise by the reparametrisation."""
    mean, log_deviation = self.layer(x).chunk(2, -1)
    return torch.distributions.Normal(mean, log_deviation.tanh().exp()).rsample()


def by_value(x):
    """How often it draws depends on values."""
    return x + torch.rand(x.shape) if x.abs().max() > 5 else x


def mixes_pairs(x):
    """Mixup inside of the model."""
    return 0.7 * x + 0.3 * x[torch.randperm(x.shape[0])]


def torchvision_depth(mode):
    drop = StochasticDepth(0.4, mode)
    return net(Made(lambda self, x: x + self.drop(self.layer(x)), layer=nn.Conv2d(6, 6, 1), drop=drop))


def drawn(name, says, factory):
    """For each row alone: must train."""
    return Entry(name, says, factory, harmless=True, draws=True)


def other(name, says, factory):
    """May be refused."""
    return Entry(name, says, factory, draws=True)


ENTRIES = [
    drawn("dropout", "dropout", lambda: net(nn.Dropout(0.3))),
    drawn(
        "dropout_of_windows",
        "dropout of windows folded into rows",
        lambda: net(lambda x: F.dropout(x.reshape(-1, 3, 4, 4), 0.3).reshape(x.shape)),
    ),
    other("dropout_checkpointed", "dropout in a checkpointed block", lambda: dropout_checkpointed(False)),
    drawn("stochastic_depth", "a branch left out for some rows", lambda: convolved(stochastic_depth)),
    drawn("stochastic_depth_torchvision", "torchvision's, for each row", lambda: torchvision_depth("row")),
    drawn("patch_dropout", "half of the tokens, in an order drawn for each row", lambda: TokenNet(patch_dropout)),
    drawn("attention_module", "dropout in PyTorch's attention module", attention_module),
    drawn(
        "transformer_layer_dropout",
        "PyTorch's transformer layer with dropout",
        lambda: TokenNet(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)),
    ),
    drawn("noise", "Gaussian noise by randn_like", lambda: convolved(noisy)),
    drawn(
        "bernoulli_of_input",
        "drawn with probabilities from the input",
        lambda: net(lambda x: x * torch.bernoulli(x.detach().sigmoid())),
    ),
    drawn("gumbel_softmax", "gumbel softmax", lambda: net(lambda x: x * F.gumbel_softmax(x, dim=1))),
    other(
        "latent", "a latent variable by torch.distributions", lambda: TokenNet(Made(sampled, layer=nn.Linear(8, 16)))
    ),
    other("rrelu", "leaky units of random slope, drawn where values are negative", lambda: net(nn.RReLU())),
    other("drop_connect", "weights dropped, for the whole batch", lambda: convolved(drop_connect)),
    other("dropout_checkpointed_reentrant", "the older way", lambda: dropout_checkpointed(True)),
    other("stochastic_depth_batch", "torchvision's, for the whole batch", lambda: torchvision_depth("batch")),
    other("drop_block_timm", "timm's blocks of pixels", lambda: net(DropBlock2d(0.3, block_size=2))),
    other("mixup", "rows mixed with others by a random permutation", lambda: net(mixes_pairs)),
    other("draws_by_value", "draws where values are large", lambda: net(by_value)),
    other(
        "numpy_noise",
        "NumPy's random numbers",
        lambda: net(lambda x: x + 0.1 * torch.from_numpy(np.random.randn(*x.shape)).to(x)),
    ),
    other("python_noise", "Python's random numbers", lambda: net(lambda x: x * random.random())),
]
