"""Rows that depend on their place, on how many there are, or on whether that number is even."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.clipping.zoo.entry import Entry, TokenNet, net, places


class TutorialPositions(nn.Module):
    """PyTorch's tutorial adds `pe[: x.size(0)]` to tokens that come first; given rows first, each row gets a code."""

    def __init__(self):
        super().__init__()
        self.register_buffer("pe", torch.sin(torch.arange(64.0)[:, None, None] * torch.arange(1.0, 9)))

    def forward(self, x):
        return x + self.pe[: x.size(0)]


class TableByRow(nn.Module):
    """A trainable code for every third row."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 6)

    def forward(self, x):
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


ENTRIES = [
    Entry("arange", "adds the row's number", lambda: net(lambda x: x + 0.3 * places(x))),
    Entry("tutorial_positions", "positional encoding indexed by row", lambda: TokenNet(TutorialPositions())),
    Entry("table_by_row", "a trainable code by the row's number modulo 3", lambda: net(TableByRow())),
    Entry("halves", "the second half three times as large, by chunk", lambda: net(halves)),
    Entry("roll", "every row gets the one before it", lambda: net(lambda x: x + 0.5 * x.roll(1, 0))),
    Entry("pairs", "rows two by two, the second of each doubled", lambda: net(pairs_with_a_code)),
    Entry("folded", "the same by a view that fails for odd numbers of rows", lambda: net(folded_with_a_code)),
    Entry("sorted_rows", "sorts along rows", lambda: net(lambda x: x.sort(dim=0)[0])),
    Entry("one_over_rows", "divides by the number of rows", lambda: net(lambda x: x / x.shape[0])),
    Entry("shifted_by_one", "adds the row before, by padding", lambda: net(shifted_by_one)),
]
