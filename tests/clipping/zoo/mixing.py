"""Operations that mix images: openly, in disguise, little, or only for rare values."""

import torch
from torch import nn

from tests.clipping.zoo.entry import Do, Entry, TokenNet, net


def beyond(limit):
    """Mixes neighbours where a pixel is beyond a limit."""
    return lambda x: x + 0.5 * x.roll(1, 0) * (x.abs() > limit)


class BatchNormBranch(nn.Module):
    """A branch of batch statistics that begins at zero."""

    def __init__(self):
        super().__init__()
        self.norm, self.gain = nn.BatchNorm2d(6, track_running_stats=False), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gain * self.norm(x)


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


def scrambled(x):
    """Rows and channels change places, and back by the wrong view."""
    return x.transpose(0, 1).reshape(x.shape)


ENTRIES = [
    Entry("beyond_12", "mixes neighbours beyond |12|", lambda: net(first=beyond(12.0))),
    Entry("little_mean", "a thousandth of the batch's mean", lambda: net(lambda x: x - 1e-3 * x.mean(0))),
    Entry("mean", "takes the batch's mean off", lambda: net(lambda x: x - x.mean(0))),
    Entry(
        "number_from_batch",
        "divides by a plain number taken from the batch",
        lambda: net(lambda x: x / (1 + x.abs().max().item())),
    ),
    Entry("softmax_over_rows", "softmax along the wrong dimension", lambda: net(lambda x: x * x.tanh().softmax(0))),
    Entry("scrambled", "a permutation undone by a view", lambda: net(scrambled)),
    Entry("recurrent_over_rows", "rows taken for time", lambda: TokenNet(RecurrentOverRows())),
    Entry("attention_over_rows", "rows taken for tokens", lambda: TokenNet(AttentionOverRows())),
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
