"""Models that remember, in parameters, buffers, attributes, closures, globals; that change themselves; not yet made."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.clipping.zoo.entry import Entry, net

GLOBALS: dict[str, torch.Tensor | float] = {}


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


class Records(nn.Module):
    """Keeps the mean of what it saw in a frozen parameter, and does not use it."""

    def __init__(self, shape):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(shape), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.seen.lerp_(x.mean(0), 0.01)
        return x


class Reassigns(nn.Module):
    """A running mean in a buffer that every call replaces by a new tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))
        return x - self.mean.view(-1, 1, 1)


class InList(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.detach().mean())
        return x - sum(self.seen) / len(self.seen)


class Counts(nn.Module):
    """A buffer that counts calls, and is not used."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return x


class ActNorm(nn.Module):
    """Scale and shift set from the first batch (Glow): trainable parameters, frozen ones, or buffers."""

    def __init__(self, kind):
        super().__init__()
        shape = (6, 1, 1)
        if kind == "buffers":
            self.register_buffer("scale", torch.ones(shape))
            self.register_buffer("shift", torch.zeros(shape))
        else:
            self.scale = nn.Parameter(torch.ones(shape), requires_grad=kind == "trainable")
            self.shift = nn.Parameter(torch.zeros(shape), requires_grad=kind == "trainable")
        self.register_buffer("initialised", torch.tensor(False), persistent=kind != "buffers")

    def forward(self, x):
        if not self.initialised:
            with torch.no_grad():
                self.shift.copy_(x.mean((0, 2, 3)).view(-1, 1, 1))
                self.scale.copy_(1 / (1e-3 + x.std((0, 2, 3), correction=0).view(-1, 1, 1)))
                self.initialised.fill_(True)
        return (x - self.shift) * self.scale


class InitialisedByFlag(nn.Module):
    """The same with a plain flag, and without a branch on values."""

    def __init__(self):
        super().__init__()
        self.shift, self.initialised = nn.Parameter(torch.zeros(6, 1, 1)), False

    def forward(self, x):
        if not self.initialised:
            self.shift.data.copy_(x.detach().mean((0, 2, 3)).view(-1, 1, 1))
            self.initialised = True
        return x - self.shift


class Decays(nn.Module):
    """Its weight is a little smaller after each call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(6, 6, 1)

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.mul_(0.999)
        return self.layer(x)


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


class MemoryBank(nn.Module):
    """Attends to features of the batches before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(16, 96), persistent=False)

    def forward(self, x):
        flat = x.flatten(1)
        out = flat + 0.1 * (flat @ self.bank.T).tanh() @ self.bank
        self.bank = torch.cat([self.bank[1:], flat.detach().mean(0, keepdim=True)])
        return out.view_as(x)


class GoesToSleep(nn.Module):
    """Leaves train mode at its first call."""

    def forward(self, x):
        out = 2 * x if self.training else x
        self.eval()
        return out


class Freezes(nn.Module):
    """Freezes its layer at its third call."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Conv2d(6, 6, 1), 0

    def forward(self, x):
        self.calls += 1
        self.layer.requires_grad_(self.calls < 3)
        return self.layer(x)


class TellsMode(nn.Module):
    """Doubles where gradients are recorded, or where the weight asks for one."""

    def __init__(self, by):
        super().__init__()
        self.layer, self.by = nn.Conv2d(6, 6, 1), by

    def forward(self, x):
        recorded = {
            "grad mode": torch.is_grad_enabled(),
            "weight": self.layer.weight.requires_grad,
            "input": x.requires_grad,
        }[self.by]
        return self.layer(x) * (2 if recorded else 1)


class WritesIntoInput(nn.Module):
    """Clamps the images in place."""

    def forward(self, x):
        return x.clamp_(-2, 2)


def spectral(old):
    model = net(nn.Conv2d(6, 6, 1))
    make = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    make(model.middle)
    return model


ENTRIES = [
    Entry("mean_in_parameter", "a running mean in a frozen parameter", lambda: net(Running("parameter"))),
    Entry("mean_in_buffer", "a running mean in a buffer", lambda: net(Running("buffer"))),
    Entry("mean_in_new_buffer", "a running mean in a buffer replaced by each call", lambda: net(Reassigns())),
    Entry("mean_in_attribute", "a running mean in a plain attribute", lambda: net(Running("attribute"))),
    Entry("mean_in_list", "all means in a list", lambda: net(InList())),
    Entry("records_features", "the mean feature kept in a frozen parameter, unused", lambda: net(Records((6, 4, 4)))),
    Entry("counts", "a buffer counts calls", lambda: net(Counts())),
    Entry("act_norm", "trainable scale and shift set by the first batch", lambda: net(ActNorm("trainable"))),
    Entry("act_norm_flag", "a shift set by the first batch, known by a plain flag", lambda: net(InitialisedByFlag())),
    Entry("decays", "a weight times 0.999 at every call", lambda: net(Decays())),
    Entry("codebook", "codes that follow the images", lambda: net(Codebook())),
    Entry("last_batch", "adds the mean of the batch before", lambda: net(LastBatch())),
    Entry("memory_bank", "attends to batches before", lambda: net(MemoryBank())),
    Entry("goes_to_sleep", "leaves train mode at its first call", lambda: net(GoesToSleep())),
    Entry("freezes", "freezes a layer at its third call", lambda: net(Freezes())),
    Entry("tells_grad_mode", "doubles where autograd records", lambda: net(TellsMode("grad mode"))),
    Entry("spectral_norm", "power iterations in buffers", lambda: spectral(False)),
    Entry("lazy", "a lazily made layer", lambda: net(nn.LazyConv2d(6, 1))),
    Entry("writes_into_features", "clamps features in place", lambda: net(WritesIntoInput())),
    Entry("thawed_data", "adds 1 to x.data", lambda: net(lambda x: F.relu(x) + x.data)),
]
