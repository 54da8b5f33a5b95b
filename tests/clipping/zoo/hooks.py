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


def takes_mean_off(grad):
    return grad - grad.mean(0)


def stateful():
    """A gradient hook that divides by the largest gradient so far."""
    largest = [0.0]

    def divides(grad):
        largest[0] = max(largest[0], grad.abs().max().item())
        return grad / (largest[0] + 1e-6)

    return divides


def once():
    """A forward hook that doubles, and goes at its first call."""
    model = net(nn.Conv2d(6, 6, 1))

    def hook(module, args, output):
        handle.remove()
        return 2 * output

    handle = model.middle.register_forward_hook(hook)
    return model


def rounds_saved():
    """What is kept for the backward pass is rounded to bfloat16."""

    def forward(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.bfloat16(), lambda tensor: tensor.float()):
            return x * x.sigmoid()

    return net(forward)


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
        "looks_before",
        "a forward pre hook that does nothing",
        lambda: hooked("register_forward_pre_hook", nothing),
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
        "looks_before_backward",
        "a full backward pre hook that does nothing",
        lambda: hooked("register_full_backward_pre_hook", nothing),
        harmless=True,
    ),
    Entry(
        "looks_at_parameter",
        "a parameter hook that does nothing",
        lambda: on_parameter("register_hook", nothing),
        harmless=True,
        graph=True,
    ),
    Entry("looks_at_tensor", "a tensor hook that does nothing", lambda: on_tensor(nothing), harmless=True),
    Entry(
        "looks_everywhere",
        "a global forward hook that does nothing",
        lambda: everywhere("register_module_forward_hook", nothing),
        harmless=True,
    ),
    Entry("looks_after_accumulation", "a hook after accumulation that does nothing", lambda: accumulated(nothing)),
    Entry(
        "hook_on_frozen",
        "a hook that doubles the gradient of a frozen parameter",
        lambda: on_parameter("register_hook", doubles, frozen=True),
        harmless=True,
    ),
    Entry(
        "state_dict_hook",
        "a hook of state_dict that does nothing",
        lambda: hooked("register_state_dict_post_hook", nothing),
        harmless=True,
        graph=True,
    ),
    Entry(
        "doubles_input",
        "a forward pre hook that doubles",
        lambda: hooked("register_forward_pre_hook", lambda module, args: (2 * args[0],)),
    ),
    Entry(
        "doubles_output",
        "a forward hook that doubles",
        lambda: hooked("register_forward_hook", lambda module, args, output: 2 * output),
    ),
    Entry(
        "mixes_output",
        "a forward hook that mixes rows",
        lambda: hooked("register_forward_hook", lambda module, args, output: output - output.mean(0)),
    ),
    Entry(
        "doubles_gradient_of_input",
        "a full backward hook that doubles",
        lambda: hooked("register_full_backward_hook", lambda module, grads, of_output: (2 * grads[0],)),
    ),
    Entry(
        "mixes_gradient_of_input",
        "a full backward hook that takes the batch's mean off",
        lambda: hooked("register_full_backward_hook", lambda module, grads, of_output: (takes_mean_off(grads[0]),)),
    ),
    Entry(
        "doubles_gradient_of_output",
        "a full backward pre hook that doubles",
        lambda: hooked("register_full_backward_pre_hook", lambda module, grads: (2 * grads[0],)),
    ),
    Entry(
        "hook_of_the_whole",
        "a full backward pre hook of the model itself that doubles",
        lambda: hooked("register_full_backward_pre_hook", lambda module, grads: (2 * grads[0],), where=""),
    ),
    Entry("doubles_tensor", "a tensor hook that doubles", lambda: on_tensor(doubles)),
    Entry("negates_tensor", "a tensor hook that negates", lambda: on_tensor(lambda grad: -grad)),
    Entry("clips_tensor", "a tensor hook that clips", lambda: on_tensor(lambda grad: grad.clamp(-1e-3, 1e-3))),
    Entry("mixes_tensor", "a tensor hook that takes the batch's mean off", lambda: on_tensor(takes_mean_off)),
    Entry("remembers_tensor", "a tensor hook with state", lambda: on_tensor(stateful())),
    Entry("doubles_parameter", "a parameter hook that doubles", lambda: on_parameter("register_hook", doubles)),
    Entry("negates_parameter", "a parameter hook that negates", lambda: on_parameter("register_hook", torch.neg)),
    Entry(
        "little_parameter",
        "a parameter hook that adds a thousandth",
        lambda: on_parameter("register_hook", lambda grad: 1.001 * grad),
    ),
    Entry(
        "masks_parameter",
        "a parameter hook that keeps half",
        lambda: on_parameter("register_hook", lambda grad: grad * (torch.arange(6) % 2).view(6, 1, 1, 1)),
    ),
    Entry(
        "clips_parameter",
        "a parameter hook that clips",
        lambda: on_parameter("register_hook", lambda grad: grad.clamp(-1e-3, 1e-3)),
    ),
    Entry("remembers_parameter", "a parameter hook with state", lambda: on_parameter("register_hook", stateful())),
    Entry(
        "doubles_accumulated",
        "a hook after accumulation that doubles",
        lambda: accumulated(lambda parameter: parameter.grad.mul_(2)),
    ),
    Entry(
        "clears_accumulated",
        "a hook after accumulation that zeros",
        lambda: accumulated(lambda parameter: parameter.grad.zero_()),
    ),
    Entry(
        "steps_accumulated",
        "a hook after accumulation that takes a step",
        lambda: accumulated(lambda parameter: parameter.data.sub_(parameter.grad)),
    ),
    Entry(
        "zero_head_parameter",
        "a doubled parameter behind zeros",
        lambda: on_parameter("register_hook", doubles, head=zero_head()),
    ),
    Entry(
        "zero_head_backward",
        "a doubled gradient behind zeros",
        lambda: hooked("register_full_backward_pre_hook", lambda module, grads: (2 * grads[0],), head=zero_head()),
    ),
    Entry(
        "doubles_everywhere",
        "a global forward hook",
        lambda: everywhere("register_module_forward_hook", lambda module, args, output: 1.5 * output),
    ),
    Entry(
        "doubles_gradients_everywhere",
        "a global backward hook",
        lambda: everywhere("register_module_full_backward_pre_hook", lambda module, grads: (2 * grads[0],)),
    ),
    Entry("goes_at_first", "a forward hook that doubles once, and goes", once),
    Entry("rounds_saved", "saved tensors rounded to bfloat16", rounds_saved),
]
