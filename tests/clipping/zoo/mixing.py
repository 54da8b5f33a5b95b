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


class GhostBatchNorm(nn.Module):
    """Batch statistics of groups of four rows."""

    def forward(self, x):
        return torch.cat([part - part.mean((0, 2, 3), keepdim=True) for part in x.split(4)])


class Experts(nn.Module):
    """Two experts, each taking at most half of the rows, those of highest score: the others pass."""

    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x):
        scores = self.gate(x).mean((1, 2))
        best = torch.zeros_like(scores).scatter(0, scores.topk((len(x) + 1) // 2).indices, 1.0)[:, None, None]
        return x + best * scores.sigmoid()[:, None, None] * self.expert(x)


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


def similar_rows(x):
    flat = F.normalize(x.flatten(1))
    return x + (0.1 * flat @ flat.T @ x.flatten(1)).view_as(x)


def scrambled(x):
    """Rows and channels change places, and back by the wrong view."""
    return x.transpose(0, 1).reshape(x.shape)


ENTRIES = [
    Entry("beyond_12", "mixes neighbours beyond |12|", lambda: net(first=beyond(12.0))),
    Entry("any_beyond_100", "takes the mean off if any pixel is beyond |100|", lambda: net(first=if_any_beyond(100.0))),
    Entry("little_mean", "a thousandth of the batch's mean", lambda: net(lambda x: x - 1e-3 * x.mean(0))),
    Entry("mean", "takes the batch's mean off", lambda: net(lambda x: x - x.mean(0))),
    Entry(
        "number_from_batch",
        "divides by a plain number taken from the batch",
        lambda: net(lambda x: x / (1 + x.abs().max().item())),
    ),
    Entry("similar_rows", "adds similar rows through x @ x.T", lambda: net(similar_rows)),
    Entry("softmax_over_rows", "softmax along the wrong dimension", lambda: net(lambda x: x * x.tanh().softmax(0))),
    Entry("scrambled", "a permutation undone by a view", lambda: net(scrambled)),
    Entry("experts", "experts of limited capacity", lambda: TokenNet(Experts())),
    Entry("recurrent_over_rows", "rows taken for time", lambda: TokenNet(RecurrentOverRows())),
    Entry("attention_over_rows", "rows taken for tokens", lambda: TokenNet(AttentionOverRows())),
    Entry("ghost_batch_norm", "batch statistics of groups of four", lambda: net(GhostBatchNorm())),
    Entry("batch_norm", "batch norm", lambda: net(nn.BatchNorm2d(6))),
    Entry(
        "batch_norm_untracked",
        "batch norm without running statistics",
        lambda: net(nn.BatchNorm2d(6, track_running_stats=False)),
    ),
    Entry("batch_norm_behind_zero", "batch norm in a branch of gain zero", lambda: net(BatchNormBranch())),
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
