"""What tests of clipping share: losses, the loop that is the truth, distances."""

import math

import torch
from torch.nn import functional as F

# With no more than this nothing is measured, so that every run rounds alike.
FIXED = {"memory_format": "contiguous"}


def cross_entropy(outputs, targets):
    """One loss for each row."""
    return F.cross_entropy(outputs, targets, reduction="none")


def by_hand(model, inputs, targets, loss_fn=cross_entropy):
    """The sum of clipped gradients by plain autograd: one image at a time, each of at most norm one. A missing gradient
    is zero.
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    total = {name: torch.zeros_like(value) for name, value in trained.items()}
    for i in range(len(inputs)):
        model.zero_grad()
        loss_fn(model(inputs[i : i + 1]), targets[i : i + 1]).sum().backward()
        grads = {name: value.grad for name, value in trained.items() if value.grad is not None}
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        for name, grad in grads.items():
            total[name] += grad / norm.clamp(min=1.0)
    model.zero_grad()
    return total


def distance(one, other):
    """The L2 distance of two sums, in double precision."""
    return math.sqrt(sum(float((one[name].double() - other[name].double()).square().sum()) for name in one))
