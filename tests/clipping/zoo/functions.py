"""Gradients that are not those of the values: custom functions, detached and unrecorded regions, checkpoints."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.clipping.problems import Made
from tests.clipping.zoo.entry import Entry, TokenNet, net


class Reversal(torch.autograd.Function):
    """Gradient reversal (Ganin and Lempitsky)."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad


class RightSquare(torch.autograd.Function):
    """x squared, with the right derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class VmapRuleThatMixes(torch.autograd.Function):
    """Under vmap, and only there, it takes the mean over rows off."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad

    @staticmethod
    def vmap(info, in_dims, x):
        return x - x.mean(in_dims[0], keepdim=True), in_dims[0]


class MixesBackward(torch.autograd.Function):
    """Takes the batch's mean off the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


def binary_weight(self, x):
    """Weights of one sign and size, gradients passed through."""
    weight = self.layer.weight
    return F.conv2d(x, weight + (weight.sign() * weight.abs().mean() - weight).detach(), self.layer.bias)


def checkpointed(*layers, use_reentrant=False):
    return Made(lambda self, x: checkpoint(self.block, x, use_reentrant=use_reentrant), block=nn.Sequential(*layers))


def unrecorded(self, x):
    """A layer between convolutions whose values count and whose gradient does not."""
    with torch.no_grad():
        scale = self.layer(x).sigmoid()
    return x * scale


def unrecorded_weight():
    """The middle layer's weight is used twice, once detached."""
    model = net(nn.Conv2d(6, 6, 1))
    model.middle.register_forward_hook(lambda module, args, output: output + F.conv2d(args[0], module.weight.detach()))
    return model


def scaled_without_record(x):
    with torch.no_grad():
        scale = 1 + x.abs().mean((1, 2, 3), keepdim=True)
    return x / scale


ENTRIES = [
    Entry("reversal", "gradient reversal", lambda: net(Reversal.apply)),
    Entry(
        "straight_through_by_detach",
        "rounding with gradients passed through",
        lambda: net(lambda x: x + (x.round() - x).detach()),
        harmless=True,
    ),
    Entry(
        "binary_weight",
        "binary weights, gradients passed through",
        lambda: net(Made(binary_weight, layer=nn.Conv2d(6, 6, 1))),
        harmless=True,
    ),
    Entry("right_function", "a custom function, rightly derived", lambda: net(RightSquare.apply), harmless=True),
    Entry("mixes_under_vmap", "a rule for vmap that mixes rows", lambda: net(VmapRuleThatMixes.apply)),
    Entry("mixes_backward", "a gradient without the batch's mean", lambda: net(MixesBackward.apply)),
    Entry(
        "no_grad_scale",
        "a scale of data without record",
        lambda: net(Made(unrecorded, layer=nn.Conv2d(6, 6, 1).requires_grad_(False))),
    ),
    Entry("no_grad_mean", "a mean of each image without record", lambda: net(scaled_without_record)),
    Entry(
        "recurrent_over_tokens",
        "a recurrent layer over tokens, which neither torch.func nor a rule can take",
        lambda: TokenNet(Made(lambda self, x: self.layer(x)[0], layer=nn.GRU(8, 8, batch_first=True))),
    ),
    Entry("weight_detached", "a weight used twice, once detached", unrecorded_weight, harmless=True),
    Entry(
        "checkpoint",
        "a checkpointed block",
        lambda: net(checkpointed(nn.Conv2d(6, 6, 1), nn.Tanh(), nn.Conv2d(6, 6, 1))),
        harmless=True,
    ),
]
