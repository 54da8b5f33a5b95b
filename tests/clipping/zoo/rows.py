"""Rows that depend on their place, on how many there are, or on whether that number is even."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.clipping.zoo.entry import Do, Entry, TokenNet, net, places


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


def flips_every_second(x):
    x = x.clone()
    x[1::2] = x[1::2].flip(-1)
    return x


def doubles_every_second(x):
    return x * (1 + places(x) % 2)


def halves(x):
    parts = x.chunk(2)
    return torch.cat([parts[0], *(3 * part for part in parts[1:])])


def by_slices(x):
    half = (x.shape[0] + 1) // 2
    return torch.cat([x[:half], -x[half:]])


def by_narrow(x):
    rest = x.shape[0] - 1
    return torch.cat([2 * x.narrow(0, 0, 1), x.narrow(0, 1, rest)])


def by_split(x):
    return torch.cat([part * (number + 1) for number, part in enumerate(x.split(2))])


def by_index_select(x):
    odd = torch.arange(1, x.shape[0], 2)
    return x.index_add(0, odd, x.index_select(0, odd))


def by_boolean_mask(x):
    first = torch.arange(x.shape[0]) < 1
    x = x.clone()
    x[first] = 2 * x[first]
    return x


def by_where(x):
    return torch.where(places(x) < x.shape[0] / 2, x, 2 * x)


def counted_by_ones(x):
    return x + 0.3 * torch.ones(x.shape[0], 1, 1, 1).cumsum(0)


def pairs_with_a_code(x):
    """Rows two by two, each of a pair with its own code."""
    padded = F.pad(x.flatten(1), (0, 0, 0, x.shape[0] % 2)).view(-1, 2, x[0].numel())
    return (padded * torch.tensor([1.0, 2.0])[:, None]).view(-1, *x.shape[1:])[: x.shape[0]]


def folded_with_a_code(x):
    """Fails for odd numbers of rows, one included."""
    return (x.view(2, x.shape[0] // 2, -1) + torch.tensor([0.0, 1.0])[:, None, None]).view_as(x)


def by_enumerate(x):
    return torch.stack([row * (1 + number) for number, row in enumerate(x)])


def by_index(x):
    return torch.stack([x[i] + 0.5 * i for i in range(len(x))])


def by_zip(x):
    return torch.stack([row * scale for row, scale in zip(x, torch.linspace(1, 2, 64), strict=False)])


def first_in_place(x):
    x = x.clone()
    x[0] *= 3
    return x


def nonzero_places(x):
    return x + 0.2 * torch.ones(x.shape[0]).nonzero()[:, :, None, None]


def shifted_by_one(x):
    return F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:-1] + x


def scaled_by_unique_place(x):
    return x * (1 + torch.ones(x.shape[0]).cumsum(0).flip(0)).reshape(-1, 1, 1, 1)


def rotated_by_place(x):
    return torch.stack([row.roll(i, -1) for i, row in enumerate(x.unbind(0))])


ENTRIES = [
    Entry("arange", "adds the row's number", lambda: net(lambda x: x + 0.3 * places(x))),
    Entry("arange_little", "adds a thousandth of the row's number", lambda: net(lambda x: x * (1 + 1e-3 * places(x)))),
    Entry("arange_of_images", "scales images by the row's number", lambda: net(first=lambda x: x * (1 + places(x)))),
    Entry(
        "arange_of_outputs",
        "multiplies logits by the row's number",
        lambda: nn.Sequential(net(), Do(lambda y: y * (1 + places(y)))),
    ),
    Entry("tutorial_positions", "positional encoding indexed by row", lambda: TokenNet(TutorialPositions())),
    Entry("table_by_row", "a trainable code by the row's number modulo 3", lambda: net(TableByRow())),
    Entry("flips_every_second", "flips every second row", lambda: net(flips_every_second)),
    Entry("flips_every_second_image", "flips every second image", lambda: net(first=flips_every_second)),
    Entry("doubles_every_second", "doubles every second row", lambda: net(doubles_every_second)),
    Entry("halves", "the second half three times as large, by chunk", lambda: net(halves)),
    Entry("slices", "the second half negated, by slices", lambda: net(by_slices)),
    Entry("narrow", "the first row doubled, by narrow", lambda: net(by_narrow)),
    Entry("split", "pairs of rows scaled by their number, by split", lambda: net(by_split)),
    Entry("index_select", "every second row doubled, by index_select and index_add", lambda: net(by_index_select)),
    Entry("boolean_mask", "the first row doubled, by a boolean mask", lambda: net(by_boolean_mask)),
    Entry("where", "the second half doubled, by where", lambda: net(by_where)),
    Entry("roll", "every row gets the one before it", lambda: net(lambda x: x + 0.5 * x.roll(1, 0))),
    Entry("roll_of_places", "a rolled code of the row's number", lambda: net(lambda x: x + 0.3 * places(x).roll(1, 0))),
    Entry("flip_of_places", "a code counted from the end", lambda: net(lambda x: x + 0.3 * places(x).flip(0))),
    Entry("flip_along_rows", "rows in reverse order", lambda: net(lambda x: x.flip(0))),
    Entry("counted_by_ones", "numbers rows by a cumulated sum of ones", lambda: net(counted_by_ones)),
    Entry("counted_from_the_end", "numbers rows by a cumulated sum, reversed", lambda: net(scaled_by_unique_place)),
    Entry("nonzero_places", "numbers rows by nonzero of ones", lambda: net(nonzero_places)),
    Entry("pairs", "rows two by two, the second of each doubled", lambda: net(pairs_with_a_code)),
    Entry("folded", "the same by a view that fails for odd numbers of rows", lambda: net(folded_with_a_code)),
    Entry(
        "sorted_places",
        "a sorted code of the rows' numbers",
        lambda: net(lambda x: x + 0.3 * (-places(x)).sort(dim=0)[0]),
    ),
    Entry("sorted_rows", "sorts along rows", lambda: net(lambda x: x.sort(dim=0)[0])),
    Entry(
        "linspace",
        "a code from 0 to 1 over the batch",
        lambda: net(lambda x: x * (1 + torch.linspace(0, 1, x.shape[0]).view(-1, 1, 1, 1))),
    ),
    Entry("one_over_rows", "divides by the number of rows", lambda: net(lambda x: x / x.shape[0])),
    Entry(
        "times_rows",
        "multiplies logits by the number of rows",
        lambda: nn.Sequential(net(), Do(lambda y: y * y.shape[0])),
    ),
    Entry(
        "rows_counted_by_ones",
        "divides by a sum of ones over rows",
        lambda: net(lambda x: x / torch.ones_like(x).sum(0)),
    ),
    Entry("parity", "negates where the number of rows is even", lambda: net(lambda x: x * (2 * (x.shape[0] % 2) - 1))),
    Entry(
        "more_than_four",
        "negates where there are more than four rows",
        lambda: net(lambda x: -x if x.shape[0] > 4 else x),
    ),
    Entry("more_than_four_by_clamp", "no branch", lambda: net(lambda x: x * (1 + max(x.shape[0] - 4, 0)))),
    Entry("more_than_one", "doubles from two rows on", lambda: net(lambda x: 2 * x if len(x) > 1 else x)),
    Entry("enumerate", "a loop over rows with their numbers", lambda: net(by_enumerate)),
    Entry("loop_by_index", "a loop over rows by index", lambda: net(by_index)),
    Entry("zip", "a loop over rows and a table", lambda: net(by_zip)),
    Entry("rotated_by_place", "row i shifted by i pixels", lambda: net(first=rotated_by_place)),
    Entry("first_in_place", "the first row tripled in place", lambda: net(first_in_place)),
    Entry("shifted_by_one", "adds the row before, by padding", lambda: net(shifted_by_one)),
    Entry(
        "triangle",
        "adds all rows before, by a triangular matrix",
        lambda: net(lambda x: (torch.ones(len(x), len(x)).tril() @ x.flatten(1)).view_as(x)),
    ),
]
