"""Operations that mix images: openly, in disguise, little, or only for rare values."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.clipping.zoo.entry import Do, Entry, TokenNet, net


def beyond(limit):
    """Mixes neighbours where a pixel is beyond a limit."""
    return lambda x: x + 0.5 * x.roll(1, 0) * (x.abs() > limit)


def if_any_beyond(limit):
    """Takes the batch's mean off where any pixel of the batch is beyond a limit."""
    return lambda x: x - x.mean(0) * (x.abs().amax() > limit)


class BatchNormBranch(nn.Module):
    """A branch of batch statistics that begins at zero."""

    def __init__(self):
        super().__init__()
        self.norm, self.gain = nn.BatchNorm2d(6, track_running_stats=False), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gain * self.norm(x)


class FrozenAffine(nn.BatchNorm2d):
    def __init__(self, channels, **options):
        super().__init__(channels, **options)
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)


class GhostBatchNorm(nn.Module):
    """Batch statistics of groups of four rows."""

    def forward(self, x):
        return torch.cat([part - part.mean((0, 2, 3), keepdim=True) for part in x.split(4)])


class MinibatchDeviation(nn.Module):
    """Adds the deviation over rows as a feature, as discriminators of generated images do."""

    def forward(self, x):
        return x + x.var(0, correction=0).add(1e-4).sqrt().mean()


