"""What an animal of the zoo is: a small model that somebody could have written, and what is expected of it."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn

from tests.clipping.problems import Do

SHAPE = (3, 8, 8)
"""Of one image."""


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
    """

    name: str
    says: str
    factory: Callable[[], nn.Module]
    harmless: bool = False
    graph: bool = False
    draws: bool = False

    def make(self) -> nn.Module:
        """The model, always with the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.factory().train()


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


def zero_head():
    """As fine-tuning begins: nothing before it gets a gradient."""
    head = nn.Linear(96, 5)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def places(x):
    """(rows, 1, ...): every row's number."""
    return torch.arange(x.shape[0], dtype=x.dtype, device=x.device).reshape(-1, *[1] * (x.ndim - 1))
