"""Hooks of every kind: those that only look must train, those that change values or gradients are refused or right."""

import torch
from torch import nn

from tests.clipping.zoo.entry import Entry, net, zero_head

# Of global hooks, to be taken away again.
HANDLES: list[torch.utils.hooks.RemovableHandle] = []


def remove_global_hooks():
    while HANDLES:
        HANDLES.pop().remove()


def hooked(register, hook):
    """A network with a hook registered by the named method of its middle."""
    model = net(nn.Conv2d(6, 6, 1))
    getattr(model.middle, register)(hook)
    return model


def on_parameter(register, hook, frozen=False, head=None):
    model = net(nn.Conv2d(6, 6, 1), head=head)
    weight = model.middle.weight
    getattr(weight, register)(hook)
    weight.requires_grad_(not frozen)
    return model


def on_tensor(hook):
    """A hook that every forward pass registers at a tensor."""

    def registers(x):
        if x.requires_grad:
            x.register_hook(hook)
        return x

    return net(registers)


def everywhere(register, hook):
    """A hook of all modules there are."""
    remove_global_hooks()
    HANDLES.append(getattr(nn.modules.module, register)(hook))
    return net(nn.Conv2d(6, 6, 1))


def doubles(grad):
    return 2 * grad


def doubles_accumulated(parameter):
    if parameter.grad is not None:
        parameter.grad.mul_(2)


def nothing(*args):
    """Only looks."""


def records():
    seen = []
    return lambda module, args, output: seen.append(tuple(output.shape))


def looks(name, says, factory, graph=True):
    """Must train."""
    return Entry(name, says, factory, harmless=True, graph=graph)


ENTRIES = [
    looks("looks_forward", "a forward hook that records shapes", lambda: hooked("register_forward_hook", records())),
    looks("looks_backward", "a hook that does nothing", lambda: hooked("register_full_backward_hook", nothing)),
    looks(
        "hook_on_frozen",
        "a hook that doubles the gradient of a frozen parameter",
        lambda: on_parameter("register_hook", doubles, frozen=True),
        graph=False,
    ),
    Entry(
        "doubles_output",
        "a forward hook that doubles",
        lambda: hooked("register_forward_hook", lambda module, args, output: 2 * output),
    ),
    Entry(
        "doubles_gradient_of_output",
        "a full backward pre hook that doubles",
        lambda: hooked("register_full_backward_pre_hook", lambda module, grads: (2 * grads[0],)),
    ),
    Entry("doubles_tensor", "a tensor hook that doubles", lambda: on_tensor(doubles)),
    Entry("doubles_parameter", "a parameter hook that doubles", lambda: on_parameter("register_hook", doubles)),
    Entry("little_parameter", "adds a thousandth", lambda: on_parameter("register_hook", lambda grad: 1.001 * grad)),
    Entry(
        "doubles_accumulated",
        "a hook after accumulation that doubles",
        lambda: on_parameter("register_post_accumulate_grad_hook", doubles_accumulated),
    ),
    Entry(
        "zero_head_parameter",
        "a doubled parameter behind zeros",
        lambda: on_parameter("register_hook", doubles, head=zero_head()),
    ),
    Entry(
        "doubles_everywhere",
        "a global forward hook",
        lambda: everywhere("register_module_forward_hook", lambda module, args, output: 1.5 * output),
    ),
]
