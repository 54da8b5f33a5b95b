"""What an animal of the zoo is: a small model that somebody could have written, and what is expected of it."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

SHAPE = (3, 8, 8)


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def _cross_entropy():
    return cross_entropy


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        name: Unique.
        says: One line: what it does.
        factory: Makes it anew, with all state that it keeps anywhere (globals included) fresh.
        harmless: It must train with engine "auto", and its gradients are right. Else it is refused, or right.
        graph: It must train with engine "graph", too.
        draws: It draws random numbers, so that calls need a key and the examples' ids.
        loss: Makes its loss anew.
        shape: Of one image.
    """

    name: str
    says: str
    factory: Callable[[], nn.Module]
    harmless: bool = False
    graph: bool = False
    draws: bool = False
    loss: Callable[[], Callable[..., torch.Tensor]] = _cross_entropy
    shape: tuple[int, ...] = SHAPE

    def make(self) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        """The model, always with the same weights, and its loss."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.factory().train(), self.loss()


class Do(nn.Module):
    """Applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def net(middle=None, first=None, head=None):
    """A convolution (rows, 6, 4, 4), what is in the middle, and a linear layer; `first` sees the images.

    Smooth, so that float32 suffices.
    """
    return nn.Sequential(
        OrderedDict(
            first=_module(first),
            stem=nn.Conv2d(3, 6, 3, stride=2, padding=1),
            act=nn.SiLU(),
            middle=_module(middle),
            flat=nn.Flatten(),
            head=head or nn.Linear(96, 5),
        )
    )


def _module(part):
    if part is None:
        return nn.Identity()
    return part if isinstance(part, nn.Module) else Do(part)


class TokenNet(nn.Module):
    """Four tokens of eight values (rows, 4, 8), what is in the middle, their mean and a linear layer."""

    def __init__(self, middle):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, stride=4)
        self.middle = _module(middle)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2).tanh()
        return self.head(self.middle(tokens).mean(1))


def places(x):
    """(rows, 1, ...): every row's number."""
    return torch.arange(x.shape[0], dtype=x.dtype, device=x.device).reshape(-1, *[1] * (x.ndim - 1))
