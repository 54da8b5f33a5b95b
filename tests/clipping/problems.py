"""What tests of clipping share: models of a few lines, a loss, Algorithm 1 written out, lengths and distances."""

import math

import torch
from torch import nn
from torch.nn import functional as F

# With no more than this nothing is measured, so that every run rounds alike.
FIXED = {"memory_format": "contiguous"}


class Do(nn.Module):
    """Applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Made(Do):
    """Applies a function of itself and of what it gets; made of layers and, where tensors are given, of parameters."""

    def __init__(self, function, **parts):
        super().__init__(function)
        for name, part in parts.items():
            setattr(self, name, part if type(part) is not torch.Tensor else nn.Parameter(part))

    def forward(self, x):
        return self.function(self, x)


def cross_entropy(outputs, targets):
    """One loss for each row."""
    return F.cross_entropy(outputs, targets, reduction="none")


def gradients(model, inputs, targets, augmult=0, weights=None, loss_fn=cross_entropy):
    """Each example's own, one view at a time, with no engine involved; with weights, these and targets are (B, K)."""
    views = inputs if augmult else inputs[:, None]
    if weights is None:
        targets, weights = targets[:, None].expand(views.shape[:2]), views.new_full(views.shape[:2], 1 / views.shape[1])
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for own in zip(views, targets, weights, strict=True):
        losses = [share * loss_fn(model(v[None]), y[None]).reshape(()) for v, y, share in zip(*own, strict=True)]
        found = torch.autograd.grad(sum(losses), list(trained.values()), materialize_grads=True)
        yield dict(zip(trained, found, strict=True))


def clipped(gradients, clipping_norm, rescale=True):
    """Algorithm 1, written out."""
    terms = []
    for gradient in gradients:
        scale = min(1, clipping_norm / max(norm(gradient), 1e-300)) / (clipping_norm if rescale else 1)
        terms.append({name: scale * value for name, value in gradient.items()})
    return {name: sum(term[name] for term in terms) for name in terms[0]}


def norm(sums):
    """L2 over all parameters, in double precision."""
    return math.sqrt(sum(float(value.double().square().sum()) for value in sums.values()))


def distance(one, other):
    """The L2 distance of two sums, in double precision."""
    assert one.keys() == other.keys()
    return norm({name: value.double() - other[name].double() for name, value in one.items()})