class Experts(nn.Module):
    """Two experts, each taking at most half of the rows, those of highest score: the others pass."""

    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x):
        scores = self.gate(x).mean((1, 2))
        best = torch.zeros_like(scores).scatter(0, scores.topk((len(x) + 1) // 2).indices, 1.0)[:, None, None]
        return x + best * scores.sigmoid()[:, None, None] * self.expert(x)


class QuantizedByBatch(nn.Module):
    """Rounds to 127 levels of the largest value of the batch, gradients passed through."""

    def forward(self, x):
        scale = x.detach().abs().amax() / 127 + 1e-12
        return x + ((x / scale).round() * scale - x).detach()


class RecurrentOverRows(nn.Module):
    """A recurrent layer that takes rows for time (batch_first forgotten)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(8, 8)

    def forward(self, x):
        return self.layer(x)[0]


class AttentionOverRows(nn.Module):
    """Attention that takes rows for tokens (batch_first forgotten)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return x + self.layer(x, x, x, need_weights=False)[0]


class ConvolutionOverRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(96, 96, 3, padding=1, groups=96)

    def forward(self, x):
        return self.layer(x.flatten(1).T[None])[0].T.reshape(x.shape)


def similar_rows(x):
    flat = F.normalize(x.flatten(1))
    return x + (0.1 * flat @ flat.T @ x.flatten(1)).view_as(x)


def equal_rows_share(x):
    """Divides each row by how often it occurs."""
    flat = x.flatten(1).detach()
    return x / (flat[:, None] == flat[None]).all(2).sum(1).view(-1, 1, 1, 1)


def black_image_silences(x):
    """An image of nearly zeros halves the others."""
    dark = x.abs().amax((1, 2, 3)) < 1e-2
    return x * (1 - 0.5 * dark.any() * ~dark).view(-1, 1, 1, 1)


def scrambled(x):
    """Rows and channels change places, and back by the wrong view."""
    return x.transpose(0, 1).reshape(x.shape)


ENTRIES = [
    Entry("beyond_12", "mixes neighbours beyond |12|", lambda: net(first=beyond(12.0))),
    Entry("beyond_100", "mixes neighbours beyond |100|", lambda: net(first=beyond(100.0))),
    Entry("beyond_250", "mixes neighbours beyond |250|", lambda: net(first=beyond(250.0))),
    Entry("any_beyond_12", "takes the mean off if any pixel is beyond |12|", lambda: net(first=if_any_beyond(12.0))),
    Entry("any_beyond_100", "takes the mean off if any pixel is beyond |100|", lambda: net(first=if_any_beyond(100.0))),
    Entry(
        "branches_beyond_100",
        "the same by a branch",
        lambda: net(first=lambda x: x - x.mean(0) if x.abs().amax() > 100 else x),
    ),
    Entry("black_image", "a black image halves the others", lambda: net(first=black_image_silences)),
    Entry("equal_rows", "divides rows by how often they occur", lambda: net(first=equal_rows_share)),
    Entry("little_mean", "a thousandth of the batch's mean", lambda: net(lambda x: x - 1e-3 * x.mean(0))),
    Entry("tiny_mean", "3e-4 of the batch's mean of images", lambda: net(first=lambda x: x - 3e-4 * x.mean(0))),
    Entry("mean", "takes the batch's mean off", lambda: net(lambda x: x - x.mean(0))),
    Entry("mean_detached", "takes the batch's mean off, detached", lambda: net(lambda x: x - x.detach().mean(0))),
    Entry(
        "number_from_batch",
        "divides by a plain number taken from the batch",
        lambda: net(lambda x: x / (1 + x.abs().max().item())),
    ),
    Entry(
        "list_from_batch",
        "adds plain numbers taken from the batch",
        lambda: net(lambda x: x + sum(x.detach().mean((1, 2, 3)).tolist())),
    ),
    Entry(
        "numpy_from_batch",
        "divides by NumPy's maximum of the batch",
        lambda: net(lambda x: x / float(1 + abs(x.detach().numpy()).max())),
    ),
    Entry("similar_rows", "adds similar rows through x @ x.T", lambda: net(similar_rows)),
    Entry("softmax_over_rows", "softmax along the wrong dimension", lambda: net(lambda x: x * x.tanh().softmax(0))),
    Entry("normalized_over_rows", "normalises along the wrong dimension", lambda: net(lambda x: F.normalize(x, dim=0))),
    Entry("scrambled", "a permutation undone by a view", lambda: net(scrambled)),
    Entry("maximum_over_rows", "adds the batch's maximum", lambda: net(lambda x: x + 0.1 * x.amax(0))),
    Entry("ranks", "multiplies by the rank among rows", lambda: net(lambda x: x * (1 + x.argsort(0).argsort(0)))),
    Entry("quantized_by_batch", "levels of the batch's largest value", lambda: net(QuantizedByBatch())),
    Entry("experts", "experts of limited capacity", lambda: TokenNet(Experts())),
    Entry("recurrent_over_rows", "rows taken for time", lambda: TokenNet(RecurrentOverRows())),
    Entry("attention_over_rows", "rows taken for tokens", lambda: TokenNet(AttentionOverRows())),
    Entry("convolution_over_rows", "a convolution along rows", lambda: net(ConvolutionOverRows())),
    Entry("minibatch_deviation", "adds the deviation over rows", lambda: net(MinibatchDeviation())),
    Entry("ghost_batch_norm", "batch statistics of groups of four", lambda: net(GhostBatchNorm())),
    Entry("batch_norm", "batch norm", lambda: net(nn.BatchNorm2d(6))),
    Entry("batch_norm_average", "batch norm that averages all batches", lambda: net(nn.BatchNorm2d(6, momentum=None))),
    Entry(
        "batch_norm_untracked",
        "batch norm without running statistics",
        lambda: net(nn.BatchNorm2d(6, track_running_stats=False)),
    ),
    Entry("batch_norm_frozen", "batch norm with frozen scale and shift", lambda: net(FrozenAffine(6))),
    Entry(
        "batch_norm_frozen_untracked",
        "the same without running statistics",
        lambda: net(FrozenAffine(6, track_running_stats=False)),
    ),
    Entry("batch_norm_slow", "batch norm of momentum 1e-4", lambda: net(nn.BatchNorm2d(6, momentum=1e-4))),
    Entry("batch_norm_behind_zero", "batch norm in a branch of gain zero", lambda: net(BatchNormBranch())),
    Entry(
        "batch_norm_of_logits",
        "batch norm of the output",
        lambda: nn.Sequential(net(), nn.BatchNorm1d(5, track_running_stats=False)),
    ),
    Entry(
        "batch_norm_functional",
        "batch norm as a function",
        lambda: net(lambda x: F.batch_norm(x, None, None, training=True)),
    ),
    Entry(
        "instance_norm_tracked",
        "instance norm that tracks statistics",
        lambda: net(nn.InstanceNorm2d(6, track_running_stats=True)),
    ),
    Entry(
        "outputs_mixed",
        "mixes a little of the logits",
        lambda: nn.Sequential(net(), Do(lambda y: y - 1e-2 * y.mean(0))),
    ),
]
