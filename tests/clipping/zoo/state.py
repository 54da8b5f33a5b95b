"""Models that remember, in parameters, buffers, attributes, closures, globals; that change themselves; not yet made."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from tests.clipping.problems import Made
from tests.clipping.zoo.entry import Entry, net


class Running(nn.Module):
    """Takes a running mean off, kept in a buffer, a frozen parameter or a plain attribute."""

    def __init__(self, where, momentum=0.1):
        super().__init__()
        mean = torch.zeros(6)
        if where == "parameter":
            self.mean = nn.Parameter(mean, requires_grad=False)
        elif where == "attribute":
            self.mean = mean
        else:
            self.register_buffer("mean", mean, persistent=where == "buffer")
        self.momentum = momentum

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 2, 3)), self.momentum)
        return x - self.mean.view(-1, 1, 1)


class Reassigns(Running):
    """Every call replaces the buffer by a new tensor."""

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))
        return x - self.mean.view(-1, 1, 1)


def records(self, x):
    """Keeps the mean of what it saw in a frozen parameter, and does not use it."""
    with torch.no_grad():
        self.seen.lerp_(x.mean(0), 0.01)
    return x


def initialised_by_flag(self, x):
    if not self.initialised:
        self.shift.data.copy_(x.detach().mean((0, 2, 3)).view(-1, 1, 1))
        self.initialised = True
    return x - self.shift


class Codebook(nn.Module):
    """Rounds to the nearest of eight codes, which follow the images (VQ-VAE)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(8, 6))

    def forward(self, x):
        flat = x.movedim(1, -1).reshape(-1, 6)
        nearest = torch.cdist(flat.detach(), self.codes).argmin(1)
        with torch.no_grad():
            self.codes.index_add_(0, nearest, 1e-3 * (flat - self.codes[nearest]))
        rounded = self.codes[nearest].reshape(x.movedim(1, -1).shape).movedim(-1, 1)
        return x + (rounded - x).detach()


class LastBatch(nn.Module):
    """Adds the mean of the batch before, kept in an attribute."""

    last = None

    def forward(self, x):
        last, self.last = self.last, x.detach().mean(0)
        return x if last is None else x + 0.1 * last


ENTRIES = [
    Entry("mean_in_parameter", "a running mean in a frozen parameter", lambda: net(Running("parameter"))),
    Entry("mean_in_buffer", "a running mean in a buffer", lambda: net(Running("buffer"))),
    Entry("mean_in_new_buffer", "a running mean in a buffer replaced by each call", lambda: net(Reassigns("buffer"))),
    Entry("mean_in_attribute", "a running mean in a plain attribute", lambda: net(Running("attribute"))),
    Entry(
        "records_features",
        "the mean feature kept in a frozen parameter, unused",
        lambda: net(Made(records, seen=nn.Parameter(torch.zeros(6, 4, 4), requires_grad=False))),
    ),
    Entry(
        "act_norm_flag",
        "a shift set by the first batch, known by a plain flag",
        lambda: net(Made(initialised_by_flag, shift=torch.zeros(6, 1, 1), initialised=False)),
    ),
    Entry("codebook", "codes that follow the images", lambda: net(Codebook())),
    Entry("last_batch", "adds the mean of the batch before", lambda: net(LastBatch())),
    Entry("spectral_norm", "power iterations in buffers", lambda: net(spectral_norm(nn.Conv2d(6, 6, 1)))),
    Entry("lazy", "a lazily made layer", lambda: net(nn.LazyConv2d(6, 1))),
    Entry("thawed_data", "adds 1 to x.data", lambda: net(lambda x: F.relu(x) + x.data)),
]
