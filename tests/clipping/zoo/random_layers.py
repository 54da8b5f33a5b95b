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


class AttentionFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).flatten(2)


class AttentionByHand(AttentionFunction):
    """Rows and heads folded into one, as many have written it."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2).flatten(0, 1) for part in self.qkv(x).chunk(3, -1))
        weights = F.dropout((q @ k.transpose(1, 2) / 2).softmax(-1), 0.3)
        return x + (weights @ v).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)


class DropConnect(nn.Module):
    """Drops weights, the same for the whole batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(6, 6, 1)

    def forward(self, x):
        return F.conv2d(x, F.dropout(self.layer.weight, 0.3), self.layer.bias)


class DropConnectByRow(nn.Module):
    """Drops weights for each row."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        keep = torch.rand(x.shape[0], 8, 8) < 0.7
        return torch.einsum("rti,rio->rto", x, self.layer.weight * keep) + self.layer.bias


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.generator)


class Windows(nn.Module):
    """Dropout of windows folded into rows."""

    def forward(self, x):
        return F.dropout(x.reshape(-1, 3, 4, 4), 0.3).reshape(x.shape)


class TokensFirst(nn.Module):
    """Dropout where rows are the second dimension."""

    def forward(self, x):
        return F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(6, 6, 1), nn.Dropout(0.3), nn.Tanh())
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


class Twice(nn.Module):
    """One dropout layer used twice."""

    def __init__(self):
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.3), nn.Conv2d(6, 6, 1)

    def forward(self, x):
        return self.drop(self.layer(self.drop(x)))


class DropBlock(nn.Module):
    """Drops blocks of pixels."""

    def forward(self, x):
        seeds = (torch.rand(x.shape[0], 1, *x.shape[2:]) < 0.1).float()
        return x * (1 - F.max_pool2d(seeds, 3, stride=1, padding=1))


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


def by_value_without_use(x):
    """Draws and throws away, depending on values."""
    if x.abs().max() > 5:
        torch.rand(3)
    return F.dropout(x, 0.3)


def for_large_pixels(x):
    """As many draws as there are large values."""
    x = x.clone()
    large = x > 1
    x[large] = torch.rand(int(large.sum()))
    return x


def mixes_pairs(x):
    """Mixup inside of the model."""
    return 0.7 * x + 0.3 * x[torch.randperm(x.shape[0])]


def shuffled_channels(x):
    return x[:, torch.randperm(x.shape[1])]


def of_the_batch(x):
    """One draw for the whole batch."""
    return x * torch.rand(())


def seeds_itself(x):
    torch.manual_seed(0)
    return x + 0.1 * torch.randn_like(x)


def timm_drop_path():
    from timm.layers import DropPath

    return net(Branch(DropPath(0.4)))


def timm_drop_block(batchwise):
    from timm.layers import DropBlock2d

    return net(DropBlock2d(0.3, block_size=2, batchwise=batchwise))


def torchvision_depth(mode):
    from torchvision.ops import StochasticDepth

    return net(Branch(StochasticDepth(0.4, mode)))


def zero_head(layer):
    """Dropout in front of a head of zeros."""
    model = net(layer)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


def drawn(name, says, factory):
    """For each row alone: must train."""
    return Entry(name, says, factory, harmless=True, draws=True)


def other(name, says, factory):
    """May be refused."""
    return Entry(name, says, factory, draws=True)


ENTRIES = [
    drawn("dropout", "dropout", lambda: net(nn.Dropout(0.3))),
    drawn("dropout_of_images", "dropout of pixels", lambda: net(first=nn.Dropout(0.3))),
    drawn("dropout_of_logits", "dropout of the output", lambda: nn.Sequential(net(), nn.Dropout(0.3))),
    drawn("dropout_in_place", "dropout in place", lambda: net(Layer(nn.Dropout(0.3, inplace=True)))),
    drawn("dropout_1d", "dropout of token vectors", lambda: TokenNet(nn.Dropout1d(0.3))),
    drawn("dropout_2d", "dropout of channels", lambda: net(nn.Dropout2d(0.3))),
    drawn("alpha_dropout", "alpha dropout", lambda: net(nn.AlphaDropout(0.3))),
    drawn("feature_alpha_dropout", "alpha dropout of channels", lambda: net(nn.FeatureAlphaDropout(0.3))),
    drawn("dropout_twice", "one dropout layer used twice", lambda: net(Twice())),
    drawn("dropout_all", "dropout of everything", lambda: net(lambda x: x + F.dropout(x, 1.0))),
    drawn("dropout_of_windows", "dropout of windows folded into rows", lambda: net(Windows())),
    drawn("dropout_tokens_first", "dropout with rows second", lambda: TokenNet(TokensFirst())),
    other("dropout_checkpointed", "dropout in a checkpointed block", lambda: net(Checkpointed(False))),
    drawn("dropout_before_zeros", "dropout in front of a head of zeros", lambda: zero_head(nn.Dropout(0.3))),
    drawn("stochastic_depth", "a branch left out for some rows", lambda: net(StochasticDepth())),
    drawn("stochastic_depth_torchvision", "torchvision's, for each row", lambda: torchvision_depth("row")),
    drawn("drop_path_timm", "timm's, for each row", timm_drop_path),
    drawn("drop_block", "blocks of pixels dropped", lambda: net(DropBlock())),
    drawn("patch_dropout", "half of the tokens, in an order drawn for each row", lambda: TokenNet(PatchDropout())),
    drawn("attention_module", "dropout in PyTorch's attention module", lambda: TokenNet(AttentionModule())),
    drawn("attention_function", "dropout in PyTorch's attention function", lambda: TokenNet(AttentionFunction())),
    drawn("attention_by_hand", "dropout of attention with rows and heads folded", lambda: TokenNet(AttentionByHand())),
    drawn(
        "transformer_layer_dropout",
        "PyTorch's transformer layer with dropout",
        lambda: TokenNet(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)),
    ),
    drawn("noise", "Gaussian noise by randn_like", lambda: net(Layer(lambda x: x + 0.1 * torch.randn_like(x)))),
    drawn("noise_by_shape", "Gaussian noise by shape", lambda: net(lambda x: x + 0.1 * torch.randn(x.shape))),
    drawn(
        "noise_by_rows",
        "one normal number for each row",
        lambda: net(lambda x: x * (1 + 0.1 * torch.randn(x.shape[0], 1, 1, 1))),
    ),
    drawn("noise_of_images", "Gaussian noise on pixels", lambda: net(first=lambda x: x + 0.1 * torch.randn_like(x))),
    drawn("noise_in_place", "noise by normal_", lambda: net(lambda x: x + torch.empty_like(x).normal_(0, 0.1))),
    drawn("uniform", "rand_like", lambda: net(lambda x: x * torch.rand_like(x))),
    drawn(
        "uniform_in_place",
        "scales by uniform_",
        lambda: net(lambda x: x * x.new_empty(x.shape).uniform_(0.5, 1.5)),
    ),
    drawn(
        "bernoulli_of_input",
        "drawn with probabilities from the input",
        lambda: net(lambda x: x * torch.bernoulli(x.detach().sigmoid())),
    ),
    drawn("gumbel_softmax", "gumbel softmax", lambda: net(lambda x: x * F.gumbel_softmax(x, dim=1))),
    other("latent", "a latent variable by torch.distributions", lambda: TokenNet(Sampled())),
    other("rrelu", "leaky units of random slope, drawn where values are negative", lambda: net(nn.RReLU())),
    other("drop_connect", "weights dropped, for the whole batch", lambda: net(DropConnect())),
    other("drop_connect_by_row", "weights dropped for each row", lambda: TokenNet(DropConnectByRow())),
    other(
        "dropout_checkpointed_reentrant",
        "dropout in a checkpointed block, the older way",
        lambda: net(Checkpointed(True)),
    ),
    other("stochastic_depth_batch", "torchvision's, for the whole batch", lambda: torchvision_depth("batch")),
    other("drop_block_timm", "timm's blocks of pixels", lambda: timm_drop_block(False)),
    other("drop_block_timm_batch", "the same for the whole batch", lambda: timm_drop_block(True)),
    other("of_the_batch", "one number for the whole batch", lambda: net(of_the_batch)),
    other(
        "noise_of_the_batch",
        "one noise image for the whole batch",
        lambda: net(lambda x: x + 0.1 * torch.randn(x.shape[1:])),
    ),
    other("mixup", "rows mixed with others by a random permutation", lambda: net(mixes_pairs)),
    other("shuffled_channels", "channels in a random order for the whole batch", lambda: net(shuffled_channels)),
    other("draws_by_value", "draws where values are large", lambda: net(by_value)),
    other("draws_by_value_unused", "draws and throws away where values are large", lambda: net(by_value_without_use)),
    other("draws_for_large", "as many draws as there are large values", lambda: net(for_large_pixels)),
    other("own_generator", "a generator of its own", lambda: net(OwnGenerator())),
    other(
        "numpy_noise",
        "NumPy's random numbers",
        lambda: net(lambda x: x + 0.1 * torch.from_numpy(np.random.randn(*x.shape)).to(x)),
    ),
    other("python_noise", "Python's random numbers", lambda: net(lambda x: x * random.random())),
    other("seeds_itself", "sets the seed in its forward pass", lambda: net(seeds_itself)),
    other("integers", "whole numbers", lambda: net(lambda x: x * torch.randint(1, 3, x.shape))),
    other(
        "multinomial",
        "tokens drawn by their size",
        lambda: TokenNet(lambda x: x * (1 + torch.multinomial(x.detach().square().mean(2) + 0.1, 4))[..., None]),
    ),
    other("poisson", "Poisson numbers", lambda: net(lambda x: x + 0.1 * torch.poisson(x.detach().abs()))),
    other("exponential", "exponential numbers", lambda: net(lambda x: x * torch.empty_like(x).exponential_())),
]
