"""Operations that mix images: openly, in disguise, little, or only for rare values; and rows that depend on their
place, on how many there are, or on whether that number is even.
"""

import torch
from torch import nn
from torch.nn import functional as F

from tests.clipping.problems import Do, Made
from tests.clipping.zoo.entry import Entry, TokenNet, net, places


def tutorial_positions():
    """PyTorch's tutorial adds `pe[: x.size(0)]` to tokens that come first; given rows first, each row gets a code."""
    model = Made(lambda self, x: x + self.pe[: x.size(0)])
    model.register_buffer("pe", torch.sin(torch.arange(64.0)[:, None, None] * torch.arange(1.0, 9)))
    return model


def code_by_row(self, x):
    return x + self.table(torch.arange(x.shape[0]) % 3)[:, :, None, None]


def halves(x):
    parts = x.chunk(2)
    return torch.cat([parts[0], *(3 * part for part in parts[1:])])


def pairs_with_a_code(x):
    """Rows two by two, each of a pair with its own code."""
    padded = F.pad(x.flatten(1), (0, 0, 0, x.shape[0] % 2)).view(-1, 2, x[0].numel())
    return (padded * torch.tensor([1.0, 2.0])[:, None]).view(-1, *x.shape[1:])[: x.shape[0]]


def folded_with_a_code(x):
    """Fails for odd numbers of rows, one included."""
    return (x.view(2, x.shape[0] // 2, -1) + torch.tensor([0.0, 1.0])[:, None, None]).view_as(x)


def shifted_by_one(x):
    return F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:-1] + x


def beyond(limit):
    """Mixes neighbours where a pixel is beyond a limit."""
    return lambda x: x + 0.5 * x.roll(1, 0) * (x.abs() > limit)


def batch_norm_branch():
    norm = nn.BatchNorm2d(6, track_running_stats=False)
    return Made(lambda self, x: x + self.gain * self.norm(x), norm=norm, gain=torch.zeros(()))


def attention_over_rows():
    layer = nn.MultiheadAttention(8, 2)
    return Made(lambda self, x: x + self.layer(x, x, x, need_weights=False)[0], layer=layer)


def scrambled(x):
    """Rows and channels change places, and back by the wrong view."""
    return x.transpose(0, 1).reshape(x.shape)


ENTRIES = [
    Entry("arange", "adds the row's number", lambda: net(lambda x: x + 0.3 * places(x))),
    Entry("tutorial_positions", "positional encoding indexed by row", lambda: TokenNet(tutorial_positions())),
    Entry("table_by_row", "a code by the row's number", lambda: net(Made(code_by_row, table=nn.Embedding(3, 6)))),
    Entry("halves", "the second half three times as large, by chunk", lambda: net(halves)),
    Entry("roll", "every row gets the one before it", lambda: net(lambda x: x + 0.5 * x.roll(1, 0))),
    Entry("pairs", "rows two by two, the second of each doubled", lambda: net(pairs_with_a_code)),
    Entry("folded", "the same by a view that fails for odd numbers of rows", lambda: net(folded_with_a_code)),
    Entry("sorted_rows", "sorts along rows", lambda: net(lambda x: x.sort(dim=0)[0])),
    Entry("one_over_rows", "divides by the number of rows", lambda: net(lambda x: x / x.shape[0])),
    Entry("shifted_by_one", "adds the row before, by padding", lambda: net(shifted_by_one)),
    Entry("beyond_12", "mixes neighbours beyond |12|", lambda: net(first=beyond(12.0))),
    Entry("little_mean", "a thousandth of the batch's mean", lambda: net(lambda x: x - 1e-3 * x.mean(0))),
    Entry("mean", "takes the batch's mean off", lambda: net(lambda x: x - x.mean(0))),
    Entry("number_from_batch", "a plain number of the batch", lambda: net(lambda x: x / (1 + x.abs().max().item()))),
    Entry("softmax_over_rows", "softmax along the wrong dimension", lambda: net(lambda x: x * x.tanh().softmax(0))),
    Entry("scrambled", "a permutation undone by a view", lambda: net(scrambled)),
    Entry(
        "recurrent_over_rows",
        "rows taken for time (batch_first forgotten)",
        lambda: TokenNet(Made(lambda self, x: self.layer(x)[0], layer=nn.GRU(8, 8))),
    ),
    Entry("attention_over_rows", "rows taken for tokens, as above", lambda: TokenNet(attention_over_rows())),
    Entry("batch_norm", "batch norm", lambda: net(nn.BatchNorm2d(6))),
    Entry("batch_norm_untracked", "batch statistics", lambda: net(nn.BatchNorm2d(6, track_running_stats=False))),
    Entry("batch_norm_behind_zero", "batch norm in a branch of gain zero", lambda: net(batch_norm_branch())),
    Entry("instance_norm_tracked", "keeps statistics", lambda: net(nn.InstanceNorm2d(6, track_running_stats=True))),
    Entry("outputs_mixed", "a little of the logits", lambda: nn.Sequential(net(), Do(lambda y: y - 1e-2 * y.mean(0)))),
]
