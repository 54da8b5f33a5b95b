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


class ReplacesData(Records):
    """The same by another tensor in the parameter's place: after a call under torch.func it is a dead one."""

    def forward(self, x):
        self.seen.data = 0.99 * self.seen.data + 0.01 * x.detach().mean(0)
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


class ChangesAtCall(nn.Module):
    """Negates from the n-th call on."""

    def __init__(self, number):
        super().__init__()
        self.number, self.calls = number, 0

    def forward(self, x):
        self.calls += 1
        return -x if self.calls >= self.number else x


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


class Learns(nn.Module):
    """Takes gradient steps of its own: a weight moves towards what comes through."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(6, 6, 1)

    def forward(self, x):
        out = self.layer(x)
        self.layer.bias.data.sub_(1e-3 * out.detach().mean((0, 2, 3)))
        return out


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


class Caches(nn.Module):
    """Remembers the output of the first batch of each size and gives it again."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, x):
        shift = self.cache.setdefault(tuple(x.shape), x.detach().mean())
        return x - shift


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


class ReadsGradients(nn.Module):
    """Looks at what stands in `.grad`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(6, 6, 1)

    def forward(self, x):
        grad = self.layer.weight.grad
        return self.layer(x) * (1.0 if grad is None else 1 + grad.mean())


class ClearsGradients(ReadsGradients):
    """Sets `.grad` to None in its forward pass."""

    def forward(self, x):
        self.layer.weight.grad = None
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


class MadeAtFirst(nn.Module):
    """Makes its layer at the first call."""

    layer = None

    def forward(self, x):
        if self.layer is None:
            self.layer = nn.Conv2d(x.shape[1], 6, 1)
        return self.layer(x)


class WritesIntoInput(nn.Module):
    """Clamps the images in place."""

    def forward(self, x):
        return x.clamp_(-2, 2)


def closure():
    mean = torch.zeros(6, 1, 1)

    def takes_mean_off(x):
        mean.lerp_(x.detach().mean((0, 2, 3)).view(-1, 1, 1), 0.1)
        return x - mean

    return net(takes_mean_off)


def in_global():
    GLOBALS["mean"] = torch.zeros(())

    def takes_mean_off(x):
        GLOBALS["mean"] = 0.9 * GLOBALS["mean"] + 0.1 * x.detach().mean()
        return x - GLOBALS["mean"]

    return net(takes_mean_off)


def counted_globally():
    GLOBALS["calls"] = 0

    def grows(x):
        GLOBALS["calls"] += 1
        return x * (1 + 0.01 * GLOBALS["calls"])

    return net(grows)


def spectral(old):
    model = net(nn.Conv2d(6, 6, 1))
    make = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    make(model.middle)
    return model


ENTRIES = [
    Entry("mean_in_parameter", "a running mean in a frozen parameter", lambda: net(Running("parameter"))),
    Entry("mean_in_parameter_slow", "the same with momentum 1e-4", lambda: net(Running("parameter", 1e-4))),
    Entry("mean_in_buffer", "a running mean in a buffer", lambda: net(Running("buffer"))),
    Entry("mean_in_buffer_slow", "the same with momentum 1e-4", lambda: net(Running("buffer", 1e-4))),
    Entry("mean_in_hidden_buffer", "a running mean in a buffer that is not saved", lambda: net(Running("hidden"))),
    Entry("mean_in_new_buffer", "a running mean in a buffer replaced by each call", lambda: net(Reassigns())),
    Entry("mean_in_attribute", "a running mean in a plain attribute", lambda: net(Running("attribute"))),
    Entry("mean_in_attribute_slow", "the same with momentum 1e-4", lambda: net(Running("attribute", 1e-4))),
    Entry("mean_in_closure", "a running mean in a closure", closure),
    Entry("mean_in_global", "a running mean in a global", in_global),
    Entry("mean_in_list", "all means in a list", lambda: net(InList())),
    Entry("records_features", "the mean feature kept in a frozen parameter, unused", lambda: net(Records((6, 4, 4)))),
    Entry("records_images", "the mean image kept in a frozen parameter, unused", lambda: net(first=Records((3, 8, 8)))),
    Entry("replaces_data", "the same by assignment to `.data`", lambda: net(ReplacesData((6, 4, 4))), apart=True),
    Entry("counts", "a buffer counts calls", lambda: net(Counts())),
    Entry("counts_globally", "a global counts calls and scales", counted_globally),
    Entry("second_call", "negates from the second call on", lambda: net(ChangesAtCall(2))),
    Entry("tenth_call", "negates from the tenth call on", lambda: net(ChangesAtCall(10))),
    Entry("act_norm", "trainable scale and shift set by the first batch", lambda: net(ActNorm("trainable"))),
    Entry("act_norm_frozen", "frozen scale and shift set by the first batch", lambda: net(ActNorm("frozen"))),
    Entry("act_norm_buffers", "buffers set by the first batch", lambda: net(ActNorm("buffers"))),
    Entry("act_norm_flag", "a shift set by the first batch, known by a plain flag", lambda: net(InitialisedByFlag())),
    Entry("decays", "a weight times 0.999 at every call", lambda: net(Decays())),
    Entry("learns", "a bias that moves at every call", lambda: net(Learns())),
    Entry("codebook", "codes that follow the images", lambda: net(Codebook())),
    Entry("last_batch", "adds the mean of the batch before", lambda: net(LastBatch())),
    Entry("memory_bank", "attends to batches before", lambda: net(MemoryBank())),
    Entry("caches", "remembers the first batch of each shape", lambda: net(Caches())),
    Entry("goes_to_sleep", "leaves train mode at its first call", lambda: net(GoesToSleep())),
    Entry("freezes", "freezes a layer at its third call", lambda: net(Freezes())),
    Entry("reads_gradients", "scales by what stands in .grad", lambda: net(ReadsGradients())),
    Entry("clears_gradients", "sets .grad to None", lambda: net(ClearsGradients())),
    Entry("tells_grad_mode", "doubles where autograd records", lambda: net(TellsMode("grad mode"))),
    Entry("tells_trainable", "doubles where its weight requires a gradient", lambda: net(TellsMode("weight"))),
    Entry("tells_input", "doubles where its input requires a gradient", lambda: net(TellsMode("input"))),
    Entry(
        "tells_images",
        "doubles images that require a gradient",
        lambda: net(first=lambda x: x * (2 if x.requires_grad else 1)),
    ),
    Entry("spectral_norm", "power iterations in buffers", lambda: spectral(False)),
    Entry("spectral_norm_by_hook", "power iterations by a forward pre hook", lambda: spectral(True)),
    Entry("made_at_first", "a layer made at the first call", lambda: net(MadeAtFirst())),
    Entry("lazy", "a lazily made layer", lambda: net(nn.LazyConv2d(6, 1))),
    Entry("writes_into_images", "clamps images in place", lambda: net(first=WritesIntoInput())),
    Entry("writes_into_features", "clamps features in place", lambda: net(WritesIntoInput())),
    Entry(
        "gives_its_input",
        "returns a view of its input, which its head changes in place",
        lambda: net(first=lambda x: x.view_as(x).mul_(2)),
    ),
    Entry("thawed_data", "adds 1 to x.data", lambda: net(lambda x: F.relu(x) + x.data)),
]
