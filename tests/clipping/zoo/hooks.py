"""Hooks of every kind: those that only look must train, those that change values or gradients are refused or right."""

import torch
from torch import nn

from tests.clipping.zoo.entry import Entry, net

# Of global hooks, to be taken away again.
HANDLES: list[torch.utils.hooks.RemovableHandle] = []


def remove_global_hooks():
    while HANDLES:
        HANDLES.pop().remove()


def hooked(register, hook, where="middle", head=None):
    """A network with a hook registered by the named method of one of its modules."""
    model = net(nn.Conv2d(6, 6, 1), head=head)
    getattr(model.get_submodule(where), register)(hook)
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


def zero_head():
    """As fine-tuning begins: nothing before it gets a gradient."""
    head = nn.Linear(96, 5)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def shapes():
    """A list, and a forward hook that writes shapes into it."""
    seen = []
    return lambda module, args, output: seen.append(tuple(output.shape))


def doubles(grad):
    return 2 * grad


def accumulated(change):
    """A hook after a parameter's gradient was accumulated."""

    def hook(parameter):
        if parameter.grad is not None:
            change(parameter)

    return on_parameter("register_post_accumulate_grad_hook", hook)


def nothing(*args):
    """Only looks."""


ENTRIES = [
    Entry(
        "looks_forward",
        "a forward hook that records shapes",
        lambda: hooked("register_forward_hook", shapes()),
        harmless=True,
        graph=True,
    ),
    Entry(
        "looks_backward",
        "a full backward hook that does nothing",
        lambda: hooked("register_full_backward_hook", nothing),
        harmless=True,
        graph=True,
    ),
    Entry(
        "hook_on_frozen",
        "a hook that doubles the gradient of a frozen parameter",
        lambda: on_parameter("register_hook", doubles, frozen=True),
        harmless=True,
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
    Entry(
        "little_parameter",
        "a parameter hook that adds a thousandth",
        lambda: on_parameter("register_hook", lambda grad: 1.001 * grad),
    ),
    Entry(
        "doubles_accumulated",
        "a hook after accumulation that doubles",
        lambda: accumulated(lambda parameter: parameter.grad.mul_(2)),
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
